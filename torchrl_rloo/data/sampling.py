"""Prompt samplers: the protocol, and mixtures of sources."""

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
