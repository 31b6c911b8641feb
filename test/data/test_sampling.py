"""MixtureSampler: weights, epochs of sources, and resumed draws."""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictBase

from torchrl_rloo.data import keys, load_prompts
from torchrl_rloo.data.rows import stack_rows
from torchrl_rloo.data.sampling import AdaptiveGroups, DeferredRerolls, MixtureSampler, PassRatePool, PromptSampler
from torchrl_rloo.envs.transforms import DataLoadingPrimer


def through_disk(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 9), st.floats(0.01, 10)), min_size=1, max_size=6), st.integers(0, 5))
def test_every_prefix_is_near_the_weights_and_every_epoch_whole(sources: list, seed: int) -> None:
    sizes, weights = [s for s, _ in sources], [w for _, w in sources]
    sampler, generator = MixtureSampler(sizes, weights), seeded(seed)
    drawn: list[list[int]] = [[] for _ in sizes]
    bound = 1 - 1 / (2 * len(sizes) - 2) if len(sizes) > 1 else 0
    for n in range(1, 121):
        index = sampler.draw(generator)
        k = sampler.source(index)
        assert sum(sizes[:k]) <= index < sum(sizes[: k + 1])
        drawn[k].append(index)
        for share, had in zip(sampler.weights, drawn, strict=True):
            assert abs(share * n - len(had)) <= bound + 1e-6
    for size, had in zip(sizes, drawn, strict=True):
        for start in range(0, len(had) - size + 1, size):
            assert len(set(had[start : start + size])) == size, "every prompt once before any comes again"
    assert sampler.counts == Counter({f"draws/{k}": len(had) for k, had in enumerate(drawn)})


def test_epochs_differ_and_follow_the_generator() -> None:
    def draws(seed: int) -> list[int]:
        sampler, generator = MixtureSampler([6, 6]), seeded(seed)
        return [sampler.draw(generator) for _ in range(48)]

    assert draws(0) == draws(0) != draws(1)
    first = [i for i in draws(0) if i < 6]
    assert len({tuple(first[a : a + 6]) for a in (0, 6, 12, 18)}) > 1


@pytest.mark.parametrize("batches", [0, 1, 5, 12, 23])
def test_a_restart_goes_on_exactly(batches: int) -> None:
    def new() -> MixtureSampler:
        return MixtureSampler([4, 9, 2], weights=[1, 2, 3], names=["a", "b", "c"])

    sampler, generator = new(), seeded(3)
    for _ in range(batches):
        sampler.draw(generator)
    state = through_disk({"sampler": sampler.state_dict(), "generator": generator.get_state()})
    expected = [sampler.draw(generator) for _ in range(40)]
    resumed, other = new(), seeded(99)
    resumed.draw(other)
    resumed.load_state_dict(state["sampler"])
    other.set_state(state["generator"])
    assert [resumed.draw(other) for _ in range(40)] == expected
    assert resumed.counts == sampler.counts and set(resumed.counts) == {"draws/a", "draws/b", "draws/c"}


def test_another_mixture_cannot_be_resumed() -> None:
    with pytest.raises(ValueError, match="resume with the same mixture"):
        MixtureSampler([4, 8]).load_state_dict(MixtureSampler([4, 9]).state_dict())


# In a primer


def numbered(n: int):
    return load_prompts([{"query": [{"role": "user", "content": f"a{i}"}], "answer": i} for i in range(n)])


def draws(primer: DataLoadingPrimer, n: int) -> list[tuple[int, int]]:
    return [(int(row[keys.PROMPT_ID]), group) for row, group in (primer.draw() for _ in range(n))]


def test_without_a_sampler_draws_are_those_of_the_seeds_permutations() -> None:
    generator = seeded(5)
    expected = [i for _ in range(3) for i in torch.randperm(7, generator=generator).tolist()]
    assert draws(DataLoadingPrimer(numbered(7), seed=5), 21) == list(zip(expected, range(21), strict=True))


