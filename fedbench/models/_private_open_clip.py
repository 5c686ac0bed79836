"""Names of open_clip that it keeps private: all that fedbench uses stand here, and nowhere else.

They are methods of open_clip's VisionTransformer; tests/models/test_private_open_clip.py looks for them in the version
that is installed.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

NAMES = ("open_clip.transformer.VisionTransformer._embeds", "open_clip.transformer.VisionTransformer._pool")


def pooled_and_tokens(visual: Any, images: Tensor) -> tuple[Tensor, Tensor]:
    """What a ViT makes of images [n, 3, H, W]: the pooled token [n, width] and the patch tokens [n, M, width]."""
    return visual._pool(visual.transformer(visual._embeds(images)))
