"""Option --dry-run: one step of each recipe without the model's weights, and the faults that it finds."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from support.ray_cluster import RAY_GROUP
from support.recipes import load_recipe, settings
from torchrl_rloo.cli import recipe
from torchrl_rloo.cli.dry_run import COVERED, NOT_COVERED, dry_run
from torchrl_rloo.cli.main import main

OWN_REWARDS = """
def broken(completions, **columns):
    raise RuntimeError("always")
"""


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Working directory with a user's module."""
    (tmp_path / "own_dry.py").write_text(OWN_REWARDS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    token = recipe.PROGRAM.set(None)
    yield tmp_path
    recipe.PROGRAM.reset(token)


@pytest.fixture
def weightless(checkpoint: Path, folder: Path) -> str:
    """Folder of a model whose weights are missing."""
    target = folder / "weightless"
    target.mkdir()
    for file in checkpoint.iterdir():
        if file.suffix in (".json", ".jinja", ".model"):
            (target / file.name).write_bytes(file.read_bytes())
    assert not list(target.glob("*.safetensors"))
    return str(target)


def run_dry(capsys: pytest.CaptureFixture, name: str, *overrides: str) -> str:
    """Run a recipe's dry run in this process, and return its summary."""
    dry_run(load_recipe(name).main, settings(name, *overrides[:1], "--dry-run", *overrides[1:]))
    printed = capsys.readouterr().out
    assert printed.endswith(f"{COVERED}\n{NOT_COVERED}\n")
    (summary,) = re.findall("^dry run: .*", printed, re.M)
    assert sorted(path.name for path in Path().iterdir() if path.name != "__pycache__") in (
        ["own_dry.py"],
        ["own_dry.py", "weightless"],
    )  # nothing is written here
    return summary


SETTINGS = {
    "the built-in task": ("rloo", ""),
    "tools": ("rloo_tools", "plan.minibatches=4 algorithm=dapo curriculum.refill={}"),
    "an adapter on GPUs": (
        "rloo",
        "algorithm=grpo kl.coeff=0.05 model.device=cuda inference=vllm_lora lora={r:4,target_modules:[c_attn]} "
        "train.offload=[activations] optimizer.name=muon schedule.warmup_steps=30 train.packing=shared_prefix "
        "sampler.share_weights=false plan.prompts_per_step=3 plan.num_generations=5 plan.minibatches=3",
    ),
}


@pytest.mark.parametrize(("name", "overrides"), SETTINGS.values(), ids=SETTINGS)
def test_one_step_runs_without_weights(capsys, weightless, name, overrides):
    summary = run_dry(capsys, name, f"model.name={weightless}", *overrides.split())
    assert re.search(r"1 step, mean reward 0\.\d+, gradient norm [\d.]+, checkpoint step_00000001", summary)


def test_a_task_without_known_answers_has_no_gradient(capsys):
    summary = run_dry(capsys, "rloo", "task=countdown", "data.source=embedded", "plan.num_generations=2")
    assert "mean reward 0, no gradient (all rewards were equal)" in summary


def test_pictures_reach_the_scripted_engine_and_its_probes(capsys):
    assert "1 step, mean reward 0" in run_dry(capsys, "rloo", "task=shapes", "plan.num_generations=2")


@pytest.mark.xdist_group(RAY_GROUP)
def test_the_asynchronous_recipe_runs_its_workers_and_engines(capsys, ray_cluster):
    summary = run_dry(capsys, "rloo", "inference=ray_transformers", "collector.max_staleness=1", "ray.num_workers=1")
    assert re.search(r"mean reward 0\.\d+, gradient norm", summary)


def test_a_broken_scorer_fails_the_dry_run(capsys):
    own = ("task=custom", "data.source=train.jsonl", "reward.functions=[own_dry.broken]")
    Path("train.jsonl").write_text("".join(f'{{"prompt": "{i}?", "answer": "{i}"}}\n' for i in range(20)))
    with pytest.raises(RuntimeError, match="scorer broken failed on all"):
        run_dry(capsys, "rloo", *own)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["reward_model", "--dry-run"], "--dry-run requires a recipe that trains on groups: rloo"),
        (["rloo", "--dry-run", "model.name=./nowhere"], "nowhere"),
    ],
)
def test_what_cannot_run_is_refused_in_a_line(capsys, argv, message):
    with pytest.raises(SystemExit) as ended:
        main(["run", *argv])
    captured = capsys.readouterr()
    assert ended.value.code == 1 and message in captured.err and "Traceback" not in captured.err
    assert not Path("outputs").exists()


def test_several_ranks_are_refused(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="--dry-run runs in one process; start it without --ranks"):
        settings("rloo", "--dry-run", "train.parallel=ddp")


def test_help_says_what_it_covers(capsys):
    with pytest.raises(SystemExit):
        settings("rloo", "--help-all")
    printed = capsys.readouterr().out
    assert "[--dry-run]" in printed and COVERED in printed and NOT_COVERED in printed
    with pytest.raises(SystemExit):
        settings("reward_model", "--help")
    assert "--dry-run" not in capsys.readouterr().out
