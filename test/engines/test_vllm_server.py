"""Tests of VLLMServer with a real server, started once by the toolkit's command and killed at the end."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from support.engines import check_scores, check_turn_settings
from support.faults import FlippedFile
from support.turn_settings import TURN_SETTINGS
from support.weights import push
from torchrl_rloo.engines.base import EngineDeadError, EngineError, EngineTimeoutError, Request, Sample
from torchrl_rloo.engines.vllm_access import server_key
from torchrl_rloo.engines.vllm_server import VLLMServer, server_command, server_environment
from torchrl_rloo.functional.sampling import SamplingDistribution
from torchrl_rloo.weight_update import LoRAPublisher, WeightPublisher, WeightSyncError

pytestmark = pytest.mark.slow  # a server takes at least 20 s to start

PROMPTS = [[5], [7, 8, 9], [40 + i % 200 for i in range(70)], [5, 6]]
REQUESTS = [Request(p, 12, seed) for seed, p in enumerate(PROMPTS)]
LONG = [Request(p, 600, seed) for seed, p in enumerate(PROMPTS)]  # seconds
ENDLESS = [Request([seed + 1], 16_000, seed) for seed in range(32)]  # a minute of tokens; no test waits for the end
EXACT = 1e-5  # float32; other weights differ by more than 0.3
STALE = 0.1
PATIENT = 60.0  # seconds, longer than any step


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def server(
    vllm, engine_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory, wait_until
) -> Iterator[tuple[str, subprocess.Popen]]:
    """URL and process of a server. The process leads a separate process group."""
    port = free_port()
    command = server_command(
        engine_checkpoint,
        port=port,
        dtype="float32",
        max_model_len=16_384,
        disable_log_stats=False,  # the tests read its metrics
        enable_lora=True,
        max_lora_rank=8,
        max_loras=1,
        max_cpu_loras=1,
    )
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("w") as file:
        process = subprocess.Popen(command, env=server_environment(), stdout=file, stderr=file, start_new_session=True)
    try:
        wait_until(lambda: process.poll() is not None or listens(port), 600.0)
        assert process.poll() is None, log.read_text()[-3000:]
        yield f"http://127.0.0.1:{port}", process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="module")
def started(server: tuple[str, subprocess.Popen]) -> Iterator[VLLMServer]:
    with VLLMServer(server[0], request_timeout=300.0, connect_timeout=180.0) as engine:
        yield engine


@pytest.fixture
def engine(started: VLLMServer, models: list[PreTrainedModel]) -> VLLMServer:
    """Engine of the module, reset to the weights of the first model."""
    if started.version or started._adapter or started.failed_version is not None:
        push(WeightPublisher(models[0], started), 0)
    return started


@pytest.fixture
def running(engine: VLLMServer, wait_until) -> Callable[[list[Request]], list[Future[Sample]]]:
    """``running(requests)`` returns futures in flight, each with at least one token."""

    def begun() -> float:
        """Return the number of requests whose first token the server has sampled since its start."""
        metrics = urllib.request.Request(f"{engine.url}/metrics", headers=engine._headers)
        with urllib.request.urlopen(metrics, timeout=PATIENT) as reply:
            lines = reply.read().decode().splitlines()
        return sum(float(s.split()[-1]) for s in lines if s.startswith("vllm:time_to_first_token_seconds_count"))

    def start(requests: list[Request]) -> list[Future[Sample]]:
        enough = begun() + len(requests)
        futures = [engine.submit(request) for request in requests]
        wait_until(lambda: begun() >= enough)
        assert not any(future.done() for future in futures)
        return futures

    return start


def test_samples_are_of_the_model_whatever_else_runs(engine: VLLMServer, models: list[PreTrainedModel], deviation):
    samples = engine.generate(REQUESTS)
    assert deviation(models[0], REQUESTS, samples) < EXACT
    assert deviation(models[1], REQUESTS, samples) > STALE
    assert all(len(s.tokens) == 12 and s.finish == "length" and s.versions == [0] * 12 for s in samples)
    many = REQUESTS + [Request([seed % 300 + 1], 20, seed) for seed in range(100)]
    assert engine.generate(many)[:4] == samples
    assert (engine.version, engine.start_count, engine.world_size) == (0, 0, 1)
    engine.check_health()


def test_rows_are_scored_as_by_the_model(engine: VLLMServer, models: list[PreTrainedModel]):
    check_scores(engine, models[0])


def test_distributions_limits_and_stops(
    engine: VLLMServer, models: list[PreTrainedModel], tokenizer: PreTrainedTokenizerFast, deviation
):
    distribution = SamplingDistribution(temperature=0.8, top_k=40, top_p=0.9, repetition_penalty=1.1)
    requests = [Request(p, 12, seed, distribution) for seed, p in enumerate(PROMPTS)]
    samples = engine.generate(requests)
    assert deviation(models[0], requests, samples) < EXACT
    for name in ("all", "frequency", "choice", "json"):
        check_turn_settings(engine, models[0], tokenizer, TURN_SETTINGS[name])
    (greedy, free) = engine.generate(
        [Request([7], 3, 0, SamplingDistribution(temperature=0)), Request(PROMPTS[1], 12, 3)]
    )
    assert greedy.log_probs == [0.0] * 3
    stop = next(t for t in free.tokens[3:] if t not in free.tokens[:3])
    text = tokenizer.decode([stop])
    by_id, by_string = engine.generate(
        [Request(PROMPTS[1], 12, 3, stop_ids=(stop,)), Request(PROMPTS[1], 12, 3, stop_strings=(text,))]
    )
    assert by_id.finish == "stop" and by_id.tokens == free.tokens[: free.tokens.index(stop) + 1]
    assert by_string.finish == "stop" and text in tokenizer.decode(by_string.tokens)


@pytest.mark.parametrize(
    "request_, words",
    [
        (Request([1] * 20_000, 4, 0), "400 Bad Request: .*20000"),
        (Request([999_999], 4, 0), "400 Bad Request: .*999999"),
        (Request([], 4, 0), "400 Bad Request: .*token_ids"),
        (Request([1], 4, 0, SamplingDistribution(min_p=0.1, top_p=0.9)), "min_p=0.1 before top_p=0.9"),
    ],
    ids=["too long", "no token", "empty", "min-p with top-p"],
)
def test_a_refusal_has_the_servers_message(engine: VLLMServer, request_: Request, words: str):
    with pytest.raises(EngineError, match=f"(?s){words}") as caught:
        engine.generate([*REQUESTS, request_])
    assert not isinstance(caught.value, EngineDeadError)


def test_errors_of_workers_have_their_message_and_time_outs_the_method(engine: VLLMServer, server):
    with pytest.raises(EngineError, match="500 .*'no_such_method' is not implemented"):
        engine._rpc("no_such_method", timeout=PATIENT)
    os.killpg(server[1].pid, signal.SIGSTOP)
    try:
        with pytest.raises(EngineTimeoutError, match="0.2 s"):
            engine._rpc("weight_report", timeout=0.2)
    finally:
        os.killpg(server[1].pid, signal.SIGCONT)
    assert engine._rpc("weight_report", timeout=PATIENT)[0]["rank"] == 0


def test_updates_arrive_amidst_running_requests(engine: VLLMServer, models: list[PreTrainedModel], running, deviation):
    for version, in_flight, requests in ((1, "continue", LONG), (2, "abort", ENDLESS[:4])):
        before, after = models[version - 1], models[version]
        futures = running(requests)
        if in_flight == "continue":
            engine.pause("continue")  # queued at once, since a push may begin late on a busy machine
        push(WeightPublisher(after, engine, in_flight=in_flight), version)
        for request, future in zip(requests, futures, strict=True):
            sample = future.result(PATIENT)
            switch = sample.versions.count(version - 1)
            assert 0 < switch < request.limit and set(sample.versions[switch:]) <= {version}
            assert sample.finish == ("length" if in_flight == "continue" else "abort")
            assert (len(sample.tokens) == request.limit) == (in_flight == "continue")
            assert deviation(before, [request], [sample], slice(0, switch)) < 10 * EXACT
            if in_flight == "continue":
                assert deviation(after, [request], [sample], slice(switch, None)) < 10 * EXACT
        samples = engine.generate(REQUESTS)
        assert deviation(after, REQUESTS, samples) < EXACT and all(s.versions == [version] * 12 for s in samples)


def test_adapters_replace_each_other_and_an_update_drops_them(
    engine: VLLMServer, models: list[PreTrainedModel], make_adapted, running, deviation, tmp_path: Path
):
    for version in (1, 2):
        adapted = make_adapted(version)
        updater = LoRAPublisher(adapted, engine, directory=tmp_path)
        push(updater, version)
        samples = engine.generate(REQUESTS)
        assert deviation(adapted, REQUESTS, samples) < EXACT
        assert all(s.versions == [version] * 12 for s in samples)
        updater.close()
    futures = running(LONG)
    engine.pause("continue")  # queued at once, since a push may begin late on a busy machine
    push(LoRAPublisher(make_adapted(3), engine, directory=tmp_path, in_flight="continue"), 3)
    samples = [future.result(PATIENT) for future in futures]
    assert {s.finish for s in samples} == {"abort"}, "a server does not replace an adapter in place"
    assert {version for s in samples for version in s.versions} <= {2}
    assert deviation(adapted, LONG, samples) < 10 * EXACT
    push(WeightPublisher(models[1], engine), 4)
    assert deviation(models[1], REQUESTS, engine.generate(REQUESTS)) < EXACT


def test_a_cancelled_request_is_given_up(engine: VLLMServer, running):
    futures = running(ENDLESS)
    for future in futures:
        assert future.cancel()
    engine.pause("finish", timeout=10.0)  # otherwise it would wait far longer
    engine.resume()


def test_sleep_and_wake(engine: VLLMServer):
    engine.sleep()
    with pytest.raises(EngineError, match="asleep"):
        engine.generate(REQUESTS)
    engine.wake()
    assert len(engine.generate(REQUESTS)) == 4


def test_another_trainer_takes_over(engine: VLLMServer, server, models: list[PreTrainedModel], deviation):
    push(WeightPublisher(models[1], engine), 6)
    engine.pause()  # the state after a trainer died in an update
    with VLLMServer(server[0], request_timeout=PATIENT) as other:
        assert other.version == 6
        samples = other.generate(REQUESTS)
        assert deviation(models[1], REQUESTS, samples) < EXACT and samples[0].versions == [6] * 12
    engine.resume()


def test_a_server_that_lives_on_keeps_what_it_has(
    engine: VLLMServer, models: list[PreTrainedModel], make_adapted, deviation, tmp_path: Path
):
    adapted = make_adapted(1)
    push(LoRAPublisher(adapted, engine, directory=tmp_path), 5)
    engine.restart()
    samples = engine.generate(REQUESTS)
    assert deviation(adapted, REQUESTS, samples) < EXACT and samples[0].versions[0] == engine.version == 5
    transport = FlippedFile(tmp_path / "weights")
    updater = WeightPublisher(models[1], engine, transport=transport, staged=False, bucket_bytes=100_000)
    with pytest.raises(WeightSyncError, match="corrupt.*parts of version 6"):
        push(updater, 6)
    connection = weakref.ref(engine._loop)
    engine.restart()
    gc.collect()
    assert connection() is None
    with pytest.raises(EngineError, match="version 6 failed half-way"):
        engine.generate(REQUESTS)


def status_of(request: urllib.request.Request | str) -> int:
    try:
        with urllib.request.urlopen(request, timeout=PATIENT) as reply:
            return reply.status
    except urllib.error.HTTPError as error:
        return error.code


def test_control_routes_want_the_key_and_refuse_web_pages(engine: VLLMServer, server, tmp_path: Path):
    """Send requests of a stranger and of a web page, one of which would write a file."""
    body = json.dumps({"method": "save_sharded_state", "args": [str(tmp_path / "stolen"), None, None]}).encode()
    attacks = [("POST", "/collective_rpc"), ("POST", "/pause"), ("POST", "/sleep"), ("GET", "/server_info"),
               ("POST", "/update_weight_version"), ("GET", "/v1/models"), ("GET", "/docs"), ("GET", "/metrics"),
               ("POST", "//collective_rpc"), ("POST", "/v1/load_lora_adapter"), ("OPTIONS", "/collective_rpc"),
               ("HEAD", "/server_info")]  # fmt: skip
    for method, path in attacks:
        data, plain = body if method == "POST" else None, {"Content-Type": "text/plain"}
        strange = urllib.request.Request(engine.url + path, data, plain, method=method)
        assert status_of(strange) == 401, path
        page = plain | engine._headers | {"Origin": "http://evil.example"}
        assert status_of(urllib.request.Request(engine.url + path, data, page, method=method)) == 403, path
    assert not (tmp_path / "stolen").exists() and status_of(f"{engine.url}/health") == 200
    assert status_of(urllib.request.Request(f"{engine.url}/weight_info", headers=engine._headers)) == 200
    assert server_key() not in Path(f"/proc/{server[1].pid}/cmdline").read_text()
    with pytest.raises(EngineError, match="401 .*VLLM_API_KEY"):
        VLLMServer(engine.url, api_key="wrong" * 8)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://localhost", "http://"])
def test_urls_that_are_none_are_refused(url: str):
    with pytest.raises(ValueError, match="must be like 'http://127.0.0.1:8000'"):
        VLLMServer(url)


def test_a_missing_server_is_an_error():
    began = time.monotonic()
    with pytest.raises(EngineDeadError, match="no server answers at http://127.0.0.1:.*refused|Connect call failed"):
        VLLMServer(f"http://127.0.0.1:{free_port()}", connect_timeout=1.0)
    assert time.monotonic() - began < 30.0


def test_a_server_of_something_else_is_told_from_one_of_vllm(tmp_path: Path):
    port = free_port()
    (tmp_path / "health").write_text("")
    command = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1", "--directory", str(tmp_path)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        with pytest.raises(EngineError, match="(?s)/weight_info: 404 .*VLLM_SERVER_DEV_MODE=1"):
            VLLMServer(f"http://127.0.0.1:{port}", connect_timeout=PATIENT)
    finally:
        process.kill()
        process.wait()


def test_the_command_says_what_the_server_understands():
    assert "--disable-log-stats" in server_command("model")
    assert not [word for word in server_command("model", disable_log_stats=False) if "log-stats" in word]


def test_the_command_refuses_what_the_toolkit_sets():
    with pytest.raises(ValueError, match="logprobs_mode is set by the toolkit"):
        server_command("model", logprobs_mode="raw_logprobs")


def test_a_killed_server_fails_everything(  # must be the last test, since the module shares the server
    engine: VLLMServer, server, running, monkeypatch: pytest.MonkeyPatch
):
    futures = running(ENDLESS[:4])
    monkeypatch.setattr(engine, "connect_timeout", 2.0)
    os.killpg(server[1].pid, signal.SIGKILL)
    for future in futures:
        with pytest.raises(EngineDeadError, match="no server answers"):
            future.result(PATIENT)
    calls = (lambda: engine.generate(REQUESTS), engine.check_health, engine.pause, engine.restart)
    for call in (*calls, lambda: engine._rpc("weight_report", timeout=PATIENT)):
        with pytest.raises(EngineDeadError, match="no server answers|has not started it yet"):
            call()
    with pytest.raises(EngineDeadError):  # so that a further restart may follow
        engine.check_health()
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.generate(REQUESTS)
