"""Commands beside runs: a client's model taken out (export), distances between sets of pictures (fid)."""
