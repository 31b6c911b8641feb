from __future__ import annotations

import pytest
import torch

import torchrl_rloo.functional.log_probs as log_probs_module
from torchrl_rloo.functional import SamplingDistribution, token_log_probs

N, H, V = 50, 8, 13

SETTINGS = {
    "plain": {},
    "bias": {"bias": True},
    "scale": {"scale": 0.4},
    "softcap": {"softcap": 2.0},
    "softcap, scale and bias": {"softcap": 1.5, "scale": 1.7, "bias": True},
    "temperature": {"distribution": SamplingDistribution(temperature=0.6)},
    "top-k": {"distribution": SamplingDistribution(top_k=4)},
    "top-p": {"distribution": SamplingDistribution(top_p=0.7)},
    "min-p": {"distribution": SamplingDistribution(min_p=0.15)},
    "penalty": {"distribution": SamplingDistribution(repetition_penalty=1.6)},
    "penalty below 1": {"distribution": SamplingDistribution(repetition_penalty=0.5)},
    "everything": {
        "distribution": SamplingDistribution(temperature=1.4, top_k=9, top_p=0.9, min_p=0.02, repetition_penalty=1.3),
        "softcap": 3.0,
        "scale": 1.2,
        "bias": True,
    },
}
each_setting = pytest.mark.parametrize("name", SETTINGS)


