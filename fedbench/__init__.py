"""fedbench: federated and personalized federated learning experiments, every client a row of a matrix."""

from fedbench.core import moved

__version__ = "0.1.0"
moved.install()