def test_a_sampler_is_drawn_from_and_resumed() -> None:
    def new(seed: int) -> DataLoadingPrimer:
        return DataLoadingPrimer(numbered(7), seed=seed, sampler=MixtureSampler([5, 2], weights=[1, 1]))

    assert isinstance(new(0).sampler, PromptSampler)
    primer = new(1)
    first = draws(primer, 9)
    assert Counter(index >= 5 for index, _ in first[:8]) == {True: 4, False: 4}
    assert [group for _, group in first] == list(range(9)) and primer.remaining() == float("inf")
    state = through_disk(primer.state_dict())
    expected = draws(primer, 20)
    resumed = new(2)
    draws(resumed, 3)
    resumed.load_state_dict(state)
    assert draws(resumed, 20) == expected


def test_a_primer_without_a_sampler_does_not_take_the_state_of_one_with() -> None:
    plain, mixed = DataLoadingPrimer(numbered(3)), DataLoadingPrimer(numbered(3), sampler=MixtureSampler([3]))
    for one, other in ((plain, mixed), (mixed, plain)):
        with pytest.raises(ValueError, match="sampler"):
            one.load_state_dict(other.state_dict())


def test_a_sampler_of_another_size_is_found_out() -> None:
    primer = DataLoadingPrimer(numbered(3), sampler=MixtureSampler([30]))
    with pytest.raises(IndexError, match="MixtureSampler chose prompt .* has 3"):
        draws(primer, 30)


@pytest.mark.parametrize("kwargs", [{"epochs": 2}, {"shuffle": False}], ids=str)
def test_epochs_and_order_are_the_samplers(kwargs: dict) -> None:
    with pytest.raises(ValueError, match="cannot be combined with a sampler"):
        DataLoadingPrimer(numbered(3), sampler=MixtureSampler([3]), **kwargs)


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


def pool_draws(pool: PassRatePool, n: int, generator=None) -> Counter:
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


def test_groups_go_to_the_prompts_of_the_largest_value() -> None:
    """Compare with the best of all ways to share the groups, by the value of Knapsack RL."""
    pool, members, draws = PassRatePool(4, floor=0.0, target=(0.0, 1.0)), 4, 8
    pool.update(outcome((0, 0, [1.0] * 8), (1, 1, [1.0, 0.0, 0.0, 0.0]), (2, 2, [0.0] * 12)))
    sampler = AdaptiveGroups(pool, prompts=4, draws=draws, members=members)
    assert isinstance(sampler, PromptSampler)
    rates = [9 / 10, 2 / 6, 1 / 14, 1 / 2]  # with one success and one failure more, as if seen before

    def value(groups: tuple[int, ...]) -> float:
        sizes = [members * n for n in groups]
        return sum((1 - p**n - (1 - p) ** n) * p * (1 - p) ** 2 for p, n in zip(rates, sizes, strict=True))

    best = max((g for g in product(range(1, 6), repeat=4) if sum(g) == draws), key=value)
    generator = seeded()
    drawn = [sampler.draw(generator) for _ in range(draws)]
    assert tuple(drawn.count(p) for p in range(4)) == best and max(best) > 2 and best[0] == 1
    assert sorted(drawn, key=drawn.index) == drawn, "the groups of a prompt follow each other"
    # A run that resumes within a step draws the rest of it
    sampler.draw(generator)
    resumed = AdaptiveGroups(PassRatePool(4, floor=0.0, target=(0.0, 1.0)), prompts=4, draws=draws, members=members)
    resumed.load_state_dict(through_disk(sampler.state_dict()))
    other = torch.Generator()
    other.set_state(generator.get_state())
    assert [resumed.draw(other) for _ in range(12)] == [sampler.draw(generator) for _ in range(12)]
    with pytest.raises(ValueError, match="prompts=9 must be at least 1 and at most draws=8"):
        AdaptiveGroups(pool, prompts=9, draws=8, members=4)


def test_a_pool_with_too_few_prompts_left_ends_no_draw():
    pool = PassRatePool(4)
    pool.draw = lambda generator: 2  # the others are retired
    sampler = AdaptiveGroups(pool, prompts=3, draws=5, members=4)
    assert [sampler.draw(torch.Generator()) for _ in range(5)] == [2] * 5


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
    had = pool_draws(pool, 16)
    assert 1 <= had[3] <= 3 and len(had) > 10
    assert pool.counts == {"pool/entered": 0, "pool/retired": 0, "pool/target_draws": 1, "pool/floor_draws": 15}


