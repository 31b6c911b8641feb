from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from tensordict import TensorDictBase

from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import keys, load_prompts, tensor_rows
from torchrl_rloo.embedded import build_tokenizer
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.envs.transforms import FeedbackTransform, RewardTransform
from torchrl_rloo.envs.transforms import reward as reward_module
from torchrl_rloo.evaluation.evaluation import completion_table
from torchrl_rloo.modules import TransformersWrapper
from torchrl_rloo.rewards.executors import ProcessExecutor
from torchrl_rloo.rewards.protocol import TrainerState
from torchrl_rloo.rewards.runner import RewardFailureError

NAN = float("nan")


def chat_prompts(n: int = 4) -> list[dict]:
    return [
        {"query": [{"role": "user", "content": f"What is {i}+{i}?"}], "answer": str(2 * i), "level": i}
        for i in range(n)
    ]


class Says:
    """Policy that says the given texts, one per row, with log-probs of -1."""

    def __init__(self, tokenizer, texts: Sequence[str]):
        self.tokenizer, self.texts, self.ids = tokenizer, texts, []

    def __call__(self, rows: TensorDictBase) -> TensorDictBase:
        for row, text in zip(rows.unbind(0), self.texts, strict=True):
            said = torch.tensor([*self.tokenizer(text)["input_ids"], self.tokenizer.eos_token_id])
            self.ids.append(said.tolist())
            before, log_probs = row[keys.ACTION_MASK], row[keys.LOG_PROBS]
            row.set(keys.TOKENS, torch.cat([row[keys.PROMPT_TOKENS], said]))
            row.set(keys.ACTION_MASK, torch.cat([before, torch.ones(len(said), dtype=torch.bool)]))
            row.set(keys.LOG_PROBS, torch.cat([log_probs, -torch.ones(len(said))]))
        return rows


def make_env(tokenizer, rewards, prompts=None, **settings) -> DatasetChatEnv:
    prompts = prompts or chat_prompts()
    dataset = load_prompts(prompts, chat=False if isinstance(prompts[0].get("query"), str) else None)
    settings.setdefault("prompts_per_batch", len(dataset))
    return DatasetChatEnv(dataset, tokenizer, rewards=rewards, shuffle=False, **settings)


def outcome(env: DatasetChatEnv, policy: Callable) -> TensorDictBase:
    return env.step(policy(env.reset()))


def rewards_of(rows: TensorDictBase) -> list[float]:
    return rows[keys.REWARD].flatten().tolist()


def constant(name: str, values: Sequence[float | None]) -> Callable:
    def function(**arguments):
        return values

    function.__name__ = name
    return function


def test_a_function_sees_messages_columns_and_prompts(tokenizer):
    seen = {}

    def spy(prompts, completions, completion_ids, **columns):
        seen.update(prompts=prompts, completions=completions, completion_ids=completion_ids, columns=columns)
        return [0.0] * len(prompts)

    policy = Says(tokenizer, ["a", "bb", r"\boxed{4}", ""])
    outcome(make_env(tokenizer, spy), policy)
    rows = chat_prompts()
    assert seen["prompts"] == [row["query"] for row in rows]
    assert seen["completions"] == [[{"role": "assistant", "content": text}] for text in policy.texts]
    assert seen["completion_ids"] == policy.ids
    columns = seen["columns"]
    assert columns["answer"] == ["0", "2", "4", "6"] and columns["level"] == [0, 1, 2, 3]
    assert all(isinstance(value, int) for value in columns["level"])
    assert columns["truncated"] == [False] * 4 and columns["trainer_state"] == TrainerState()
    assert columns.keys() == {"answer", "level", "truncated", "trainer_state", "log_extra", "log_metric"}


def test_columns_come_as_the_dataset_had_them(tokenizer):
    columns = {
        "number": [1.5, 2.5],
        "flag": [True, False],
        "missing": [None, "here"],
        "tests": [["assert 1", "assert 2"], []],
        "ints": [[1, 2, 3], [4]],
        "nested": [{"a": [1, {"b": None}]}, {"a": []}],
    }
    seen = {}

    def spy(prompts, completions, completion_ids, **columns):
        seen.update(columns)
        return [0.0] * len(prompts)

    prompts = [{"query": q} | {name: values[i] for name, values in columns.items()} for i, q in enumerate("pq")]
    outcome(make_env(tokenizer, spy, prompts), Says(tokenizer, ["x", "y"]))
    assert {name: seen[name] for name in columns} == columns


