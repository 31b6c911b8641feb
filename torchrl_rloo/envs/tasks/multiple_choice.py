"""Multiple choice: MMLU (Hendrycks et al. 2020), ARC (Clark et al. 2018) and datasets in either format."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from torchrl_rloo.envs.tasks.base import Task
from torchrl_rloo.rewards.choices import MultipleChoice

LETTERS = "ABCDEFGHIJ"
_PLANETS = ("Mercury", "Venus", "Earth", "Mars", "Jupiter", "Saturn", "Uranus", "Neptune")


def convert_row(example: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a row to a prompt with lettered choices, and the letter of the right one.

    MMLU has a list of ``choices`` and an index as ``answer``. ARC has a mapping of ``text`` and ``label``, and
    ``answerKey``.

    Raises:
        ValueError: for fewer than 2 or more than 10 choices, or an answer that is not among them.

    Example:
        >>> convert_row({"question": "2+2?", "choices": ["3", "4"], "answer": 1})
        {'prompt': '2+2?\\nA. 3\\nB. 4', 'answer': 'B'}
    """
    choices, answer = example["choices"], example.get("answer", example.get("answerKey"))
    labels = list(LETTERS)
    if isinstance(choices, Mapping):
        labels, choices = list(choices["label"]), choices["text"]
    index = answer if isinstance(answer, int) else (labels if answer in labels else list(LETTERS)).index(answer)
    if not 2 <= len(choices) <= len(LETTERS) or not 0 <= index < len(choices):
        raise ValueError(
            f"answer={answer!r} must be one of {len(choices)} choices, of which there must be 2 to {len(LETTERS)}"
        )
    lines = [f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=False)]
    return {"prompt": "\n".join([example["question"], *lines]), "answer": LETTERS[index]}


def synthetic_rows(split: str, size: int | None = None, seed: int = 0) -> list[dict[str, Any]]:
    """Generate questions on the order of planets and of numbers, in MMLU's columns; see :class:`Task`."""
    rng = random.Random(f"{seed} {split}")
    rows = []
    for i in range(size or 512):
        # Training asks for the largest, the test for the smallest, so that the splits share no prompt
        if i % 2:
            choices = [str(n) for n in rng.sample(range(10, 1000), 4)]
            order, subject = [int(c) for c in choices], "elementary_mathematics"
            question = f"Which of the numbers {', '.join(choices)} is the {{}}?".format(_END[split][0])
        else:
            choices = rng.sample(_PLANETS, 4)
            order, subject = [_PLANETS.index(c) for c in choices], "astronomy"
            question = f"Which of {', '.join(choices)} is the {{}} the Sun?".format(_END[split][1])
        answer = order.index(_END[split][2](order))
        rows.append({"question": question, "subject": subject, "choices": choices, "answer": answer})
    return rows


_END = {"train": ("largest", "farthest from", max), "test": ("smallest", "closest to", min)}

MULTIPLE_CHOICE = Task(
    name="multiple_choice",
    synthetic_rows=synthetic_rows,
    row_map=convert_row,
    rewards=("multiple_choice",),
    scorer="multiple_choice",
    dataset={"source": "cais/mmlu", "name": "all", "split": "auxiliary_train"},
    eval_split="test",
    system_prompt="Think, then put the letter of the right choice in \\boxed{}.",
    extract_answer=MultipleChoice().find_choice,
)
