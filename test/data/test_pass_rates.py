"""PassRatePool: draws and estimates, which do not depend on the order of arrival."""

from __future__ import annotations

import io
import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictBase

from torchrl_rloo.data import keys
from torchrl_rloo.data.pass_rates import PassRatePool
from torchrl_rloo.data.rows import stack_rows
from torchrl_rloo.data.sampling import PromptSampler

NAN = math.nan


def outcome(*groups: tuple[int, int, list[float]]) -> TensorDictBase:
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


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draws(pool: PassRatePool, n: int, generator=None) -> Counter:
    generator = generator or seeded()
    return Counter(pool.draw(generator) for _ in range(n))


def test_estimates_and_standings() -> None:
    pool = PassRatePool(6, target=(0.25, 0.75), window=2, retire=1.0)
    assert isinstance(pool, PromptSampler)
    pool.update(
        outcome(
            (0, 0, [1.0, 0.0, NAN, 0.5]),  # one of three that answered
            (1, 1, [0.0, 0.0]),
            (2, 2, [1.0, 1.0]),
            (3, 3, [1.0, 1.0]),
            (4, 3, [1.0, 1.0]),
            (5, 4, [NAN, NAN]),
        )
    )
    assert [pool.pass_rate(p) for p in range(6)] == [pytest.approx(1 / 3), 0.0, 1.0, 1.0, None, None]
    expected = ["in_range", "too_hard", "too_easy", "retired", "unseen", "unseen"]
    assert [pool.difficulty(p) for p in range(6)] == expected
    assert pool.metrics() == {
        "pool/unseen": 2 / 6,
        "pool/in_range": 1 / 6,
        "pool/too_hard": 1 / 6,
        "pool/too_easy": 1 / 6,
        "pool/retired": 1 / 6,
    }
    assert pool.counts["pool/retired"] == 1 and pool.counts["pool/entered"] == 0


def test_only_the_last_groups_count() -> None:
    pool = PassRatePool(1, window=2)
    for group, returns in enumerate(([0.0, 0.0], [0.0, 1.0], [1.0, 1.0])):
        pool.update(outcome((group, 0, returns)))
    assert pool.pass_rate(0) == 0.75 and pool.difficulty(0) == "in_range"
    assert pool.counts["pool/entered"] == 1, "it was too hard before"


def test_prompts_in_range_come_first_and_none_starves() -> None:
    pool, generator, had = PassRatePool(10, floor=0.2, window=1), seeded(), Counter()
    for step in range(300):
        pool.update(outcome(*[(10 * step + p, p, [1.0, 0.0] if p < 2 else [0.0, 0.0]) for p in range(10)]))
        had[pool.draw(generator)] += 1
    assert had[0] + had[1] == pytest.approx(300 * (0.8 + 0.2 * 0.2), rel=0.05)
    assert min(had[p] for p in range(10)) > 300 * 0.02 / 2
    assert pool.counts["pool/floor_draws"] == pytest.approx(60, rel=0.2)
    assert pool.counts["pool/floor_draws"] + pool.counts["pool/target_draws"] == 300


def test_the_last_prompt_in_range_does_not_fill_the_batch() -> None:
    pool = PassRatePool(50, floor=0.0)
    pool.update(outcome(*[(p, p, [1.0, 0.0] if p == 3 else [1.0, 1.0]) for p in range(50)]))
    had = draws(pool, 16)
    assert 1 <= had[3] <= 3 and len(had) > 10
    assert pool.counts == {"pool/entered": 0, "pool/retired": 0, "pool/target_draws": 1, "pool/floor_draws": 15}


def test_the_unseen_are_preferred_and_the_retired_left_out_until_all_are() -> None:
    pool = PassRatePool(3, floor=1.0, window=1, retire=1.0)
    pool.update(outcome((0, 0, [1.0, 1.0])))
    assert set(draws(pool, 50)) == {1, 2}
    for seed in range(20):
        strict = PassRatePool(3, floor=0.0)
        strict.update(outcome((0, 0, [1.0, 1.0]), (1, 1, [0.0, 0.0])))
        assert strict.draw(seeded(seed)) == 2
    pool.update(outcome((1, 1, [1.0]), (2, 2, [1.0])))
    assert set(draws(pool, 50)) == {0, 1, 2}


GROUPS = st.lists(
    st.tuples(st.integers(0, 3), st.lists(st.sampled_from([0.0, 1.0, NAN]), min_size=1, max_size=4)),
    min_size=1,
    max_size=12,
)


@settings(deadline=None, max_examples=50)
@given(GROUPS, st.data())
def test_arrival_changes_no_estimate(groups: list, data) -> None:
    rows = [(g, p, [r]) for g, (p, returns) in enumerate(groups) for r in returns]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=3)))
    shuffled, whole, apart = data.draw(st.permutations(rows)), PassRatePool(4, window=2), PassRatePool(4, window=2)
    whole.update(outcome(*rows))
    for a, b in zip([0, *cuts], [*cuts, len(rows)], strict=True):
        if a < b:
            apart.update(outcome(*shuffled[a:b]))
    assert [apart.pass_rate(p) for p in range(4)] == [whole.pass_rate(p) for p in range(4)]
    assert draws(apart, 20) == draws(whole, 20)


@pytest.mark.parametrize("stop", [0, 1, 3])
def test_a_restart_goes_on_exactly(stop: int) -> None:
    def feed(pool: PassRatePool, generator: torch.Generator, steps: range) -> list[int]:
        drawn = []
        for step in steps:
            prompts = [pool.draw(generator) for _ in range(4)]
            drawn += prompts
            pool.update(outcome(*[(4 * step + i, p, [1.0, float(p % 2)]) for i, p in enumerate(prompts)]))
        return drawn

    pool, generator = PassRatePool(9, window=2, retire=1.0), seeded(1)
    feed(pool, generator, range(stop))
    pool.draw(generator)  # its outcome is not known yet
    file = io.BytesIO()
    torch.save([pool.state_dict(), generator.get_state()], file)
    file.seek(0)
    expected = feed(pool, generator, range(stop, 8))
    state, place = torch.load(file, weights_only=True)
    resumed, generator = PassRatePool(9, window=2, retire=1.0), seeded(2)
    resumed.load_state_dict(state)
    generator.set_state(place)
    assert feed(resumed, generator, range(stop, 8)) == expected
    assert resumed.counts == pool.counts and resumed.metrics() == pool.metrics()


@pytest.mark.parametrize(
    "kwargs",
    [{"size": 0}, {"window": 0}, {"floor": 1.5}, {"target": (0.9, 0.1)}, {"retire": 0.5}],
    ids=str,
)
def test_arguments_are_checked(kwargs: dict) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(kwargs))}="):
        PassRatePool(**{"size": 3, **kwargs})


def test_a_prompt_of_another_dataset() -> None:
    with pytest.raises(ValueError, match="prompt_id=7 must be at least 0 and below the pool's size=3"):
        PassRatePool(3).update(outcome((0, 7, [1.0])))
    with pytest.raises(ValueError, match="the saved pool has size=3, this pool has size=4"):
        PassRatePool(4).load_state_dict(PassRatePool(3).state_dict())
