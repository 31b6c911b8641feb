"""Reward functions as bytes, for executors that send each function to a process once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchrl_rloo.rewards.protocol import RewardFunction, reward_name


class SentFunctions:
    """Keys and bytes of functions. A function keeps the bytes of its first :meth:`add`.

    Args:
        dumps: function that pickles.
        place: name of the place that functions are sent to, for errors.
    """

    def __init__(self, dumps: Callable[[Any], bytes], place: str):
        self._dumps, self._place = dumps, place
        # By id, which is unique because the functions are kept alive here
        self._sent: dict[int, tuple[RewardFunction, int, bytes]] = {}

    def add(self, function: RewardFunction) -> tuple[int, bytes]:
        """Return key and bytes of a function.

        Raises:
            TypeError: if the function cannot be pickled.
        """
        if id(function) not in self._sent:
            try:
                data = self._dumps(function)
            except Exception as error:
                raise TypeError(
                    f"reward {reward_name(function)} cannot be sent to {self._place}: {type(error).__name__}: {error}; "
                    "create locks, connections and open files on first use instead of in __init__, or use a "
                    "ThreadExecutor"
                ) from error
            self._sent[id(function)] = function, len(self._sent), data
        return self._sent[id(function)][1:]