def test_text_prompts_give_text_completions(tokenizer):
    seen = {}

    def spy(prompts, completions, completion_ids, answer):
        seen.update(prompts=prompts, completions=completions, completion_ids=completion_ids)
        return [float(c == a) for c, a in zip(completions, answer, strict=True)]

    prompts = [{"query": "2+2=", "answer": "4"}, {"query": "one, two, ", "answer": "three"}]
    policy = Says(tokenizer, ["4", "four"])
    rows = outcome(make_env(tokenizer, spy, prompts), policy)
    assert seen == {"prompts": ["2+2=", "one, two, "], "completions": ["4", "four"], "completion_ids": policy.ids}
    assert rewards_of(rows) == [1.0, 0.0]


def test_over_several_turns_the_ids_are_those_of_all_turns(tokenizer):
    seen = {}

    def spy(completions, completion_ids, **arguments):
        seen.update(completions=completions, completion_ids=completion_ids)
        return [1.0] * len(completions)

    def ask_again(conversation, row):
        return [{"role": "user", "content": "Sure?"}] if len(conversation) < 4 else None

    env = make_env(tokenizer, spy, chat_prompts(1), transforms=[FeedbackTransform(ask_again, max_turns=3)])
    first, second = Says(tokenizer, ["yes"]), Says(tokenizer, ["no"])
    stepped, following = env.step_and_maybe_reset(first(env.reset()))
    assert not seen and rewards_of(stepped) == [0.0] and not stepped[keys.DONE].any()
    rows = env.step(second(following))
    assert seen["completion_ids"] == [first.ids[0] + second.ids[0]]
    assert [m["content"] for m in seen["completions"][0]] == ["yes", "Sure?", "no"]
    assert rewards_of(rows) == [1.0]


def test_weights_abstentions_and_clip(tokenizer):
    transform = RewardTransform(
        [constant("a", [1.0, None, None, 5.0]), constant("b", [2.0, 3.0, None, math.inf])],
        weights=[1.0, -0.5],
        clip_range=(-1.0, 2.0),
    )
    rows = outcome(make_env(tokenizer, transform), Says(tokenizer, "abcd"))
    assert rows[keys.REWARD].shape == (4, 1, 1) and rows[keys.REWARD].dtype == torch.float32
    expected = torch.tensor([0.0, -1.0, NAN, 2.0])
    torch.testing.assert_close(rows[keys.REWARD].flatten(), expected, equal_nan=True)
    each = torch.tensor([[1.0, 2.0], [NAN, 3.0], [NAN, NAN], [5.0, NAN]])
    torch.testing.assert_close(rows[keys.REWARDS], each, equal_nan=True)
    assert transform.counts["rewards/b/not_finite"] == 1 and transform.counts["rewards/a/not_finite"] == 0
    assert transform.counts.total() == 1


class Flaky:
    """Reward that raises while it is down, and on some completions."""

    def __init__(self, hates: str | None = None):
        self.down, self.hates = False, hates

    def __call__(self, completions, **arguments):
        if self.down or self.hates in [c[-1]["content"] for c in completions]:
            raise OSError("judge is down")
        return [1.0] * len(completions)


def test_a_function_that_is_down_abstains_is_counted_and_stops_the_run_in_the_end(tokenizer, caplog):
    flaky = Flaky()

    def b(completions, **_):
        return [0.5] * len(completions)

    transform = RewardTransform([flaky, b], max_consecutive_failures=12)
    env, policy, got = make_env(tokenizer, transform), Says(tokenizer, "abcd"), []
    with caplog.at_level(logging.WARNING):
        for flaky.down in (False, True, True, False, True, True):
            got.append(rewards_of(outcome(env, policy)))
    assert got == [[1.5] * 4, [0.5] * 4, [0.5] * 4, [1.5] * 4, [0.5] * 4, [0.5] * 4]
    assert transform.counts == {"rewards/Flaky/raised": 16, "rewards/Flaky/repeated": 16}
    assert "judge is down" in caplog.text and "Flaky" in caplog.text and len(caplog.records) == 4
    with pytest.raises(RewardFailureError, match=r"Flaky failed on 12 samples in a row.*OSError: judge is down"):
        outcome(env, policy)


