"""Mathematics with verifiable answers: MATH (Hendrycks et al. 2021), DeepMath (He et al. 2025) and similar datasets."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from torchrl_rloo.envs.tasks.base import Task
from torchrl_rloo.rewards.matching import last_boxed
from torchrl_rloo.rewards.process_judge import shared_judge

_PROBLEMS = ("problem", "question", "prompt")
_ANSWERS = ("final_answer", "answer", "solution")
_WORDS = ("True", "False", "Yes", "No")  # DeepMath has these answers without dollar signs


def convert_row(example: Mapping[str, Any]) -> dict[str, Any]:
    r"""Convert a row to a prompt and an answer; the answer of a worked solution is the content of its last box.

    Yes, no, true and false become ``\text{...}``, since math-verify cannot parse plain words.

    Raises:
        ValueError: if the row has no problem or no answer.

    Example:
        >>> convert_row({"problem": "1+1?", "level": "Level 1", "solution": "It is $1+1=\\boxed{2}$."})
        {'prompt': '1+1?', 'solution': '2'}
    """
    problem = next((example[name] for name in _PROBLEMS if name in example), None)
    answer = next((example[name] for name in _ANSWERS if name in example), None)
    if problem is None or answer is None:
        raise ValueError(f"a row must have one of {_PROBLEMS} and one of {_ANSWERS}")
    answer = str(answer).strip()
    boxed = last_boxed(answer.replace(r"\fbox", r"\boxed"))
    if boxed == "":
        raise ValueError(
            f"the box must hold an answer, got {answer[-100:]!r}; remove the row, or set drop_bad_rows=True"
        )
    return {"prompt": problem, "solution": rf"\text{{{answer}}}" if answer in _WORDS else boxed or answer}


def extract_answer(text: str) -> str | None:
    r"""Return the canonical form of a completion's answer, as the reward compares it: equal answers are one vote.

    Formulas are equal where their values are. The name in ``x=5`` does not count, except in lines such as ``y=5``.

    Returns:
        The form, or None if the completion has no answer.
    """
    return shared_judge().form(text)


def synthetic_rows(split: str, size: int | None = None, seed: int = 0) -> list[dict[str, Any]]:
    """Generate linear equations, sums of fractions and powers, in MATH's columns; see :class:`Task`."""
    rng = random.Random(f"{seed} {split}")
    parity = int(split == "test")  # of the first number, so that the splits share no problem
    rows = []
    for i in range(size or 512):
        a, b, c = 2 * rng.randrange(1, 40) + parity, rng.randrange(2, 20), rng.randrange(1, 30)
        kinds = (
            (f"Solve ${b}x + {a} = {a + b * c}$ for $x$.", str(c), "Algebra"),
            (rf"What is $\frac{{1}}{{{a}}} + \frac{{1}}{{{b}}}$?", rf"\frac{{{a + b}}}{{{a * b}}}", "Prealgebra"),
            (f"What is ${a}^2 - {b}$?", str(a * a - b), "Prealgebra"),
        )
        problem, answer, kind = kinds[i % len(kinds)]
        solution = rf"The answer is $\boxed{{{answer}}}$."
        rows.append({"problem": problem, "level": "Level 1", "type": kind, "solution": solution})
    return rows


MATH = Task(
    name="math",
    synthetic_rows=synthetic_rows,
    row_map=convert_row,
    rewards=("accuracy",),
    scorer="accuracy",
    dataset={"source": "trl-lib/DeepMath-103K", "split": "train"},
    system_prompt="Think step by step, then put the final answer in \\boxed{}.",
    extract_answer=extract_answer,
)
