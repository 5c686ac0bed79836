"""Pages of results, generated from the files that hold their numbers: ``python -m fedbench pages --help``.

store.py reads and writes a page's files, collect.py makes them from run folders, groups.py averages over seeds,
tables.py and figures.py show what page.json asks for, places.py fills page.md, build.py writes or checks README.md.
"""
