"""The synchronous script with vLLM as sampler: to the end, resumed, with an engine that is killed, with an adapter."""

from __future__ import annotations

import inspect
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import get_class, instantiate
from omegaconf import OmegaConf

from torchrl_rloo.embedded import warm_start
from torchrl_rloo.modules.engines import VLLMServer
from torchrl_rloo.weight_update import Collective, LoRAUpdater, vLLMUpdater

pytest.importorskip("vllm")

SCRIPT = Path(__file__).resolve().parents[2] / "sota_implementations" / "rloo" / "rloo_sync.py"
CONFIG = SCRIPT.parent / "config"
STEPS = 8
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def overrides(tmp_path_factory) -> list[str]:
    """A run of seconds; the engine is sent a copy that is older than the training model at every other step."""
    start = warm_start(seed=0, steps=60, cache_dir=tmp_path_factory.mktemp("cache"))
    reward = "{_target_: torchrl_rloo.rewards.SoftOverlong, max_completion_len: 12, soft_punish_cache: 11}"
    return [
        f"model.name={start}",
        f"plan.steps={STEPS}",
        "plan.prompts_per_step=4",
        "plan.num_generations=4",
        "generate.max_new_tokens=12",
        f"reward.functions=[{reward}]",  # tells completions of different lengths apart: every step has a gradient
        "sampler.share_weights=false",
        "sampler.sync_every=2",
        "data.eval_size=8",
        "eval.every=0",
        "checkpoint.every=3",
        "log.samples_every=0",
        "inference.parity_every=4",
    ]


def command(overrides: list[str], output: Path) -> list[str]:
    return [sys.executable, str(SCRIPT), *overrides, f"output_dir={output}"]


