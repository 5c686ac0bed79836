"""A run's configuration: the conf folder's options, the keys of a run, and the check of every value."""
