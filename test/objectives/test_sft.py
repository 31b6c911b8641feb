from __future__ import annotations

import copy

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch.nn.functional import logsigmoid
from torchrl.objectives import llm as their_objectives

from support.gradients import assert_same_gradient, gradient_of
from torchrl_rloo.data import keys, stack_rows
from torchrl_rloo.data.rows import micro_batches
from torchrl_rloo.embedded import build_model
from torchrl_rloo.functional.policy_loss import ConstantLength
from torchrl_rloo.modules import TransformersWrapper, record_log_probs
from torchrl_rloo.objectives import SFTLoss, merge_outputs

SHAPES = ["ppaa", "ppaaccaaa", "pppppapcca", "pa", "ppaaaaaaccac"]  # a marks the action tokens
WEIGHTS, COPIES = [1.0, 0.5, 2.0, 0.0, 1.5], [1, 3, 1, 2, 1]


@pytest.fixture(scope="module")
def model(tokenizer):
    """Separate model: the tests leave gradients on it."""
    return build_model(tokenizer, seed=0).eval()


@pytest.fixture
def make_loss(model, tokenizer):
    return lambda **settings: SFTLoss(TransformersWrapper(model, tokenizer=tokenizer, generate=False), **settings)


@pytest.fixture(scope="module")
def rows() -> TensorDictBase:
    generator = torch.Generator().manual_seed(0)
    return stack_rows(
        [
            TensorDict(
                {
                    keys.TOKENS: torch.randint(3, 300, (len(shape),), generator=generator),
                    keys.ACTION_MASK: torch.tensor([c == "a" for c in shape]),
                }
            )
            for shape in SHAPES
        ]
    )


@pytest.fixture(scope="module")
def weighted_rows(rows) -> TensorDictBase:
    result = [row.clone() for row in rows.unbind(0)]
    for row, weight, copies in zip(result, WEIGHTS, COPIES, strict=True):
        row.set(keys.SAMPLE_WEIGHT, torch.tensor(weight)).set(keys.MULTIPLICITY, torch.tensor(copies))
    return stack_rows(result)


def plain_sft(model, rows: TensorDictBase, aggregation: str, constant: float | None):
    """Compute the definition in float64: each row alone, repeated by its multiplicity."""
    exact = copy.deepcopy(model).double()
    total, num_rows, num_tokens = 0.0, 0, 0
    for row in rows.unbind(0):
        tokens, action = row[keys.TOKENS], row[keys.ACTION_MASK]
        full = exact(input_ids=tokens[None], use_cache=False).logits[0].log_softmax(-1)
        nll = [-full[t - 1, tokens[t]] for t in range(len(tokens)) if action[t]]
        weight = float(row.get(keys.SAMPLE_WEIGHT, 1.0))
        for _ in range(int(row.get(keys.MULTIPLICITY, 1))):
            total = total + weight * sum(nll) / (len(nll) if aggregation == "sequence_mean" else 1)
            num_rows, num_tokens = num_rows + 1, num_tokens + len(nll)
    divisor = {"token_mean": num_tokens, "constant": num_rows * (constant or 0)}.get(aggregation, num_rows)
    return total / divisor, gradient_of(exact, total / divisor)


@pytest.mark.parametrize("which", ["rows", "weighted_rows"])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "sequence_sum", "constant"])
def test_loss_and_gradient_are_those_of_the_definition(request, model, make_loss, which, aggregation):
    rows, constant = request.getfixturevalue(which), 12.0 if aggregation == "constant" else None
    out = make_loss(aggregation=ConstantLength(constant) if constant else aggregation)(rows)
    loss = out.loss
    expected, gradient = plain_sft(model, rows, aggregation, constant)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    if which == "rows":
        mean, _ = plain_sft(model, rows, "token_mean", None)
        assert out.num_action_tokens.item() == sum(shape.count("a") for shape in SHAPES)
        assert out.nll.item() == pytest.approx(mean.item(), rel=1e-5) and not out.nll.requires_grad
        assert 0 < out.entropy.item() < 6 and not out.entropy.requires_grad
    assert_same_gradient(gradient_of(model, loss), gradient)


def scores(model, rows: TensorDictBase) -> list[torch.Tensor]:
    """Return the log-probs of each row's action tokens, of one row at a time in float64."""
    result = []
    for row in rows.unbind(0):
        tokens, action = row[keys.TOKENS], row[keys.ACTION_MASK]
        full = model(input_ids=tokens[None], use_cache=False).logits[0].log_softmax(-1)
        result.append(torch.stack([full[t - 1, tokens[t]] for t in range(len(tokens)) if action[t]]))
    return result


