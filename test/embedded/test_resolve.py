"""What the embedded names stand for."""

from __future__ import annotations

import pytest

from torchrl_rloo.embedded import ADDITION, addition_prompts, resolve_model, resolve_task


def test_other_models_stay_as_they_are():
    assert resolve_model("some/model", seed=0) == "some/model"


def test_addition_is_the_default_task():
    task = resolve_task()
    assert task is ADDITION is resolve_task("addition")
    train, held_out = task.load(eval_size=10, seed=3)
    assert train.rows == addition_prompts("train") and held_out.rows == addition_prompts("test", size=10)
    assert task.load("embedded", eval_size=10)[1].rows == held_out.rows


def test_standard_tasks_are_found_by_name():
    assert resolve_task("gsm8k").name == "gsm8k"
    with pytest.raises(ValueError, match="gsm8k"):
        resolve_task("gsm9k")
