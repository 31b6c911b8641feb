"""Tests of ScriptedEngine: exact times of the script, and pauses, deaths and updates as in a real engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, wait
from math import inf

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.waiting import in_thread
from torchrl_rloo.engines.base import EngineDeadError, EngineError, EngineLoad, EngineTimeoutError, Request, Sample
from torchrl_rloo.engines.scripted import ScriptedEngine, ScriptedTurn
from torchrl_rloo.weight_update.protocol import TensorInfo
from torchrl_rloo.weight_update.protocol import xxh3 as checksum

REQUEST = Request([1, 2], limit=100, seed=0)
TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "c": torch.zeros(())}


class Clock:
    """Clock that a test advances."""

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def play() -> Iterator[Callable[..., ScriptedEngine]]:
    """``play(script, **arguments)`` returns an engine. A number as script is the latency of turns of ten tokens."""
    engines = []

    def make(script, **arguments) -> ScriptedEngine:
        if isinstance(script, float):
            turn = ScriptedTurn(range(10), latency=script)
            script = lambda request, index: turn  # noqa: E731
        engines.append(ScriptedEngine(script, **arguments))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def at(engine: ScriptedEngine, now: float) -> ScriptedEngine:
    with engine._wake:  # otherwise the engine's thread may run between the two and deliver results later
        engine.clock.now = now
        engine.tick()
    return engine


def update_steps(version: int, *, transport: str = "direct", staged: bool = True) -> list[tuple[str, dict]]:
    """Return the steps of a whole update in two buckets, a and b, and c."""
    tensors = list(TENSORS.values())
    manifest = [list(TensorInfo.of(name, tensor)) for name, tensor in TENSORS.items()]
    steps = [
        ("connect", {"transport": transport, "options": {}, "manifest": manifest, "staged": staged}),
        ("start", {"version": version}),
    ]
    for bucket, (first, last) in enumerate([(0, 2), (2, 3)]):
        info = {"version": version, "bucket": bucket, "first": first, "last": last}
        info |= {"checksum": checksum(tensors[first:last]), "payload": {"tensors": tensors[first:last]}}
        steps.append(("bucket", info))
    return [*steps, ("finish", {"version": version})]


def update(engine: ScriptedEngine, version: int, **kwargs) -> list[dict]:
    return [engine.update_weights(step, info, timeout=60.0) for step, info in update_steps(version, **kwargs)][-1]


# Turns


def test_a_callable_is_asked_for_each_request(play) -> None:
    engine = play(lambda request, index: ScriptedTurn([request.seed, index], [-1.0, -2.0], finish="length"))
    requests = [Request([1], limit=5, seed=seed) for seed in (7, 8, 9)]
    assert engine.generate(requests) == [
        Sample([r.seed, i], [-1.0, -2.0], "length", [0, 0]) for i, r in enumerate(requests)
    ]
    assert engine.requests == requests


def test_impossible_arguments_are_refused(play) -> None:
    for arguments, message in (
        ({"tokens": [1, 2], "log_probs": [0.0]}, "1 entries for 2 tokens"),
        ({"tokens": [], "latency": -1.0}, "latency=-1.0"),
    ):
        with pytest.raises(ValueError, match=message):
            ScriptedTurn(**arguments)
    with pytest.raises(ValueError, match="max_concurrency=0"):
        ScriptedEngine([], max_concurrency=0)
    with pytest.raises(ValueError, match="in_flight='keep'"):
        play(0.0).pause("keep")
    engine = play([ScriptedTurn([3]), ScriptedTurn([4, 5])])
    assert [s.tokens for s in engine.generate([REQUEST, REQUEST])] == [[3], [4, 5]]
    with pytest.raises(EngineError, match="has 2 turns, so there is none for request 2"):
        engine.generate([REQUEST])


def test_a_turn_keeps_to_the_limit_of_its_request(play) -> None:
    engine = play(lambda request, index: ScriptedTurn(range(10), range(10)))
    sizes = {limit: engine.generate([Request([1], limit=limit, seed=0)])[0] for limit in (3, 10, 11)}
    assert [(len(s.tokens), len(s.log_probs), len(s.versions), s.finish) for s in sizes.values()] == [
        (3, 3, 3, "length"),
        (10, 10, 10, "stop"),
        (10, 10, 10, "stop"),
    ]


def test_scripted_errors_come_at_the_end_and_fail_one_request(play, clock: Clock) -> None:
    turns = [ScriptedTurn([1], latency=2.0, error=KeyError("lost")), ScriptedTurn([2], latency=2.0)]
    engine = play(turns, clock=clock)
    bad, good = engine.submit(REQUEST), engine.submit(REQUEST)
    at(engine, 1.9)
    assert not bad.done()
    at(engine, 2.0)
    with pytest.raises(KeyError, match="lost"):
        bad.result(60)
    assert good.result(60).tokens == [2]


# Time


def test_callbacks_may_submit_endlessly(play) -> None:
    """A chain of turns without latency, each submitted by the previous one's callback, does not grow the stack."""
    engine = play(0.0)
    engine.pause()
    done = threading.Event()

    def go_on(_: Future) -> None:
        if len(engine.requests) < 5000:
            engine.submit(REQUEST).add_done_callback(go_on)
        else:
            done.set()

    engine.submit(REQUEST).add_done_callback(go_on)
    engine.resume()
    assert done.wait(60)
    assert len(engine.requests) == 5000


