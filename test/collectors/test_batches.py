"""Tests of LLMCollector's batches: sizes, limits, the end of the data, and who receives them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import pytest
from tensordict import TensorDictBase
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement

from support.collecting import UNDELIVERED, G, Gate, assert_same, groups_of, in_state
from support.waiting import PATIENCE, in_thread, wait_until
from torchrl_rloo.collectors.llm import CollectionProgress
from torchrl_rloo.data import keys
from torchrl_rloo.engines.scripted import ScriptedTurn
from torchrl_rloo.envs import ChatEnv, DatasetChatEnv
from torchrl_rloo.envs.transforms import DatasetExhaustedError
from torchrl_rloo.envs.turn_transform import TurnTransform
from torchrl_rloo.replay import MCAdvantage
from torchrl_rloo.weight_update import InProcessWeightUpdater

# Sizes and limits


def test_a_batch_has_at_least_the_required_turns(modeled: Callable) -> None:
    for wanted, delivered in ((None, 6), (6, 6), (7, 12), (13, 18)):
        rows = modeled(dialog_turns_per_batch=wanted).collect()
        assert len(rows) == int(rows[keys.NUM_TURNS].sum()) == delivered
        assert set(Counter(rows[keys.GROUP_ID].tolist()).values()) == {3}
    rows = modeled(turns=2, dialog_turns_per_batch=13).collect()
    assert len(rows) == 12 and int(rows[keys.NUM_TURNS].sum()) == 24


def test_prompts_without_room_for_a_turn_end_a_batch(modeled: Callable, numbered_prompts, bpe) -> None:
    env = DatasetChatEnv(numbered_prompts, bpe, prompts_per_batch=2, num_generations=3, max_tokens=2)
    rows = modeled(env=env, dialog_turns_per_batch=6).collect()
    assert len(rows) == 6 and int(rows[keys.NUM_TURNS].sum()) == 0


def test_iteration_stops_after_the_total_of_turns_even_over_a_restart(modeled: Callable) -> None:
    for total, batches in ((1, 1), (6, 1), (7, 2)):
        collector = modeled(total_dialog_turns=total)
        assert len(list(collector)) == batches and collector.dialog_turns == 6 * batches
    collector = modeled(total_dialog_turns=18)
    next(iter(collector))
    resumed = modeled(total_dialog_turns=18)
    resumed.load_state_dict(collector.state_dict())
    assert len(list(resumed)) == 2
    assert [len(rows) for rows in modeled(epochs=1, dialog_turns_per_batch=12)] == [12, 6], "the last may have fewer"


@pytest.mark.parametrize("ahead", [0, 2])
def test_iteration_ends_with_the_epochs_of_the_dataset(ahead: int, scripted: Callable, caplog) -> None:
    """With seven prompts and batches of three, the last prompt does not fill a batch and is skipped."""
    batches = list(scripted(ahead=ahead, groups_per_batch=3, epochs=1))
    assert [len(rows) for rows in batches] == [3 * G] * 2 and "skipping the last 1 prompts" in caplog.text
    assert sorted({g for rows in batches for g in groups_of(rows)}) == list(range(6))
    collector = scripted(ahead=ahead, epochs=2, prompts_per_batch=7)
    assert len(list(collector)) == 2
    with pytest.raises(DatasetExhaustedError):
        collector.collect()
    with pytest.raises(ValueError, match="fewer than the 9 prompts"):
        scripted(groups_per_batch=9, epochs=1).collect()


def test_groups_that_were_drawn_come_in_a_smaller_last_batch(scripted: Callable) -> None:
    """A cancelled group leaves an incomplete last batch, whose others are delivered even after an interrupt."""
    gate = Gate(closed={3, 4, 5})
    collector = scripted(gate, groups_per_batch=3, epochs=1, shuffle=False)
    collector.collect()
    collecting = in_thread(collector.collect)
    wait_until(lambda: gate.waiting == {3, 4, 5})
    assert collector.cancel([4]) == 1
    wait_until(lambda: 6 in in_state(collector, "complete"), what="another group in its place")
    assert collector.cancel([3]) == 1
    state = collector.state_dict()
    gate.closed.clear()
    assert sorted(set(groups_of(collecting.result(PATIENCE)))) == [5, 6]
    resumed = scripted(Gate(), groups_per_batch=3, epochs=1)
    resumed.load_state_dict(state)
    assert [sorted(set(groups_of(rows))) for rows in resumed] == [[5, 6]]


# Number of groups and conversations in flight


def test_running_groups_are_bounded(scripted: Callable) -> None:
    """No other group begins while only stuck groups are left."""
    gate = Gate(closed={1, 2})
    collector = scripted(gate, ahead=3, groups_per_batch=2)
    delivered = [g for _ in range(3) for g in groups_of(collector.collect())[::G]]
    assert not {1, 2} & set(delivered), "stuck ones block no other"
    wait_until(lambda: len(in_state(collector, "complete")) == 1 and gate.waiting == {1, 2})
    assert len(in_state(collector, *UNDELIVERED)) == 3 == collector.scheduler.ahead
    collecting = in_thread(collector.collect)
    rows = collecting.result(PATIENCE)
    assert len(in_state(collector, *UNDELIVERED)) == 3
    gate.closed.clear()
    wait_until(lambda: {1, 2} <= set(in_state(collector, "complete")))
    late = [rows, *(collector.collect() for _ in range(2))]
    assert {1, 2} <= {g for rows in late for g in groups_of(rows)}, "the oldest come first"


@pytest.mark.parametrize("most", [1, 3])
def test_conversations_in_flight_are_bounded(most: int, scripted: Callable) -> None:
    in_flight: list[int] = []

    class Count(TurnTransform):
        now = 0

        async def step_row(self, row: TensorDictBase, next_row: TensorDictBase) -> None:
            self.now += 1
            in_flight.append(self.now)
            await asyncio.sleep(0.01)
            self.now -= 1

    scripted(Count(), max_in_flight=most, groups_per_batch=6).collect()
    assert max(in_flight) == most


# Replay buffer, postproc and progress


def test_a_replay_buffer_takes_whole_groups_without_text(modeled: Callable) -> None:
    buffer = ReplayBuffer(storage=LazyStackStorage(100), sampler=SamplerWithoutReplacement(), batch_size=6)
    collector = modeled(replay_buffer=buffer)
    rows = collector.collect()
    stored = buffer[:]
    text = {keys.QUERY, keys.COMPLETION, "answer", "turns", "text", "history"}
    assert len(stored) == 6 and not text & set(stored.keys())
    assert_same(stored, rows.exclude(*text), without=())
    assert rows[0][keys.QUERY][0]["role"] == "user", "the rows delivered keep theirs"
    collector.collect()
    assert len(buffer) == 12
    # A buffer with advantages has all groups at once
    buffer = ReplayBuffer(storage=LazyStackStorage(100), transform=MCAdvantage(3), batch_size=6)
    rewards = modeled(replay_buffer=buffer).collect()[keys.REWARD].flatten()
    assert len(stored := buffer[:]) == 6 and buffer._transform[0].pending_rows == 0
    for i, row in enumerate(stored.unbind(0)):
        others = [rewards[j] for j in range(6) if j != i and j // 3 == i // 3]
        assert float(row[keys.ADVANTAGE]) == pytest.approx(float(rewards[i] - sum(others) / 2), abs=1e-5)


def test_postproc_sees_each_batch_once(modeled: Callable) -> None:
    calls = []

    def postproc(rows: TensorDictBase) -> TensorDictBase:
        calls.append(len(rows))
        return rows[:3]

    buffer = ReplayBuffer(storage=LazyStackStorage(100))
    collector = modeled(dialog_turns_per_batch=7, postproc=postproc, replay_buffer=buffer)
    assert len(collector.collect()) == 3 and calls == [12] and len(buffer) == 3
    assert collector.dialog_turns == 12, "rows that postproc drops count"


def test_progress_counts_the_whole_batch(scripted: Callable, modeled: Callable) -> None:
    """It is reported while a batch waits and at its end; a batch of several parts counts them together."""
    gate, seen = Gate(closed={0}), []

    def watch(progress: CollectionProgress) -> None:
        seen.append(progress)
        if progress.finished == 2:
            gate.closed.clear()

    collector = scripted(gate, progress=watch)
    collector.collect()
    assert CollectionProgress(2, 4, 4) in seen and seen[-1] == CollectionProgress(4, 4, 8)
    assert [p.finished for p in seen] == sorted(p.finished for p in seen) and all(p.total == 4 for p in seen)
    seen.clear()
    parts = modeled(dialog_turns_per_batch=13, progress=seen.append)
    assert len(parts.collect()) == 18
    last = dict.fromkeys(p for p in seen if p.finished == p.total)  # also reported while the rewards run
    assert list(last) == [CollectionProgress(n, n, n) for n in (6, 12, 18)]


# Arguments


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"groups_per_batch": 0}, "groups_per_batch=0 must be at least 1"),
        ({"dialog_turns_per_batch": 0}, "dialog_turns_per_batch=0"),
        ({"total_dialog_turns": 0}, "total_dialog_turns=0"),
        ({"ahead": -1}, "ahead=-1"),
        ({"max_staleness": -1}, "max_staleness=-1"),
        ({"ahead": 1, "max_staleness": 1}, "ahead=1 cannot be combined with max_staleness=1"),
        ({"on_stale": "drop"}, "on_stale='drop' must be one of"),
        ({"on_failure": "raise"}, "on_failure='raise' must be one of"),
        ({"min_members": 3}, "min_members=3 must be at most num_generations=2"),
        ({"max_in_flight": 0}, "max_in_flight=0"),
        ({"max_batch_size": 2}, "max_batch_size=2 has no effect with ScriptedEngine"),
        ({"reward_threads": 0}, "reward_threads=0"),
        ({"max_consecutive_failures": 0}, "max_consecutive_failures=0"),
        ({"sync_every": 0}, "sync_every=0"),
        ({"sync_every": 1}, "sync_every=1 requires a weight_updater"),
        ({"max_failed_pushes": 0}, "max_failed_pushes=0"),
    ],
    ids=str,
)
def test_arguments_are_checked(kwargs: dict, message: str, scripted: Callable) -> None:
    with pytest.raises(ValueError, match=message):
        scripted(**kwargs)


@pytest.mark.parametrize("kwargs", [{"ahead": 1}, {"max_staleness": 1}], ids=str)
def test_sampling_ahead_needs_weights_that_training_does_not_change(kwargs: dict, modeled, random_model) -> None:
    shared = InProcessWeightUpdater(random_model, random_model)
    (name, value), *_ = kwargs.items()
    with pytest.raises(ValueError, match=f"{name}={value} samples while the loop trains"):
        modeled(weight_updater=shared, **kwargs)
    assert len(modeled(weight_updater=shared, max_staleness=0).collect()) == 6


def test_other_kinds_of_parts_are_refused(scripted: Callable, modeled: Callable, make_env: Callable, bpe) -> None:
    with pytest.raises(ValueError, match="0 DataLoadingPrimers"):
        scripted(env=ChatEnv(bpe, batch_size=2))
    with pytest.raises(TypeError, match="weight_updater=object must be"):
        modeled(weight_updater=object())
    with pytest.raises(TypeError, match="number of batches"):
        len(modeled())
    with pytest.raises(
        ValueError, match="input_mode='tokens' of the policy .* input_mode='history' of the environment"
    ):
        scripted(env=make_env(input_mode="history"))


# End


def test_shutdown_leaves_nothing_behind(scripted: Callable) -> None:
    gate = Gate(closed=set(range(9)))

    def play(request, index) -> ScriptedTurn:
        return ScriptedTurn([40], latency=1e6 if index < 2 else 0)

    collector = scripted(gate, play=play, ahead=4, groups_per_batch=1)
    collecting = in_thread(collector.collect)
    wait_until(lambda: len(gate.state) == 8 and len(collector.engine._running) == 2)
    loop = collector._loop.loop
    collector.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        collecting.result(PATIENCE)
    assert not gate.state and not in_state(collector, "leased")
    wait_until(lambda: not collector.engine._running and not loop.is_running())
    collector.shutdown()
    assert list(collector) == []
    with pytest.raises(RuntimeError, match="shut down"):
        collector.collect()
