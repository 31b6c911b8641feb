"""Mathematics with answers to be checked: MATH (Hendrycks et al. 2021), DeepMath (He et al. 2025) and the like."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from torchrl_rloo.envs.tasks.base import Task
from torchrl_rloo.rewards.boxed import last_boxed

_PROBLEMS = ("problem", "question", "prompt")
_ANSWERS = ("final_answer", "answer", "solution")


def row(example: Mapping[str, Any]) -> dict[str, Any]:
    r"""A row with the problem and the answer: that in the last box where the dataset has worked solutions.

    >>> row({"problem": "1+1?", "level": "Level 1", "solution": "It is $1+1=\\boxed{2}$."})
    {'prompt': '1+1?', 'solution': '2'}
    """
    problem = next((example[name] for name in _PROBLEMS if name in example), None)
    answer = next((example[name] for name in _ANSWERS if name in example), None)
    if problem is None or answer is None:
        raise ValueError(f"a row needs one of {_PROBLEMS} and one of {_ANSWERS}")
    boxed = last_boxed(str(answer))
    return {"prompt": problem, "solution": str(answer) if boxed is None else boxed}


def stand_in(split: str, size: int | None = None, seed: int = 0) -> list[dict[str, Any]]:
    """Linear equations, sums of fractions and powers, in MATH's columns."""
    rng = random.Random(f"{seed} {split}")
    parity = int(split == "test")  # that of the first number keeps the splits apart
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
    stand_in=stand_in,
    row_map=row,
    rewards=("accuracy",),
    scorer="accuracy",
    dataset={"source": "trl-lib/DeepMath-103K", "split": "train"},
    system_prompt="Think step by step, then put the final answer in \\boxed{}.",
    extract_answer=last_boxed,
)
