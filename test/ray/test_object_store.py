"""Weights over Ray's object store, to real engines in actors that are killed and refilled."""

from __future__ import annotations

import copy
import os
import signal
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from support.processes import descendants, wait_until_gone
from support.ray_cluster import RAY_GROUP, RecordingEngine, transformers_engine
from support.waiting import PATIENCE, wait_until
from torchrl_rloo.embedded import build_model
from torchrl_rloo.engines import AsyncVLLMEngine, EnginePool, Request, Supervisor, TransformersEngine
from torchrl_rloo.ray import ObjectStore, RayEngine
from torchrl_rloo.ray.engine_client import RayEngineClient
from torchrl_rloo.ray.object_store import ObjectStoreReceiver, ObjectStoreRelay
from torchrl_rloo.weight_update import Direct, WeightPublisher, WeightSyncError
from torchrl_rloo.weight_update.protocol import TensorInfo, packed_size, xxh3

pytestmark = pytest.mark.xdist_group(RAY_GROUP)

CPU = torch.device("cpu")
BUCKET = 40_000  # bytes, for several buckets


def references() -> set[str]:
    """Return the objects that this process refers to."""
    import ray

    return set(ray._private.worker.global_worker.core_worker.get_all_reference_counts())


def make_buckets() -> list[list[torch.Tensor]]:
    table = torch.randn(30, 4)
    return [
        [table, table[2:5], table.T, torch.tensor(3.5), torch.empty(0, 2)],
        [torch.randn(7).bfloat16(), torch.tensor([True, False]), torch.tensor(7, dtype=torch.int8)],
    ]


def infos_of(tensors: list[torch.Tensor]) -> list[TensorInfo]:
    return [TensorInfo.of(f"t{i}", tensor) for i, tensor in enumerate(tensors)]


@pytest.mark.parametrize("elsewhere", [False, True])
def test_buckets_stay_while_their_storage_lives(ray_cluster: str, elsewhere: bool) -> None:
    import ray

    transport, buckets, before = ObjectStore(), make_buckets(), references()
    storage = transport.store(1, [packed_size(infos_of(tensors)) for tensors in buckets], keep=True)
    for number, tensors in enumerate(buckets):
        storage.put(number, infos_of(tensors), tensors)
    expected = [xxh3(tensors) for tensors in buckets]
    for tensors in buckets:
        tensors[0].zero_()  # training continues
    receiver = ObjectStoreReceiver({}, CPU, 0)
    node = "another node" if elsewhere else ray.get_runtime_context().get_node_id()
    for number, tensors in [*enumerate(buckets)] * 2:  # two engines
        payload = transport.connect(1, PATIENCE, node).send(storage.get(number))
        received = receiver.receive(infos_of(tensors), payload)
        assert infos_of(received) == infos_of(tensors) and xxh3(received) == expected[number]
    # Once for all engines elsewhere, and not at all without one
    assert len(references() - before) == len(buckets) * elsewhere
    del received, payload
    transport.release(storage, reusable=True)
    wait_until(lambda: references() <= before)
    assert transport.store(2, storage.sizes, keep=True) is storage
    transport.close()
    assert not Path(storage.path).exists()


class Relayed(TransformersEngine):
    """Engine behind a relay, as in an actor, that counts as one with its own processes."""

    in_process, reads_object_store = False, True

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.relay, self.paths = ObjectStoreRelay(), []

    def update_weights(self, step, info=None, *, timeout):
        if step == "bucket" and "path" in info["payload"]:  # from the relay
            self.paths.append(info["payload"]["path"])
            return super().update_weights(step, info, timeout=timeout)
        if step == "connect" and info["transport"] != ObjectStore.name:
            return super().update_weights(step, info, timeout=timeout)
        if step in ("connect", "bucket"):
            return self.relay.update_weights(self, step, info, timeout=timeout)
        inner = SimpleNamespace(in_process=False, update_weights=super().update_weights)
        return self.relay.update_weights(inner, step, info or {}, timeout=timeout)


