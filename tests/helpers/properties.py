"""How properties are tried: the same examples in every run, however long each takes, and nothing kept on disk."""

from hypothesis import settings

the_same_every_time = settings(derandomize=True, deadline=None, database=None, max_examples=40)
