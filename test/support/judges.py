"""Judges of mathematical answers that tests share: the process of each takes two seconds to start."""

from __future__ import annotations

import pytest

from torchrl_rloo.rewards.math_judge import MathJudge


@pytest.fixture(scope="session")
def math_judge() -> MathJudge:
    return MathJudge()


@pytest.fixture
def one_judge(math_judge: MathJudge, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewards made in the test share a judge; their copies have their own."""
    monkeypatch.setattr("torchrl_rloo.rewards.accuracy.MathJudge", lambda timeout: math_judge)
