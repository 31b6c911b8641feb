"""Families of vision-language models: how each one turns images into tokens, arguments, positions and masks."""

from torchrl_rloo.images.families.base import Family
from torchrl_rloo.images.families.table import FAMILIES, is_family

__all__ = ["FAMILIES", "Family", "is_family"]
