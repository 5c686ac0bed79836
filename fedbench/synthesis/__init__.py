"""Synthesis of training images by diffusion models, and measures of the synthesized images."""
