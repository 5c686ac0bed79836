"""The channel between server and clients: broadcast, upload, aggregation, privacy, compression, and their cost."""
