"""Tables and figures of run folders, and comparisons with papers: ``python -m fedbench report --help``.

runs.py reads run folders, scores.py computes the scores of one run, and summary.py averages them over seeds.  table.py
writes tables, figures.py draws figures, compare.py compares methods, and paper.py compares printed tables with runs.
"""
