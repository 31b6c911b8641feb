"""RLOOLoss over the product of its choices, against one plain implementation of their definitions."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDictBase

from support.gradients import assert_same_gradient, gradient_of
from support.plain_losses import plain_kl, plain_surrogate, plain_weight
from torchrl_rloo.data import keys, stack_rows
from torchrl_rloo.embedded import build_model
from torchrl_rloo.functional import Clip, RatioSpec
from torchrl_rloo.functional.ratios import sequence_log_ratio
from torchrl_rloo.modules import TransformersWrapper
from torchrl_rloo.objectives import RLOOLoss, RLOOLossOutput, merge_outputs

# --- the plain implementation: row by row, token by token ---


def split(spec) -> tuple[str | None, dict]:
    """Return the name of a choice and its fields."""
    fields = {"name": spec} if spec is None or isinstance(spec, str) else dict(spec)
    return fields.pop("name"), fields


def entropy_bar(rows, lengths: list[int], multiplicities: list[int], fraction: float) -> float:
    """Return the smallest entropy within the given share of highest-entropy tokens."""
    entropies = []
    for row, length, copies in zip(rows, lengths, multiplicities, strict=True):
        if length:
            entropies += row[keys.PROXIMAL_ENTROPY][row[keys.ACTION_MASK]].tolist() * copies
    return sorted(entropies, reverse=True)[round(fraction * len(entropies)) - 1]


class Token(NamedTuple):
    """Properties of an action token that metrics may read."""

    row: int
    copies: int
    advantage: float
    flat: bool  # the surrogate removes its gradient
    correction: float  # 0 if the token is masked


def plain_loss(log_probs, entropies, batch, chosen: dict, seen: list[Token] | None = None) -> dict[str, torch.Tensor]:
    """Compute the terms of the loss from each row's log-probs and entropies (float64 ``[A_i]``, with gradient)."""
    rows, ratio = list(batch.unbind(0)), chosen.get("ratio", "sequence")
    kl_estimator = chosen.get("kl_estimator", "k3")
    surrogate, surrogate_fields = split(chosen.get("surrogate", "clip"))
    correction, correction_fields = split(chosen.get("correction"))
    aggregation, aggregation_fields = split(chosen.get("aggregation", "sequence_sum"))
    counted, lengths, copies = [], [], []
    for row in rows:
        out = chosen.get("mask_truncated_completions", False) and row[keys.TRUNCATED].item()
        counted.append(not out)
        lengths.append(0 if out else int(row[keys.ACTION_MASK].sum()))
        copies.append(int(row.get(keys.MULTIPLICITY, 1)))
    num_rows = sum(copies)
    num_tokens = sum(c * n for c, n in zip(copies, lengths, strict=True))
    bar = -math.inf
    if chosen.get("high_entropy_fraction") is not None:
        bar = entropy_bar(rows, lengths, copies, chosen["high_entropy_fraction"])
    zero = torch.zeros((), dtype=torch.float64)
    terms = {name: zero for name in ("loss_objective", "loss_kl_to_ref", "loss_kl_to_inference", "loss_entropy")}
    for i, row in enumerate(rows):
        if not lengths[i]:
            continue
        action, new = row[keys.ACTION_MASK], log_probs[i]
        now, n = new.tolist(), lengths[i]
        sampler = row[keys.LOG_PROBS][action].tolist()
        proximal = row[keys.PROXIMAL_LOG_PROBS][action].tolist()
        old = proximal if chosen.get("old_log_probs") == "proximal" else sampler
        spread = row[keys.ADVANTAGE].expand(len(action), 1)[action, 0].tolist()
        differences = [new[t] - old[t] for t in range(n)]
        total = sum(differences)
        corrected = proximal if chosen.get("old_log_probs") == "proximal" else now
        log_weights = [corrected[t] - sampler[t] for t in range(n)]
        gone = sum(sampler[t] - now[t] for t in range(n)) / n
        token_weight = {
            "sequence_sum": 1 / num_rows,
            "sequence_mean": 1 / (num_rows * n),
            "token_mean": 1 / max(num_tokens, 1),
            "constant": 1 / (num_rows * aggregation_fields.get("length", 1.0)),
        }[aggregation]
        token_weight *= copies[i] * float(row.get(keys.SAMPLE_WEIGHT, 1.0))
        for t in range(n):
            own = new[t] - new[t].detach()  # 0, with the gradient of the token's log-prob
            log_ratio = {"none": own, "token": differences[t], "sequence": total}.get(ratio)
            if ratio == "sequence_mean":
                log_ratio = total.detach() / n + own
            loss = plain_surrogate(surrogate, log_ratio.exp(), spread[t], new[t], old[t], **surrogate_fields)
            if ratio == "sequence" and surrogate in ("clip", "unclipped", "sapo", "dro"):
                loss = loss / n  # one loss for the whole sequence, shared by its tokens
            flat = not loss.requires_grad or not torch.autograd.grad(loss, new, retain_graph=True)[0].any()
            weight = 1.0
            if correction:
                weight = plain_weight(correction, log_weights, t, **correction_fields)
            threshold = chosen.get("off_policy_mask_threshold")
            off_policy = threshold is not None and spread[t] < 0 and gone > threshold
            weight *= not off_policy and row[keys.PROXIMAL_ENTROPY][action][t].item() >= bar
            terms["loss_objective"] = terms["loss_objective"] + token_weight * weight * loss
            if seen is not None:
                seen.append(Token(i, copies[i], spread[t], flat, weight))
            start = sampler[t] if chosen.get("kl_importance_weighted") else None
            for name, other in (
                ("kl_to_ref", row[keys.REF_LOG_PROBS][action][t].item()),
                ("kl_to_inference", sampler[t]),
            ):
                coefficient = chosen.get(f"{name}_coeff", 0.0)
                if coefficient:
                    kl = plain_kl(kl_estimator, new[t], other, start)
                    terms[f"loss_{name}"] = terms[f"loss_{name}"] + token_weight * coefficient * kl
            terms["loss_entropy"] = (
                terms["loss_entropy"] - token_weight * chosen.get("entropy_coeff", 0) * entropies[i][t]
            )
    return terms


