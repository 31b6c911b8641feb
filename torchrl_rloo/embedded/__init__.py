"""The embedded default: tokenizer, model, task and warm start of a real RLOO run on CPU cores, without a download."""

from torchrl_rloo.embedded.addition import addition_prompts, demonstrations
from torchrl_rloo.embedded.model import build_model
from torchrl_rloo.embedded.resolve import ADDITION, resolve_model, resolve_task
from torchrl_rloo.embedded.tokenizer import build_tokenizer
from torchrl_rloo.embedded.warm_start import warm_start

__all__ = [
    "ADDITION",
    "addition_prompts",
    "build_model",
    "build_tokenizer",
    "demonstrations",
    "resolve_model",
    "resolve_task",
    "warm_start",
]
