"""TokenGAE on rows, compared with loops over single rows."""

from __future__ import annotations

import math

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import LazyStackStorage, ReplayBuffer

from torchrl_rloo.data import keys, stack_rows
from torchrl_rloo.data.metadata import metadata_of
from torchrl_rloo.embedded import build_model
from torchrl_rloo.functional.advantages import ESTIMATORS, RewardStd, Whiten
from torchrl_rloo.functional.kl import k3
from torchrl_rloo.modules.heads import ValueHead
from torchrl_rloo.objectives import KL, PRESETS
from torchrl_rloo.replay import MCAdvantage, RunningBaseline, TokenGAE, TopKSelector, ZeroSignalFilter
from torchrl_rloo.replay.gae import check_works_on_metadata

SHAPES = ["ppaa", "ppaaccaaa", "pppppapcca", "pa", "ppaaaaaaccac"]
REWARDS = [1.0, -0.5, 2.0, 0.25, 0.0]
DISCOUNT, LAM = 0.9, 0.8


@pytest.fixture
def rows() -> TensorDictBase:
    generator, result = torch.Generator().manual_seed(0), []
    for i, shape in enumerate(SHAPES):
        n, mask = len(shape), torch.tensor([c == "a" for c in shape])
        row = {
            keys.GROUP_ID: torch.tensor(i),
            keys.TOKENS: torch.randint(3, 300, (n,), generator=generator),
            keys.ACTION_MASK: mask,
            keys.REWARD: torch.tensor([[REWARDS[i]]]),
        }
        for key in (keys.LOG_PROBS, keys.REF_LOG_PROBS):
            row[key] = torch.where(mask, -torch.rand(n, generator=generator), 0.0)
        result.append(TensorDict(row, []))
    return stack_rows(result)


@pytest.fixture(scope="module")
def value_head(tokenizer) -> ValueHead:
    head = ValueHead(build_model(tokenizer, seed=0).eval())
    with torch.no_grad():
        head.projection.weight.normal_(0, 0.1, generator=torch.Generator().manual_seed(0))
    return head


def places(row: TensorDictBase) -> list[int]:
    return [t for t, is_action in enumerate(row[keys.ACTION_MASK].tolist()) if is_action]


@torch.no_grad()
def expected(head: ValueHead, row: TensorDictBase, rewards: dict[int, float]) -> tuple[list, list]:
    """Compute the advantages and values at a row's action tokens."""
    hidden = head.trunk(input_ids=row[keys.TOKENS][None], use_cache=False).last_hidden_state[0]
    values = [float(head.projection(hidden[t - 1])) for t in places(row)]
    following, advantages = [*values[1:], 0.0], []
    deltas = [rewards.get(t, 0.0) + DISCOUNT * n - v for t, v, n in zip(places(row), values, following, strict=True)]
    for t in range(len(deltas)):
        advantages.append(sum((DISCOUNT * LAM) ** (k - t) * deltas[k] for k in range(t, len(deltas))))
    return advantages, values


def check(head: ValueHead, row: TensorDictBase, rewards: dict[int, float]) -> None:
    advantages, values = expected(head, row, rewards)
    targets = [a + v for a, v in zip(advantages, values, strict=True)]
    written = {keys.ADVANTAGE: advantages, keys.STATE_VALUE: values, keys.VALUE_TARGET: targets}
    for key, numbers in written.items():
        full = torch.zeros(len(row[keys.TOKENS]), 1)
        full[places(row), 0] = torch.tensor(numbers)
        torch.testing.assert_close(row[key], full, rtol=0, atol=1e-4)


def plain(value_head: ValueHead, **settings) -> TokenGAE:
    return TokenGAE(value_head, **{"discount": DISCOUNT, "lam": LAM, "whiten": False, **settings})


@pytest.mark.parametrize("micro_batch_size", [None, 2])
def test_the_reward_comes_at_the_last_action_token(micro_batch_size, value_head, rows) -> None:
    out = plain(value_head, micro_batch_size=micro_batch_size).inv(rows)
    assert out[keys.GROUP_ID].tolist() == list(range(len(SHAPES)))
    for row, reward in zip(out.unbind(0), REWARDS, strict=True):
        check(value_head, row, {places(row)[-1]: reward})


def test_token_rewards_come_instead(value_head, rows) -> None:
    """Token rewards replace the return on the rows that have them."""
    first = rows[1]
    first.set(keys.TOKEN_REWARDS, torch.tensor([0, 0, 0, 0.5, 0, 0, 0, 0, -1.0]))
    out = plain(value_head).inv(rows)
    check(value_head, out[1], {3: 0.5, 8: -1.0})
    check(value_head, out[0], {3: REWARDS[0]})
    first[keys.TOKEN_REWARDS][0] = 7.0
    with pytest.raises(ValueError, match="not an action"):
        plain(value_head).inv(rows)


