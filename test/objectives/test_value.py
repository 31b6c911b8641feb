"""Tests of ValueLoss: exact on rows; with TokenGAE it trains a critic, and with RLOOLoss a policy (PPO)."""

from __future__ import annotations

import math

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import LazyStackStorage, ReplayBuffer

from torchrl_rloo.data import keys, stack_rows
from torchrl_rloo.data.rows import micro_batches
from torchrl_rloo.embedded import build_model
from torchrl_rloo.modules import TransformersWrapper
from torchrl_rloo.modules.heads import ValueHead
from torchrl_rloo.objectives import RLOOLoss, ValueLoss, merge_outputs
from torchrl_rloo.replay.gae import TokenGAE

SHAPES = ["ppaa", "ppaaccaaa", "pppppapcca", "pa"]


@pytest.fixture
def rows() -> TensorDictBase:
    generator, result = torch.Generator().manual_seed(0), []
    for i, shape in enumerate(SHAPES):
        row = {
            keys.TOKENS: torch.randint(3, 300, (len(shape),), generator=generator),
            keys.ACTION_MASK: torch.tensor([c == "a" for c in shape]),
            keys.TRUNCATED: torch.tensor([i == 1]),
            keys.MULTIPLICITY: torch.tensor(1 + i % 2),
            keys.STATE_VALUE: torch.randn(len(shape), 1, generator=generator),
            keys.VALUE_TARGET: torch.randn(len(shape), 1, generator=generator),
        }
        result.append(TensorDict(row, []))
    return stack_rows(result)


@pytest.fixture
def value_head(tokenizer) -> ValueHead:
    head = ValueHead(build_model(tokenizer, seed=0).eval())
    with torch.no_grad():
        head.projection.weight.normal_(0, 0.1, generator=torch.Generator().manual_seed(0))
    return head


@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("mask_truncated", [False, True])
def test_the_loss_equals_a_slow_loop(clip, mask_truncated: bool, value_head, rows) -> None:
    total, count, outside, pairs = 0.0, 0, 0, []
    for row in rows.unbind(0):
        if mask_truncated and row[keys.TRUNCATED]:
            continue
        hidden = value_head.trunk(input_ids=row[keys.TOKENS][None], use_cache=False).last_hidden_state[0]
        for t, is_action in enumerate(row[keys.ACTION_MASK].tolist()):
            if is_action:
                value = float(value_head.projection(hidden[t - 1]))
                old, target = float(row[keys.STATE_VALUE][t]), float(row[keys.VALUE_TARGET][t])
                near = value if clip is None else min(max(value, old - clip), old + clip)
                times = int(row[keys.MULTIPLICITY])
                total += times * max((value - target) ** 2, (near - target) ** 2) / 2
                count, outside = count + times, outside + times * (near != value)
                pairs += [(value, target)] * times
    loss = ValueLoss(value_head, clip_epsilon=clip, mask_truncated_completions=mask_truncated)
    out = loss(rows)
    assert out.loss_critic.item() == pytest.approx(total / count, rel=1e-4)
    assert out.value_clip_fraction.item() == pytest.approx(outside / count) and out.num_action_tokens.item() == count
    estimates, targets = torch.tensor(pairs, dtype=torch.float64).unbind(1)
    explained = 1 - (targets - estimates).var(correction=0) / targets.var(correction=0)
    assert out.explained_variance.item() == pytest.approx(explained.item(), abs=1e-4)


@pytest.mark.parametrize("size", [1, 3])
def test_micro_batches_have_the_gradient_of_the_whole(size: int, value_head, rows) -> None:
    loss = ValueLoss(value_head)
    parameters = list(value_head.parameters())
    whole = torch.autograd.grad(loss(rows).loss_critic, parameters)
    normalizers = loss.normalizers(rows)
    outputs = [loss(part, normalizers) for part in micro_batches(rows, size)]
    parts = sum(out.loss for out in outputs)
    merged, out = merge_outputs([*outputs, loss(rows[:0], normalizers)]), loss(rows)
    names = ("loss", "loss_critic", "explained_variance", "value_clip_fraction")
    assert merged == pytest.approx({n: getattr(out, n).item() for n in names}, rel=1e-4)
    for ours, theirs in zip(torch.autograd.grad(parts, parameters), whole, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)


def test_no_rows_are_no_loss(value_head, rows) -> None:
    out = ValueLoss(value_head)(rows[:0])
    out.loss_critic.backward()
    assert out.loss_critic == 0 and out.explained_variance.isnan()
    assert all((p.grad == 0).all() for p in value_head.parameters())


def test_missing_entries_are_named(value_head, rows) -> None:
    with pytest.raises(KeyError, match=keys.VALUE_TARGET):
        ValueLoss(value_head)(rows.exclude(keys.VALUE_TARGET))
    with pytest.raises(ValueError, match="clip_epsilon=0"):
        ValueLoss(value_head, clip_epsilon=0)
    with pytest.raises(ValueError, match="clip_epsilon=nan"):
        ValueLoss(value_head, clip_epsilon=math.nan)


def test_ppo_from_parts(tokenizer) -> None:
    """Policy and critic train several epochs on each batch; the policy learns to answer with even tokens."""
    model = build_model(tokenizer, seed=0).eval()
    kwargs = {"max_new_tokens": 3, "seed": 0, "ignore_eos": True}
    policy = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs=kwargs)
    head = ValueHead(model)
    actor = RLOOLoss(policy.get_new_version(generate=False), ratio="token", aggregation="token_mean")
    critic = ValueLoss(head)
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=5e-3)
    buffer = ReplayBuffer(storage=LazyStackStorage(64), transform=TokenGAE(head, lam=0.95))
    prompts = torch.randint(3, 20, (64, 3), generator=torch.Generator().manual_seed(0))
    returns, explained, losses = [], [], []
    for _ in range(20):
        rows = policy(stack_rows([TensorDict({keys.PROMPT_TOKENS: p}, []) for p in prompts]))
        for row in rows.unbind(0):
            response = row[keys.TOKENS][3:]
            row.set(keys.TOKEN_REWARDS, torch.cat([torch.zeros(3), (response % 2 == 0).float()]))
            row.set(keys.REWARD, row[keys.TOKEN_REWARDS].sum().reshape(1, 1))
            row.set(keys.TRUNCATED, torch.tensor([False]))
        returns.append(float(rows[keys.REWARD].mean()))
        buffer.empty()
        buffer.extend(rows)
        for _ in range(2):
            acted, valued = actor(buffer[:]), critic(buffer[:])
            (acted.loss_objective + valued.loss_critic).backward()
            optimizer.step()
            optimizer.zero_grad()
        explained.append(float(valued.explained_variance))
        losses.append(float(valued.loss_critic.detach()))
    assert returns[0] < 1.6 and returns[-1] > 2.5
    assert explained[0] < 0.1 and explained[-1] > 0.4
    assert losses[-1] < 0.5 * losses[0]
