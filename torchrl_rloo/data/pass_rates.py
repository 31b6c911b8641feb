"""PassRatePool: a sampler that prefers prompts that the policy solves sometimes but not always."""

from __future__ import annotations

import bisect
from collections import Counter
from typing import Any, Literal, get_args

import torch
from tensordict import TensorDictBase

from torchrl_rloo.data import keys
from torchrl_rloo.data.outcomes import Returns, final_return, group_rows

Difficulty = Literal["unseen", "in_range", "too_hard", "too_easy", "retired"]
_PREFERRED = ("unseen", "in_range")


class PassRatePool:
    """Prompt sampler that prefers prompts whose pass rate is in a range.

    A prompt's pass rate is the share of its rows whose return is at least ``success``. It counts the rows that did not
    abstain in the last ``window`` groups (by ``"group_id"``).

    A draw is uniform over the unseen prompts and those in range. With probability ``floor`` it is uniform over all
    prompts, so that every prompt is drawn and estimates stay fresh. Between two updates each prompt is preferred once.
    If too few prompts are in range, the rest of the batch is therefore drawn uniformly from all prompts.

    A prompt with a full window and a pass rate of at least ``retire`` is retired: it is not drawn again until all
    prompts are retired. Estimates do not depend on the order in which groups arrive.

    It follows the protocol :class:`~torchrl_rloo.data.sampling.PromptSampler`. Pass every collected batch to
    :meth:`update`, including groups without signal.

    Args:
        size: number of prompts in the dataset.
        target: lowest and highest pass rate of the range, both included.
        floor: share of the draws that are uniform over all prompts, in [0, 1].
        window: number of latest groups in an estimate.
        retire: pass rate above the range from which a prompt is retired. None disables it.
        success: lowest return of a passed row.
        returns: see :mod:`torchrl_rloo.data.outcomes`, ``[B]``.

    Attributes:
        counts: ``"pool/target_draws"`` and ``"pool/floor_draws"`` (draws), ``"pool/entered"`` (prompts that entered the
            range from outside) and ``"pool/retired"`` (prompts that were retired).

    Raises:
        ValueError: if a setting is out of range, or if :meth:`update` meets a prompt outside the dataset.

    Example:
        >>> pool, generator = PassRatePool(3, floor=0.0), torch.Generator().manual_seed(0)
        >>> pool.difficulty(1), pool.pass_rate(1)
        ('unseen', None)
        >>> sorted(pool.draw(generator) for _ in range(3))
        [0, 1, 2]
    """

    def __init__(
        self,
        size: int,
        *,
        target: tuple[float, float] = (0.1, 0.9),
        floor: float = 0.1,
        window: int = 4,
        retire: float | None = None,
        success: float = 1.0,
        returns: Returns = final_return,
    ):
        for name, value in (("size", size), ("window", window)):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if not 0 <= target[0] <= target[1] <= 1:
            raise ValueError(f"target={tuple(target)} must be (low, high) with 0 <= low <= high <= 1")
        if not 0 <= floor <= 1:
            raise ValueError(f"floor={floor} must be between 0 and 1")
        if retire is not None and not target[1] < retire <= 1:
            raise ValueError(f"retire={retire} must be above target[1]={target[1]} and at most 1, or None")
        self.size, self.target, self.floor, self.window, self.retire = size, tuple(target), floor, window, retire
        self.success, self.returns = success, returns
        # Recent outcomes, and what follows from them for the next draw
        self.counts: Counter[str] = Counter()
        self._groups: dict[int, dict[int, list[int]]] = {}  # prompt: {group_id: [passed, answered]}
        self._difficulties: dict[int, Difficulty] = {}  # of each seen prompt
        self._drawn: set[int] = set()  # prompts drawn since the last update
        self._candidates: tuple[list[int], list[int]] | None = None  # preferred and drawable prompts, ascending

    def draw(self, generator: torch.Generator) -> int:
        """Return the index of the next prompt; consumes two random numbers."""
        preferred, drawable = self._drawable()
        from_all = float(torch.rand((), generator=generator)) < self.floor or not preferred
        self.counts["pool/floor_draws" if from_all else "pool/target_draws"] += 1
        candidates = drawable if from_all else preferred
        prompt = candidates[int(torch.randint(len(candidates), (), generator=generator))]
        self._drawn.add(prompt)
        place = bisect.bisect_left(preferred, prompt)
        if preferred[place : place + 1] == [prompt]:
            del preferred[place]
        return prompt

    def _drawable(self) -> tuple[list[int], list[int]]:
        if self._candidates is None:
            difficulties = [self.difficulty(prompt) for prompt in range(self.size)]
            drawable = [p for p, difficulty in enumerate(difficulties) if difficulty != "retired"] or list(
                range(self.size)
            )
            preferred = [p for p in drawable if difficulties[p] in _PREFERRED and p not in self._drawn]
            self._candidates = preferred, drawable
        return self._candidates

    def pass_rate(self, prompt: int) -> float | None:
        """Return the estimated pass rate of a prompt, or None if no row of it has a return yet."""
        groups = self._groups.get(prompt)
        return sum(p for p, _ in groups.values()) / sum(n for _, n in groups.values()) if groups else None

    def difficulty(self, prompt: int) -> Difficulty:
        """Return the difficulty of a prompt relative to the range."""
        return self._difficulties.get(prompt, "unseen")

    def _classify(self, prompt: int) -> Difficulty:
        rate = self.pass_rate(prompt)
        if rate < self.target[0]:
            return "too_hard"
        if rate <= self.target[1]:
            return "in_range"
        full = len(self._groups[prompt]) == self.window
        return "retired" if self.retire is not None and full and rate >= self.retire else "too_easy"

    def update(self, rows: TensorDictBase) -> None:
        """Update the estimates with the outcomes of finished groups.

        Args:
            rows: batch of size ``[B]`` with ``"prompt_id"`` and ``"group_id"``. Pass each row once.

        Raises:
            ValueError: if a ``"prompt_id"`` is not below ``size``.
        """
        outcomes: dict[int, list[tuple[int, int, int]]] = {}
        for group_id, members in group_rows(rows).items():
            prompt = int(members[0][keys.PROMPT_ID])
            if not 0 <= prompt < self.size:
                raise ValueError(f"prompt_id={prompt} must be at least 0 and below the pool's size={self.size}")
            returns = self.returns(members)
            given = returns[~returns.isnan()]
            if len(given):
                outcomes.setdefault(prompt, []).append((group_id, int((given >= self.success).sum()), len(given)))
        for prompt, groups in outcomes.items():
            self._record_outcomes(prompt, groups)
        self._drawn.clear()
        self._candidates = None

    def _record_outcomes(self, prompt: int, outcomes: list[tuple[int, int, int]]) -> None:
        before, groups = self.difficulty(prompt), self._groups.setdefault(prompt, {})
        for group_id, passed, answered in outcomes:
            total = groups.setdefault(group_id, [0, 0])  # other rows of the group may have arrived before
            total[0] += passed
            total[1] += answered
        for old in sorted(groups)[: -self.window]:
            del groups[old]
        after = self._difficulties[prompt] = self._classify(prompt)
        self.counts["pool/entered"] += after == "in_range" and before not in _PREFERRED
        self.counts["pool/retired"] += after == "retired" != before

    def metrics(self) -> dict[str, float]:
        """Return the share of prompts of each difficulty as ``"pool/<difficulty>"``."""
        found = Counter(self._difficulties.values())
        found["unseen"] = self.size - len(self._difficulties)
        return {f"pool/{name}": found[name] / self.size for name in get_args(Difficulty)}

    def state_dict(self) -> dict[str, Any]:
        """Return outcomes and counters as plain values."""
        groups = {prompt: {g: list(n) for g, n in window.items()} for prompt, window in self._groups.items()}
        return {"size": self.size, "groups": groups, "drawn": sorted(self._drawn), "counts": dict(self.counts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore outcomes and, in place, the counters.

        Raises:
            ValueError: if the state belongs to a pool of another size.
        """
        if state["size"] != self.size:
            raise ValueError(
                f"the saved pool has size={state['size']}, this pool has size={self.size}; use the same dataset"
            )
        self._groups = {prompt: {g: list(n) for g, n in window.items()} for prompt, window in state["groups"].items()}
        self._difficulties = {prompt: self._classify(prompt) for prompt in self._groups}
        self._drawn, self._candidates = set(state["drawn"]), None
        self.counts.clear()
        self.counts.update(state["counts"])
