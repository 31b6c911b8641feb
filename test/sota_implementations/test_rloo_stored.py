"""Rows of a run as files: kept over a resume, collected alone, trained on alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.recipes import run_recipe_here, settings
from support.runs import read_jsonl
from torchrl_rloo.diagnostics import Rescorer, rescore
from torchrl_rloo.replay import RolloutFiles

STEPS = 4


@pytest.fixture(scope="module")
def overrides(warm_model) -> list[str]:
    """Settings of a short run with a separate sampler, refilled batches, a KL, and several minibatches."""
    return [
        f"model.name={warm_model()}",
        f"plan.steps={STEPS}",
        "plan.prompts_per_step=4",
        "plan.num_generations=4",
        "plan.minibatches=2",
        "generate.max_new_tokens=12",
        "sampler.share_weights=false",
        "sampler.sync_every=2",
        "curriculum.refill={max_batches: 2}",
        "kl.coeff=0.01",
        "data.limit=64",
        "data.eval_size=8",
        "eval.every=0",
        "eval.scorer=own_rewards.score",
        "reward.functions=[own_rewards.coin]",
        "checkpoint.every=2",
        "log.loggers=[]",
        "log.samples=0",
    ]


@pytest.fixture(scope="module")
def kept(overrides, own, tmp_path_factory) -> Path:
    """Output of a run that kept its rows, was stopped after step 3, and went on from the checkpoint of step 2."""
    output = tmp_path_factory.mktemp("kept")
    more = [f"rollouts.path={output / 'rows'}", "checkpoint.keep=3", f"output_dir={output}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(own)
        run_recipe_here("rloo", *overrides, *more, "stop_after=3")
        assert sorted({file.step for file in RolloutFiles(output / "rows").files()}) == [1, 2, 3]
        run_recipe_here("rloo", *overrides, *more, "resume=2")
    return output


def weights(output: Path) -> bytes:
    return (output / "model" / "model.safetensors").read_bytes()


def losses(output: Path) -> list[tuple]:
    names = ("step", "reward", "loss", "grad_norm", "kl", "staleness", "num_tokens")
    return [tuple(line.get(name) for name in names) for line in read_jsonl(output / "metrics.jsonl")]


def test_training_on_the_rows_of_a_run_gives_its_weights(overrides, kept, importable, tmp_path):
    files = RolloutFiles(kept / "rows").files()
    groups = [group.group_id for file in files for group in file.groups]
    assert len(groups) == len(set(groups)) and {file.step for file in files} == {1, 2, 3, 4}
    more = [f"rollouts.source={kept / 'rows'}", f"output_dir={tmp_path}"]
    run_recipe_here("rloo", *overrides, *more, "stop_after=1")
    run_recipe_here("rloo", *overrides, *more)  # resumes, with the groups that are left
    assert weights(tmp_path) == weights(kept)
    assert losses(tmp_path) == losses(kept)


def test_rows_are_collected_alone_and_trained_on_later(overrides, importable, tmp_path):
    rows, collected, trained = (tmp_path / name for name in ("rows", "collected", "trained"))
    few = [*overrides, "plan.steps=2", "curriculum.refill=null", "kl.coeff=0"]
    run_recipe_here("rloo", *few, f"rollouts.path={rows}", "rollouts.train=false", f"output_dir={collected}")
    metrics = read_jsonl(collected / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [1, 2]
    assert not any({"loss", "grad_norm", "eval/greedy"} & line.keys() for line in metrics)
    assert not (collected / "model").exists() and (collected / "report.html").is_file()
    assert metrics[-1]["count/ledger/drawn"] == 8
    # Rows without the reference's log-probs get them when a run with a KL trains on them
    more = ["kl.coeff=0.01", f"rollouts.source={rows}", f"output_dir={trained}", "sampler.sync_every=1"]
    more += ["collector.max_staleness=1", "sampler.share_weights=true"]
    run_recipe_here("rloo", *few, *more)
    metrics = read_jsonl(trained / "metrics.jsonl")
    assert "loss" in metrics[-1] and metrics[-1]["kl"] == pytest.approx(0.0, abs=1e-4)
    assert metrics[-1]["staleness"] == 1 and "count/staleness/masked_rows" not in metrics[-1]
    with pytest.raises(ValueError, match="has 8 groups, but plan.steps=3 .* takes 12; set plan.steps=2"):
        run_recipe_here("rloo", *few, "plan.steps=3", f"rollouts.source={rows}", f"output_dir={tmp_path / 'other'}")
    with pytest.raises(ValueError, match=r"has rewards of \['coin'\], but the run has \['distinct'\]"):
        others = ["reward.functions=[own_rewards.distinct]", f"rollouts.source={rows}"]
        run_recipe_here("rloo", *few, *others, f"output_dir={tmp_path / 'other'}")
    with pytest.raises(ValueError, match="has rows of another run"):
        run_recipe_here("rloo", *few, f"rollouts.path={rows}", f"output_dir={tmp_path / 'other'}")
    # Rescored rows train with the new rewards
    written = tmp_path / "distinct"
    rescore(RolloutFiles(rows), Rescorer("own_rewards.distinct"), output=written)
    others = ["reward.functions=[own_rewards.distinct]", f"rollouts.source={written}", f"output_dir={tmp_path / 'new'}"]
    run_recipe_here("rloo", *few, *others)
    assert "rewards/distinct/mean" in read_jsonl(tmp_path / "new" / "metrics.jsonl")[-1]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollouts.max_gb=1"], "rollouts.max_gb=1.0 has no effect without rollouts.path"),
        (["rollouts.path=a", "rollouts.max_gb=0"], "rollouts.max_gb=0.0 must be above 0"),
        (["rollouts.train=false"], "rollouts.train=false requires rollouts.path"),
        (["rollouts.path=a", "rollouts.source=b"], "rollouts.path=a would store rows of rollouts.source=b again"),
        (
            ["rollouts.source=a", "collector.min_members=2"],
            "collector.min_members=2 has no effect",
        ),
        (["rollouts.source=a", "collector.on_stale=wait"], "set mask or baseline"),
        (["rollouts.source=a", "curriculum.rerolls={}"], "curriculum.rerolls guides sampling and has no effect"),
        (["rollouts.source=a", "reward.shaping=[{_target_: x}]"], "reward.shaping has no effect"),
        (["stop_after=0"], "stop_after=0 must be at least 1"),
    ],
)
def test_settings_without_effect_are_refused(overrides, message):
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        settings("rloo", *overrides)
