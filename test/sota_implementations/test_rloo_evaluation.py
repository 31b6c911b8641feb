"""Evaluation in the recipe: several sets of held-out prompts, the training rewards, and refusals."""

from __future__ import annotations

import json

import pytest

from support.recipes import run_recipe_here, settings
from support.runs import check_metric_names, read_jsonl
from torchrl_rloo.embedded import addition_prompts


@pytest.fixture
def overrides(warm_model, tmp_path) -> list[str]:
    return [
        f"model.name={warm_model()}",
        f"output_dir={tmp_path / 'run'}",
        "plan.steps=1",
        "plan.prompts_per_step=2",
        "plan.num_generations=2",
        "generate.max_new_tokens=6",
        "kl.coeff=0.01",
        "data.limit=16",
        "data.eval_size=3",
        "check.mode=off",
        "log.loggers=[]",
    ]


def test_each_set_has_its_prompts_scorer_and_size(overrides, tmp_path, capsys):
    rows = addition_prompts("test", size=6, seed=3)
    (tmp_path / "hard.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    hard, words = (
        f"source:{tmp_path / 'hard.jsonl'},size:4,num_samples:2,ks:[2]",
        "task:countdown,source:embedded,size:2",
    )
    mine = f"task:custom,source:{tmp_path / 'hard.jsonl'},size:2,scorer:boxed_accuracy"
    sets = f"hard:{{{hard}}},words:{{{words}}},mine:{{{mine}}}"
    run_recipe_here("rloo", *overrides, f"eval.sets={{{sets}}}", "eval.rewards=true", "log.transcripts=true")
    first, last = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    for line in (first, last):
        assert {"eval/greedy", "eval/hard/greedy_low", "eval/words/sampled", "eval/mine/sampled"} <= line.keys()
        assert {"eval/hard/sampled_distinct_answers", "eval/sampled_kl", "eval/hard/sampled_kl"} <= line.keys()
        assert any(name.startswith("eval/hard/") and name.endswith("/pass@2") for name in line)
    assert first["eval/sampled_kl"] == pytest.approx(0, abs=1e-5)  # the first weights are the reference
    assert last["diversity/distinct_answers"] in (0, 0.5, 1)
    check_metric_names(tmp_path / "run")
    tables = {line["table"] for line in read_jsonl(tmp_path / "run" / "completions.jsonl")}
    assert {"held-out completions of hard", "held-out completions of words"} <= tables
    assert {"step_000001.html", "step_000001_hard.html"} <= {p.name for p in (tmp_path / "run/transcripts").iterdir()}
    report = (tmp_path / "run" / "report.html").read_text()
    assert "eval/hard/greedy" in report and "held-out completions of words" in report
    assert "held out, hard: " in capsys.readouterr().out


def test_training_does_not_depend_on_sets(overrides, tmp_path):
    run_recipe_here("rloo", *overrides)
    run_recipe_here(
        "rloo",
        *overrides,
        "eval.sets={words:{task:countdown,source:embedded,size:2}}",
        f"output_dir={tmp_path / 'other'}",
    )
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("run", "other")]
    assert weights[0] == weights[1]


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ("{tasks:{task:countdown}}", "eval.sets.tasks: the name must have"),
        ("{a/b:{task:countdown}}", "eval.sets.a/b: the name must have"),
        ("{x_low:{task:countdown}}", "eval.sets.x_low: the name must have"),
        ("{hard:{size:3}}", "set eval.sets.hard.source or eval.sets.hard.task"),
        ("{hard:{task:countdown,size:0}}", "eval.sets.hard.size=0 must be at least 1"),
        ("{hard:{task:countdown,ks:[4]}}", r"eval.sets.hard.ks=\[4\]"),
        ("{hard:{tsk:countdown}}", "unknown setting eval.sets.hard.tsk: did you mean eval.sets.hard.task"),
    ],
)
def test_wrong_sets_are_refused_before_anything_loads(sets, message):
    with pytest.raises(Exception, match=message):
        settings("rloo", f"eval.sets={sets}")


def test_a_set_of_the_users_own_task_needs_a_scorer(overrides, tmp_path):
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in addition_prompts("test", size=4)))
    sets = f"eval.sets={{mine:{{task:custom,source:{tmp_path / 'mine.jsonl'}}}}}"
    with pytest.raises(ValueError, match="eval.sets.mine: task='custom' has no default scorer; set eval.scorer=my"):
        run_recipe_here("rloo", *overrides, sets)


def test_a_set_with_the_name_of_a_scorer_is_refused(overrides):
    name = "eval.sets={boxed_accuracy:{task:countdown}}"
    with pytest.raises(ValueError, match="eval.sets.boxed_accuracy has the name of a scorer"):
        run_recipe_here("rloo", *overrides, "model.name=no/model", "eval.scorer=boxed_accuracy", name)
