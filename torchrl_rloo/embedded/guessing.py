"""Game of up to seven guesses at a number, each answered higher or lower, the ``guessing`` task.

::

    user       Guess a number between 23 and 58.
    assistant  <think>23-58</think>41
    user       higher
    assistant  <think>41-58</think>51
    user       lower
    assistant  <think>41-51</think>46

A player that writes down the remaining bounds and guesses near their middle nearly always finds the number. Other
players rarely do.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any, Literal

from torchrl_rloo.envs.text.games import GuessNumber

Messages = list[dict[str, str]]

LOWEST, HIGHEST = 10, 99  # every number has two digits
RANGE_SIZES = range(24, 40)  # how many numbers lie between the bounds, without the bounds
SECRETS_PER_RANGE = 8  # problems per pair of bounds
MAX_GUESSES = 7

P_THOUGHTLESS = 0.6  # probability that a game is played without written bounds


class RangedGuessNumber(GuessNumber):
    """Guessing game with separate bounds in each row, the ``reset`` options ``"low"``, ``"high"`` and ``"secret"``.

    A wrong guess costs nothing. Otherwise a policy would learn to end hopeless games with an overlong turn.
    """

    def __init__(self):
        super().__init__(LOWEST, HIGHEST, MAX_GUESSES, turn_cost=0.0)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start a game within the row's bounds; see :meth:`GuessNumber.reset`."""
        self.low, self.high = options["low"], options["high"]
        super().reset(seed=seed, options=options)
        return _opening(self.low, self.high), {}


def guessing_prompts(
    split: Literal["train", "test"], *, size: int | None = None, seed: int = 0
) -> list[dict[str, Any]]:
    """Return the rows of the guessing task, each problem once.

    A problem is a secret between two bounds, with one of ``RANGE_SIZES`` numbers between them. A hash, which does not
    depend on ``seed``, holds out about 10 % of the pairs of bounds for ``"test"``. Secrets are not held out, because a
    player would learn never to guess a number that is never the secret.

    Args:
        split: ``"train"`` or ``"test"``.
        size: number of rows to keep after shuffling. None keeps all.
        seed: seed of the order.

    Returns:
        Rows ``{"query": [user message], "low": 23, "high": 58, "secret": 46}``.

    Raises:
        ValueError: if ``split`` is unknown, or ``size`` is not between 1 and the number of problems in the split.

    Example:
        >>> row = guessing_prompts("test", size=1)[0]
        >>> row["low"] < row["secret"] < row["high"]
        True
    """
    problems = [
        (low, high, secret)
        for low, high in _bounds(split)
        for secret in random.Random(f"{low} {high}").sample(range(low + 1, high), SECRETS_PER_RANGE)
    ]
    if size is not None and not 1 <= size <= len(problems):
        raise ValueError(f"size={size} must be None or between 1 and {len(problems)} for split={split!r}")
    random.Random(seed).shuffle(problems)
    return [
        {"query": _query(low, high), "low": low, "high": high, "secret": secret}
        for low, high, secret in problems[:size]
    ]


def guessing_demonstrations(n: int, seed: int, *, clean: bool = False) -> list[Messages]:
    """Return games of a teacher with training bounds, drawn with replacement.

    The teacher writes down the remaining bounds and guesses in the middle fifth between them. It is sloppy: with
    probability ``P_THOUGHTLESS`` it writes nothing and guesses anywhere between the first bounds.

    Args:
        n: number of games.
        seed: seed of problems, guesses and errors.
        clean: True for a teacher that always writes the bounds.

    Returns:
        ``n`` conversations of a user message and turns of the assistant, answered by the user.
    """
    rng = random.Random(seed)
    bounds = rng.choices(_bounds("train"), k=n)
    return [[*_query(low, high), *_play(low, high, rng, 0.0 if clean else P_THOUGHTLESS)] for low, high in bounds]


def _bounds(split: str) -> list[tuple[int, int]]:
    if split not in ("train", "test"):
        raise ValueError(f"split={split!r} must be 'train' or 'test'")
    bounds = [(low, low + size + 1) for size in RANGE_SIZES for low in range(LOWEST, HIGHEST - size)]
    return [(low, high) for low, high in bounds if _is_held_out(low, high) == (split == "test")]


def _is_held_out(low: int, high: int) -> bool:
    return hashlib.sha256(f"{low} {high}".encode()).digest()[0] < 26  # 26 of 256: about 10 %


def _opening(low: int, high: int) -> str:
    return f"Guess a number between {low} and {high}."


def _query(low: int, high: int) -> Messages:
    return [{"role": "user", "content": _opening(low, high)}]


def _play(low: int, high: int, rng: random.Random, thoughtless: float) -> Messages:
    """Play a game about a random secret and return the messages after the opening."""
    secret, messages = rng.randrange(low + 1, high), []
    thinks = rng.random() >= thoughtless
    for turn in range(MAX_GUESSES):
        margin = max(1, (high - low) * 2 // 5) if thinks else 1
        guess, bounds = rng.randint(low + margin, high - margin), f"{low}-{high}" if thinks else ""
        messages.append({"role": "assistant", "content": f"<think>{bounds}</think>{guess}"})
        if guess == secret or turn + 1 == MAX_GUESSES:
            break
        messages.append({"role": "user", "content": "higher" if guess < secret else "lower"})
        if thinks:
            low, high = (guess, high) if guess < secret else (low, guess)
    return messages
