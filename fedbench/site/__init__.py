"""The site: static HTML from docs/, results/, the methods' headers and YAML files, and docstrings of the public API.

links.py rewrites links of Markdown, methods.py and api.py collect facts from source, pages.py lists all pages, build.py
writes and checks them.  Plain Jinja and markdown-it-py: no theme whose fonts and scripts would have to be kept offline.
"""
