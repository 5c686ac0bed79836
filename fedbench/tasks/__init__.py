"""What a data set asks of a model: the loss, and the scores that are made of its outputs."""
