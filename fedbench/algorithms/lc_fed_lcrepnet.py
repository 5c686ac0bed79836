"""LC-Fed with the head calibration of the released lcrepnet.py, the network of its first training script.

Wang et al., ECCV 2022.  As lc_fed, but for every class
    U = the standard deviation over clients of sigmoid(head_j(z)),
    A(a) = max(minmax(K * a), a),  K a trained 31 x 31 kernel, initialized to a Gaussian,
and V is a 1x1 convolution.
Departs from the released code: as lc_fed, but there, too, HC and PCS train in the same rounds.  The released HC calls A
with two arguments although A takes one; here A multiplies the features, as in multi_lcnet.py.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedbench.algorithms.lc_fed import KERNEL, LCFed

DEVIATIONS = 4  # standard deviations from the center to the edge of the initial K
EPSILON = 1e-8  # added to the range in minmax, so a constant image becomes 0


class LCFedLCRepNet(LCFed):
    """LC-Fed with the head calibration (HC) of lcrepnet.py, which reads where the clients' heads disagree.

    Options and state are those of LCFed; hc includes K.
    """

    def hc_layers(self, classes: int, features: int) -> nn.Module:
        """Return the layers of HC, which correct the head's logits.

        Args:
            classes: Number of classes C.
            features: Number F of channels that the head reads.

        Returns:
            {"kernel": K, "out": V}: K is a 31x31 Gaussian of sum 1, and V a 1x1 convolution from 2 C F channels to C.
            The channels are the features times two attention maps of each class.
        """
        # a kernel of KERNEL pixels that covers DEVIATIONS = 4 standard deviations on each side:
        # integrals of the normal density over KERNEL bins; the formula of the outer edge is that of the released code
        edge = DEVIATIONS + (DEVIATIONS + 0.5) / KERNEL
        edges = torch.linspace(-edge, edge, KERNEL + 1, dtype=torch.float64)
        bell = torch.special.ndtr(edges).diff().sqrt()  # square root of the normal probability of each bin  [KERNEL]
        kernel, bell_2d = nn.Conv2d(1, 1, KERNEL, bias=False), bell[:, None] * bell
        kernel.weight.data.copy_(bell_2d / bell_2d.sum())
        return nn.ModuleDict({"kernel": kernel, "out": nn.Conv2d(2 * classes * features, classes, 1)})

    def uncertainty(self, outputs: Tensor, client: Tensor) -> Tensor:
        """Return U, the sample standard deviation of the outputs over the heads; 0 for a single head.

        Args:
            outputs: sigmoid(head_j(z)) of all N heads j.  # [N, B, C, H, W]
            client: One-hot index of the client; unused.  # [N]

        Returns:
            U for each class.  # [B, C, H, W]
        """
        return outputs.std(0) if len(outputs) > 1 else torch.zeros_like(outputs[0])

    def attention(self, a: Tensor, row: dict[str, Tensor]) -> Tensor:
        """Return A(a) = max(minmax(K * a), a).  minmax scales the pixels of each image to [0, 1].

        Args:
            a: Maps of all classes.  # [B, C, H, W]
            row: The client's parameters by name, with the trained K as "hc.kernel.weight".

        Returns:
            The attention.  # [B, C, H, W]
        """
        kernel = row["hc.kernel.weight"]
        smooth = F.conv2d(a.flatten(0, 1)[:, None], kernel, padding=KERNEL // 2)[:, 0].unflatten(0, a.shape[:2])
        low, high = smooth.amin((-1, -2), keepdim=True), smooth.amax((-1, -2), keepdim=True)
        return torch.maximum((smooth - low) / (high - low + EPSILON), a)  # EPSILON: a constant image becomes 0
