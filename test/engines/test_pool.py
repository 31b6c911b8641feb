"""Tests of EnginePool with scripted members that die, hang and restart: each request is answered once."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, wait
from math import inf
from typing import Any

import pytest
import torch

from support.waiting import PATIENCE, in_thread, wait_until
from torchrl_rloo.embedded import build_model
from torchrl_rloo.engines.base import (
    BatchedEngine,
    EngineDeadError,
    EngineError,
    EngineLoad,
    EngineTimeoutError,
    Request,
    Sample,
)
from torchrl_rloo.engines.pool import EnginePool
from torchrl_rloo.engines.routers import LeastLoaded, Sticky
from torchrl_rloo.engines.scripted import ScriptedEngine, ScriptedTurn
from torchrl_rloo.engines.supervisor import Supervisor
from torchrl_rloo.engines.transformers_engine import TransformersEngine
from torchrl_rloo.weight_update import WeightSyncError

REQUESTS = [Request([1, 2], limit=8, seed=seed) for seed in range(12)]


class Restarting(ScriptedEngine):
    """Engine whose restart waits for a permit, and may fail."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.permits, self.failures = threading.Semaphore(0), 0

    def restart(self) -> None:
        self.permits.acquire(timeout=PATIENCE)
        if self.failures:
            self.failures -= 1
            raise EngineError("no memory")
        super().restart()


def seeds(latency: float = 0.0) -> Callable[[Request, int], ScriptedTurn]:
    """Return a script whose turn is the request's seed."""
    return lambda request, index: ScriptedTurn([request.seed] * 4, latency=latency)


@pytest.fixture
def make_pool() -> Iterator[Callable[..., EnginePool]]:
    """``make_pool(engines, patience=..., **supervisor)`` returns a pool that probes members often."""
    pools = []

    def make(engines, *, router=None, patience=PATIENCE, max_attempts=3, **settings) -> EnginePool:
        supervisor = Supervisor(**{"probe_every": 0.02, "probe_timeout": 0.1, "backoff": 0.01} | settings)
        pool = EnginePool(engines, router=router, supervisor=supervisor, patience=patience, max_attempts=max_attempts)
        pools.append(pool)
        return pool

    yield make
    for pool in pools:
        for member in pool.members:
            if isinstance(member.target, Restarting):
                member.target.permits.release(100)
        pool.close()


def states(pool: EnginePool) -> list[str]:
    return [member.state for member in pool.members]


def update(engine: ScriptedEngine, version: int) -> None:
    """Give an engine a version, as a publisher does."""
    engine.update_weights("adapter", {"version": version, "path": "", "checksum": ""}, timeout=PATIENCE)


# Deaths


def test_requests_of_a_killed_member_go_elsewhere_with_their_seeds(make_pool, wait_until) -> None:
    slow, fast = ScriptedEngine(seeds(inf)), ScriptedEngine(seeds(0.05))
    pool = make_pool([slow, fast])
    futures = [pool.submit(request) for request in REQUESTS]
    assert len(slow.requests) == len(fast.requests) == 6
    slow.kill()
    assert [f.result(PATIENCE).tokens for f in futures] == [[seed] * 4 for seed in range(12)]
    assert sorted(r.seed for r in fast.requests) == list(range(12))
    wait_until(lambda: states(pool) == ["ready", "ready"])
    assert slow.start_count == 1 and pool.counts["pool/resubmitted"] == 6 and pool.counts["pool/restarts"] == 1
    changes = [(event.member, event.from_state, event.to_state) for event in pool.events]
    assert changes == [(0, "ready", "dead"), (0, "dead", "starting"), (0, "starting", "ready")]
    assert "kill() was called" in pool.events[0].cause


