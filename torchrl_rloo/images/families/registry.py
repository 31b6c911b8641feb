"""FAMILIES: the known families of vision-language models, by the model type of their configuration."""

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