def test_one_bad_row_costs_no_other_and_never_stops_the_run(tokenizer):
    transform = RewardTransform(Flaky(hates="c"), max_consecutive_failures=2)
    env = make_env(tokenizer, transform)
    for _ in range(3):
        rows = outcome(env, Says(tokenizer, "abcd"))
        assert rows[keys.REWARD].flatten().isnan().tolist() == [False, False, True, False]
        assert rows[keys.REWARD].flatten()[[0, 1, 3]].tolist() == [1.0] * 3 and rows[keys.DONE].all()
    assert transform.counts == {"rewards/Flaky/raised": 3, "rewards/Flaky/repeated": 12}


@pytest.mark.parametrize("scores", [[], [1.0] * 5, None, "abcd", {0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0}], ids=str)
def test_a_malformed_answer_is_a_failure_of_its_rows(tokenizer, scores):
    transform = RewardTransform(constant("odd", scores))
    rows = outcome(make_env(tokenizer, transform), Says(tokenizer, "abcd"))
    assert rows[keys.REWARD].isnan().all() and transform.counts["rewards/odd/malformed"] == 4


def test_what_functions_log_comes_with_the_rows(tokenizer):
    def lengths(completions, log_extra, log_metric, trainer_state, **_):
        log_extra("length", [len(c[-1]["content"]) for c in completions])
        log_metric("step", trainer_state.global_step)
        return [0.0] * len(completions)

    transform = RewardTransform(lengths)
    env = make_env(tokenizer, transform)
    for transform.trainer_state.global_step in (3, 4):
        rows = outcome(env, Says(tokenizer, ["a", "bb", "ccc", ""]))
    assert [row[keys.LOG_EXTRA] for row in rows.unbind(0)] == [{"length": n} for n in (1, 2, 3, 0)]
    assert transform.metrics() == {"logged/step": 3.5} and transform.metrics() == {}
    assert transform.latency["lengths/call"].n == 2 and transform.latency["lengths/sample"].n == 8


def test_what_functions_log_is_collected_and_stays_out_of_the_buffer(tokenizer, model):
    def ids(completion_ids, log_extra, **_):
        log_extra("ids", completion_ids)
        return [0.0] * len(completion_ids)

    policy = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 3, "seed": 0})
    rows = LLMCollector(make_env(tokenizer, ids), policy).collect()
    for row in rows.unbind(0):
        assert row[keys.LOG_EXTRA] == {"ids": row[keys.TOKENS][row[keys.ACTION_MASK]].tolist()}
    kept = tensor_rows(rows)
    assert all(keys.LOG_EXTRA not in row.keys(True) for row in kept.unbind(0))
    assert torch.equal(kept[keys.REWARDS], rows[keys.REWARDS]) and keys.LOG_EXTRA in rows[0].keys(True)
    assert [entry["ids"] for entry in completion_table(rows)] == [row[keys.LOG_EXTRA]["ids"] for row in rows.unbind(0)]


def test_a_row_that_was_cut_off_is_said_to_be(tokenizer, model):
    seen = []

    def spy(completions, truncated, **_):
        seen.extend(truncated)
        return [0.0] * len(completions)

    policy = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 2, "seed": 0})
    rows = outcome(make_env(tokenizer, spy), policy)
    assert seen == rows[keys.TRUNCATED].flatten().tolist() and any(seen)


def test_an_interrupt_is_not_taken_for_a_failure(tokenizer):
    def interrupted(**arguments):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        outcome(make_env(tokenizer, interrupted), Says(tokenizer, "abcd"))


def test_counters_survive_a_restart(tokenizer):
    flaky = Flaky()
    flaky.down = True
    transform = RewardTransform(flaky, max_consecutive_failures=8)
    outcome(make_env(tokenizer, transform), Says(tokenizer, "abcd"))
    resumed = RewardTransform(flaky, max_consecutive_failures=8)
    resumed.load_state_dict(transform.state_dict())
    assert resumed.counts["rewards/Flaky/raised"] == 4
    with pytest.raises(RewardFailureError, match="8 samples in a row"):
        outcome(make_env(tokenizer, resumed), Says(tokenizer, "abcd"))