def test_a_hung_member_is_restarted_and_its_late_answer_ignored(make_pool, wait_until) -> None:
    hung, other = ScriptedEngine(seeds(0.2)), ScriptedEngine(seeds(0.0))
    pool = make_pool([hung, other], max_attempts=2)
    futures = [pool.submit(request) for request in REQUESTS[:2]]
    hung.hang()
    assert [f.result(PATIENCE).tokens for f in futures] == [[0] * 4, [1] * 4]
    wait_until(lambda: states(pool) == ["ready"] * 2 and hung.start_count == 1)
    assert [e.to_state for e in pool.events] == ["suspect", "dead", "starting", "ready"]
    assert pool.counts["pool/suspected"] == 1 and other.start_count == 0


def test_the_late_answer_of_a_dead_member_is_ignored(make_pool, wait_until) -> None:
    late: Future = Future()
    late.set_running_or_notify_cancel()  # it cannot be cancelled
    dead, other = ScriptedEngine(seeds()), ScriptedEngine(seeds(inf))
    dead.submit = lambda request: late
    pool = make_pool([dead, other], router=LeastLoaded())
    future = pool.submit(REQUESTS[5])
    dead.kill()
    wait_until(lambda: len(other.requests) == 1)
    late.set_result(Sample([9], [0.0], "stop", [0]))
    assert not future.done() and pool.counts["pool/late_answers"] == 1
    other.pause("abort")
    assert future.result(PATIENCE).finish == "abort" and future.result().tokens == []


def test_a_suspect_that_answers_is_trusted_again_and_keeps_its_requests(make_pool, wait_until) -> None:
    engine = ScriptedEngine(seeds(0.3))
    check, slow = engine.check_health, [EngineTimeoutError("busy")]
    engine.check_health = lambda timeout: check(timeout) if not slow else raise_(slow.pop())
    pool = make_pool([engine])
    future = pool.submit(REQUESTS[0])
    wait_until(lambda: len(pool.events) == 2)
    assert [e.to_state for e in pool.events] == ["suspect", "ready"]
    assert future.result(PATIENCE).tokens == [0] * 4 and engine.start_count == 0 and len(engine.requests) == 1


def test_a_member_that_samples_is_not_suspected_for_late_answers(make_pool, wait_until) -> None:
    engine, probes, samples = ScriptedEngine(seeds(0.0)), [], [True]

    def answer_late(timeout: float) -> None:
        if samples[0]:
            engine.generate(REQUESTS[:1])
        probes.append(len(engine.requests))
        raise EngineTimeoutError("busy")

    engine.check_health = answer_late
    pool = make_pool([engine])
    wait_until(lambda: len(probes) >= 4)
    assert not pool.events and pool.counts["pool/suspected"] == 0
    samples[0] = False
    wait_until(lambda: [e.to_state for e in pool.events][:2] == ["suspect", "dead"])


@pytest.mark.parametrize("batched", [False, True])
def test_a_request_within_an_update_waits_for_its_end(make_pool, wait_until, batched: bool) -> None:
    engine = ScriptedEngine(seeds())
    target = BatchedEngine(engine) if batched else engine
    pool = make_pool([target])
    pool.attach(lambda engine: update(engine, 1))
    update(target, 1)
    pool.mark_filled(target, 1)
    target.pause("continue")
    engine.failed_version = 2  # as an engine does during the last step of an update
    future = pool.submit(REQUESTS[3])
    assert not future.done() and states(pool) == ["ready"]
    update(target, 2)
    target.resume()
    assert future.result(PATIENCE).versions == [2] * 4 and pool.counts["pool/suspected"] == 0
    # An update that has failed is one
    target.pause("continue")
    engine.failed_version = 3
    target.resume()
    assert pool.generate(REQUESTS[:1])[0].versions == [1] * 4  # refilled
    assert pool.counts["pool/suspected"] == 1


def raise_(error: Exception) -> None:
    raise error


