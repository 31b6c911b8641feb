"""Images of prompts: a store addressed by content."""

from __future__ import annotations

from torchrl_rloo.images.store import ImageError, ImageStore, digest_of

__all__ = ["ImageError", "ImageStore", "digest_of"]
