"""DataLoadingPrimer: whole groups, epochs, and a position in the data that survives a restart."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from torchrl_rloo.data import keys, load_prompts, notices
from torchrl_rloo.envs import ChatEnv, DatasetChatEnv
from torchrl_rloo.envs.transforms import DataLoadingPrimer, DatasetExhaustedError


def numbered(n: int):
    return load_prompts([{"query": [{"role": "user", "content": f"a{i}"}], "answer": i} for i in range(n)])


@pytest.fixture(scope="module")
def make_env(tokenizer) -> Callable[..., DatasetChatEnv]:
    def make(n: int = 7, prompts_per_batch: int = 2, **kwargs) -> DatasetChatEnv:
        return DatasetChatEnv(numbered(n), tokenizer, prompts_per_batch=prompts_per_batch, **kwargs)

    return make


def answers(env: DatasetChatEnv) -> list[int]:
    return [row["answer"] for row in env.reset().unbind(0)]


def drawn(env: DatasetChatEnv, batches: int) -> list[tuple[int, int]]:
    """Return ``(answer, group_id)`` of the rows of some resets."""
    resets = [env.reset() for _ in range(batches)]
    return [(row["answer"], int(row[keys.GROUP_ID])) for rows in resets for row in rows.unbind(0)]


def test_a_draw_is_copied_under_one_fresh_group_id(make_env: Callable) -> None:
    env = make_env(num_generations=3)
    seen: set[int] = set()
    for _ in range(5):
        rows = env.reset()
        assert rows.batch_size == (6,) and rows[keys.GROUP_ID].dtype == torch.int64
        assert rows[keys.GROUP_SIZE].tolist() == [3] * 6
        groups = [rows[:3], rows[3:]]
        for group in groups:
            ids = set(group[keys.GROUP_ID].tolist())
            assert len(ids) == 1 and not ids & seen
            seen |= ids
            assert len({row["answer"] for row in group.unbind(0)}) == 1
            assert len({row[keys.QUERY][0]["content"] for row in group.unbind(0)}) == 1


def test_a_batch_of_more_prompts_than_there_are_is_logged(make_env: Callable, caplog, monkeypatch) -> None:
    monkeypatch.setattr(notices, "_SHOWN", set())
    make_env(n=3, prompts_per_batch=3)
    assert not caplog.messages
    for _ in range(2):
        make_env(n=3, prompts_per_batch=4)
    assert caplog.messages == ["prompts_per_batch=4 exceeds the 3 prompts: batches repeat prompts"]


@pytest.mark.parametrize("shuffle", [False, True])
def test_every_epoch_draws_every_prompt_once(shuffle: bool, make_env: Callable) -> None:
    env = make_env(n=6, prompts_per_batch=4, shuffle=shuffle, epochs=4)
    order = [answer for answer, _ in drawn(env, 6)]
    epochs = [order[i : i + 6] for i in range(0, 24, 6)]
    assert all(sorted(epoch) == list(range(6)) for epoch in epochs)
    if shuffle:
        assert len({tuple(e) for e in epochs}) == 4, "each epoch has a different order"
    else:
        assert epochs == [list(range(6))] * 4
    with pytest.raises(DatasetExhaustedError):
        env.reset()


def test_without_epochs_it_goes_on_for_ever(make_env: Callable) -> None:
    env = make_env(n=3, prompts_per_batch=2)
    counts = Counter(answer for answer, _ in drawn(env, 30))
    assert set(counts.values()) == {20} and env.primer.remaining() == float("inf")


def test_what_does_not_fill_a_batch_is_logged_and_not_drawn(make_env: Callable, caplog) -> None:
    env = make_env(n=7, prompts_per_batch=2, epochs=1, shuffle=False)
    assert [a for a, _ in drawn(env, 3)] == [0, 1, 2, 3, 4, 5] and env.primer.remaining() == 1
    with caplog.at_level(logging.WARNING), pytest.raises(DatasetExhaustedError, match="1 draws are left"):
        env.reset()
    assert "1 prompts" in caplog.text
    with pytest.raises(DatasetExhaustedError):
        env.reset()


def test_too_few_prompts_for_one_batch(make_env: Callable) -> None:
    """Refuse a run that would train 0 steps."""
    with pytest.raises(ValueError, match=r"3 prompts x 2 epochs.*8"):
        make_env(n=3, prompts_per_batch=8, epochs=2).reset()


@pytest.mark.parametrize("kwargs", [{"num_generations": 0}, {"epochs": 0}, {"epochs": -1}], ids=str)
def test_arguments_are_checked(kwargs: dict) -> None:
    (name, value), *_ = kwargs.items()
    with pytest.raises(ValueError, match=f"{name}={value}"):
        DataLoadingPrimer(numbered(3), **kwargs)


def test_groups_are_drawn_whole(tokenizer) -> None:
    env = ChatEnv(tokenizer, batch_size=4).append_transform(DataLoadingPrimer(numbered(3), num_generations=3))
    with pytest.raises(ValueError, match="4 rows .* num_generations=3"):
        env.reset()


# order


def test_the_order_is_the_seeds_and_no_other_generators(make_env: Callable) -> None:
    torch.manual_seed(0)
    one, before = make_env(seed=5), torch.get_rng_state()
    order = drawn(one, 9)
    assert torch.equal(torch.get_rng_state(), before), "the global stream is left alone"
    torch.manual_seed(1)
    two = make_env(seed=5)
    two.set_seed(123)
    torch.rand(10)
    assert drawn(two, 9) == order
    assert drawn(make_env(seed=6), 9) != order


# resume


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("batches", [0, 1, 2, 3, 7])
def test_a_restart_draws_exactly_what_would_have_come(
    batches: int, shuffle: bool, make_env: Callable, tmp_path: Path
) -> None:
    """Restart from a file at the start, in the middle, across the end of an epoch, and in later epochs."""
    settings = {"n": 5, "num_generations": 2, "shuffle": shuffle, "seed": 3}
    env = make_env(**settings)
    drawn(env, batches)
    torch.save(env.state_dict(), tmp_path / "state.pt")
    expected = drawn(env, 12)
    resumed = make_env(**settings | {"seed": 99})
    drawn(resumed, 4)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert drawn(resumed, 12) == expected


def test_a_state_does_not_change_after_it_was_taken(make_env: Callable) -> None:
    env = make_env(n=5, seed=3)
    drawn(env, 1)
    state = env.state_dict()
    expected = drawn(env, 9)
    other = make_env(n=5, seed=3)
    other.load_state_dict(state)
    assert drawn(other, 9) == expected


def test_a_restart_keeps_the_end_of_the_epochs(make_env: Callable) -> None:
    env = make_env(n=4, epochs=2)
    drawn(env, 3)
    resumed = make_env(n=4, epochs=2)
    resumed.load_state_dict(env.state_dict())
    drawn(resumed, 1)
    for exhausted in (resumed, make_env(n=4, epochs=2)):
        exhausted.load_state_dict(resumed.state_dict())
        with pytest.raises(DatasetExhaustedError):
            exhausted.reset()


def test_a_state_of_another_dataset_is_refused(make_env: Callable) -> None:
    with pytest.raises(ValueError, match="fingerprint"):
        make_env(n=5).load_state_dict(make_env(n=6).state_dict())


# partial resets


def test_a_partial_reset_draws_whole_groups_for_the_rows_named(make_env: Callable) -> None:
    env = make_env(n=7, prompts_per_batch=3, num_generations=2, shuffle=False)
    rows = env.reset()
    for row, again in zip(rows.unbind(0), (False, False, True, True, False, False), strict=True):
        row.set("_reset", torch.tensor([again]))
    out = env.reset(rows)
    assert [row["answer"] for row in out.unbind(0)] == [0, 0, 3, 3, 2, 2]
    assert out[keys.GROUP_ID].tolist() == [0, 0, 3, 3, 2, 2]


def test_a_partial_reset_that_splits_a_group_is_refused(make_env: Callable) -> None:
    env = make_env(n=7, prompts_per_batch=3, num_generations=2)
    rows = env.reset()
    for i, row in enumerate(rows.unbind(0)):
        row.set("_reset", torch.tensor([i == 0]))
    with pytest.raises(ValueError, match="num_generations=2"):
        env.reset(rows)


def test_a_draw_that_fails_takes_nothing(make_env: Callable) -> None:
    """Expect an exhausted dataset to keep its position, so that a later checkpoint is correct."""
    env = make_env(n=5, prompts_per_batch=4, epochs=1, shuffle=False)
    drawn(env, 1)
    before = {k: v for k, v in env.primer.get_extra_state().items() if k != "epoch_start"}
    with pytest.raises(DatasetExhaustedError):
        env.reset()
    assert {k: v for k, v in env.primer.get_extra_state().items() if k != "epoch_start"} == before
