"""GSM8K: grade-school word problems (Cobbe et al. 2021, arXiv 2110.14168)."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from torchrl_rloo.envs.tasks.base import Task
from torchrl_rloo.rewards.matching import NumericMatch, find_number, number_form

_STORIES = (
    "{name} has {a} apples and buys {b} more. How many apples does {name} have now?",
    "{name} read {a} pages on Monday and {b} on Tuesday. How many pages did {name} read?",
    "A bus carries {a} people and {b} more get on with {name}. How many people besides {name} are on the bus?",
)
_NAMES = ("Ann", "Ben", "Carla", "Dan", "Eve", "Finn")


def convert_row(example: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a row to a prompt and an answer: the number after ``####``, without thousands separators.

    Raises:
        ValueError: if the answer has no ``####``.

    Example:
        >>> convert_row({"question": "1000+1?", "answer": "It is 1000+1=<<1000+1=1001>>1,001.\\n#### 1,001"})
        {'prompt': '1000+1?', 'answer': '1001'}
    """
    solution, marker, answer = example["answer"].rpartition("####")
    if not marker:
        raise ValueError(f"the answer must have '####' before its number, got {example['answer'][-100:]!r}")
    return {"prompt": example["question"], "answer": answer.strip().replace(",", "")}


def synthetic_rows(split: str, size: int | None = None, seed: int = 0) -> list[dict[str, Any]]:
    """Generate word problems on sums, in GSM8K's columns; see :class:`Task`."""
    rng = random.Random(f"{seed} {split}")
    rows = []
    for _ in range(size or 512):
        # The first number is even in training and odd in the test, so that the splits share no problem
        a, b = 2 * rng.randrange(5, 50) + (split == "test"), rng.randrange(2, 50)
        story = rng.choice(_STORIES).format(name=rng.choice(_NAMES), a=a, b=b)
        rows.append({"question": story, "answer": f"{a} + {b} = <<{a}+{b}={a + b}>>{a + b}.\n#### {a + b}"})
    return rows


_SEARCH_PLACES = NumericMatch().where


def extract_answer(text: str) -> str | None:
    r"""Return the number that a completion answers, found as the reward finds it, so that equal numbers are one vote.

    Returns:
        The number as a string, or None if there is none.

    Example:
        >>> [extract_answer(text) for text in ("So it is $1,072.", r"\boxed{1072.0}", "72, I think.", "No idea.")]
        ['1072', '1072', '72', None]
    """
    return number_form(find_number(text, _SEARCH_PLACES))


GSM8K = Task(
    name="gsm8k",
    synthetic_rows=synthetic_rows,
    row_map=convert_row,
    rewards=("numeric_match",),
    scorer="numeric_match",
    dataset={"source": "openai/gsm8k", "name": "main", "split": "train"},
    eval_split="test",
    system_prompt="Think step by step, then put the final number in \\boxed{}.",
    extract_answer=extract_answer,
)
