"""hydra/sweeper=planned: Hydra's basic sweeper, which does not compose anew what is known to compose."""
