"""Recipe on a local Ray cluster: two ranks train on rows that they fetch, also after a kill; refused settings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.processes import children, process_state, wait_until_gone
from support.recipes import load_recipe, settings
from support.waiting import wait_until
from torchrl_rloo.collectors import check_audit
from torchrl_rloo.ray.engine import _check_resources
from torchrl_rloo.runtime.ranks import Ranks

pytest.importorskip("ray")
pytestmark = pytest.mark.xdist_group("ray")

STEPS, PROMPTS = 4, 4
RAY = "inference=ray_transformers"
TINY = [
    f"plan.steps={STEPS}",
    f"plan.prompts_per_step={PROMPTS}",
    "plan.num_generations=4",
    "generate.max_new_tokens=12",
    "data.limit=64",
    "data.eval_size=8",
    "eval.every=0",
    "log.loggers=[]",
    "ray.num_workers=1",
    "inference.parity_every=1",
    "train.rank_timeout=120",
]


def test_killed_ranks_resume_and_train_on_rows_that_they_fetch(warm_model, own: Path, tmp_path: Path):
    command = [sys.executable, "-m", "torchrl_rloo.cli.main", "run", "--ranks", "2", "rloo", RAY, *TINY]
    command += ["train.parallel=fsdp", f"model.name={warm_model()}", f"output_dir={tmp_path}", "checkpoint.every=1"]
    command += ["reward.functions=[own_rewards.distinct]"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(own), *sys.path]))}
    # Both ranks stop before their third optimizer step, then they are killed with the cluster of rank 0
    with subprocess.Popen(command, env=environment | {"HOLD": "train:3"}, cwd=tmp_path) as process:
        try:
            ranks = wait_until(lambda: _stopped(process), 400, "the third optimizer step")
        finally:
            process.kill()
    wait_until_gone(ranks)
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, cwd=tmp_path)
    assert result.returncode == 0, result.stderr[-4000:]
    assert "resumed after step 2" in result.stdout
    # Every group was trained on once, and tokens beyond the bound were masked
    audit = check_audit(tmp_path / "ledger.jsonl")
    assert {*range(STEPS * PROMPTS)} <= audit.acknowledged | audit.open and audit.restores == 1
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "staleness" in line]
    assert steps[0]["parity/mean"] < 1e-5  # all rows of the first step have the current weights
    assert len(steps) == STEPS and all(line["staleness"] >= 0 for line in steps)
    assert all(line["staleness"] <= 2 or line["count/staleness/masked_rows"] for line in steps)
    assert any(line["staleness"] > 0 for line in steps)  # sampling did not wait for training
    # Each rank holds a shard of the weights
    checksums = result.stdout.partition("checksums of the ranks' weights: ")[2].splitlines()[0].split(", ")
    assert len(checksums) == 2
    assert (tmp_path / "model" / "model.safetensors").is_file()


def _stopped(process: subprocess.Popen) -> list[int]:
    """Return the processes of both ranks, if they have stopped themselves."""
    assert process.poll() is None, "the ranks ended before the third step"
    found = [pid for pid in children(process.pid) if process_state(pid) == "T"]
    return found if len(found) == 2 else []


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("curriculum.refill={}", "curriculum.refill needs all rows on rank 0"),
        ("rollouts.path=a", "rollouts.path=a needs the rows on rank 0"),
        ("inference.sleep=true", "inference.sleep=True has no effect on a cluster"),
        ("collector.max_batch_size=4", "collector.max_batch_size=4 has no effect on a cluster"),
        ("ray.num_workers=0", "ray.num_workers=0 must be at least 1"),
        ("ray={address:auto,num_cpus:4}", "ray.num_cpus=4 is of a local cluster"),
        (
            "train={parallel:fsdp,tensor_parallel:2,packing:none}",
            "train.tensor_parallel=2 cannot be combined with rows",
        ),
    ],
)
def test_settings_without_effect_are_refused(override, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        settings("rloo", RAY, *override.split())


@pytest.mark.parametrize("more", [[], ["inference=vllm"]])
def test_settings_of_a_cluster_require_its_engines(more):
    with pytest.raises(ValueError, match="ray.num_workers=3 has no effect without engines on a cluster"):
        settings("rloo", *more, "ray.num_workers=3")


def test_engines_of_a_cluster_sample_ahead_unless_told_otherwise():
    assert settings("rloo").collector.max_staleness is None
    assert settings("rloo", RAY).collector.max_staleness == 2
    assert settings("rloo", RAY, "collector.max_staleness=0").collector.max_staleness == 0


def test_a_process_of_a_job_joins_its_cluster(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert settings("rloo", RAY).ray.local(engines=2) == {}
    assert settings("rloo", RAY, "ray.num_cpus=4").ray.local(engines=2)["num_cpus"] == 4  # the session refuses it


def test_credit_for_each_token_needs_the_rows_of_all_ranks(warm_model, tmp_path: Path):
    ours = [f"model.name={warm_model()}", "advantage.credit=turn", f"output_dir={tmp_path}", "ray.address=unused:1"]
    cfg = settings("rloo", RAY, *TINY, *ours)
    with pytest.raises(ValueError, match="credit"):
        load_recipe("rloo").train(cfg, Ranks.single())


def test_settings_of_engines_on_gpus_fit_together():
    sizes = ["inference.engine.num_gpus=2", "inference.engine.make_engine.tensor_parallel_size=2"]
    place = ["inference.engine.resources={engine:1}", "ray.worker_options={resources:{worker:1}}"]
    cfg = settings("rloo", "inference=ray_vllm_gpu", "inference.replicas=4", "ray.address=auto", *sizes, *place)
    engine = dict(cfg.inference.engine)
    made = cfg.inference.arguments
    assert made["tensor_parallel_size"] == 2 and made["dtype"] == "bfloat16"
    _check_resources(1, engine["num_gpus"], made)  # refuses GPUs that do not fit
    assert cfg.inference.updater["transport"]["_target_"].endswith(".VLLMNCCL")
    assert cfg.ray.local(cfg.inference.replicas) == {}
