"""Families of vision-language models: how each one turns images into tokens, arguments, positions and masks."""

from torchrl_rloo.images.families.table import FAMILIES

__all__ = ["FAMILIES"]
