from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from torchrl_rloo.data import keys, stack_rows
from torchrl_rloo.modules import TransformersWrapper
from torchrl_rloo.modules.recording import record_log_probs
from torchrl_rloo.modules.reference import frozen_reference

SHAPES = ["ppaa", "ppaaccaaa", "pppppapcca", "pa", "ppp"]


@pytest.fixture
def rows() -> TensorDictBase:
    generator, result = torch.Generator().manual_seed(0), []
    for i, shape in enumerate(SHAPES):
        tokens = torch.randint(3, 300, (len(shape),), generator=generator)
        mask = torch.tensor([c == "a" for c in shape])
        result.append(TensorDict({keys.TOKENS: tokens, keys.ACTION_MASK: mask, keys.GROUP_ID: torch.tensor(i)}, []))
    return stack_rows(result)


@pytest.fixture(scope="module")
def policy(model, tokenizer) -> TransformersWrapper:
    return TransformersWrapper(model, tokenizer=tokenizer, generate=False)


@torch.no_grad()
def expected(model, row: TensorDictBase) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probs and entropies of one row from full logits without padding, 0 on context tokens."""
    tokens, mask = row[keys.TOKENS], row[keys.ACTION_MASK]
    full = model(input_ids=tokens[None], use_cache=False).logits[0, :-1].double().log_softmax(-1)
    own = full.gather(-1, tokens[1:, None])[:, 0]
    entropy = -(full.exp() * full).sum(-1)
    return tuple(torch.where(mask, torch.cat([torch.zeros(1), v.float()]), 0.0) for v in (own, entropy))


@pytest.mark.parametrize("split", [{}, {"micro_batch_size": 1}, {"micro_batch_size": 2}, {"max_tokens": 12}])
def test_each_row_gets_its_own_scores(split, policy, model, rows) -> None:
    out = record_log_probs(policy, rows, entropy=keys.PROXIMAL_ENTROPY, **split)
    assert out[keys.GROUP_ID].tolist() == list(range(len(SHAPES)))
    for row, written in zip(rows.unbind(0), out.unbind(0), strict=True):
        for key, values in zip((keys.PROXIMAL_LOG_PROBS, keys.PROXIMAL_ENTROPY), expected(model, row), strict=True):
            assert written[key].dtype == torch.float32 and not written[key].requires_grad
            torch.testing.assert_close(written[key], values, rtol=0, atol=2e-5)


def test_a_reference_and_the_entropy_left_out(policy, model, rows) -> None:
    record_log_probs(frozen_reference(policy), rows, log_probs=keys.REF_LOG_PROBS, micro_batch_size=2)
    for row in rows.unbind(0):
        torch.testing.assert_close(row[keys.REF_LOG_PROBS], expected(model, row)[0], rtol=0, atol=2e-5)
        assert set(row.keys(True, True)) == {keys.TOKENS, keys.ACTION_MASK, keys.GROUP_ID, keys.REF_LOG_PROBS}


def test_rows_of_equal_length_in_one_tensor(policy, rows) -> None:
    row = rows[1]
    dense = torch.stack([row, row.clone()]).contiguous()
    out = record_log_probs(policy, dense, micro_batch_size=1)
    assert out[keys.PROXIMAL_LOG_PROBS].shape == (2, len(SHAPES[1]))


def test_no_rows(policy, rows) -> None:
    assert len(record_log_probs(policy, rows[:0])) == 0
