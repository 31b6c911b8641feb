from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from torchrl_rloo.data import keys, stack_rows
from torchrl_rloo.embedded import build_model
from torchrl_rloo.modules.value import ValueHead

SHAPES = ["ppaa", "ppaaccaaa", "pppppapcca", "pa"]


@pytest.fixture(scope="module")
def rows() -> TensorDictBase:
    generator, result = torch.Generator().manual_seed(0), []
    for shape in SHAPES:
        tokens = torch.randint(3, 300, (len(shape),), generator=generator)
        mask = torch.tensor([c == "a" for c in shape])
        result.append(TensorDict({keys.TOKENS: tokens, keys.ACTION_MASK: mask}, []))
    return stack_rows(result)


@pytest.fixture
def own_model(tokenizer):
    return build_model(tokenizer, seed=0).eval()


def trained(head: ValueHead) -> ValueHead:
    with torch.no_grad():
        head.projection.weight.normal_(generator=torch.Generator().manual_seed(0))
        head.projection.bias.fill_(0.3)
    return head


def test_the_first_estimates_are_zero(own_model, rows) -> None:
    values, actions = ValueHead(own_model).values(rows)
    assert (values == 0).all() and values.dtype == torch.float32 and values.requires_grad
    assert values.shape == actions.mask.shape == (4, 5)
    assert actions.mask.sum(1).tolist() == [shape.count("a") for shape in SHAPES]


@pytest.mark.parametrize("share_trunk", [False, True])
def test_an_estimate_is_read_before_its_token(share_trunk: bool, own_model, rows) -> None:
    head = trained(ValueHead(own_model, share_trunk=share_trunk))
    values, actions = head.values(rows)
    for i, row in enumerate(rows.unbind(0)):
        hidden = own_model.model(input_ids=row[keys.TOKENS][None], use_cache=False).last_hidden_state[0]
        before = [t - 1 for t, is_action in enumerate(row[keys.ACTION_MASK].tolist()) if is_action]
        expected = hidden[before] @ head.projection.weight[0] + 0.3
        torch.testing.assert_close(values[i, : len(before)], expected, rtol=0, atol=1e-4)
        assert (values[i, len(before) :] == 0).all()


def test_an_estimate_knows_nothing_of_its_token(own_model, rows) -> None:
    head = trained(ValueHead(own_model))
    row = rows[0].clone()
    row[keys.TOKENS][-1] += 1
    changed, original = (head.values(stack_rows([r]))[0] for r in (row, rows[0]))
    assert torch.equal(changed, original)


def test_an_own_trunk_is_a_copy_that_trains(own_model, rows) -> None:
    head = trained(ValueHead(own_model))
    head.values(rows)[0].sum().backward()
    assert len(list(head.parameters())) == len(list(own_model.model.parameters())) + 2
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in head.parameters())
    assert all(p.grad is None for p in own_model.parameters())


def test_a_shared_trunk_stays_the_policys(own_model, rows) -> None:
    head = trained(ValueHead(own_model, share_trunk=True))
    assert [name for name, _ in head.named_parameters()] == ["projection.weight", "projection.bias"]
    assert set(head.state_dict()) == {"projection.weight", "projection.bias"}
    torch.optim.AdamW([*own_model.parameters(), *head.parameters()])  # raises for duplicate parameters
    head.values(rows)[0].sum().backward()
    assert all(p.grad is not None for p in own_model.model.parameters())


def test_the_head_is_float32_on_a_bfloat16_trunk(own_model, rows) -> None:
    head = trained(ValueHead(own_model.bfloat16()))
    assert head.projection.weight.dtype == torch.float32
    assert head.values(rows)[0].dtype == torch.float32


def test_a_model_without_decoder_is_refused() -> None:
    with pytest.raises(TypeError, match="it is a Linear"):
        ValueHead(torch.nn.Linear(2, 2))
