"""DeferredRerolls: a sampler that draws a prompt again later if no member of its group solved it."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch
from tensordict import TensorDictBase

from torchrl_rloo.data import keys
from torchrl_rloo.data.outcomes import Returns, final_return, group_rows
from torchrl_rloo.data.sampling import PromptSampler


class DeferredRerolls:
    """Prompt sampler that wraps another one and draws failed prompts again.

    A prompt fails if no member of its group has a return above ``threshold``. It is then queued and drawn again after
    ``delay`` further draws. After each further failure the delay is ``growth`` times as long, for at most ``max_tries``
    re-rolls. From then on only the inner sampler draws the prompt, until a success lets it be queued again.

    Between two re-rolls there are at least ``ceil(1 / max_share) - 1`` other draws. Re-rolls are therefore at most
    ``max_share`` of any batch, rounded up to whole prompts. Queue and draws do not depend on the order of a batch's
    rows.

    It follows the protocol :class:`~torchrl_rloo.data.sampling.PromptSampler`. Pass every collected batch to
    :meth:`update`, which also updates the inner sampler.

    Args:
        sampler: inner sampler of all other draws.
        delay: number of draws before the first re-roll, such as ``prompts_per_batch`` times 10 for ten batches.
        growth: factor of the delay after each failed re-roll.
        max_share: largest share of re-rolls in the draws, at most 0.5. It is rounded down to ``1 / n`` for an integer
            ``n``.
        max_tries: largest number of re-rolls of a prompt that keeps failing.
        threshold: largest return of a failure.
        returns: see :mod:`torchrl_rloo.data.outcomes`, ``[B]``.

    Attributes:
        counts: numbers of prompts, with the counters of the inner sampler: ``"rerolls/queued"``, ``"rerolls/drawn"``,
            ``"rerolls/solved"`` (solved after a re-roll) and ``"rerolls/given_up"`` (failed at the last try).

    Raises:
        ValueError: if a setting is out of range.

    Example:
        >>> from tensordict import TensorDict, lazy_stack
        >>> from torchrl_rloo.data.sampling import MixtureSampler
        >>> rerolls = DeferredRerolls(MixtureSampler([4]), delay=2)
        >>> failed = {"group_id": torch.tensor(0), "prompt_id": torch.tensor(3), ("next", "reward"): torch.zeros(1, 1)}
        >>> rerolls.update(lazy_stack([TensorDict(failed), TensorDict(failed)]))
        >>> generator = torch.Generator().manual_seed(0)
        >>> [rerolls.draw(generator) for _ in range(3)][2]
        3
    """

    def __init__(
        self,
        sampler: PromptSampler,
        *,
        delay: int,
        growth: float = 2.0,
        max_share: float = 0.25,
        max_tries: int = 3,
        threshold: float = 0.0,
        returns: Returns = final_return,
    ):
        for name, value in (("delay", delay), ("growth", growth), ("max_tries", max_tries)):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if not 0 < max_share <= 0.5:
            raise ValueError(f"max_share={max_share} must be above 0 and at most 0.5")
        self.sampler, self.delay, self.growth, self.max_tries = sampler, delay, growth, max_tries
        self.spacing = math.ceil(1 / max_share)
        self.threshold, self.returns = threshold, returns
        self._counts: Counter[str] = Counter()
        self._draws = 0
        self._last = -self.spacing  # draw number of the last re-roll
        self._queue: dict[int, int] = {}  # prompt: draw number after which it is due
        self._tries: dict[int, int] = {}  # prompt: re-rolls since its last success

    @property
    def counts(self) -> Counter[str]:
        """Counters of re-rolls and of the inner sampler."""
        return Counter(self._counts | dict(getattr(self.sampler, "counts", {})))

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the inner sampler."""
        return self.sampler.metrics() if hasattr(self.sampler, "metrics") else {}

    def __len__(self) -> int:
        """Return the number of queued prompts."""
        return len(self._queue)

    def draw(self, generator: torch.Generator) -> int:
        """Return the prompt that has been due the longest, or else a draw of the inner sampler."""
        self._draws += 1
        if self._queue and self._draws - self._last >= self.spacing:
            due, prompt = min((due, prompt) for prompt, due in self._queue.items())
            if due < self._draws:
                del self._queue[prompt]
                self._tries[prompt] = self._tries.get(prompt, 0) + 1
                self._last = self._draws
                self._counts["rerolls/drawn"] += 1
                return prompt
        return self.sampler.draw(generator)

    def update(self, rows: TensorDictBase) -> None:
        """Update the queue and the inner sampler with finished groups; the queue ignores groups that abstained.

        Args:
            rows: batch of whole groups, size ``[B]``, with ``"prompt_id"`` and ``"group_id"``.
        """
        if hasattr(self.sampler, "update"):
            self.sampler.update(rows)
        for members in group_rows(rows).values():
            returns, prompt = self.returns(members), int(members[0][keys.PROMPT_ID])
            given = returns[~returns.isnan()]
            if not len(given):
                continue
            if bool((given > self.threshold).any()):
                self._queue.pop(prompt, None)
                self._counts["rerolls/solved"] += self._tries.pop(prompt, 0) > 0
            else:
                self._defer(prompt)

    def _defer(self, prompt: int) -> None:
        tries = self._tries.get(prompt, 0)
        if prompt in self._queue or tries > self.max_tries:
            return
        if tries == self.max_tries:
            self._tries[prompt] = tries + 1  # count the last failure once
            self._counts["rerolls/given_up"] += 1
            return
        self._queue[prompt] = self._draws + math.ceil(self.delay * self.growth**tries)
        self._counts["rerolls/queued"] += 1

    def state_dict(self) -> dict[str, Any]:
        """Return queue, tries, counters and the inner sampler's state as plain values."""
        return {
            "draws": self._draws,
            "last": self._last,
            "queue": dict(self._queue),
            "tries": dict(self._tries),
            "counts": dict(self._counts),
            "sampler": self.sampler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore queue, tries and the inner sampler, and the counters in place."""
        self._draws, self._last = state["draws"], state["last"]
        self._queue, self._tries = dict(state["queue"]), dict(state["tries"])
        self._counts.clear()
        self._counts.update(state["counts"])
        self.sampler.load_state_dict(state["sampler"])
