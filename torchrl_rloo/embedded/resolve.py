"""What the name ``embedded`` stands for where a model or a dataset is asked for."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torchrl_rloo.data.prompts import PromptDataset, load_prompts, split_prompts
from torchrl_rloo.embedded.addition import addition_prompts
from torchrl_rloo.embedded.warm_start import warm_start

EMBEDDED = "embedded"


def resolve_model(name: str | os.PathLike, seed: int, log: Callable[[str], None] | None = None) -> str | os.PathLike:
    """The directory of the embedded model's warm start for ``"embedded"``, built on first use; other names as they are.

    Args:
        name: a hub id, a local directory, or ``"embedded"``.
        seed: of the embedded model and its warm start.
        log: called with lines of progress.
    """
    return warm_start(seed, log=log) if name == EMBEDDED else name


def resolve_prompts(
    source: Any, *, eval_source: Any = None, eval_size: int = 256, seed: int = 0, tokenizer=None, **kwargs: Any
) -> tuple[PromptDataset, PromptDataset]:
    """Training and held-out prompts.

    Args:
        source: ``"embedded"`` for the addition task, or what :func:`load_prompts` takes.
        eval_source: held-out prompts; None splits them off ``source``.
        eval_size: number of held-out prompts.
        seed: of the split.
        tokenizer: see :func:`load_prompts`.
        **kwargs: see :func:`load_prompts`.
    """
    options = {"tokenizer": tokenizer, **kwargs}
    if source == EMBEDDED:
        held_out = addition_prompts("test", size=eval_size)
        return load_prompts(addition_prompts("train"), **options), load_prompts(held_out, **options)
    if eval_source is not None:
        return load_prompts(source, **options), load_prompts(eval_source, **options, limit=eval_size)
    return split_prompts(load_prompts(source, **options), eval_size, seed)
