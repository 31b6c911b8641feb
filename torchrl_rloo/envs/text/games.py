"""Text games: small text environments with Gymnasium's ``reset`` and ``step``."""

from __future__ import annotations

import random
import re
from typing import Any

_NUMBER = re.compile(r"[0-9]+")
_MAX_DIGITS = 9  # longer numbers do not count as guesses


class GuessNumber:
    """Game of guessing a secret number; each wrong guess is answered by ``"higher"`` or ``"lower"``.

    The last number in a turn is the guess. A turn without a number is answered by ``"number?"`` and counts as a guess.
    """

    def __init__(self, low: int = 1, high: int = 32, max_turns: int = 6, *, turn_cost: float = 0.05):
        if max_turns < 1:
            raise ValueError(f"max_turns={max_turns} must be at least 1")
        self.low, self.high, self.max_turns, self.turn_cost = low, high, max_turns, turn_cost
        self._check_range()
        self.secret, self.turns = low, 0

    def _check_range(self) -> None:
        if not 0 <= self.low < self.high < 10**_MAX_DIGITS:
            raise ValueError(
                f"low={self.low} and high={self.high} must be numbers of up to {_MAX_DIGITS} digits, with low < high"
            )

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Draw the secret."""
        options = options or {}
        self.low, self.high = int(options.get("low", self.low)), int(options.get("high", self.high))
        self._check_range()
        drawn = random.Random(seed).randint(self.low, self.high)
        self.secret, self.turns = int(options.get("secret", drawn)), 0
        return f"Guess a number from {self.low} to {self.high}.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Process a guess."""
        self.turns += 1
        numbers = [n for n in _NUMBER.findall(action) if len(n) <= _MAX_DIGITS]
        guess = int(numbers[-1]) if numbers else None
        found = guess == self.secret
        answer = "yes" if found else "number?" if guess is None else "higher" if guess < self.secret else "lower"
        reward = 1.0 if found else -self.turn_cost
        return answer, reward, found or self.turns >= self.max_turns, False, {"found": found}
