from __future__ import annotations

import math

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch.nn.functional import logsigmoid

from torchrl_rloo.data import keys, stack_rows
from torchrl_rloo.data.preferences import MARGIN
from torchrl_rloo.embedded import build_model
from torchrl_rloo.modules.reward_model import RewardModel, load_reward_model
from torchrl_rloo.objectives import RewardModelLoss, merge_outputs

LENGTHS = [(5, 9), (12, 4), (3, 3), (7, 6), (10, 2)]
TERMS = {"centering_coeff": 0.3, "batch_sum_coeff": 2.0, "label_smoothing": 0.1}


@pytest.fixture(scope="module")
def reward_model(tokenizer, tmp_path_factory) -> RewardModel:
    directory = tmp_path_factory.mktemp("lm")
    build_model(tokenizer, seed=0).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    model, _ = load_reward_model(directory)
    with torch.no_grad():
        model.score.weight.normal_(generator=torch.Generator().manual_seed(0))
    return RewardModel(model)


@pytest.fixture
def pairs() -> TensorDictBase:
    g, rows = torch.Generator().manual_seed(0), []
    for i, lengths in enumerate(LENGTHS):
        parts = {
            part: TensorDict({keys.TOKENS: torch.randint(3, 300, (n,), generator=g)}, [])
            for part, n in zip(("chosen", "rejected"), lengths, strict=True)
        }
        rows.append(TensorDict({**parts, MARGIN: torch.tensor(0.25 * i)}, []))
    return stack_rows(rows)


