"""Recipe with vLLM as sampler: resumed, with a killed engine, with an adapter, over a server."""

from __future__ import annotations

import inspect
import os
import signal
import socket
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra.utils import get_class, instantiate

from support.processes import children
from support.recipes import run_recipe_here, settings
from support.runs import read_jsonl
from support.waiting import wait_until
from torchrl_rloo.cli.main import recipe_file
from torchrl_rloo.diagnostics import check_engine
from torchrl_rloo.engines import VLLMEngine, VLLMServer
from torchrl_rloo.weight_update import LoRAPublisher, WeightPublisher

pytest.importorskip("vllm")

CONFIG = recipe_file("rloo").parent / "config"
STEPS = 4
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def overrides(warm_model) -> list[str]:
    """Settings of a short run; at every other step the engine gets a copy older than the training model."""
    return [
        f"model.name={warm_model()}",
        f"plan.steps={STEPS}",
        "plan.prompts_per_step=4",
        "plan.num_generations=4",
        "generate.max_new_tokens=12",
        "reward.functions=[own_rewards.distinct]",  # every step has a gradient
        "sampler.share_weights=false",
        "sampler.sync_every=2",
        "data.limit=64",
        "data.eval_size=8",
        "eval.every=0",
        "checkpoint.every=3",
        "log.samples_every=0",
        "inference.parity_every=2",
    ]


@pytest.fixture
def run(importable, capsys):
    """Function ``run(overrides, output)``: run in this process and return its output and log."""

    def run(overrides: list[str], output: Path) -> tuple[str, list[dict]]:
        run_recipe_here("rloo", *overrides, f"output_dir={output}")
        return capsys.readouterr().out, read_jsonl(output / "metrics.jsonl")

    return run


@pytest.fixture(scope="module")
def finished(overrides, finish, tmp_path_factory) -> Path:
    """Output of a run with vLLM in its process that was never stopped."""
    output = tmp_path_factory.mktemp("finished")
    (output / "stdout").write_text(finish(["inference=vllm", *overrides], output))
    return output


def assert_same_run(output: Path, finished: Path) -> None:
    for name in ("metrics.jsonl", "model/model.safetensors"):
        assert (output / name).read_bytes() == (finished / name).read_bytes(), name


def test_sampler_and_trainer_agree_at_each_sync(finished) -> None:
    out, lines = (finished / "stdout").read_text(), read_jsonl(finished / "metrics.jsonl")
    assert "weight updates arrive: " in out and "sampler against trainer: " in out
    assert [line["staleness"] for line in lines[1:]] == [0.0] * STEPS
    assert [line["step"] for line in lines if "parity/max" in line] == [2, 4]
    assert all(lines[step]["parity/max"] > 1e-4 for step in (2, 4))  # one update is missing
    assert all(lines[step]["log_ratio_max"] < 1e-4 < lines[step + 1]["log_ratio_max"] for step in (1, 3))


def test_a_killed_run_resumes_bit_identically(overrides, finished, kill, run, tmp_path) -> None:
    kill(["inference=vllm", *overrides], tmp_path, "train:4")
    out, _ = run(["inference=vllm", *overrides], tmp_path)
    assert "resumed after step 3" in out
    assert_same_run(tmp_path, finished)


def test_an_engine_that_is_killed_costs_nothing(overrides, finished, start, tmp_path) -> None:
    """The engine samples the same in a separate process, and again after a restart."""
    process = start(["inference=vllm_process", *overrides], tmp_path, hold="train:2")
    largest = max(children(process.pid), key=lambda pid: int(Path(f"/proc/{pid}/statm").read_text().split()[1]))
    os.kill(largest, signal.SIGKILL)
    process.send_signal(signal.SIGCONT)
    assert process.wait(300) == 0, process.stderr[-3000:]
    ours, theirs = (read_jsonl(folder / "metrics.jsonl") for folder in (tmp_path, finished))
    assert ours[-1]["count/pool/deaths"] == ours[-1]["count/pool/restarts"] == 1
    assert [line["reward"] for line in ours[1:]] == [line["reward"] for line in theirs[1:]]
    weights = [(folder / "model" / "model.safetensors").read_bytes() for folder in (tmp_path, finished)]
    assert weights[0] == weights[1]


