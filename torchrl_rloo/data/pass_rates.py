"""PassRatePool: prompts that the policy neither always solves nor never are drawn first."""

from __future__ import annotations

import bisect
from collections import Counter
from typing import Any, Literal, get_args

import torch
from tensordict import TensorDictBase

from torchrl_rloo.data import keys
from torchrl_rloo.data.outcomes import Returns, by_group, final_return

Difficulty = Literal["unseen", "in_range", "too_hard", "too_easy", "retired"]
_PREFERRED = ("unseen", "in_range")


class PassRatePool:
    """A :class:`~torchrl_rloo.data.sampling.PromptSampler` that prefers prompts whose pass rate is in a range.

    A prompt's pass rate is the share of the rows of its last ``window`` groups (by ``"group_id"``) whose return reached
    ``success``, of those that did not abstain. A draw is uniform over the prompts in range and those never seen; with
    probability ``floor`` it is uniform over all, so that none starves and estimates stay fresh. Between two updates a
    prompt is preferred once: where only a few are left in range, the rest of a batch is uniform over all, rather than
    those few again and again. Give every collected batch to :meth:`update`, groups without signal included.

    A prompt that was solved in a full window at rate ``retire`` is retired, that is drawn no more; when all are, all
    are drawn again. Estimates do not depend on the order in which groups arrive.

    Args:
        size: prompts of the dataset.
        target: lowest and highest pass rate of the range, both in it.
        floor: share of the draws that goes to all prompts alike.
        window: groups that an estimate is of.
        retire: pass rate above the range from which a prompt is retired; None: never.
        success: the return from which a row counts as passed.
        returns: see :mod:`torchrl_rloo.data.outcomes`, ``[B]``.

    Attributes:
        counts: ``"pool/target_draws"``, ``"pool/floor_draws"``; ``"pool/entered"`` and ``"pool/retired"``: prompts that
            came into the range from outside of it, and that were retired.

    Raises:
        ValueError: for a setting out of range; at :meth:`update`, for a prompt that the dataset has not.

    Example:
        >>> pool, generator = PassRatePool(3, floor=0.0), torch.Generator().manual_seed(0)
        >>> pool.standing(1), pool.pass_rate(1)
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
            raise ValueError(f"retire={retire} must be None, or above target's {target[1]} and at most 1")
        self.size, self.target, self.floor, self.window, self.retire = size, tuple(target), floor, window, retire
        self.success, self.returns = success, returns
        self.counts: Counter[str] = Counter()
        self._groups: dict[int, dict[int, list[int]]] = {}  # prompt: {group_id: [passed, answered]}
        self._standings: dict[int, Difficulty] = {}  # of the prompts that were seen
        self._drawn: set[int] = set()  # since the last update
        self._candidates: tuple[list[int], list[int]] | None = None  # preferred and all, ascending

    def draw(self, generator: torch.Generator) -> int:
        """The index of the next prompt; two numbers of the generator for each draw."""
        preferred, drawable = self._drawable()
        everywhere = float(torch.rand((), generator=generator)) < self.floor or not preferred
        self.counts["pool/floor_draws" if everywhere else "pool/target_draws"] += 1
        among = drawable if everywhere else preferred
        prompt = among[int(torch.randint(len(among), (), generator=generator))]
        self._drawn.add(prompt)
        place = bisect.bisect_left(preferred, prompt)
        if preferred[place : place + 1] == [prompt]:
            del preferred[place]
        return prompt

    def _drawable(self) -> tuple[list[int], list[int]]:
        if self._candidates is None:
            standings = [self.standing(prompt) for prompt in range(self.size)]
            drawable = [p for p, standing in enumerate(standings) if standing != "retired"] or list(range(self.size))
            preferred = [p for p in drawable if standings[p] in _PREFERRED and p not in self._drawn]
            self._candidates = preferred, drawable
        return self._candidates

    def pass_rate(self, prompt: int) -> float | None:
        """Estimated pass rate of a prompt; None if no row of it has been judged."""
        groups = self._groups.get(prompt)
        return sum(p for p, _ in groups.values()) / sum(n for _, n in groups.values()) if groups else None

    def standing(self, prompt: int) -> Difficulty:
        """Where a prompt stands to the range."""
        return self._standings.get(prompt, "unseen")

    def _judge(self, prompt: int) -> Difficulty:
        rate = self.pass_rate(prompt)
        if rate < self.target[0]:
            return "too_hard"
        if rate <= self.target[1]:
            return "in_range"
        full = len(self._groups[prompt]) == self.window
        return "retired" if self.retire is not None and full and rate >= self.retire else "too_easy"

    def update(self, rows: TensorDictBase) -> None:
        """Takes in the outcome of finished groups.

        Args:
            rows: batch size ``[B]``, with ``"prompt_id"``; each row once.
        """
        outcomes: dict[int, list[tuple[int, int, int]]] = {}
        for group_id, members in by_group(rows).items():
            prompt = int(members[0][keys.PROMPT_ID])
            if not 0 <= prompt < self.size:
                raise ValueError(f"prompt_id={prompt} is not of the pool's size={self.size} prompts")
            returns = self.returns(members)
            given = returns[~returns.isnan()]
            if len(given):
                outcomes.setdefault(prompt, []).append((group_id, int((given >= self.success).sum()), len(given)))
        for prompt, groups in outcomes.items():
            self._take_in(prompt, groups)
        self._drawn.clear()
        self._candidates = None

    def _take_in(self, prompt: int, outcomes: list[tuple[int, int, int]]) -> None:
        before, groups = self.standing(prompt), self._groups.setdefault(prompt, {})
        for group_id, passed, answered in outcomes:
            total = groups.setdefault(group_id, [0, 0])  # the rest of the group may have come before
            total[0] += passed
            total[1] += answered
        for old in sorted(groups)[: -self.window]:
            del groups[old]
        after = self._standings[prompt] = self._judge(prompt)
        self.counts["pool/entered"] += after == "in_range" and before not in _PREFERRED
        self.counts["pool/retired"] += after == "retired" != before

    def metrics(self) -> dict[str, float]:
        """Share of the prompts of each standing, ``"pool/<standing>"``."""
        found = Counter(self._standings.values())
        found["unseen"] = self.size - len(self._standings)
        return {f"pool/{name}": found[name] / self.size for name in get_args(Difficulty)}

    def state_dict(self) -> dict[str, Any]:
        """Outcomes and counters: plain values."""
        groups = {prompt: {g: list(n) for g, n in window.items()} for prompt, window in self._groups.items()}
        return {"size": self.size, "groups": groups, "drawn": sorted(self._drawn), "counts": dict(self.counts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores outcomes and, in place, the counters.

        Raises:
            ValueError: if the state is of another number of prompts.
        """
        if state["size"] != self.size:
            raise ValueError(f"the state is of a pool of {state['size']} prompts, this one has {self.size}")
        self._groups = {prompt: {g: list(n) for g, n in window.items()} for prompt, window in state["groups"].items()}
        self._standings = {prompt: self._judge(prompt) for prompt in self._groups}
        self._drawn, self._candidates = set(state["drawn"]), None
        self.counts.clear()
        self.counts.update(state["counts"])
