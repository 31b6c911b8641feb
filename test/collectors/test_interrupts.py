"""Tests of interrupts and random schedules: every drawn group is delivered once, or cancelled."""

from __future__ import annotations

import asyncio
import copy
import random
import signal
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torchrl.data import LazyStackStorage, ReplayBuffer

from support.collecting import UNDELIVERED, Bump, G, Gate, groups_of, in_state, reasons
from support.waiting import PATIENCE, in_thread, wait_until
from torchrl_rloo.collectors import LLMCollector, ledger
from torchrl_rloo.collectors.ledger import check_audit
from torchrl_rloo.collectors.llm import CollectionProgress
from torchrl_rloo.data import keys
from torchrl_rloo.engines.base import EngineError
from torchrl_rloo.engines.scripted import ScriptedTurn
from torchrl_rloo.runtime.event_loop import LoopCall

# An interrupt may hit between the creation of a coroutine and its start
pytestmark = [
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

MODES = [{}, {"ahead": 4}, {"max_staleness": 1}]


@contextmanager
def interrupts() -> Iterator[Callable[[float], None]]:
    """Yield a function that raises KeyboardInterrupt in the main thread once, after some seconds; 0 disarms it."""
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals reach the main thread only")

    main, armed = threading.main_thread().ident, set()

    def interrupt(number, frame) -> None:
        if armed:
            armed.clear()
            raise KeyboardInterrupt

    def interrupt_after(seconds: float) -> None:
        armed.clear()
        if seconds:
            armed.add(token := object())
            fire = lambda: token in armed and signal.pthread_kill(main, signal.SIGUSR1)  # noqa: E731
            threading.Timer(seconds, fire).start()

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        yield interrupt_after
    finally:
        armed.clear()
        signal.signal(signal.SIGUSR1, before if before != signal.SIG_DFL else signal.SIG_IGN)


def undelivered(collector: LLMCollector) -> set[int]:
    """Return the groups that a later call delivers, including those of an interrupted delivery."""
    return collector._call_on_loop(_undelivered, collector)  # what an interrupted call left behind may still run there


def _undelivered(collector: LLMCollector) -> set[int]:
    interrupted = in_state(collector, "delivered") - set(collector._totals.returned)
    interrupted -= {group.group_id for group in list(collector.ledger.groups.values()) if group.taken}
    requeued = {group_id for _, group_id in collector.ledger.primer._requeued}
    return in_state(collector, *UNDELIVERED) | interrupted | requeued


def assert_all_delivered(collector: LLMCollector, delivered: list[int], cancelled: set[int] = frozenset()) -> None:
    """Assert that every group drawn so far was delivered once, was cancelled, or waits in the ledger."""
    waiting = undelivered(collector)
    drawn = range(collector.ledger.primer.next_group_id)
    counts = Counter(delivered)
    assert set(counts.values()) <= {1}, f"doubled: {[g for g, n in counts.items() if n > 1]}"
    assert set(drawn) == set(delivered) | waiting | cancelled, (
        f"lost: {sorted(set(drawn) - set(delivered) - waiting - cancelled)}"
    )
    assert not set(delivered) & (waiting | cancelled)


# Interrupts of the caller


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_interrupts_at_random_instants_lose_and_double_nothing(mode: dict, scripted: Callable, tmp_path) -> None:
    rng = random.Random(0)

    def play(request, index) -> ScriptedTurn:
        return ScriptedTurn([40, 41], latency=rng.choice([0.0, 0.0, 0.0005, 0.002]))

    audit = tmp_path / "audit.jsonl"
    collector = scripted(Gate(turns=2), play=play, groups_per_batch=2, updater=Bump, audit=audit, **mode)
    delivered, interrupted, calls = [], 0, 0
    typical = 0.01  # follows the duration of a call, so that interrupts hit all of its parts
    with interrupts() as interrupt_after:
        while interrupted < 300 and calls < 5000:
            rows, calls, began = None, calls + 1, time.perf_counter()
            try:
                interrupt_after(max(1e-5, rng.random() * 1.3 * typical))
                rows = collector.collect()
                interrupt_after(0)
            except KeyboardInterrupt:
                interrupted += 1
            if rows is not None:
                delivered += groups_of(rows)[::G]
                typical = 0.8 * typical + 0.2 * (time.perf_counter() - began)
    assert interrupted >= 300 and len(delivered) >= 20
    assert_all_delivered(collector, delivered)
    for _ in range(5):
        delivered += groups_of(collector.collect())[::G]
    assert_all_delivered(collector, delivered)
    collector.state_dict()
    assert check_audit(audit).acknowledged == set(delivered)


def raise_once(function: Callable, error: type[BaseException] = KeyboardInterrupt, call: int = 1) -> Callable:
    """Wrap a function to raise, after its work, in one of its calls."""
    calls = []

    def wrapped(*args, **kwargs):
        result = function(*args, **kwargs)
        calls.append(1)
        if len(calls) == call:
            raise error("once")
        return result

    return wrapped


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("part", ["postproc", "progress", "replay_buffer", "draw_ids", "first progress"])
def test_a_part_that_raises_once_loses_and_doubles_nothing(
    part: str, mode: dict, scripted: Callable, monkeypatch
) -> None:
    """Parts are a callback after the batch is complete, a draw, and a report while the batch waits."""
    kwargs, gate = {}, Gate()
    buffer = ReplayBuffer(storage=LazyStackStorage(100))
    if part == "postproc":
        kwargs["postproc"] = raise_once(lambda rows: rows, call=2)
    elif part == "replay_buffer":
        kwargs["replay_buffer"] = buffer
        failed, extend = [], buffer.extend

        def fail_first(rows):
            if not failed:
                failed.append(1)
                raise ConnectionError("once")
            return extend(rows)

        monkeypatch.setattr(buffer, "extend", fail_first)
    collector = scripted(gate, **kwargs, **mode)
    raised = []

    def report(progress: CollectionProgress) -> None:
        at_end = progress.finished == progress.total
        if not raised and at_end == (part == "progress"):
            raised.append(1)
            gate.closed.clear()
            raise KeyboardInterrupt("once")

    if "progress" in part:
        collector.progress = report
        gate.closed |= set(range(50)) if part == "first progress" else set()
    if part == "draw_ids":
        primer = collector.ledger.primer
        monkeypatch.setattr(primer, "draw_ids", raise_once(primer.draw_ids, call=1 if not mode else 2))
    delivered, errors = [], 0
    while len(delivered) < 12:
        try:
            delivered += groups_of(collector.collect())[::G]
        except (KeyboardInterrupt, ConnectionError):
            errors += 1
    assert errors == 1
    assert_all_delivered(collector, delivered)
    if not mode:
        assert delivered == list(range(12)), "prompts keep their order"
    if part == "replay_buffer":
        assert groups_of(buffer[:])[::G] == delivered


@pytest.mark.parametrize("mode", MODES[:2], ids=str)
def test_an_audit_that_fails_once_loses_and_doubles_nothing(
    mode: dict, scripted: Callable, tmp_path, monkeypatch
) -> None:
    """For each of the first writes. The first half of its line is written."""
    append = ledger.append
    for failing in range(1, 25):
        writes, errors, delivered = [], 0, []

        def fail_once(path, content, writes=writes, failing=failing) -> None:
            writes.append(1)
            append(path, content[: len(content) // 2] if len(writes) == failing else content)
            if len(writes) == failing:
                raise OSError("the disk is full")

        collector = scripted(Gate(turns=1), audit=(audit := tmp_path / f"{failing}.jsonl"), **mode)
        monkeypatch.setattr(ledger, "append", fail_once)
        while len(delivered) < 6:
            try:
                delivered += groups_of(in_thread(collector.collect).result(PATIENCE))[::G]
            except OSError:
                errors += 1
        assert errors <= 1 and (mode or delivered == list(range(6)))
        assert_all_delivered(collector, delivered)
        collector.state_dict()
        assert check_audit(audit).acknowledged == set(delivered)
        collector.shutdown()
        monkeypatch.setattr(ledger, "append", append)


@pytest.mark.parametrize("update", [True, False])
def test_rows_after_an_interrupt_are_of_the_current_weights(update: bool, scripted: Callable, tmp_path) -> None:
    """Group 0 completed, group 1 runs; without an update both are delivered as they are."""
    gate, audit = Gate(closed={1}, turns=1), tmp_path / "audit.jsonl"
    collector = scripted(gate, updater=Bump, audit=audit)
    interrupted = LoopCall(collector._loop, collector.scheduler.next_batch())
    wait_until(lambda: gate.waiting == {1} and in_state(collector, "complete") == {0})
    interrupted.cancel()
    if update:
        collector.update_policy_weights_()
    gate.closed.clear()
    rows = collector.collect()
    assert groups_of(rows) == [0, 0, 1, 1] and collector.policy_version == int(update)
    assert {v for row in rows.unbind(0) for v in row[keys.ACTION_VERSIONS].tolist()} == {int(update)}
    assert collector.counts.get("ledger/requeued", 0) == 2 * update and not gate.state
    assert groups_of(collector.collect()) == [2, 2, 3, 3]
    collector.state_dict()
    assert check_audit(audit).acknowledged == {0, 1, 2, 3}


def test_rows_of_a_failed_delivery_are_sampled_again_after_each_update(scripted: Callable) -> None:
    """However often it fails."""
    collector = scripted(Gate(turns=1), updater=Bump)
    for _ in range(5):
        collector.postproc = raise_once(lambda rows: rows)
        with pytest.raises(KeyboardInterrupt):
            collector.collect()
        collector.update_policy_weights_()
    rows = collector.collect()
    assert groups_of(rows) == [0, 0, 1, 1]
    assert {v for row in rows.unbind(0) for v in row[keys.ACTION_VERSIONS].tolist()} == {5}


def test_an_abandoned_wait_takes_no_group(scripted: Callable) -> None:
    """An interrupt before a batch can be awaited leaves a request for it behind; the next call withdraws it."""
    gate = Gate(closed={0, 1})
    collector = scripted(gate, epochs=1, groups_per_batch=7, prompts_per_batch=7)
    abandoned = LoopCall(collector._loop, collector.scheduler.next_batch())
    wait_until(lambda: gate.waiting == {0, 1})
    collecting = in_thread(lambda: list(collector))
    with pytest.raises(asyncio.CancelledError):
        abandoned.result(PATIENCE)
    gate.closed.clear()
    assert [groups_of(rows)[::G] for rows in collecting.result(PATIENCE)] == [list(range(7))]


def test_an_interrupted_cancellation_and_load_are_finished(scripted: Callable) -> None:
    """Groups whose release is slow are not left leased without a task."""

    class Slow(Gate):
        async def release(self, trajectory_id: int) -> None:
            releasing.set()
            while not may_release.is_set():
                await asyncio.sleep(0.002)
            await super().release(trajectory_id)

    for action in ("cancel", "load"):
        releasing, may_release = threading.Event(), threading.Event()
        collector = scripted(gate := Slow(closed={0, 1}))
        state = copy.deepcopy(collector.state_dict())
        collecting = in_thread(collector.collect)
        wait_until(lambda gate=gate: gate.waiting == {0, 1})
        with interrupts() as interrupt_after:
            interrupt_after(0.1)
            with pytest.raises(KeyboardInterrupt):
                collector.cancel() if action == "cancel" else collector.load_state_dict(state)
        assert releasing.is_set()
        gate.closed.clear()
        may_release.set()
        rows = collecting.result(PATIENCE)
        assert groups_of(rows) == ([2, 2, 3, 3] if action == "cancel" else [0, 0, 1, 1])


def test_an_interrupt_while_a_failure_requeues_its_batch(scripted: Callable) -> None:
    """The next call waits for a reset that still runs in its thread, and raises the failure after it."""
    failing, resetting, may_reset = [1], threading.Event(), threading.Event()

    class Failing(Gate):
        async def process_turn(self, row, next_row) -> None:
            while failing and not resetting.is_set():
                await asyncio.sleep(0.002)
            if failing:
                failing.clear()
                raise ZeroDivisionError("a bug")
            await super().process_turn(row, next_row)

        def _reset(self, tensordict, tensordict_reset):
            if groups_of(tensordict_reset)[0] == 1:
                resetting.set()
                may_reset.wait(PATIENCE)
            return tensordict_reset

    collector = scripted(Failing(), groups_per_batch=2)
    interrupted = LoopCall(collector._loop, collector.scheduler.next_batch())
    scheduler = collector.scheduler
    wait_until(lambda: not failing and not scheduler._tasks)
    interrupted.cancel()
    with pytest.raises(asyncio.CancelledError):
        interrupted.result(PATIENCE)
    collecting = in_thread(collector.collect)
    wait_until(lambda: scheduler._waiter is not None)
    may_reset.set()
    with pytest.raises(ZeroDivisionError):
        collecting.result(PATIENCE)
    assert groups_of(in_thread(collector.collect).result(PATIENCE)) == [0, 0, 1, 1]


def test_groups_begun_while_others_are_requeued_keep_their_place(scripted: Callable) -> None:
    gate = Gate(closed=set(range(8)))
    collector = scripted(gate, groups_per_batch=2, ahead=2)
    abandoned = LoopCall(collector._loop, collector.scheduler.next_batch())
    wait_until(lambda: gate.waiting == {0, 1, 2, 3})

    async def requeue() -> None:
        requeuing = asyncio.ensure_future(collector.scheduler.requeue_running())
        await asyncio.sleep(0)
        collector.ledger.drop([3])
        collector.scheduler.admit()  # begins group 4 in place of group 3
        await requeuing

    LoopCall(collector._loop, requeue()).result(PATIENCE)
    attempts = {group: collector.ledger.groups[group].attempt for group in (0, 1, 2, 4)}
    assert attempts == {0: 1, 1: 1, 2: 1, 4: 0}
    gate.closed.clear()
    assert len(abandoned.result(PATIENCE).group_ids) == 2


def test_cancelling_one_group_keeps_the_failure_of_another(scripted: Callable) -> None:
    class Failing(Gate):
        async def process_turn(self, row, next_row) -> None:
            if groups_of(row[None])[0] == 0 and self.turns == 2:
                self.turns = 1
                raise ZeroDivisionError("a bug")
            await super().process_turn(row, next_row)

    collector = scripted(gate := Failing(closed={1}), groups_per_batch=2)
    collector._call_on_loop(collector.scheduler.admit)
    wait_until(lambda: gate.waiting == {1} and 0 in collector.scheduler._failures)
    assert collector.cancel([1]) == 1
    with pytest.raises(ZeroDivisionError):
        in_thread(collector.collect).result(PATIENCE)
    assert groups_of(in_thread(collector.collect).result(PATIENCE)) == [0, 0, 2, 2]


def test_a_state_that_cannot_be_loaded_leaves_the_collector_usable(scripted: Callable) -> None:
    collector = scripted(gate := Gate(closed={0}))
    state = copy.deepcopy(collector.state_dict())
    del state["ledger"]["env"]
    waiting = in_thread(collector.collect)
    wait_until(lambda: gate.waiting == {0})
    with pytest.raises(KeyError, match="env"):
        collector.load_state_dict(state)
    gate.closed.clear()
    assert groups_of(waiting.result(PATIENCE)) == [0, 0, 1, 1]


# States taken during a batch


@pytest.mark.parametrize("where", ["progress", "postproc", "another thread"])
def test_a_state_during_a_batch_does_not_double_it(where: str, scripted: Callable) -> None:
    """The state re-queues the batch, since it is not returned yet. The collector still delivers it once."""
    states = []

    def take(rows=None):
        if where == "another thread":
            in_thread(collector.state_dict).result(PATIENCE)
        states.append(copy.deepcopy(collector.state_dict()))
        collector.acknowledge()
        return rows

    collector = scripted(Gate(), epochs=1)
    if where == "progress":
        collector.progress = lambda progress: take()
    else:
        collector.postproc = take
    delivered = [g for rows in collector for g in groups_of(rows)[::G]]
    assert delivered == list(range(6)) and len(states) >= 3
    resumed = scripted(Gate(), epochs=1)
    resumed.load_state_dict(states[0])
    assert [g for rows in resumed for g in groups_of(rows)[::G]] == list(range(6))
    resumed.load_state_dict(states[-1])
    assert [g for rows in resumed for g in groups_of(rows)[::G]] == [4, 5]


# Random schedules

ACTIONS = ("collect", "interrupt", "cancel", "update", "state", "restore", "fail")


@settings(
    max_examples=25,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
@given(
    mode=st.sampled_from([*MODES, {"max_staleness": 2, "max_in_flight": 3}, {"min_members": 1}]),
    actions=st.lists(st.sampled_from((*ACTIONS, "collect", "collect")), min_size=5, max_size=25),
    seed=st.integers(0, 1000),
)
def test_every_drawn_group_is_delivered_once_or_cancelled(
    mode: dict, actions: list[str], seed: int, scripted: Callable, tmp_path: Path
) -> None:
    """Latencies, failures, interrupts, cancellations, updates, states and restores come in any order."""
    rng, lock = random.Random(seed), threading.Lock()
    failing = {"turn": 0.0, "environment": False}

    def play(request, index) -> ScriptedTurn:
        with lock:
            error = EngineError("refused") if rng.random() < failing["turn"] else None
            return ScriptedTurn([40, 41], latency=rng.choice([0.0, 0.0, 0.001, 0.004]), error=error)

    class Tool(Gate):
        async def step_row(self, row, next_row) -> None:
            if failing["environment"]:
                failing["environment"] = False
                raise ZeroDivisionError("a bug")
            await super().step_row(row, next_row)

    class Broken(Tool):
        process_turn = Tool.step_row  # raises, where a tool's failure would end the conversation only

    audit = tmp_path / f"{uuid.uuid4()}.jsonl"

    def build() -> LLMCollector:
        return scripted(Broken(), play=play, updater=Bump, audit=audit, max_consecutive_failures=None, **mode)

    collector, delivered, cancelled = build(), [], set()
    saved = (copy.deepcopy(collector.state_dict()), [], set())
    failing["turn"] = 0.1
    with interrupts() as interrupt_after:
        for action in actions:
            if action == "fail":
                failing["environment"] = True
            elif action == "update":
                collector.update_policy_weights_()
            elif action == "cancel":
                running = in_state(collector, "leased")
                chosen = set(rng.sample(sorted(running), min(1, len(running))))
                before = in_state(collector, *UNDELIVERED)
                collector.cancel(chosen)
                cancelled |= (before & chosen) - in_state(collector, *UNDELIVERED)
            elif action == "state":
                saved = (copy.deepcopy(collector.state_dict()), list(delivered), set(cancelled))
            elif action == "restore":
                if rng.random() < 0.5:
                    collector.shutdown()
                    collector = build()
                collector.load_state_dict(saved[0])
                delivered, cancelled = list(saved[1]), set(saved[2])
            else:
                rows = None
                try:
                    if action == "interrupt":
                        interrupt_after(max(1e-5, rng.random() * 0.01))
                    rows = collector.collect()
                    interrupt_after(0)
                except (KeyboardInterrupt, ZeroDivisionError):
                    interrupt_after(0)
                if rows is not None:
                    delivered += groups_of(rows)[::G]
                    assert set(reasons(rows)) <= {"answered", "turn_tokens", "failed", "cancelled"}
    failing.update(turn=0.0, environment=False)
    batches = 0
    while batches < 2:
        with suppress(ZeroDivisionError):  # of a group that began ahead
            delivered += groups_of(collector.collect())[::G]
            batches += 1
    assert_all_delivered(collector, delivered, cancelled)
    collector.state_dict()
    assert check_audit(audit).acknowledged == set(delivered) | cancelled
    collector.shutdown()
