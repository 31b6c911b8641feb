"""Steps from which a policy learns nothing are told once, with their cause."""

from __future__ import annotations

import re

import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from torchrl_rloo.data import keys, notices
from torchrl_rloo.data.rows import stack_rows
from torchrl_rloo.embedded import build_model, build_tokenizer
from torchrl_rloo.modules import TransformersWrapper
from torchrl_rloo.objectives import RLOOLoss
from torchrl_rloo.replay import MCAdvantage

NAN = float("nan")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "_SHOWN", set())


def rows_of(rewards: list[float], size: int, actions: int = 2, **settings) -> TensorDictBase:
    rows = [
        TensorDict(
            {
                keys.GROUP_ID: torch.tensor(i // size),
                keys.GROUP_SIZE: torch.tensor(size),
                keys.REWARD: torch.tensor([[reward]]),
                keys.ACTION_MASK: torch.arange(4) >= 4 - actions,
            }
        )
        for i, reward in enumerate(rewards)
    ]
    return MCAdvantage(**settings).inv(stack_rows(rows))


CASES = {
    "groups of one": (([1.0, 0.0, 2.0], 1), {}, "trains nothing: each row is alone in its group.*num_generations=2"),
    "no rewards": (([0.0] * 4, 2), {}, "trains nothing: all rewards are 0. Pass rewards="),
    "equal rewards": (([1.0, 1.0, 3.0, 3.0], 2), {}, "trains nothing: the rows of each group earn the same"),
    "all abstain": (([NAN] * 4, 2), {}, "trains nothing: all rows abstain"),
    "only entropy": (([1.0, 0.0], 1), {"entropy_coeff": 0.01}, "only terms without one train.*alone in its group"),
}


@pytest.fixture
def policy() -> TransformersWrapper:
    return TransformersWrapper(build_model(tokenizer := build_tokenizer(), seed=0), tokenizer=tokenizer, generate=False)


@pytest.mark.parametrize("case", CASES)
def test_a_step_without_advantages_names_its_cause_once(case: str, policy, caplog: pytest.LogCaptureFixture) -> None:
    rows, settings, message = CASES[case]
    loss = RLOOLoss(policy, **settings)
    for _ in range(2):
        loss.normalizers(rows_of(*rows))
    (told,) = caplog.messages
    assert re.search(message, told)


@pytest.mark.parametrize(
    ("rewards", "size", "settings"),
    [([1.0, 0.0, 1.0, 1.0], 2, {}), ([1.0, 0.0], 1, {"estimator": "reinforce"}), ([NAN, 1.0, 0.0], 3, {})],
    ids=["one group of two", "reinforce", "one abstains"],
)
def test_a_step_with_an_advantage_says_nothing(rewards, size, settings, policy, caplog) -> None:
    RLOOLoss(policy).normalizers(rows_of(rewards, size, **settings))
    assert not caplog.messages


def test_a_step_without_action_tokens_is_told(policy, caplog: pytest.LogCaptureFixture) -> None:
    RLOOLoss(policy).normalizers(rows_of([1.0, 0.0], 2, actions=0))
    assert "the loss covers no action token of a step" in caplog.text


def test_a_part_of_a_step_says_nothing(policy, caplog: pytest.LogCaptureFixture) -> None:
    """The other rows of the step may have an advantage."""
    loss, rows = RLOOLoss(policy), rows_of([1.0, 0.0, 1.0, 1.0], 2)
    normalizers = loss.normalizers(rows)
    for row in rows.unbind(0):
        row.update({keys.TOKENS: torch.arange(3, 7), keys.LOG_PROBS: torch.zeros(4)})
    loss(rows[2:], normalizers)
    assert not caplog.messages
