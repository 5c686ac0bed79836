"""Pictures for training only, drawn from diffusion models of each client's own training part."""