@settings(max_examples=60, deadline=None)
@given(
    jobs=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6)), min_size=1, max_size=12),
    places=st.integers(1, 4),
    looks=st.lists(st.integers(0, 40), max_size=4),
)
def test_times_are_those_of_a_queue_with_so_many_places(jobs: list[tuple], places: int, looks: list[int]) -> None:
    clock, now = Clock(), 0
    arrivals = [now := now + gap for gap, _ in jobs]
    with ScriptedEngine([ScriptedTurn([0], latency=t) for _, t in jobs], clock=clock, max_concurrency=places) as engine:
        ends: dict[int, float] = {}
        for moment in sorted([*arrivals, *looks, *range(0, 200)]):
            at(engine, moment)
            while len(engine.requests) < len(jobs) and arrivals[len(engine.requests)] <= moment:
                index = len(engine.requests)
                engine.submit(REQUEST).add_done_callback(lambda f, i=index: ends.setdefault(i, clock.now))
    free, expected = [0] * places, []  # reference: each request takes the slot that is free first
    for arrival, (_, latency) in zip(arrivals, jobs, strict=True):
        place = min(range(places), key=free.__getitem__)
        start = max(arrival, free[place])
        free[place] = start + latency
        expected.append(start + latency)
    assert [ends[i] for i in range(len(jobs))] == expected
    assert engine.request_seconds == sum(latency for _, latency in jobs)


def test_a_request_fails_at_its_deadline_and_affects_no_other(play) -> None:
    engine = play(lambda r, i: ScriptedTurn([30], latency=inf if i == 0 else 0), request_timeout=0.05)
    late, other = engine.submit(REQUEST), engine.submit(REQUEST)
    assert other.done() and not late.done()
    with pytest.raises(EngineTimeoutError, match="request_timeout=0.05 s of sampling"):
        late.result(60)
    engine.pause("finish", timeout=60.0)  # nothing is running
    engine = play(inf, request_timeout=0.05, max_concurrency=3)
    with pytest.raises(EngineTimeoutError, match="request_timeout=0.05"):
        engine.generate([REQUEST] * 4)
    assert engine.load() == EngineLoad()


def test_a_pause_stops_deadlines_and_a_late_request_frees_its_place(play, clock: Clock) -> None:
    turns = [ScriptedTurn([1], latency=9.0), ScriptedTurn([2], latency=2.0)]
    engine = play(turns, clock=clock, request_timeout=5.0, max_concurrency=1)
    first = engine.submit(REQUEST)
    second = at(engine, 4.0).submit(REQUEST)
    at(engine, 4.5).pause("continue")
    assert at(engine, 100.0) and not first.done()
    engine.resume()
    assert at(engine, 100.4) and not first.done()
    at(engine, 104.0)  # late: the first failed at 100.5, so the second ended at 102.5
    assert isinstance(first.exception(0), EngineTimeoutError) and second.result(0).tokens == [2]
    assert engine.request_seconds == pytest.approx(7.0)


def test_a_cancelled_request_frees_its_place(play, clock: Clock) -> None:
    engine = play(1.0, clock=clock, max_concurrency=1)
    running, waiting, last = (engine.submit(REQUEST) for _ in range(3))
    at(engine, 0.5)
    assert waiting.cancel() and running.cancel()
    assert at(engine, 1.5) and last.done()
    with pytest.raises(CancelledError):
        running.result(0)
    assert engine.request_seconds == 1.5


# Pauses


def test_continue_freezes_and_the_rest_is_of_the_new_version(play, clock: Clock) -> None:
    engine = play(1.0, clock=clock)
    future = engine.submit(REQUEST)
    at(engine, 0.3).pause("continue")
    at(engine, 5.0)
    assert not future.done()
    update(engine, 4)
    engine.resume()
    at(engine, 5.69)
    assert not future.done()
    at(engine, 5.7)
    assert future.result(60) == Sample(list(range(10)), [0.0] * 10, "stop", [0] * 3 + [4] * 7)
    assert engine.request_seconds == pytest.approx(1.0), "frozen time does not count"


