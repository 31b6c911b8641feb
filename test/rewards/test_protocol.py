"""Reward protocol: arguments of the functions, and the handling of their results."""

from __future__ import annotations

import asyncio
import functools
import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_rloo.rewards.protocol import (
    RewardBatch,
    RewardCall,
    RewardFailure,
    TrainerState,
    attempt_reward,
    call_reward,
    call_reward_async,
    check_columns,
    final_text,
    find_missing_columns,
    reward_name,
)
from torchrl_rloo.runtime.lookup import is_async


def batch_of(n: int = 2, **columns: list) -> RewardBatch:
    return RewardBatch(["p"] * n, ["c"] * n, [[1]] * n, columns)


def call(scores: Any, n: int = 2) -> list[float | None]:
    """Call a function that returns ``scores`` for ``n`` trajectories."""

    def rewards(prompts, completions, completion_ids, **columns):
        return scores

    return call_reward(rewards, batch_of(n)).scores


@settings(deadline=None)
@given(st.lists(st.one_of(st.none(), st.floats(), st.integers(-1000, 1000), st.booleans()), max_size=8))
def test_scores_come_back_as_floats_and_nones(scores):
    values = call(scores, len(scores))
    for score, value in zip(scores, values, strict=True):
        assert type(value) is (type(None) if score is None else float)
        assert value == score or math.isnan(value) and math.isnan(score)


@pytest.mark.parametrize("scores", [torch.tensor([0.5, 1.0]), (0.5, 1), [torch.tensor(0.5), True]], ids=repr)
def test_tensors_tuples_and_other_numbers_are_scores(scores):
    assert call(scores) == [0.5, 1.0]


@pytest.mark.parametrize(
    "scores",
    [
        None,
        1.0,
        "ab",
        iter([1.0, 2.0]),
        [[1.0, 1.0], [2.0]],
        torch.tensor(1.0),
        {0: 0.5, 1: 0.7},
        {0.5, 0.7},
        ["1", "0"],
    ],
    ids=lambda scores: type(scores).__name__,  # the same in every process
)
def test_what_is_no_sequence_of_numbers_is_refused(scores):
    with pytest.raises(TypeError):
        call(scores)


@pytest.mark.parametrize("scores", [[], [1.0], [1.0, 2.0, 3.0]])
def test_a_wrong_number_of_scores_is_refused(scores):
    with pytest.raises(ValueError, match=rf"rewards returned {len(scores)} scores for 2"):
        call(scores)


def test_a_function_gets_everything_by_name():
    seen = {}

    def spy(**arguments):
        seen.update(arguments)
        return [0.0, 1.0]

    prompts = [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]]
    state = TrainerState(global_step=3, max_steps=9)
    call_reward(spy, RewardBatch(prompts, ["x", "y"], [[1, 2], []], {"answer": ["1", None]}, [True, False], state))
    assert callable(seen.pop("log_extra")) and callable(seen.pop("log_metric"))
    assert seen == {
        "prompts": prompts,
        "completions": ["x", "y"],
        "completion_ids": [[1, 2], []],
        "answer": ["1", None],
        "truncated": [True, False],
        "trainer_state": state,
    }


def test_a_function_without_kwargs_gets_what_it_names():
    def picky(completions, level):
        return [float(value) for value in level]

    assert call_reward(picky, batch_of(level=[1, 2], answer=["3", "4"])).scores == [1.0, 2.0]
    with pytest.raises(TypeError, match="level"):
        call_reward(picky, batch_of(answer=["3", "4"]))


def test_a_function_logs_columns_and_metrics():
    def logs(completions, log_extra, log_metric, **_):
        log_extra("length", (len(c) for c in completions))
        log_metric("mean", 1)
        log_metric("mean", 3.0)
        return [0.0] * len(completions)

    called = call_reward(logs, batch_of())
    assert called.extra == {"length": [1, 1]} and called.metrics == [("mean", 1.0), ("mean", 3.0)]

    def short(completions, log_extra, **_):
        log_extra("length", [1])

    with pytest.raises(ValueError, match=r"log_extra\('length'\) of reward short got 1 values for 2"):
        call_reward(short, batch_of())


def test_async_functions_are_known_and_awaited():
    async def plain(completions, **_):
        await asyncio.sleep(0.01)
        return [0.5] * len(completions)

    class Judge:
        async def __call__(self, completions, **_):
            return [0.5] * len(completions)

    for function in (plain, Judge(), functools.partial(plain)):
        assert is_async(function)
        assert asyncio.run(call_reward_async(function, batch_of())).scores == [0.5, 0.5]
        assert attempt_reward(function, batch_of()).scores == [0.5, 0.5]
    assert asyncio.run(call_reward_async(plain, batch_of())).seconds >= 0.01
    assert not is_async(call_reward) and not is_async(call) and not is_async(object())