def test_the_unseen_are_preferred_and_the_retired_left_out_until_all_are() -> None:
    pool = PassRatePool(3, floor=1.0, window=1, retire=1.0)
    pool.update(outcome((0, 0, [1.0, 1.0])))
    assert set(pool_draws(pool, 50)) == {1, 2}
    for seed in range(20):
        strict = PassRatePool(3, floor=0.0)
        strict.update(outcome((0, 0, [1.0, 1.0]), (1, 1, [0.0, 0.0])))
        assert strict.draw(seeded(seed)) == 2
    pool.update(outcome((1, 1, [1.0]), (2, 2, [1.0])))
    assert set(pool_draws(pool, 50)) == {0, 1, 2}


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
    assert pool_draws(apart, 20) == pool_draws(whole, 20)


def test_a_prompt_of_another_dataset() -> None:
    with pytest.raises(ValueError, match="prompt_id=7 must be at least 0 and below the pool's size=3"):
        PassRatePool(3).update(outcome((0, 7, [1.0])))
    with pytest.raises(ValueError, match="the saved pool has size=3, this pool has size=4"):
        PassRatePool(4).load_state_dict(PassRatePool(3).state_dict())


class Counting:
    """Sampler that rerolls_draws 100, 101, 102, ..., so that any draw below 100 is a re-roll."""

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


def rerolls_draws(rerolls: DeferredRerolls, n: int) -> list[int]:
    return [rerolls.draw(torch.Generator()) for _ in range(n)]


def test_a_failed_prompt_comes_after_growing_delays_and_is_given_up() -> None:
    rerolls = DeferredRerolls(Counting(), delay=3, growth=2.0, max_tries=2)
    assert isinstance(rerolls, PromptSampler)
    rerolls.update(outcome((0, 7, FAILED)))
    assert rerolls_draws(rerolls, 4) == [100, 101, 102, 7], "once 3 rerolls_draws have passed"
    rerolls.update(outcome((1, 7, FAILED)))
    assert rerolls_draws(rerolls, 7) == [103, 104, 105, 106, 107, 108, 7], "6 rerolls_draws"
    for group in (2, 3):
        rerolls.update(outcome((group, 7, FAILED)))
    assert 7 not in rerolls_draws(rerolls, 40)
    assert rerolls.counts == {"rerolls/queued": 2, "rerolls/drawn": 2, "rerolls/given_up": 1}
    rerolls.update(outcome((4, 7, SOLVED)))
    assert rerolls.counts["rerolls/solved"] == 1
    rerolls.update(outcome((5, 7, FAILED)))
    assert 7 in rerolls_draws(rerolls, 4), "after a success it may be queued again"


def test_rerolls_begin_after_the_start():
    rerolls = DeferredRerolls(Counting(), delay=1, start=6)
    rerolls.update(outcome((0, 7, FAILED)))
    assert rerolls_draws(rerolls, 8) == [100, 101, 102, 103, 104, 105, 7, 106]


def test_a_prompt_that_is_solved_meanwhile_leaves_the_queue() -> None:
    rerolls = DeferredRerolls(Counting(), delay=1)
    rerolls.update(outcome((0, 7, FAILED), (1, 8, FAILED)))
    rerolls.update(outcome((2, 7, SOLVED)))
    assert len(rerolls) == 1 and 7 not in rerolls_draws(rerolls, 20)
    assert rerolls.counts["rerolls/solved"] == 0, "it was not re-rolled"


def test_a_prompt_that_waits_is_not_queued_again() -> None:
    rerolls = DeferredRerolls(Counting(), delay=3)
    rerolls.update(outcome((0, 7, FAILED)))
    rerolls_draws(rerolls, 2)
    rerolls.update(outcome((1, 7, FAILED)))
    assert rerolls_draws(rerolls, 2) == [102, 7] and rerolls.counts["rerolls/queued"] == 1


