r"""Two-digit addition with a written chain of thought, the ``addition`` task.

::

    user       What is 47+38?
    assistant  <think>7+8=15 4+3+1=8</think>\boxed{85}

The chain of thought adds columns from the right, each with the carry of the previous one. The answer goes in a box. A
correct completion takes at most 25 tokens, including the end-of-turn token.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any, Literal

Messages = list[dict[str, str]]

SYSTEM_PROMPT = "Think, then put the answer in \\boxed{}."

P_FORGET_CARRY = 0.7  # probability per carry into a column
P_SLIP = 0.05  # probability per column that its sum is off by one
P_OMIT_BOX = 0.6  # probability per answer


def addition_prompts(
    split: Literal["train", "test"], *, size: int | None = None, seed: int = 0
) -> list[dict[str, Any]]:
    """Return the rows of the addition task, each problem once.

    The problems are all sums ``a+b`` with ``0 <= a, b <= 99``. A hash holds out about 10 % of them for ``"test"``. It
    does not depend on ``seed``, so the splits never overlap, and ``a+b`` and ``b+a`` are always in the same split.

    Args:
        split: ``"train"`` or ``"test"``.
        size: number of rows to keep after shuffling. None keeps all.
        seed: seed of the order.

    Returns:
        Rows ``{"query": [system message, user message], "answer": "85"}``.

    Raises:
        ValueError: if ``split`` is unknown, or ``size`` is not between 1 and the number of problems in the split.

    Example:
        >>> row = addition_prompts("test", size=1)[0]
        >>> row["query"][1]["role"], sorted(row)
        ('user', ['answer', 'query'])
    """
    problems = _problems(split)
    if size is not None and not 1 <= size <= len(problems):
        raise ValueError(f"size={size} must be None or between 1 and {len(problems)} for split={split!r}")
    random.Random(seed).shuffle(problems)
    return [{"query": _query(a, b), "answer": str(a + b)} for a, b in problems[:size]]


def addition_demonstrations(n: int, seed: int, *, clean: bool = False) -> list[Messages]:
    """Return conversations of a teacher about training problems, drawn with replacement.

    The teacher is sloppy: it forgets a carry with probability ``P_FORGET_CARRY``, is off by one in a column with
    probability ``P_SLIP`` and omits the box with probability ``P_OMIT_BOX``. A model that imitates it can solve the
    task but rarely does, so reinforcement learning has something to improve.

    Args:
        n: number of conversations.
        seed: seed of problems and errors.
        clean: True for a teacher without errors.

    Returns:
        ``n`` conversations of a system, a user and an assistant message.

    Example:
        >>> [message["role"] for message in addition_demonstrations(1, seed=0)[0]]
        ['system', 'user', 'assistant']
    """
    rng = random.Random(seed)
    problems = rng.choices(_problems("train"), k=n)
    return [
        [*_query(a, b), {"role": "assistant", "content": _solve(a, b, None if clean else rng)}] for a, b in problems
    ]


def addition_preferences(n: int = 8192, *, seed: int = 1) -> list[dict[str, Messages]]:
    """Return pairs of conversations on the same problem, a clean teacher's as chosen and a sloppy one's as rejected.

    Args:
        n: number of problems; those on which the teachers agree give no pair.
        seed: seed of problems and errors.

    Returns:
        At most ``n`` pairs ``{"chosen": messages, "rejected": messages}``.
    """
    teachers = (addition_demonstrations(n, seed=seed, clean=clean) for clean in (True, False))
    return [{"chosen": good, "rejected": bad} for good, bad in zip(*teachers, strict=True) if good != bad]


def _problems(split: str) -> list[tuple[int, int]]:
    if split not in ("train", "test"):
        raise ValueError(f"split={split!r} must be 'train' or 'test'")
    return [(a, b) for a in range(100) for b in range(100) if _is_held_out(a, b) == (split == "test")]


def _is_held_out(a: int, b: int) -> bool:
    digest = hashlib.sha256(f"{min(a, b)}+{max(a, b)}".encode()).digest()
    return digest[0] < 26  # 26 of 256: about 10 %


def _query(a: int, b: int) -> Messages:
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": f"What is {a}+{b}?"}]


def _solve(a: int, b: int, rng: random.Random | None) -> str:
    """Write the assistant's text, with errors drawn from ``rng`` unless it is None."""
    steps, answer, carry = [], 0, 0
    columns = max(len(str(a)), len(str(b)))
    for i in range(columns):
        x, y = a // 10**i % 10, b // 10**i % 10
        if rng and carry and rng.random() < P_FORGET_CARRY:
            carry = 0
        total = x + y + carry
        if rng and rng.random() < P_SLIP:
            total = max(0, total + rng.choice((-1, 1)))
        steps.append(f"{x}+{y}+{carry}={total}" if i else f"{x}+{y}={total}")
        carry = total // 10
        answer += total % 10 * 10**i
    answer += carry * 10**columns
    boxed = not (rng and rng.random() < P_OMIT_BOX)
    return f"<think>{' '.join(steps)}</think>" + (f"\\boxed{{{answer}}}" if boxed else f"The answer is {answer}")
