from __future__ import annotations

import copy
import math

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch.nn.functional import logsigmoid

from support.gradients import assert_same_gradient, gradient_of
from torchrl_rloo.data import keys, stack_rows
from torchrl_rloo.data.preferences import CHOSEN, LABEL, MARGIN, REJECTED
from torchrl_rloo.embedded import build_model
from torchrl_rloo.functional.preference import KTO, PREFERENCE_OBJECTIVES, bradley_terry
from torchrl_rloo.modules import TransformersWrapper
from torchrl_rloo.modules.heads import RewardModel, load_reward_model
from torchrl_rloo.modules.reference import frozen_reference, record_log_probs
from torchrl_rloo.objectives import PreferenceLoss, RewardModelLoss, merge_outputs

PROMPTS = ["pp", "pppp", "p", "ppp"]
ANSWERS = [("aaa", "a"), ("a", "aaaa"), ("aapa", "aa"), ("aa", "aaa")]  # a marks the action tokens
DESIRABLE = [True, False, False, True]
PAIRED = [name for name, objective in PREFERENCE_OBJECTIVES.items() if objective.paired]
COEFFICIENTS = {
    "dpo": {"beta": 0.3, "label_smoothing": 0.1},
    "dpo_norm": {"beta": 2.0, "label_smoothing": 0.1},
    "ipo": {"beta": 0.3},
    "orpo": {"alpha": 0.4},
    "simpo": {"beta": 1.5, "gamma": 0.6, "cpo_alpha": 0.2},
    "kto": {"beta": 0.3, "desirable_weight": 1.2, "undesirable_weight": 0.7},
}


@pytest.fixture(scope="module")
def policy(tokenizer):
    """Separate policy: the tests leave gradients on it."""
    return TransformersWrapper(build_model(tokenizer, seed=0).eval(), tokenizer=tokenizer, generate=False)


@pytest.fixture(scope="module")
def reference(tokenizer):
    return frozen_reference(TransformersWrapper(build_model(tokenizer, seed=1).eval(), tokenizer=tokenizer))


@pytest.fixture
def make_loss(policy, reference):
    def make(objective: str, **settings) -> PreferenceLoss:
        if PREFERENCE_OBJECTIVES[objective].reference:
            settings = {"reference": reference} | settings
        return PreferenceLoss(policy, {"name": objective} | COEFFICIENTS[objective], **settings)

    return make


def row_of(prompt: torch.Tensor, answer: str, generator: torch.Generator) -> TensorDictBase:
    tokens = torch.cat([prompt, torch.randint(3, 300, (len(answer),), generator=generator)])
    mask = torch.tensor([False] * len(prompt) + [c == "a" for c in answer])
    return TensorDict({keys.TOKENS: tokens, keys.ACTION_MASK: mask})


@pytest.fixture
def pairs() -> TensorDictBase:
    generator, result = torch.Generator().manual_seed(0), []
    for shape, (good, bad) in zip(PROMPTS, ANSWERS, strict=True):
        prompt = torch.randint(3, 300, (len(shape),), generator=generator)
        result.append(
            TensorDict({CHOSEN: row_of(prompt, good, generator), REJECTED: row_of(prompt, bad, generator)}, [])
        )
    return stack_rows(result)


@pytest.fixture
def labeled(pairs) -> TensorDictBase:
    rows = [row[CHOSEN].clone() for row in pairs.unbind(0)]
    return stack_rows([row.set(LABEL, torch.tensor(d)) for row, d in zip(rows, DESIRABLE, strict=True)])


def log_prob(model, row: TensorDictBase, mean: bool) -> torch.Tensor:
    """Compute the log-prob of one completion from whole logits, without padding."""
    tokens, action = row[keys.TOKENS], row[keys.ACTION_MASK]
    full = model(input_ids=tokens[None], use_cache=False).logits[0].log_softmax(-1)
    values = [full[t - 1, tokens[t]] for t in range(len(tokens)) if action[t]]
    return sum(values) / (len(values) if mean else 1)


