"""Families by the model type of a configuration."""

from typing import Any

from torchrl_rloo.images.families.base import Family
from torchrl_rloo.images.families.gemma3 import Gemma3
from torchrl_rloo.images.families.idefics3 import Idefics3
from torchrl_rloo.images.families.llava_next import LlavaNext
from torchrl_rloo.images.families.qwen_vl import QwenVL

FAMILIES: dict[str, type[Family]] = {
    "qwen2_vl": QwenVL,
    "qwen2_5_vl": QwenVL,
    "qwen3_vl": QwenVL,
    "idefics3": Idefics3,
    "smolvlm": Idefics3,
    "llava_next": LlavaNext,
    "gemma3": Gemma3,
}


def is_family(config: Any) -> bool:
    """Return whether a configuration is that of a vision-language model of one of the families."""
    return config.model_type in FAMILIES and getattr(config, "vision_config", None) is not None
