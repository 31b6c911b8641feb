"""Which prompt comes next: the protocol of samplers, and mixtures of sources."""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Protocol, runtime_checkable

import torch


@runtime_checkable
class PromptSampler(Protocol):
    """Chooses prompts for a :class:`~torchrl_rloo.envs.transforms.DataLoadingPrimer`, without end.

    All randomness comes from the generator it is given, whose state the primer saves.
    """

    def draw(self, generator: torch.Generator) -> int:
        """The index of the next prompt in the dataset."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that later draws depend on, but for the generator: plain values and tensors."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores :meth:`state_dict`."""


class MixtureSampler:
    r"""Draws from several sources in fixed shares, each source in shuffled epochs of its own.

    The dataset holds the sources one after the other. After ``n`` draws, source ``k`` of ``K`` has had
    :math:`n w_k \pm 1` of them, so that every batch is near the weights, not only the mean over many: sources take
    turns by Tijdeman's rule (The chairman assignment problem, Discrete Mathematics 32, 1980), which keeps within
    :math:`1 - 1 / (2K - 2)`. Which prompt of a source comes is random; every one comes once before any comes again.

    Args:
        sizes: prompts of each source, in order.
        weights: share of each in the draws; they need not sum to 1. None: in proportion to the sizes.
        names: of the sources, for ``counts``; None: their numbers.

    Attributes:
        counts: ``"draws/<name>"``.

    Raises:
        ValueError: for sizes below 1, weights that are not positive, or unequal numbers of them.

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
            raise ValueError(f"sizes={list(sizes)} must be positive numbers of prompts, at least one")
        if not len(sizes) == len(weights) == len(set(names)):
            raise ValueError(f"{len(sizes)} sizes, weights={weights} and names={names}: give one of each for a source")
        if not all(math.isfinite(w) and w > 0 for w in weights):
            raise ValueError(f"weights={weights} must be positive numbers: leave out a source that is not to be drawn")
        self.sizes, self.names = list(sizes), names
        self.weights = [w / sum(weights) for w in weights]
        self._ends = list(accumulate(self.sizes))
        self.drawn = [0] * len(sizes)
        self._seeds: list[int | None] = [None] * len(sizes)  # of each source's present epoch
        self._orders: list[list[int]] = [[] for _ in sizes]

    @property
    def counts(self) -> Counter[str]:
        """How often each source was drawn from."""
        return Counter({f"draws/{name}": n for name, n in zip(self.names, self.drawn, strict=True)})

    def source(self, index: int) -> int:
        """The number of the source that has the prompt at ``index`` of the dataset."""
        return bisect.bisect_right(self._ends, index)

    def draw(self, generator: torch.Generator) -> int:
        """The index of the next prompt; the generator is used at the start of a source's epoch only."""
        k = self._next_source()
        place = self.drawn[k] % self.sizes[k]
        if place == 0:
            self._start_epoch(k, int(torch.randint(2**62, (), generator=generator)))
        self.drawn[k] += 1
        return self._ends[k] - self.sizes[k] + self._orders[k][place]

    def _next_source(self) -> int:
        """Of the sources that may have another draw, the one that must have it soonest."""
        if len(self.sizes) == 1:
            return 0
        n, slack = sum(self.drawn) + 1, 1 / (2 * len(self.sizes) - 2)
        lacks = [w * n - drawn for w, drawn in zip(self.weights, self.drawn, strict=True)]
        may = [k for k, lack in enumerate(lacks) if lack >= slack - 1e-9]
        return min(may, key=lambda k: (1 - slack - lacks[k]) / self.weights[k])

    def _start_epoch(self, k: int, seed: int) -> None:
        self._seeds[k] = seed
        self._orders[k] = torch.randperm(self.sizes[k], generator=torch.Generator().manual_seed(seed)).tolist()

    def state_dict(self) -> dict[str, Any]:
        """The place in each source."""
        return {
            "sizes": list(self.sizes),
            "weights": list(self.weights),
            "drawn": list(self.drawn),
            "seeds": list(self._seeds),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to a place in each source.

        Raises:
            ValueError: if the state is of other sizes or weights.
        """
        if state["sizes"] != self.sizes or state["weights"] != self.weights:
            raise ValueError(
                f"the state is of sources of sizes {state['sizes']} and weights {state['weights']}, these have "
                f"{self.sizes} and {self.weights}: resume with the same mixture"
            )
        self.drawn = list(state["drawn"])
        for k, seed in enumerate(state["seeds"]):
            if seed is not None:
                self._start_epoch(k, seed)
