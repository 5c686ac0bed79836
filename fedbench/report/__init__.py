"""Runs to tables and figures, beside the papers' numbers: ``python -m fedbench report --help``.

runs.py reads run directories, scores.py computes what is said of one run, summary.py averages over seeds,
table.py writes a table as text, Markdown or CSV, figures.py draws, paper.py sets printed tables beside ours.
"""
