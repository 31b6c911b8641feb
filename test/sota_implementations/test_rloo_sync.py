"""The synchronous script, as a user runs it: to the end, killed and resumed, stopped, misconfigured."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torchrl_rloo.diagnostics import DEFINITIONS
from torchrl_rloo.embedded import warm_start

SCRIPT = Path(__file__).resolve().parents[2] / "sota_implementations" / "rloo" / "rloo_sync.py"
STEPS = 24
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def overrides(tmp_path_factory) -> list[str]:
    """A run of seconds that uses every stateful part: own sampler weights, KL, several minibatches and passes."""
    start = warm_start(seed=0, steps=60, cache_dir=tmp_path_factory.mktemp("cache"))
    return [
        f"model.name={start}",
        "threads=1",
        f"plan.steps={STEPS}",
        "plan.prompts_per_step=4",
        "plan.num_generations=4",
        "plan.minibatches=2",
        "plan.passes=2",
        "plan.micro_batch_size=6",
        "generate.max_new_tokens=12",
        "+generate.top_p=0.95",
        "sampler.share_weights=false",
        "sampler.sync_every=2",
        "kl_to_ref_coeff=0.01",
        "data.eval_size=8",
        "eval.every=10",
        "checkpoint.every=3",
        "log.samples_every=10",
    ]


def command(overrides: list[str], output: Path) -> list[str]:
    return [sys.executable, str(SCRIPT), *overrides, f"output_dir={output}"]


def run(overrides: list[str], output: Path, **kwargs) -> subprocess.CompletedProcess:
    return subprocess.run(command(overrides, output), capture_output=True, text=True, timeout=300, **kwargs)


def steps_logged(output: Path) -> int:
    try:
        return len((output / "metrics.jsonl").read_bytes().splitlines())
    except FileNotFoundError:
        return 0


def results(output: Path) -> dict[str, bytes]:
    names = ("metrics.jsonl", "completions.jsonl", "model/model.safetensors", "model/tokenizer.json")
    return {name: (output / name).read_bytes() for name in names}


@pytest.fixture(scope="module")
def finished(overrides, tmp_path_factory) -> Path:
    """A run that was never stopped."""
    output = tmp_path_factory.mktemp("finished")
    done = run(overrides, output)
    assert done.returncode == 0, done.stderr[-3000:]
    (output / "stdout").write_text(done.stdout)
    return output


def test_closing_line_report_and_model(finished):
    result = json.loads((finished / "stdout").read_text().splitlines()[-1])
    assert {"held_out_accuracy_before", "held_out_accuracy_after", "cpu_seconds", "report"} <= result.keys()
    assert Path(result["report"]).is_file() and (finished / "curves.png").stat().st_size > 10_000
    assert list(finished.rglob("events.out.tfevents*"))
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(result["model"])
    assert model.num_parameters() == 152_256 and AutoTokenizer.from_pretrained(result["model"]).chat_template
    lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(STEPS + 1))
    assert lines[-1]["kl"] is not None and lines[-1]["ESS"] <= 1.0 + 1e-6
    assert "24 steps of 4 prompts x 4 completions = 16 rows" in (finished / "stdout").read_text()


def test_every_metric_of_a_run_is_defined(finished):
    patterns = [re.sub(r"<(.*?)>", lambda m: f"({m[1]})" if "|" in m[1] else "[^/]+", name) for name in DEFINITIONS]
    for file in ("metrics.jsonl", "timings.jsonl"):
        for name in {k for line in (finished / file).read_text().splitlines() for k in json.loads(line)} - {"step"}:
            assert sum(re.fullmatch(pattern, name) is not None for pattern in patterns) == 1, name


def test_same_seed_same_files(overrides, finished, tmp_path):
    assert run(overrides, tmp_path).returncode == 0
    assert results(tmp_path) == results(finished)


def test_killed_at_five_instants_and_resumed(overrides, finished, tmp_path):
    seed = int.from_bytes(os.urandom(4), "big")
    print("seed of the instants:", seed)  # shown by pytest if the test fails
    rng = random.Random(seed)
    for at_least in sorted(rng.sample(range(1, STEPS - 8), 5)):
        process = subprocess.Popen(
            command(overrides, tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        deadline = time.monotonic() + 120
        while steps_logged(tmp_path) <= at_least and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.15))
        if process.poll() is None:  # on a starved machine the run may have been done before this process woke up
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    done = run(overrides, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "resumed after step" in done.stdout
    assert results(tmp_path) == results(finished)


def test_sigterm_saves_and_stops_cleanly(overrides, finished, tmp_path):
    process = subprocess.Popen(
        command([*overrides, "checkpoint.every=1000"], tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 200
    while steps_logged(tmp_path) < 5 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err[-3000:]
    assert "stopped after step" in out
    assert len(list((tmp_path / "checkpoints").glob("step_*.pt"))) == 1
    assert run(overrides, tmp_path).returncode == 0
    assert results(tmp_path) == results(finished)


METHODS = {
    "rloo": ["kl_to_ref_coeff=null"],
    "rloo_openrlhf": ["kl_to_ref_coeff=null", "train.layout=packed"],
    "grpo": ["kl_to_ref_coeff=0.1", "kl_target=0.01", "train.layout=shared_prefix"],
    "dr_grpo": ["+loss.entropy_coeff=0.01"],
    "gspo": ["+loss.old_log_probs=proximal", "+loss.correction=tis"],
    "cispo": ["train.merge_identical=true", "train.micro_batch_tokens=300"],
    "reinforce_pp": ["kl_to_ref_coeff=null"],
    "dapo": ["+loss.high_entropy_fraction=0.5", "+advantage.estimator=maxrl"],
}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains(overrides, tmp_path, method, monkeypatch):
    """Three steps each, with the options that go well with it; the embedded model moves, and nothing is NaN."""
    reward = "{_target_: torchrl_rloo.rewards.SoftOverlong, max_completion_len: 12, soft_punish_cache: 11}"
    more = ["plan.steps=3", "schedule.warmup_steps=1", "resume=never", "checkpoint.every=0", "eval.every=0"]
    more += [f"reward.functions=[{reward}]"]  # tells completions of different lengths apart: every group has a signal
    call_main([*overrides, *more, f"algorithm={method}", *METHODS[method]], tmp_path)
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [r for r in records if "loss" in r]
    assert len(steps) >= 2 and any(r["grad_norm"] > 0 for r in steps)  # all rewards of a step may be equal
    assert [name for r in steps for name, value in r.items() if value != value] == []
    assert all(r["kl_coeff"] > 0 for r in steps)
    assert ("kl_target=0.01" in METHODS[method]) == (len({r["kl_coeff"] for r in steps}) > 1)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (["plan.minibatches=3"], r"4 prompts x 4 completions = 16 rows a step, which minibatches=3 does not divide"),
        (["plan.num_generations=1"], "estimator='rloo' compares the rows of a group, so it needs at least 2"),
        (["kl_target=0.1", "kl_to_ref_coeff=0"], "kl_target=0.1 adapts a KL coefficient, but kl_to_ref_coeff is 0"),
        (["+loss.correction=tis", "+loss.old_log_probs=proximal"], "weighs tokens, but ratio='sequence' has one"),
        (["plan.prompts_per_step=100000"], "fewer than the 100000 of a step"),
        (["generate.max_new_tokens=5000"], "more than the model's context of 2048"),
        (["+generate.top_q=0.5"], "unknown sampling arguments ['top_q']"),
        (["generate.temperature=-1"], "temperature=-1 must be at least 0"),
        (["generate.temperature=0"], "temperature=0 samples the same completion of a prompt every time"),
        (["+plan.num_gen=4"], "plan.num_gen is no setting: did you mean plan.num_generations?"),
        (["+data.max_promt_length=4"], "did you mean data.max_prompt_length?"),
        (["curriculum.refill={max_batch: 3}"], "did you mean curriculum.refill.max_batches?"),
        (["resume=yes"], "must be 'auto' or 'never'"),
        (["sampler.dtype=float33"], "dtype='float33' is not a torch dtype"),
        (["eval.batch_size=0"], "batch_size=0 must be at least 1"),
        (["sampler.share_weights=true"], "sampler.sync_every=2 cannot be had: set sampler.share_weights=false"),
        (["data.eval_source=other.jsonl"], "source='embedded' has its own held-out prompts"),
        (["eval.scorer=torchrl_rloo.rewards.last_boxed"], "scorer last_boxed failed on all 16 completions"),
        (["model.dtype=float33"], "dtype='float33' is not a torch dtype"),
        (["algorithm=grppo"], "algorithm='grppo' must be one of"),
        (["algorithm=ppo"], "see tutorials/ppo.py"),
        (["+advantage.estimatr=rloo"], "estimatr"),
        (["train.layout=pack"], "layout='pack' must be one of"),
        (["+loss.ratio=tokens"], "ratio='tokens' must be one of"),
        (["+loss.clip_epsilon=-0.1"], "clip_epsilon=-0.1 must be one or two positive numbers"),
        (["log.loggers=[tensorbored]"], "tensorbored"),
        (["reward.weights=[1,2]"], "2 weights [1.0, 2.0] for 1 reward functions"),
        (["data.source=nowhere.jsonl"], "is neither a local file"),
        (["schedule.warmup_steps=100000"], "warmup_steps=100000 must be between 0 and"),
    ],
    ids=lambda v: v[0] if isinstance(v, list) else "",
)
def test_impossible_settings_are_refused(overrides, tmp_path, bad, message, monkeypatch):
    """In this process: the script's own entry point, without the cost of a new interpreter."""
    with pytest.raises(Exception) as raised:
        call_main([*overrides, *bad], tmp_path)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ("optimizer.lr=0.1", "optimizer.lr: 0.0003 -> 0.1"),
        ("reward.functions=[think_format]", "reward.functions: "),
    ],
)
def test_other_settings_do_not_resume(overrides, finished, other, message):
    with pytest.raises(ValueError, match=message):
        call_main([*overrides, other], finished)


def test_starting_over_leaves_nothing_to_resume(overrides, finished, tmp_path):
    shutil.copytree(finished / "checkpoints", tmp_path / "checkpoints")
    with pytest.raises(RuntimeError, match="scorer last_boxed failed on all"):
        call_main([*overrides, "resume=never", "eval.scorer=torchrl_rloo.rewards.last_boxed"], tmp_path)
    assert not list((tmp_path / "checkpoints").glob("step_*.pt"))


def call_main(overrides: list[str], output: Path) -> None:
    import importlib.util

    from hydra import compose, initialize_config_dir

    if str(SCRIPT.parent) not in sys.path:  # as it is for a script, which imports the file beside it
        sys.path.insert(0, str(SCRIPT.parent))
    spec = importlib.util.spec_from_file_location("rloo_sync", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with initialize_config_dir(str(SCRIPT.parent / "config"), version_base="1.3"):
        cfg = compose("rloo_sync", [*overrides, f"output_dir={output}"])
    module.main(cfg)
