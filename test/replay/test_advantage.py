from __future__ import annotations

import io
import logging
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, TensorDict, TensorDictBase, lazy_stack
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.modules.llm.policies import LogProbs, Masks, Tokens

from torchrl_rloo.data import keys, stack_rows
from torchrl_rloo.functional import leave_one_out
from torchrl_rloo.replay import MCAdvantage, drop_rows, drop_zero_advantage

NAN = float("nan")


def make_row(group: int, reward: float, ident: int = 0, *, size: int | None = None) -> TensorDictBase:
    """Make a row as a collector does; ``ident`` determines its tokens and its length."""
    length = 3 + ident % 4
    action = torch.arange(length) >= 2
    row = TensorDict(
        {
            keys.GROUP_ID: torch.tensor(group),
            keys.POLICY_VERSION: torch.tensor(0),
            keys.REWARD: torch.tensor([[reward]]),
            keys.TRUNCATED: torch.tensor([False]),
        }
    )
    row.set("tokens", Tokens(full=torch.arange(length) + 10 * ident, prompt=torch.arange(2) + 10 * ident))
    row.set("masks", Masks(all_assistant_mask=action, all_attention_mask=torch.ones(length, dtype=torch.bool)))
    row.set("log_probs", LogProbs(full=torch.where(action, -1.0, 0.0)))
    row.set("answer", NonTensorData("85")).set("level", NonTensorData({"of": [1, 2]}))
    return row if size is None else row.set(keys.GROUP_SIZE, torch.tensor(size))


def make_buffer(num_generations: int | None = 2, **settings) -> tuple[ReplayBuffer, MCAdvantage]:
    transform = MCAdvantage(num_generations, **settings)
    return ReplayBuffer(storage=LazyStackStorage(256), transform=transform), transform


def identity(row: TensorDictBase) -> int:
    return int(row[keys.TOKENS][0]) // 10


def contents(buffer: ReplayBuffer) -> dict[int, float]:
    """Return the advantage of each row in the buffer by its tokens, and check that each row occurs once."""
    rows = buffer[:].unbind(0) if len(buffer) else ()
    found = {identity(row): float(row[keys.ADVANTAGE]) for row in rows}
    assert len(found) == len(rows)
    return found


