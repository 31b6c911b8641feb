"""Task: sources of its prompts, and the environment that it builds."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import keys
from torchrl_rloo.data.stop_reasons import stop_reason
from torchrl_rloo.embedded import build_tokenizer, resolve_task
from torchrl_rloo.engines.scripted import ScriptedEngine, ScriptedTurn
from torchrl_rloo.envs.tasks import Task, load_task
from torchrl_rloo.envs.transforms import FeedbackTransform
from torchrl_rloo.evaluation import Evaluation
from torchrl_rloo.modules import vLLMWrapper

TASK = Task(
    name="echo",
    synthetic_rows=lambda split, size=None, seed=0: [
        {"prompt": f"{split} {i}", "answer": str(i)} for i in range(size or 8)
    ],
    rewards=("boxed_accuracy",),
    scorer="boxed_accuracy",
)


def write(path, names):
    path.write_text("".join(json.dumps({"prompt": n, "answer": n}) + "\n" for n in names))
    return str(path)


def test_generated_rows():
    train, held_out = TASK.load(eval_size=3)
    assert (len(train), len(held_out)) == (8, 3)
    assert not {str(r["query"]) for r in train} & {str(r["query"]) for r in held_out}
    with pytest.raises(ValueError, match="has its own held-out prompts"):
        TASK.load("embedded", eval_source="x.jsonl")


def test_held_out_prompts_are_split_off_or_come_from_elsewhere(tmp_path):
    source = write(tmp_path / "train.jsonl", "abcdefgh")
    train, held_out = TASK.load(source, eval_size=3, seed=1)
    assert (len(train), len(held_out)) == (5, 3)
    other = write(tmp_path / "test.jsonl", "xyz")
    train, held_out = TASK.load(source, eval_source=other, eval_size=2, limit=6)
    assert (len(train), len(held_out)) == (6, 2)


def test_of_many_held_out_prompts_a_choice_from_all_is_taken():
    """Choose at random, since a test split may be sorted by subject, as MMLU's is."""
    ordered = [{"prompt": f"{subject} {i}", "answer": "1"} for subject in "abcd" for i in range(100)]
    held_out = TASK.load_held_out(ordered, eval_size=40)
    assert {str(r["query"])[0] for r in held_out} == set("abcd") and len({r["query"] for r in held_out}) == 40
    assert (
        TASK.load([{"prompt": "p", "answer": "1"}], eval_source=ordered, eval_size=40, seed=7)[1].rows == held_out.rows
    )
    assert len(TASK.load_held_out(ordered[:9], eval_size=40)) == 9


def test_a_prompt_is_not_both(tmp_path, caplog):
    source, other = write(tmp_path / "train.jsonl", "abcd"), write(tmp_path / "test.jsonl", "xbyd")
    train, held_out = TASK.load(source, eval_source=other)
    assert [r["query"] for r in train] == ["a", "c"] and [r["query"] for r in held_out] == ["x", "b", "y", "d"]
    assert "2 of 4 training prompts, which are held out" in caplog.text
    with pytest.raises(ValueError, match="all 4 training prompts are held out"):
        TASK.load(source, eval_source=source)
    with pytest.raises(ValueError, match="eval_split='test' requires eval_source, which is null"):
        TASK.load(source, eval_split="test")


def test_the_published_dataset_comes_with_its_own_test_split():
    published = {
        "train": [{"prompt": f"p{i}", "answer": "1"} for i in range(4)],
        "test": [{"prompt": "t", "answer": "1"}],
    }
    task = replace(TASK, dataset={"source": published, "split": "train"}, eval_split="test")
    train, held_out = task.load(eval_size=5)
    assert [r["query"] for r in train] == ["p0", "p1", "p2", "p3"] and [r["query"] for r in held_out] == ["t"]
    own = task.load(eval_source=[{"prompt": "mine", "answer": "1"}])[1]  # not the published split
    assert [r["query"] for r in own] == ["mine"]
    assert len(task.load("embedded", eval_size=2, limit=1)[1]) == 2
    assert len(replace(task, eval_split=None).load(eval_size=1)[0]) == 3


def test_rows_out_of_format_are_named(tmp_path):
    task = replace(TASK, row_map=lambda row: {"prompt": row["question"], "answer": row["answer"]})
    with pytest.raises(ValueError, match=r"line 1 does not have the expected format: KeyError: 'question'; .*'prompt'"):
        task.load(write(tmp_path / "a.jsonl", "abc"), eval_size=1)


