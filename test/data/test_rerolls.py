"""DeferredRerolls: delay, number and share of re-rolls."""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictBase

from torchrl_rloo.data import keys
from torchrl_rloo.data.pass_rates import PassRatePool
from torchrl_rloo.data.rerolls import DeferredRerolls
from torchrl_rloo.data.rows import stack_rows
from torchrl_rloo.data.sampling import MixtureSampler, PromptSampler


def outcome(*groups: tuple[int, int, Sequence[float]]) -> TensorDictBase:
    """Make rows of groups ``(group_id, prompt_id, returns)``."""
    return stack_rows(
        [
            TensorDict(
                {keys.GROUP_ID: torch.tensor(g), keys.PROMPT_ID: torch.tensor(p), keys.REWARD: torch.tensor([[r]])}
            )
            for g, p, returns in groups
            for r in returns
        ]
    )


class Counting:
    """Sampler that draws 100, 101, 102, ..., so that any draw below 100 is a re-roll."""

    def __init__(self):
        self.n = 99

    def draw(self, generator: torch.Generator) -> int:
        self.n += 1
        return self.n

    def state_dict(self) -> dict[str, int]:
        return {"n": self.n}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.n = state["n"]


FAILED, SOLVED = (0.0, 0.0), (1.0, 0.0)


def draws(rerolls: DeferredRerolls, n: int) -> list[int]:
    return [rerolls.draw(torch.Generator()) for _ in range(n)]


def test_a_failed_prompt_comes_after_growing_delays_and_is_given_up() -> None:
    rerolls = DeferredRerolls(Counting(), delay=3, growth=2.0, max_tries=2)
    assert isinstance(rerolls, PromptSampler)
    rerolls.update(outcome((0, 7, FAILED)))
    assert draws(rerolls, 4) == [100, 101, 102, 7], "once 3 draws have passed"
    rerolls.update(outcome((1, 7, FAILED)))
    assert draws(rerolls, 7) == [103, 104, 105, 106, 107, 108, 7], "6 draws"
    for group in (2, 3):
        rerolls.update(outcome((group, 7, FAILED)))
    assert 7 not in draws(rerolls, 40)
    assert rerolls.counts == {"rerolls/queued": 2, "rerolls/drawn": 2, "rerolls/given_up": 1}
    rerolls.update(outcome((4, 7, SOLVED)))
    assert rerolls.counts["rerolls/solved"] == 1
    rerolls.update(outcome((5, 7, FAILED)))
    assert 7 in draws(rerolls, 4), "after a success it may be queued again"


def test_a_prompt_that_is_solved_meanwhile_leaves_the_queue() -> None:
    rerolls = DeferredRerolls(Counting(), delay=1)
    rerolls.update(outcome((0, 7, FAILED), (1, 8, FAILED)))
    rerolls.update(outcome((2, 7, SOLVED)))
    assert len(rerolls) == 1 and 7 not in draws(rerolls, 20)
    assert rerolls.counts["rerolls/solved"] == 0, "it was not re-rolled"


def test_a_prompt_that_waits_is_not_queued_again() -> None:
    rerolls = DeferredRerolls(Counting(), delay=3)
    rerolls.update(outcome((0, 7, FAILED)))
    draws(rerolls, 2)
    rerolls.update(outcome((1, 7, FAILED)))
    assert draws(rerolls, 2) == [102, 7] and rerolls.counts["rerolls/queued"] == 1


def test_the_spacing_holds_across_a_restart() -> None:
    rerolls, resumed = (DeferredRerolls(Counting(), delay=10, max_share=0.1) for _ in range(2))
    rerolls.update(outcome((0, 7, FAILED), (1, 8, FAILED)))
    assert draws(rerolls, 11)[-1] == 7
    resumed.load_state_dict(rerolls.state_dict())
    after = draws(resumed, 12)
    assert after == draws(rerolls, 12) and after.index(8) == 9


