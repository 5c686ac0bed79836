"""Models: one file for each, with an nn.Module that ``_target_`` in conf/model names."""
