"""Gradient accumulation, minibatches of equal weight, and optimizer steps."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement

from support.checkpoints import save_checkpoint
from torchrl_rloo.data import keys, load_preferences, stack_rows
from torchrl_rloo.embedded import addition_preferences, build_model, build_tokenizer
from torchrl_rloo.modules import TransformersWrapper
from torchrl_rloo.modules.heads import RewardModel, encode_pairs, load_reward_model
from torchrl_rloo.objectives import RLOOLoss, merge_outputs
from torchrl_rloo.objectives.preference import RewardModelLoss
from torchrl_rloo.training import accumulate, minibatches, optimizer_step


@pytest.fixture(scope="module")
def policy():
    tokenizer = build_tokenizer()
    return TransformersWrapper(build_model(tokenizer, seed=0).eval(), tokenizer=tokenizer, generate=False)


def make_rows(advantages):
    """Return a row for each advantage; the first two are equal token by token."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for i, advantage in enumerate(advantages):
        length = 5 + i % 3
        tokens = torch.randint(5, 200, (length,), generator=generator)
        if i == 1:
            tokens, length = rows[0][keys.TOKENS], len(rows[0][keys.TOKENS])
        mask = torch.arange(length) >= 2
        behaviour = torch.where(mask, -6.0, 0.0)
        entries = {keys.TOKENS: tokens, keys.ACTION_MASK: mask, keys.LOG_PROBS: behaviour}
        rows.append(TensorDict(entries | {keys.ADVANTAGE: torch.tensor([[advantage]])}))
    return stack_rows(rows)


def gradient(policy, rows, **kwargs):
    policy.model.zero_grad()
    outputs = accumulate(RLOOLoss(policy, ratio="token", aggregation="token_mean"), rows, **kwargs)
    vector = torch.cat([p.grad.flatten() for p in policy.model.parameters() if p.grad is not None])
    return vector, outputs


@pytest.mark.parametrize(
    "kwargs",
    [
        {"micro_batch_size": 2},
        {"max_tokens": 12},
        {"merge_identical": True},
        {"merge_identical": True, "max_tokens": 7},
    ],
    ids=["rows", "tokens", "merged", "merged and split"],
)
def test_the_gradient_does_not_depend_on_the_cut(policy, kwargs):
    rows = make_rows([0.5, 0.5, -1.0, 0.0, 2.0, 0.0])
    whole, (one,) = gradient(policy, rows)
    cut, outputs = gradient(policy, rows, **kwargs)
    torch.testing.assert_close(cut, whole, rtol=1e-4, atol=1e-7)
    merged, expected = merge_outputs(outputs), merge_outputs([one])
    assert merged["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert whole.abs().max() > 1e-4  # otherwise the test would prove nothing


def test_an_evaluation_has_the_outputs_of_a_step_without_its_gradient(policy):
    _, outputs = gradient(policy, make_rows([0.5, -1.0, 2.0]), micro_batch_size=2)
    policy.model.zero_grad()
    loss_fn = RLOOLoss(policy, ratio="token", aggregation="token_mean")
    found = accumulate(loss_fn, make_rows([0.5, -1.0, 2.0]), micro_batch_size=2, backward=False)
    assert merge_outputs(found) == merge_outputs(outputs)
    assert all(p.grad is None for p in policy.model.parameters())


def test_rows_of_zero_advantage_are_skipped_but_counted(policy):
    rows = make_rows([1.0, -1.0, 0.0, 0.0])
    whole, outputs = gradient(policy, rows)
    assert sum(int(o.num_action_tokens) for o in outputs) < sum(int(r[keys.ACTION_MASK].sum()) for r in rows.unbind(0))
    alone, _ = gradient(policy, rows[:2])
    share = sum(int(r[keys.ACTION_MASK].sum()) for r in rows[:2].unbind(0)) / sum(
        int(r[keys.ACTION_MASK].sum()) for r in rows.unbind(0)
    )
    torch.testing.assert_close(whole, alone * share, rtol=1e-3, atol=1e-6)


def test_a_batch_without_signal_has_a_gradient_of_zeros(policy):
    vector, outputs = gradient(policy, make_rows([0.0, 0.0]))
    assert not vector.any() and merge_outputs(outputs) == {}


def test_pairs_are_cut_by_their_number(policy, tmp_path):
    classifier, tokenizer = load_reward_model(save_checkpoint(tmp_path, policy.model, policy.tokenizer))
    torch.nn.init.normal_(classifier.score.weight, generator=torch.Generator().manual_seed(0))
    loss_fn = RewardModelLoss(RewardModel(classifier), batch_sum_coeff=0.1)
    examples = load_preferences(addition_preferences(12)[:5], "chat_template.argilla_chat")
    pairs, gradients = encode_pairs(examples, tokenizer), []
    for size, number in ((None, 1), (2, 3)):
        assert len(accumulate(loss_fn, pairs, micro_batch_size=size)) == number
        gradients.append(torch.cat([p.grad.flatten() for p in classifier.parameters()]))
        loss_fn.zero_grad()
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match="max_tokens=9 cannot be used with preference pairs"):
        accumulate(loss_fn, pairs, max_tokens=9)
    with pytest.raises(ValueError, match="micro_batch_size=0 must be at least 1"):
        accumulate(loss_fn, pairs, micro_batch_size=0)


def fill(number: int) -> ReplayBuffer:
    buffer = ReplayBuffer(storage=LazyStackStorage(16), sampler=SamplerWithoutReplacement())
    if number:
        buffer.extend(stack_rows([TensorDict({"i": torch.tensor(i)}) for i in range(number)]))
    return buffer


@pytest.mark.parametrize(
    ("rows", "number", "sizes"), [(12, 2, [6, 6]), (13, 2, [7, 6]), (12, 1, [12]), (2, 4, [1, 1]), (0, 3, [])]
)
def test_minibatches_have_nearly_equal_sizes(rows, number, sizes):
    buffer = fill(rows)
    for _ in range(2):
        batches = [batch["i"].tolist() for batch in minibatches(buffer, number, epochs=2)]
        assert sorted(map(len, batches[: len(sizes)]), reverse=True) == sizes and len(batches) == 2 * len(sizes)
        assert sorted(sum(batches[: len(sizes)], [])) == sorted(sum(batches[len(sizes) :], [])) == list(range(rows))


def test_a_step_clips_and_clears():
    model = torch.nn.Linear(2, 1, bias=False)
    optimizer, before = torch.optim.SGD(model.parameters(), lr=1.0), model.weight.detach().clone()
    model(torch.tensor([[30.0, 40.0]])).sum().backward()
    assert float(optimizer_step(model, optimizer, max_grad_norm=1.0)) == pytest.approx(50.0)
    torch.testing.assert_close(before - model.weight, torch.tensor([[0.6, 0.8]]), rtol=1e-4, atol=1e-6)
    assert model.weight.grad is None
    for limit in (0, -1.0):
        with pytest.raises(ValueError, match="max_grad_norm=.* must be above 0"):
            optimizer_step(model, optimizer, max_grad_norm=limit)


def test_a_gradient_that_is_not_finite_changes_nothing():
    model = torch.nn.Linear(2, 1)
    model(torch.full((1, 2), torch.inf)).sum().backward()
    before = model.weight.detach().clone()
    with pytest.raises(RuntimeError, match="non-finite"):
        optimizer_step(model, torch.optim.SGD(model.parameters(), lr=1.0))
    assert torch.equal(model.weight, before)
