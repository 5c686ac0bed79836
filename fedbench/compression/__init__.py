"""What becomes of the numbers of a message: one file for each option of conf/compression (docs/compression.md)."""
