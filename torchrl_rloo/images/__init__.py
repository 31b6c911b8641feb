"""Images of conversations: their store; how models read them is in :mod:`torchrl_rloo.images.encoder`."""

from torchrl_rloo.images.store import ImageError, ImageStore

__all__ = ["ImageError", "ImageStore"]