def test_a_member_without_progress_is_restarted(make_pool, wait_until) -> None:
    stuck, other = ScriptedEngine(seeds(inf)), ScriptedEngine(seeds(0.0))
    stuck.pause()  # it answers calls, and a pause is no stall
    pool = make_pool([stuck, other], stall_timeout=0.15)
    future = pool.submit(REQUESTS[0])
    assert not wait([future], timeout=0.3).done and states(pool) == ["ready"] * 2
    stuck.resume()
    assert future.result(PATIENCE).tokens == [0] * 4 and len(other.requests) == 1
    assert "sampled nothing for stall_timeout=0.15 s with 1 requests inside" in pool.events[0].cause


def test_a_request_that_reaches_its_deadline_is_tried_elsewhere_a_few_times(make_pool) -> None:
    engines = [ScriptedEngine(seeds(inf), request_timeout=0.05) for _ in range(2)]
    pool = make_pool(engines, max_attempts=3)
    with pytest.raises(EngineTimeoutError, match="request_timeout=0.05"):
        pool.submit(REQUESTS[0]).result(PATIENCE)
    assert sorted(len(engine.requests) for engine in engines) == [1, 2] and pool.counts["pool/timeouts"] == 3
    assert states(pool) == ["ready"] * 2 and sum(m.outstanding for m in pool.members) == 0


def test_a_refused_request_is_not_repeated(make_pool) -> None:
    engines = [ScriptedEngine([ScriptedTurn([1], error=EngineError("too long"))]) for _ in range(2)]
    with pytest.raises(EngineError, match="too long"):
        make_pool(engines).generate(REQUESTS[:1])
    assert [len(engine.requests) for engine in engines] == [1, 0]


def test_slow_restarts_do_not_delay_others(make_pool, wait_until) -> None:
    engines = [Restarting(seeds()) for _ in range(3)]
    pool = make_pool(engines)
    for engine in engines:
        engine.kill()
    futures = [pool.submit(request) for request in REQUESTS]
    wait_until(lambda: states(pool) == ["starting"] * 3)  # at the same time
    assert not any(f.done() for f in futures) and pool.load().waiting == len(futures)
    engines[2].permits.release()
    assert [f.result(PATIENCE).tokens[0] for f in futures] == list(range(12))
    assert states(pool) == ["starting", "starting", "ready"]


def test_a_member_beyond_its_budget_stays_dead_and_others_continue(make_pool, wait_until) -> None:
    broken, other = Restarting(seeds()), ScriptedEngine(seeds())
    broken.failures = 2
    broken.permits.release(100)
    pool = make_pool([broken, other], max_restarts=2)
    broken.kill()
    wait_until(lambda: pool.members[0].exhausted)
    assert pool.counts["pool/failed_restarts"] == 2 and pool.counts["pool/abandoned"] == 1
    assert pool.generate(REQUESTS)[3].tokens == [3] * 4 and states(pool) == ["dead", "ready"]
    pool.check_health()
    pool.restart()  # grants a new budget
    wait_until(lambda: states(pool) == ["ready"] * 2)


def test_without_any_member_left_requests_fail_at_once(make_pool, wait_until) -> None:
    engines = [Restarting(seeds(inf)) for _ in range(2)]
    for engine in engines:
        engine.failures = 9
    pool = make_pool(engines, max_restarts=1)
    futures = [pool.submit(request) for request in REQUESTS]
    for engine in engines:
        engine.kill(MemoryError("out of memory"))
        engine.permits.release(100)
    for call in [*(f.result for f in futures), lambda timeout: pool.generate(REQUESTS), pool.check_health]:
        with pytest.raises(EngineDeadError, match=r"(?s)dead for good: member 0 .*no memory.*member 1 .*no memory"):
            call(PATIENCE)


