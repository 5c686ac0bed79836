"""The engine: cohorts of clients, their data, local training, gradients, optimizers, executors and processes."""
