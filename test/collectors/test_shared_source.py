"""SharedSource: rows of rank 0 on all ranks, and the sampler's weights where it samples.

Several ranks are tested with the recipe, in ``test/sota_implementations/test_rloo_ranks.py``.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict

from torchrl_rloo.collectors import SharedSource, StepRows
from torchrl_rloo.data import keys, stack_rows
from torchrl_rloo.runtime.ranks import Ranks


class Recorded(torch.nn.Module):
    """Module that notes where it is moved."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def to(self, place):
        self.places.append(str(place))
        return self


class Source:
    """Source of two rows, one of which has a signal."""

    def __init__(self, module: Recorded | None = None) -> None:
        self.collector, self.module = SimpleNamespace(policy_version=3, num_tokens=7), module

    def collect(self) -> StepRows:
        if self.module is not None:
            self.module.places.append("samples")
        rows = [TensorDict({keys.TOKENS: torch.arange(n)}, []) for n in (2, 3)]
        return StepRows(stack_rows(rows[:1]), stack_rows(rows))


def test_a_single_process_gets_its_own_rows_and_numbers():
    source = SharedSource(Ranks.single(), Source(), None)
    rows, sampled = source.collect()
    assert (len(rows), len(sampled)) == (1, 2) and rows[0][keys.TOKENS] is sampled[0][keys.TOKENS]
    assert (source.policy_version, source.num_tokens) == (3, 7)
    assert source.on_main(lambda: "greedy", "evaluation") == "greedy"


def test_rows_are_completed_once_each():
    seen = []
    source = SharedSource(Ranks.single(), Source(), None, finish=lambda rows: seen.append(len(rows)))
    source.collect()
    assert seen == [2]


def test_an_offloaded_sampler_is_on_the_device_only_while_it_samples():
    module = Recorded()
    source = SharedSource(Ranks.single("cuda"), Source(module), None, offloaded=module)
    assert module.places == ["cpu"]
    source.collect()
    assert module.places == ["cpu", "cuda", "samples", "cpu"]
    with pytest.raises(ZeroDivisionError):
        source.on_main(lambda: 1 / 0, "evaluation")
    assert module.places[-2:] == ["cuda", "cpu"]