def test_abort_returns_what_has_come(play, clock: Clock) -> None:
    engine = play(1.0, clock=clock, max_concurrency=1)
    running, waiting = engine.submit(REQUEST), engine.submit(REQUEST)
    at(engine, 0.6).pause("abort")
    assert running.result(60) == Sample(list(range(6)), [0.0] * 6, "abort", [0] * 6)
    update(at(engine, 9.0), 1)
    assert not waiting.done()
    engine.resume()
    assert at(engine, 10.0) and waiting.result(60).versions == [1] * 10
    assert [record.paused for record in engine.updates] == [True] * 5


def test_finish_lets_running_requests_end_and_others_wait(play, clock: Clock, wait_until) -> None:
    engine = play(1.0, clock=clock, max_concurrency=1)
    running, waiting = engine.submit(REQUEST), engine.submit(REQUEST)
    pausing = in_thread(engine.pause, "finish")
    wait_until(lambda: engine.paused)
    late = engine.submit(REQUEST)
    assert at(engine, 0.9) and not running.done() and not pausing.done()
    assert at(engine, 1.0) and running.result(60).versions == [0] * 10
    pausing.result(60)
    update(engine, 1)
    assert at(engine, 9.0) and not waiting.done() and not late.done()
    engine.resume()
    assert at(engine, 10.0) and waiting.done() and not late.done()
    assert at(engine, 11.0) and waiting.result(60).versions == late.result(60).versions == [1] * 10


# Deaths and restarts


def test_death_is_everywhere_until_a_restart(play, clock: Clock) -> None:
    engine = play(1.0, clock=clock, max_concurrency=1)
    futures = [engine.submit(REQUEST) for _ in range(2)]
    update(engine, 3)
    engine.kill(MemoryError("out of memory"))
    calls = [
        lambda: engine.submit(REQUEST),
        engine.pause,
        engine.resume,
        engine.check_health,
        engine.sleep,
        engine.wake,
    ]
    calls += [lambda: update(engine, 4), lambda: engine.generate([REQUEST]), *(f.result for f in futures)]
    for call in calls:
        with pytest.raises(EngineDeadError, match="MemoryError: out of memory") as info:
            call()
        assert isinstance(info.value.__cause__, MemoryError)
    engine.restart()
    engine.check_health()
    assert (engine.version, engine.start_count, engine.failed_version) == (0, 1, None)
    with pytest.raises(EngineError, match="no transport is connected"):
        engine.update_weights("start", {"version": 4}, timeout=60.0)
    future = engine.submit(REQUEST)
    assert at(engine, 1.0) and future.result(60).versions == [0] * 10


def test_a_pause_outlives_a_restart(play) -> None:
    engine = play(0.0)
    engine.pause()
    engine.restart()
    future = engine.submit(REQUEST)
    assert not future.done()
    engine.resume()
    assert future.done()


def test_death_ends_calls_that_wait(play) -> None:
    engine = play(inf, update_latency={"bucket": inf})
    engine.submit(REQUEST)
    waiting = [in_thread(engine.pause, "finish"), in_thread(update, engine, 1)]
    assert not wait(waiting, timeout=0.1).done
    engine.kill()
    assert all(isinstance(w.exception(60), EngineDeadError) for w in waiting)


def test_a_closed_engine_refuses_everything_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    engine = ScriptedEngine(lambda request, index: ScriptedTurn([1], latency=inf))
    (thread,) = set(threading.enumerate()) - before
    future = engine.submit(REQUEST)
    engine.close()
    engine.close()
    for call in (future.result, lambda: engine.submit(REQUEST), engine.restart, engine.pause):
        with pytest.raises(EngineError, match="this ScriptedEngine is closed"):
            call()
    thread.join(60)
    assert not thread.is_alive()


def test_a_hung_engine_answers_nothing_until_a_restart(play, clock: Clock) -> None:
    engine = play(10.0, clock=clock, request_timeout=20.0)
    running = engine.submit(REQUEST)
    at(engine, 4.0).hang()
    calls = [
        lambda: engine.pause("continue", timeout=0.05),
        lambda: engine.update_weights("start", {"version": 1}, timeout=0.05),
    ]
    for call in calls:
        with pytest.raises(EngineTimeoutError, match=r"timeout=0\.05 s"):
            call()
    with pytest.raises(EngineDeadError, match=r"hangs: check_health\(\) had no answer") as error:
        engine.check_health(timeout=0.05)
    assert isinstance(error.value.__cause__, EngineTimeoutError)
    waiting = at(engine, 15.0).submit(REQUEST)
    assert engine.load() == EngineLoad(running=1, waiting=1, tokens=4) and not running.done()
    at(engine, 21.0)
    assert isinstance(running.exception(60), EngineTimeoutError) and not waiting.done()
    resuming = in_thread(engine.resume)
    assert not wait([resuming], timeout=0.05).done
    engine.restart()
    assert all(isinstance(f.exception(60), EngineDeadError) for f in (waiting, resuming))
    engine.check_health(timeout=0.05)
    assert not engine.submit(REQUEST).done() and at(engine, 40.0).load().running == 0


