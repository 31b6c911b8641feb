r"""Arithmetic that a small model can solve only with a tool, the ``calculator`` task.

::

    user       What is 47*38?
    assistant  <tool>47*38</tool>
    tool       1786
    assistant  \boxed{1786}

A correct conversation has two turns of at most 10 tokens each.
"""

from __future__ import annotations

import hashlib
import operator
import random
from typing import Any, Literal

Messages = list[dict[str, str]]

SYSTEM_PROMPT = "Call the tool, then put the answer in \\boxed{}."
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}

P_GUESS = 0.6  # probability that the answer is invented without a call
P_WRONG_OPERATOR = 0.2  # probability per call
P_OMIT_BOX = 0.6  # probability per answer that is not invented


def calculator_prompts(
    split: Literal["train", "test"], *, size: int | None = None, seed: int = 0
) -> list[dict[str, Any]]:
    """Return the rows of the calculator task, each problem once.

    The problems are all of ``a+b``, ``a-b`` and ``a*b`` with ``10 <= a, b <= 99``. A hash holds out about 10 % of them
    for ``"test"``. It does not depend on ``seed``, so the splits never overlap. Problems that differ only in the order
    of ``a`` and ``b`` are always in the same split.

    Args:
        split: ``"train"`` or ``"test"``.
        size: number of rows to keep after shuffling. None keeps all.
        seed: seed of the order.

    Returns:
        Rows ``{"query": [system message, user message], "answer": "1786"}``.

    Raises:
        ValueError: if ``split`` is unknown, or ``size`` is not between 1 and the number of problems in the split.

    Example:
        >>> row = calculator_prompts("test", size=1)[0]
        >>> row["query"][1]["role"], sorted(row)
        ('user', ['answer', 'query'])
    """
    problems = _problems(split)
    if size is not None and not 1 <= size <= len(problems):
        raise ValueError(f"size={size} must be None or between 1 and {len(problems)} for split={split!r}")
    random.Random(seed).shuffle(problems)
    return [{"query": _query(*problem), "answer": _answer(*problem)} for problem in problems[:size]]


def calculator_demonstrations(n: int, seed: int, *, clean: bool = False) -> list[Messages]:
    """Return conversations of a teacher about training problems, drawn with replacement.

    The teacher is sloppy: it invents an answer with probability ``P_GUESS``. Otherwise it calls the tool, with a wrong
    operator with probability ``P_WRONG_OPERATOR``, and omits the box with probability ``P_OMIT_BOX``.

    Args:
        n: number of conversations.
        seed: seed of problems and errors.
        clean: True for a teacher without errors.

    Returns:
        ``n`` conversations of a system and a user message, and one or two turns of the assistant.
    """
    rng = random.Random(seed)
    problems = rng.choices(_problems("train"), k=n)
    return [[*_query(*problem), *_solve(*problem, None if clean else rng)] for problem in problems]


def _problems(split: str) -> list[tuple[int, str, int]]:
    if split not in ("train", "test"):
        raise ValueError(f"split={split!r} must be 'train' or 'test'")
    numbers = range(10, 100)
    held_out = {(a, op, b) for op in OPERATORS for a in numbers for b in range(a, 100) if _is_held_out(f"{a}{op}{b}")}
    return [
        (a, op, b)
        for op in OPERATORS
        for a in numbers
        for b in numbers
        if ((min(a, b), op, max(a, b)) in held_out) == (split == "test")
    ]


def _is_held_out(problem: str) -> bool:
    return hashlib.sha256(problem.encode()).digest()[0] < 26  # 26 of 256: about 10 %


def _query(a: int, op: str, b: int) -> Messages:
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": f"What is {a}{op}{b}?"}]


def _answer(a: int, op: str, b: int) -> str:
    return str(OPERATORS[op](a, b))


def _solve(a: int, op: str, b: int, rng: random.Random | None) -> Messages:
    """Write the messages after the question, with errors drawn from ``rng`` unless it is None."""
    if rng and rng.random() < P_GUESS:
        return [{"role": "assistant", "content": f"\\boxed{{{rng.randint(10, 9999)}}}"}]
    if rng and rng.random() < P_WRONG_OPERATOR:
        op = rng.choice([other for other in OPERATORS if other != op])
    answer = _answer(a, op, b)
    boxed = not (rng and rng.random() < P_OMIT_BOX)
    return [
        {"role": "assistant", "content": f"<tool>{a}{op}{b}</tool>"},
        {"role": "tool", "content": answer},
        {"role": "assistant", "content": f"\\boxed{{{answer}}}" if boxed else f"The answer is {answer}"},
    ]
