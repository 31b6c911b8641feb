"""ForTask, StopProperly, Shuffled and their base class."""

from __future__ import annotations

import asyncio
import copy
import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_rloo.rewards.accuracy import CosineScaled
from torchrl_rloo.rewards.lengths import LengthBudget, StopProperly
from torchrl_rloo.rewards.matching import boxed_accuracy
from torchrl_rloo.rewards.protocol import RewardBatch, TrainerState, call_reward, call_reward_async, reward_name
from torchrl_rloo.rewards.wrapping import ByTask, ForTask, Shuffled
from torchrl_rloo.runtime.lookup import is_async

WRAPPERS = {
    "for_task": lambda function: ForTask("math", function),
    "stop_properly": lambda function: StopProperly(function, 1.0),
    "shuffled": Shuffled,
    "length_budget": lambda function: LengthBudget(function, 100, at_budget=1.0),
    "cosine_scaled": lambda function: CosineScaled(10, correctness=function),
}


def lengths(completions, **columns):
    return [float(len(text)) for text in completions]


async def slow_lengths(completions, **columns):
    await asyncio.sleep(0.001)
    return lengths(completions)


def batch(n: int = 4, **columns) -> RewardBatch:
    columns = {"task": ["math", "code"] * (n // 2), "answer": ["x"] * n} | columns
    texts = ["x" * (i + 1) for i in range(n)]
    return RewardBatch(["?"] * n, texts, [[i] for i in range(n)], columns, [i >= 2 for i in range(n)], TrainerState(5))


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_around_an_async_function_a_wrapper_is_async(wrap):
    sync, waits = wrap(lengths), wrap(slow_lengths)
    assert not is_async(sync) and is_async(waits)
    expected = call_reward(sync, batch()).scores
    for reward in (waits, pickle.loads(pickle.dumps(waits)), copy.deepcopy(waits), wrap(wrap(slow_lengths)).function):
        assert is_async(reward)
        assert asyncio.run(call_reward_async(reward, batch())).scores == expected
    assert is_async(wrap(wrap(slow_lengths)))


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_the_whole_protocol_reaches_the_function_and_what_it_logs_comes_back(wrap):
    seen = {}

    def spy(prompts, completions, completion_ids, answer, truncated, trainer_state, log_extra, log_metric):
        seen.update(n=len(prompts), step=trainer_state.global_step, cut=truncated, answer=answer, ids=completion_ids)
        log_extra("text", completions)
        log_metric("rows", len(completions))
        return [1.0] * len(completions)

    call = call_reward(wrap(spy), batch())
    part = seen["n"] == 2  # for_task
    assert seen["step"] == 5 and seen["cut"] == ([False, True] if part else [False, False, True, True])
    assert len(seen["answer"]) == len(seen["ids"]) == seen["n"]
    assert call.extra == {"text": ["x", None, "xxx", None] if part else ["x", "xx", "xxx", "xxxx"]}
    assert call.metrics == [("rows", seen["n"])]


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_around_a_function_that_must_see_whole_batches_so_must_the_wrapper(wrap):
    def whole(completions, **columns):
        return lengths(completions)

    whole.whole_batch = True
    assert wrap(whole).whole_batch is True


def test_for_task_scores_the_rows_of_its_task_only():
    def math_only(completions, task, **columns):
        assert set(task) == {"math"}
        return lengths(completions)

    reward = ForTask("math", math_only)
    assert call_reward(reward, batch()).scores == [1, None, 3, None]
    assert reward_name(reward) == "math_math_only"
    other = call_reward(ForTask("chess", math_only), batch())  # the function is not called
    assert other.scores == [None] * 4 and other.extra == {} and other.metrics == []
    assert call_reward(ForTask("math", lengths, column="kind"), batch(kind=["math"] * 4)).scores == [1, 2, 3, 4]


def test_for_task_without_its_column():
    with pytest.raises(KeyError, match="math_lengths requires column 'kind'.*'task'"):
        call_reward(ForTask("math", lengths, column="kind"), batch())
    with pytest.raises(ValueError, match="task='' and column='task'"):
        ForTask("", lengths)


@given(st.lists(st.sampled_from("abc"), max_size=8))
def test_the_tasks_share_the_rows_among_them(tasks):
    texts = ["x" * i for i in range(len(tasks))]
    rows = RewardBatch(["?"] * len(tasks), texts, [[1]] * len(tasks), {"task": tasks})
    each = [call_reward(ForTask(task, lengths), rows).scores for task in "abc"]
    assert [[s for s in scores if s is not None] for scores in zip(*each, strict=True)] == [[len(t)] for t in texts]


@given(st.floats(-3, 1), st.lists(st.tuples(st.none() | st.floats(-2, 2), st.booleans()), max_size=6))
def test_stop_properly_scales_or_replaces_where_truncated(coefficient, rows):
    scores, cut = [score for score, _ in rows], [truncated for _, truncated in rows]

    def given_scores(completions, **columns):
        return scores

    n = len(rows)
    reward = StopProperly(given_scores, coefficient)
    got = call_reward(reward, RewardBatch(["?"] * n, ["x"] * n, [[1]] * n, {}, cut)).scores
    for mine, score, truncated in zip(got, scores, cut, strict=True):
        if score is None or not truncated:
            assert mine == score
        else:
            assert mine == (score * coefficient if coefficient >= 0 else coefficient)
    assert reward_name(reward) == "stop_properly_given_scores"


@pytest.mark.parametrize("value", [1.5, float("inf"), -float("inf"), float("nan")])
def test_coefficients_out_of_range(value):
    with pytest.raises(ValueError, match=f"coefficient={value}"):
        StopProperly(lengths, value)


@given(st.integers(0, 8))
def test_shuffled_deals_the_same_scores_in_an_order_of_what_was_sampled(n):
    texts, ids = [r"\boxed{x}" if i % 2 else "no" for i in range(n)], [[i, n] for i in range(n)]
    rows = RewardBatch(["?"] * n, texts, ids, {"answer": ["x"] * n})
    shuffled = call_reward(Shuffled(boxed_accuracy), rows).scores
    assert sorted(shuffled) == sorted(call_reward(boxed_accuracy, rows).scores)
    assert shuffled == call_reward(Shuffled("boxed_accuracy"), rows).scores
    assert Shuffled(boxed_accuracy).whole_batch is True and reward_name(Shuffled(boxed_accuracy)) == "shuffled"


def test_shuffled_changes_the_order():
    rows = RewardBatch(["?"] * 20, ["x" * i for i in range(20)], [[i] for i in range(20)])
    assert call_reward(Shuffled(lengths), rows).scores != call_reward(lengths, rows).scores


def test_a_failure_of_the_wrapped_function_is_no_score():
    def fails(completions, **columns):
        return [math.nan, math.inf, None, 0.0]

    for reward in (StopProperly(fails, -0.5), StopProperly(fails, 0.5), CosineScaled(10, correctness=fails)):
        scores = call_reward(reward, RewardBatch(["p"] * 4, ["c"] * 4, [[1]] * 4, {}, [True] * 4)).scores
        assert math.isnan(scores[0]) and scores[1:3] == [math.inf, None] and math.isfinite(scores[3])


def test_what_a_function_says_of_itself_holds_for_its_wrapper():
    async def judge(completions, **columns):
        return [0.0] * len(completions)

    assert not hasattr(StopProperly(judge), "concurrency")
    judge.concurrency, judge.whole_batch = 3, True
    assert (StopProperly(judge).concurrency, StopProperly(judge).whole_batch) == (3, True)
    assert ByTask({"a": Shuffled(lengths)}).whole_batch and not ByTask({"a": lengths}).whole_batch
