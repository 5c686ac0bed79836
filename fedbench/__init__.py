"""fedbench: federated and personalized federated learning experiments, every client a row of a matrix."""

__version__ = "0.1.0"