class Case:
    """Random inputs, in float32; ``kwargs`` for the function under test."""

    def __init__(self, name: str, n: int = N, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        self.hidden = torch.randn(n, H, generator=generator)
        self.weight = torch.randn(V, H, generator=generator)
        self.targets = torch.randint(V, (n,), generator=generator)
        self.seen = torch.rand(n, V, generator=generator) < 0.4
        self.upstream = torch.randn(n, generator=generator)
        self.kwargs = dict(SETTINGS[name])
        bias = torch.randn(V, generator=generator)
        self.bias = bias if self.kwargs.pop("bias", False) else None
        self.distribution = self.kwargs.setdefault("distribution", SamplingDistribution())
        self.kwargs["seen"] = self.seen if self.distribution.repetition_penalty != 1 else None

    def leaves(self) -> list[torch.Tensor | None]:
        tensors = (self.hidden, self.weight, self.bias)
        return [None if t is None else t.clone().requires_grad_() for t in tensors]

    def run(self, hidden, weight, bias) -> tuple[torch.Tensor, torch.Tensor]:
        return token_log_probs(hidden, weight, self.targets, bias=bias, **self.kwargs)


def plain_log_probs(case: Case, hidden, weight, bias) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, position by position in float64, with the whole vocabulary and plain autograd."""
    d, log_probs, entropies = case.distribution, [], []
    for n, target in enumerate(case.targets.tolist()):
        logits = weight @ hidden[n]
        if bias is not None:
            logits = logits + bias
        logits = logits * case.kwargs.get("scale", 1.0)
        if (cap := case.kwargs.get("softcap")) is not None:
            logits = cap * torch.tanh(logits / cap)
        if d.repetition_penalty != 1:
            factor = torch.where(logits > 0, 1 / d.repetition_penalty, d.repetition_penalty)
            logits = torch.where(case.seen[n], logits * factor, logits)
        logits = logits / d.temperature
        kept = logits.argsort(descending=True)[: d.top_k].tolist()
        probs = logits[kept].softmax(0).tolist()
        nucleus = [v for i, v in enumerate(kept) if sum(probs[:i]) < d.top_p]
        kept = [v for v in nucleus if logits[v].exp() >= d.min_p * logits.max().exp()]
        kept = sorted({*kept, target})
        full = logits[kept].log_softmax(0)
        log_probs.append(full[kept.index(target)])
        entropies.append(-(full.exp() * full).sum())
    return torch.stack(log_probs), torch.stack(entropies)


def gradients(log_probs, case: Case, leaves) -> list[torch.Tensor]:
    log_probs.backward(case.upstream.to(log_probs.dtype))
    return [leaf.grad for leaf in leaves if leaf is not None]


@pytest.fixture(params=[False, True], ids=["one tile", "several tiles"])
def tiles(request, monkeypatch) -> None:
    if request.param:
        monkeypatch.setattr(log_probs_module, "TILE_ELEMENTS", 17 * V)
        assert 1 < N / log_probs_module.tile_rows(V) and N % log_probs_module.tile_rows(V)


@each_setting
def test_values_and_gradients_equal_a_plain_implementation(name, tiles):
    case = Case(name)
    leaves = case.leaves()
    log_probs, entropy = case.run(*leaves)
    doubles = [None if t is None else t.detach().double().requires_grad_() for t in leaves]
    expected, expected_entropy = plain_log_probs(case, *doubles)
    torch.testing.assert_close(log_probs.detach(), expected.detach().float(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, expected_entropy.detach().float(), atol=1e-4, rtol=1e-5)
    ours, theirs = gradients(log_probs, case, leaves), gradients(expected, case, doubles)
    for gradient, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(gradient, reference.float(), atol=2e-5, rtol=1e-4)


@each_setting
def test_scoring_every_token_of_a_row_gives_a_distribution(name):
    case = Case(name, n=1)
    if case.distribution.truncates:  # a target outside the truncated set is added to it, so sums exceed 1
        return
    case.targets = torch.arange(V)
    case.hidden = case.hidden.expand(V, H)
    if case.kwargs["seen"] is not None:
        case.kwargs["seen"] = case.seen.expand(V, V)
    log_probs, entropy = case.run(case.hidden, case.weight, case.bias)
    assert log_probs.exp().sum().item() == pytest.approx(1, abs=1e-5)
    assert entropy[0].item() == pytest.approx(-(log_probs.exp() * log_probs).sum().item(), abs=1e-5)


@pytest.mark.parametrize("name", ["plain", "everything"])
def test_only_what_needs_a_gradient_gets_one(name, tiles):
    case = Case(name)
    leaves = case.leaves()
    complete = gradients(case.run(*leaves)[0], case, leaves)
    trainable = [i for i, leaf in enumerate(leaves) if leaf is not None]
    for only, expected in zip(trainable, complete, strict=True):
        some = [None if t is None else t.detach().requires_grad_(i == only) for i, t in enumerate(leaves)]
        case.run(*some)[0].backward(case.upstream)
        torch.testing.assert_close(some[only].grad, expected)
        assert all(t is None or t.grad is None for i, t in enumerate(some) if i != only)


def test_entropy_and_frozen_inputs_carry_no_gradient():
    case = Case("plain")
    log_probs, entropy = case.run(*case.leaves())
    assert log_probs.requires_grad and not entropy.requires_grad
    assert not case.run(case.hidden, case.weight, case.bias)[0].requires_grad


def test_a_second_backward_gives_the_same_again(tiles):
    case = Case("everything")
    leaves = case.leaves()
    log_probs, _ = case.run(*leaves)
    for _ in range(2):
        log_probs.backward(case.upstream, retain_graph=True)
    expected = gradients(case.run(*(again := case.leaves()))[0], case, again)
    for leaf, gradient in zip([leaf for leaf in leaves if leaf is not None], expected, strict=True):
        torch.testing.assert_close(leaf.grad, 2 * gradient)


def test_a_position_does_not_depend_on_the_others(tiles):
    case = Case("everything")
    log_probs, entropy = case.run(case.hidden, case.weight, case.bias)
    part = slice(20, 45)
    case.targets, case.kwargs["seen"] = case.targets[part], case.seen[part]
    some, some_entropy = case.run(case.hidden[part], case.weight, case.bias)
    torch.testing.assert_close(some, log_probs[part], atol=1e-6, rtol=0)
    torch.testing.assert_close(some_entropy, entropy[part], atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["plain", "softcap, scale and bias", "temperature"])
def test_bfloat16_is_near_float32(name, tiles):
    case = Case(name)
    full = case.leaves()
    half = [None if t is None else t.detach().bfloat16().requires_grad_() for t in full]
    rounded = [None if t is None else t.detach().float().requires_grad_() for t in half]
    log_probs, entropy = case.run(*half)
    expected, expected_entropy = case.run(*rounded)
    assert log_probs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(log_probs.detach(), expected.detach(), atol=0.1, rtol=0.02)
    torch.testing.assert_close(entropy, expected_entropy, atol=0.1, rtol=0.02)
    ours, theirs = gradients(log_probs, case, half), gradients(expected, case, rounded)
    for gradient, reference in zip(ours, theirs, strict=True):
        assert gradient.dtype == torch.bfloat16
        assert (gradient.float() - reference).norm() <= 0.03 * reference.norm()


@pytest.mark.parametrize("name", ["top-k", "top-p", "min-p"])
def test_an_unlikely_target_has_a_finite_log_prob_and_gradient(name):
    case = Case(name)
    case.targets = (case.hidden @ case.weight.T).argmin(-1)
    leaves = case.leaves()
    log_probs, entropy = case.run(*leaves)
    assert log_probs.isfinite().all() and entropy.isfinite().all()
    assert all(g.isfinite().all() for g in gradients(log_probs, case, leaves))


def test_huge_logits_stay_finite():
    case = Case("plain")
    case.hidden = case.hidden * 1e4
    leaves = case.leaves()
    log_probs, entropy = case.run(*leaves)
    assert log_probs.isfinite().all() and (log_probs <= 0).all() and (entropy >= -1e-6).all()
    assert all(g.isfinite().all() for g in gradients(log_probs, case, leaves))


@pytest.mark.parametrize("name", ["plain", "everything"])
def test_no_positions(name):
    case = Case(name, n=0)
    leaves = case.leaves()
    log_probs, entropy = case.run(*leaves)
    assert log_probs.shape == entropy.shape == (0,)
    assert all((g == 0).all() for g in gradients(log_probs, case, leaves))


def test_inputs_are_left_as_they_are():
    case = Case("everything")
    leaves = case.leaves()
    before = [t.detach().clone() for t in leaves]
    gradients(case.run(*leaves)[0], case, leaves)
    assert all(torch.equal(t, b) for t, b in zip(leaves, before, strict=True))


def test_greedy_has_no_log_probs_to_train_on():
    with pytest.raises(ValueError, match="temperature=0"):
        token_log_probs(
            torch.zeros(1, H), torch.zeros(V, H), torch.tensor([0]), distribution=SamplingDistribution(temperature=0)
        )
