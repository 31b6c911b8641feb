"""A text environment from the game to the gradient: credit per turn, and feedback without gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torchrl.data import LazyStackStorage, ReplayBuffer

from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import keys, tensor_rows
from torchrl_rloo.data.rows import stack_rows
from torchrl_rloo.envs.text import text_env
from torchrl_rloo.envs.transforms import KLRewardTransform, TurnRewardTransform
from torchrl_rloo.functional.kl import KL_ESTIMATORS
from torchrl_rloo.modules import TransformersWrapper
from torchrl_rloo.objectives import RLOOLoss
from torchrl_rloo.replay import MCAdvantage

GROUP = 4


class Parity:
    """Game whose turns earn unequal rewards under a random policy."""

    def reset(self, *, seed=None):
        self.n, self.seed = 0, seed
        return f"say {'abc'[seed % 3]}", {}

    def step(self, action):
        self.n += 1
        ends = self.n == 2 + len(action) % 3
        return "and then?", float(len(action) % 5) - 1.5, ends or self.n == 4, False, {}


@pytest.fixture(scope="module")
def policy(random_model, bpe) -> TransformersWrapper:
    kwargs = {"max_new_tokens": 24, "seed": 0}
    return TransformersWrapper(random_model, tokenizer=bpe, generate_kwargs=kwargs)


@pytest.fixture(scope="module")
def reference(make_model: Callable, bpe) -> TransformersWrapper:
    return TransformersWrapper(make_model(bpe, seed=5), tokenizer=bpe, generate=False)


@pytest.fixture(scope="module")
def stored(policy, reference, bpe):
    """Return eight multi-turn rows with turn-level advantages, as a loss sees them."""
    env = text_env(
        Parity,
        bpe,
        prompts_per_batch=2,
        num_generations=GROUP,
        after_rewards=[TurnRewardTransform(), KLRewardTransform(reference, 0.1)],
    )
    buffer = ReplayBuffer(storage=LazyStackStorage(8), transform=MCAdvantage(GROUP, credit="turn"))
    rows = LLMCollector(env, policy).collect()
    buffer.extend(tensor_rows(rows))
    assert len({int(row[keys.NUM_TURNS]) for row in rows.unbind(0)}) > 1
    return buffer[:]


def turns_of(row) -> list[list[int]]:
    """Return the indices of each turn's action tokens."""
    turns, inside = [], False
    for place, action in enumerate(row[keys.ACTION_MASK].tolist()):
        if action and not inside:
            turns.append([])
        if action:
            turns[-1].append(place)
        inside = action
    return turns


def test_advantages_by_turn_are_those_of_a_loop(stored):
    """Compute each turn's return minus the mean of those group members that also had that turn."""
    groups: dict[int, list] = {}
    for row in stored.unbind(0):
        groups.setdefault(int(row[keys.GROUP_ID]), []).append(row)
    assert [len(group) for group in groups.values()] == [GROUP, GROUP]
    different = 0
    for group in groups.values():
        earned = [
            [sum(row[keys.TOKEN_REWARDS].double()[t].item() for t in turn) for turn in turns_of(row)] for row in group
        ]
        to_go = [[sum(rewards[k:]) for k in range(len(rewards))] for rewards in earned]
        for i, row in enumerate(group):
            expected = torch.zeros(len(row[keys.TOKENS]), dtype=torch.float64)
            for k, turn in enumerate(turns_of(row)):
                others = [returns[k] for j, returns in enumerate(to_go) if j != i and k < len(returns)]
                expected[turn] = to_go[i][k] - sum(others) / len(others) if others else 0.0
            assert torch.allclose(row[keys.ADVANTAGE][:, 0].double(), expected, atol=1e-6)
            different += len({round(x, 4) for x in expected[row[keys.ACTION_MASK]].tolist()}) > 1
    assert different  # otherwise turns and trajectories would agree


def test_feedback_never_carries_gradient(stored, policy):
    """Expect a zero gradient on every logit that does not predict an action token."""
    model = policy.model
    rows = stack_rows([row.clone() for row in stored.unbind(0)])
    trainer = policy.get_new_version(generate=False)
    loss_fn = RLOOLoss(trainer, ratio="token", kl_to_ref_coeff=0.5, entropy_coeff=0.1)
    hidden = []

    def keep(module, args, output):
        output.last_hidden_state.retain_grad()
        hidden.append(output.last_hidden_state)

    hook = model.get_decoder().register_forward_hook(keep)
    try:
        out = loss_fn(rows)
        out.loss.backward()
    finally:
        hook.remove()
        model.zero_grad()
    (states,) = hidden
    for i, row in enumerate(rows.unbind(0)):
        action = row[keys.ACTION_MASK]
        predicts = torch.cat([action[1:], action.new_zeros(1)])  # state t is read only for the logits of t + 1
        gradient = states.grad[i, : len(action)].abs().sum(-1)
        assert (gradient[~predicts] == 0).all()
        assert (gradient[predicts] > 0).float().mean() > 0.9
        assert (~action).sum() > len(turns_of(row))  # there is feedback between the turns


def test_kl_counts_action_tokens_alone(stored, policy, reference):
    rows = stack_rows([row.clone() for row in stored.unbind(0)])
    expected, kl = [], KL_ESTIMATORS["k1"]
    for row in rows.unbind(0):
        assert (row[keys.REF_LOG_PROBS][~row[keys.ACTION_MASK]] == 0).all()
        earned = row[keys.TOKEN_REWARDS].double().sum()
        actions = [t for turn in turns_of(row) for t in turn]
        spent = sum(float(kl(row[keys.LOG_PROBS][t], row[keys.REF_LOG_PROBS][t])) for t in actions)
        assert float(row[keys.REWARD]) == pytest.approx(float(earned) - 0.1 * spent, abs=1e-4)
        expected += [float(KL_ESTIMATORS["k3"](row[keys.LOG_PROBS][t], row[keys.REF_LOG_PROBS][t])) for t in actions]
    for row in rows.unbind(0):  # entries at other tokens are never read
        row[keys.REF_LOG_PROBS][~row[keys.ACTION_MASK]] = torch.nan
        row[keys.LOG_PROBS][~row[keys.ACTION_MASK]] = torch.nan
    trainer = policy.get_new_version(generate=False)
    loss = RLOOLoss(trainer, ratio="token", kl_to_ref_coeff=0.5, kl_estimator="k3", aggregation="token_mean")(rows)
    assert float(loss.loss_kl_to_ref) == pytest.approx(0.5 * sum(expected) / len(expected), rel=1e-4)
    assert float(loss.kl_to_ref) == pytest.approx(sum(expected) / len(expected), rel=1e-4)