@pytest.fixture(scope="module")
def reference(tokenizer) -> TransformersWrapper:
    return TransformersWrapper(build_model(tokenizer, seed=1).eval(), tokenizer=tokenizer, generate=False)


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {"kl_to_ref_coeff": 0.3},
        {"kl_to_ref_coeff": 0.3, "aggregation": "sequence_mean"},
        {"loss_function": "minor_sft", "beta": 0.7},
        {"loss_function": "minor_sft", "beta": 0.7, "aggregation": "sequence_sum"},
    ],
    ids=str,
)
def test_losses_with_a_reference_are_those_of_the_definition(model, make_loss, rows, reference, settings, recorded):
    exact, ref = copy.deepcopy(model).double(), copy.deepcopy(reference.model).double()
    ours, theirs = scores(exact, rows), [s.detach() for s in scores(ref, rows)]
    mean = settings.get("aggregation") != "sequence_sum"
    if "beta" in settings:
        ratios = [(x - y).mean() if mean else (x - y).sum() for x, y in zip(ours, theirs, strict=True)]
        expected = -sum(logsigmoid(0.7 * ratio) for ratio in ratios) / len(rows)
    else:
        differences = [y - x for x, y in zip(ours, theirs, strict=True)]
        kl = torch.cat([d.exp() - 1 - d for d in differences]).mean()
        sft = -torch.cat(ours).mean() if "aggregation" not in settings else -sum(x.mean() for x in ours) / len(rows)
        expected = sft + 0.3 * kl
    scored = record_log_probs(reference, rows.clone(), log_probs=keys.REF_LOG_PROBS) if recorded else rows
    loss_fn = make_loss(**settings, reference="recorded" if recorded else reference)
    out = loss_fn(scored)
    assert out.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert_same_gradient(gradient_of(model, out.loss), gradient_of(exact, expected))
    normalizers = loss_fn.normalizers(scored)
    outputs = [loss_fn(part, normalizers) for part in (*micro_batches(scored, 2), scored[:0])]
    assert merge_outputs(outputs) == pytest.approx(merge_outputs([out]), rel=1e-4)
    assert merge_outputs([out])["kl"] > 0


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("minor", [True, False])
def test_torchrl_computes_the_same_on_equal_rows(tokenizer, make_loss, rows, reference, normalize, minor):
    """TorchRL divides its KL by all tokens; ours counts the action tokens."""
    rows = record_log_probs(reference, rows.clone(), log_probs=keys.REF_LOG_PROBS)
    ours = make_loss(
        aggregation="sequence_mean" if normalize else "sequence_sum",
        loss_function="minor_sft" if minor else "sft",
        kl_to_ref_coeff=0.0 if minor else 0.3,
        reference="recorded",
    )

    class OurScorer(torch.nn.Module):
        def forward(self, conversations: TensorDictBase) -> TensorDictBase:
            return ours.actor_network(rows.clone())  # the conversations say nothing

    theirs = their_objectives.SFTLoss(
        OurScorer(),
        tokenizer=tokenizer,
        normalize_by_seq_length=normalize,
        kl_to_ref_coeff=None if minor else 0.3,
        loss_function="minor_sft" if minor else "sft",
    )
    given = [row.set(("history", "full"), torch.zeros(())) for row in rows.unbind(0)]
    for row in given:
        row.set(keys.ATTENTION_MASK, torch.ones_like(row[keys.ACTION_MASK]))
    expected, out = theirs(stack_rows(given)), ours(rows)
    assert out.loss_sft.item() == pytest.approx(expected.loss_sft.item(), rel=1e-5)
    if not minor:
        share = float(out.num_action_tokens) / sum(map(len, SHAPES))
        assert out.kl.item() * share == pytest.approx(expected.kl_to_ref.item(), rel=1e-4)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "sequence_sum"])
@pytest.mark.parametrize("size", [1, 3])
def test_micro_batches_sum_to_the_whole(model, make_loss, weighted_rows, aggregation, size):
    loss_fn = make_loss(aggregation=aggregation)
    whole = loss_fn(weighted_rows).loss
    normalizers = loss_fn.normalizers(weighted_rows)
    parts = [loss_fn(part, normalizers).loss for part in micro_batches(weighted_rows, size)]
    assert sum(parts).item() == pytest.approx(whole.item(), rel=1e-5)
    outputs = [loss_fn(part, normalizers) for part in micro_batches(weighted_rows, size)]
    outputs.append(loss_fn(weighted_rows[:0], normalizers))
    merged, out = merge_outputs(outputs), loss_fn(weighted_rows)
    assert merged == pytest.approx({n: getattr(out, n).item() for n in ("loss", "nll", "entropy")}, rel=1e-5)
    assert_same_gradient(gradient_of(model, *parts), gradient_of(model, whole))


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"aggregation": "mean"}, "aggregation='mean' is unknown"),
        ({"aggregation": "constant"}, r"aggregation='constant' requires \['length'\]"),
        ({"loss_function": "major_sft"}, "must be 'sft' or 'minor_sft'"),
        ({"loss_function": "minor_sft"}, "requires a reference"),
        ({"loss_function": "minor_sft", "aggregation": "token_mean"}, "cannot be combined"),
        ({"kl_to_ref_coeff": 0.1}, "requires a reference"),
        ({"kl_to_ref_coeff": -0.1}, "kl_to_ref_coeff=-0.1"),
        ({"reference": "recorded"}, "ignores it"),
    ],
)
def test_settings_that_cannot_be_combined_are_refused(make_loss, settings, fault):
    with pytest.raises(ValueError, match=fault):
        make_loss(**settings)
