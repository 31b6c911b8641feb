"""Mixtures: rows with their task, rewards and metrics by task, draws by weight."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest

from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import keys, load_prompts
from torchrl_rloo.diagnostics import completion_metrics
from torchrl_rloo.embedded import build_model, resolve_task
from torchrl_rloo.embedded.resolve import ADDITION, CALCULATOR, GUESSING
from torchrl_rloo.engines import ScriptedEngine, ScriptedTurn
from torchrl_rloo.envs.tasks.mixture import Mixture, mix_prompts
from torchrl_rloo.envs.tasks.registry import TASKS, conversation_settings
from torchrl_rloo.envs.transforms import FeedbackTransform
from torchrl_rloo.modules import TransformersWrapper, vLLMWrapper
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


def ask_twice(conversation, row):
    return [{"role": "user", "content": "1+2?"}] if len(conversation) < 4 else None


ASKED = replace(ADDITION, name="asked", transforms=lambda: [FeedbackTransform(ask_twice)], limits={"max_turns": 3})


def test_each_task_has_its_own_turns(tokenizer):
    """A tool answers the rows of one task, a function those of another, and nothing those of the third."""
    mixture = Mixture([ADDITION, CALCULATOR, ASKED])
    train, _ = mixture.load("embedded", eval_size=3, tokenizer=tokenizer)
    train = train.select([next(i for i, r in enumerate(train) if r["task"] == t.name) for t in mixture.tasks])

    def turn(request, index):
        first = "<tool>1+2" not in tokenizer.decode(list(request.prompt))
        text = "<tool>1+2</tool>" if first else r"\boxed{3}"
        return ScriptedTurn([*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id])

    env = mixture.env(train, tokenizer, prompts_per_batch=3, num_generations=1, shuffle=False, max_turns=2)
    engine = ScriptedEngine(turn)
    rows = LLMCollector(env, vLLMWrapper(engine, tokenizer=tokenizer)).collect()
    by_task = {row[keys.TASK]: row for row in rows.unbind(0)}
    messages = {task: [m["role"] for m in row[keys.COMPLETION]] for task, row in by_task.items()}
    calls = {task: int(row[keys.NUM_TOOL_CALLS]) for task, row in by_task.items()}
    assert messages["addition"] == ["assistant"] and calls["addition"] == calls["asked"] == 0
    assert messages["asked"] == ["assistant", "user", "assistant"]
    assert messages["calculator"] == ["assistant", "tool", "assistant"] and calls["calculator"] == 1
    metrics = completion_metrics(rows, env.reward_transform.names, env.reward_transform.weights)
    assert metrics["tasks/asked/mean_length"] > metrics["tasks/addition/mean_length"]
    assert (1 / 3) == pytest.approx(metrics["num_tool_calls"])


def test_parts_are_sources_of_the_user_with_their_own_rewards(tmp_path):
    for name in ("a", "b"):
        lines = [json.dumps({"prompt": f"{name}{i}?", "answer": str(i), f"only_{name}": i}) + "\n" for i in range(6)]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    own = {"task": "custom", "rewards": ["boxed_accuracy"], "eval_size": 2}
    parts = {name: {**own, "source": str(tmp_path / f"{name}.jsonl")} for name in ("a", "b")}
    mixture = resolve_task("mixture", {**parts, "sums": {"task": "addition", "weight": 2, "limit": 8}})
    train, held_out = mixture.load(chat=True)
    assert Counter(row["task"] for row in train) == {"a": 4, "b": 4, "sums": 8}
    assert Counter(row["task"] for row in held_out)["a"] == 2 and mixture.weights == [1.0, 1.0, 2]
    assert [f.__name__ for f in mixture.make_rewards()] == [f"{n}_boxed_accuracy" for n in ("a", "b", "sums")]
    batch = RewardBatch(["?"] * 2, [r"\boxed{1}"] * 2, [[1]] * 2, {"task": ["a", "b"], "answer": ["1", "2"]})
    assert call_reward(mixture.make_scorer(), batch).scores == [1.0, 0.0]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Mixture([ADDITION]), "at least two tasks"),
        (lambda: Mixture([ADDITION, ADDITION]), "with different names"),
        (lambda: Mixture([ADDITION, GUESSING]), r"tasks \['guessing'\] are rewarded by their environment"),
        (
            lambda: conversation_settings(Mixture([ADDITION, CALCULATOR, ASKED]), None, {}, 128),
            "different limits, max_turns: {'calculator': 2, 'asked': 3}; set environment.max_turns",
        ),
        (lambda: resolve_task("mixture", {"addition": 1, "own": {"task": "nothing"}}), "task='nothing' is unknown"),
        (
            lambda: resolve_task("mixture", {"addition": 1, "mine": {"task": "reasoning_gym"}}),
            r"task.mixture.mine: \['name'\] of ReasoningGym cannot be changed",
        ),
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
