"""Tests of AsyncVLLMEngine: real vLLM in a child process, which is updated while it samples, and killed."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import textwrap
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from itertools import groupby
from pathlib import Path

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from support.engines import GROUP, check_scores, check_turn_settings
from support.faults import Flipped, Interfering
from support.fork_server import ForkServer
from support.processes import is_gone, wait_until_gone
from support.turn_settings import TURN_SETTINGS
from support.weights import push
from torchrl_rloo.engines.base import EngineDeadError, EngineError, EngineTimeoutError, Request, Sample
from torchrl_rloo.engines.vllm_async import AsyncVLLMEngine
from torchrl_rloo.functional.sampling import SamplingDistribution
from torchrl_rloo.weight_update import LoRAPublisher, SharedMemory, WeightPublisher, WeightSyncError

pytestmark = pytest.mark.xdist_group(GROUP)

PROMPTS = [[5], [7, 8, 9], [40 + i % 200 for i in range(70)], [5, 6]]
REQUESTS = [Request(p, 12, seed) for seed, p in enumerate(PROMPTS)]
LONG = [Request(p, 600, seed) for seed, p in enumerate(PROMPTS)]  # seconds
ENDLESS = [Request([seed + 1], 16_000, seed) for seed in range(32)]  # a minute of tokens; no test waits for the end
EXACT = 1e-5  # float32; other weights differ by more than 0.3
STALE = 0.1
SETTINGS = {"dtype": "float32", "max_model_len": 16_384}
BUCKET = 100_000  # bytes; the model needs several buckets
PATIENT = 60.0  # seconds, longer than any step


@pytest.fixture
def engine(async_engine: AsyncVLLMEngine) -> AsyncVLLMEngine:
    return async_engine


def sampled(engine: AsyncVLLMEngine) -> int:
    """Return the number of requests in flight that have tokens of the current weights."""
    starts = [r.weight_version_starts for r in list(engine._core.llm.output_processor.request_states.values())]
    return sum(bool(spans) and spans[-1][0] == str(engine.version) for spans in starts)


@pytest.fixture
def running(engine: AsyncVLLMEngine, wait_until) -> Callable[[list[Request]], list[Future[Sample]]]:
    """``running(requests)`` returns futures in flight, each with at least one token."""

    def start(requests: list[Request]) -> list[Future[Sample]]:
        futures = [engine.submit(request) for request in requests]
        wait_until(lambda: sampled(engine) == len(requests))
        assert not any(future.done() for future in futures)
        return futures

    return start


def spans(sample: Sample) -> list[tuple[int, int]]:
    """Return the versions and their numbers of tokens."""
    return [(version, len(list(tokens))) for version, tokens in groupby(sample.versions)]


def child(engine: AsyncVLLMEngine) -> multiprocessing.Process:
    (process,) = engine._core._processes
    return process


def fail_half_way(engine: AsyncVLLMEngine, model: PreTrainedModel, version: int, in_flight: str = "finish") -> None:
    """Push streamed weights that are corrupt after the first bucket, which is loaded by then."""
    updater = WeightPublisher(
        model, engine, transport=Flipped(), staged=False, bucket_bytes=BUCKET, in_flight=in_flight, timeout=PATIENT
    )
    with pytest.raises(WeightSyncError, match=f"corrupt.*parts of version {version}"):
        push(updater, version)
    assert engine.failed_version == version


def test_samples_are_of_the_model_whatever_else_runs(engine: AsyncVLLMEngine, models: list[PreTrainedModel], deviation):
    samples = engine.generate(REQUESTS)
    assert deviation(models[0], REQUESTS, samples) < EXACT
    assert deviation(models[1], REQUESTS, samples) > STALE
    assert all(len(s.tokens) == 12 and s.finish == "length" and s.versions == [0] * 12 for s in samples)
    futures = [engine.submit(r) for r in REQUESTS[::-1] + [Request([9], 30, s) for s in range(60)]]
    assert [f.result(PATIENT).tokens for f in futures[3::-1]] == [s.tokens for s in samples]
    assert engine.world_size == 1 and engine.stop_ids == (models[0].config.eos_token_id,)
    engine.check_health()


@pytest.mark.parametrize(
    "request_, words",
    [
        (Request([1] * 20_000, 4, 0), "20000"),
        (Request([999_999], 4, 0), "999999"),
        (Request([1], 0, 0), "max_tokens"),
        (Request([1], 4, 0, SamplingDistribution(min_p=0.1, top_p=0.9)), "min_p=0.1 before top_p=0.9"),
    ],
    ids=["too long", "no token", "no limit", "min-p with top-p"],
)
def test_a_refused_request_affects_no_other(engine: AsyncVLLMEngine, request_: Request, words: str):
    other = engine.submit(REQUESTS[0])
    with pytest.raises(EngineError, match=words):
        engine.submit(request_).result(PATIENT)
    assert len(other.result(PATIENT).tokens) == 12


def test_rows_are_scored_as_by_the_model(engine: AsyncVLLMEngine, models: list[PreTrainedModel]):
    check_scores(engine, models[0])


def test_settings_of_turns_are_those_of_the_scorer(
    engine: AsyncVLLMEngine, models: list[PreTrainedModel], tokenizer: PreTrainedTokenizerFast
):
    check_turn_settings(engine, models[0], tokenizer, TURN_SETTINGS["all"])


def test_abort_returns_what_there_is(engine: AsyncVLLMEngine, models: list[PreTrainedModel], running, deviation):
    futures = running(ENDLESS[:4])
    engine.pause("abort")
    samples = [future.result(PATIENT) for future in futures]
    assert all(s.finish == "abort" and 0 < len(s.tokens) < 16_000 for s in samples)
    waiting = [engine.submit(request) for request in REQUESTS]
    push(WeightPublisher(models[1], engine), 1)  # the engine resumes
    after = [future.result(PATIENT) for future in waiting]
    assert deviation(models[0], ENDLESS[:4], samples) < 10 * EXACT
    assert all(spans(s) == [(0, len(s.tokens))] for s in samples)
    assert deviation(models[1], REQUESTS, after) < EXACT and all(s.versions == [1] * 12 for s in after)


def test_finish_ends_running_requests_first(engine: AsyncVLLMEngine, models: list[PreTrainedModel], running):
    futures = running(LONG)
    push(WeightPublisher(models[1], engine, in_flight="finish"), 1)
    assert all(future.done() and future.result().versions == [0] * 600 for future in futures)


def test_a_pause_that_takes_too_long_is_undone(engine: AsyncVLLMEngine, running):
    futures = running(LONG)
    with pytest.raises(EngineTimeoutError, match=r"pause\('finish'\) took longer than timeout=0.05 s"):
        engine.pause("finish", timeout=0.05)
    assert len(engine.submit(REQUESTS[0]).result(PATIENT).tokens) == 12
    assert [len(f.result(PATIENT).tokens) for f in futures] == [600] * 4


def test_frozen_requests_continue_with_the_new_weights(
    engine: AsyncVLLMEngine, models: list[PreTrainedModel], running, wait_until, deviation
):
    futures = running(LONG)
    engine.pause("continue")  # queued at once, since a push may begin late on a busy machine
    push(WeightPublisher(models[1], engine, in_flight="continue"), 1)
    wait_until(lambda: sampled(engine) == len(LONG))
    engine.pause("continue")
    push(WeightPublisher(models[2], engine, in_flight="continue"), 2)
    samples = [future.result(PATIENT) for future in futures]
    for request, sample in zip(LONG, samples, strict=True):
        (_, first), (_, second), (_, third) = spans(sample)
        assert [version for version, _ in spans(sample)] == [0, 1, 2] and first + second + third == 600
        parts = slice(0, first), slice(first, first + second), slice(first + second, None)
        for model, part in zip(models, parts, strict=True):
            assert deviation(model, [request], [sample], part) < 10 * EXACT
        assert deviation(models[0], [request], [sample], parts[2]) > STALE


def test_frozen_requests_continue_with_the_new_adapter(
    engine: AsyncVLLMEngine, make_adapted, running, deviation, tmp_path: Path
):
    adapted = [make_adapted(1), make_adapted(2)]
    push(LoRAPublisher(adapted[0], engine, directory=tmp_path / "1"), 1)
    futures = running(LONG)
    engine.pause("continue")  # queued at once, since a push may begin late on a busy machine
    push(LoRAPublisher(adapted[1], engine, directory=tmp_path / "2", in_flight="continue"), 2)
    for request, future in zip(LONG, futures, strict=True):
        sample = future.result(PATIENT)
        (_, first), _ = spans(sample)
        assert [version for version, _ in spans(sample)] == [1, 2]
        assert deviation(adapted[0], [request], [sample], slice(0, first)) < 10 * EXACT
        assert deviation(adapted[1], [request], [sample], slice(first, None)) < 10 * EXACT
        assert deviation(adapted[0], [request], [sample], slice(first, None)) > STALE


def test_an_adapter_that_comes_late_is_not_sampled_from(
    engine: AsyncVLLMEngine, make_adapted, wait_until, deviation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    adapted = [make_adapted(1), make_adapted(2)]
    push(LoRAPublisher(adapted[0], engine, directory=tmp_path / "1"), 1)
    (child,) = engine._core._processes
    load = engine._load

    async def stop_and_load(path: str) -> None:
        os.kill(child.pid, signal.SIGSTOP)
        await load(path)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_load", stop_and_load)
        with pytest.raises(WeightSyncError, match="version 2 .*loading the adapter"):
            push(LoRAPublisher(adapted[1], engine, directory=tmp_path / "2", timeout=5.0), 2)
    os.kill(child.pid, signal.SIGCONT)  # it replaces the first adapter without the engine's knowledge
    with pytest.raises(EngineError, match="version 2 failed half-way"):
        engine.generate(REQUESTS)
    wait_until(engine._open.is_set)  # the late update resumes as well
    push(LoRAPublisher(adapted[0], engine, directory=tmp_path / "3"), 3)
    assert engine.failed_version is None and deviation(adapted[0], REQUESTS, engine.generate(REQUESTS)) < EXACT


def test_no_adapter_repairs_weights_of_a_failed_update(
    engine: AsyncVLLMEngine, make_adapted, models, deviation, tmp_path: Path
):
    fail_half_way(engine, models[1], 9)
    with pytest.raises(WeightSyncError, match="version 9 failed half-way"):
        push(LoRAPublisher(make_adapted(1), engine, directory=tmp_path), 10)
    assert engine.failed_version == 9
    push(WeightPublisher(models[0], engine), 10)
    assert engine.failed_version is None and deviation(models[0], REQUESTS, engine.generate(REQUESTS)) < EXACT


def test_weights_are_not_loaded_while_it_samples(engine: AsyncVLLMEngine):
    with pytest.raises(EngineError, match="'finish' loads weights; pause the engine"):
        engine.update_weights("finish", {"version": 1}, timeout=5.0)
    assert engine.failed_version is None and len(engine.generate(REQUESTS)) == 4


def test_weights_of_a_failed_update_sample_nothing(
    engine: AsyncVLLMEngine, models: list[PreTrainedModel], running, deviation
):
    futures = running(ENDLESS[:4])
    engine.pause("continue")
    waiting = engine.submit(REQUESTS[0])
    fail_half_way(engine, models[1], 9, in_flight="continue")  # the engine resumes
    samples = [future.result(PATIENT) for future in futures]
    assert all(s.finish == "abort" for s in samples)
    assert deviation(models[0], ENDLESS[:4], samples) < 10 * EXACT
    for future in (waiting, engine.submit(REQUESTS[0])):
        with pytest.raises(EngineError, match="update to version 9 failed"):
            future.result(PATIENT)
    push(WeightPublisher(models[1], engine), 10)
    assert deviation(models[1], REQUESTS, engine.generate(REQUESTS)) < EXACT


def test_a_cancelled_request_is_given_up(engine: AsyncVLLMEngine, running, wait_until):
    futures = running(ENDLESS)
    for future in futures:
        assert future.cancel()
    with pytest.raises(CancelledError):
        futures[0].result(PATIENT)
    wait_until(lambda: engine._core.llm.get_num_unfinished_requests() == 0)
    engine.pause("finish", timeout=10.0)  # the child also has no request, which would take far longer
    engine.resume()


def test_generate_gives_up_after_its_time(engine: AsyncVLLMEngine, wait_until, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine, "request_timeout", 0.3)
    with pytest.raises(EngineTimeoutError, match="request_timeout=0.3"):
        engine.generate(ENDLESS[:4])
    wait_until(lambda: engine._core.llm.get_num_unfinished_requests() == 0)


def test_a_sleeping_engine_refuses_until_it_wakes(engine: AsyncVLLMEngine):
    engine.sleep()
    with pytest.raises(EngineError, match="asleep"):
        engine.update_weights("start", {"version": 1}, timeout=5.0)
    with pytest.raises(EngineError, match="asleep"):
        engine.generate(REQUESTS)
    engine.wake()
    assert len(engine.generate(REQUESTS)) == 4


def test_errors_of_workers_have_their_message_and_time_outs_the_method(engine: AsyncVLLMEngine):
    with pytest.raises(EngineError, match="'no_such_method' is not implemented"):
        engine._rpc("no_such_method", timeout=PATIENT)
    os.kill(child(engine).pid, signal.SIGSTOP)
    try:
        with pytest.raises(EngineTimeoutError, match="weight_report took longer than timeout=0.2 s"):
            engine._rpc("weight_report", timeout=0.2)
    finally:
        os.kill(child(engine).pid, signal.SIGCONT)
    assert engine._rpc("weight_report", timeout=PATIENT)[0]["rank"] == 0


def test_death_in_a_push_fails_everything_and_restart_starts_from_the_checkpoint(
    engine: AsyncVLLMEngine, models: list[PreTrainedModel], running, deviation
):
    push(WeightPublisher(models[1], engine), 5)
    start_count, pid = engine.start_count, child(engine).pid
    futures = running(ENDLESS[:4])
    engine.pause("continue")
    futures.append(engine.submit(REQUESTS[0]))  # this request waits for resume
    transport = Interfering()
    transport.function = lambda: os.kill(pid, signal.SIGKILL)
    updater = WeightPublisher(
        models[2], engine, transport=transport, bucket_bytes=BUCKET, in_flight="continue", timeout=PATIENT
    )
    words = r"version 6 .*engine 0 \(AsyncVLLMEngine\).*EngineDeadError.*restart\(\)"
    with pytest.raises(WeightSyncError, match=f"(?s){words}"):
        push(updater, 6)
    for future in futures:
        with pytest.raises(EngineDeadError, match=rf"EngineCore \(pid {pid}\) ended with exit code -9"):
            future.result(PATIENT)
    calls = (lambda: engine.generate(REQUESTS), engine.check_health, engine.pause, engine.resume)
    for call in (*calls, lambda: engine._rpc("weight_report", timeout=PATIENT)):
        with pytest.raises(EngineDeadError, match="restart"):
            call()
    engine.restart()
    waiting = engine.submit(REQUESTS[0])
    with pytest.raises(TimeoutError):  # the pause continues
        waiting.result(0.2)
    engine.resume()
    samples = [waiting.result(PATIENT), *engine.generate(REQUESTS[1:])]
    assert deviation(models[0], REQUESTS, samples) < EXACT and samples[0].versions == [0] * 12
    assert (engine.version, engine.start_count, engine.failed_version) == (0, start_count + 1, None)
    updater.transport = SharedMemory()
    push(updater, 6)
    assert deviation(models[2], REQUESTS, engine.generate(REQUESTS)) < EXACT


def test_a_start_that_fails_says_why(vllm, tmp_path: Path):
    with pytest.raises(ValueError, match="worker_extension_cls is set by the toolkit"):
        AsyncVLLMEngine(tmp_path, worker_extension_cls="x")
    with pytest.raises(ValueError, match="start_timeout=0"):
        AsyncVLLMEngine(tmp_path, start_timeout=0)
    with pytest.raises(EngineError, match=r"(?s)does not start with model='/.*config\.json"):
        AsyncVLLMEngine(tmp_path)


@pytest.mark.slow
def test_failures_in_the_child_have_its_message_and_closing_leaves_nothing(
    vllm, engine_checkpoint: Path, models: list[PreTrainedModel], wait_until, tmp_path: Path
):
    before, threads = multiprocessing.active_children(), set(threading.enumerate())
    with AsyncVLLMEngine(engine_checkpoint, **SETTINGS) as engine:
        process, folder = child(engine), Path(engine._core._folder.name)
        maps = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
        shared = {line.split()[-1] for line in maps if "/dev/shm/" in line and "(deleted)" not in line}
        push(WeightPublisher(models[1], engine, staged=False), 1)
        future = engine.submit(ENDLESS[0])
        wait_until(lambda: sampled(engine) == 1)
        with pytest.raises(EngineDeadError, match="(?s)its log ends with.*Meta tensors"):
            engine._rpc("start_weight_update", timeout=PATIENT)  # without the pause that update_weights requires
            future.result(PATIENT)
        engine.close()
        for call in (lambda: engine.generate(REQUESTS), engine.check_health, engine.resume):
            with pytest.raises(EngineError, match="closed"):
                call()
    assert not process.is_alive() and not folder.exists()
    assert not [name for name in shared if os.path.exists(name)]
    wait_until(lambda: not [t for t in set(threading.enumerate()) - threads if t.name in ("vllm", "vllm-watch")])
    shutil.copytree(engine_checkpoint, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3})
    )
    with pytest.raises(EngineError, match="(?s)does not start.*its log ends with.*not initialized"):
        AsyncVLLMEngine(tmp_path, **SETTINGS)
    with pytest.raises(EngineTimeoutError, match="starting vLLM took longer than timeout=1.0 s"):
        AsyncVLLMEngine(engine_checkpoint, start_timeout=1.0, **SETTINGS)
    wait_until(lambda: set(multiprocessing.active_children()) <= set(before))  # it was killed a moment ago


@pytest.mark.slow
def test_the_child_ends_with_a_killed_trainer(
    vllm, engine_checkpoint: Path, fork_server: ForkServer, wait_until, tmp_path: Path
):
    script = tmp_path / "trainer.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import threading
            from torchrl_rloo.engines.vllm_async import AsyncVLLMEngine

            if __name__ == "__main__":
                engine = AsyncVLLMEngine({str(engine_checkpoint)!r}, **{SETTINGS!r})
                print("child", engine._core._processes[0].pid, flush=True)
                threading.Event().wait()
            """
        )
    )
    trainer = fork_server.start(script)
    try:
        wait_until(lambda: "child" in trainer.stdout or trainer.poll() is not None, 300.0)
        pid = int(trainer.stdout.split("child")[1].split()[0])
        assert not is_gone(pid)
    finally:
        os.kill(trainer.pid, signal.SIGKILL)  # without its children
    wait_until_gone(pid)
