"""Aggregation rules: how the server combines the clients' uploads into one (option `aggregator`)."""
