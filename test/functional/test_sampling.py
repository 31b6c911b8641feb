from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_rloo.functional import SamplingDistribution, token_log_probs
from torchrl_rloo.functional.sampling import Support, kept_tokens, process_logits, sample_tokens

LAST = 1 - 2**-24  # the largest uniform number below 1 in float32

DISTRIBUTIONS = [
    SamplingDistribution(),
    SamplingDistribution(temperature=0.3),
    SamplingDistribution(temperature=2.5),
    SamplingDistribution(top_k=1),
    SamplingDistribution(top_k=3),
    SamplingDistribution(top_k=1000),
    SamplingDistribution(top_p=0.6),
    SamplingDistribution(top_p=1e-6),
    SamplingDistribution(min_p=0.2),
    SamplingDistribution(temperature=0.7, top_k=5, top_p=0.8, min_p=0.05),
    SamplingDistribution(repetition_penalty=1.7),
    SamplingDistribution(temperature=1.3, top_p=0.7, repetition_penalty=0.6),
]
each_distribution = pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=str)


def slow_probs(logits: list[float], distribution: SamplingDistribution, seen: list[bool] | None = None) -> list[float]:
    """Compute penalty, temperature, top-k, top-p and min-p one token at a time in float64."""
    if seen is not None and distribution.repetition_penalty != 1:
        p = distribution.repetition_penalty
        logits = [(x / p if x > 0 else x * p) if s else x for x, s in zip(logits, seen, strict=True)]
    highest = max(logits)
    weights = [math.exp((x - highest) / distribution.temperature) for x in logits]
    kept = sorted(range(len(logits)), key=lambda v: -weights[v])[: distribution.top_k]
    if distribution.top_p < 1:
        total, mass, nucleus = math.fsum(weights[v] for v in kept), 0.0, []
        for v in kept:
            nucleus.append(v)
            mass += weights[v] / total
            if mass >= distribution.top_p:
                break
        kept = nucleus
    kept = [v for v in kept if weights[v] >= distribution.min_p * max(weights)]
    total = math.fsum(weights[v] for v in kept)
    return [weights[v] / total if v in kept else 0.0 for v in range(len(logits))]


def random_case(rows: int = 6, vocab: int = 11, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(rows, vocab, generator=generator)
    return logits, torch.rand(rows, vocab, generator=generator) < 0.4


@each_distribution
def test_processed_logits_are_the_distribution_of_a_slow_loop(distribution):
    logits, seen = random_case()
    probs = process_logits(logits, distribution, seen).softmax(-1)
    expected = [slow_probs(x, distribution, s) for x, s in zip(logits.tolist(), seen.tolist(), strict=True)]
    torch.testing.assert_close(probs, torch.tensor(expected), atol=1e-6, rtol=1e-5)


@each_distribution
def test_an_even_grid_of_uniforms_gives_each_token_its_share(distribution):
    logits, seen = random_case(rows=1)
    n = 5000
    uniforms = (torch.arange(n) + 0.5) / n
    ids, _ = sample_tokens(logits.expand(n, -1), distribution, uniforms, seen.expand(n, -1))
    counts = torch.bincount(ids, minlength=logits.shape[1])
    expected = torch.tensor(slow_probs(logits[0].tolist(), distribution, seen[0].tolist())) * n
    assert (counts - expected).abs().max() <= 1.01
    assert (counts[expected == 0] == 0).all()


@st.composite
def hard_logits(draw):
    """Sample logits with banned tokens, ties and huge gaps; at least one token is possible."""
    value = st.one_of(st.just(-math.inf), st.floats(-5, 5, width=32), st.sampled_from([0.0, -200.0, 80.0]))
    rows = draw(st.integers(1, 4))
    row = st.lists(value, min_size=6, max_size=6).filter(lambda r: max(r) > -math.inf)
    return torch.tensor(draw(st.lists(row, min_size=rows, max_size=rows)))


@settings(deadline=None, max_examples=60)
@given(hard_logits(), st.sampled_from(DISTRIBUTIONS), st.sampled_from([0.0, 1e-8, 0.25, 0.5, 0.999999, LAST]))
def test_a_token_of_probability_zero_is_never_sampled(logits, distribution, uniform):
    seen = torch.zeros_like(logits, dtype=torch.bool)
    ids, log_probs = sample_tokens(logits, distribution, torch.full((len(logits),), uniform), seen)
    probs = process_logits(logits, distribution, seen).softmax(-1)
    assert (probs.gather(-1, ids[:, None]) > 0).all()
    assert log_probs.isfinite().all() and (log_probs <= 0).all()


def test_rounding_of_the_cumulative_sum_samples_no_banned_token():
    """Rounded probabilities of many tokens may sum to less than the largest uniform number."""
    logits = torch.randn(200, 1000, generator=torch.Generator().manual_seed(0))
    logits[:, -3:] = -math.inf
    assert (logits.softmax(-1).cumsum(-1)[:, -1] < LAST).any()
    ids, log_probs = sample_tokens(logits, SamplingDistribution(), torch.full((200,), LAST))
    assert (ids < 997).all() and log_probs.isfinite().all()


@settings(deadline=None, max_examples=60)
@given(hard_logits(), st.integers(1, 6), st.floats(0.01, 1), st.floats(0, 0.99))
def test_some_token_is_always_kept_and_the_likeliest_among_them(logits, top_k, top_p, min_p):
    keep = kept_tokens(logits, SamplingDistribution(top_k=top_k, top_p=top_p, min_p=min_p))
    assert (keep & (logits == logits.amax(-1, keepdim=True))).any(-1).all()


@each_distribution
def test_the_sampled_log_prob_is_the_scored_one(distribution):
    """The sampler's log-probs and the loss's log-probs are of the same distribution."""
    logits, seen = random_case(rows=40)
    uniforms = torch.rand(40, generator=torch.Generator().manual_seed(5))
    ids, sampled = sample_tokens(logits, distribution, uniforms, seen)
    identity = torch.eye(logits.shape[1])
    scored = token_log_probs(logits, identity, ids, distribution=distribution, seen=seen).log_probs
    torch.testing.assert_close(sampled, scored, atol=1e-5, rtol=0)
    exact = [slow_probs(x, distribution, s) for x, s in zip(logits.tolist(), seen.tolist(), strict=True)]
    expected = torch.tensor([math.log(p[v]) for p, v in zip(exact, ids.tolist(), strict=True)])
    torch.testing.assert_close(sampled, expected, atol=1e-5, rtol=0)


@each_distribution
def test_a_row_samples_the_same_in_any_batch(distribution):
    logits, seen = random_case(rows=30, vocab=37, seed=2)
    uniforms = torch.rand(30, generator=torch.Generator().manual_seed(6))
    ids, log_probs = sample_tokens(logits, distribution, uniforms, seen)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(7))
    shuffled = sample_tokens(logits[order], distribution, uniforms[order], seen[order])
    assert torch.equal(shuffled[0], ids[order]) and torch.equal(shuffled[1], log_probs[order])
    for i in range(30):
        row = slice(i, i + 1)
        alone = sample_tokens(logits[row], distribution, uniforms[row], seen[row])
        assert torch.equal(alone[0], ids[row]) and torch.equal(alone[1], log_probs[row])