# Updates


@pytest.mark.parametrize("transport", ["direct", "shared_memory"])
@pytest.mark.parametrize("staged", [True, False])
def test_an_update_is_recorded_and_reported(play, transport: str, staged: bool) -> None:
    engine = play(0.0)
    steps = update_steps(7, transport=transport, staged=staged)
    report = update(engine, 7, transport=transport, staged=staged)
    checksums, tensors = [steps[2][1]["checksum"], steps[3][1]["checksum"]], len(steps[0][1]["manifest"])
    assert report == [{"rank": 0, "version": 7, "checksums": checksums, "tensors": tensors}]
    assert [record.step for record in engine.updates] == ["connect", "start", "bucket", "bucket", "finish"]
    assert [record.info for record in engine.updates] == [
        {k: v for k, v in info.items() if k != "payload"} for _, info in steps
    ]
    assert (engine.version, engine.failed_version) == (7, None)
    assert engine.generate([REQUEST])[0].versions == [7] * 10


def forget(steps: list) -> None:
    del steps[3]


def finish_another(steps: list) -> None:
    steps[4][1]["version"] = 6


def not_started(steps: list) -> None:
    del steps[1]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (forget, "has 2 of 3 tensors; c is the first missing one"),
        (finish_another, r"no update to version 6 is open \(one to version 5 is\)"),
        (not_started, "no update to version 5 is open"),
    ],
)
def test_faulty_updates_are_refused_and_a_good_one_follows(play, fault: Callable, message: str) -> None:
    engine = play(0.0)
    steps = update_steps(5)
    fault(steps)
    with pytest.raises(EngineError, match=message):
        for step, info in steps:
            engine.update_weights(step, info, timeout=60.0)
    assert engine.version == 0
    update(engine, 5)
    assert engine.version == 5 and engine.failed_version is None


@pytest.mark.parametrize(("step", "staged"), [("finish", True), ("bucket", False)])
def test_a_torn_engine_samples_nothing_until_it_is_mended(play, clock: Clock, step: str, staged: bool) -> None:
    engine = play(1.0, clock=clock, fail_updates={step: [OSError("half-way")]})
    frozen = engine.submit(REQUEST)
    at(engine, 0.5).pause("continue")
    with pytest.raises(OSError, match="half-way"):
        update(engine, 1, staged=staged)
    assert (engine.version, engine.failed_version) == (0, 1)
    waiting = engine.submit(REQUEST)
    engine.resume()
    for fail in (lambda: waiting.result(60), lambda: engine.submit(REQUEST)):
        with pytest.raises(EngineError, match="to version 1 failed half-way"):
            fail()
    assert frozen.result(60).finish == "abort" and frozen.result(60).versions == [0] * 5
    update(engine, 2, staged=staged)
    future = engine.submit(REQUEST)
    assert at(engine, 2.0) and future.result(60).versions == [2] * 10


@pytest.mark.parametrize("late_version", [1, 2], ids=["another version", "the same version"])
def test_a_late_step_closes_only_its_own_update(play, clock: Clock, wait_until, late_version: int) -> None:
    engine = play(0.0, clock=clock, update_latency={"bucket": 5.0})
    first, second = update_steps(late_version), update_steps(2)
    for step in first[:2]:
        engine.update_weights(*step, timeout=60.0)
    late = in_thread(engine.update_weights, *first[2], timeout=60.0)
    wait_until(lambda: engine._waiters._waiters)  # the step waits for its latency
    engine.update_latency.clear()
    for step in second[:3]:
        engine.update_weights(*step, timeout=60.0)
    at(engine, 5.0)
    with pytest.raises(EngineError, match="bucket is late; its update was aborted"):
        late.result(60)
    with pytest.raises(EngineError, match="no update to version 7 is open"):
        engine.update_weights("finish", {"version": 7}, timeout=60.0)
    for step in second[3:]:
        engine.update_weights(*step, timeout=60.0)
    assert (engine.version, engine.failed_version) == (2, None)


# Threads
