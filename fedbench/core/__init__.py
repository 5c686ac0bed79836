"""Basics that all other packages use: options, errors, keyed randomness, linear algebra, files, digests, locks."""
