"""Transforms of the buffer on metadata: the same advantages as on rows, or a refusal by name."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from torchrl_rloo.data import keys, metadata_of, stack_rows
from torchrl_rloo.functional.advantages import ESTIMATORS, RewardStd, Whiten
from torchrl_rloo.objectives import PRESETS
from torchrl_rloo.objectives.kl import KL
from torchrl_rloo.replay import MCAdvantage, RunningBaseline, TokenGAE, TopKSelector, ZeroSignalFilter
from torchrl_rloo.replay.on_metadata import check_works_on_metadata

SIZE, GROUPS = 4, 6


def make_rows():
    generator = torch.Generator().manual_seed(0)
    rows = []
    for i in range(SIZE * GROUPS):
        length = int(torch.randint(3, 9, (), generator=generator))
        scores = torch.rand(2, generator=generator) if i // SIZE else torch.ones(2)  # the first group has no signal
        reward = float("nan") if i == 9 else float(scores.sum())
        entries = {
            keys.GROUP_ID: torch.tensor(i // SIZE),
            keys.PROMPT_ID: torch.tensor(i // SIZE % 3),
            keys.TOKENS: torch.arange(length),
            keys.ACTION_MASK: torch.arange(length) > 1,
            keys.POLICY_VERSION: torch.tensor(0),
            keys.REWARD: torch.tensor([[reward]]),
            keys.REWARDS: scores,
        }
        rows.append(TensorDict(entries, []))
    return stack_rows(rows)


def advantages(transform, rows) -> list[tuple[int, float]]:
    """Return length and advantage of the rows that leave; metadata and rows have the same."""
    left = transform.inv(rows)
    lengths = [
        int(r[keys.TOKEN_COUNT]) if keys.TOKEN_COUNT in r.keys() else len(r[keys.TOKENS]) for r in left.unbind(0)
    ]
    return [(n, float(row.get(keys.ADVANTAGE, torch.zeros(1)))) for n, row in zip(lengths, left.unbind(0), strict=True)]


WORKING = {name: {"estimator": name} for name in ESTIMATORS} | {
    "gdpo": {
        "credit": {"name": "normalize_then_sum", "weights": [1.0, 2.0]},
        "normalize": {"name": "whiten", "groups": 3},
    },
    "whitened": {"estimator": "reinforce", "normalize": Whiten(GROUPS)},
    "reward_std": {"estimator": "dr_grpo", "normalize": RewardStd(2)},
}


@pytest.mark.parametrize("name", WORKING)
def test_advantages_of_metadata_are_those_of_rows(name):
    rows = make_rows()
    check_works_on_metadata(MCAdvantage(SIZE, **WORKING[name]), GROUPS)
    found, expected = (advantages(MCAdvantage(SIZE, **WORKING[name]), r) for r in (metadata_of(rows), rows))
    assert found == expected and any(value for _, value in found)


@pytest.mark.parametrize(
    "make",
    [
        lambda: MCAdvantage(SIZE, estimator=RunningBaseline()),
        ZeroSignalFilter,
        lambda: TopKSelector(2, SIZE),
    ],
    ids=["running baseline", "filter", "selection"],
)
def test_other_transforms_of_metadata(make):
    rows = make_rows()
    check_works_on_metadata(make())
    assert advantages(make(), metadata_of(rows)) == advantages(make(), rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"credit": "turn"}, r"credit=TurnCredit\(discount=1.0\) reads the tokens.*use credit='trajectory'"),
        ({"credit": "token"}, r"credit=TokenCredit\(discount=1.0\) reads the tokens"),
        ({"kl": KL("token", 0.1)}, "gives each token an advantage.*use where='reward' or 'loss'"),
        ({"normalize": {"name": "whiten", "groups": 4}}, "normalize.groups=4 must divide the 6 groups of a step"),
    ],
    ids=["turn", "token", "kl", "groups"],
)
def test_settings_that_need_tokens_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        check_works_on_metadata(MCAdvantage(SIZE, **arguments), GROUPS)


def test_a_critic_is_refused():
    with pytest.raises(ValueError, match="TokenGAE reads the tokens"):
        check_works_on_metadata(TokenGAE(torch.nn.Identity(), **PRESETS["ppo"].advantage))
