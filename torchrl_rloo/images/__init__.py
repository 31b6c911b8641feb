"""Images of conversations: their store, and how vision-language models read them."""

from torchrl_rloo.images.encoder import ImageEncoder, ImageSpan, encoder_of
from torchrl_rloo.images.store import ImageError, ImageStore, digest_of

__all__ = ["ImageEncoder", "ImageError", "ImageSpan", "ImageStore", "digest_of", "encoder_of"]