def test_requests_wait_for_a_ready_member_only_so_long(make_pool, caplog: pytest.LogCaptureFixture) -> None:
    engine = Restarting(seeds())
    pool = make_pool([engine], patience=0.2)
    engine.kill(MemoryError("out of memory"))
    future = pool.submit(REQUESTS[0])
    words = r"no member was ready for patience=0.2 s: member 0 \(Restarting\) is starting \(.*out of memory"
    with pytest.raises(EngineDeadError, match=words):
        future.result(PATIENCE)
    assert "1 requests wait for a ready member" in caplog.text


def test_futures_resolve_once_whatever_happens(make_pool, wait_until) -> None:
    """Kills, hangs and cancels at random moments: all requests are answered once, with their seeds and new weights."""
    engines = [ScriptedEngine(seeds(0.004), max_concurrency=8) for _ in range(4)]
    pool = make_pool(engines, max_attempts=100, max_restarts=1000, backoff=0.0)
    pool.attach(lambda engine: update(engine, 7))
    for engine in engines:
        update(engine, 7)
        pool.mark_filled(engine, 7)
    generator = torch.Generator().manual_seed(0)
    callbacks: Counter[int] = Counter()
    futures, cancelled = [], set()
    for seed in range(600):
        future = pool.submit(Request([1], limit=4, seed=seed))
        future.add_done_callback(lambda f, seed=seed: callbacks.update([seed]))
        futures.append(future)
        chance = torch.rand((), generator=generator).item()
        victim = engines[int(chance * 1e6) % 4]
        if chance < 0.03:
            victim.kill()
        elif chance < 0.04:
            victim.hang()
        elif chance < 0.14 and futures[seed // 2].cancel():
            cancelled.add(seed // 2)
    for seed, future in enumerate(futures):
        if seed in cancelled:
            with pytest.raises(CancelledError):
                future.result(PATIENCE)
        else:
            sample = future.result(PATIENCE)
            assert sample.tokens == [seed] * 4 and sample.versions == [7] * 4
    wait_until(lambda: sum(callbacks.values()) == 600)
    assert set(callbacks.values()) == {1} and pool.counts["pool/deaths"] > 2 and cancelled
    wait_until(lambda: states(pool) == ["ready"] * 4)
    assert pool.metrics()["pool/outstanding"] == 0 and all(e.load().running == 0 for e in engines)


def test_a_cancelled_request_is_cancelled_inside_its_member(make_pool, wait_until) -> None:
    engine = ScriptedEngine(seeds(inf))
    pool = make_pool([engine])
    running = pool.submit(REQUESTS[0])
    assert running.cancel() and engine.load() == EngineLoad() and pool.members[0].outstanding == 0
    engine.kill()
    wait_until(lambda: states(pool) == ["ready"])
    assert len(engine.requests) == 1


# Weights


def test_no_member_samples_before_it_was_filled(make_pool, wait_until) -> None:
    first, second = ScriptedEngine(seeds()), Restarting(seeds())
    pool = make_pool([first, second])
    fills, failures = [], [OSError("no snapshot")]

    def fill(engine: ScriptedEngine) -> None:
        if failures:
            raise failures.pop()
        fills.append(engine)
        update(engine, 7)

    pool.attach(fill)
    with pytest.raises(ValueError, match="a publisher is attached"):
        pool.attach(fill)
    future = pool.submit(REQUESTS[0])
    assert states(pool) == ["empty"] * 2 and pool.targets() == [first, second] and not fills
    update(first, 6)
    pool.mark_filled(first, 6)
    assert future.result(PATIENCE).versions == [6] * 4 and pool.version == 6
    second.kill()
    second.permits.release()
    wait_until(lambda: states(pool) == ["ready", "ready"])
    assert fills == [second] and pool.counts["pool/failed_fills"] == 1
    assert pool.version == 7 and pool.metrics()["pool/version_spread"] == 1
    # A restart by a caller empties a member as well
    first.restart()
    samples = pool.generate(REQUESTS)
    assert {v for s in samples for v in s.versions} == {7}
    wait_until(lambda: first.version == 7)
    # Weights that came before a restart do not count
    second.permits.release()
    second.restart()
    pool.mark_filled(second, 0)
    wait_until(lambda: second.version == 7 and states(pool) == ["ready"] * 2)


def test_a_member_that_missed_a_push_is_refilled_or_restarted(make_pool, wait_until) -> None:
    engine, other = ScriptedEngine(seeds()), ScriptedEngine(seeds())
    pool = make_pool([engine, other])
    pool.attach(lambda engine: update(engine, 5))
    for each in (engine, other):
        update(each, 4)
        pool.mark_filled(each, 4)
    pool.mark_failed(engine, EngineTimeoutError("late"))
    wait_until(lambda: states(pool) == ["ready"] * 2)
    assert engine.version == 5 and engine.start_count == 0
    assert [e.to_state for e in pool.events if e.member == 0][-3:] == ["suspect", "empty", "ready"]
    engine.hang()
    pool.mark_failed(engine, EngineTimeoutError("late"))
    wait_until(lambda: engine.start_count == 1 and states(pool) == ["ready"] * 2)
    assert engine.version == 5
    engine.kill()
    pool.mark_filled(engine, 5)  # the push does not know yet
    assert pool.generate(REQUESTS)[0].versions == [4] * 4
    with pytest.raises(EngineError, match="pass the pool to WeightPublisher"):
        pool.update_weights("start", {"version": 1}, timeout=1.0)
    with pytest.raises(ValueError, match="no engine of the pool"):
        pool.mark_filled(ScriptedEngine([]), 1)


def test_a_member_whose_fill_never_succeeds_is_abandoned(make_pool, wait_until) -> None:
    pool = make_pool([ScriptedEngine(seeds())], max_restarts=3)
    pool.attach(lambda engine: raise_(OSError("no snapshot")))
    pool.members[0].target.kill()
    with pytest.raises(EngineDeadError, match="max_restarts=3 times in an hour.*OSError: no snapshot"):
        pool.submit(REQUESTS[0]).result(PATIENCE)
    assert pool.counts["pool/failed_fills"] == 2 and pool.counts["pool/restarts"] == 1


def test_a_member_whose_fills_get_no_answer_is_restarted(make_pool, wait_until) -> None:
    """While a step of an update hangs in an engine, a health call says nothing; the fill's time-out does."""

    class Stopped(ScriptedEngine):
        occupied = property(lambda self: self.start_count == 0 and bool(fills))

    fills: list[int] = []

    def fill(engine: ScriptedEngine) -> None:
        fills.append(engine.start_count)
        if engine.start_count == 0:
            raise WeightSyncError("the weights did not arrive") from EngineTimeoutError("no answer")
        update(engine, 1)

    pool = make_pool([Stopped(seeds())])
    pool.attach(fill)
    pool.mark_failed(pool.members[0].target, EngineTimeoutError("late"))
    wait_until(lambda: states(pool) == ["ready"])
    assert fills == [0, 0, 1] and pool.counts["pool/restarts"] == 1


def test_waiting_requests_are_shared_with_members_that_are_ready_soon(make_pool) -> None:
    engines = [ScriptedEngine(seeds(inf)) for _ in range(3)]
    pool = make_pool(engines)
    pool.attach(lambda engine: None)
    futures = [pool.submit(request) for request in REQUESTS]
    for engine in engines[:2]:
        update(engine, 1)
        pool.mark_filled(engine, 1)
    assert [len(engine.requests) for engine in engines] == [4, 4, 0]
    pool.check_waiting(inf)  # the third one takes too long
    assert [len(engine.requests) for engine in engines] == [6, 6, 0] and not any(f.done() for f in futures)


# Routers


def test_the_least_loaded_member_has_the_fewest_tokens_outstanding(make_pool) -> None:
    engines = [ScriptedEngine(seeds(inf)) for _ in range(2)]
    pool = make_pool(engines, router=LeastLoaded())
    pool.submit(Request([1] * 50, limit=50, seed=0))
    for seed in range(1, 11):
        pool.submit(Request([1] * 5, limit=5, seed=seed))
    assert [len(engine.requests) for engine in engines] == [1, 10]


def test_a_conversation_stays_at_its_home_unless_that_is_overloaded_old_or_dead(make_pool) -> None:
    engines = [Restarting(seeds()) for _ in range(8)]
    pool = make_pool(engines, router=Sticky())
    for turn in range(3):
        for session in range(200):
            pool.generate([Request([1], limit=1, seed=0, session=(session, turn and 1))])
    homes = [{r.session for r in engine.requests} for engine in engines]
    assert sum(map(len, homes)) == 400 and all(20 < len(home) < 90 for home in homes)
    request = Request([1], limit=1, seed=0, session=(3, 1))
    (home,) = [engine for engine in engines if request in engine.requests]
    others = [engine for engine in engines if engine is not home]

    def goes_home() -> bool:
        before = len(home.requests)
        pool.generate([request])
        return len(home.requests) > before

    update(others[0], 1)
    assert not goes_home()
    for engine in engines:
        update(engine, 1)
    assert goes_home()
    home.pause()
    waiting = [pool.submit(Request([1] * 4, limit=4, seed=0, session=(3, 1)))]
    assert not goes_home()
    home.resume()
    assert waiting[0].result(PATIENCE) and goes_home()
    home.kill()
    assert not goes_home()
    with pytest.raises(ValueError, match="overload=0.5"):
        Sticky(overload=0.5)


# The pool as one engine


def test_pause_and_sleep_reach_all_living_members_and_those_that_start_later(make_pool, wait_until) -> None:
    engine, hung, late = ScriptedEngine(seeds()), ScriptedEngine(seeds()), Restarting(seeds())
    pool = make_pool([engine, hung, late])
    late.kill()
    wait_until(lambda: states(pool)[2] == "dead" or states(pool)[2] == "starting")
    hung.hang()
    pool.pause(timeout=0.2)
    assert engine.paused and pool.paused
    late.permits.release()
    wait_until(lambda: states(pool) == ["ready"] * 3 and hung.start_count)
    assert late.paused and hung.paused
    future = pool.submit(REQUESTS[0])
    assert not future.done()
    pool.resume()
    assert future.result(PATIENCE).tokens == [0] * 4
    pool.sleep()
    with pytest.raises(EngineError, match="asleep"):
        pool.submit(REQUESTS[0])
    pool.wake()
    assert pool.generate(REQUESTS)[2].tokens == [2] * 4 and not any(e.asleep for e in (engine, hung, late))


def test_a_pause_that_a_living_member_refuses_is_undone(make_pool) -> None:
    engines = [ScriptedEngine(seeds(inf)) for _ in range(2)]
    pool = make_pool(engines)
    futures = [pool.submit(request) for request in REQUESTS[:2]]
    with pytest.raises(EngineTimeoutError, match="1 requests run after timeout=0.05 s"):
        pool.pause("finish", timeout=0.05)
    assert not any(engine.paused for engine in engines) and not pool.paused and not futures[1].done()
    pool.pause("abort")
    assert [f.result(PATIENCE).finish for f in futures] == ["abort"] * 2


def test_a_pause_ignores_a_member_that_died_in_it_and_was_restarted(make_pool, wait_until) -> None:
    """The member is paused after its restart."""
    hung, other = ScriptedEngine(seeds()), ScriptedEngine(seeds())
    pool = make_pool([hung, other])
    hung.hang()
    pausing = in_thread(pool.pause, "abort", timeout=PATIENCE)
    pausing.result(PATIENCE)  # the restart ends the call of the hung member
    wait_until(lambda: states(pool) == ["ready", "ready"])
    assert hung.start_count == 1 and hung.paused and other.paused
    pool.resume()
    assert not hung.paused and not other.paused


def test_engines_with_batched_calls_are_members_too(make_pool, tokenizer) -> None:
    engines = [TransformersEngine(build_model(tokenizer, seed=0).eval(), tokenizer) for _ in range(2)]
    pool = make_pool(engines)
    requests = [Request([5, 6 + seed], limit=6, seed=seed) for seed in range(8)]
    assert [s.tokens for s in pool.generate(requests)] == [s.tokens for s in engines[0].generate(requests)]
    assert pool.targets() == engines and pool.stop_ids == engines[0].stop_ids
    with pytest.raises(EngineError, match="prompt of request 0 is empty"):
        pool.submit(Request([], limit=1, seed=0)).result(PATIENCE)
    pool.pause()
    future = pool.submit(requests[0])
    assert not wait([future], timeout=0.05).done
    pool.resume()
    assert len(future.result(PATIENCE).tokens) == 6 and pool.load().tokens == 54


def test_an_engine_with_batched_calls_that_answers_wrongly_serves_the_next_request(make_pool, tokenizer) -> None:
    class Wrong(TransformersEngine):
        answers: Any = None

        def generate(self, requests: Sequence[Request]) -> Any:
            return super().generate(requests) if self.answers is None else self.answers

    pool = make_pool([engine := Wrong(build_model(tokenizer, seed=0).eval(), tokenizer)])
    for answers, message in (([], "answered 0 of 1 requests"), ([None], "no attribute 'tokens'"), (3, "has no len")):
        engine.answers = answers
        with pytest.raises(Exception, match=message):
            pool.submit(Request([5], limit=2, seed=0)).result(PATIENCE)
    engine.answers = None
    assert (
        pool.vocab_size == engine.vocab_size > max(pool.submit(Request([5], limit=2, seed=0)).result(PATIENCE).tokens)
    )


def test_load_has_sums_and_the_largest_share(make_pool) -> None:
    class Shared(ScriptedEngine):
        share = 0.0

        def load(self) -> EngineLoad:
            return super().load()._replace(kv_usage=self.share)

    engines = [Shared(seeds(inf), max_concurrency=1) for _ in range(2)]
    engines[0].share, engines[1].share = 0.25, 0.5
    pool = make_pool(engines)
    for request in REQUESTS[:5]:
        pool.submit(request)
    assert pool.load() == EngineLoad(running=2, waiting=3, kv_usage=0.5)


def test_a_closed_pool_fails_everything_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    engines = [ScriptedEngine(seeds(inf)), Restarting(seeds(inf))]
    pool = EnginePool(engines, supervisor=Supervisor(probe_every=0.02))
    future = pool.submit(REQUESTS[0])
    engines[1].kill()
    closing = in_thread(pool.close)
    engines[1].permits.release()
    closing.result(PATIENCE)
    pool.close()
    for call in (future.result, lambda: pool.submit(REQUESTS[0]), pool.pause, pool.restart):
        with pytest.raises(EngineError, match="is closed"):
            call()
    assert all(engine.closed for engine in engines) and states(pool) == ["closed"] * 2
    wait_until(lambda: set(threading.enumerate()) <= before, what="the end of the pool's threads")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"engines": []}, "at least one engine"),
        ({"patience": 0.0}, "patience=0.0 must be above 0"),
        ({"max_attempts": 0}, "max_attempts=0 must be at least 1"),
    ],
)
def test_impossible_settings_are_refused(arguments: dict, message: str) -> None:
    with ScriptedEngine([]) as engine, pytest.raises(ValueError, match=message):
        EnginePool(**{"engines": [engine]} | arguments)
    with pytest.raises(ValueError, match="probe_every=0 must be above 0"):
        Supervisor(probe_every=0)
    with pytest.raises(ValueError, match="backoff=9.0 must be from 0 to max_backoff=1.0"):
        Supervisor(backoff=9.0, max_backoff=1.0)
