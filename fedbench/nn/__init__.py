"""Models whose parameters are rows, and their forward and backward passes for several clients at once."""
