"""Models: one file each, an nn.Module named by the ``_target_`` of conf/model."""
