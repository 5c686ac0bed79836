"""The configuration of a run: the options in the conf folder, the keys of a run, and the check of all values."""
