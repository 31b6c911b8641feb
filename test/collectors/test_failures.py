"""Tests of failures: each ends its own conversation, is replaced, or is raised without losing a group."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable

import pytest
from tensordict import TensorDictBase
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs import Transform

from support.collecting import UNDELIVERED, G, Gate, Sessions, failing_script, groups_of, in_state, reasons
from support.waiting import PATIENCE, in_thread, wait_until
from torchrl_rloo.data import keys
from torchrl_rloo.engines.base import EngineDeadError, EngineError
from torchrl_rloo.engines.scripted import ScriptedTurn
from torchrl_rloo.envs.transforms import KLRewardTransform
from torchrl_rloo.envs.transforms.reward import TurnRewardTransform
from torchrl_rloo.modules import TransformersWrapper
from torchrl_rloo.objectives import RLOOLoss
from torchrl_rloo.replay import MCAdvantage


def counts_of(collector) -> dict[str, int]:
    return {name: n for name, n in collector.counts.items() if n and not name.startswith("ledger/")}


def test_a_stuck_tool_ends_at_the_time_limit(scripted: Callable, bpe) -> None:
    """A tool and a request that never answer end at the time limit. Both rows are complete and their state is freed."""
    gate, stuck = Gate(closed={0}), []

    def play(request, index) -> ScriptedTurn:
        if "aa" in bpe.decode(list(request.prompt)) and not stuck:  # a request of the second group
            stuck.append(index)
            return ScriptedTurn([40], latency=1e6)
        return ScriptedTurn([40])

    collector = scripted(gate, play=play, max_seconds=2.0)  # far more than the other turns take
    rows = collector.collect()
    assert reasons(rows)[:2] == ["time"] * 2 and Counter(reasons(rows[2:])) == {"time": 1, "answered": 1}
    assert rows[keys.TRUNCATED].flatten().tolist() == [r == "time" for r in reasons(rows)]
    assert rows[:2][keys.NUM_TURNS].tolist() == [1, 1], "the turns that the tool was to answer are kept"
    assert counts_of(collector) == {"collector/timed_out": 3} and not gate.state
    wait_until(lambda: not collector.engine._running)


def test_a_failed_turn_ends_its_conversation(scripted: Callable, make_env, random_model, bpe) -> None:
    """Rewards and the loss accept rows that failed at the first or the second turn."""
    gate = Gate(turns=2)
    ref = TransformersWrapper(random_model, tokenizer=bpe, generate=False)
    brevity = TurnRewardTransform(lambda conversation, row: -0.25 * len(conversation))
    env = make_env(gate, after=(brevity, KLRewardTransform(ref, 0.1)))
    buffer = ReplayBuffer(
        storage=LazyStackStorage(8), sampler=SamplerWithoutReplacement(), transform=MCAdvantage(G), batch_size=4
    )
    play = failing_script(bpe.eos_token_id, lambda turn, number: number == 1)
    collector = scripted(env=env, play=play, replay_buffer=buffer)
    rows = collector.collect()
    assert Counter(reasons(rows)) == {"failed": 2, "answered": 2} and not gate.state
    assert counts_of(collector) == {"collector/failed_turns": 2}
    assert sorted(rows[keys.NUM_TURNS].tolist()) == [0, 1, 2, 2]
    for row in rows.unbind(0):
        n = int(row[keys.NUM_TURNS])
        assert sum(m["role"] == "assistant" for m in row[keys.COMPLETION]) == n
        assert int(row[keys.ACTION_MASK].sum()) == 2 * n == len(row[keys.ACTION_VERSIONS])
        assert len(row[keys.TOKENS]) == len(row[keys.LOG_PROBS]) == len(row[keys.REF_LOG_PROBS])
    assert len({frozenset(row.keys(True, True)) for row in rows.unbind(0)}) == 1
    loss = RLOOLoss(TransformersWrapper(random_model, tokenizer=bpe, generate=False))(buffer.sample())
    assert loss.loss_objective.isfinite()


def test_failures_in_a_row_end_the_run(scripted: Callable, bpe) -> None:
    sessions = Sessions()
    play = failing_script(bpe.eos_token_id, lambda turn, number: True)
    collector = scripted(sessions, play=play, max_consecutive_failures=6)
    assert reasons(collector.collect()) == ["failed"] * 4
    with pytest.raises(RuntimeError, match="6 consecutive turns.*too long") as raised:
        collector.collect()
    assert isinstance(raised.value.__cause__, EngineError) and not sessions.open


# Replacement


@pytest.mark.parametrize("failures", [1, 3, 4])
def test_a_failed_conversation_is_replaced_at_most_three_times(failures: int, scripted: Callable) -> None:
    sessions, seeds = Sessions(), []

    def play(request, index) -> ScriptedTurn:
        seeds.append(request.seed)
        return ScriptedTurn([40], error=EngineError("refused") if len(seeds) <= failures else None)

    collector = scripted(sessions, play=play, on_failure="replace", max_in_flight=1, groups_per_batch=1)
    rows = collector.collect()
    assert groups_of(rows) == [0, 0] and not sessions.open, "the group is kept"
    assert len(set(seeds)) == len(seeds), "another seed"
    assert Counter(reasons(rows))["failed"] == (failures == 4)
    assert collector.counts["collector/replaced"] == min(failures, 3)
    assert len(set(rows[keys.TRAJECTORY_ID].tolist())) == 2


# Stragglers


def test_stragglers_are_cut(scripted: Callable) -> None:
    """A group with enough ended members is delivered; the others abstain and release their state."""

    first: dict[int, int] = {}

    class Slow(Gate):
        async def step_row(self, row: TensorDictBase, next_row: TensorDictBase) -> None:
            trajectory, group = int(row[keys.TRAJECTORY_ID]), int(row[keys.GROUP_ID])
            self.state.add(trajectory)
            if first.setdefault(group, trajectory) == trajectory:
                await asyncio.Event().wait()

    slow = Slow()
    collector = scripted(slow, min_members=2, num_generations=3)
    rows = collector.collect()
    assert Counter(reasons(rows)) == {"answered": 4, "cancelled": 2} and not slow.state
    assert groups_of(rows) == [0, 0, 0, 1, 1, 1] and counts_of(collector) == {"collector/cancelled_rows": 2}


def test_an_attempt_does_not_inherit_ended_members(scripted: Callable) -> None:
    """A group that runs again after an error is not cut for members that ended in its first attempt."""
    gate, broken = Gate(closed=set(), turns=2), [True]

    class Broken(Transform):
        def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
            if broken and int(tensordict[0][keys.GROUP_ID]) == 0 and collector.runner.ended_counts[0]:
                broken.clear()
                raise ZeroDivisionError("a bug")
            return next_tensordict

    collector = scripted(gate, Broken(), min_members=2, num_generations=3, max_in_flight=1, groups_per_batch=1)
    with pytest.raises(ZeroDivisionError):
        collector.collect()
    assert collector.runner.ended_counts[0] >= 1
    gate.closed = {0}
    collecting = in_thread(collector.collect)
    wait_until(lambda: gate.waiting == {0})
    assert collector.runner.ended_counts[0] == 0
    gate.closed.clear()
    assert "cancelled_rows" not in str(counts_of(collector)) and len(collecting.result(PATIENCE)) == 3


# Errors that are raised


def test_a_dead_engine_loses_no_group(scripted: Callable) -> None:
    gate = Gate(closed={1})
    collector = scripted(gate, ahead=2)
    delivered = groups_of(in_thread(collector.collect).result(PATIENCE))[::G]
    collector.engine.kill()
    gate.closed.clear()
    for _ in range(2):
        with pytest.raises(EngineDeadError):
            for _ in range(3):  # groups may have completed before
                delivered += groups_of(collector.collect())[::G]
    collector.engine.restart()
    delivered += [g for _ in range(4) for g in groups_of(collector.collect())[::G]]
    assert 1 in delivered and len(delivered) == len(set(delivered))
    collector.cancel()
    assert not gate.state


def test_an_error_of_a_stopped_group_does_not_reach_a_later_collect(scripted: Callable) -> None:
    """A group that is stopped for the failure of another may fail while it stops; its next attempt decides."""
    collector, waiting = scripted(), threading.Event()
    turn = collector.policy.turn

    async def fail(row: TensorDictBase, submit: Callable) -> TensorDictBase:
        if int(row[keys.GROUP_ID]) == 0:
            while not waiting.is_set():
                await asyncio.sleep(0.001)
            raise EngineDeadError("the first error")
        try:
            waiting.set()
            await asyncio.Event().wait()
        finally:
            raise EngineDeadError("an error at the end")

    collector.policy.turn = fail
    with pytest.raises(EngineDeadError, match="the first error"):
        in_thread(collector.collect).result(PATIENCE)
    collector.policy.turn = turn
    assert [g for _ in range(3) for g in groups_of(collector.collect())[::G]] == list(range(6))


def test_an_error_of_the_environment_is_raised_and_loses_no_group(scripted: Callable) -> None:
    class Broken(Transform):
        broken = True

        def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
            if self.broken and int(tensordict[0][keys.GROUP_ID]) == 1:
                raise ZeroDivisionError("a bug")
            return next_tensordict

    broken = Broken()
    collector = scripted(broken)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        collector.collect()
    broken.broken = False
    assert [g for _ in range(3) for g in groups_of(collector.collect())[::G]] == list(range(6))


def test_a_session_that_does_not_start_blocks_no_other(scripted: Callable) -> None:
    started = threading.Event()

    class Slow(Sessions):
        def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
            if int(tensordict_reset[0][keys.GROUP_ID]) == 0:
                assert started.wait(PATIENCE)
            return super()._reset(tensordict, tensordict_reset)

    sessions = Slow()
    collector = scripted(sessions, ahead=1, groups_per_batch=1)
    assert groups_of(collector.collect())[0] == 1 and groups_of(collector.collect())[0] == 2
    assert collector.cancel([0]) == 1
    collector.collect()
    wait_until(lambda: in_state(collector, "complete") or not in_state(collector, *UNDELIVERED))
    started.set()
    wait_until(lambda: not sessions.open, what="a release of what was opened after its group was cancelled")


# Cancellation


def test_groups_can_be_cancelled(scripted: Callable) -> None:
    gate = Gate(closed={1, 2})
    collector = scripted(gate, groups_per_batch=2, ahead=1)
    collecting = in_thread(collector.collect)
    wait_until(lambda: gate.waiting == {1, 2})
    assert collector.cancel([1, 77]) == 1
    assert groups_of(collecting.result(PATIENCE))[::G] == [0, 3]
    assert counts_of(collector) == {"collector/cancelled_groups": 1}
    assert collector.cancel() == 1 and not gate.state
    gate.closed.clear()
    assert set(groups_of(collector.collect())) < {4, 5, 6}


def test_a_group_that_is_cancelled_while_its_state_is_freed_keeps_none(scripted: Callable) -> None:
    class Slow(Gate):
        releasing, may_release = threading.Event(), threading.Event()

        async def release(self, trajectory_id: int) -> None:
            self.releasing.set()
            while not self.may_release.is_set():
                await asyncio.sleep(0.002)
            await super().release(trajectory_id)

    slow = Slow(turns=1)
    collector = scripted(slow, groups_per_batch=1)
    collecting = in_thread(collector.collect)
    assert slow.releasing.wait(PATIENCE)
    cancelling = in_thread(collector.cancel)
    wait_until(lambda: not collector.scheduler._tasks)  # its task was cancelled
    slow.may_release.set()
    assert cancelling.result(PATIENCE) == 1
    collecting.result(PATIENCE)  # another group
    assert not slow.state
