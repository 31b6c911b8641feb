"""Tests of RayEngine: a real local cluster, actors that are killed and stopped, and clients in other processes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from functools import partial

import pytest

from support.processes import wait_until_gone
from support.ray_cluster import ENDLESS, RAY_GROUP, REFUSED, echo_engine
from support.waiting import PATIENCE, wait_until
from torchrl_rloo.engines import EnginePool, Supervisor
from torchrl_rloo.engines.base import EngineDeadError, EngineError, EngineTimeoutError, Request, Sample
from torchrl_rloo.engines.vllm_async import AsyncVLLMEngine
from torchrl_rloo.ray import engine_actor
from torchrl_rloo.ray.engine import RayEngine
from torchrl_rloo.ray.engine_actor import AnswerBatch, EngineActor, RequestBatch
from torchrl_rloo.ray.engine_client import RayEngineClient

pytestmark = pytest.mark.xdist_group(RAY_GROUP)

REQUESTS = [Request([seed % 7, 2**31 - 1], limit=1 + seed % 3, seed=seed) for seed in range(40)]


@pytest.fixture(scope="module")
def shared_engine(ray_cluster: str) -> Iterator[RayEngine]:
    with RayEngine(echo_engine, name="echo") as made:
        yield made


@pytest.fixture
def engine(shared_engine: RayEngine) -> RayEngine:
    """Engine of :func:`support.ray_cluster.echo` in an actor that lives, whatever an earlier test did."""
    if shared_engine._connection.death is not None:
        shared_engine.restart()
    return shared_engine


def update(engine: RayEngine, version: int) -> None:
    engine.update_weights("adapter", {"version": version, "path": "", "checksum": ""}, timeout=PATIENCE)


def outcome(future) -> object:
    error = future.exception(PATIENCE)
    return future.result() if error is None else (type(error), str(error))


# Requests


def test_answers_are_those_of_the_same_engine_in_this_process(engine: RayEngine) -> None:
    requests = [*REQUESTS, Request([REFUSED], limit=4, seed=0)]
    with echo_engine() as local:
        expected = [outcome(local.submit(request)) for request in requests]
    assert [outcome(future) for future in [engine.submit(request) for request in requests]] == expected


def test_versions_of_tokens_are_those_that_sampled_them(engine: RayEngine) -> None:
    version, tokens = engine.version, engine.load().tokens
    future = engine.submit(Request([400, 1, 1], limit=4, seed=0))
    wait_until(lambda: engine.check_health() is None and engine.load().tokens > tokens)  # a call returns the state
    update(engine, version + 1)
    assert engine.version == version + 1
    versions = future.result(PATIENCE).versions
    assert versions[0] == version and versions == sorted(versions) and versions[-1] == version + 1


def test_a_cancelled_request_ends_inside_the_actor(engine: RayEngine) -> None:
    futures = [engine.submit(Request([ENDLESS], limit=4, seed=seed)) for seed in range(3)]
    wait_until(lambda: engine.load().running == 3)
    assert futures[0].cancel() and futures[2].cancel()
    wait_until(lambda: engine.load().running == 1)
    assert futures[1].cancel()
    wait_until(lambda: engine.load().running == 0)


def test_a_deadline_counts_time_outside_pauses(engine: RayEngine) -> None:
    client = RayEngineClient(engine.current_handle()._replace(request_timeout=0.6))
    engine.pause("continue")
    future = client.submit(Request([ENDLESS], limit=4, seed=0))
    with pytest.raises(TimeoutError):
        future.result(1.2)
    engine.resume()
    with pytest.raises(EngineTimeoutError, match=r"echo did not finish a request in request_timeout=0\.6 s"):
        future.result(PATIENCE)
    wait_until(lambda: engine.load().running == 0)  # it is cancelled in the actor
    client.close()
    with pytest.raises(EngineError, match="this RayEngineClient is closed"):
        client.submit(REQUESTS[0]).result(PATIENCE)


def test_a_request_that_cannot_be_sent_fails_alone(engine: RayEngine) -> None:
    futures = [engine.submit(Request([0, 2**40], limit=4, seed=0)), engine.submit(REQUESTS[1])]
    with pytest.raises(EngineError, match="echo cannot send the prompt: OverflowError"):
        futures[0].result(PATIENCE)
    assert futures[1].result(PATIENCE).tokens[0] == 1


def test_an_answer_that_cannot_be_sent_changes_no_other() -> None:
    """Wrong numbers arrive as they are, for the check of the policy."""
    good, short = Sample([5, 6], [-0.5, -0.25], "stop", [0, 1]), Sample([5, 6], [-0.75], "length", [])
    wrong = [None, good._replace(tokens=[0.5]), good._replace(log_probs=[None]), good._replace(tokens=[2**40])]
    sent = list(enumerate([good, *wrong, short, good]))
    arrived = AnswerBatch.of(sent).answers()
    assert [arrived[0], *arrived[5:]] == [sent[0], *sent[5:]]
    for (number, error), answer in zip(arrived[1:5], wrong, strict=True):
        assert isinstance(error, EngineError) and repr(answer) in str(error) and sent[number][1] is answer


# Life


def test_pauses_and_sleep_are_known_at_once(engine: RayEngine) -> None:
    engine.pause("abort")
    assert engine.paused
    engine.sleep()
    assert engine.asleep
    with pytest.raises(EngineError, match="asleep; call wake"):
        engine.update_weights("connect", {}, timeout=PATIENCE)
    engine.wake()
    future = engine.submit(REQUESTS[0])
    assert not future.done()
    engine.resume()
    assert not engine.paused and not engine.asleep and future.result(PATIENCE).tokens[0] == 0
    engine.check_health()


@pytest.mark.parametrize("stopped", [False, True], ids=["killed", "stopped"])
def test_a_dead_or_hung_actor_is_found_and_replaced(engine: RayEngine, stopped: bool) -> None:
    start_count, pid = engine.start_count, engine.pid
    update(engine, engine.version + 1)
    future = engine.submit(Request([ENDLESS], limit=4, seed=0))
    os.kill(pid, signal.SIGSTOP if stopped else signal.SIGKILL)
    if stopped:
        with pytest.raises(EngineDeadError, match="echo hangs: .*no answer within timeout=0.5 s") as caught:
            engine.check_health(0.5)
        assert isinstance(caught.value.__cause__, EngineTimeoutError) and not future.done()
    else:
        with pytest.raises(EngineDeadError, match=r"the actor of echo is dead: .*call restart\(\)"):
            future.result(PATIENCE)
        for call in (engine.check_health, engine.load, engine.resume, engine.submit(REQUESTS[0]).result):
            with pytest.raises(EngineDeadError, match="the actor of echo is dead"):
                call()
    engine.restart()
    wait_until_gone(pid)
    assert isinstance(future.exception(PATIENCE), EngineDeadError)
    assert (engine.start_count, engine.version) == (start_count + 1, 0)
    assert engine.generate([REQUESTS[3]])[0].tokens[0] == 3


def test_a_pause_outlives_a_restart(engine: RayEngine) -> None:
    engine.pause("abort")
    engine.restart()
    assert engine.paused
    future = engine.submit(REQUESTS[0])
    engine.resume()
    assert future.result(PATIENCE).tokens[0] == 0


def test_an_engine_that_does_not_start_says_why(ray_cluster: str) -> None:
    with pytest.raises(EngineError, match="TypeError: .*unexpected keyword argument 'script_name'"):
        RayEngine(partial(echo_engine, script_name=1))
    with pytest.raises(EngineTimeoutError, match=r"start_timeout=1 s; it needs CPU=1, tpu=1, and the cluster has CPU="):
        RayEngine(echo_engine, resources={"tpu": 1}, start_timeout=1.0)


@pytest.mark.parametrize(
    ("options", "arguments", "message"),
    [
        ({}, {"data_parallel_size": 2}, "data_parallel_size=2 must be 1; make one RayEngine per replica"),
        ({"num_gpus": 1}, {"tensor_parallel_size": 2}, "num_gpus=1 must be 2"),
        ({"num_gpus": 1}, {"devices": "0"}, "devices='0' must be None"),
        ({"num_cpus": -1}, {}, "num_cpus=-1 must be at least 0"),
        ({"start_timeout": 0}, {}, "start_timeout=0 must be above 0"),
    ],
)
def test_settings_without_effect_are_refused_before_anything_starts(
    options: dict, arguments: dict, message: str
) -> None:
    pytest.importorskip("ray")
    with pytest.raises(ValueError, match=message):
        RayEngine(partial(AsyncVLLMEngine, "model", **arguments), **options)


# Clients


class Worker:
    """Process with a client of an engine."""

    def __init__(self, engine: RayEngineClient):
        self.engine = engine

    def sample(self) -> list:
        return self.engine.generate(REQUESTS)

    def begin(self) -> None:
        self.future = self.engine.submit(Request([ENDLESS], limit=4, seed=0))

    def cancel(self) -> bool:
        return self.future.cancel()

    def refusals(self) -> list[str]:
        found = []
        for name in ("restart", "pause", "resume", "sleep", "wake"):
            try:
                getattr(self.engine, name)()
            except EngineError as error:
                found.append(str(error))
        return found


def test_a_pickled_engine_is_a_client_of_the_same_actor(engine: RayEngine) -> None:
    import ray
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(__import__(__name__, fromlist=["_"]))
    assert engine.node_id == ray.get_runtime_context().get_node_id() and engine.is_near
    worker = ray.remote(Worker).remote(engine)
    assert ray.get(worker.sample.remote()) == engine.generate(REQUESTS)
    ray.get(worker.begin.remote())
    wait_until(lambda: engine.load().running == 1)
    assert ray.get(worker.cancel.remote())
    wait_until(lambda: engine.load().running == 0)
    names = ("restart", "pause", "resume", "sleep", "wake")
    assert ray.get(worker.refusals.remote()) == [f"{n}() of echo belongs to the driver; call it there" for n in names]
    ray.kill(worker)


def test_requests_of_a_client_that_vanished_are_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_actor, "_CLIENT_TIMEOUT_S", 0.05)
    monkeypatch.setattr(engine_actor, "BEAT_S", 0.01)

    async def scenario(engine) -> None:
        actor = EngineActor("echo")
        actor._engine = engine
        for name in ("gone", "here"):
            await actor.sample_many(
                name, RequestBatch.of([RequestBatch.entry(0, Request([ENDLESS], limit=4, seed=0))]), []
            )
        streams = [actor.answers(name, stays=False) for name in ("gone", "here")]
        for stream in streams:
            await anext(stream)
        await streams[0].aclose()
        # Neither this client nor one whose process ended before its first stream keeps the engine busy
        await actor.sample_many(
            "brief", RequestBatch.of([RequestBatch.entry(0, Request([ENDLESS], limit=4, seed=0))]), []
        )
        while engine.load().running > 1:
            await asyncio.sleep(0.01)
        assert list(actor._clients) == ["here"]
        await streams[1].aclose()

    with echo_engine() as engine:
        asyncio.run(asyncio.wait_for(scenario(engine), PATIENCE))


def test_requests_of_a_client_that_vanished_end_within_a_minute() -> None:
    limits = (engine_actor.STREAM_S, engine_actor._CLIENT_TIMEOUT_S, engine_actor.BEAT_S)
    assert sum(limits) < 60


def test_processes_share_a_pool_and_report_a_killed_member(ray_cluster: str) -> None:
    from ray import cloudpickle

    engines = [RayEngine(echo_engine, name=f"echo {n}") for n in range(2)]
    with EnginePool(engines, supervisor=Supervisor(probe_every=30.0, backoff=0.01), patience=PATIENCE) as pool:
        follower = cloudpickle.loads(cloudpickle.dumps(pool))
        requests = [Request([300, 2], limit=8, seed=seed) for seed in range(12)]
        futures = [follower.submit(request) for request in requests]
        os.kill(engines[0].pid, signal.SIGKILL)
        assert [f.result(PATIENCE).tokens for f in futures] == [[seed, 300, 2] for seed in range(12)]
        pool.note_reports(follower.reports())
        wait_until(lambda: engines[0].start_count == 1 and all(member.state == "ready" for member in pool.members))
        follower.follow(pool.member_states())
        assert {member.state for member in follower.members} == {"ready"} and len(follower.generate(requests)) == 12
        follower.close()
