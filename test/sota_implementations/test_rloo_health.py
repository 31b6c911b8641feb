"""Health rules in the recipe: a run that stops, and one that goes back to a checkpoint with a smaller learning rate."""

from __future__ import annotations

import pytest

from support.histories import constant_rule
from support.recipes import run_recipe_here
from support.runs import check_metric_names, read_jsonl
from torchrl_rloo.run.health_log import UnhealthyRunError

RATE = constant_rule("rate", "learning_rate", 2e-4, severity="stop")


@pytest.fixture
def overrides(warm_model, tmp_path) -> list[str]:
    """Settings of a short run at a constant rate of 3e-4, above the limit of the rule."""
    return [
        f"model.name={warm_model()}",
        f"output_dir={tmp_path}",
        "health.rules=[test_rloo_health.RATE]",
        "plan.steps=5",
        "plan.prompts_per_step=2",
        "plan.num_generations=2",
        "generate.max_new_tokens=4",
        "schedule.name=constant",
        "schedule.warmup_steps=3",
        "data.limit=16",
        "data.eval_size=4",
        "eval.every=0",
        "checkpoint.every=1",
        "checkpoint.keep=5",
        "log.loggers=[]",
        "log.samples=0",
    ]


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """Let settings name this module."""
    import sys

    monkeypatch.setitem(sys.modules, "test_rloo_health", sys.modules[__name__])


def test_a_rule_stops_the_run_and_a_resumed_one_may_ignore_it(overrides, tmp_path):
    with pytest.raises(UnhealthyRunError, match="stopped at step 2 by health rule stop, rate: It is high"):
        run_recipe_here("rloo", *overrides, "health.stop_on=[rate]")
    assert [path.stem for path in (tmp_path / "checkpoints").glob("*.pt")] == ["step_00000001"]
    run_recipe_here("rloo", *overrides, "health.ignore=[rate]")
    assert [line["step"] for line in read_jsonl(tmp_path / "metrics.jsonl")] == list(range(6))
    check_metric_names(tmp_path)


def test_a_rule_takes_the_run_back_and_it_finishes(overrides, tmp_path):
    """The rate rises to 3e-4 at step 3. Half of it stays below the limit."""
    run_recipe_here("rloo", *overrides, "health.rollback={on: [rate], lr_factor: 0.5}")
    fired, back = read_jsonl(tmp_path / "health.jsonl")[:2]
    assert (fired["rule"], fired["step"]) == ("rate", 2)
    assert (back["rule"], back["evidence"]) == (
        "rollback",
        {"to_step": 1, "learning_rate_factor": 0.5, "rollbacks": 1},
    )
    rates = {line["step"]: line["learning_rate"] for line in read_jsonl(tmp_path / "metrics.jsonl") if line["step"]}
    assert rates == pytest.approx({1: 2e-4, 2: 1.5e-4, 3: 1.5e-4, 4: 1.5e-4, 5: 1.5e-4})
    assert (tmp_path / "model").is_dir()
