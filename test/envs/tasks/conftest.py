from __future__ import annotations

from collections.abc import Iterator

import pytest

from torchrl_rloo.rewards.math_judge import MathJudge


@pytest.fixture(scope="package", autouse=True)
def one_judge() -> Iterator[None]:
    """The judges of all tasks share a process, which takes two seconds to start."""
    try:
        judge = MathJudge()
    except ImportError:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchrl_rloo.rewards.accuracy.MathJudge", lambda timeout: judge)
        yield
