"""Tests of pools that follow one of another process: deaths, reports, restarts, and members that join and leave."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count
from math import inf
from typing import Any, NamedTuple

import pytest

from support.waiting import PATIENCE, in_thread, wait_until
from torchrl_rloo.engines.base import EngineDeadError, EngineError, Request, SharedEngine
from torchrl_rloo.engines.member import Member
from torchrl_rloo.engines.occupancy import Reading
from torchrl_rloo.engines.pool import EnginePool
from torchrl_rloo.engines.routers import LeastLoaded, NearestFirst, Sticky
from torchrl_rloo.engines.scripted import ScriptedEngine, ScriptedTurn
from torchrl_rloo.engines.supervisor import Supervisor

REQUESTS = [Request([1, 2], limit=8, seed=seed) for seed in range(12)]
ENDLESS = 999  # first prompt id of requests that never end
ENGINES: dict[int, Shared] = {}  # as handles address them


class Handle(NamedTuple):
    """Address of a :class:`Shared`."""

    key: int
    start_count: int

    def connect(self) -> Client:
        return Client(self)


class Shared(ScriptedEngine, SharedEngine):
    """Engine of the driver. Its clients stand for those of other processes."""

    occupancy = Reading()
    keys = count()

    def __init__(self) -> None:
        self.key = next(self.keys)
        ENGINES[self.key] = self
        super().__init__(
            lambda r, index: ScriptedTurn([r.seed, *r.prompt], latency=inf if ENDLESS in r.prompt else 0.0)
        )

    def current_handle(self) -> Handle:
        return Handle(self.key, self.start_count)

    def follow(self, handle: Handle) -> None:
        raise AssertionError("the driver's engine follows nobody")


class Client(SharedEngine):
    """Client of a :class:`Shared`."""

    occupancy = Reading()

    def __init__(self, handle: Handle):
        super().__init__()
        self.engine, self.start_count = ENGINES[handle.key], handle.start_count

    version = property(lambda self: self.engine.version)
    failed_version = property(lambda self: self.engine.failed_version)

    def submit(self, request: Request) -> Any:
        if self.start_count != self.engine.start_count:
            raise EngineDeadError("this start of the engine is dead")
        return self.engine.submit(request)

    def load(self) -> Any:
        return self.engine.load()

    def current_handle(self) -> Handle:
        return Handle(self.engine.key, self.start_count)

    def follow(self, handle: Handle) -> None:
        self.start_count = handle.start_count

    def close(self) -> None:
        self.closed = True

    def _refuse(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("a pool that follows leaves this to the driver")

    check_health = pause = resume = restart = sleep = wake = update_weights = _refuse


def states(pool: EnginePool) -> list[str]:
    return [member.state for member in pool.members]


def pickled(pool: EnginePool) -> EnginePool:
    from cloudpickle import dumps

    return pickle.loads(dumps(pool))


@pytest.fixture
def pool() -> Iterator[EnginePool]:
    """Pool of two engines, whose supervisor calls them rarely."""
    engines = [Shared() for _ in range(2)]
    made = EnginePool(engines, supervisor=Supervisor(probe_every=30.0, backoff=0.01), patience=PATIENCE)
    wait_until(lambda: all(member.probe_at and member.job is None for member in made.members))  # the first calls
    yield made
    made.close()


@pytest.fixture
def follower(pool: EnginePool) -> Iterator[EnginePool]:
    made = pickled(pool)
    assert made.follows and not pool.follows and made.patience == pool.patience
    yield made
    made.close()
    assert not any(member.target.closed for member in pool.members)


def ended(requests: Sequence[Request], pool: EnginePool) -> bool:
    return [sample.tokens for sample in pool.generate(requests)] == [[r.seed, *r.prompt] for r in requests]


def test_a_killed_engine_is_left_and_reported_until_the_driver_has_looked(pool: EnginePool, follower) -> None:
    futures = [follower.submit(Request([ENDLESS], limit=8, seed=seed)) for seed in range(4)]
    assert [len(member.inside) for member in follower.members] == [2, 2]
    pool.supervisor.stop()  # so that nothing but the report tells the driver
    pool.members[0].target.kill()
    assert states(follower) == ["dead", "ready"] and follower.counts["pool/resubmitted"] == 2
    assert len(follower.members[1].inside) == 4 and ended(REQUESTS, follower)
    # Old news from the driver does not restore it
    (report,) = follower.reports()
    assert report.number == 0 and "kill() was called" in report.error
    follower.follow(pool.member_states())
    assert states(follower) == ["dead", "ready"] and follower.reports() == [report]
    # The report does
    pool.note_reports([report])
    assert states(pool) == ["suspect", "ready"] and "another process reports" in pool.events[-1].cause
    pool.note_reports([report])
    assert pool.counts["pool/suspected"] == 1
    follower.follow(pool.member_states())
    assert states(follower) == ["suspect", "ready"] and follower.reports() == []
    assert all(future.cancel() for future in futures)


def test_a_restarted_engine_is_used_once_the_driver_says_so(pool: EnginePool, follower) -> None:
    follower.submit(Request([ENDLESS], limit=8, seed=0))
    follower.submit(Request([ENDLESS], limit=8, seed=1))
    pool.members[1].target.kill()
    pool.note_reports(follower.reports())
    wait_until(lambda: pool.members[1].target.start_count == 1 and states(pool) == ["ready", "ready"])
    assert states(follower) == ["ready", "dead"]
    follower.follow(pool.member_states())
    assert states(follower) == ["ready", "ready"] and follower.reports() == []
    assert ended(REQUESTS, follower) and follower.members[1].finished > 0


def test_parts_of_a_failed_update_are_left_to_the_driver(pool: EnginePool, follower) -> None:
    pool.members[0].target.failed_version = 3
    assert ended(REQUESTS, follower) and states(follower) == ["dead", "ready"]
    assert "version 3 failed half-way" in follower.reports()[0].error


def test_what_the_driver_lost_is_left_and_requests_wait_while_nothing_is_ready(pool: EnginePool, follower) -> None:
    futures = [follower.submit(Request([ENDLESS], limit=8, seed=seed)) for seed in range(2)]
    given = pool.member_states()
    lost = [status._replace(state="dead", changes=status.changes + 1) for status in given]
    follower.follow(lost)
    assert states(follower) == ["dead", "dead"] and follower.load().waiting == 2 and follower.reports() == []
    follower.follow(given)  # older
    assert states(follower) == ["dead", "dead"]
    assert not any(future.done() for future in futures)
    # It fails them if none of the members will come back
    follower.follow([status._replace(changes=status.changes + 2, exhausted=True) for status in lost])
    for future in futures:
        with pytest.raises(EngineDeadError, match="all members of this EnginePool are dead for good"):
            future.result(PATIENCE)
    with EnginePool(lost, router=LeastLoaded(), patience=0.2) as impatient:
        with pytest.raises(EngineDeadError, match=r"no member was ready for patience=0\.2 s"):
            impatient.submit(REQUESTS[0]).result(PATIENCE)


def test_what_belongs_to_the_driver_is_refused(follower: EnginePool) -> None:
    calls = {name: getattr(follower, name) for name in ("restart", "pause", "resume", "sleep", "wake")}
    calls |= {"attach": partial(follower.attach, print), "add": partial(follower.add, None)}
    calls |= {"update_weights": partial(follower.update_weights, "start", timeout=1.0)}
    for name, call in calls.items():
        with pytest.raises(EngineError, match=rf"{name}\(\) of a pool belongs to the driver"):
            call()
    with pytest.raises(EngineError, match="pickling of a pool belongs to the driver"):
        pickled(follower)
    with ScriptedEngine([]) as local, EnginePool([local]) as mixed:
        with pytest.raises(EngineError, match=r"member 0 \(ScriptedEngine\) cannot be used from other processes"):
            mixed.member_states()


def test_members_join_and_leave_pools_that_follow(pool: EnginePool, follower) -> None:
    added = Shared()
    assert pool.add(added) == 2 and states(pool) == ["ready"] * 3
    with pytest.raises(ValueError, match="a member of the pool already"):
        pool.add(added)
    follower.follow(pool.member_states())
    futures = [follower.submit(Request([ENDLESS], limit=8, seed=seed)) for seed in range(3)]
    futures += [pool.submit(Request([ENDLESS], limit=8, seed=seed)) for seed in range(3)]
    assert [len(member.inside) for each in (pool, follower) for member in each.members] == [1] * 6
    removal = in_thread(pool.remove, 2)
    wait_until(lambda: len(pool.members) == 2 and pool.counts["pool/resubmitted"] == 1)
    assert not added.closed  # other processes have requests inside
    follower.follow(pool.member_states())
    removal.result(PATIENCE)
    assert added.closed and len(follower.members) == 2 and follower.reports() == []
    assert follower.counts["pool/resubmitted"] == 1
    assert sum(len(member.inside) for member in follower.members) == 3 and not any(f.done() for f in futures)
    pool.remove(0, timeout=0.0)
    with pytest.raises(ValueError, match=r"number=1 must be one of \[1\], and not the last member"):
        pool.remove(1)
    for future in futures:
        future.cancel()


def test_the_nearest_router_prefers_its_node_until_it_is_overloaded() -> None:
    members = [Member(ScriptedEngine([]), number) for number in range(4)]
    members[0].target.is_near = False
    router, request = NearestFirst(overload=1.5), Request([1] * 10, limit=10, seed=0)
    members[1].outstanding = members[3].outstanding = 40
    assert router.choose(request, members, members) is members[2]
    members[1].outstanding = 200
    assert router.choose(request, members[:2], members) is members[0]  # 220 tokens are above 1.5 * (100 + 20)
    assert router.choose(request, members[1:2], members) is members[1]  # no other is ready
    members[0].outstanding = 100
    assert router.choose(request, members[:2], members) is members[1]
    assert NearestFirst(Sticky()).choose(request, members[:2], members) is members[1]
    with pytest.raises(ValueError, match=r"overload=0\.5 must be at least 1"):
        NearestFirst(overload=0.5)