@dataclass
class Exact:
    """Policy in float64: log-probs and entropies of action tokens, and gradients through them."""

    module: torch.nn.Module
    distributions: Callable[[torch.Tensor], torch.Tensor]  # tokens [T] -> log-probs [T - 1, V] of all but the first
    seen: dict[int, tuple[torch.Tensor, torch.Tensor]]

    def of_row(self, row: TensorDictBase) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, action = row[keys.TOKENS], row[keys.ACTION_MASK][1:]
        key = hash(tuple(tokens.tolist()))
        if key not in self.seen:
            full = self.distributions(tokens)
            taken = full.gather(-1, tokens[1:, None])[:, 0][action]
            self.seen[key] = taken, -(full.exp() * full).sum(-1)[action]
        return self.seen[key]

    def action_tokens(self, batch: TensorDictBase, chosen: dict) -> list[Token]:
        pairs = [tuple(x.detach().requires_grad_() for x in self.of_row(row)) for row in batch.unbind(0)]
        plain_loss([x for x, _ in pairs], [h for _, h in pairs], batch, chosen, seen := [])
        return seen

    def loss_and_gradient(self, batch, chosen) -> tuple[dict[str, float], list[torch.Tensor]]:
        graphs = [self.of_row(row) for row in batch.unbind(0)]
        leaves = [tuple(x.detach().clone().requires_grad_() for x in pair) for pair in graphs]
        terms = plain_loss([x for x, _ in leaves], [h for _, h in leaves], batch, chosen)
        total = sum(terms.values())
        flat = [x for pair in leaves for x in pair]
        gradients = torch.autograd.grad(total, flat, allow_unused=True, materialize_grads=True)
        roots = [x for pair in graphs for x in pair]
        parameters = list(self.module.parameters())
        result = torch.autograd.grad(
            roots, parameters, gradients, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        return {name: float(value.detach()) for name, value in terms.items()}, list(result)


# --- the settings ---

RATIO_CHOICES = ["none", "token", "sequence", "sequence_mean"]
SURROGATE_CHOICES = [
    {},
    {"surrogate": {"name": "clip", "low": 0.1, "high": 0.3}},
    {"surrogate": "unclipped"},
    {"surrogate": {"name": "clip", "dual": 1.3}},
    {"surrogate": "cispo"},
    {"surrogate": {"name": "cispo", "low": 0.2, "high": 0.3}},
    {"surrogate": "sapo"},
    {"surrogate": {"name": "sapo", "tau_positive": 2.0, "tau_negative": 3.0}},
    {"surrogate": {"name": "dppo", "delta": 5e-4}},
    {"surrogate": "vespo"},
    {"surrogate": {"name": "dro", "beta": 0.4}},
]
AGGREGATION_CHOICES = [
    {},
    {"aggregation": "sequence_mean"},
    {"aggregation": "token_mean"},
    {"aggregation": {"name": "constant", "length": 12.0}},
]
CORRECTION_CHOICES = [
    {},
    {"correction": {"name": "tis", "low": 0.9, "high": 1.2}},
    {"correction": {"name": "icepop", "low": 0.8, "high": 1.3}},
    {"correction": "sequence_truncate"},
    {"correction": {"name": "sequence_mask", "low": 0.4, "high": 1.5}},
    {"correction": {"name": "seq_mask_tis", "low": 0.8, "high": 1.2, "token_high": 1.3}},
]
OPTIONS = [  # each is on in a third of the settings
    {"off_policy_mask_threshold": 0.02},
    {"kl_to_ref_coeff": 0.3},
    {"kl_to_inference_coeff": 0.2},
    {"entropy_coeff": 0.4},
    {"mask_truncated_completions": True},
    {"high_entropy_fraction": 0.4},
]
ROW_ENTRIES = ["weighted", "merged", "token_advantages"]


def draw(generator: random.Random) -> tuple[dict, list[str]]:
    """Sample settings that can be combined, and optional entries of the rows."""
    ratio = generator.choice([*RATIO_CHOICES, "token"])  # the choice with the most surrogates comes twice
    chosen = {"ratio": ratio} | generator.choice(AGGREGATION_CHOICES)
    if ratio == "none":
        correction = generator.choice(CORRECTION_CHOICES)
        old = {"old_log_probs": generator.choice(["sampler", "proximal"])} if correction else {}
    else:
        surrogates = [s for s in SURROGATE_CHOICES if split(s.get("surrogate"))[0] != "dppo" or ratio == "token"]
        chosen |= generator.choice(surrogates)
        old = {"old_log_probs": generator.choice(["sampler", "proximal"])}
        correction = generator.choice(CORRECTION_CHOICES) if old["old_log_probs"] == "proximal" else {}
    if ratio == "sequence" and split(correction.get("correction"))[0] in ("tis", "icepop", "seq_mask_tis"):
        correction = {"correction": "sequence_truncate"}  # one action has one weight
    chosen |= old | correction
    for option in OPTIONS:
        if ratio == "sequence" and "high_entropy_fraction" in option:
            continue
        chosen |= option if generator.random() < 1 / 3 else {}
    if "kl_to_ref_coeff" in chosen or "kl_to_inference_coeff" in chosen:
        chosen["kl_estimator"] = generator.choice(["k1", "k2", "k3"])
        if generator.random() < 1 / 2:
            chosen["kl_importance_weighted"] = True
    entries = [name for name in ROW_ENTRIES if generator.random() < 1 / 3]
    if ratio == "sequence" and "token_advantages" in entries:
        entries.remove("token_advantages")  # one action has one advantage
    return chosen, entries


GENERATOR = random.Random(53)
DRAWN = [draw(GENERATOR) for _ in range(60)]
IDS = [
    "-".join([*((split(v)[0] if isinstance(v, (str, dict)) else k) for k, v in chosen.items()), *entries])[:110]
    for chosen, entries in DRAWN
]


def test_the_sample_of_settings_has_every_choice():
    taken = [chosen for chosen, _ in DRAWN]
    for part in (*SURROGATE_CHOICES[1:], *AGGREGATION_CHOICES[1:], *CORRECTION_CHOICES[1:], *OPTIONS):
        assert sum(part.items() <= chosen.items() for chosen in taken) >= 3, part
    for ratio in RATIO_CHOICES:
        assert sum(chosen["ratio"] == ratio for chosen in taken) >= 5, ratio
    for estimator in ("k1", "k2", "k3"):
        for weighted in (True, None):
            assert any(
                c.get("kl_estimator") == estimator and c.get("kl_importance_weighted") == weighted for c in taken
            )
    for entry in ROW_ENTRIES:
        assert sum(entry in entries for _, entries in DRAWN) >= 10


# --- fixtures ---


@pytest.fixture(scope="module")
def model(tokenizer):
    """Separate model: the tests leave gradients on it."""
    return build_model(tokenizer, seed=0).eval()


@pytest.fixture(scope="module")
def exact_model(model) -> Exact:
    double = copy.deepcopy(model).double()
    return Exact(
        double, lambda tokens: double(input_ids=tokens[None], use_cache=False).logits[0, :-1].log_softmax(-1), {}
    )


@pytest.fixture(scope="module")
def exact_bigram(bigram) -> Exact:
    double = copy.deepcopy(bigram)
    return Exact(double, double.distributions, {})


@pytest.fixture(scope="module")
def model_rows(exact_model, rows_of) -> TensorDictBase:
    def own(tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            taken = exact_model.distributions(tokens).gather(-1, tokens[1:, None])[:, 0]
        return torch.cat([taken.new_zeros(1), taken])

    return rows_of(own, 300, torch.float32)


# --- values and gradients ---


def number(out, name: str) -> float:
    """Return the value of a field; 0 for a term that is not in the loss."""
    value = getattr(out, name)
    return 0.0 if value is None else value.item()


def check(loss: RLOOLoss, module, rows, exact: Exact, chosen: dict, tolerance: float) -> None:
    out = loss(rows)
    terms, gradient = exact.loss_and_gradient(rows, chosen)
    size = max(1.0, *(abs(value) for value in terms.values()))
    for name, value in terms.items():
        assert number(out, name) == pytest.approx(value, abs=tolerance * size), name
    assert out.loss.item() == pytest.approx(sum(terms.values()), abs=tolerance * size)
    assert_same_gradient(gradient_of(module, out.loss), gradient, tolerance)


@pytest.mark.parametrize(("chosen", "entries"), DRAWN[::4], ids=IDS[::4])
def test_loss_and_gradients_of_a_transformer_equal_a_plain_implementation(
    model, tokenizer, exact_model, model_rows, rows_with, chosen, entries
):
    loss = RLOOLoss(TransformersWrapper(model, tokenizer=tokenizer, generate=False), **chosen)
    check(loss, model, rows_with(model_rows, *entries), exact_model, chosen, 1e-5)


@pytest.mark.parametrize(("chosen", "entries"), DRAWN, ids=IDS)
def test_loss_and_gradients_of_a_bigram_equal_a_plain_implementation_to_the_last_digits(
    bigram, exact_bigram, bigram_rows, rows_with, chosen, entries
):
    check(RLOOLoss(bigram, **chosen), bigram, rows_with(bigram_rows, *entries), exact_bigram, chosen, 1e-9)


# --- invariances, over the same settings ---


TOLERANCE = 1e-6
draws = st.integers(0, len(DRAWN) - 1)
orders = st.permutations(range(7))
splits = st.lists(st.integers(1, 6), max_size=4)


def pieces_of(rows: TensorDictBase, order: list[int], cuts: list[int]) -> list[TensorDictBase]:
    edges = [0, *sorted(set(cuts)), len(rows)]
    return [stack_rows([rows[i] for i in order[a:b]]) for a, b in zip(edges, edges[1:], strict=False)]


@settings(deadline=None, max_examples=40)
@given(draws, orders, splits)
def test_micro_batches_in_any_order_give_the_whole(bigram, bigram_rows, rows_with, draw, order, cuts):
    chosen, entries = DRAWN[draw]
    loss, rows = RLOOLoss(bigram, **chosen), rows_with(bigram_rows, *entries)
    whole, normalizers = loss(rows), loss.normalizers(rows)
    parts = [loss(piece, normalizers) for piece in [*pieces_of(rows, order, cuts), rows[:0]]]
    assert_same_gradient(gradient_of(bigram, *(p.loss for p in parts)), gradient_of(bigram, whole.loss), TOLERANCE)
    for name in RLOOLossOutput.loss_terms():
        assert sum(number(p, name) for p in parts) == pytest.approx(number(whole, name), abs=1e-5)


@pytest.mark.parametrize("draw", range(60))
def test_merged_metrics_of_micro_batches_are_those_of_the_whole(bigram, bigram_rows, rows_with, draw):
    chosen, entries = DRAWN[draw]
    loss, rows = RLOOLoss(bigram, **chosen), rows_with(bigram_rows, *entries)
    generator = random.Random(draw)
    order, cuts = generator.sample(range(7), 7), generator.sample(range(1, 7), 2)
    whole, normalizers = loss(rows), loss.normalizers(rows)
    ours = merge_outputs([loss(piece, normalizers) for piece in pieces_of(rows, order, cuts)])
    expected = {name: getattr(whole, name).item() for name in ("kl_approx", "ESS", "kept")}
    expected |= {f"{name}/with_signal": getattr(whole, name).item() for name in ("entropy", "kl_to_ref")}
    expected |= {"correction": whole.correction.item(), "log_ratio_max": whole.log_ratio_max.item()}
    expected |= {"clip_ratio/region_mean": whole.clip_fraction.item()}
    expected |= {f"clip_ratio/{s}_mean": getattr(whole, f"clip_fraction_{s}").item() for s in ("low", "high")}
    expected |= {"clip_ratio/low_min": whole.clip_low_min.item(), "clip_ratio/high_max": whole.clip_high_max.item()}
    expected |= {f"importance_ratio/{end}": getattr(whole, f"ratio_{end}").item() for end in ("min", "max")}
    expected["loss"] = whole.loss.item()
    assert {name: ours.pop(name) for name in expected} == pytest.approx(expected, abs=1e-5)
    assert ours == pytest.approx({name: getattr(whole, name).item() for name in ours}, abs=1e-5)  # other terms
    assert set(ours) <= set(RLOOLossOutput.loss_terms()) - {"loss_objective"}


def test_merged_losses_of_several_updates_are_their_means(bigram, bigram_rows):
    loss = RLOOLoss(bigram, ratio="token", kl_to_ref_coeff=0.1)
    first, second = stack_rows(bigram_rows[:4].unbind(0)), stack_rows(bigram_rows[4:].unbind(0))
    outputs = [loss(first), loss(second)]
    merged = merge_outputs(outputs, num_updates=2)
    for name in ("loss", "loss_kl_to_ref"):
        assert merged[name] == pytest.approx(sum(getattr(o, name).item() for o in outputs) / 2, abs=1e-6)


def test_rows_left_out_for_their_zero_advantage_still_count_in_the_clip_ratios(bigram, bigram_rows):
    loss = RLOOLoss(bigram)
    whole = merge_outputs([loss(bigram_rows)])
    rest = stack_rows([bigram_rows[i] for i in (0, 1, 2, 3, 5, 6)])
    merged = merge_outputs([loss(rest, loss.normalizers(bigram_rows))])
    for name in ("region_mean", "low_mean", "high_mean"):
        assert merged[f"clip_ratio/{name}"] == pytest.approx(whole[f"clip_ratio/{name}"], abs=1e-6)
    assert whole["clip_ratio/region_mean"] > 0


def test_the_units_of_the_clip_are_rows_of_any_length(bigram, bigram_rows):
    """This holds even if no row of the batch has more than one action token."""
    single = stack_rows([bigram_rows[3].clone(), bigram_rows[3].clone()])
    for i, row in enumerate(single.unbind(0)):
        row[keys.LOG_PROBS][row[keys.ACTION_MASK]] += 5.0  # far from the current policy, on the clipped side
        row[keys.TRUNCATED].fill_(i == 1)
    out = RLOOLoss(bigram, mask_truncated_completions=True)(single)
    assert out.clip_fraction.item() == out.clip_fraction_low.item() == 0.5


def copies_of(rows: TensorDictBase) -> TensorDictBase:
    """Repeat each row by its multiplicity."""
    result = []
    for row in rows.unbind(0):
        count = int(row[keys.MULTIPLICITY])
        result += [row.clone().exclude(keys.MULTIPLICITY) for _ in range(count)]
    return stack_rows(result)


@pytest.mark.parametrize("draw", range(0, 60, 2))
def test_a_row_that_stands_for_several_is_the_same_as_those(bigram, bigram_rows, rows_with, draw):
    chosen, entries = DRAWN[draw]
    rows = rows_with(bigram_rows, *{*entries, "merged"})
    loss, apart = RLOOLoss(bigram, **chosen), copies_of(rows)
    assert loss.normalizers(rows) == loss.normalizers(apart)
    ours, expected = loss(rows), loss(apart)
    assert_same_gradient(gradient_of(bigram, ours.loss), gradient_of(bigram, expected.loss), TOLERANCE)
    for name in loss.out_keys:
        torch.testing.assert_close(
            getattr(ours, name), getattr(expected, name), rtol=1e-5, atol=1e-5, equal_nan=True, msg=name
        )


@pytest.mark.parametrize(("chosen", "entries"), DRAWN, ids=IDS)
def test_rows_of_zero_advantage_may_go_where_the_loss_says_so(bigram, bigram_rows, rows_with, chosen, entries):
    rows, loss = rows_with(bigram_rows, *entries), RLOOLoss(bigram, **chosen)
    normalizers = loss.normalizers(rows)
    rest = stack_rows([row for row in rows.unbind(0) if (row[keys.ADVANTAGE] != 0).any()])
    whole, ours = gradient_of(bigram, loss(rows, normalizers).loss), gradient_of(bigram, loss(rest, normalizers).loss)
    others = ("kl_to_ref_coeff", "kl_to_inference_coeff", "entropy_coeff")
    always = split(chosen.get("surrogate", "clip"))[0] == "dro"  # its penalty is on all tokens
    assert loss.needs_zero_advantage == (always or any(chosen.get(name) for name in others))
    if not loss.needs_zero_advantage:
        assert_same_gradient(ours, whole, TOLERANCE)
    elif len(rest) < len(rows) and not (chosen.get("mask_truncated_completions")):  # the row of 0 is truncated
        assert max(float((a - b).abs().max()) for a, b in zip(ours, whole, strict=True)) > 1e-6


def test_one_action_has_one_advantage(bigram, bigram_rows, rows_with):
    with pytest.raises(ValueError, match="ratio.*advantage for each token.*sequence_mean"):
        RLOOLoss(bigram, ratio="sequence")(rows_with(bigram_rows, "token_advantages"))


# --- metrics ---


@pytest.mark.parametrize("draw", range(60))
def test_metrics_equal_a_plain_implementation(bigram, exact_bigram, bigram_rows, rows_with, draw):
    chosen, entries = DRAWN[draw]
    rows = rows_with(bigram_rows, *entries)
    out = RLOOLoss(bigram, **chosen)(rows)
    entropies, k3s, to_ref, differences, log_ratios = [], [], [], [], []
    estimator = chosen.get("kl_estimator", "k3")
    for row in rows.unbind(0):
        copies, action = int(row.get(keys.MULTIPLICITY, 1)), row[keys.ACTION_MASK]
        if chosen.get("mask_truncated_completions") and row[keys.TRUNCATED].item():
            log_ratios += [0.0] * copies
            continue
        log_probs, entropy = (x.detach() for x in exact_bigram.of_row(row))
        gaps = (log_probs - row[keys.LOG_PROBS][action]).tolist()
        log_ratios += [sum(gaps)] * copies
        differences += gaps
        entropies += entropy.tolist() * copies
        k3s += [math.exp(gap) - 1 - gap for gap in gaps] * copies
        for log_prob, ref in zip(log_probs, row[keys.REF_LOG_PROBS][action].tolist(), strict=True):
            to_ref += [plain_kl(estimator, log_prob, ref, None).item()] * copies
    weights = [math.exp(x) for x in log_ratios]
    n = len(entropies)
    tokens = exact_bigram.action_tokens(rows, chosen)
    flat = {"low": [t for t in tokens if t.flat and t.advantage < 0]}
    flat["high"] = [t for t in tokens if t.flat and t.advantage > 0]
    if chosen["ratio"] == "sequence":  # rows are counted
        fractions = {k: sum(dict((t.row, t.copies) for t in v).values()) / len(log_ratios) for k, v in flat.items()}
    else:
        fractions = {k: sum(t.copies for t in v) / n for k, v in flat.items()}
    shares = {k: [] for k in flat}
    for i in {t.row for t in tokens} | (set(range(len(rows))) if chosen["ratio"] == "sequence" else set()):
        for k, v in flat.items():
            of_row = [t.row == i for t in v]
            number_of = sum(t.row == i for t in tokens)
            shares[k].append(float(any(of_row)) if chosen["ratio"] == "sequence" else sum(of_row) / number_of)
    expected = {
        "clip_low_min": min(shares["low"]),
        "clip_high_max": max(shares["high"]),
        "entropy": sum(entropies) / n,
        "kl_approx": sum(k3s) / n,
        "kl_to_ref": sum(to_ref) / n,
        "log_ratio_max": max(map(abs, differences)),
        "ratio_min": math.exp(min(differences)),
        "ratio_max": math.exp(max(differences)),
        "ESS": sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights)),
        "num_action_tokens": n,
        "kept": sum(t.copies * (t.correction != 0) for t in tokens) / n,
        "correction": sum(t.copies * t.correction for t in tokens) / n if "correction" in chosen else 1.0,
        "clip_fraction": sum(fractions.values()),
        "clip_fraction_low": fractions["low"],
        "clip_fraction_high": fractions["high"],
    }
    for name, value in expected.items():
        assert number(out, name) == pytest.approx(value, abs=1e-5), name
    assert out.log_ratio.tolist() == pytest.approx(log_ratios, abs=1e-5)


