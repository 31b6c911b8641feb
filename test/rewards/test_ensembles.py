"""Ensembles of reward functions: mean minus variance, or the lowest score."""

from __future__ import annotations

import numpy as np
import pytest

from torchrl_rloo.rewards import Ensemble, RewardBatch, call_reward, load_reward

SCORES = np.array([[1.0, 2.0, -3.0], [0.5, 0.5, 0.5], [0.0, 10.0, 2.0]])  # members, rows


def member(k: int):
    return lambda completions, **columns: [None if i == 3 and k else float(s) for i, s in enumerate([*SCORES[k], 1.0])]


BATCH = RewardBatch(["?"] * 4, ["a"] * 4, [[1]] * 4)


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({"coefficient": 0.0}, SCORES.mean(0)),
        ({}, SCORES.mean(0) - 0.5 * SCORES.var(0)),
        ({"coefficient": 2.0}, SCORES.mean(0) - 2 * SCORES.var(0)),
        ({"worst": True}, SCORES.min(0)),
    ],
)
def test_disagreement_lowers_the_score_and_a_member_that_abstains_the_row(settings, expected):
    call = call_reward(Ensemble([member(k) for k in range(3)], **settings), BATCH)
    assert call.scores[:3] == pytest.approx(list(expected)) and call.scores[3] is None
    assert dict(call.metrics) == {"ensemble/disagreement": pytest.approx(SCORES.std(0).mean())}


def test_a_score_that_is_not_finite_is_no_score():
    broken = lambda completions, **columns: [float("nan"), 1.0, 1.0, 1.0]  # noqa: E731
    for worst in (False, True):
        first = call_reward(Ensemble([member(0), broken], worst=worst), BATCH).scores[0]
        assert first != first


def test_members_are_named_in_settings():
    spec = {"_target_": "ensemble", "functions": ["think_format", "boxed_accuracy"], "worst": True, "name": "both"}
    assert load_reward(spec).__name__ == "both"


async def later(completions, **columns):
    return [0.0] * len(completions)


@pytest.mark.parametrize(
    "functions, settings",
    [(["think_format"], {}), (["think_format", later], {}), (["think_format"] * 2, {"coefficient": -1.0})],
)
def test_bad_settings_are_refused(functions, settings):
    with pytest.raises(ValueError):
        Ensemble(functions, **settings)