@pytest.mark.parametrize("name", PAIRED)
def test_pairs_have_the_loss_gradient_and_metrics_of_the_definition(make_loss, policy, reference, pairs, name):
    model, ref, objective = (
        copy.deepcopy(policy.model).double(),
        copy.deepcopy(reference.model).double(),
        PREFERENCE_OBJECTIVES[name],
    )
    losses, rewards, log_probs = [], [], []
    for row in pairs.unbind(0):
        own = [log_prob(model, row[part], objective.mean) for part in (CHOSEN, REJECTED)]
        with torch.no_grad():
            base = [log_prob(ref, row[part], objective.mean) for part in (CHOSEN, REJECTED)]
        scores = [p - q for p, q in zip(own, base, strict=True)] if objective.reference else own
        losses.append(objective(**COEFFICIENTS[name])(*scores))
        rewards.append([COEFFICIENTS[name].get("beta", 1.0) * s.item() for s in scores])
        log_probs.append([p.item() for p in own])
    out = make_loss(name)(pairs)
    expected = sum(losses) / len(losses)
    assert_same_gradient(gradient_of(policy.model, out.loss), gradient_of(model, expected))
    chosen, rejected = (sum(r[i] for r in rewards) / len(rewards) for i in (0, 1))
    assert merge_outputs([out]) == pytest.approx(
        {
            "loss": expected.item(),
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margin": chosen - rejected,
            "rewards/accuracy": sum(w > r for w, r in rewards) / len(rewards),
            "log_probs/chosen": sum(w for w, _ in log_probs) / len(log_probs),
            "log_probs/rejected": sum(r for _, r in log_probs) / len(log_probs),
        },
        rel=1e-4,
        abs=1e-5,
    )


def mixed(labeled: TensorDictBase) -> list[TensorDictBase]:
    """Return the prompts of ``PROMPTS`` with the completions of the following rows."""
    rows, result = labeled.unbind(0), []
    for i, prompt in enumerate(PROMPTS):
        j, n = (i + 1) % len(rows), len(prompt)
        m = len(PROMPTS[j])
        result.append({k: torch.cat([rows[i][k][:n], rows[j][k][m:]]) for k in (keys.TOKENS, keys.ACTION_MASK)})
    return result