def test_a_coefficient_is_read_at_each_use(bigram, bigram_rows):
    class Falling:
        value = 1.0

        def __float__(self) -> float:
            self.value /= 2
            return self.value

    loss = RLOOLoss(bigram, ratio="token", kl_to_ref_coeff=Falling())
    first, second = (loss(bigram_rows).loss_kl_to_ref.item() for _ in range(2))
    assert 0 < second < first


# --- user-defined functions ---


def test_user_functions_replace_names(bigram, bigram_rows):
    def half_ratio(log_probs, old_log_probs, mask):
        return torch.where(mask, (log_probs - old_log_probs) / 2, 0.0)

    def squared(log_ratio, advantages, log_probs, old_log_probs):
        return 3.0 * (log_ratio - advantages) ** 2

    def fixed_weight(log_weight, mask):
        return torch.full_like(log_weight, 0.5)

    def everything(values, mask, num_rows, num_tokens):
        return (values * mask).sum() / (num_rows + num_tokens)

    loss = RLOOLoss(
        bigram,
        ratio=half_ratio,
        surrogate=squared,
        correction=fixed_weight,
        old_log_probs="proximal",
        aggregation=everything,
    )
    out = loss(bigram_rows)
    scored, expected, tokens = bigram.score(bigram_rows), 0.0, 0
    for i, row in enumerate(bigram_rows.unbind(0)):
        action = row[keys.ACTION_MASK]
        gap = (scored.log_probs[i][scored.actions.mask[i]] - row[keys.PROXIMAL_LOG_PROBS][action]) / 2
        expected = expected + (0.5 * 3.0 * (gap - float(row[keys.ADVANTAGE])) ** 2).sum()
        tokens += int(action.sum())
    expected = expected / (len(bigram_rows) + tokens)
    assert out.loss_objective.item() == pytest.approx(expected.item(), abs=1e-6)
    assert_same_gradient(gradient_of(bigram, out.loss), gradient_of(bigram, expected), TOLERANCE)
    assert out.clip_fraction.isnan() and "clip_ratio/region_mean" not in merge_outputs([out])
    assert loss.needs_zero_advantage