def run(overrides: list[str], output: Path) -> str:
    done = subprocess.run(command(overrides, output), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def results(output: Path) -> dict[str, bytes]:
    return {name: (output / name).read_bytes() for name in ("metrics.jsonl", "model/model.safetensors")}


def metrics(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(overrides, tmp_path_factory) -> Path:
    """A run in one process that was never stopped."""
    output = tmp_path_factory.mktemp("finished")
    (output / "stdout").write_text(run(["inference=vllm", *overrides], output))
    return output


def test_sampler_and_trainer_agree_at_each_sync(finished: Path) -> None:
    out = (finished / "stdout").read_text()
    assert "weight updates arrive: " in out and "sampler against trainer: " in out
    lines = metrics(finished)
    assert [line["staleness"] for line in lines[1:]] == [0.0] * STEPS
    compared = [line for line in lines if "parity/max" in line]
    assert [line["step"] for line in compared] == [4, 8]
    for line in compared:  # before both, one update has not been sent
        assert line["parity/max"] > 1e-3
    stale = [line["step"] for line in lines[1:] if line.get("log_ratio_max", 0) > 1e-3]
    assert set(stale) <= {2, 4, 6, 8} and len(stale) >= 2
    assert any(line.get("log_ratio_max", 1) < 1e-4 for line in lines[1:])


def test_a_run_that_was_killed_goes_on_to_the_same_bits(overrides, finished, tmp_path) -> None:
    process = subprocess.Popen(
        command(["inference=vllm", *overrides], tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 200
    while not list(tmp_path.glob("checkpoints/step_*3.pt")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    process.kill()
    process.wait()
    assert re.search("resumed after step [36]", run(["inference=vllm", *overrides], tmp_path))
    assert results(tmp_path) == results(finished)


def test_an_engine_that_is_killed_costs_nothing(overrides, finished, tmp_path) -> None:
    """In a process of its own the engine samples the same, and after its death the same again."""
    process = subprocess.Popen(
        command(["inference=vllm_process", *overrides], tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    seen = []
    for line in process.stdout:
        seen.append(line)
        if line.startswith("step 4/"):
            os.kill(engine_of(process.pid), signal.SIGKILL)
            break
    rest = process.communicate(timeout=300)[0]
    assert process.returncode == 0, "".join(seen)[-2000:] + rest[-3000:]
    assert "is brought back" in rest
    ours, theirs = metrics(tmp_path), metrics(finished)
    assert [line["reward"] for line in ours[1:]] == [line["reward"] for line in theirs[1:]]
    assert results(tmp_path)["model/model.safetensors"] == results(finished)["model/model.safetensors"]


def engine_of(pid: int) -> int:
    """The engine's process among the descendants of the script's: its largest."""
    children = [int(c) for t in Path(f"/proc/{pid}/task").iterdir() for c in (t / "children").read_text().split()]
    return max(children, key=lambda c: int(Path(f"/proc/{c}/statm").read_text().split()[1]))


def test_an_adapter_is_trained_and_sent_alone(overrides, tmp_path) -> None:
    """From a copy that samples, which an updater of adapters and its self-test have to take for one too."""
    adapter = ["lora={r: 4, lora_alpha: 8, target_modules: all-linear}", "sampler.sync_every=1"]
    more = ["kl_to_ref_coeff=0.01", "optimizer.lr=3e-3", "inference.parity_every=1"]
    run(["inference=vllm_lora", *overrides, *adapter, *more], tmp_path)
    lines = metrics(tmp_path)[1:]
    assert max(line["parity/max"] for line in lines) < 1e-4
    assert lines[0]["kl"] == pytest.approx(0, abs=1e-6) and lines[-1]["kl"] != 0
    assert (tmp_path / "model" / "adapter_model.safetensors").is_file()


def test_rounded_weights_are_no_wrong_weights(overrides, tmp_path) -> None:
    """The parity probe takes a float32 engine that is sent bfloat16 weights for what it is."""
    out = run(["inference=vllm", *overrides, "plan.steps=5", "sampler.dtype=bfloat16"], tmp_path)
    assert "sampler against trainer: " in out and "more than rounding explains" not in out


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["inference=vllm", "inference.engine.max_model_len=50"], r"max_model_len=50 would cut .* at least 52"),
        (["inference=vllm_lora"], r"set lora=\{r: 16, target_modules: all-linear\}, or inference=vllm"),
        (["inference=vllm_lora", "lora={r: 128}"], r"lora.r=128 is more than inference.engine.max_lora_rank=64"),
        (["inference=vllm_lora", "lora={r: 4}", "sampler.dtype=bfloat16"], "set inference.engine.dtype=bfloat16"),
        (["inference=vllm_lora", "lora={r: 64}", "inference.engine.max_model_len=52"], None),
        (["inference=transformers"], None),
    ],
)
def test_what_an_engine_would_fail_at_is_refused_before_it_starts(settings: list[str], message: str | None) -> None:
    check_engine = runpy.run_path(str(SCRIPT.with_name("rloo_engine.py")))["check_engine"]
    with initialize_config_dir(str(CONFIG), version_base="1.3"):
        cfg = OmegaConf.to_container(compose("rloo_sync", settings))
    plan = SimpleNamespace(max_prompt_tokens=40, max_new_tokens=12)
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        check_engine(cfg, plan)


@pytest.mark.parametrize("name", sorted(p.stem for p in (CONFIG / "inference").glob("vllm*.yaml")))
def test_every_inference_config_fits_what_it_configures(name: str) -> None:
    """Also those that need a GPU or a server: their arguments are ones that the classes take."""
    with initialize_config_dir(str(CONFIG), version_base="1.3"):
        cfg = compose("rloo_sync", [f"inference={name}", "lora={r: 4, target_modules: all-linear}"]).inference
    engine = dict(cfg.engine)
    inspect.signature(get_class(engine.pop("_target_"))).bind(**engine)
    updater = instantiate(cfg.updater, _partial_=True)
    inspect.signature(updater.func).bind(None, None, **updater.keywords)
    assert updater.func is (LoRAUpdater if name == "vllm_lora" else vLLMUpdater)
    assert (name == "vllm_gpu") == isinstance(updater.keywords.get("transport"), Collective)
    assert (name == "vllm_server") == (get_class(cfg.engine._target_) is VLLMServer)
    assert {"self_test", "sleep", "parity_every"} <= cfg.keys()
