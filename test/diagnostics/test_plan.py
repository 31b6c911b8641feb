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
        (dict(steps=0), "steps=0 must be an integer of at least 1"),
        (dict(minibatches=5), "minibatches=5 must divide the rows per step, 6 prompts x 4 completions = 24"),
        (dict(num_generations=0), "num_generations=0 must be an integer of at least 1"),
        (dict(micro_batch_size=0), "micro_batch_size=0 must be null or an integer of at least 1"),
        (dict(train_prompts=5), "prompts_per_step=6 exceeds the 5 training prompts"),
        (dict(max_tokens=20), "max_tokens=20 leaves no token for the policy after the longest prompt"),
        (dict(max_tokens=1, max_turns=None), "max_tokens=1 leaves no token for the policy"),
        (dict(max_turns=3), "20 tokens and the policy may add 48; the sum of 68 exceeds the model's context of 64"),
    ],
)
def test_refusals(change, message):
    with pytest.raises(ValueError) as raised:
        TrainingPlan(**(GOOD | change))
    assert message in str(raised.value)
    if change == dict(max_turns=3):
        TrainingPlan(**(GOOD | change | dict(context_length=None)))


ONE_ROW = GOOD | dict(steps=1, prompts_per_step=1, num_generations=1, minibatches=1, epochs_per_batch=1)


@pytest.mark.parametrize("context", [24, None])
@pytest.mark.parametrize("max_tokens", [None, 5, 9, 12, 18, 30])
@pytest.mark.parametrize("max_turns", [None, 1, 2, 5])
def test_bounds_equal_those_of_played_conversations(max_turns, max_tokens, context):
    """The bounds are those of conversations of every prompt's length and every feedback's, without an environment."""
    longest, new, feedbacks = 4, 3, range(3)
    limits = dict(max_prompt_tokens=longest, max_new_tokens=new, context_length=context)
    plan = TrainingPlan(**(ONE_ROW | limits | dict(max_turns=max_turns, max_tokens=max_tokens)))
    room = min((limit for limit in (max_tokens, context) if limit is not None), default=None)
    if max_turns is None and room is None:
        assert plan.max_action_tokens is None and "any number of action tokens" in str(plan)
        return
    played = []
    for prompt in range(1, longest + 1):
        for feedback in feedbacks:
            length, actions, turns = prompt, 0, 0
            while turns != max_turns and (room is None or length < room):
                turn = new if room is None else min(new, room - length)
                length, actions, turns = length + turn + feedback, actions + turn, turns + 1
            played.append((min(length, room or length), actions))
    assert plan.max_action_tokens == max(actions for _, actions in played)
    assert f"at most {plan.max_action_tokens} action tokens" in str(plan)
    if max_turns is not None:
        without_feedback = min(longest + new * max_turns, room or 99)
        assert plan.longest_row == without_feedback


def test_a_limit_of_tokens_makes_a_plan_fit_the_context():
    tight = dict(max_prompt_tokens=56, max_new_tokens=30, context_length=66)
    with pytest.raises(ValueError, match="the sum of 86 exceeds the model's context of 66.*set max_tokens=66"):
        TrainingPlan(**(GOOD | tight))
    assert TrainingPlan(**(GOOD | tight | dict(max_tokens=66))).longest_row == 66


def test_sizes_of_other_types_are_refused_by_name():
    for name in GOOD:
        for value in (0, -1, 1.5, float("nan"), True, "8", None, [1]):
            allowed = {"micro_batch_size": None, "context_length": None, "eval_prompts": 0}
            if name in allowed and type(value) is type(allowed[name]) and value == allowed[name]:
                continue
            with pytest.raises(ValueError, match=f"{name}=.* must be .*integer of at least"):
                TrainingPlan(**(GOOD | {name: value}))
