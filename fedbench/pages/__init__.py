"""Pages of results, generated from the files that hold their numbers: ``python -m fedbench pages --help``.

page.py reads and writes a page's files and groups runs over seeds, collect.py makes them from run folders, template.py
fills page.md, figures.py draws what page.json asks for, build.py writes or checks README.md.
"""
