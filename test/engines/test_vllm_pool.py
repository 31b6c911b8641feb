"""Tests of vLLM engines that hang: deadlines, health calls, and an EnginePool that replaces a stopped engine core."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

import pytest
from transformers import PreTrainedModel

from support.engines import CONTEXT, GROUP, SETTINGS
from support.processes import is_gone
from torchrl_rloo.engines.base import EngineDeadError, EngineTimeoutError, Request
from torchrl_rloo.engines.pool import EnginePool
from torchrl_rloo.engines.supervisor import Supervisor
from torchrl_rloo.engines.vllm_api import complete_arguments, sample_from_reply
from torchrl_rloo.engines.vllm_async import AsyncVLLMEngine
from torchrl_rloo.engines.vllm_server import server_command
from torchrl_rloo.weight_update import WeightPublisher

pytestmark = pytest.mark.xdist_group(GROUP)

LONG = [Request([5 + seed, 7], 600, seed) for seed in range(8)]  # seconds
EXACT = 1e-4  # float32, of 600 tokens
PATIENT = 120.0


@contextmanager
def stopped(engine: AsyncVLLMEngine) -> Iterator[None]:
    """Stop the engine's process within the context."""
    pid = engine._core._processes[0].pid
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_hung_engine_fails_requests_at_their_deadlines_and_its_health_call(
    async_engine: AsyncVLLMEngine, wait_until, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(async_engine, "request_timeout", 0.5)
    with stopped(async_engine):
        future = async_engine.submit(LONG[0])
        with pytest.raises(EngineDeadError, match="hangs: weight_report took longer than timeout=0.2 s") as caught:
            async_engine.check_health(timeout=0.2)
        assert isinstance(caught.value.__cause__, EngineTimeoutError)
        with pytest.raises(EngineTimeoutError, match=r"request_timeout=0\.5 s of sampling"):
            future.result(PATIENT)
        with pytest.raises(EngineTimeoutError, match="pause"):
            async_engine.pause("continue", timeout=0.2)
    async_engine.check_health(timeout=PATIENT)
    wait_until(lambda: not async_engine.paused)  # the late pause is undone
    # Time in a pause does not count
    monkeypatch.setattr(async_engine, "request_timeout", 2.0)  # a busy machine needs a second for four tokens
    async_engine.pause("continue")
    future = async_engine.submit(Request([5], 4, 0))
    with pytest.raises(TimeoutError):
        future.result(2.3)
    monkeypatch.setattr(async_engine, "request_timeout", PATIENT)
    async_engine.resume()
    assert len(future.result(PATIENT).tokens) == 4


def test_the_load_is_that_of_the_last_step(async_engine: AsyncVLLMEngine, wait_until):
    before = async_engine.load().tokens
    futures = [async_engine.submit(request) for request in LONG]
    wait_until(lambda: async_engine.load().running == len(LONG) and async_engine.load().tokens > before + 100)
    assert 0 < async_engine.load().kv_usage < 1
    for future in futures:
        future.result(PATIENT)
    wait_until(lambda: async_engine.load().running == 0)
    assert async_engine.load().tokens == before + 600 * len(LONG) and async_engine.load().waiting == 0


@pytest.mark.slow
def test_a_pool_replaces_a_stopped_core(
    async_engine: AsyncVLLMEngine, engine_checkpoint: Path, models: list[PreTrainedModel], wait_until, deviation
):
    with AsyncVLLMEngine(engine_checkpoint, max_model_len=CONTEXT, **SETTINGS) as other:
        pool = EnginePool([async_engine, other], supervisor=Supervisor(probe_every=0.2, probe_timeout=2.0))
        publisher = WeightPublisher(models[1], pool)
        try:
            futures = [pool.submit(request) for request in LONG]
            assert publisher.push_weights() == 1
            wait_until(lambda: other.load().tokens > 0)
            pid, began = other._core._processes[0].pid, monotonic()
            os.kill(pid, signal.SIGSTOP)
            samples = [future.result(PATIENT) for future in futures]
            assert deviation(models[1], LONG, samples) < EXACT
            assert all(sample.versions == [1] * 600 for sample in samples)
            wait_until(lambda: is_gone(pid))
            assert monotonic() - began < 60.0
            wait_until(lambda: pool.members[1].state == "ready" and other.start_count == 1, PATIENT)
            changes = [event.to_state for event in pool.events if event.member == 1][1:]
            assert changes == ["ready", "suspect", "dead", "starting", "empty", "ready"]
            (sample,) = other.generate(LONG[:1])
            assert sample.versions == [1] * 600 and deviation(models[1], LONG[:1], [sample]) < EXACT
        finally:
            pool.supervisor.stop()
            publisher.close()


@pytest.mark.parametrize("arguments", [{"data_parallel_size": 2}, {"data_parallel_rpc_port": 1}])
def test_data_parallel_replicas_are_refused_with_the_remedy(arguments: dict):
    (name,) = arguments
    for call in (complete_arguments, lambda a: server_command("model", **a)):
        with pytest.raises(ValueError, match=f"{name}=.*one engine per replica and put them in an EnginePool"):
            call(arguments)
    assert complete_arguments({"data_parallel_size": 1})["data_parallel_size"] == 1


@pytest.mark.parametrize(("name", "is_death"), [("default", True), ("mine", False)])
def test_a_name_by_another_client_is_no_death(name: str, is_death: bool):
    choice = {
        "token_ids": [1],
        "logprobs": {"content": [{"logprob": -1.0}]},
        "finish_reason": "stop",
        "weight_versions": [{"version": name, "start": 0, "end": 1}],
    }
    with pytest.raises(Exception, match="was restarted" if is_death else "another client named .*'mine'") as caught:
        sample_from_reply(LONG[0], {"choices": [choice]})
    assert isinstance(caught.value, EngineDeadError) == is_death