@pytest.mark.parametrize("positive", [False, True])
def test_kto_has_the_loss_gradient_and_point_of_the_definition(policy, reference, labeled, positive):
    actor, other = (policy, reference) if not positive else (policy, _raise_reference_point(reference, labeled))
    model, ref, c = copy.deepcopy(actor.model).double(), copy.deepcopy(other.model).double(), COEFFICIENTS["kto"]
    with torch.no_grad():
        apart = [log_prob(model, row, False) - log_prob(ref, row, False) for row in mixed(labeled)]
        point = max(0.0, sum(x.item() for x in apart) / len(apart))
    assert (point > 0) == positive
    losses, correct = [], []
    for row, desirable in zip(labeled.unbind(0), DESIRABLE, strict=True):
        ratio = log_prob(model, row, False) - log_prob(ref, row, False).detach()
        sign, weight = (1, c["desirable_weight"]) if desirable else (-1, c["undesirable_weight"])
        losses.append(weight * (1 - torch.sigmoid(sign * c["beta"] * (ratio - point))))
        correct.append((ratio.item() > point) == desirable)
    out = PreferenceLoss(actor, KTO(**c), reference=other)(labeled)
    expected = sum(losses) / len(losses)
    assert_same_gradient(gradient_of(policy.model, out.loss), gradient_of(model, expected))
    metrics = merge_outputs([out])
    assert metrics["loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert metrics["rewards/accuracy"] == sum(correct) / len(correct)
    if positive:
        assert metrics["kl/reference_point"] == pytest.approx(point, rel=1e-4)
    assert len(out.chosen_rewards) == sum(DESIRABLE) and len(out.rejected_rewards) == len(DESIRABLE) - sum(DESIRABLE)


def _raise_reference_point(reference, labeled):
    """Train the reference to dislike the mismatched completions, so that z_0 is above 0."""
    worse = frozen_reference(reference)
    worse.model.requires_grad_(True)
    rows = stack_rows([TensorDict(row) for row in mixed(labeled)])
    optimizer = torch.optim.SGD(worse.model.parameters(), lr=0.02)
    for _ in range(3):
        worse.score(rows).log_probs.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    worse.model.requires_grad_(False)
    return worse


def weighted(rows: TensorDictBase) -> TensorDictBase:
    result = [row.clone() for row in rows.unbind(0)]
    for row, weight, copies in zip(result, (1.0, 0.5, 2.0, 0.0), (1, 3, 1, 2), strict=True):
        row.set(keys.SAMPLE_WEIGHT, torch.tensor(weight)).set(keys.MULTIPLICITY, torch.tensor(copies))
    return stack_rows(result)


@pytest.mark.parametrize("name", PREFERENCE_OBJECTIVES)
@pytest.mark.parametrize("size", [1, 3])
def test_micro_batches_sum_to_the_whole(policy, make_loss, pairs, labeled, name, size):
    rows = weighted(pairs if PREFERENCE_OBJECTIVES[name].paired else labeled)
    loss_fn = make_loss(name)
    whole, normalizers = loss_fn(rows), loss_fn.normalizers(rows)
    parts = [loss_fn(rows[i : i + size], normalizers) for i in range(0, len(rows), size)]
    assert merge_outputs(parts) == pytest.approx(merge_outputs([whole]), rel=1e-4, abs=1e-6)
    ours = gradient_of(policy.model, *(p.loss for p in parts))
    assert_same_gradient(ours, gradient_of(policy.model, whole.loss))


def test_recorded_log_probs_of_the_reference_do_as_well(make_loss, reference, pairs):
    with pytest.raises(KeyError, match="record_log_probs"):
        make_loss("dpo", reference="recorded")(pairs)
    for part in (CHOSEN, REJECTED):
        record_log_probs(reference, pairs[part], log_probs=keys.REF_LOG_PROBS, micro_batch_size=3)
    recorded, scored = (make_loss("dpo", **kw)(pairs) for kw in ({"reference": "recorded"}, {}))
    assert recorded.loss.item() == pytest.approx(scored.loss.item(), rel=1e-5)


def test_chosen_and_rejected_are_scored_in_one_pass(policy, reference, pairs):
    class Counting:
        passes, generate = 0, False

        def score(self, rows):
            self.passes += 1
            return policy.score(rows)

    counting = Counting()
    PreferenceLoss(counting, "dpo", reference=reference)(pairs)
    assert counting.passes == 1


def test_the_reference_is_neither_trained_nor_saved_with_the_loss(make_loss, policy, reference, pairs):
    loss_fn = make_loss("dpo")
    loss_fn(pairs).loss.backward()
    assert all(p.grad is None for p in reference.model.parameters())
    held = {id(p) for p in loss_fn.parameters()}
    assert not held & {id(p) for p in reference.model.parameters()}


@pytest.mark.parametrize(
    ("objective", "reference", "fault"),
    [
        ("ppo", None, r"objective='ppo' is unknown.*valid: \['dpo', 'dpo_norm', 'ipo'"),
        ({"name": "dpo", "gamma": 1.0}, None, r"unknown field 'gamma'; valid: \['beta', 'label_smoothing'\]"),
        ({"name": "simpo", "beta": 0.0}, None, "SimPO: beta=0.0 must be a number above 0"),
        ({"name": "simpo", "gamma": -1.0}, None, "SimPO: gamma=-1.0 must be a number of at least 0"),
        ({"name": "dpo", "label_smoothing": 0.5}, "recorded", r"label_smoothing=0.5 must be in \[0, 0.5\)"),
        ({"name": "dpo", "beta": math.nan}, "recorded", "beta=nan must be a number above 0"),
        ("dpo", None, "requires a reference; set it to .* or 'recorded'"),
        ("kto", None, "requires a reference; set it to a scorer such as frozen_reference"),
        ("kto", "recorded", "reference='recorded': objective=KTO.* requires a scorer"),
        ("dpo", "base", "reference='base': objective=DPO.* requires a scorer .* or 'recorded'"),
        ("dpo", object(), "reference=object must have a score"),
        ("orpo", "recorded", "objective=ORPO.* ignores it; remove it"),
        ("simpo", "recorded", "objective=SimPO.* ignores it; remove it"),
    ],
)
def test_settings_that_cannot_be_combined_are_refused(policy, objective, reference, fault):
    with pytest.raises(ValueError, match=fault):
        PreferenceLoss(policy, objective, reference=reference)


def test_a_reference_that_would_move_or_measure_otherwise_is_refused(policy):
    with pytest.raises(ValueError, match="with the model that is trained"):
        PreferenceLoss(policy, "dpo", reference=policy.get_new_version())
    warm = frozen_reference(policy).get_new_version(generate_kwargs={"temperature": 2.0})
    with pytest.raises(ValueError, match="give both the same"):
        PreferenceLoss(policy, "dpo", reference=warm)


def test_one_labeled_row_has_no_reference_point(make_loss, labeled):
    with pytest.raises(ValueError, match="at least 2 rows"):
        make_loss("kto")(labeled[:1])


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
def score_pairs() -> TensorDictBase:
    g, rows = torch.Generator().manual_seed(0), []
    for i, lengths in enumerate(LENGTHS):
        parts = {
            part: TensorDict({keys.TOKENS: torch.randint(3, 300, (n,), generator=g)}, [])
            for part, n in zip(("chosen", "rejected"), lengths, strict=True)
        }
        rows.append(TensorDict({**parts, MARGIN: torch.tensor(0.25 * i)}, []))
    return stack_rows(rows)


def score_alone(model: RewardModel, row: TensorDictBase) -> torch.Tensor:
    return model.model(input_ids=row[keys.TOKENS][None]).logits[0, 0]


def test_the_loss_is_the_formula_of_scores_taken_one_by_one(reward_model, score_pairs):
    """Neither padding nor the other rows of a batch matter."""
    chosen, rejected = (
        torch.stack([score_alone(reward_model, r[p]) for r in score_pairs.unbind(0)]) for p in ("chosen", "rejected")
    )
    d, m = chosen - rejected, score_pairs[MARGIN]
    expected = -(0.9 * logsigmoid(d - m) + 0.1 * logsigmoid(-d - m)).mean()
    expected = expected + 0.3 * (chosen + rejected).square().mean() + 2 * torch.cat([chosen, rejected]).mean() ** 2
    out = RewardModelLoss(reward_model, **TERMS)(score_pairs)
    torch.testing.assert_close(out.loss, expected)
    torch.testing.assert_close(out.chosen_rewards, chosen.detach())
    gradient = gradient_of(reward_model, expected)
    assert_same_gradient(gradient_of(reward_model, out.loss), gradient, 1e-4)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_micro_batches_change_nothing(reward_model, score_pairs, size):
    loss_fn = RewardModelLoss(reward_model, **TERMS, micro_batch_size=size)
    whole = loss_fn(score_pairs)
    expected = gradient_of(reward_model, whole.loss)
    normalizers = loss_fn.normalizers(score_pairs)
    outputs = [loss_fn(part, normalizers) for part in score_pairs.split(size)]
    assert_same_gradient(gradient_of(reward_model, *(o.loss for o in outputs)), expected, 1e-4)
    merged, alone = merge_outputs([*outputs, loss_fn(score_pairs[:0])]), merge_outputs([whole])
    assert merged == pytest.approx(alone, rel=1e-4)
    assert {"loss_centering", "loss_batch_sum"} <= merged.keys()


def test_a_weight_is_as_many_rows(reward_model, score_pairs):
    loss_fn = RewardModelLoss(reward_model, **TERMS)
    twice = stack_rows([score_pairs[0], score_pairs[0], score_pairs[1]])
    merged = stack_rows([score_pairs[0].copy(), score_pairs[1].copy()])
    merged.set(keys.MULTIPLICITY, torch.tensor([2, 1]))
    torch.testing.assert_close(loss_fn(merged).loss, loss_fn(twice).loss)
    normalizers = loss_fn.normalizers(merged)
    torch.testing.assert_close(sum(loss_fn(p, normalizers).loss for p in merged.split(1)), loss_fn(twice).loss)


def test_a_sample_weight_multiplies_the_loss_as_in_every_other_loss(reward_model, score_pairs):
    loss_fn = RewardModelLoss(reward_model, centering_coeff=0.3)
    halved = stack_rows([row.copy().set(keys.SAMPLE_WEIGHT, torch.tensor(0.5)) for row in score_pairs.unbind(0)])
    torch.testing.assert_close(loss_fn(halved).loss, 0.5 * loss_fn(score_pairs).loss)
    normalizers = loss_fn.normalizers(halved)
    assert normalizers.num_rows == len(score_pairs)
    torch.testing.assert_close(
        sum(loss_fn(p, normalizers).loss for p in halved.split(2)), 0.5 * loss_fn(score_pairs).loss
    )


def test_gaussian_rewards_are_means_and_their_variances_add_up(tokenizer, tmp_path, score_pairs):
    build_model(tokenizer, seed=0).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model = RewardModel(load_reward_model(tmp_path, gaussian=True)[0])
    torch.testing.assert_close(model.outputs(score_pairs["chosen"]), torch.zeros(len(LENGTHS), 2))
    with torch.no_grad():
        model.model.score.weight.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
    out = RewardModelLoss(model)(score_pairs)
    losses = []
    for row in score_pairs.unbind(0):
        (w, log_w), (r, log_r) = (model.outputs(row[part][None])[0] for part in ("chosen", "rejected"))
        variance = (2 * log_w).exp() + (2 * log_r).exp()
        losses.append(bradley_terry(w[None], r[None], row[MARGIN][None], variance=variance[None]))
    torch.testing.assert_close(out.loss, torch.cat(losses).mean())
    torch.testing.assert_close(out.chosen_rewards, model.score(score_pairs["chosen"]).detach())
    out.loss.backward()
    assert model.model.score.weight.grad[1].abs().sum() > 0


def test_terms_that_are_off_are_absent_and_cost_no_pass(reward_model, score_pairs):
    loss_fn = RewardModelLoss(reward_model)
    assert loss_fn.normalizers(score_pairs).mean_reward is None
    out = loss_fn(score_pairs.exclude(MARGIN))
    assert out.loss_centering is None and out.loss_batch_sum is None
    d = (out.chosen_rewards - out.rejected_rewards).double()
    metrics = merge_outputs([out])
    assert metrics["loss"] == pytest.approx(float(-logsigmoid(d).mean()), rel=1e-5)
    assert metrics["rewards/accuracy"] == pytest.approx(float((d > 0).double().mean()))
    assert metrics["rewards/margin"] == pytest.approx(metrics["rewards/chosen"] - metrics["rewards/rejected"])
    assert metrics["rewards/chosen_std"] == pytest.approx(float(out.chosen_rewards.double().std()))


def test_no_rows_have_a_gradient_of_zeros(reward_model, score_pairs):
    loss_fn = RewardModelLoss(reward_model, **TERMS)
    out = loss_fn(score_pairs[:0])
    assert float(out.loss) == 0 and not any(g.any() for g in gradient_of(reward_model, out.loss))
    for coeff in (0.0, 0.1):
        normalizers = RewardModelLoss(reward_model, batch_sum_coeff=coeff).normalizers(score_pairs[:0])
        assert normalizers.num_rows == 0 and normalizers.mean_reward == (0.0 if coeff else None)


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
