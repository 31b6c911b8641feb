"""Gap between sampler and trainer on real rows of real models, and the advice."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictBase

from torchrl_rloo.data import keys, stack_rows
from torchrl_rloo.diagnostics.parity import LogProbGap, advice, log_prob_gap, parity_metrics, probe_parity, row_gap
from torchrl_rloo.modules import TransformersWrapper
from torchrl_rloo.modules.reference import record_log_probs
from torchrl_rloo.objectives import RLOOLoss

F32 = torch.float32
PROMPTS = [[5, 9, 31], [7, 7, 40, 41, 42, 43], [20]]
NAMES = {"parity/mean", "parity/max", "parity/k3", "parity/ess", "parity/outside"}


@pytest.fixture(scope="module")
def sharp(make_model, tokenizer):
    """Model with a peaked distribution, so that temperature matters."""
    return make_model(tokenizer, scale=4.0)


@pytest.fixture(scope="module")
def stale(sharp):
    """Same model some optimizer steps earlier."""
    other = copy.deepcopy(sharp)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return other


@pytest.fixture
def wrappers(tokenizer):
    """``wrappers(sampling_model, training_model, settings, scorer_settings)``: policy and scorer."""

    def make(sampling, training, settings=None, scorer_settings=None, **kwargs):
        scorer = TransformersWrapper(
            training,
            tokenizer=tokenizer,
            generate=False,
            generate_kwargs=settings if scorer_settings is None else scorer_settings,
        )
        return TransformersWrapper(sampling, tokenizer=tokenizer, generate_kwargs=settings, **kwargs), scorer

    return make


@pytest.fixture
def rows(wrappers, sharp, stale, prompt_rows) -> TensorDictBase:
    """Rows sampled with the stale weights and scored with the new ones."""
    policy, scorer = wrappers(stale, sharp, {"max_new_tokens": 6, "seed": 0})
    return record_log_probs(scorer, policy(prompt_rows(*PROMPTS)))


def differences(rows: TensorDictBase) -> list[list[float]]:
    found = []
    for row in rows.unbind(0):
        mine, theirs = row[keys.PROXIMAL_LOG_PROBS].tolist(), row[keys.LOG_PROBS].tolist()
        actions = row[keys.ACTION_MASK].tolist()
        found.append([a - b for a, b, action in zip(mine, theirs, actions, strict=True) if action])
    return found


def test_metrics_equal_a_slow_loop(rows):
    by_row = differences(rows)
    flat = [d for row in by_row for d in row]
    weights = [math.exp(math.fsum(row)) for row in by_row]
    metrics = parity_metrics(rows)
    assert set(metrics) == NAMES and len(flat) > len(PROMPTS)
    assert metrics["parity/mean"] == pytest.approx(math.fsum(map(abs, flat)) / len(flat))
    assert metrics["parity/max"] == pytest.approx(max(map(abs, flat)))
    assert metrics["parity/k3"] == pytest.approx(math.fsum(math.exp(d) - 1 - d for d in flat) / len(flat))
    assert metrics["parity/ess"] == pytest.approx(math.fsum(weights) ** 2 / 3 / math.fsum(w * w for w in weights))
    assert metrics["parity/outside"] == sum(not 0.9 <= math.exp(d) <= 1.1 for d in flat) / len(flat)


def test_neither_micro_batches_nor_the_order_change_the_metrics(rows, wrappers, sharp):
    expected = parity_metrics(rows)
    _, scorer = wrappers(sharp, sharp)
    again = record_log_probs(scorer, stack_rows([rows[i].copy() for i in (2, 0, 1)]), micro_batch_size=1)
    assert parity_metrics(again) == pytest.approx(expected, abs=1e-5)


def test_rows_that_nobody_sampled_do_not_count(rows):
    expected = parity_metrics(rows)
    written = TensorDict({keys.TOKENS: torch.tensor([3, 4]), keys.ACTION_MASK: torch.tensor([False, True])}, [])
    assert parity_metrics(stack_rows([written, *rows.unbind(0)])) == expected
    assert parity_metrics(stack_rows([written])) == {} == parity_metrics(rows[:0])


def test_rows_without_the_trainers_log_probs_are_refused(rows):
    bare = stack_rows([row.exclude(keys.PROXIMAL_LOG_PROBS) for row in rows.unbind(0)])
    with pytest.raises(KeyError, match="proximal_log_probs.*record_log_probs"):
        parity_metrics(bare)


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7}, {"top_p": 0.9}])
def test_equal_weights_pass(settings, wrappers, sharp, prompt_rows):
    prompts = prompt_rows(*PROMPTS)
    policy, scorer = wrappers(sharp, sharp, settings | {"max_new_tokens": 16, "seed": 3})
    stream = policy.sampler_state()["generator"]
    gap, steps = probe_parity(policy, scorer, prompts, max_new_tokens=8, sampler_dtype=F32, trainer_dtype=F32)
    assert gap.max < 2e-5 and gap.row_ess > 1 - 1e-6 and 3 <= gap.tokens <= 24 and steps == []
    assert torch.equal(policy.sampler_state()["generator"], stream)  # the run's random stream is unchanged
    assert set(prompts.keys(True, True)) == {keys.PROMPT_TOKENS}


@pytest.mark.parametrize(
    ("settings", "record_support"),
    [({}, False), ({"temperature": 0.7}, False), ({"top_k": 20}, False), ({"top_k": 20}, True)],
)
def test_stale_weights_are_found(settings, record_support, wrappers, sharp, stale, prompt_rows):
    policy, scorer = wrappers(stale, sharp, settings, record_support=record_support)
    report = probe_parity(policy, scorer, prompt_rows(*PROMPTS), sampler_dtype="float32", trainer_dtype=F32)
    assert report.gap.mean > 0.01
    assert len(report.advice) == 2 and "other weights" in report.advice[0] and "temperature" in report.advice[1]
    assert f"{report.gap.mean:.2g}" in report.advice[0] and f"{report.gap.max:.2g}" in report.advice[0]


def test_a_probe_can_be_repeated_and_a_push_helps(wrappers, sharp, stale, prompt_rows):
    sampling = copy.deepcopy(stale)
    policy, scorer = wrappers(sampling, sharp)

    def probe():
        return probe_parity(policy, scorer, prompt_rows(*PROMPTS), sampler_dtype=F32, trainer_dtype=F32)

    first, second = probe(), probe()
    assert first == second and first.advice
    several, _ = wrappers(stale, sharp, num_samples=2)
    assert probe_parity(several, scorer, prompt_rows(*PROMPTS)).gap.tokens > first.gap.tokens
    sampling.load_state_dict(sharp.state_dict())
    assert probe().advice == []


def test_the_turns_of_one_prompt_differ(wrappers, sharp, prompt_rows):
    policy, scorer = wrappers(sharp, sharp)
    sampled = []
    probe_parity(lambda rows: sampled.append(policy(rows)) or sampled[0], scorer, prompt_rows([5, 9], [5, 9]))
    assert sampled[0][0][keys.TOKENS].tolist() != sampled[0][1][keys.TOKENS].tolist()


class PlainLogProbs:
    """Sampler that reports log-probs of the plain softmax, whatever distribution it samples from."""

    def __init__(self, policy: TransformersWrapper):
        self.policy, self.plain = policy, policy.get_new_version(generate=False, generate_kwargs={})

    def __call__(self, rows: TensorDictBase) -> TensorDictBase:
        rows = self.policy(rows)
        bare = stack_rows([row.exclude("support") for row in rows.unbind(0)])
        for row, scored in zip(rows.unbind(0), record_log_probs(self.plain, bare).unbind(0), strict=True):
            row.set(keys.LOG_PROBS, scored[keys.PROXIMAL_LOG_PROBS])
        return rows


@pytest.mark.parametrize(
    ("settings", "record_support"),
    [({"temperature": 0.5}, False), ({"temperature": 0.5, "top_k": 20}, False), ({"top_k": 20}, True)],
)
def test_log_probs_of_the_plain_softmax_are_named(settings, record_support, wrappers, sharp, prompt_rows):
    policy, scorer = wrappers(sharp, sharp, settings, record_support=record_support)
    (step,) = probe_parity(
        PlainLogProbs(policy), scorer, prompt_rows(*PROMPTS), sampler_dtype=F32, trainer_dtype=F32
    ).advice
    assert "plain softmax" in step and "processed_logprobs" in step


def test_another_temperature_of_the_scorer_is_found(wrappers, sharp, prompt_rows):
    policy, scorer = wrappers(sharp, sharp, {"temperature": 0.5}, {"temperature": 0.8})
    report = probe_parity(policy, scorer, prompt_rows(*PROMPTS), sampler_dtype=F32, trainer_dtype=F32)
    assert report.gap.mean > 0.05 and any("temperature" in step for step in report.advice)


def test_bfloat16_is_told_from_errors(wrappers, sharp, prompt_rows):
    policy, scorer = wrappers(copy.deepcopy(sharp).bfloat16(), sharp)
    report = probe_parity(policy, scorer, prompt_rows(*PROMPTS), sampler_dtype=torch.bfloat16, trainer_dtype=F32)
    assert 1e-3 < report.gap.max < 1.0
    assert "bfloat16" in report.advice[0] and not any("push" in step for step in report.advice)
    assert any("head_dtype" in step for step in report.advice)
    assert "push" in advice(report.gap, "float32", "float32")[0]  # float32 would not explain it


def gap_of(mean: float, largest: float, outside=0.0, row_ess=1.0, surprisal=1.0, tokens=100) -> LogProbGap:
    values = [mean, largest, mean**2 / 2, row_ess, outside, surprisal, tokens]
    return LogProbGap(*(torch.tensor(v, dtype=torch.float64) for v in values))


@pytest.mark.parametrize(
    ("gap", "dtypes", "words"),
    [
        (gap_of(1e-5, 5e-5), ("float32", "float32"), []),
        (gap_of(1e-5, 5e-5), (None, None), []),
        (gap_of(1e-5, 5e-3), ("float32", "float32"), ["push", "temperature"]),
        (gap_of(1e-3, 5e-3), ("float32", "float32"), ["push", "temperature"]),
        (
            gap_of(0.08, 0.33),
            ("bfloat16", "bfloat16"),
            ["bfloat16", "float32 in sampler and trainer", "head_dtype", "BATCH_INVARIANT"],
        ),
        (gap_of(0.02, 0.1), ("float32", "bfloat16"), ["bfloat16", "float32 in sampler and trainer"]),
        (
            gap_of(0.02, 0.1),
            (None, None),
            ["bfloat16", "float32 in sampler and trainer", "head_dtype", "BATCH_INVARIANT"],
        ),
        (
            gap_of(0.02, 0.1, outside=0.1),
            ("float32", "bfloat16"),
            ["bfloat16", "float32 in sampler and trainer", "10.0%"],
        ),
        (
            gap_of(0.02, 0.1, row_ess=0.42),
            ("float32", "bfloat16"),
            ["bfloat16", "float32 in sampler and trainer", "42%"],
        ),
        (
            gap_of(0.3, 0.9, outside=0.9),
            ("bfloat16", "bfloat16"),
            ["push", "temperature", "float32 in sampler and trainer"],
        ),
        (gap_of(0.02, 0.4, surprisal=0.1), (None, None), ["push", "temperature", "float32 in sampler and trainer"]),
        (gap_of(1e-5, 5e-5, surprisal=0.0), (None, None), []),
        (gap_of(0.05, 11.0), ("bfloat16", "bfloat16"), ["push", "temperature", "float32 in sampler and trainer"]),
        (gap_of(math.nan, math.nan), ("float32", "float32"), ["NaN"]),
        (gap_of(math.inf, math.inf), ("bfloat16", "bfloat16"), ["infinite"]),
        (gap_of(math.nan, math.nan, tokens=0), ("float32", "float32"), ["no action token"]),
    ],
)
def test_advice_in_its_order(gap, dtypes, words):
    steps = advice(gap, *dtypes)
    assert len(steps) == len(words)
    for step, word in zip(steps, words, strict=True):
        assert word in step and "\n" not in step


@pytest.mark.parametrize(
    ("gap", "plain"),
    [
        (gap_of(0.3, 2.0), gap_of(0.29, 0.8)),
        (gap_of(0.3, 2.0), gap_of(0.05, 9.0)),
        (gap_of(0.11, 0.5), gap_of(0.09, 0.5)),
    ],
    ids=["as far", "nearer on average alone", "hardly nearer"],
)
def test_a_plain_softmax_that_explains_little_is_not_blamed(gap, plain):
    assert "push" in advice(gap, plain=plain)[0]


def test_the_advised_corrections_exist(wrappers, sharp):
    _, scorer = wrappers(sharp, sharp)
    step = advice(gap_of(0.02, 0.1, outside=0.1))[-1]
    for kwargs in ({"correction": "sequence_truncate"}, {"ratio": "token", "correction": "tis"}):
        assert all(f"{name}='{value}'" in step for name, value in kwargs.items())
        RLOOLoss(scorer, old_log_probs="proximal", **kwargs)


def test_a_probe_needs_prompts(wrappers, sharp, prompt_rows):
    policy, scorer = wrappers(sharp, sharp)
    with pytest.raises(ValueError, match="prompts is empty"):
        probe_parity(policy, scorer, prompt_rows(*PROMPTS)[:0])
    with pytest.raises(KeyError, match="prompt"):
        probe_parity(policy, scorer, stack_rows([TensorDict({keys.TOKENS: torch.tensor([1])}, [])]))


def test_row_gap_of_nothing():
    assert row_gap(stack_rows([TensorDict({keys.TOKENS: torch.tensor([1])}, [])])).tokens == 0


# Gaps of two sets of log-probs


NAN = float("nan")
pair = st.tuples(st.floats(-8, 0), st.floats(-2, 2)).map(lambda p: (p[0], p[0] + p[1]))
batches = st.lists(st.lists(pair, max_size=5), min_size=1, max_size=5)  # also without a token


def padded(rows, width: int | None = None, fill: float = 0.0):
    width = max([len(row) for row in rows]) if width is None else width
    sampler, trainer = (torch.full((len(rows), width), fill, dtype=torch.float64) for _ in range(2))
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        for t, (x, y) in enumerate(row):
            sampler[i, t], trainer[i, t], mask[i, t] = x, y, True
    return sampler, trainer, mask


def slow_ess(weights):
    return math.fsum(weights) ** 2 / (len(weights) * math.fsum(w * w for w in weights)) if weights else NAN


def slow_gap(rows) -> dict[str, float]:
    differences = [y - x for row in rows for x, y in row]
    n = len(differences)
    if n == 0:
        return dict.fromkeys(LogProbGap._fields, NAN) | {"tokens": 0}
    return {
        "mean": math.fsum(abs(d) for d in differences) / n,
        "max": max(abs(d) for d in differences),
        "k3": math.fsum(math.exp(d) - 1 - d for d in differences) / n,
        "row_ess": slow_ess([math.prod(math.exp(y - x) for x, y in row) for row in rows if row]),
        "outside_share": sum(not 0.9 <= math.exp(d) <= 1.1 for d in differences) / n,
        "surprisal": -math.fsum(x for row in rows for x, _ in row) / n,
        "tokens": n,
    }


def close(gap: LogProbGap, expected) -> None:
    expected = expected._asdict() if isinstance(expected, LogProbGap) else expected
    for name, value in gap._asdict().items():
        assert value.shape == () and value.dtype == torch.float64
        assert float(value) == pytest.approx(float(expected[name]), rel=1e-9, abs=1e-12, nan_ok=True), name


@settings(deadline=None, max_examples=60)
@given(batches)
def test_equals_a_slow_loop(rows):
    close(log_prob_gap(*padded(rows)), slow_gap(rows))


@settings(deadline=None, max_examples=30)
@given(batches, st.integers(0, 4), st.sampled_from([7.0, NAN, -math.inf]))
def test_padding_does_not_matter(rows, more, fill):
    width = max(len(row) for row in rows) + more
    close(log_prob_gap(*padded(rows, width, fill)), log_prob_gap(*padded(rows)))
    close(log_prob_gap(*padded([[], *rows, []])), log_prob_gap(*padded(rows)))


@settings(deadline=None, max_examples=30)
@given(batches, batches)
def test_batches_put_together_are_one_batch(first, second):
    width = max(len(row) for row in first + second)
    together = (torch.cat(pair) for pair in zip(padded(first, width), padded(second, width), strict=True))
    close(log_prob_gap(*together), slow_gap(first + second))


def test_the_gap_of_float32_log_probs_is_not_rounded_away():
    sampler = torch.tensor([[-1.0, -1.0, -1.0]])
    trainer = sampler + torch.tensor([[2.0**-20, 0.0, 0.0]])
    gap = log_prob_gap(sampler, trainer, torch.ones(1, 3, dtype=torch.bool))
    assert gap.mean == 2.0**-20 / 3 and gap.max == 2.0**-20
    assert gap.k3.item() == pytest.approx(2.0**-40 / 2 / 3, rel=1e-3)


@pytest.mark.parametrize(("ratio", "outside"), [(0.89, 1), (0.91, 0), (1.09, 0), (1.11, 1)])
def test_bounds_of_the_ratio(ratio, outside):
    trainer = torch.tensor([[math.log(ratio)]])
    assert log_prob_gap(torch.zeros(1, 1), trainer, torch.ones(1, 1, dtype=torch.bool)).outside_share == outside


@pytest.mark.parametrize("sampler", [NAN, -math.inf])
def test_what_is_not_finite_shows(sampler):
    gap = log_prob_gap(torch.tensor([[sampler, -1.0]]), torch.full((1, 2), -1.0), torch.ones(1, 2, dtype=torch.bool))
    assert not gap.mean.isfinite() and not gap.max.isfinite() and gap.outside_share == 0.5


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_a_temperature_that_one_side_leaves_out_is_found(temperature):
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(8, 20, 50, generator=generator)
    sampled = (logits / temperature).softmax(-1).flatten(0, 1).multinomial(1, generator=generator).view(8, 20, 1)
    of = [(logits / t).log_softmax(-1).gather(-1, sampled)[..., 0] for t in (temperature, 1.0)]
    gap = log_prob_gap(*of, torch.ones(8, 20, dtype=torch.bool))
    assert gap.mean > 0.1 and gap.outside_share > 0.5 and gap.row_ess < 0.9
    exact = log_prob_gap(of[0], of[0].double() + 1e-6, torch.ones(8, 20, dtype=torch.bool))
    assert exact.mean < 2e-6 and exact.outside_share == 0


def test_no_gradient():
    trainer = torch.zeros(1, 2, requires_grad=True)
    gap = log_prob_gap(torch.zeros(1, 2), trainer, torch.ones(1, 2, dtype=torch.bool))
    assert not any(value.requires_grad for value in gap)
