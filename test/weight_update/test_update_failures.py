"""Failed updates: precise errors in time, old weights or no sampling, and a working next push."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from support.engines import GROUP
from support.faults import Flipped, FlippedFile, Interfering
from support.weights import push
from torchrl_rloo.embedded import build_model
from torchrl_rloo.engines.base import Engine, EngineError, Request
from torchrl_rloo.engines.scripted import ScriptedEngine, ScriptedTurn
from torchrl_rloo.weight_update import Direct, SharedMemory, WeightPublisher, WeightSource, WeightSyncError

pytestmark = pytest.mark.xdist_group(GROUP)

BUCKET = 100_000
PATIENT = 300.0  # a time-out that a failure must not wait for
SOON = 100.0  # for a busy machine


@pytest.fixture
def engine(vllm_engine: Engine) -> Engine:
    return vllm_engine


@pytest.fixture
def own_process(async_engine: Engine) -> Engine:
    return async_engine


def child_of(engine: Engine) -> int:
    """Return the process id of the engine's model."""
    return engine._core._processes[0].pid


@pytest.fixture
def trained(tokenizer) -> nn.Module:
    return build_model(tokenizer, seed=3).eval()


@pytest.fixture
def with_weights(tokenizer, change) -> Callable[[Engine], nn.Module]:
    """Push new weights to an engine and return their model: ``with_weights(engine)``."""

    def make(engine: Engine) -> nn.Module:
        model = build_model(tokenizer, seed=engine.version + 10).eval()
        push(WeightPublisher(model, engine, transport=SharedMemory(), timeout=PATIENT), engine.version + 1)
        return model

    return make


@contextmanager
def fails_within(seconds: float, *words: str) -> Iterator[None]:
    """Expect a WeightSyncError with these words within some seconds."""
    began = time.monotonic()
    with pytest.raises(WeightSyncError) as caught:
        yield
    assert time.monotonic() - began < seconds
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"


@pytest.mark.parametrize("kind", [Flipped, FlippedFile])
def test_a_flipped_bit_leaves_the_old_weights(kind, engine, trained, with_weights, log_prob_error, tmp_path):
    old, version = with_weights(engine), engine.version
    updater = WeightPublisher(trained, engine, transport=kind(tmp_path), bucket_bytes=BUCKET, timeout=PATIENT)
    with fails_within(
        SOON, f"version {version + 1} ", "engine 0 (VLLMEngine)", "bucket 1 (model.layers.0.", "corrupt", "Push again"
    ):
        push(updater, version + 1)
    assert engine.version == version and log_prob_error(engine, old) < 1e-5
    assert updater.push_weights() == version + 2 == engine.version
    assert log_prob_error(engine, trained) < 1e-5
    updater.close()
    assert not list(tmp_path.iterdir())


def test_a_streamed_update_that_fails_tears_the_engine(engine, trained, with_weights, log_prob_error):
    with_weights(engine)
    version = engine.version + 1
    updater = WeightPublisher(trained, engine, transport=Flipped(), bucket_bytes=BUCKET, staged=False, timeout=PATIENT)
    with fails_within(SOON, f"parts of version {version}", "refuses to sample"):
        push(updater, version)
    with pytest.raises(EngineError, match=f"version {version} failed"):
        engine.generate([Request([5], limit=1, seed=0)])
    updater.push_weights()
    assert log_prob_error(engine, trained) < 1e-5


def test_a_load_that_fails_halfway_is_repaired_by_the_next_push(
    engine, trained, with_weights, log_prob_error, monkeypatch
):
    with_weights(engine)
    version = engine.version + 1
    updater = WeightPublisher(trained, engine, transport=Direct(), timeout=PATIENT)
    with monkeypatch.context() as patch:
        patch.setattr("torchrl_rloo.engines.vllm_load.dispatch_cpu_unquantized_gemm", None)  # after the layers' weights
        with fails_within(SOON, f"parts of version {version}", "refuses to sample"):
            push(updater, version)
    with pytest.raises(EngineError, match=f"version {version} failed"):
        engine.generate([Request([5], limit=1, seed=0)])
    updater.push_weights()
    assert log_prob_error(engine, trained) < 1e-5


def cropped(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor[:, :-1] if name.endswith("layers.1.mlp.gate_proj.weight") else tensor)]


