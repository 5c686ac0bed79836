"""Former import path of the reader of BraTS 2017, for one release."""

from fedbench.data.scans.brats17 import BraTS17

__all__ = ["BraTS17"]