def test_a_server_samples_the_same(overrides, finished, run, warm_model, tmp_path) -> None:
    """The server that the command starts gets its weights from the run."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "torchrl_rloo.cli.main", "serve", str(warm_model()), "--port", str(port)]
    command += ["--dtype", "float32", "--threads", "1", "--", "--max-model-len", "256"]
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_until(lambda: server.poll() is not None or _listens(port), 300, "a server that listens")
        assert server.poll() is None, (tmp_path / "log").read_text()[-3000:]
        url = f"inference.engine.url=http://127.0.0.1:{port}"
        _, lines = run(["inference=vllm_server", url, *overrides], tmp_path / "out")
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    theirs = read_jsonl(finished / "metrics.jsonl")
    assert [line["reward"] for line in lines[1:]] == [line["reward"] for line in theirs[1:]]


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("quantization", ["null", "nf4"])
def test_an_adapter_is_trained_and_sent_alone(overrides, run, tmp_path, quantization: str) -> None:
    """The sampler is a copy, which the adapter's updater and self-test must handle like the model."""
    adapter = ["lora={r: 4, lora_alpha: 8, target_modules: all-linear}", "sampler.sync_every=1"]
    adapter.append(f"model.quantization={quantization}")  # in 4 bits, the engine serves the dequantized base
    more = ["plan.steps=2", "kl.coeff=0.01", "optimizer.lr=3e-3", "inference.parity_every=1"]
    _, lines = run(["inference=vllm_lora", *overrides, *adapter, *more], tmp_path)
    assert max(line["parity/max"] for line in lines[1:]) < 1e-4
    assert lines[1]["kl"] == pytest.approx(0, abs=1e-6) and lines[-1]["kl"] != 0
    assert (tmp_path / "model" / "adapter_model.safetensors").is_file()
    assert (tmp_path / "base").exists() == (quantization == "nf4")


def test_rounded_weights_pass_the_parity_probe(overrides, run, tmp_path, monkeypatch) -> None:
    """The parity probe accepts a float32 engine with bfloat16 weights, which is as long as the longest row."""
    lengths, close = [], VLLMEngine.close
    monkeypatch.setattr(VLLMEngine, "close", lambda engine: (lengths.append(engine.context_length), close(engine)))
    out, _ = run(["inference=vllm", *overrides, "plan.steps=1", "sampler.dtype=bfloat16"], tmp_path)
    assert "sampler against trainer: " in out and "exceeds rounding" not in out
    assert f"prompts up to {lengths[0] - 12} tokens" in out


def test_conversations_turn_by_turn(warm_model, run, tmp_path) -> None:
    sizes = ["plan.steps=1", "plan.prompts_per_step=4", "plan.num_generations=4", "data.limit=128", "data.eval_size=8"]
    more = ["inference=vllm_process", "inference.parity_every=1", "eval.every=0", "log.transcripts=false"]
    _, lines = run(["--config", "rloo_tools", f"model.name={warm_model('calculator')}", *sizes, *more], tmp_path)
    assert lines[1]["num_tool_calls"] > 0 and lines[1]["parity/max"] < 1e-3


ENGINES = [
    ("inference=vllm inference.engine.max_model_len=50", r"max_model_len=50 must be at least 52"),
    ("inference=vllm_lora", r"set lora=\{r: 16, target_modules: all-linear\}, or inference=vllm"),
    ("inference=vllm_lora lora={r:128}", r"lora.r=128 exceeds inference.engine.max_lora_rank=64"),
    (
        "inference=vllm_lora lora={r:4} sampler.dtype=bfloat16 sampler.share_weights=false",
        "set inference.engine.dtype=bfloat16",
    ),
    ("inference=vllm_lora lora={r:64} inference.engine.max_model_len=52", None),
    ("inference=transformers", None),
]


@pytest.mark.parametrize(("overrides", "message"), ENGINES, ids=[overrides for overrides, _ in ENGINES])
def test_settings_that_an_engine_rejects_are_refused_before_it_starts(overrides: str, message: str | None) -> None:
    cfg = settings("rloo", *overrides.split())
    plan = SimpleNamespace(max_prompt_tokens=40, max_new_tokens=12)
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        check_engine(cfg.inference.engine, plan, cfg.lora, cfg.sampler.dtype)


@pytest.mark.parametrize("name", sorted(p.stem for p in (CONFIG / "inference").glob("vllm*.yaml")))
def test_every_inference_config_fits_its_classes(name: str) -> None:
    """The arguments of all configurations, including those for a GPU, exist in their classes."""
    cfg = settings("rloo", f"inference={name}", "lora={r: 4, target_modules: all-linear}").inference
    engine = dict(cfg.engine)
    target = get_class(engine.pop("_target_"))
    inspect.signature(target).bind(**engine)
    arguments = dict(cfg.updater)
    transport = arguments.get("transport", "auto")
    if transport != "auto":  # not made, because it requires a GPU
        inspect.signature(get_class(transport["_target_"])).bind()
        arguments["transport"] = "auto"
    updater = instantiate(arguments, _partial_=True)
    inspect.signature(updater.func).bind(None, None, **updater.keywords)
    assert updater.func is (LoRAPublisher if name == "vllm_lora" else WeightPublisher)
    assert (name == "vllm_gpu") == (transport != "auto")
    assert (name == "vllm_server") == (target is VLLMServer)
