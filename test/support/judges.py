"""Judges of mathematical answers that tests share, since each process takes two seconds to start."""

from __future__ import annotations

import pytest

from torchrl_rloo.rewards.process_judge import MathJudge


@pytest.fixture(scope="session")
def math_judge() -> MathJudge:
    return MathJudge()


@pytest.fixture
def one_judge(math_judge: MathJudge, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared judge of the rewards in a test; copies of rewards have separate judges."""
    monkeypatch.setattr("torchrl_rloo.rewards.accuracy.MathJudge", lambda timeout: math_judge)
