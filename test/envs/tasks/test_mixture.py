"""Mixtures: rows with their task, rewards and metrics by task, draws by weight."""

from __future__ import annotations

from collections import Counter

import pytest

from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import keys, load_prompts
from torchrl_rloo.diagnostics import completion_metrics
from torchrl_rloo.embedded import build_model, resolve_task
from torchrl_rloo.embedded.resolve import ADDITION, CALCULATOR
from torchrl_rloo.envs.tasks.mixture import Mixture, mix_prompts
from torchrl_rloo.envs.tasks.registry import TASKS
from torchrl_rloo.modules import TransformersWrapper
from torchrl_rloo.rewards.protocol import RewardBatch, call_reward

PARTS = [ADDITION, TASKS["countdown"], TASKS["gsm8k"]]


def test_rows_know_their_task_and_have_the_columns_of_all(tokenizer):
    mixture = Mixture(PARTS, options={"countdown": {"source": "embedded"}, "addition": {"limit": 50}})
    train, held_out = mixture.load("embedded", eval_size=30, tokenizer=tokenizer)
    assert train.columns == ("task", "answer", "nums", "target")
    assert Counter(row["task"] for row in train) == {"addition": 50, "countdown": 512, "gsm8k": 512}
    assert Counter(row["task"] for row in held_out) == {"addition": 10, "countdown": 10, "gsm8k": 10}
    for row in train:
        assert (row["answer"] is None) == (row["task"] == "countdown") != (row["nums"] is None)


def test_each_task_is_rewarded_and_judged_by_its_own():
    mixture = Mixture(PARTS)
    functions = mixture.make_rewards()
    assert [f.__name__ for f in functions] == ["addition_boxed_accuracy", "countdown_countdown", "gsm8k_numeric_match"]
    columns = {
        "task": ["addition", "countdown", "gsm8k", "gsm8k"],
        "answer": ["5", None, "1000", "7"],
        "nums": [None, [2, 3], None, None],
        "target": [None, 5, None, None],
    }
    texts = [r"\boxed{5}", "<answer>3+3</answer>", r"\boxed{1,000}", r"\boxed{8}"]
    batch = RewardBatch(["?"] * 4, texts, [[1]] * 4, columns)
    assert [call_reward(f, batch).scores for f in functions] == [
        [1.0, None, None, None],
        [None, 0.1, None, None],
        [None, None, 1.0, 0.0],
    ]
    assert call_reward(mixture.make_scorer(), batch).scores == [1.0, 0.0, 1.0, 0.0]


def test_draws_keep_to_the_weights_and_metrics_are_by_task(tokenizer):
    mixture = resolve_task("mixture", {"addition": 2, "countdown": {"weight": 1}, "gsm8k": {"weight": 1}})
    train, _ = mixture.load("embedded", eval_size=3, tokenizer=tokenizer)
    policy = TransformersWrapper(
        build_model(tokenizer, seed=0), tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 3, "seed": 0}
    )
    env = mixture.env(train, tokenizer, prompts_per_batch=8, num_generations=2)
    rows = LLMCollector(env, policy).collect()
    assert Counter(row[keys.TASK] for row in rows.unbind(0)) == {"addition": 8, "countdown": 4, "gsm8k": 4}
    metrics = completion_metrics(rows, env.reward_transform.names, env.reward_transform.weights)
    assert metrics["tasks/addition/share"] == 0.5 and metrics["tasks/gsm8k/share"] == 0.25
    for task in ("addition", "countdown", "gsm8k"):
        mine = [row for row in rows.unbind(0) if row[keys.TASK] == task]
        assert metrics[f"tasks/{task}/reward"] == pytest.approx(sum(float(r[keys.REWARD]) for r in mine) / len(mine))
        assert metrics[f"tasks/{task}/mean_length"] == sum(int(r[keys.ACTION_MASK].sum()) for r in mine) / len(mine)
    assert not rows[keys.REWARD].isnan().any() and rows[keys.REWARDS].isnan().sum(-1).eq(2).all()
    assert Mixture(PARTS).make_sampler(train) is None  # without weights: shuffled epochs over all


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Mixture([ADDITION]), "at least two tasks"),
        (lambda: Mixture([ADDITION, ADDITION]), "with different names"),
        (lambda: Mixture([ADDITION, CALCULATOR]), r"multi-turn tasks \['calculator'\] cannot be combined"),
        (lambda: Mixture(PARTS, [1, 2]), r"weights=\[1, 2\] must be one positive number for each"),
        (lambda: Mixture(PARTS, [1, 2, 0]), "positive number"),
        (lambda: Mixture(PARTS, options={"math": {}}), r"options for unknown tasks \['math'\]"),
        (lambda: Mixture(PARTS).load("x.jsonl"), "source='x.jsonl' .* set it in each task's options"),
        (
            lambda: Mixture(PARTS).load("embedded", eval_source="x.jsonl"),
            "eval_source='x.jsonl' .* set it in each task's options",
        ),
        (lambda: Mixture(PARTS).load_held_out("x.jsonl"), "'x.jsonl' .* set one per task"),
        (lambda: resolve_task("mixture"), "with mixture=None"),
        (lambda: resolve_task("gsm8k", {"addition": 1, "gsm8k": 1}), "set both name='mixture'"),
    ],
)
def test_what_is_no_mixture(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_datasets_that_do_not_mix():
    text, chat = load_prompts([{"prompt": "a"}]), load_prompts([{"prompt": "a"}], chat=True)
    with pytest.raises(ValueError, match="messages in some datasets and text in others"):
        mix_prompts({"a": text, "b": chat})
    with pytest.raises(ValueError, match="dataset 'b' has a column 'task'"):
        mix_prompts({"a": text, "b": load_prompts([{"prompt": "a", "task": "x"}])})
