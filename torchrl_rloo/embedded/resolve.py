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
    source: Any,
    *,
    eval_source: Any = None,
    eval_split: str | None = None,
    eval_size: int = 256,
    seed: int = 0,
    tokenizer=None,
    **kwargs: Any,
) -> tuple[PromptDataset, PromptDataset]:
    """Training and held-out prompts, none of them in both.

    Args:
        source: ``"embedded"`` for the addition task, or what :func:`load_prompts` takes.
        eval_source: held-out prompts, in the same format; None splits them off ``source``.
        eval_split: split of ``eval_source``; None takes the same as of ``source``.
        eval_size: number of held-out prompts.
        seed: of the split.
        tokenizer: see :func:`load_prompts`.
        **kwargs: see :func:`load_prompts`.

    Raises:
        ValueError: if a held-out prompt is a training prompt, or the embedded task is given an ``eval_source``.
    """
    options = {"tokenizer": tokenizer, **kwargs}
    if source == EMBEDDED:
        if eval_source is not None or eval_split is not None:
            raise ValueError(f"source={EMBEDDED!r} has its own held-out prompts: leave eval_source and eval_split null")
        held_out = addition_prompts("test", size=eval_size)
        return load_prompts(addition_prompts("train"), **options), load_prompts(held_out, **options)
    if eval_source is None:
        if eval_split is not None:
            raise ValueError(f"eval_split={eval_split!r} is a split of eval_source, which is null: set eval_source")
        return split_prompts(load_prompts(source, **options), eval_size, seed)
    eval_options = options | {"limit": eval_size} | ({"split": eval_split} if eval_split else {})
    train, held_out = load_prompts(source, **options), load_prompts(eval_source, **eval_options)
    seen = {str(row["query"]) for row in train}
    if shared := sum(str(row["query"]) in seen for row in held_out):
        raise ValueError(
            f"{shared} of the {len(held_out)} held-out prompts of eval_source are training prompts: set eval_split, "
            "give other prompts, or leave eval_source null to split some off"
        )
    return train, held_out
