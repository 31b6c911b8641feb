"""References: what they score is the model they stand for, and they leave the policy as it was."""

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
from torchrl_rloo.modules.reference import AdapterReference, MovingReference, frozen_reference


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
    """One that generates, at a temperature of its own, on weights that tests may change."""
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
    """A policy with a LoRA adapter that has been trained, and a copy of its base model."""

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
    """Which of it trains, too, also after an exception."""
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


def test_a_moving_average_equals_a_slow_loop(policy) -> None:
    reference = MovingReference(policy, decay=0.75)
    expected = {name: p.double() for name, p in snapshot(policy.model).items()}
    for seed in range(5):
        drift(policy.model, seed)
        reference.update()
        for name, p in policy.model.named_parameters():
            expected[name] = 0.75 * expected[name] + 0.25 * p.detach().double()
    close_weights(reference.scorer.model, {name: p.float() for name, p in expected.items()})


def test_a_copy_every_so_many_updates(policy, rows) -> None:
    reference = MovingReference(policy, every=3)
    assert reference.generate is False and reference.distribution == policy.distribution
    held = scores(policy, rows)
    for step in range(1, 8):
        drift(policy.model, step)
        reference.update()
        if step % 3 == 0:
            held = scores(policy, rows)
        scored = reference.score(rows)
        assert torch.equal(scored.log_probs, held) and not scored.log_probs.requires_grad


def test_buffers_move_too(policy) -> None:
    reference = MovingReference(policy, decay=0.9)
    buffer = next(iter(policy.model.buffers()))
    buffer.mul_(2)
    reference.update()
    assert torch.equal(next(iter(reference.scorer.model.buffers())), buffer)


@pytest.mark.parametrize("kind", [{"decay": 0.9}, {"every": 2}])
def test_a_resumed_reference_goes_on_the_same(kind, policy, tokenizer) -> None:
    first = MovingReference(policy, **kind)
    for step in range(3):
        drift(policy.model, step)
        first.update()
    state = copy.deepcopy(first.state_dict())
    second = MovingReference(policy, **kind)
    second.load_state_dict(state)
    for step in range(3, 6):
        drift(policy.model, step)
        first.update(), second.update()
        ours, theirs = snapshot(second.scorer.model), snapshot(first.scorer.model)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_moving_average_in_float32_of_bfloat16_weights_keeps_small_steps(policy) -> None:
    policy.model.bfloat16()
    coarse, fine = (MovingReference(policy, decay=0.999, dtype=dtype) for dtype in (None, torch.float32))
    with torch.no_grad():
        next(policy.model.parameters()).mul_(1.5)
    before = snapshot(coarse.scorer.model)
    for _ in range(20):
        coarse.update(), fine.update()
    name = next(iter(before))
    moved = (dict(fine.scorer.model.named_parameters())[name] / before[name].float() - 1).nanmean()
    assert moved.item() == pytest.approx(0.5 * (1 - 0.999**20), rel=1e-2)


@pytest.mark.parametrize("kind", [{}, {"decay": 0.9, "every": 2}, {"decay": 1.0}, {"decay": -0.1}, {"every": 0}])
def test_arguments_are_checked(kind, policy) -> None:
    with pytest.raises(ValueError, match="decay|every"):
        MovingReference(policy, **kind)
