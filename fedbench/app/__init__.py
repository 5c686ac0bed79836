"""The command line on Hydra: from arguments to a composed configuration, to runs in folders."""
