"""Tests of FollowerPool and of elastic pools: real actors that are killed, and members that join and leave."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from support.ray_cluster import ENDLESS, RAY_GROUP, echo_engine
from support.waiting import PATIENCE, in_thread, wait_until
from torchrl_rloo.engines.base import EngineDeadError, EngineError, Request
from torchrl_rloo.engines.pool import EnginePool
from torchrl_rloo.engines.routers import LeastLoaded, NearestFirst, Sticky
from torchrl_rloo.engines.scripted import ScriptedEngine
from torchrl_rloo.engines.supervisor import Supervisor
from torchrl_rloo.ray.engine import RayEngine
from torchrl_rloo.ray.pool import FollowerPool

pytestmark = pytest.mark.xdist_group(RAY_GROUP)

REQUESTS = [Request([1, 2], limit=8, seed=seed) for seed in range(12)]
LONG = [Request([300, 2], limit=8, seed=seed) for seed in range(12)]


def states(pool: EnginePool | FollowerPool) -> list[str]:
    return [member.state for member in pool.members]


def pickled(pool: EnginePool) -> FollowerPool:
    from ray import cloudpickle

    return cloudpickle.loads(cloudpickle.dumps(pool))


@pytest.fixture(scope="module")
def engines(ray_cluster: str) -> Iterator[list[RayEngine]]:
    made = [RayEngine(echo_engine, name=f"echo {n}") for n in range(2)]
    yield made
    for engine in made:
        engine.close()


@pytest.fixture
def pool(engines: list[RayEngine]) -> Iterator[EnginePool]:
    """Pool of two live engines, whose supervisor calls them rarely."""
    for engine in engines:
        if engine._connection.death is not None:
            engine.restart()
    made = EnginePool(engines, supervisor=Supervisor(probe_every=30.0, backoff=0.01), patience=PATIENCE)
    wait_until(lambda: all(member.probe_at and member.job is None for member in made.members))  # the first calls
    yield made
    made.supervisor.stop()


def tokens(seeds) -> list[list[int]]:
    return [[seed, 1, 2] for seed in seeds]


def test_a_killed_engine_is_left_reported_restarted_and_used_again(pool: EnginePool, engines) -> None:
    follower = pickled(pool)
    futures = [follower.submit(request) for request in LONG]
    assert [len(member.inside) for member in follower.members] == [6, 6]
    pool.supervisor.stop()  # so that nothing but the report tells the driver
    os.kill(engines[0].pid, signal.SIGKILL)
    assert [f.result(PATIENCE).tokens for f in futures] == [[seed, 300, 2] for seed in range(12)]
    assert states(follower) == ["dead", "ready"] and follower.counts["pool/resubmitted"] == 6
    # Old news from the driver does not restore it
    (report,) = follower.reports()
    assert report["number"] == 0 and "the actor of echo 0 is dead" in report["error"]
    follower.follow(pool.member_states())
    assert states(follower) == ["dead", "ready"] and follower.reports() == [report]
    # The report does
    pool.note_reports([report])
    assert states(pool) == ["suspect", "ready"] and "another process reports" in pool.events[-1].cause
    pool.note_reports([report])
    assert pool.counts["pool/suspected"] == 1
    follower.follow(pool.member_states())
    assert states(follower) == ["suspect", "ready"] and follower.reports() == []
    follower.close()


def test_a_follower_uses_a_restarted_engine_once_the_driver_says_so(pool: EnginePool, engines) -> None:
    follower = pickled(pool)
    start_count = engines[1].start_count
    futures = [follower.submit(Request([ENDLESS], limit=8, seed=seed)) for seed in range(2)]
    os.kill(engines[1].pid, signal.SIGKILL)
    wait_until(lambda: follower.reports())
    pool.note_reports(follower.reports())
    wait_until(lambda: engines[1].start_count == start_count + 1 and states(pool) == ["ready", "ready"])
    follower.follow(pool.member_states())
    assert states(follower) == ["ready", "ready"] and follower.reports() == []
    assert [s.tokens for s in follower.generate(REQUESTS)] == tokens(range(12))
    assert follower.members[1].finished > 0
    for future in futures:
        assert future.cancel()
    follower.close()


def test_a_follower_leaves_what_the_driver_lost_and_waits_while_nothing_is_ready(pool: EnginePool) -> None:
    follower = pickled(pool)
    futures = [follower.submit(Request([ENDLESS], limit=8, seed=seed)) for seed in range(2)]
    given = pool.member_states()
    lost = [state | {"state": "dead", "changes": state["changes"] + 1} for state in given]
    follower.follow(lost)
    assert states(follower) == ["dead", "dead"] and follower.load().waiting == 2 and follower.reports() == []
    follower.follow(given)  # older
    assert states(follower) == ["dead", "dead"]
    assert not any(future.done() for future in futures)
    # It fails them if none of the members will come back
    follower.follow([state | {"changes": state["changes"] + 2, "exhausted": True} for state in lost])
    for future in futures:
        with pytest.raises(EngineDeadError, match="all members of this FollowerPool are dead for good"):
            future.result(PATIENCE)
    follower.close()
    impatient = FollowerPool(lost, LeastLoaded(), patience=0.2, max_attempts=3)
    with pytest.raises(EngineDeadError, match=r"no member was ready for patience=0\.2 s"):
        impatient.submit(REQUESTS[0]).result(PATIENCE)
    impatient.close()


def test_what_belongs_to_the_driver_is_refused(pool: EnginePool) -> None:
    follower = pickled(pool)
    for name in ("restart", "pause", "resume", "sleep", "wake"):
        with pytest.raises(EngineError, match=rf"{name}\(\) of a pool belongs to the driver"):
            getattr(follower, name)()
    with pytest.raises(EngineError, match=r"attach\(\) of a pool belongs to the driver"):
        follower.attach(lambda engine: None)
    with pytest.raises(EngineError, match="pickle the EnginePool of the driver"):
        pickled(follower)
    follower.close()
    with ScriptedEngine([]) as local, EnginePool([local]) as mixed:
        with pytest.raises(EngineError, match=r"member 0 \(ScriptedEngine\) cannot be used from other processes"):
            mixed.member_states()


def test_members_join_and_leave_followers_too(pool: EnginePool, ray_cluster) -> None:
    follower = pickled(pool)
    added = RayEngine(echo_engine, name="echo 2")
    assert pool.add(added) == 2 and states(pool) == ["ready"] * 3
    follower.follow(pool.member_states())
    futures = [follower.submit(request) for request in LONG[:3]]
    assert [len(member.inside) for member in follower.members] == [1, 1, 1]
    removal = in_thread(pool.remove, 2)
    wait_until(lambda: states(pool)[2] == "draining")
    follower.follow(pool.member_states())
    assert states(follower) == ["ready", "ready", "draining"]
    futures += [follower.submit(request) for request in LONG[3:6]]
    assert len(follower.members[2].inside) == 1
    assert [f.result(PATIENCE).tokens for f in futures] == [[seed, 300, 2] for seed in range(6)]
    removal.result(PATIENCE)
    assert added.closed and len(pool.members) == 2 and follower.counts["pool/resubmitted"] == 0
    follower.follow(pool.member_states())
    assert len(follower.members) == 2
    follower.close()


# Routers


def test_the_nearest_router_prefers_its_node_until_it_is_overloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchrl_rloo.engines import routers
    from torchrl_rloo.engines.member import Member

    members = [Member(ScriptedEngine([]), number) for number in range(4)]
    for member, node in zip(members, ("a", "b", "b", None), strict=True):
        member.target.node_id = node
    monkeypatch.setattr(routers, "_own_node", lambda: "b")
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
