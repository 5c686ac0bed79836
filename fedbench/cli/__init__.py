"""The command line: from words to a checked configuration, to runs in folders."""
