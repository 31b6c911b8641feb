from __future__ import annotations

import pytest
import torch

import torchrl_rloo.functional.log_probs as log_probs_module
from support.gpu import needs_gpu
from torchrl_rloo.functional import SamplingDistribution, token_log_probs
from torchrl_rloo.functional.log_probs import TokenLogProbs
from torchrl_rloo.functional.sampling import Support

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
    "support": {"distribution": SamplingDistribution(temperature=0.8, top_k=4), "support": True},
    "low rank": {"low_rank": (3, 1)},
    "everything": {
        "distribution": SamplingDistribution(temperature=1.4, top_k=9, top_p=0.9, min_p=0.02, repetition_penalty=1.3),
        "softcap": 3.0,
        "scale": 1.2,
        "bias": True,
    },
    "everything and more": {
        "distribution": SamplingDistribution(temperature=1.4, top_p=0.5, repetition_penalty=1.3),
        "softcap": 3.0,
        "scale": 1.2,
        "bias": True,
        "support": True,
        "low_rank": (2,),
    },
}
each_setting = pytest.mark.parametrize("name", SETTINGS)


class Case:
    """Random inputs in float32; ``kwargs`` of the function under test."""

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
        self.low_rank = [
            torch.randn(size, r, generator=generator) for r in self.kwargs.pop("low_rank", ()) for size in (n, V)
        ]
        self.distribution = self.kwargs.setdefault("distribution", SamplingDistribution())
        self.kwargs["seen"] = self.seen if self.distribution.repetition_penalty != 1 else None
        self.kept = torch.rand(n, V, generator=generator) < 0.5
        if self.kwargs.pop("support", False):
            self.kept[torch.arange(n), self.targets] = True
            self.kwargs["support"] = Support(self.kept.nonzero()[:, 1].int(), self.kept.sum(1).int())

    def leaves(self, dtype: torch.dtype = torch.float32) -> list[torch.Tensor | None]:
        tensors = (self.hidden, self.weight, self.bias, *self.low_rank)
        return [None if t is None else t.to(dtype, copy=True).requires_grad_() for t in tensors]

    def score(self, hidden, weight, bias, *low_rank, **kwargs) -> TokenLogProbs:
        pairs = list(zip(low_rank[::2], low_rank[1::2], strict=True))
        return token_log_probs(hidden, weight, self.targets, bias=bias, low_rank=pairs, **self.kwargs | kwargs)

    def run(self, *leaves) -> tuple[torch.Tensor, torch.Tensor]:
        return self.score(*leaves)[:2]


