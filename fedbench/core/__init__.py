"""What every other wing stands on: options, errors, keyed randomness, linear algebra, files, digests, locks."""
