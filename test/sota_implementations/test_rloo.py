"""Recipe as a user runs it: to the end, killed in any phase and resumed, stopped, with wrong settings."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from support.recipes import run_recipe_here
from support.runs import check_metric_names, read_jsonl
from torchrl_rloo.cli.main import recipe_file
from torchrl_rloo.training import make_schedule

STEPS = 9
FILES = ("metrics.jsonl", "completions.jsonl", "model/model.safetensors", "model/tokenizer.json")


@pytest.fixture(scope="module")
def overrides(warm_model) -> list[str]:
    """Settings of a short run with all stateful parts: separate sampler weights, KL, several minibatches and epochs."""
    return [
        f"model.name={warm_model()}",
        f"plan.steps={STEPS}",
        "plan.prompts_per_step=4",
        "plan.num_generations=4",
        "plan.minibatches=2",
        "plan.epochs_per_batch=2",
        "plan.micro_batch_size=6",
        "schedule.warmup_steps=8",
        "generate.max_new_tokens=12",
        "generate.top_p=0.95",
        "sampler.share_weights=false",
        "sampler.sync_every=2",
        "kl.coeff=0.01",
        "data.limit=64",
        "data.eval_size=8",
        "eval.every=4",
        "eval.scorer=own_rewards.score",
        "reward.functions=[own_rewards.distinct]",
        "checkpoint.every=3",
        "log.samples_every=5",
    ]


def results(output: Path) -> dict[str, bytes]:
    return {name: (output / name).read_bytes() for name in FILES}


@pytest.fixture(scope="module")
def finished(overrides, own, tmp_path_factory) -> Path:
    """Output of a run that was never stopped, in a separate interpreter."""
    output = tmp_path_factory.mktemp("finished")
    command = [sys.executable, str(recipe_file("rloo")), *overrides, f"output_dir={output}"]
    done = subprocess.run(command, cwd=own, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    (output / "stdout").write_text(done.stdout)
    return output


def test_closing_line_report_and_model(finished):
    stdout = (finished / "stdout").read_text()
    result = json.loads(stdout.splitlines()[-1])
    assert {"eval/greedy_before", "eval/sampled_after", "cpu_seconds"} <= result.keys()
    assert Path(result["report"]).is_file()
    assert list(finished.rglob("events.out.tfevents*"))
    model = AutoModelForCausalLM.from_pretrained(result["model"])
    assert model.num_parameters() == 152_256 and AutoTokenizer.from_pretrained(result["model"]).chat_template
    lines = read_jsonl(finished / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(STEPS + 1))
    assert lines[-1]["kl"] is not None and lines[-1]["ESS"] <= 1.0 + 1e-6
    assert [line["step"] for line in lines if "eval/greedy" in line] == [0, 4, 8, 9]
    assert f"{STEPS} steps of 4 prompts x 4 completions = 16 rows" in stdout


def test_every_metric_of_a_run_is_defined(finished):
    check_metric_names(finished)


def test_the_learning_rate_follows_its_schedule(finished):
    """The learning rate rises during the warmup, then falls to a tenth."""
    logged = [line["learning_rate"] for line in read_jsonl(finished / "metrics.jsonl")[1:]]
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=3e-4)
    schedule, expected = make_schedule(optimizer, 4 * STEPS, warmup_steps=8, final_fraction=0.1), []
    for update in range(1, 4 * STEPS + 1):  # two minibatches in each of two epochs
        optimizer.step()
        schedule.step()
        expected += [] if update % 4 else schedule.get_last_lr()
    assert logged == pytest.approx(expected)
    assert logged[0] < max(logged) > 5 * logged[-1]


def test_killed_in_any_phase_and_resumed(overrides, finished, kill, finish, tmp_path):
    """The phases are start, sampling, update, checkpoint, evaluation and saving of the model."""
    for hold in ("start:1", "rollout:2", "train:9", "save:2", "evaluation:1", "end:1"):
        kill(overrides, tmp_path, hold)
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("step_*.pt"))[-1] == f"step_{STEPS:08d}.pt"
    stdout = finish(overrides, tmp_path)
    assert f"resumed after step {STEPS}" in stdout
    assert results(tmp_path) == results(finished)


def test_sigterm_saves_and_stops_cleanly(overrides, finished, start, finish, tmp_path):
    process = start([*overrides, "checkpoint.every=0"], tmp_path, hold="train:18")
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGCONT)
    assert process.wait(120) == 0, process.stderr[-3000:]
    assert "stopped after step 5" in process.stdout
    assert [path.name for path in (tmp_path / "checkpoints").glob("step_*.pt")] == ["step_00000005.pt"]
    assert "resumed after step 5" in finish(overrides, tmp_path)
    assert results(tmp_path) == results(finished)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ("optimizer.lr=0.1", "optimizer.lr: 0.0003 -> 0.1"),
        ("reward.functions=[think_format]", "reward.functions: "),
    ],
    ids=["value", "list"],
)
def test_other_settings_do_not_resume(overrides, finished, importable, other, message):
    with pytest.raises(ValueError, match=message):
        run_recipe_here("rloo", *overrides, other, f"output_dir={finished}")


def test_starting_over_leaves_nothing_to_resume(overrides, finished, importable, tmp_path):
    shutil.copytree(finished / "checkpoints", tmp_path / "checkpoints")
    broken = ["resume=never", "eval.scorer=own_rewards.broken"]
    with pytest.raises(RuntimeError, match="scorer broken failed on all"):
        run_recipe_here("rloo", *overrides, *broken, f"output_dir={tmp_path}")
    assert not list((tmp_path / "checkpoints").glob("step_*.pt"))


def test_a_sampler_of_half_precision(overrides, importable, tmp_path):
    """The sampler's log-probs are those of rounded weights: close to the trainer's, but not equal."""
    more = [
        "plan.steps=1",
        "schedule.warmup_steps=0",
        "sampler.dtype=bfloat16",
        "sampler.sync_every=1",
        "kl.coeff=0",
        "inference.parity_every=1",
    ]
    run_recipe_here("rloo", *overrides, *more, f"output_dir={tmp_path}")
    assert 1e-5 < read_jsonl(tmp_path / "metrics.jsonl")[-1]["parity/max"] < 0.5


def test_a_policy_is_on_policy_over_a_run_of_the_defaults(warm_model, importable, tmp_path):
    """Sampler and trainer are one model, so the log-probs of a step's first pass differ only by rounding."""
    sizes = ["plan.steps=3", "plan.prompts_per_step=4", "data.limit=64", "data.eval_size=8", "inference.parity_every=1"]
    sizes.append("reward.functions=[own_rewards.distinct]")  # every step has a gradient
    run_recipe_here("rloo", f"model.name={warm_model()}", *sizes, f"output_dir={tmp_path}")
    records = read_jsonl(tmp_path / "metrics.jsonl")[1:]
    assert all(r["parity/max"] <= 2.5e-5 and r["log_ratio_max"] <= 2.5e-5 and r["staleness"] == 0 for r in records)
