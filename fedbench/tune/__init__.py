"""``python -m fedbench tune``: give several methods the same number of trials, and compare them at their best values.

space.py reads what may be tried, search.py proposes trials and stops bad ones early, and command.py runs them.
"""