def plain_log_probs(case: Case, hidden, weight, bias, *low_rank) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the definition, position by position in float64, with the whole vocabulary and plain autograd.

    Log-probs of the targets, entropies, and the log-probs of all tokens ``[N, V]``.
    """
    d, log_probs, entropies, everything = case.distribution, [], [], []
    for n, target in enumerate(case.targets.tolist()):
        logits = weight @ hidden[n]
        for down, up in zip(low_rank[::2], low_rank[1::2], strict=True):
            logits = logits + up @ down[n]
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
        if "support" in case.kwargs:
            kept = case.kept[n].nonzero()[:, 0].tolist()
        full = logits[kept].log_softmax(0)
        log_probs.append(full[kept.index(target)])
        entropies.append(-(full.exp() * full).sum())
        everything.append(torch.full((V,), -torch.inf, dtype=full.dtype).index_put((torch.tensor(kept),), full))
    return torch.stack(log_probs), torch.stack(entropies), torch.stack(everything)


def gradients(outputs, case: Case, leaves) -> list[torch.Tensor]:
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    upstream = [case.upstream.to(outputs[0].dtype), case.upstream.flip(0).to(outputs[0].dtype)]
    leaves = [leaf for leaf in leaves if leaf is not None]
    for leaf in leaves:
        leaf.grad = None
    torch.autograd.backward(outputs, upstream[: len(outputs)])
    return [leaf.grad for leaf in leaves]


@pytest.fixture(params=[None, 17, 1], ids=["one tile", "several rows of tiles", "rows and columns of tiles"])
def tiles(request, monkeypatch) -> None:
    if request.param:
        monkeypatch.setattr(log_probs_module, "TILE_ELEMENTS", request.param * V)
        monkeypatch.setattr(log_probs_module, "TILE_ROWS", 17)
        monkeypatch.setattr(log_probs_module, "BLOCK_ELEMENTS", 3 * V)


@each_setting
def test_values_and_gradients_equal_a_plain_implementation(name, tiles):
    case = Case(name)
    leaves, doubles = case.leaves(), case.leaves(torch.float64)
    log_probs, entropy = case.run(*leaves)
    expected, expected_entropy, _ = plain_log_probs(case, *doubles)
    torch.testing.assert_close(log_probs.detach(), expected.detach().float(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy.detach(), expected_entropy.detach().float(), atol=1e-4, rtol=1e-5)
    ours = gradients((log_probs, entropy), case, leaves)
    theirs = gradients((expected, expected_entropy), case, doubles)
    for gradient, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(gradient, reference.float(), atol=3e-5, rtol=1e-4)


@each_setting
def test_gradcheck(name, monkeypatch):
    """Gradients hold for every differentiable input, over several tiles and blocks."""
    monkeypatch.setattr(log_probs_module, "TILE_ELEMENTS", V)
    monkeypatch.setattr(log_probs_module, "TILE_ROWS", 3)
    monkeypatch.setattr(log_probs_module, "BLOCK_ELEMENTS", V // 2)
    case = Case(name, n=5)
    leaves = case.leaves(torch.float64)
    assert all(values.dtype == torch.float64 for values in case.run(*leaves))
    assert torch.autograd.gradcheck(case.run, leaves)


@pytest.mark.parametrize("top_k", [5, V])
@each_setting
def test_top_k_statistics(name, top_k, tiles):
    case = Case(name)
    scored = case.score(*case.leaves(), top_k=top_k)
    _, _, full = plain_log_probs(case, *(None if t is None else t.detach() for t in case.leaves(torch.float64)))
    expected = full.topk(top_k, -1)
    assert scored.top_ids.shape == scored.top_log_probs.shape == (N, top_k) and scored.top_ids.dtype == torch.int64
    torch.testing.assert_close(scored.top_log_probs, expected.values.float(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(scored.top_log_probs, full.gather(-1, scored.top_ids).float(), atol=1e-5, rtol=1e-5)
    assert all(len(set(ids)) == top_k for ids in scored.top_ids.tolist())
    assert not scored.top_log_probs.requires_grad and not scored.top_ids.requires_grad
    assert torch.equal(scored.log_probs, case.run(*case.leaves())[0])


def test_unrequested_statistics_are_none():
    case = Case("plain")
    pairs = [(case.score(*(leaves := case.leaves()), entropy=entropy), leaves) for entropy in (False, True)]
    (scored, _), (with_entropy, _) = pairs
    assert scored.entropy is None and scored.top_ids is None and scored.top_log_probs is None
    assert torch.equal(scored.log_probs, with_entropy.log_probs)
    for without, with_it in zip(*(gradients(s.log_probs, case, leaves) for s, leaves in pairs), strict=True):
        assert torch.equal(without, with_it)
    for top_k in (-1, V + 1):
        with pytest.raises(ValueError, match=f"top_k={top_k}"):
            case.score(*case.leaves(), top_k=top_k)


@pytest.mark.parametrize("name", ["plain", "everything"])
def test_only_inputs_that_need_a_gradient_get_one(name, tiles):
    case = Case(name)
    leaves = case.leaves()
    complete = gradients(case.run(*leaves)[0], case, leaves)
    trainable = [i for i, leaf in enumerate(leaves) if leaf is not None]
    for only, expected in zip(trainable, complete, strict=True):
        some = [None if t is None else t.detach().requires_grad_(i == only) for i, t in enumerate(leaves)]
        case.run(*some)[0].backward(case.upstream)
        torch.testing.assert_close(some[only].grad, expected)
        assert all(t is None or t.grad is None for i, t in enumerate(some) if i != only)
    with torch.no_grad():
        assert not any(values.requires_grad for values in case.run(*leaves))


def test_a_derivative_of_the_gradient_is_refused():
    """A second derivative would silently lack the term of the normalizer."""
    case = Case("plain")
    leaves = case.leaves()
    (gradient,) = torch.autograd.grad(case.run(*leaves)[0].square().sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize(("name", "n"), [("everything", N), ("plain", N), ("plain", H), ("support", H)])
def test_a_second_backward_gives_the_same_again(name, n, tiles):
    """Up to ``H`` positions keep their logits for the first backward pass; the second one computes them again."""
    case = Case(name, n)
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


NARROW = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("name", ["plain", "softcap, scale and bias", "temperature", "low rank"])
def test_narrow_floats_are_multiplied_and_kept_in_float32(name, dtype, tiles, monkeypatch):
    """Values have the error of float32 sums, not of rounded logits. Gradients are rounded once, at the end."""
    monkeypatch.setattr(log_probs_module, "CAST_ELEMENTS", 5 * H)
    case = Case(name)
    half = case.leaves(dtype)
    doubles = [None if t is None else t.detach().double().requires_grad_() for t in half]
    log_probs, entropy = case.run(*half)
    expected, expected_entropy, _ = plain_log_probs(case, *doubles)
    assert log_probs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(log_probs.detach().double(), expected.detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy.detach().double(), expected_entropy.detach(), atol=1e-4, rtol=1e-5)
    ours = gradients((log_probs, entropy), case, half)
    theirs = gradients((expected, expected_entropy), case, doubles)
    for gradient, reference in zip(ours, theirs, strict=True):
        assert gradient.dtype == dtype
        torch.testing.assert_close(gradient.double(), reference, atol=1e-4, rtol=torch.finfo(dtype).eps)


@needs_gpu
@pytest.mark.parametrize("dtype", [*NARROW, torch.float32], ids=str)
def test_a_gpu_gives_the_same(dtype):
    case = Case("low rank")
    leaves = case.leaves(dtype)
    expected = case.run(*leaves)
    expected_gradients = gradients(expected, case, leaves)
    case.targets, case.upstream = case.targets.cuda(), case.upstream.cuda()
    moved = [None if t is None else t.detach().cuda().requires_grad_() for t in leaves]
    scored = case.run(*moved)
    for ours, theirs in zip(scored, expected, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, atol=1e-4, rtol=1e-4)
    for ours, theirs in zip(gradients(scored, case, moved), expected_gradients, strict=True):
        torch.testing.assert_close(ours.cpu().float(), theirs.float(), atol=2e-2, rtol=2e-2)


def test_a_hidden_state_may_be_wider_than_the_weight():
    case = Case("plain")
    hidden, weight, _ = case.leaves(torch.bfloat16)
    log_probs, _ = case.run(hidden, weight, None)
    wide = hidden.detach().float().requires_grad_()
    torch.testing.assert_close(case.run(wide, weight, None)[0], log_probs)
    case.run(wide, weight, None)[0].sum().backward()
    assert wide.grad.dtype == torch.float32 and weight.grad.dtype == torch.bfloat16


def test_autocast_changes_nothing():
    case = Case("everything")
    leaves = case.leaves()
    expected = case.run(*leaves)
    expected_gradients = gradients(expected, case, leaves)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scored = case.run(*leaves)
        ours = gradients(scored, case, leaves)
    assert all(torch.equal(a, b) for a, b in zip((*scored, *ours), (*expected, *expected_gradients), strict=True))


@pytest.mark.parametrize("name", ["top-k", "top-p", "min-p", "plain"])
def test_an_unlikely_target_and_huge_logits_have_a_finite_log_prob_and_gradient(name):
    case = Case(name)
    case.targets = (case.hidden @ case.weight.T).argmin(-1)
    if name == "plain":
        case.hidden = case.hidden * 1e4
    leaves = case.leaves()
    log_probs, entropy = case.run(*leaves)
    assert log_probs.isfinite().all() and entropy.isfinite().all()
    assert all(g.isfinite().all() for g in gradients(log_probs, case, leaves))
    if name == "plain":
        assert (log_probs <= 0).all() and (entropy >= -1e-6).all()


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
