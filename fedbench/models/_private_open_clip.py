"""The private names of open_clip that fedbench uses; other files must not use any.

They are methods of open_clip's VisionTransformer.  tests/models/test_private_open_clip.py checks that they exist.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

NAMES = ("open_clip.transformer.VisionTransformer._embeds", "open_clip.transformer.VisionTransformer._pool")


def pooled_and_tokens(visual: Any, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs of a vision transformer for images.

    Args:
        visual: open_clip's VisionTransformer.
        images: Images, [n, 3, H, W].

    Returns:
        The pooled token [n, width] and the patch tokens [n, M, width].
    """
    return visual._pool(visual.transformer(visual._embeds(images)))
