"""RowStorage warns once when unsampled rows are lost."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import ReplayBuffer, SamplerWithoutReplacement

from torchrl_rloo.data import notices
from torchrl_rloo.data.rows import stack_rows
from torchrl_rloo.replay import RowStorage


def rows(n: int):
    return stack_rows([TensorDict({"tokens": torch.arange(i + 1)}) for i in range(n)])


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "_SHOWN", set())


def make(max_size: int | None, batch_size: int = 4) -> ReplayBuffer:
    return ReplayBuffer(storage=RowStorage(max_size), sampler=SamplerWithoutReplacement(), batch_size=batch_size)


def test_a_step_that_does_not_fit_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    buffer = make(4)
    buffer.extend(rows(8))
    buffer.extend(rows(8))
    assert len(buffer) == 4
    assert len(caplog.messages) == 1 and "max_size=4" in caplog.messages[0]


@pytest.mark.parametrize("max_size", [8, None])
def test_rows_that_were_sampled_or_emptied_may_go(max_size: int | None, caplog: pytest.LogCaptureFixture) -> None:
    buffer = make(max_size)
    for _ in range(3):
        buffer.extend(rows(8))
        assert sum(len(batch) for batch in buffer) == len(buffer)
    buffer.empty()
    for _ in range(2):
        buffer.extend(rows(8))
        buffer.empty()
    assert not caplog.messages


def test_half_of_the_rows_sampled_is_not_enough(caplog: pytest.LogCaptureFixture) -> None:
    buffer = make(8)
    buffer.extend(rows(8))
    buffer.sample()
    buffer.extend(rows(8))
    assert len(caplog.messages) == 1
