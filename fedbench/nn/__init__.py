"""Modules on rows: a model as one row of numbers, and its forward and backward pass for many clients at once."""
