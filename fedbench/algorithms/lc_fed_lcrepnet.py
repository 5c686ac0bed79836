"""LC-Fed with the head calibration of the released lcrepnet.py, the network of its first training script.

Wang et al., ECCV 2022.  As lc_fed, but for every class
    U = the standard deviation over clients of sigmoid(head_j(z)),
    A(a) = max(minmax(K * a), a),  K a kernel of 31 x 31 that learns, a Gaussian at first,
and V is a convolution of single pixels.
Departs from the released code: as lc_fed, but HC learns in the same rounds there as well, and so does PCS.  Its HC
calls A with two arguments where A takes one; here A multiplies the features, as in multi_lcnet.py.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedbench.algorithms.lc_fed import KERNEL, LCFed

DEVIATIONS = 4  # standard deviations that K covers to each side
NARROW = 1e-8  # makes minmax of a constant image 0


class LCFedLCRepNet(LCFed):
    """LC-Fed with the head calibration of lcrepnet.py.  Options and state are those of LCFed, with K in hc."""

    def hc_layers(self, classes: int, features: int) -> nn.Module:
        """Return K, a Gaussian at first whose entries sum to 1, and V: 2 classes features -> classes."""
        edge = DEVIATIONS + (DEVIATIONS + 0.5) / KERNEL
        edges = torch.linspace(-edge, edge, KERNEL + 1, dtype=torch.float64)
        bell = torch.special.ndtr(edges).diff().sqrt()
        kernel, bell = nn.Conv2d(1, 1, KERNEL, bias=False), bell[:, None] * bell
        kernel.weight.data.copy_(bell / bell.sum())
        return nn.ModuleDict({"kernel": kernel, "out": nn.Conv2d(2 * classes * features, classes, 1)})

    def uncertainty(self, outputs: Tensor, client: Tensor) -> Tensor:
        """Return the standard deviation (n - 1) over all heads' outputs [N, B, C, H, W]; 0 for one.  # [B, C, H, W]"""
        return outputs.std(0) if len(outputs) > 1 else torch.zeros_like(outputs[0])

    def attention(self, a: Tensor, row: dict[str, Tensor]) -> Tensor:
        """Return max(minmax(K * a), a) for a [B, C, H, W], with minmax over the pixels of each image."""
        kernel = row["hc.kernel.weight"]
        smooth = F.conv2d(a.flatten(0, 1)[:, None], kernel, padding=KERNEL // 2)[:, 0].unflatten(0, a.shape[:2])
        low, high = smooth.amin((-1, -2), keepdim=True), smooth.amax((-1, -2), keepdim=True)
        return torch.maximum((smooth - low) / (high - low + NARROW), a)
