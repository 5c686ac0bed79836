"""Pages of results, generated from data files: ``python -m fedbench pages --help``.

collect.py writes the data files of a page from run folders, and page.py reads them.  template.py fills page.md,
figures.py draws the figures of page.json, and build.py writes or checks README.md.
"""
