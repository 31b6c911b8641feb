"""Countdown: reach a target number with given numbers (Jiayi-Pan/Countdown-Tasks-3to4, the task of TinyZero)."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from torchrl_rloo.envs.tasks.base import Task

_PROMPT = (
    "Using the numbers {numbers}, make an expression that equals {target}. You may use + - * / and parentheses, and "
    "must use each number exactly once. Think first, then give the expression in <answer> </answer> tags, as in "
    "<answer>(1 + 2) * 3</answer>."
)


def convert_row(example: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a row to one with a prompt in words.

    Example:
        >>> convert_row({"target": 24, "nums": [3, 3, 5]})["prompt"][:64]
        'Using the numbers 3, 3, 5, make an expression that equals 24. Yo'
    """
    numbers, target = [int(n) for n in example["nums"]], int(example["target"])
    prompt = _PROMPT.format(numbers=", ".join(map(str, numbers)), target=target)
    return {"prompt": prompt, "nums": numbers, "target": target}


def synthetic_rows(split: str, size: int | None = None, seed: int = 0) -> list[dict[str, Any]]:
    """Generate rows of three numbers and a target that some expression of them reaches; see :class:`Task`."""
    rng = random.Random(f"{seed} {split}")
    rows = []
    while len(rows) < (size or 512):
        a, b, c = rng.randrange(1, 20), rng.randrange(1, 20), rng.randrange(1, 10)
        target = rng.choice((a + b + c, a + b - c, (a + b) * c, a * b - c, a - b + c))
        # Only test targets end in 0, so that the splits share no prompt
        if target > 0 and (target % 10 == 0) == (split == "test"):
            numbers = [a, b, c]
            rng.shuffle(numbers)
            rows.append({"target": target, "nums": numbers})
    return rows


COUNTDOWN = Task(
    name="countdown",
    synthetic_rows=synthetic_rows,
    row_map=convert_row,
    rewards=({"_target_": "countdown", "format_score": 0.1},),
    scorer="countdown",
    dataset={"source": "Jiayi-Pan/Countdown-Tasks-3to4", "split": "train"},
)
