"""Partitions of a data set over clients.  One file for each, named by ``_target_`` in conf/partition."""
