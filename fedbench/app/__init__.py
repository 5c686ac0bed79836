"""The command line on Hydra: from words to a composed configuration, to runs in folders."""