@st.composite
def histories(draw):
    """Draw groups of 1 to 5 rows, some abstaining, in any order and split into any batches."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    reward = st.one_of(st.just(NAN), st.floats(-10, 10, width=32))
    members = [(group, draw(reward), size) for group, size in enumerate(sizes) for _ in range(size)]
    rows = [(group, reward, ident, size) for ident, (group, reward, size) in enumerate(members)]
    order = draw(st.permutations(range(len(rows))))
    cuts = sorted(draw(st.lists(st.integers(1, len(rows)), max_size=6)))
    bounds = [0, *cuts, len(rows)]
    return rows, [order[a:b] for a, b in zip(bounds, bounds[1:], strict=False) if a < b]


@settings(deadline=None, max_examples=40)
@given(histories())
def test_order_and_batch_split_change_no_advantage(history):
    rows, batches = history
    buffer, transform = make_buffer(num_generations=None)
    for batch in batches:
        buffer.extend(stack_rows([make_row(g, r, i, size=n) for g, r, i, n in (rows[j] for j in batch)]))
    rewards = torch.tensor([reward for _, reward, _, _ in rows])
    expected = leave_one_out(rewards, torch.tensor([group for group, *_ in rows]))
    assert contents(buffer) == pytest.approx(dict(enumerate(expected.tolist())), abs=1e-5)
    assert transform.pending_rows == 0
    assert transform.counts["advantage/rows"] == len(rows) and transform.counts["advantage/groups"] == rows[-1][0] + 1
    assert transform.counts["advantage/late_rows"] == transform.counts["advantage/expired_rows"] == 0


@settings(deadline=None, max_examples=25)
@given(histories(), st.data())
def test_a_restart_in_the_middle_changes_nothing(history, data):
    rows, batches = history
    stop = data.draw(st.integers(0, len(batches)))
    buffer, transform = make_buffer(None, max_pending_groups=2)
    resumed, resumed_transform = make_buffer(None, max_pending_groups=2)

    def feed(target: ReplayBuffer, part: Sequence[Sequence[int]]) -> None:
        for batch in part:
            target.extend(stack_rows([make_row(g, r, i, size=n) for g, r, i, n in (rows[j] for j in batch)]))

    feed(buffer, batches[:stop])
    resumed_transform.load_state_dict(through_disk(transform.state_dict()))
    at_stop = set(contents(buffer))
    feed(buffer, batches[stop:])
    feed(resumed, batches[stop:])
    whole = {ident: advantage for ident, advantage in contents(buffer).items() if ident not in at_stop}
    assert contents(resumed) == whole
    assert resumed_transform.counts == transform.counts
    assert resumed_transform.pending_rows == transform.pending_rows


def through_disk(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_a_restored_row_is_the_row_that_was_saved():
    buffer, transform = make_buffer(2)
    buffer.extend(stack_rows([make_row(0, 1.0, 5)]))
    resumed, resumed_transform = make_buffer(2)
    resumed.load_state_dict(through_disk(buffer.state_dict()))  # the buffer's own checkpoint has the pending rows
    assert transform.pending_rows == resumed_transform.pending_rows == 1
    for target in (buffer, resumed):
        target.extend(stack_rows([make_row(0, 3.0, 6)]))
    for row, restored in zip(buffer[:].unbind(0), resumed[:].unbind(0), strict=True):
        assert set(row.keys(True, True)) == set(restored.keys(True, True))
        assert (restored["answer"], restored["level"]) == ("85", {"of": [1, 2]})
        for key in set(row.keys(True, True)) - {"answer", "level"}:
            assert torch.equal(row[key], restored[key]) and row[key].dtype == restored[key].dtype, key
        for name in ("tokens", "masks", "log_probs"):
            assert type(row[name]) is type(restored[name]), name


def test_saved_pending_rows_are_not_changed_by_what_follows():
    buffer, transform = make_buffer(2)
    buffer.extend(stack_rows([make_row(0, 1.0, 0)]))
    state = transform.state_dict()
    buffer.extend(stack_rows([make_row(0, 0.0, 1)]))
    resumed, resumed_transform = make_buffer(2)
    resumed_transform.load_state_dict(state)
    assert resumed_transform.pending_rows == 1
    resumed.extend(stack_rows([make_row(0, 5.0, 2)]))
    assert contents(resumed) == {0: -4.0, 2: 4.0}


def test_rows_leave_in_the_order_in_which_groups_were_completed():
    buffer, _ = make_buffer(2)
    order = [(0, 0), (1, 1), (2, 2), (2, 3), (0, 4), (1, 5)]
    buffer.extend(stack_rows([make_row(g, 0.0, i) for g, i in order]))
    assert [identity(row) for row in buffer[:].unbind(0)] == [2, 3, 0, 4, 1, 5]


def test_a_sampled_batch_keeps_its_advantages():
    transform = MCAdvantage(2)
    buffer = ReplayBuffer(
        storage=LazyStackStorage(8), sampler=SamplerWithoutReplacement(), transform=transform, batch_size=4
    )
    buffer.extend(stack_rows([make_row(i // 2, float(i % 2), i) for i in range(4)]))
    sampled = buffer.sample()
    assert {identity(row): float(row[keys.ADVANTAGE]) for row in sampled.unbind(0)} == {0: -1, 1: 1, 2: -1, 3: 1}
    assert transform.counts["advantage/rows"] == 4


def test_single_rows_without_a_batch_dimension():
    buffer, transform = make_buffer(2)
    buffer.extend(make_row(0, 1.0, 0))
    assert len(buffer) == 0 and transform.pending_rows == 1
    buffer.extend(make_row(0, 0.0, 1))
    assert len(buffer) == 2
    assert contents(buffer) == {0: 1.0, 1: -1.0}


def test_a_batch_of_prompts_by_generations():
    buffer, _ = make_buffer(2)
    groups = [stack_rows([make_row(g, float(3 * g + i), 2 * g + i) for i in range(2)]) for g in range(3)]
    buffer.extend(lazy_stack(groups))
    assert contents(buffer) == {0: -1.0, 1: 1.0, 2: -1.0, 3: 1.0, 4: -1.0, 5: 1.0}


def test_rows_that_disagree_on_their_groups_size_are_an_error():
    buffer, _ = make_buffer(None)
    with pytest.raises(ValueError, match=r"group 4.*\[2, 3\]"):
        buffer.extend(stack_rows([make_row(4, 1.0, 0, size=3), make_row(4, 1.0, 1, size=2)]))


def test_a_row_after_its_group_has_left_is_dropped_and_counted(caplog):
    buffer, transform = make_buffer(2)
    buffer.extend(stack_rows([make_row(3, 1.0, 0), make_row(3, 0.0, 1)]))
    with caplog.at_level(logging.WARNING):
        buffer.extend(stack_rows([make_row(3, 9.0, 2), make_row(5, 0.0, 3)]))
    assert contents(buffer) == {0: 1.0, 1: -1.0}
    assert transform.counts["advantage/late_rows"] == 1 and transform.pending_rows == 1
    assert "1 rows dropped (advantage/late_rows): group 3" in caplog.text
    buffer.extend(stack_rows([make_row(3, 9.0, 4)]))
    assert transform.counts["advantage/late_rows"] == 2 and caplog.text.count("late_rows") == 1


def test_a_number_other_than_the_rows_group_size_is_refused():
    buffer, transform = make_buffer(4)
    with pytest.raises(ValueError, match="num_generations=4, but rows have group_size=8: leave num_generations out"):
        buffer.extend(stack_rows([make_row(0, 1.0, i, size=8) for i in range(8)]))
    assert transform.pending_rows == 0


def test_without_a_number_rows_need_a_group_size():
    buffer, transform = make_buffer(None)
    with pytest.raises(KeyError, match="a row has no 'group_size': .* set num_generations"):
        buffer.extend(stack_rows([make_row(0, 1.0, 0)]))
    assert transform.pending_rows == 0


def test_the_oldest_group_beyond_the_limit_is_dropped(caplog):
    buffer, transform = make_buffer(3, max_pending_groups=2)
    with caplog.at_level(logging.WARNING):
        buffer.extend(stack_rows([make_row(7, 1.0, 0), make_row(5, 0.0, 1)]))
        buffer.extend(stack_rows([make_row(7, 0.0, 2), make_row(6, 0.0, 3), make_row(4, 2.0, 4)]))
    assert contents(buffer) == {} and caplog.text.count("dropped (advantage/expired_rows)") == 1
    assert (transform.counts["advantage/expired_groups"], transform.counts["advantage/expired_rows"]) == (2, 3)
    assert transform.pending_rows == 2
    buffer.extend(stack_rows([make_row(6, 0.0, 5), make_row(6, 3.0, 6), make_row(7, 9.0, 7)]))
    assert contents(buffer) == {3: -1.5, 5: -1.5, 6: 3.0} and transform.counts["advantage/late_rows"] == 1


def test_every_row_is_accounted_for():
    buffer, transform = make_buffer(2, max_pending_groups=3)
    generator = torch.Generator().manual_seed(0)
    fed = 0
    for _ in range(30):
        groups = torch.randint(0, 40, (4,), generator=generator).tolist()
        buffer.extend(stack_rows([make_row(g, 1.0, fed + i) for i, g in enumerate(groups)]))
        fed += 4
    counts = transform.counts
    assert (
        counts["advantage/rows"]
        + counts["advantage/expired_rows"]
        + counts["advantage/late_rows"]
        + transform.pending_rows
        == fed
    )
    assert (
        counts["advantage/rows"] == len(buffer) > 0
        and counts["advantage/expired_rows"] > 0
        and counts["advantage/late_rows"] > 0
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_generations": 1}, "num_generations=1"),
        ({"num_generations": 0}, "num_generations=0"),
        ({"estimator": "gae"}, "estimator='gae'.*rloo"),
        ({"max_pending_groups": 0}, "max_pending_groups=0"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        MCAdvantage(**{"num_generations": 2} | arguments)


def test_zero_advantages_are_dropped():
    buffer, _ = make_buffer(2)
    buffer.extend(stack_rows([make_row(i // 2, r, i) for i, r in enumerate([1.0, 1.0, 0.0, 2.0])]))
    rows = buffer[:]
    kept = drop_zero_advantage(rows)
    assert [identity(row) for row in kept.unbind(0)] == [2, 3] and len(rows) == 4
    assert len(drop_zero_advantage(rows[:2])) == 0
    assert all(math.isfinite(float(row[keys.ADVANTAGE])) for row in kept.unbind(0))


def test_rows_that_wait_are_told_once_and_dropped_rows_leave_nothing_waiting(caplog: pytest.LogCaptureFixture):
    """Groups of 3, of which a filter leaves 3, 2, 1 and 0 rows."""
    rows = [make_row(i // 3, float(i), i, size=3) for i in range(12)]
    left_out = {3, 6, 7, 9, 10, 11}
    buffer, transform = make_buffer(None)
    buffer.extend(stack_rows([row for row in rows if identity(row) not in left_out]))
    assert len(buffer) == 3 and "3 rows of 2 groups wait in the replay buffer" in caplog.text
    buffer.extend(stack_rows([make_row(9, 0.0, i, size=3) for i in range(2)]))
    assert caplog.text.count("wait in the replay buffer") == 1
    assert "torchrl_rloo.replay.drop_rows" in caplog.text

    caplog.clear()
    buffer, transform = make_buffer(None)
    kept = drop_rows(stack_rows(rows), lambda row: identity(row) in left_out)
    buffer.extend(kept)
    assert contents(buffer) == {0: -1.5, 1: 0.0, 2: 1.5, 4: -1.0, 5: 1.0}
    assert transform.pending_rows == 0 and not caplog.messages
    assert all(int(row[keys.GROUP_SIZE]) == 3 for row in rows), "the rows of the caller are not changed"
    assert len(drop_rows(stack_rows(rows[:1]), lambda row: False)) == 0
