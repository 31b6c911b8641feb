from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _one_judge(one_judge: None) -> None:
    """Share one judge process among all tasks."""
