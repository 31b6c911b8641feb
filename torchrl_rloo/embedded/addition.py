r"""The ``add`` task: two-digit addition with a written chain of thought.

    user       What is 47+38?
    assistant  <think>7+8=15 4+3+1=8</think>\boxed{85}

Columns are added from the right, each with the carry of the one before; the answer goes in a box. A right answer takes
at most 25 tokens, end of turn included.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any, Literal

Messages = list[dict[str, str]]

SYSTEM_PROMPT = "Think, then put the answer in \\boxed{}."

FORGETS_CARRY = 0.7  # chance per carry into a column
SLIPS = 0.05  # chance per column that its sum is off by one
LEAVES_OUT_BOX = 0.6  # chance per answer


def addition_prompts(
    split: Literal["train", "test"], *, size: int | None = None, seed: int = 0
) -> list[dict[str, Any]]:
    """Rows of the addition task, each problem once.

    All sums ``a+b`` with ``0 <= a, b <= 99`` exist. About 10 % are held out for ``"test"`` by a hash that does not
    depend on ``seed``, so the splits never overlap; ``a+b`` and ``b+a`` are always in the same split.

    Args:
        split: ``"train"`` or ``"test"``.
        size: number of rows to keep after shuffling; None keeps all.
        seed: seed of the order.

    Returns:
        Rows ``{"query": [system message, user message], "answer": "85"}``.

    Raises:
        ValueError: if ``split`` is unknown or ``size`` is not between 1 and the number of problems in the split.

    Example:
        >>> row = addition_prompts("test", size=1)[0]
        >>> row["query"][1]["role"], sorted(row)
        ('user', ['answer', 'query'])
    """
    problems = _problems(split)
    if size is not None and not 1 <= size <= len(problems):
        raise ValueError(f"size must be None or between 1 and {len(problems)} for split {split!r}, got {size}")
    random.Random(seed).shuffle(problems)
    return [{"query": _query(a, b), "answer": str(a + b)} for a, b in problems[:size]]


def demonstrations(n: int, seed: int, *, clean: bool = False) -> list[Messages]:
    """Conversations about training problems, drawn with replacement, as a teacher writes them.

    The teacher is sloppy: it forgets a carry with chance ``FORGETS_CARRY``, is off by one in a column with chance
    ``SLIPS`` and leaves the box out with chance ``LEAVES_OUT_BOX``. A model that imitates it can do the task but
    rarely does, which is where reinforcement learning starts.

    Args:
        n: number of conversations.
        seed: seed of problems and errors.
        clean: whether the teacher makes no errors.

    Returns:
        ``n`` conversations of a system, a user and an assistant message.
    """
    rng = random.Random(seed)
    problems = rng.choices(_problems("train"), k=n)
    return [
        [*_query(a, b), {"role": "assistant", "content": _solve(a, b, None if clean else rng)}] for a, b in problems
    ]


def addition_preferences(n: int = 8192, *, seed: int = 1) -> list[dict[str, Messages]]:
    """Return pairs of conversations on the same problem where the sloppy teacher differs from the clean one.

    Args:
        n: number of problems; teachers agree on some, which give no pair.
        seed: seed of problems and errors.
    """
    teachers = (demonstrations(n, seed=seed, clean=clean) for clean in (True, False))
    return [{"chosen": good, "rejected": bad} for good, bad in zip(*teachers, strict=True) if good != bad]


def _problems(split: str) -> list[tuple[int, int]]:
    if split not in ("train", "test"):
        raise ValueError(f"split must be 'train' or 'test', got {split!r}")
    return [(a, b) for a in range(100) for b in range(100) if _is_held_out(a, b) == (split == "test")]


def _is_held_out(a: int, b: int) -> bool:
    digest = hashlib.sha256(f"{min(a, b)}+{max(a, b)}".encode()).digest()
    return digest[0] < 26  # 26 of 256: about 10 %


def _query(a: int, b: int) -> Messages:
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": f"What is {a}+{b}?"}]


def _solve(a: int, b: int, rng: random.Random | None) -> str:
    """The assistant's text; with ``rng`` by the sloppy teacher, without by one that makes no errors."""
    steps, answer, carry = [], 0, 0
    columns = max(len(str(a)), len(str(b)))
    for i in range(columns):
        x, y = a // 10**i % 10, b // 10**i % 10
        if rng and carry and rng.random() < FORGETS_CARRY:
            carry = 0
        total = x + y + carry
        if rng and rng.random() < SLIPS:
            total = max(0, total + rng.choice((-1, 1)))
        steps.append(f"{x}+{y}+{carry}={total}" if i else f"{x}+{y}={total}")
        carry = total // 10
        answer += total % 10 * 10**i
    answer += carry * 10**columns
    boxed = not (rng and rng.random() < LEAVES_OUT_BOX)
    return f"<think>{' '.join(steps)}</think>" + (f"\\boxed{{{answer}}}" if boxed else f"The answer is {answer}")