def test_an_engine_with_its_own_processes_gets_all_versions_in_one_file(ray_cluster, tokenizer, change) -> None:
    engine = Relayed(build_model(tokenizer, seed=0).eval())
    model = build_model(tokenizer, seed=1)
    publisher = WeightPublisher(model, engine, bucket_bytes=BUCKET)
    assert isinstance(publisher.transport, ObjectStore)
    for version in (1, 2):
        change(model, version)
        assert publisher.push_weights() == version and publisher.last_push.buckets > 2
        assert all(torch.equal(found, model.state_dict()[k]) for k, found in engine.model.state_dict().items())
    (path,) = set(engine.paths)
    assert Path(path).exists()
    engine.relay.close()
    assert not Path(path).exists()
    publisher.close()


class Reader:
    """Actor with an event loop, in which Ray warns of a call that blocks."""

    async def read(self, references: list, infos: list[TensorInfo]) -> tuple[float, bool]:
        import asyncio

        from ray._private import worker

        (tensor,) = await asyncio.to_thread(
            ObjectStoreReceiver({}, CPU, 0).receive, infos, {"reference": references[0]}
        )
        return tensor.sum().item(), worker.blocking_get_inside_async_warned


def test_an_actor_reads_buckets_without_a_blocking_call(ray_cluster: str) -> None:
    import ray

    tensors = [torch.ones(5)]
    storage = ObjectStore().store(1, [packed_size(infos_of(tensors))], keep=True)
    storage.put(0, infos_of(tensors), tensors)
    cloudpickle = ray.cloudpickle
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        reader = ray.remote(Reader).options(num_cpus=0).remote()
        assert ray.get(reader.read.remote([storage.remote_payload(0)["reference"]], infos_of(tensors))) == (5.0, False)
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def test_only_engines_in_actors_can_read_it(tokenizer) -> None:
    pytest.importorskip("ray")
    engine, model = transformers_engine(), build_model(tokenizer, seed=1)
    with pytest.raises(
        ValueError, match=r"transport=ObjectStore\(\) requires engines that are a RayEngine on one node"
    ):
        WeightPublisher(model, engine, transport=ObjectStore())
    assert isinstance(WeightPublisher(model, engine).transport, Direct)


@pytest.fixture
def make_pool(ray_cluster: str) -> Iterator:
    """``make_pool(*engines)`` returns a pool that probes its members often."""
    pools = []

    def make(*engines: RayEngine) -> EnginePool:
        supervisor = Supervisor(probe_every=0.2, probe_timeout=PATIENCE, backoff=0.01)
        pools.append(EnginePool(engines, supervisor=supervisor, patience=PATIENCE))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


@pytest.fixture(scope="module")
def recorder(ray_cluster: str) -> Iterator[RayEngine]:
    with RayEngine(RecordingEngine, name="recorder") as engine:
        yield engine


def test_killed_actors_are_refilled_and_new_ones_filled_before_they_sample(
    make_pool, tokenizer, change, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RayEngineClient, "node_id", property(lambda self: "another node", lambda self, node: None))
    requests = [Request([5 + seed, 7], 6, seed) for seed in range(4)]
    model = build_model(tokenizer, seed=1).eval()
    engine = RayEngine(transformers_engine, name="first")
    pool = make_pool(engine)
    publisher = WeightPublisher(model, pool, bucket_bytes=BUCKET)
    assert isinstance(publisher.transport, ObjectStore)
    assert publisher.push_weights() == 1
    with TransformersEngine(model) as local:
        expected = [sample.tokens for sample in local.generate(requests)]
        samples = pool.generate(requests)
        assert [s.tokens for s in samples] == expected and {v for s in samples for v in s.versions} == {1}
        # Killed: the pool restarts it and fills it from the snapshot, not from the model that is trained
        change(model, 0)
        os.kill(engine.pid, signal.SIGKILL)
        samples = pool.generate(requests)
        assert engine.start_count == 1
        assert [s.tokens for s in samples] == expected and {v for s in samples for v in s.versions} == {1}
        # Added: it is filled before it samples
        added = RayEngine(transformers_engine, name="second")
        number = pool.add(added)
        wait_until(lambda: pool.members[1].state == "ready")
        assert [event.to_state for event in pool.events if event.member == number] == ["starting", "empty", "ready"]
        (sample,) = added.generate(requests[:1])
        assert sample.tokens == expected[0] and set(sample.versions) == {1}
        # Removed: the next push is of one engine
        pool.remove(0)
        assert publisher.push_weights() == 2 and engine.closed and len(publisher.last_push.still_seconds) == 1
        samples = pool.generate(requests)
        assert {v for s in samples for v in s.versions} == {2}
        assert [s.tokens for s in samples] == [sample.tokens for sample in local.generate(requests)]
        assert [peer.engine for peer in publisher._peers.values()] == [added]
    publisher.close()