def test_abstentions_and_thresholds() -> None:
    rerolls = DeferredRerolls(Counting(), delay=1, threshold=0.2)
    rerolls.update(outcome((0, 1, (math.nan, math.nan)), (1, 2, (0.2, math.nan)), (2, 3, (0.3, 0.0))))
    assert len(rerolls) == 1 and 2 in draws(rerolls, 3)


@settings(deadline=None, max_examples=20)
@given(st.sampled_from([0.5, 0.3, 0.25, 0.1]), st.integers(1, 20), st.integers(1, 20))
def test_the_share_of_any_stretch_of_draws(max_share: float, delay: int, length: int) -> None:
    rerolls = DeferredRerolls(Counting(), delay=delay, max_share=max_share)
    rerolls.update(outcome(*[(p, p, FAILED) for p in range(40)]))
    again = [prompt < 100 for prompt in draws(rerolls, 120)]
    assert any(again)
    for start in range(len(again) - length):
        assert sum(again[start : start + length]) <= math.ceil(length * max_share)


@settings(deadline=None, max_examples=30)
@given(st.permutations(range(6)))
def test_the_order_of_rows_changes_no_draw(order: list[int]) -> None:
    groups = [(0, 5, FAILED), (1, 3, SOLVED), (2, 3, FAILED), (3, 4, FAILED), (4, 5, SOLVED), (5, 1, FAILED)]
    plain, shuffled = (DeferredRerolls(Counting(), delay=2) for _ in range(2))
    plain.update(outcome(*groups))
    shuffled.update(outcome(*[groups[i] for i in order]))
    assert draws(plain, 30) == draws(shuffled, 30)
    assert plain.counts == shuffled.counts


@pytest.mark.parametrize("stop", [0, 2, 5])
def test_a_restart_goes_on_exactly(stop: int) -> None:
    def make() -> DeferredRerolls:
        return DeferredRerolls(MixtureSampler([6, 3]), delay=4, max_tries=2)

    def feed(rerolls: DeferredRerolls, generator: torch.Generator, steps: range) -> list[int]:
        drawn = []
        for step in steps:
            prompts = [rerolls.draw(generator) for _ in range(4)]
            drawn += prompts
            rerolls.update(outcome(*[(4 * step + i, p, SOLVED if p > 2 else FAILED) for i, p in enumerate(prompts)]))
        return drawn

    rerolls, generator = make(), torch.Generator().manual_seed(1)
    feed(rerolls, generator, range(stop))
    file = io.BytesIO()
    torch.save([rerolls.state_dict(), generator.get_state()], file)
    file.seek(0)
    expected = feed(rerolls, generator, range(stop, 10))
    state, place = torch.load(file, weights_only=True)
    resumed, generator = make(), torch.Generator()
    resumed.load_state_dict(state)
    generator.set_state(place)
    assert feed(resumed, generator, range(stop, 10)) == expected and resumed.counts == rerolls.counts
    assert rerolls.counts["rerolls/drawn"]


@pytest.mark.parametrize(
    "kwargs", [{"delay": 0}, {"growth": 0.5}, {"max_share": 0.6}, {"max_share": 0.0}, {"max_tries": 0}], ids=str
)
def test_arguments_are_checked(kwargs: dict) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(kwargs))}="):
        DeferredRerolls(Counting(), **{"delay": 1, **kwargs})


def test_what_the_inner_sampler_reports_is_reported() -> None:
    pool = PassRatePool(4)
    rerolls = DeferredRerolls(pool, delay=1)
    drawn = draws(rerolls, 3)
    rerolls.update(outcome((0, drawn[0], FAILED)))
    assert rerolls.metrics() == pool.metrics() and rerolls.metrics()
    assert rerolls.counts == pool.counts + Counter({"rerolls/queued": 1}) and pool.counts
    assert DeferredRerolls(Counting(), delay=1).metrics() == {}
