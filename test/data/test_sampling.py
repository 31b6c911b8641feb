"""MixtureSampler: weights, epochs of sources, and resumed draws."""

from __future__ import annotations

import io
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_rloo.data import keys, load_prompts
from torchrl_rloo.data.sampling import MixtureSampler, PromptSampler
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


def test_every_batch_has_its_shares() -> None:
    sampler, generator = MixtureSampler([50, 7, 3], weights=[5, 2, 1]), seeded()
    for _ in range(40):
        assert Counter(sampler.source(sampler.draw(generator)) for _ in range(8)) == {0: 5, 1: 2, 2: 1}


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([],), "sizes="),
        (([3, 0],), "sizes="),
        (([3, 4], [1.0]), "weights=.* 2 sources"),
        (([3, 4], [1.0, 0.0]), "weights="),
        (([3, 4], None, ["a", "a"]), "names="),
    ],
)
def test_arguments_are_checked(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MixtureSampler(*arguments)


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