def test_what_a_function_raises_comes_through_or_is_a_failure():
    def broken(**arguments):
        raise KeyError("answer")

    with pytest.raises(KeyError, match="answer"):
        call_reward(broken, batch_of())
    failure = attempt_reward(broken, batch_of())
    assert isinstance(failure, RewardFailure) and failure.kind == "raised" and failure.message == "KeyError: 'answer'"
    assert "in broken" in failure.traceback
    assert attempt_reward(lambda **_: [1.0], batch_of()).kind == "malformed"
    assert isinstance(attempt_reward(lambda **_: [1.0, 2.0], batch_of()), RewardCall)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_what_is_no_exception_is_a_failure_only_on_request(error):
    def broken(**arguments):
        raise error

    with pytest.raises(error):
        attempt_reward(broken, batch_of())
    assert attempt_reward(broken, batch_of(), BaseException).message == error.__name__


def test_a_selection_keeps_rows_together():
    batch = RewardBatch(["p", "q"], ["a", "b"], [[1], [2]], {"answer": ["x", "y"]}, [False, True], TrainerState(5))
    assert batch.select([1, 0, 1]) == RewardBatch(
        ["q", "p", "q"],
        ["b", "a", "b"],
        [[2], [1], [2]],
        {"answer": ["y", "x", "y"]},
        [True, False, True],
        TrainerState(5),
    )
    assert len(batch.select([])) == 0 and batch_of().select([0]).truncated == ()


def test_columns_that_are_missing():
    class Judge:
        def __init__(self, column: str | None):
            self.column = column

        def __call__(self, completions, hint, extra=None, **others):
            return [1.0] * len(completions)

    judge = Judge("gold")
    assert find_missing_columns(judge, ["gold", "hint"]) == [] == find_missing_columns(Judge(None), ["hint"])
    assert find_missing_columns(judge, ["answer"]) == ["hint", "gold"]
    check_columns([judge, dict], ["gold", "hint"])
    for takes_nothing in (len, lambda: [1.0], lambda *texts: [1.0]):
        with pytest.raises(ValueError, match="accepts none of the arguments of a reward: add completions"):
            check_columns([takes_nothing], ["gold", "hint"])
    with pytest.raises(ValueError, match=r"requires \['completion'\], .*did you mean 'completions'"):
        check_columns([lambda completion, **others: [1.0]], ["gold"])
    message = r"scorer Judge requires \['gold'\], which the dataset does not have: its columns are \['hint'\]. Rename a"
    with pytest.raises(ValueError, match=message):
        check_columns([judge], ["hint"], what="scorer")


def test_names():
    class Judge:
        def __call__(self, **arguments):
            return [0.0]

    def exact(**arguments):
        return [0.0]

    assert reward_name(exact) == "exact"
    assert reward_name(Judge()) == "Judge"
    assert reward_name(functools.partial(exact)) == "exact"
    named = functools.partial(exact)
    named.__name__ = "half"
    assert reward_name(named) == "half"


def test_workers_need_no_torch():
    code = "import sys, torchrl_rloo.rewards.runner; assert 'torch' not in sys.modules, sorted(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_partial_is_async_and_named_as_what_it_is_of():
    class Judge:
        async def __call__(self, completions, scale=1.0, **columns):
            return [scale] * len(completions)

    bound = functools.partial(Judge(), scale=2.0)
    bound.whole_batch = True  # an attribute keeps a partial of a partial from being flattened
    bound = functools.partial(bound, scale=3.0)
    assert is_async(bound) and reward_name(bound) == "Judge"
    assert asyncio.run(call_reward_async(bound, batch_of())).scores == [3.0, 3.0]
    assert not is_async(functools.partial(len))


def raises(error: BaseException) -> RewardFailure:
    def rewards(**columns):
        raise error

    return attempt_reward(rewards, batch_of())


def test_a_failure_says_what_was_raised():
    noted = ValueError("bad\nvalue")
    noted.__notes__ = ["see the manual"]  # as add_note sets it from Python 3.11 on
    assert raises(noted).message == "ValueError: bad\nvalue"
    with pytest.raises(SyntaxError) as caught:
        compile("1 +", "reward.py", "exec")
    assert raises(caught.value).message.startswith("SyntaxError: ")

    class Unprintable(Exception):
        def __str__(self):
            raise RuntimeError

    assert "Unprintable" in raises(Unprintable()).message


@pytest.mark.skipif(sys.version_info < (3, 11), reason="has no groups of exceptions")
def test_a_group_of_exceptions_is_named():
    failure = raises(ExceptionGroup("unhandled errors", [KeyError("a")]))  # noqa: F821
    assert failure.message == "ExceptionGroup: unhandled errors (1 sub-exception)" and "KeyError" in failure.traceback


def test_the_final_text_of_a_message_that_only_calls_tools_is_empty():
    assert final_text([{"role": "assistant", "tool_calls": []}]) == ""
    assert final_text([{"role": "assistant", "content": None, "tool_calls": []}]) == ""