def make_task() -> Task:
    return replace(TASK, name="made")


def test_tasks_by_dotted_path(tmp_path, monkeypatch):
    here = __name__
    assert load_task(f"{here}.TASK") is TASK and load_task(f"{here}.make_task").name == "made"
    assert resolve_task(f"{here}.TASK") is TASK
    assert resolve_task("mixture", {f"{here}.TASK": {"weight": 2, "limit": 4}, "addition": 1}).weights == [2, 1]
    with pytest.raises(ValueError, match="has no 'TASKK' .did you mean 'TASK'"):
        load_task(f"{here}.TASKK")
    with pytest.raises(TypeError, match="must be a Task .*, got 'echo'"):
        load_task(f"{here}.NAME")


NAME = "echo"


def says_a(completions, word) -> list[float]:
    return [float("a" in str(completion)) for completion in completions]


def test_a_task_of_the_users_own(tmp_path):
    task = load_task("custom")
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps({"question": f"q{i}", "word": f"w{i}"}) + "\n" for i in range(6)))
    train, held_out = task.load(path, eval_size=2)
    assert (len(train), len(held_out), train.columns) == (4, 2, ("word",))
    assert task.make_scorer([says_a]) == {"says_a": says_a} and task.make_scorer([]) is None
    env = task.env(train, build_tokenizer(), prompts_per_batch=2, rewards=says_a)
    assert env.reset()[0][keys.QUERY][0]["role"] == "user"
    for missing, setting in (
        (task.load, "set data.source"),
        (task.make_rewards, "set reward.functions"),
        (task.make_scorer, "set eval.scorer"),
    ):
        with pytest.raises(ValueError, match=f"task='custom' has no .*; {re.escape(setting)}"):
            missing()


def test_the_environment():
    train, _ = TASK.load(eval_size=1)
    env = TASK.env(train, build_tokenizer(), prompts_per_batch=2, num_generations=3)
    assert env.reset().batch_size == (6,) and env.reward_transform.names == ["boxed_accuracy"]
    assert TASK.env(train, build_tokenizer(), prompts_per_batch=2, rewards=None).reward_transform is None


def test_the_environment_of_several_turns():
    """Build the same environment for training and evaluation, with separate transforms."""

    def ask_again(conversation, row):
        return [{"role": "user", "content": "Are you sure?"}]

    task = replace(TASK, transforms=lambda: [FeedbackTransform(ask_again)], limits={"max_turns": 2})
    assert task.make_transforms()[0] is not task.make_transforms()[0]
    tokenizer = build_tokenizer()
    train, held_out = task.load(eval_size=3, tokenizer=tokenizer)

    def turn(request, index):
        number = re.search(r"(?:train|test) (\d)", tokenizer.decode(request.prompt))[1]
        return ScriptedTurn(tokenizer(rf"\boxed{{{number}}}<|im_end|>")["input_ids"])

    with ScriptedEngine(turn) as engine:
        policy = vLLMWrapper(engine, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 9})
        env = task.env(train, tokenizer, prompts_per_batch=2)
        rows = LLMCollector(env, policy).collect()
        assert rows[keys.NUM_TURNS].tolist() == [2, 2] and [stop_reason(row) for row in rows.unbind(0)] == ["turns"] * 2
        assert rows[keys.REWARD].flatten().tolist() == [1.0, 1.0]
        env = task.env(train, tokenizer, prompts_per_batch=2, max_turns=3)
        assert LLMCollector(env, policy).collect()[keys.NUM_TURNS].tolist() == [3, 3]
        env = task.env(train, tokenizer, prompts_per_batch=2, transforms=())
        assert LLMCollector(env, policy).collect()[keys.NUM_TURNS].tolist() == [1, 1]
        evaluation = Evaluation(
            policy, held_out, task.make_scorer(), make_transforms=task.make_transforms, env_kwargs=task.limits
        )
        samples = evaluation.run().samples
        assert [s.completion.count("assistant: ") for s in samples] == [2] * 6 and all(s.truncated for s in samples)


def test_an_environment_that_rewards_needs_no_functions():
    task = replace(TASK, rewards=(), scorer=None)
    assert task.make_rewards() == [] and task.make_scorer() is None
    assert task.env(task.load(eval_size=1)[0], build_tokenizer(), prompts_per_batch=2).reward_transform is None