def gradient_of(model: RewardModel, *losses: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    for loss in losses:
        loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def score_alone(model: RewardModel, row: TensorDictBase) -> torch.Tensor:
    return model.model(input_ids=row[keys.TOKENS][None]).logits[0, 0]


def test_the_loss_is_the_formula_of_scores_taken_one_by_one(reward_model, pairs):
    """Neither padding nor the other rows of a batch matter."""
    chosen, rejected = (
        torch.stack([score_alone(reward_model, r[p]) for r in pairs.unbind(0)]) for p in ("chosen", "rejected")
    )
    d, m = chosen - rejected, pairs[MARGIN]
    expected = -(0.9 * logsigmoid(d - m) + 0.1 * logsigmoid(-d - m)).mean()
    expected = expected + 0.3 * (chosen + rejected).square().mean() + 2 * torch.cat([chosen, rejected]).mean() ** 2
    out = RewardModelLoss(reward_model, **TERMS)(pairs)
    torch.testing.assert_close(out.loss, expected)
    torch.testing.assert_close(out.chosen_rewards, chosen.detach())
    gradient = gradient_of(reward_model, expected)
    tolerance = 1e-4 * float(gradient.abs().max())
    torch.testing.assert_close(gradient_of(reward_model, out.loss), gradient, rtol=1e-4, atol=tolerance)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_micro_batches_change_nothing(reward_model, pairs, size):
    loss_fn = RewardModelLoss(reward_model, **TERMS, micro_batch_size=size)
    whole = loss_fn(pairs)
    expected = gradient_of(reward_model, whole.loss)
    normalizers = loss_fn.normalizers(pairs)
    outputs = [loss_fn(part, normalizers) for part in pairs.split(size)]
    gradient = gradient_of(reward_model, *(o.loss for o in outputs))
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    merged, alone = merge_outputs([*outputs, loss_fn(pairs[:0])]), merge_outputs([whole])
    assert merged == pytest.approx(alone, rel=1e-4)
    assert {"loss_centering", "loss_batch_sum"} <= merged.keys()


def test_a_weight_is_as_many_rows(reward_model, pairs):
    loss_fn = RewardModelLoss(reward_model, **TERMS)
    twice = stack_rows([pairs[0], pairs[0], pairs[1]])
    merged = stack_rows([pairs[0].copy(), pairs[1].copy()])
    merged.set(keys.MULTIPLICITY, torch.tensor([2, 1]))
    torch.testing.assert_close(loss_fn(merged).loss, loss_fn(twice).loss)
    normalizers = loss_fn.normalizers(merged)
    torch.testing.assert_close(sum(loss_fn(p, normalizers).loss for p in merged.split(1)), loss_fn(twice).loss)


def test_a_sample_weight_multiplies_the_loss_as_in_every_other_loss(reward_model, pairs):
    loss_fn = RewardModelLoss(reward_model, centering_coeff=0.3)
    halved = stack_rows([row.copy().set(keys.SAMPLE_WEIGHT, torch.tensor(0.5)) for row in pairs.unbind(0)])
    torch.testing.assert_close(loss_fn(halved).loss, 0.5 * loss_fn(pairs).loss)
    normalizers = loss_fn.normalizers(halved)
    assert normalizers.num_rows == len(pairs)
    torch.testing.assert_close(sum(loss_fn(p, normalizers).loss for p in halved.split(2)), 0.5 * loss_fn(pairs).loss)


def test_terms_that_are_off_are_absent_and_cost_no_pass(reward_model, pairs):
    loss_fn = RewardModelLoss(reward_model)
    assert loss_fn.normalizers(pairs).mean_reward is None
    out = loss_fn(pairs.exclude(MARGIN))
    assert out.loss_centering is None and out.loss_batch_sum is None
    d = (out.chosen_rewards - out.rejected_rewards).double()
    metrics = merge_outputs([out])
    assert metrics["loss"] == pytest.approx(float(-logsigmoid(d).mean()), rel=1e-5)
    assert metrics["rewards/accuracy"] == pytest.approx(float((d > 0).double().mean()))
    assert metrics["rewards/margin"] == pytest.approx(metrics["rewards/chosen"] - metrics["rewards/rejected"])
    assert metrics["rewards/chosen_std"] == pytest.approx(float(out.chosen_rewards.double().std()))


def test_ties_count_half_and_know_nothing(tokenizer, tmp_path, pairs):
    """A head that starts at zero has loss log 2 and accuracy one half."""
    build_model(tokenizer, seed=0).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    out = RewardModelLoss(RewardModel(load_reward_model(tmp_path)[0]))(pairs.exclude(MARGIN))
    metrics = merge_outputs([out])
    assert metrics["loss"] == pytest.approx(math.log(2)) and metrics["rewards/accuracy"] == 0.5


def test_no_rows_have_a_gradient_of_zeros(reward_model, pairs):
    loss_fn = RewardModelLoss(reward_model, **TERMS)
    out = loss_fn(pairs[:0])
    assert float(out.loss) == 0 and not gradient_of(reward_model, out.loss).any()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"centering_coeff": -0.1}, "centering_coeff=-0.1 must be a finite number of at least 0"),
        ({"batch_sum_coeff": math.inf}, "batch_sum_coeff=inf"),
        ({"label_smoothing": 0.5}, r"label_smoothing=0.5 must be in \[0, 0.5\)"),
    ],
)
def test_settings_out_of_range_are_refused(reward_model, bad, message):
    with pytest.raises(ValueError, match=message):
        RewardModelLoss(reward_model, **bad)
    with pytest.raises(ValueError, match="must have a score"):
        RewardModelLoss(torch.nn.Linear(1, 1))


@pytest.mark.parametrize("batch_sum_coeff", [0.0, 0.1])
def test_a_step_without_pairs_has_no_loss(batch_sum_coeff):
    class Zero(torch.nn.Module):
        def score(self, rows):
            return torch.zeros(len(rows))

    rows = stack_rows([TensorDict({"chosen": TensorDict({}), "rejected": TensorDict({})})])[:0]
    normalizers = RewardModelLoss(Zero(), batch_sum_coeff=batch_sum_coeff).normalizers(rows)
    assert normalizers.num_rows == 0 and normalizers.mean_reward == (0.0 if batch_sum_coeff else None)
