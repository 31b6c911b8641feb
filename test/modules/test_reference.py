"""References score with the reference model, and leave the policy unchanged."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tensordict import TensorDict, TensorDictBase

from torchrl_rloo.data import keys, stack_rows
from torchrl_rloo.embedded import build_model
from torchrl_rloo.modules import TransformersWrapper
from torchrl_rloo.modules.reference import AdapterReference, MovingReference, frozen_reference, record_log_probs


@pytest.fixture(scope="module")
def rows() -> TensorDictBase:
    generator, result = torch.Generator().manual_seed(0), []
    for shape in ("ppaa", "ppaaccaaa", "pppa"):
        tokens = torch.randint(3, 300, (len(shape),), generator=generator)
        mask = torch.tensor([c == "a" for c in shape])
        result.append(TensorDict({keys.TOKENS: tokens, keys.ACTION_MASK: mask}, []))
    return stack_rows(result)


@pytest.fixture
def policy(tokenizer) -> TransformersWrapper:
    """Generating policy at another temperature, with weights that tests may change."""
    model = build_model(tokenizer, seed=0).eval()
    return TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs={"temperature": 0.7})


def scores(policy: TransformersWrapper, rows: TensorDictBase) -> torch.Tensor:
    return policy.get_new_version(generate=False).score(rows).log_probs.detach()


@torch.no_grad()
def drift(model: torch.nn.Module, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        if p.requires_grad:
            p.add_(0.1 * torch.randn(p.shape, generator=generator))


def close_weights(ours: torch.nn.Module, theirs: dict[str, torch.Tensor]) -> None:
    for name, p in ours.named_parameters():
        torch.testing.assert_close(p, theirs[name])


def snapshot(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_a_frozen_reference_stays_where_the_policy_was(policy, rows) -> None:
    before = scores(policy, rows)
    reference = frozen_reference(policy)
    drift(policy.model)
    scored = reference.score(rows)
    assert torch.equal(scored.log_probs, before) and not torch.equal(scores(policy, rows), before)
    assert not scored.log_probs.requires_grad and not any(p.requires_grad for p in reference.model.parameters())
    assert all(p.requires_grad for p in policy.model.parameters()), "the policy still trains"
    assert not reference.generate and reference.distribution == policy.distribution


def test_a_frozen_reference_keeps_ties_and_evaluates(policy, rows) -> None:
    policy.model.train()
    reference = frozen_reference(policy)
    assert policy.model.training and not reference.model.training
    assert reference.model.lm_head.weight is reference.model.get_input_embeddings().weight
    assert not {p.data_ptr() for p in reference.model.parameters()} & {p.data_ptr() for p in policy.model.parameters()}
    assert not {b.data_ptr() for b in reference.model.buffers()} & {b.data_ptr() for b in policy.model.buffers()}


def test_another_dtype_is_that_of_the_parameters_alone(policy, rows) -> None:
    exact = frozen_reference(policy).score(rows).log_probs
    reference = frozen_reference(policy, dtype=torch.bfloat16)
    assert {p.dtype for p in reference.model.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in reference.model.buffers()} == {torch.float32}
    torch.testing.assert_close(reference.score(rows).log_probs, exact, rtol=0, atol=0.3)


@pytest.fixture
def make_adapter(policy) -> Callable[..., tuple[TransformersWrapper, torch.Tensor]]:
    """Factory of a policy with a trained LoRA adapter, and a copy of its base model."""

    def make(**settings):
        base = copy.deepcopy(policy.model)
        config = {"r": 4, "target_modules": ["q_proj", "up_proj"], "lora_dropout": 0.0, **settings}
        model = get_peft_model(policy.model, LoraConfig(**config)).eval()
        drift(model)
        return policy.get_new_version(model=model), policy.get_new_version(model=base)

    return make


@pytest.mark.parametrize("settings", [{}, {"target_modules": ["q_proj", "lm_head"]}], ids=["decoder", "head"])
def test_an_adapter_reference_is_the_base_model_exactly(settings, make_adapter, rows) -> None:
    adapted, base = make_adapter(**settings)
    reference = AdapterReference(adapted)
    before = scores(adapted, rows)
    scored = reference.score(rows)
    torch.testing.assert_close(scored.log_probs, scores(base, rows), rtol=0, atol=2e-6 if settings else 0)
    assert (before - scored.log_probs).abs().max() > 0.01
    assert not scored.log_probs.requires_grad
    assert torch.equal(scores(adapted, rows), before), "the adapter is on again"
    assert not reference.generate and reference.distribution == adapted.distribution


@pytest.mark.parametrize("fails", [False, True])
def test_an_adapter_is_left_as_it_was(fails: bool, make_adapter, rows) -> None:
    """Its weights and trained parameters stay the same, also after an exception."""
    adapted, _ = make_adapter()
    frozen = next(p for n, p in adapted.model.named_parameters() if "lora_A" in n).requires_grad_(False)
    flags = [p.requires_grad for p in adapted.model.parameters()]
    assert sum(flags) > 2
    before = scores(adapted, rows)
    if fails:
        with pytest.raises(KeyError):
            AdapterReference(adapted).score(rows.exclude(keys.TOKENS))
    else:
        AdapterReference(adapted).score(rows)
    assert [p.requires_grad for p in adapted.model.parameters()] == flags and not frozen.requires_grad
    assert torch.equal(scores(adapted, rows), before)


def test_a_policy_without_adapter_is_refused(policy) -> None:
    with pytest.raises(TypeError, match="frozen_reference"):
        AdapterReference(policy)


def test_a_moving_reference_takes_its_share_of_the_current_weights(policy, rows) -> None:
    reference = MovingReference(frozen_reference(policy), policy.model, share=0.25)
    held, expected = reference.score(rows).log_probs, snapshot(policy.model)
    for seed in range(3):
        drift(policy.model, seed)
        assert torch.equal(reference.score(rows).log_probs, held)
        reference.update()
        held = reference.score(rows).log_probs
        expected = {name: 0.75 * expected[name] + 0.25 * p for name, p in snapshot(policy.model).items()}
        close_weights(reference.scorer.model, expected)
    MovingReference(reference.scorer, policy.model, share=1).update()
    assert torch.equal(reference.score(rows).log_probs, scores(policy, rows))
    assert not held.requires_grad and not reference.generate and reference.distribution == policy.distribution
    for share in (0, 1.5, float("nan")):
        with pytest.raises(ValueError, match="share="):
            MovingReference(reference.scorer, policy.model, share)


SHAPES = ["ppaa", "ppaaccaaa", "pppppapcca", "pa", "ppp"]


@pytest.fixture
def batch() -> TensorDictBase:
    generator, result = torch.Generator().manual_seed(0), []
    for i, shape in enumerate(SHAPES):
        tokens = torch.randint(3, 300, (len(shape),), generator=generator)
        mask = torch.tensor([c == "a" for c in shape])
        result.append(TensorDict({keys.TOKENS: tokens, keys.ACTION_MASK: mask, keys.GROUP_ID: torch.tensor(i)}, []))
    return stack_rows(result)


@pytest.fixture(scope="module")
def scorer(model, tokenizer) -> TransformersWrapper:
    return TransformersWrapper(model, tokenizer=tokenizer, generate=False)


@torch.no_grad()
def expected(model, row: TensorDictBase) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probs and entropies of one row from full logits without padding, 0 on context tokens."""
    tokens, mask = row[keys.TOKENS], row[keys.ACTION_MASK]
    full = model(input_ids=tokens[None], use_cache=False).logits[0, :-1].double().log_softmax(-1)
    own = full.gather(-1, tokens[1:, None])[:, 0]
    entropy = -(full.exp() * full).sum(-1)
    return tuple(torch.where(mask, torch.cat([torch.zeros(1), v.float()]), 0.0) for v in (own, entropy))


