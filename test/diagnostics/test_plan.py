"""Plan of a run: its arithmetic and its errors."""

from __future__ import annotations

import pytest

from torchrl_rloo.diagnostics import TrainingPlan

GOOD = dict(
    steps=10,
    prompts_per_step=6,
    num_generations=4,
    minibatches=2,
    epochs_per_batch=3,
    micro_batch_size=None,
    train_prompts=30,
    eval_prompts=5,
    max_prompt_tokens=20,
    max_new_tokens=16,
    context_length=64,
)


def test_arithmetic():
    plan = TrainingPlan(**GOOD)
    assert (plan.rows_per_step, plan.optimizer_steps) == (24, 60)
    text = str(plan)
    for said in (
        "10 steps of 6 prompts x 4 completions = 24 rows",
        "60 optimizer steps",
        "2.00 epochs",
        "3,840 action",
    ):
        assert said in text
    assert "first of each 6 on-policy" in text
    assert "all on-policy" in str(TrainingPlan(**(GOOD | dict(minibatches=1, epochs_per_batch=1))))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(steps=0), "steps=0 must be at least 1"),
        (dict(minibatches=5), "minibatches=5 must divide the rows per step, 6 prompts x 4 completions = 24"),
        (dict(num_generations=0), "num_generations=0 must be at least 1"),
        (dict(micro_batch_size=0), "micro_batch_size=0 must be null or at least 1"),
        (dict(train_prompts=5), "prompts_per_step=6 exceeds the 5 training prompts"),
        (dict(max_turns=3), "20 tokens and the policy may add 48; the sum of 68 exceeds the model's context of 64"),
    ],
)
def test_refusals(change, message):
    with pytest.raises(ValueError) as raised:
        TrainingPlan(**(GOOD | change))
    assert message in str(raised.value)
    if "max_turns" in change:
        TrainingPlan(**(GOOD | change | dict(context_length=None)))