def test_greedy_takes_the_likeliest_after_the_penalty():
    logits, seen = torch.tensor([[1.0, 3.0, 2.0]]), torch.tensor([[False, True, False]])
    ids, log_probs = sample_tokens(logits, SamplingDistribution(temperature=0), torch.tensor([0.99]))
    assert (ids.tolist(), log_probs.tolist()) == ([1], [0.0])
    penalised = SamplingDistribution(temperature=0, repetition_penalty=2.0)
    assert sample_tokens(logits, penalised, torch.tensor([0.0]), seen)[0].tolist() == [2]


@each_distribution
def test_a_recorded_support_takes_the_truncations_place(distribution):
    logits, seen = random_case()
    generator = torch.Generator().manual_seed(1)
    kept = torch.rand(logits.shape, generator=generator) < 0.5
    kept[:, 2] = True
    processed = process_logits(logits, distribution, seen, sampled=torch.zeros(6).long(), support=kept)
    assert torch.equal(processed.isfinite(), kept), "neither the truncation nor the sampled id has a say"
    plain = SamplingDistribution(
        temperature=distribution.temperature, repetition_penalty=distribution.repetition_penalty
    )
    assert torch.equal(processed[kept], process_logits(logits, plain, seen)[kept])


def test_a_recorded_support_gives_the_same_distribution():
    logits, seen = random_case()
    distribution = SamplingDistribution(temperature=0.7, top_k=5, top_p=0.8, repetition_penalty=1.2)
    sampled = process_logits(logits, distribution, seen)
    support = Support(sampled.isfinite().nonzero()[:, 1].int(), sampled.isfinite().sum(1).int())
    offsets = support.offsets()
    assert offsets[0] == 0 and offsets[-1] == len(support.ids) and len(offsets) == len(logits) + 1
    for rows in (slice(0, 6), slice(2, 4), slice(5, 6), slice(3, 3)):
        mask = support.mask(rows, offsets, logits.shape[1])
        assert torch.equal(mask, sampled[rows].isfinite())
        assert torch.equal(process_logits(logits[rows], distribution, seen[rows], support=mask), sampled[rows])


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"top_k": 0},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": math.nan},
        {"min_p": -0.1},
        {"min_p": 1.0},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": -1.0},
    ],
    ids=str,
)
def test_values_out_of_range_are_refused(bad):
    ((name, value),) = bad.items()
    with pytest.raises(ValueError, match=name) as error:
        SamplingDistribution(**bad)
    assert repr(value) in str(error.value)
