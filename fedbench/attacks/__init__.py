"""Attacks of some clients on a run: on what they upload, or on the samples that they train on."""