def test_abstentions_and_thresholds() -> None:
    rerolls = DeferredRerolls(Counting(), delay=1, threshold=0.2)
    rerolls.update(outcome((0, 1, (math.nan, math.nan)), (1, 2, (0.2, math.nan)), (2, 3, (0.3, 0.0))))
    assert len(rerolls) == 1 and 2 in rerolls_draws(rerolls, 3)


@settings(deadline=None, max_examples=20)
@given(st.sampled_from([0.5, 0.3, 0.25, 0.1]), st.integers(1, 20), st.integers(1, 20))
def test_the_share_of_any_stretch_of_draws(max_share: float, delay: int, length: int) -> None:
    rerolls = DeferredRerolls(Counting(), delay=delay, max_share=max_share)
    rerolls.update(outcome(*[(p, p, FAILED) for p in range(40)]))
    again = [prompt < 100 for prompt in rerolls_draws(rerolls, 120)]
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
    assert rerolls_draws(plain, 30) == rerolls_draws(shuffled, 30)
    assert plain.counts == shuffled.counts


def test_what_the_inner_sampler_reports_is_reported() -> None:
    pool = PassRatePool(4)
    rerolls = DeferredRerolls(pool, delay=1)
    drawn = rerolls_draws(rerolls, 3)
    rerolls.update(outcome((0, drawn[0], FAILED)))
    assert rerolls.metrics() == pool.metrics() and rerolls.metrics()
    assert rerolls.counts == pool.counts + Counter({"rerolls/queued": 1}) and pool.counts
    assert DeferredRerolls(Counting(), delay=1).metrics() == {}


@pytest.mark.parametrize("stop", [0, 2, 5])
@pytest.mark.parametrize("kind", ["pool", "rerolls"])
def test_samplers_restart_exactly(kind: str, stop: int) -> None:
    def make() -> PassRatePool | DeferredRerolls:
        if kind == "pool":
            return PassRatePool(9, window=2, retire=1.0)
        return DeferredRerolls(MixtureSampler([6, 3]), delay=4, max_tries=2, max_share=0.3)

    def feed(sampler: PassRatePool | DeferredRerolls, generator: torch.Generator, steps: range) -> list[int]:
        drawn = []
        for step in steps:
            prompts = [sampler.draw(generator) for _ in range(4)]
            drawn += prompts
            sampler.update(outcome(*[(4 * step + i, p, SOLVED if p > 2 else FAILED) for i, p in enumerate(prompts)]))
        return drawn

    sampler, generator = make(), seeded(1)
    feed(sampler, generator, range(stop))
    sampler.draw(generator)  # its outcome is not known yet
    state, place = through_disk([sampler.state_dict(), generator.get_state()])
    expected = feed(sampler, generator, range(stop, 10))
    resumed, generator = make(), seeded(2)
    resumed.load_state_dict(state)
    generator.set_state(place)
    assert feed(resumed, generator, range(stop, 10)) == expected
    assert resumed.counts == sampler.counts and resumed.metrics() == sampler.metrics()
    assert sampler.counts["rerolls/drawn" if kind == "rerolls" else "pool/target_draws"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        *[(partial(MixtureSampler, *a), m) for a, m in [
            (([],), "sizes="), (([3, 0],), "sizes="), (([3, 4], [1.0]), "weights=.* 2 sources"),
            (([3, 4], [1.0, 0.0]), "weights="), (([3, 4], None, ["a", "a"]), "names="),
        ]],
        *[(partial(PassRatePool, **{"size": 3, **k}), f"{next(iter(k))}=") for k in [
            {"size": 0}, {"window": 0}, {"floor": 1.5}, {"target": (0.9, 0.1)}, {"retire": 0.5},
        ]],
        *[(partial(DeferredRerolls, Counting(), **{"delay": 1, **k}), f"{next(iter(k))}=") for k in [
            {"delay": 0}, {"growth": 0.5}, {"max_share": 0.6}, {"max_share": 0.0}, {"max_tries": 0},
        ]],
    ],
)  # fmt: skip
def test_arguments_are_checked(make: Callable, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
