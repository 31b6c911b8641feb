from __future__ import annotations

import functools
import logging
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_rloo.rewards.protocol import call_reward, reward_name


def call(scores, n: int = 2):
    """What the protocol makes of a function that returns ``scores`` for ``n`` trajectories."""

    def rewards(prompts, completions, completion_ids, **columns):
        return scores

    return call_reward(rewards, ["p"] * n, ["c"] * n, [[1]] * n, {})


@settings(deadline=None)
@given(st.lists(st.one_of(st.none(), st.floats(width=32), st.integers(-1000, 1000), st.booleans()), max_size=8))
def test_scores_are_numbers_abstentions_or_counted_failures(scores):
    values, bad = call(scores, len(scores))
    assert values.shape == (len(scores),) and values.dtype == torch.float32
    for score, value in zip(scores, values.tolist(), strict=True):
        if score is None or not math.isfinite(score):
            assert math.isnan(value)
        else:
            assert value == score
    assert bad == sum(s is not None and not math.isfinite(s) for s in scores)


@pytest.mark.parametrize("score", [math.inf, -math.inf, math.nan, 1e39])
def test_a_score_that_is_not_finite_abstains_is_counted_and_named(score, caplog):
    with caplog.at_level(logging.WARNING):
        values, bad = call([1.0, score])
    assert values[0] == 1 and values[1].isnan() and bad == 1
    assert "rewards" in caplog.text


def test_an_abstention_is_no_failure(caplog):
    with caplog.at_level(logging.WARNING):
        values, bad = call([None, None])
    assert values.isnan().all() and bad == 0 and not caplog.text


@pytest.mark.parametrize("scores", [torch.tensor([0.5, 1.0]), (0.5, 1), [torch.tensor(0.5), True]], ids=repr)
def test_tensors_tuples_and_other_numbers_are_scores(scores):
    assert call(scores)[0].tolist() == [0.5, 1.0]


@pytest.mark.parametrize(
    "scores",
    [
        None,
        1.0,
        "ab",
        iter([1.0, 2.0]),
        [[1.0], [2.0]],
        [object(), 1.0],
        torch.tensor(1.0),
        {0: 0.5, 1: 0.7},
        {0.5, 0.7},
        ["1.0", "0.5"],
        ["right", "wrong"],
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
    call_reward(spy, prompts, ["x", "y"], [[1, 2], []], {"answer": ["1", None]})
    assert seen == {
        "prompts": prompts,
        "completions": ["x", "y"],
        "completion_ids": [[1, 2], []],
        "answer": ["1", None],
    }


def test_what_a_function_raises_comes_through():
    def broken(**arguments):
        raise KeyError("answer")

    with pytest.raises(KeyError, match="answer"):
        call_reward(broken, ["p"], ["c"], [[1]], {})


def test_names():
    class Judge:
        def __call__(self, **arguments):
            return [0.0]

    def exact(**arguments):
        return [0.0]

    assert reward_name(exact) == "exact"
    assert reward_name(Judge()) == "Judge"
    assert reward_name(functools.partial(exact)) == "partial"
    named = functools.partial(exact)
    named.__name__ = "half"
    assert reward_name(named) == "half"
