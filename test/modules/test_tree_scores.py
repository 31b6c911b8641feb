"""Scores, losses and gradients of rows that share tokens anywhere equal those of each row by itself."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from support.packed_rows import build, tree_rows
from torchrl_rloo.data import keys, stack_rows
from torchrl_rloo.data.rows import micro_batches, prefix_order, ragged
from torchrl_rloo.modules import TransformersWrapper, add_adapter
from torchrl_rloo.objectives import RLOOLoss
from torchrl_rloo.training import accumulate


def make_rows(seed: int, with_support: bool = False) -> TensorDictBase:
    """Make rows of two trees with advantages, log-probs of a sampler and, on request, a support of each action."""
    generator, rows = torch.Generator().manual_seed(seed), []
    for tokens, mask in zip(*tree_rows(seed), strict=True):
        entries = {
            keys.TOKENS: tokens,
            keys.ACTION_MASK: mask,
            keys.ATTENTION_MASK: torch.ones_like(mask),
            keys.LOG_PROBS: -4 * torch.rand(len(tokens), generator=generator) * mask,
            keys.ADVANTAGE: torch.randn(1, 1, generator=generator),
        }
        if with_support:
            others = torch.randperm(48, generator=generator)[:7].tolist()
            supports = [sorted({*others, action}) for action in tokens[mask].tolist()]
            entries[keys.SUPPORT_IDS] = torch.tensor([i for ids in supports for i in ids], dtype=torch.int32)
            entries[keys.SUPPORT_SIZES] = torch.tensor([len(ids) for ids in supports], dtype=torch.int32)
        rows.append(TensorDict(entries, []))
    return stack_rows(rows)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys() and any(gradient.any() for gradient in expected.values())
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-5 * largest, msg=name)


def score(policy: TransformersWrapper, parts: Sequence[TensorDictBase]) -> torch.Tensor:
    """Return the log-probs of all action tokens, after a backward pass through them and their entropies."""
    log_probs, loss = [], torch.zeros(())
    for part in parts:
        scored = policy.score(part)
        log_probs.append(scored.log_probs[scored.actions.mask])
        loss = loss + log_probs[-1].square().sum() + scored.entropy.square().sum()
    loss.backward()
    return torch.cat(log_probs).detach()


@pytest.mark.parametrize("family", ["qwen2", "mistral"])
@pytest.mark.parametrize("case", ["weights", "adapter", "support"])
def test_log_probs_and_entropies_are_those_of_single_rows(case: str, family: str, tokenizer) -> None:
    model = build(family, dtype=torch.float32, **({"sliding_window": 4} if family == "mistral" else {}))
    if case == "adapter":
        pytest.importorskip("peft")
        model = add_adapter(model, {"r": 4, "init_lora_weights": False})
    rows = make_rows(1, with_support=case == "support")
    alone = TransformersWrapper(model, tokenizer=tokenizer, generate=False)
    expected = score(alone, [stack_rows([row]) for row in rows.unbind(0)])
    expected_gradients = gradients(model)
    found = score(alone.get_new_version(packing="shared_prefix"), [rows])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert_same(gradients(model), expected_gradients)


@pytest.mark.parametrize("max_tokens", [None, 30])
def test_a_loss_has_the_gradient_of_padded_rows(max_tokens: int | None, tokenizer) -> None:
    model, rows = build("qwen2", dtype=torch.float32), make_rows(2)
    policy = TransformersWrapper(model, tokenizer=tokenizer, generate=False)
    (expected,) = accumulate(RLOOLoss(policy), rows)
    expected_gradients = gradients(model)
    outputs = accumulate(RLOOLoss(policy.get_new_version(packing="shared_prefix")), rows, max_tokens=max_tokens)
    assert float(sum(out.loss for out in outputs)) == pytest.approx(float(expected.loss), abs=1e-6)
    assert_same(gradients(model), expected_gradients)
    # The limit counts distinct tokens
    parts = list(micro_batches(rows, max_tokens=max_tokens, packing="shared_prefix"))
    assert len(outputs) == len(parts)
    for part in parts:
        tokens = ragged(part, keys.TOKENS)
        distinct = sum(map(len, tokens)) - sum(prefix_order(tokens)[1])
        assert max_tokens is None or len(part) == 1 or distinct <= max_tokens
    if max_tokens is not None:
        assert 1 < len(parts) < len(list(micro_batches(rows, max_tokens=max_tokens, packing="packed")))