def test_messages_of_any_transport_arrive_in_the_actor_as_they_were_sent(recorder: RayEngine) -> None:
    options = {"rank_offset": 1, "world_size": 2, "nccl_unique_id_b64": "AQ==", "packed": True}
    payload = {"gpu": "GPU-0", "export": [None, [4], [1], 0, None, None, 0, {"bytes": "00"}, 4, 0, False]}
    manifest = [["weight", "bfloat16", [2]]]
    messages = [
        ("connect", {"transport": "vllm_nccl", "options": options, "manifest": manifest, "staged": False}),
        ("start", {"version": 1, "verify": False}),
        ("bucket", {"version": 1, "bucket": 0, "first": 0, "last": 1, "checksum": None, "payload": payload}),
        ("finish", {"version": 1}),
    ]
    for step, info in messages:
        recorder.update_weights(step, info, timeout=PATIENCE)
    (report,) = recorder.update_weights("abort", timeout=PATIENCE)
    assert report["messages"][: len(messages)] == messages
    assert recorder.version == 1


def test_a_push_to_a_stopped_actor_fails_in_time(recorder: RayEngine, tokenizer) -> None:
    publisher = WeightPublisher(build_model(tokenizer, seed=1), recorder, timeout=1.0)
    os.kill(recorder.pid, signal.SIGSTOP)
    try:
        with pytest.raises(WeightSyncError, match="no answer within timeout=1 s"):
            publisher.push_weights()
    finally:
        os.kill(recorder.pid, signal.SIGCONT)


@pytest.mark.slow
def test_vllm_in_an_actor_samples_updates_and_is_replaced_with_its_processes(
    vllm, make_pool, engine_checkpoint: Path, models, log_prob_error
) -> None:
    make_engine = partial(AsyncVLLMEngine, engine_checkpoint, dtype="float32", max_model_len=256)
    engine = RayEngine(make_engine, name="vllm")
    pool = make_pool(engine)
    model = copy.deepcopy(models[1])
    publisher = WeightPublisher(model, pool, in_flight="continue")
    assert isinstance(publisher.transport, ObjectStore)
    assert publisher.push_weights() == 1 and log_prob_error(engine, models[1]) < 1e-4
    # A push in the middle of a turn: every token has the version that sampled it
    future = pool.submit(Request([5, 7], 240, 0))
    wait_until(lambda: engine.check_health() is None and engine.load().running)
    model.load_state_dict(models[2].state_dict())
    assert publisher.push_weights() == 2
    versions = future.result(PATIENCE).versions
    assert versions == sorted(versions) and set(versions) <= {1, 2} and len(versions) == 240
    assert log_prob_error(engine, models[2]) < 1e-4
    # A killed actor takes its processes with it, and the new one is filled
    processes = [engine.pid, *descendants(engine.pid)]
    assert len(processes) > 1
    future = pool.submit(Request([5, 7], 240, 0))
    os.kill(engine.pid, signal.SIGKILL)
    assert set(future.result(PATIENCE).versions) == {2}
    wait_until_gone(processes)
    assert engine.start_count == 1 and log_prob_error(engine, models[2]) < 1e-4
    publisher.close()