def dropped(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    return [] if name.endswith("layers.1.self_attn.k_proj.weight") else [(name, tensor)]


def renamed(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    return [(name.replace("layers.1.mlp.up_proj", "layers.1.mlp.upward"), tensor)]


@pytest.mark.parametrize("staged", [True, False], ids=["staged", "streamed"])
@pytest.mark.parametrize(
    ("convert", "words"),
    [
        (cropped, ["model.layers.1.mlp.gate_proj.weight", "[256, 63]"]),
        (dropped, ["layers.1.self_attn.qkv_proj", "send the whole model"]),
        (renamed, ["model.layers.1.mlp.upward.weight"]),
    ],
)
def test_tensors_that_do_not_fit_change_nothing(convert, words, staged, engine, trained, with_weights, log_prob_error):
    old, version = with_weights(engine), engine.version
    source = WeightSource(trained, convert=convert)
    updater = WeightPublisher(source, engine, transport=Direct(), staged=staged, timeout=PATIENT)
    with fails_within(SOON, "engine 0 (VLLMEngine)", "connecting over direct", *words):
        push(updater, version + 1)
    assert engine.version == version and log_prob_error(engine, old) < 1e-5
    updater.source = WeightSource(trained)
    updater.push_weights()
    assert log_prob_error(engine, trained) < 1e-5


def test_a_worker_that_hangs_is_an_error_in_time(own_process, trained, with_weights, log_prob_error, monkeypatch):
    monkeypatch.setattr("torchrl_rloo.weight_update.delivery.ABORT_SECONDS", 1.0)
    old, version = with_weights(own_process), own_process.version

    class Stopping(SharedMemory):
        """Transport that stops the worker's process before bucket 1 and then lowers the time-out."""

        stops = True

        def store(self, version, sizes, keep):
            storage = super().store(version, sizes, keep)
            get = storage.get

            def stop_and_get(bucket):
                if bucket == 1 and self.stops:
                    os.kill(child_of(own_process), signal.SIGSTOP)
                    publisher.timeout = 2
                return get(bucket)

            storage.get = stop_and_get
            return storage

    transport = Stopping()
    publisher = WeightPublisher(trained, own_process, transport=transport, bucket_bytes=BUCKET, timeout=PATIENT)
    try:
        with fails_within(SOON, "engine 0 (AsyncVLLMEngine)", "bucket ", "timeout=2"):
            push(publisher, version + 1)
    finally:
        transport.stops = False
        os.kill(child_of(own_process), signal.SIGCONT)
    assert own_process.version == version and log_prob_error(own_process, old) < 1e-5
    publisher.timeout = PATIENT
    publisher.push_weights()
    assert log_prob_error(own_process, trained) < 1e-5
    publisher.close()


class Fallible(ScriptedEngine):
    """Engine that takes updates in this process and counts resumes."""

    def __init__(self, latency: float = 0.0):
        super().__init__(lambda request, index: ScriptedTurn([7], latency=latency))
        self.resumes = 0

    def resume(self):
        self.resumes += 1
        super().resume()

    def steps(self) -> list[str]:
        steps = [record.step for record in self.updates]
        self.updates.clear()
        return steps


@pytest.fixture
def pair() -> Iterator[tuple[Fallible, Fallible]]:
    with Fallible() as one, Fallible() as other:
        yield one, other


def test_an_engine_that_dies_in_a_push_is_named_and_may_be_restarted(pair, tmp_path):
    transport = Interfering(tmp_path)
    transport.function = lambda: pair[1].start_count or pair[1].kill()
    publisher = WeightPublisher(nn.Linear(100, 100), pair, transport=transport, bucket_bytes=40_000, timeout=PATIENT)
    with fails_within(SOON, "engine 1 (Fallible)", "version 1 ", "EngineDeadError", "restart()", "EnginePool"):
        publisher.push_weights()
    assert pair[0].version == 0, "no engine has weights that another one missed"
    pair[1].restart()
    assert publisher.push_weights() == 2 and [engine.version for engine in pair] == [2, 2]


@pytest.mark.parametrize("step", ["abort", "connect", "start", "bucket", "finish"])
def test_whatever_step_fails_all_engines_leave_the_update_and_go_on(pair, step, tmp_path):
    one, other = pair
    other.fail_updates[step] = [RuntimeError("out of luck"), None]
    transport = SharedMemory(tmp_path)
    updater = WeightPublisher(nn.Linear(100, 100), pair, transport=transport, bucket_bytes=40_000, timeout=PATIENT)
    with fails_within(SOON, "engine 1 (Fallible)", "RuntimeError: out of luck", "Push again"):
        updater.push_weights()
    assert not list(tmp_path.iterdir())
    for engine in pair:
        assert engine.steps()[-1] == "abort" and not engine.paused
    assert updater.last_push is None
    assert updater.push_weights() == 2
    assert [engine.version for engine in pair] == [2, 2] and not any(engine.paused for engine in pair)


def test_no_engine_finishes_before_all_have_all_buckets(pair):
    one, other = pair
    updater = WeightPublisher(nn.Linear(100, 100), pair, bucket_bytes=40_000, timeout=PATIENT)
    other.fail_updates["bucket"] = [None, RuntimeError("out of luck")]
    with fails_within(SOON, "engine 0 (Fallible) has version 0", "engine 1 (Fallible) has version 0"):
        updater.push_weights()
    assert "finish" not in one.steps() + other.steps()


def hasty(engines) -> WeightPublisher:
    """Return a publisher with a short time-out, for which engines of this process need not be quick elsewhere."""
    return WeightPublisher(nn.Linear(2, 2), engines, transport=SharedMemory(), timeout=1)


def test_an_engine_that_heeds_no_time_out_hangs_nobody_and_disturbs_no_later_update():
    class Deaf(Fallible):
        """Engine that takes the bucket of version 1 only during the second update."""

        hears, left = threading.Event(), threading.Event()

        def update_weights(self, step, info=None, *, timeout):
            if step != "bucket" or info["version"] != 1:
                if step == "finish":  # the second update is open
                    self.hears.set()
                    assert self.left.wait(PATIENT)
                return super().update_weights(step, info, timeout=timeout)
            assert self.hears.wait(PATIENT)
            try:
                return super().update_weights(step, info, timeout=timeout)
            finally:
                self.left.set()

    with Deaf() as engine:
        updater = hasty(engine)
        with fails_within(SOON, "engine 0 (Deaf)", "EngineTimeoutError", "timeout=1"):
            updater.push_weights()
        assert engine.resumes == 0, "it was staging"
        updater.timeout = PATIENT
        assert updater.push_weights() == 2
        assert engine.left.is_set() and engine.version == 2


def test_requests_that_do_not_end_are_an_error_in_time(pair):
    with Fallible(latency=1000.0) as busy:
        busy.submit(Request([1], limit=1, seed=0))
        updater = WeightPublisher(nn.Linear(2, 2), [busy, pair[0]], timeout=1)
        with fails_within(SOON, "engine 0 (Fallible)", "pausing", "timeout=1"):
            updater.push_weights()
        assert busy.resumes == 1 and not pair[0].paused and pair[0].version == 0
        updater.in_flight, updater.timeout = "abort", PATIENT
        assert updater.push_weights() == 2 == busy.version


@pytest.mark.parametrize("wrong", [{"version": 0}, {"checksums": []}])
def test_a_worker_that_reports_something_else_is_an_error(wrong):
    class Mistaken(Fallible):
        def update_weights(self, step, info=None, *, timeout):
            reports = super().update_weights(step, info, timeout=timeout)
            return [*reports, reports[0] | wrong] if step == "finish" else reports

    with Mistaken() as engine, fails_within(SOON, "loading the new weights", "not version 1"):
        WeightPublisher(nn.Linear(2, 2), engine, timeout=PATIENT).push_weights()


@pytest.mark.parametrize("staged", [True, False], ids=["staged", "streamed"])
def test_an_interrupt_leaves_no_engine_paused(pair, staged):
    class Interrupted(Direct):
        def store(self, *_):
            storage = super().store(*_)
            storage.put = interrupt
            return storage

    def interrupt(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        WeightPublisher(nn.Linear(2, 2), pair, transport=Interrupted(), staged=staged).push_weights()
    for engine in pair:
        assert engine.steps()[-1] == "abort" and not engine.paused
        if staged:
            assert engine.generate([Request([1], limit=1, seed=0)])[0].tokens == [7]
    WeightPublisher(nn.Linear(2, 2), pair).push_weights()
    assert [engine.failed_version for engine in pair] == [None, None]
