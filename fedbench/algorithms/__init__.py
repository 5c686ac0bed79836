"""Methods: one file each, a subclass of ``Algorithm`` named by the ``_target_`` of conf/algorithm."""