@pytest.mark.parametrize("split", [{}, {"micro_batch_size": 1}, {"micro_batch_size": 2}, {"max_tokens": 12}])
def test_each_row_gets_its_own_scores(split, scorer, model, batch) -> None:
    out = record_log_probs(scorer, batch, entropy=keys.PROXIMAL_ENTROPY, **split)
    assert out[keys.GROUP_ID].tolist() == list(range(len(SHAPES)))
    for row, written in zip(batch.unbind(0), out.unbind(0), strict=True):
        for key, values in zip((keys.PROXIMAL_LOG_PROBS, keys.PROXIMAL_ENTROPY), expected(model, row), strict=True):
            assert written[key].dtype == torch.float32 and not written[key].requires_grad
            torch.testing.assert_close(written[key], values, rtol=0, atol=2e-5)


def test_a_reference_and_the_entropy_left_out(scorer, model, batch) -> None:
    record_log_probs(frozen_reference(scorer), batch, log_probs=keys.REF_LOG_PROBS, micro_batch_size=2)
    for row in batch.unbind(0):
        torch.testing.assert_close(row[keys.REF_LOG_PROBS], expected(model, row)[0], rtol=0, atol=2e-5)
        assert set(row.keys(True, True)) == {keys.TOKENS, keys.ACTION_MASK, keys.GROUP_ID, keys.REF_LOG_PROBS}
    dense = torch.stack([batch[1], batch[1].clone()]).contiguous()
    assert record_log_probs(scorer, dense, micro_batch_size=1)[keys.PROXIMAL_LOG_PROBS].shape == (2, len(SHAPES[1]))
    assert len(record_log_probs(scorer, batch[:0])) == 0