def test_a_row_without_a_return_abstains_whatever_its_token_rewards(value_head, rows) -> None:
    first = rows[1]
    first.set(keys.TOKEN_REWARDS, torch.tensor([0, 0, 0, 0.5, 0, 0, 0, 0, -1.0]))
    first.set(keys.REWARD, torch.full((1, 1), torch.nan))
    out = TokenGAE(value_head).inv(rows)
    assert (out[1][keys.ADVANTAGE] == 0).all() and out[0][keys.ADVANTAGE].isfinite().all()


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_kl_is_taken_off_token_by_token(estimator: str, value_head, rows) -> None:
    class Coefficient:
        value = 0.0

        def __float__(self):
            return self.value

    coefficient = Coefficient()
    transform = plain(value_head, kl=KL("token", coefficient, estimator))
    coefficient.value = 0.3
    for row, reward in zip(transform.inv(rows).unbind(0), REWARDS, strict=True):
        policy, reference = row[keys.LOG_PROBS], row[keys.REF_LOG_PROBS]
        kl = k3(policy, reference) if estimator == "k3" else policy - reference
        rewards = {t: -0.3 * float(kl[t]) for t in places(row)}
        rewards[places(row)[-1]] += reward
        check(value_head, row, rewards)


def test_whitening_is_over_all_action_tokens(value_head, rows) -> None:
    raw = plain(value_head).inv(rows.clone())
    out = plain(value_head, whiten=True).inv(rows)

    def flat(batch):
        return torch.cat([row[keys.ADVANTAGE][places(row), 0] for row in batch.unbind(0)])

    before, after = flat(raw), flat(out)
    torch.testing.assert_close(after, (before - before.mean()) / before.std(), rtol=0, atol=1e-3)
    for ours, theirs in zip(out.unbind(0), raw.unbind(0), strict=True):
        assert torch.equal(ours[keys.VALUE_TARGET], theirs[keys.VALUE_TARGET])
        assert (ours[keys.ADVANTAGE][~ours[keys.ACTION_MASK]] == 0).all()


@pytest.mark.parametrize("whiten", [False, True])
def test_an_abstaining_row_has_no_part_in_it(whiten: bool, value_head, rows) -> None:
    rows[2].set(keys.REWARD, torch.tensor([[math.nan]]))
    others = stack_rows([row.clone() for i, row in enumerate(rows.unbind(0)) if i != 2])
    transform = plain(value_head, whiten=whiten)
    out, alone = transform.inv(rows), transform.inv(others)
    assert (out[2][keys.ADVANTAGE] == 0).all()
    assert torch.equal(out[2][keys.VALUE_TARGET], out[2][keys.STATE_VALUE])
    for row, other in zip((r for i, r in enumerate(out.unbind(0)) if i != 2), alone.unbind(0), strict=True):
        torch.testing.assert_close(row[keys.ADVANTAGE], other[keys.ADVANTAGE], rtol=0, atol=1e-4)


def test_in_a_buffer(value_head, rows) -> None:
    """Rows may arrive in batches or one by one, sampling changes nothing, and the state has no weights."""
    buffer = ReplayBuffer(storage=LazyStackStorage(16), transform=plain(value_head), batch_size=4)
    buffer.extend(rows)
    buffer.add(rows[0].clone().exclude(keys.ADVANTAGE, keys.STATE_VALUE, keys.VALUE_TARGET))
    stored = buffer[:]
    assert len(stored) == 6
    for row, reward in zip(stored.unbind(0), [*REWARDS, REWARDS[0]], strict=True):
        check(value_head, row, {places(row)[-1]: reward})
    assert len(buffer.sample()) == 4
    assert list(plain(value_head).parameters()) == []


def test_a_row_without_action_tokens(value_head, rows) -> None:
    rows[0].set(keys.ACTION_MASK, torch.zeros(4, dtype=torch.bool))
    out = plain(value_head, whiten=True).inv(rows)
    assert out[0][keys.ADVANTAGE].tolist() == [[0.0]] * 4
    assert all(row[keys.ADVANTAGE].isfinite().all() for row in out.unbind(0))


@pytest.mark.parametrize(
    "settings",
    [{"discount": 1.1}, {"lam": -0.1}, {"kl": KL("loss", 0.1)}, {"micro_batch_size": 0}],
)
def test_arguments_are_checked(settings, value_head) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        TokenGAE(value_head, **settings)
    with pytest.raises(TypeError, match="kl=0.1 must be a KL"):
        TokenGAE(value_head, kl=0.1)


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


NEED_ROWS = {"opo", "remax"}  # lengths, and a greedy member
WORKING = {name: {"estimator": name} for name in ESTIMATORS if name not in NEED_ROWS} | {
    "pass_at_k": {"estimator": {"name": "pass_at_k", "k": 2}},
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
