"""Prompt samplers: the protocol, mixtures of sources, pools by pass rate, and prompts that are drawn again."""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import torch
from tensordict import TensorDictBase

from torchrl_rloo.data import keys
from torchrl_rloo.data.outcomes import Returns, final_return, group_rows, sampled_rows


@runtime_checkable
class PromptSampler(Protocol):
    """Protocol of an endless choice of prompts for :class:`~torchrl_rloo.envs.transforms.DataLoadingPrimer`.

    All randomness must come from the generator passed to :meth:`draw`, whose state the primer saves.
    """

    def draw(self, generator: torch.Generator) -> int:
        """Return the index of the next prompt in the dataset."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of later draws as plain values and tensors, without the generator."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state from :meth:`state_dict`."""


class MixtureSampler:
    r"""Prompt sampler that draws from several sources in fixed shares, each in separately shuffled epochs.

    The dataset is the concatenation of the sources. After ``n`` draws, source ``k`` of ``K`` has had
    :math:`n w_k \pm 1` of them, so every batch is close to the weights. Sources take turns by Tijdeman's rule (The
    chairman assignment problem, Discrete Mathematics 32, 1980), whose error is at most :math:`1 - 1 / (2K - 2)`. The
    order of the prompts of a source is random, and each is drawn once per epoch.

    It follows the protocol :class:`PromptSampler`.

    Args:
        sizes: number of prompts of each source, in order.
        weights: share of each source in the draws; the sum need not be 1. None takes the sizes.
        names: names of the sources in ``counts``. None takes their numbers.

    Attributes:
        counts: number of draws of each source, ``"draws/<name>"``.

    Raises:
        ValueError: if a size is below 1, a weight is not positive, or the arguments differ in length.

    Example:
        >>> sampler, generator = MixtureSampler([100, 5], weights=[0.75, 0.25]), torch.Generator().manual_seed(0)
        >>> [sampler.source(sampler.draw(generator)) for _ in range(8)]
        [0, 0, 1, 0, 0, 0, 1, 0]
    """

    def __init__(
        self, sizes: Sequence[int], weights: Sequence[float] | None = None, names: Sequence[str] | None = None
    ):
        weights = list(sizes) if weights is None else list(weights)
        names = [str(k) for k in range(len(sizes))] if names is None else list(names)
        if not sizes or min(sizes) < 1:
            raise ValueError(f"sizes={list(sizes)} must be a non-empty list of positive numbers of prompts")
        if not len(sizes) == len(weights) == len(set(names)):
            raise ValueError(
                f"weights={weights} and names={names} must have one entry for each of {len(sizes)} sources"
            )
        if not all(math.isfinite(w) and w > 0 for w in weights):
            raise ValueError(f"weights={weights} must be positive and finite; leave out a source of weight 0")
        self.sizes, self.names = list(sizes), names
        self.weights = [w / sum(weights) for w in weights]
        self._ends = list(accumulate(self.sizes))
        # Position in the epoch of each source, which a checkpoint restores
        self.drawn = [0] * len(sizes)
        self._seeds: list[int | None] = [None] * len(sizes)  # seed of each source's current epoch
        self._orders: list[list[int]] = [[] for _ in sizes]

    @property
    def counts(self) -> Counter[str]:
        """Number of draws of each source, ``"draws/<name>"``."""
        return Counter({f"draws/{name}": n for name, n in zip(self.names, self.drawn, strict=True)})

    def source(self, index: int) -> int:
        """Return the number of the source of the prompt at ``index`` in the dataset."""
        return bisect.bisect_right(self._ends, index)

    def draw(self, generator: torch.Generator) -> int:
        """Return the index of the next prompt; uses the generator only at the start of a source's epoch."""
        k = self._next_source()
        place = self.drawn[k] % self.sizes[k]
        if place == 0:
            self._start_epoch(k, int(torch.randint(2**62, (), generator=generator)))
        self.drawn[k] += 1
        return self._ends[k] - self.sizes[k] + self._orders[k][place]

    def _next_source(self) -> int:
        """Return the source with the earliest deadline among those whose deficit allows another draw."""
        if len(self.sizes) == 1:
            return 0
        n, slack = sum(self.drawn) + 1, 1 / (2 * len(self.sizes) - 2)
        deficits = [w * n - drawn for w, drawn in zip(self.weights, self.drawn, strict=True)]
        eligible = [k for k, deficit in enumerate(deficits) if deficit >= slack - 1e-9]
        return min(eligible, key=lambda k: (1 - slack - deficits[k]) / self.weights[k])

    def _start_epoch(self, k: int, seed: int) -> None:
        self._seeds[k] = seed
        self._orders[k] = torch.randperm(self.sizes[k], generator=torch.Generator().manual_seed(seed)).tolist()

    def state_dict(self) -> dict[str, Any]:
        """Return the position in each source as plain values."""
        return {
            "sizes": list(self.sizes),
            "weights": list(self.weights),
            "drawn": list(self.drawn),
            "seeds": list(self._seeds),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the position in each source.

        Raises:
            ValueError: if the state has other sizes or weights.
        """
        if state["sizes"] != self.sizes or state["weights"] != self.weights:
            raise ValueError(
                f"the state has sizes={state['sizes']} and weights={state['weights']}, this sampler has "
                f"sizes={self.sizes} and weights={self.weights}; resume with the same mixture"
            )
        self.drawn = list(state["drawn"])
        for k, seed in enumerate(state["seeds"]):
            if seed is not None:
                self._start_epoch(k, seed)


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
        passed, answered = self.record(prompt)
        return passed / answered if answered else None

    def record(self, prompt: int) -> tuple[int, int]:
        """Return how many rows of a prompt passed, and how many answered."""
        groups = self._groups.get(prompt, {}).values()
        return sum(passed for passed, _ in groups), sum(answered for _, answered in groups)

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
        for group_id, members in group_rows(sampled_rows(rows)).items():
            prompt = int(members[0][keys.PROMPT_ID])
            if not 0 <= prompt < self.size:
                raise ValueError(f"prompt_id={prompt} must be at least 0 and below the pool's size={self.size}")
            returns = self.returns(members)
            answered = returns[~returns.isnan()]
            if len(answered):
                outcomes.setdefault(prompt, []).append((group_id, int((answered >= self.success).sum()), len(answered)))
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
        sizes = Counter(self._difficulties.values())
        sizes["unseen"] = self.size - len(self._difficulties)
        return {f"pool/{name}": sizes[name] / self.size for name in get_args(Difficulty)}

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


class AdaptiveGroups:
    """Prompt sampler that draws some prompts of a step several times, within a fixed number of draws.

    A step of ``draws`` groups of ``members`` rows has ``prompts`` different prompts of the pool. Each gets one group.
    The others go, one by one, to the prompt whose value grows most, with ``n`` rows and a pass rate ``p`` (Knapsack RL,
    Li et al. 2025, arXiv 2509.25849)::

        v(n, p) = (1 - p^n - (1 - p)^n) * p * (1 - p)^2,    p = (passed + 1) / (answered + 2)

    :func:`~torchrl_rloo.replay.merge_groups` then makes one group of the groups of a prompt.
    """

    def __init__(self, pool: PassRatePool, *, prompts: int, draws: int, members: int):
        if not 1 <= prompts <= min(draws, pool.size):
            raise ValueError(f"prompts={prompts} must be at least 1 and at most draws={draws} and size={pool.size}")
        self.pool, self.prompts, self.draws, self.members = pool, prompts, draws, members
        self.update, self.metrics = pool.update, pool.metrics
        self._queue: list[int] = []

    counts = property(lambda self: self.pool.counts)

    def value(self, prompt: int, rows: int) -> float:
        """Return the value of a number of rows of a prompt."""
        passed, answered = self.pool.record(prompt)
        p = (passed + 1) / (answered + 2)
        return (1 - p**rows - (1 - p) ** rows) * p * (1 - p) ** 2

    def draw(self, generator: torch.Generator) -> int:
        """Return the index of the next prompt."""
        if not self._queue:
            rows: dict[int, int] = {}
            for _ in range(100 * self.prompts):  # a pool with fewer prompts to draw gives them more groups each
                rows[self.pool.draw(generator)] = self.members
                if len(rows) == self.prompts:
                    break
            for _ in range(self.draws - len(rows)):
                gains = {p: self.value(p, n + self.members) - self.value(p, n) for p, n in rows.items()}
                rows[max(gains, key=gains.get)] += self.members
            self._queue = [prompt for prompt, n in rows.items() for _ in range(n // self.members)]
        return self._queue.pop(0)

    def state_dict(self) -> dict[str, Any]:
        """Return the rest of the step and the pool's state."""
        return {"queue": list(self._queue), "pool": self.pool.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the rest of the step and the pool."""
        self._queue = list(state["queue"])
        self.pool.load_state_dict(state["pool"])


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
        start: number of draws before the first re-roll of any prompt, such as half of a run's.
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
        start: int = 0,
        returns: Returns = final_return,
    ):
        for name, value in (("delay", delay), ("growth", growth), ("max_tries", max_tries)):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if not 0 < max_share <= 0.5:
            raise ValueError(f"max_share={max_share} must be above 0 and at most 0.5")
        self.sampler, self.delay, self.growth, self.max_tries = sampler, delay, growth, max_tries
        self.spacing = math.ceil(1 / max_share)
        self.threshold, self.returns, self.start = threshold, returns, start
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
        if self._queue and self._draws > self.start and self._draws - self._last >= self.spacing:
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
        for members in group_rows(sampled_rows(rows)).values():
            returns, prompt = self.returns(members), int(members[0][keys.PROMPT_ID])
            answered = returns[~returns.isnan()]
            if not len(answered):
                continue
            if bool((answered > self.threshold).any()):
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
