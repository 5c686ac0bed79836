"""Tasks: the loss that a model minimizes, and the metrics of its outputs.  One file for each kind of targets."""