def test_a_user_ratio_says_its_level(bigram, bigram_rows):
    """The loss reads the level instead of guessing it from shapes, also with one token per row."""

    def whole(log_probs, old_log_probs, mask):
        return torch.where(mask, log_probs - old_log_probs, 0.0).sum(-1, keepdim=True)

    single = stack_rows([row for row in bigram_rows.unbind(0) if int(row[keys.ACTION_MASK].sum()) == 1])
    for rows in (bigram_rows, single):
        named = RLOOLoss(bigram, ratio="sequence")(rows)
        for ratio in (RatioSpec(whole, per_token=False), sequence_log_ratio):
            out = RLOOLoss(bigram, ratio=ratio)(rows)
            assert out.loss.item() == named.loss.item() and out.clip_fraction.item() == named.clip_fraction.item()
    with pytest.raises(ValueError, match="per_token=False"):
        RLOOLoss(bigram, ratio=whole)(bigram_rows)


# --- refusals ---

IMPOSSIBLE = {
    "a name that is not there: ratio": ({"ratio": "tokens"}, "ratio='tokens'.*sequence"),
    "surrogate": ({"surrogate": "ppo"}, "surrogate='ppo'.*clip"),
    "aggregation": ({"aggregation": "mean"}, "aggregation='mean'.*token_mean"),
    "correction": ({"correction": "is", "old_log_probs": "proximal"}, "correction='is'.*tis"),
    "old_log_probs": ({"old_log_probs": "reference"}, "old_log_probs.*'reference'"),
    "kl_estimator": ({"kl_to_ref_coeff": 0.1, "kl_estimator": "k4"}, "kl_estimator.*'k4'"),
    "dppo of sequences": ({"ratio": "sequence", "surrogate": "dppo"}, "surrogate=DPPO.*requires ratio='token'"),
    "dppo of means": ({"ratio": "sequence_mean", "surrogate": "dppo"}, "surrogate=DPPO.*requires ratio='token'"),
    "a surrogate without a ratio": ({"ratio": "none", "surrogate": "sapo"}, "surrogate=SAPO.*ratio='none'"),
    "a clip without a ratio": ({"ratio": "none", "surrogate": Clip(0.1)}, "surrogate=Clip.*ratio='none'"),
    "proximal for nothing": ({"ratio": "none", "old_log_probs": "proximal"}, "old_log_probs.*ratio='none'"),
    "corrected twice": ({"ratio": "token", "correction": "tis"}, "correction=TIS.*old_log_probs='sampler'"),
    "constant without a length": ({"aggregation": "constant"}, "aggregation='constant' requires"),
    "length of another": ({"aggregation": {"name": "token_mean", "length": 5.0}}, "unknown field 'length'"),
    "constant of 0": ({"aggregation": {"name": "constant", "length": 0.0}}, "length=0.0 must be"),
    "fraction of 0": ({"ratio": "token", "high_entropy_fraction": 0.0}, "high_entropy_fraction.*0"),
    "fraction above 1": ({"ratio": "token", "high_entropy_fraction": 1.5}, "high_entropy_fraction.*1.5"),
    "weight of no KL": ({"kl_importance_weighted": True}, "kl_importance_weighted.*KL coefficients"),
    "negative KL": ({"kl_to_ref_coeff": -0.1}, "kl_to_ref_coeff.*-0.1"),
    "NaN KL": ({"kl_to_inference_coeff": math.nan}, "kl_to_inference_coeff.*nan"),
    "NaN entropy": ({"entropy_coeff": math.nan}, "entropy_coeff.*nan"),
    "text": ({"entropy_coeff": "much"}, "entropy_coeff='much' must be a finite number"),
    "NaN threshold": ({"off_policy_mask_threshold": math.nan}, "off_policy_mask_threshold.*nan"),
    "dual clip below 1": ({"surrogate": {"name": "clip", "dual": 0.5}}, "dual=0.5"),
    "unknown field": (
        {"surrogate": {"name": "clip", "hihg": 3.0}},
        r"surrogate='clip': unknown field 'hihg' \(did you",
    ),
    "field of another": ({"ratio": "token", "surrogate": {"name": "cispo", "dual": 3.0}}, "unknown field 'dual'"),
    "field of another correction": (
        {"correction": {"name": "tis", "token_high": 0.1}, "old_log_probs": "proximal"},
        "unknown field 'token_high'.*high",
    ),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_invalid_settings_are_refused(bigram, name):
    chosen, message = IMPOSSIBLE[name]
    with pytest.raises(ValueError, match=message):
        RLOOLoss(bigram, **chosen)


NEEDED = {
    "advantage": ({}, keys.ADVANTAGE, "advantage='advantage' is missing in the rows; compute it with MCAdvantage"),
    "log_probs": ({}, keys.LOG_PROBS, "log_probs"),
    "proximal": ({"old_log_probs": "proximal"}, keys.PROXIMAL_LOG_PROBS, "proximal_log_probs"),
    "reference": ({"kl_to_ref_coeff": 0.1}, keys.REF_LOG_PROBS, "ref_log_probs"),
    "entropy": ({"ratio": "token", "high_entropy_fraction": 0.5}, keys.PROXIMAL_ENTROPY, "proximal_entropy"),
    "truncated": ({"mask_truncated_completions": True}, keys.TRUNCATED, "truncated"),
}


@pytest.mark.parametrize("name", NEEDED)
def test_rows_that_lack_an_entry_are_refused_by_its_name(bigram, bigram_rows, name):
    chosen, key, message = NEEDED[name]
    rows = stack_rows([row.clone().exclude(key) for row in bigram_rows.unbind(0)])
    with pytest.raises(KeyError, match=message):
        RLOOLoss(bigram, **chosen)(rows)


@pytest.mark.parametrize("key", [keys.PROXIMAL_LOG_PROBS, keys.REF_LOG_PROBS, keys.PROXIMAL_ENTROPY, keys.TRUNCATED])
def test_entries_that_no_part_reads_may_be_missing(bigram, bigram_rows, key):
    rows = stack_rows([row.clone().exclude(key) for row in bigram_rows.unbind(0)])
    assert torch.equal(RLOOLoss(bigram)(rows).loss, RLOOLoss(bigram)(bigram_rows).loss)


@pytest.fixture(scope="module")
def narrow_bigram(bigram):
    """The same policy in float32, where exponentials overflow at 88."""
    return copy.deepcopy(bigram).float()


@pytest.mark.parametrize("drift", [-1000.0, -100.0, 100.0, 1000.0])
@pytest.mark.parametrize("draw", range(0, 60, 2))
def test_extreme_log_ratios_leave_the_gradient_finite(narrow_bigram, bigram_rows, rows_with, draw, drift):
    chosen, entries = DRAWN[draw]
    rows = [row.clone() for row in rows_with(bigram_rows, *entries).unbind(0)]
    for row in rows:
        for key in (keys.LOG_PROBS, keys.PROXIMAL_LOG_PROBS, keys.REF_LOG_PROBS, keys.PROXIMAL_ENTROPY):
            row.set(key, row[key].float())
        for key, sign in ((keys.LOG_PROBS, 1), (keys.PROXIMAL_LOG_PROBS, 2), (keys.REF_LOG_PROBS, -1)):
            row[key][row[keys.ACTION_MASK]] -= sign * drift
        row.set(keys.ADVANTAGE, row[keys.ADVANTAGE].float())
    out = RLOOLoss(narrow_bigram, **chosen)(stack_rows(rows))
    assert out.loss.isfinite()
    assert all(g.isfinite().all() for g in gradient_of(narrow_bigram, out.loss))
