"""Resolution of embedded names."""

from __future__ import annotations

import pytest

from torchrl_rloo.embedded import addition_prompts, resolve_model, resolve_task
from torchrl_rloo.embedded import resolve as resolve_module
from torchrl_rloo.embedded.resolve import ADDITION, CALCULATOR, EMBEDDED_TASKS, GUESSING
from torchrl_rloo.envs.text.transform import TextEnvTransform
from torchrl_rloo.envs.transforms import ToolTransform
from torchrl_rloo.rewards import boxed_accuracy


def test_other_models_stay_as_they_are():
    assert resolve_model("some/model", seed=0) == "some/model"


def test_the_embedded_model_is_warmed_up_on_its_task(monkeypatch):
    asked = []
    monkeypatch.setattr(resolve_module, "warm_start", lambda seed, task, log=None: asked.append((seed, task)) or "path")
    assert resolve_model("embedded", seed=3) == "path"
    for task in ("calculator", "guessing", "gsm8k", "mixture"):
        resolve_model("embedded", seed=3, task=task)
    assert [task for _, task in asked] == ["addition", "calculator", "guessing", "addition", "addition"]
    assert {seed for seed, _ in asked} == {3}


def test_addition_is_the_default_task():
    task = resolve_task()
    assert task is ADDITION is resolve_task("addition")
    train, held_out = task.load(eval_size=10, seed=3)
    assert train.rows == addition_prompts("train") and held_out.rows == addition_prompts("test", size=10)
    assert task.load("embedded", eval_size=10)[1].rows == held_out.rows


def test_the_tasks_of_several_turns():
    assert resolve_task("calculator") is CALCULATOR and resolve_task("guessing") is GUESSING
    assert [task.name for task in EMBEDDED_TASKS.values()] == list(EMBEDDED_TASKS)
    for task, kind, limits in ((CALCULATOR, ToolTransform, {"max_turns": 2}), (GUESSING, TextEnvTransform, {})):
        train, held_out = task.load(eval_size=20, limit=50)
        assert len(held_out) == 20 < len(train)
        assert task.load("embedded", eval_size=20, seed=3, limit=50)[1].rows == held_out.rows
        first, second = task.make_transforms(), task.make_transforms()
        assert [type(t) for t in first] == [kind] and first[0] is not second[0]
        assert task.limits == limits
    assert CALCULATOR.make_rewards() == [boxed_accuracy] == [CALCULATOR.make_scorer()]
    assert GUESSING.make_rewards() == [] and GUESSING.make_scorer() is None
    assert ADDITION.make_transforms() == [] and not ADDITION.limits


def test_standard_tasks_are_found_by_name():
    assert resolve_task("gsm8k").name == "gsm8k"
    with pytest.raises(ValueError, match="task='gsm9k' is unknown .did you mean 'gsm8k'"):
        resolve_task("gsm9k")
    with pytest.raises(ValueError, match="did you mean 'addition'"):
        resolve_task("adition")


def test_a_task_without_a_weight_is_not_in_the_mixture():
    assert resolve_task("mixture", {"addition": 3, "countdown": None, "math": {"weight": 1}}).weights == [3, 1]