@pytest.mark.parametrize(
    ("functions", "settings", "message"),
    [
        ([constant("a", []), constant("a", [])], {}, r"'a', 'a'"),
        ([constant("a", []), constant("b", [])], {"weights": [1.0]}, r"weights=\[1.0\] must.*2 reward functions"),
        ([constant("a", [])], {"weights": [1.0, 2.0]}, r"weights=\[1.0, 2.0\] must.*1 reward functions"),
        ([constant("a", [])], {"weights": [NAN]}, "weights"),
        ([constant("a", [])], {"weights": [math.inf]}, "weights"),
        ([constant("a", [])], {"clip_range": (1.0, -1.0)}, r"clip_range=\(1.0, -1.0\)"),
        ([constant("a", [])], {"clip_range": (NAN, 1.0)}, "clip_range"),
        ([constant("a", [])], {"max_consecutive_failures": 0}, "max_consecutive_failures=0"),
    ],
)
def test_bad_arguments_are_refused(functions, settings, message):
    with pytest.raises(ValueError, match=message):
        RewardTransform(functions, **settings)


def test_a_column_that_a_function_asks_for_is_missed_at_once():
    def graded(completions, ground_truth, hint=None, **columns):
        return [1.0] * len(completions)

    dataset = load_prompts([{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}], chat=False)
    with pytest.raises(ValueError, match=r"graded requires \['ground_truth'\], .* its columns are \['answer'\]"):
        DatasetChatEnv(dataset, build_tokenizer(), prompts_per_batch=1, rewards=graded)
    renamed = load_prompts([{"prompt": "a", "ground_truth": "1"}], chat=False)
    env = DatasetChatEnv(renamed, build_tokenizer(), prompts_per_batch=1, rewards=graded)
    assert env.reward_transform.names == ["graded"]


@pytest.mark.parametrize(
    ("last", "expected"), [(0.0, ["all earned 0, so"]), (None, ["all earned no reward, so"]), (1.0, [])]
)
def test_first_rewards_that_are_all_equal_are_logged_once(
    last: float | None, expected: list[str], tokenizer, caplog, monkeypatch
) -> None:
    monkeypatch.setattr(reward_module, "FIRST_TRAJECTORIES", 8)
    value = None if last is None else 0.0

    def constant(completions, level):
        return [last if k == 3 else value for k in level]

    env = make_env(tokenizer, constant)
    for _ in range(4):
        outcome(env, Says(tokenizer, ["a"] * 4))
    assert len(caplog.messages) == len(expected)
    assert all(part in message for part, message in zip(expected, caplog.messages, strict=True))
    assert "Reward" not in caplog.text


def test_equal_rewards_of_a_function_for_texts_are_explained(tokenizer, caplog, monkeypatch) -> None:
    monkeypatch.setattr(reward_module, "FIRST_TRAJECTORIES", 4)

    def length(completions, **columns):  # of a list with one message
        return [float(len(completion)) for completion in completions]

    outcome(make_env(tokenizer, [length, "think_format"]), Says(tokenizer, ["a", "bb", "ccc", "dddd"]))
    (message,) = caplog.messages
    assert message.endswith(
        "Reward length: it expects texts, but gets chat messages: set data.chat=false "
        "(load_prompts(chat=False)) for text prompts, or read completion[-1]['content']."
    )


def test_functions_see_the_metrics_of_the_run(tokenizer):
    """In a worker process, only one that names the state sees them, since they are sent with each call."""

    def named(completions, trainer_state, **others):
        return [float(len(trainer_state.log_history))] * len(completions)

    def others(completions, **columns):
        return [float(len(columns["trainer_state"].log_history))] * len(completions)

    for executor, expected in ((None, [1000, 1000]), (ProcessExecutor(1), [1000, 0])):
        transform = RewardTransform([named, others], executor=executor)
        transform.report_progress(3, 9, 0.5, 100, [{"step": n, "reward": 0.5} for n in range(2000)])
        assert transform.trainer_state.log_history[-1] == {"step": 1999, "reward": 0.5}
        assert outcome(make_env(tokenizer, transform), Says(tokenizer, "abcd"))[keys.REWARDS][0].tolist() == expected
        transform.close()


@pytest.mark.parametrize("place", ["transforms", "after_rewards"])
def test_a_second_reward_transform_is_refused(tokenizer, place):
    rewards = RewardTransform([lambda prompts, completions, completion_ids: [1.0] * len(prompts)])
    dataset = load_prompts([{"prompt": "a"}], chat=True)
    with pytest.raises(ValueError, match="a RewardTransform in transforms or after_rewards.*pass it as rewards="):
        DatasetChatEnv(dataset, tokenizer, prompts_per_batch=1, rewards=rewards, **{place: [rewards]})
