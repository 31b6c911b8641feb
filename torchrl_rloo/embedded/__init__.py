"""Embedded tokenizer, model, tasks and warm starts, for an RLOO run on CPU cores without a download."""

from torchrl_rloo.embedded.addition import addition_demonstrations, addition_preferences, addition_prompts
from torchrl_rloo.embedded.model import build_model
from torchrl_rloo.embedded.resolve import resolve_model, resolve_task
from torchrl_rloo.embedded.shapes import shapes_prompts
from torchrl_rloo.embedded.tokenizer import build_tokenizer
from torchrl_rloo.embedded.warm_start import warm_start

__all__ = [
    "addition_demonstrations",
    "addition_preferences",
    "addition_prompts",
    "build_model",
    "build_tokenizer",
    "resolve_model",
    "resolve_task",
    "shapes_prompts",
    "warm_start",
]
