"""Gradient checkpointing in evaluation mode: each layer runs twice, without dropout, with the same gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from torchrl_rloo.data import keys, stack_rows
from torchrl_rloo.data.rows import PACKINGS
from torchrl_rloo.embedded import build_model
from torchrl_rloo.modules import TransformersWrapper, ValueHead, add_adapter, frozen_copy, load_model
from torchrl_rloo.modules.checkpointing import recompute_in_eval


@pytest.fixture(scope="module")
def rows() -> TensorDictBase:
    generator, result = torch.Generator().manual_seed(0), []
    for shape in ("ppaa", "ppaaccaaa", "pppa"):
        tokens = torch.randint(3, 300, (len(shape),), generator=generator)
        result.append(TensorDict({keys.TOKENS: tokens, keys.ACTION_MASK: torch.tensor([c == "a" for c in shape])}, []))
    return stack_rows(result)


@pytest.fixture
def load(tokenizer, tmp_path) -> Callable[..., PreTrainedModel]:
    """Loader of a small saved model with settings of ``load_model``."""
    build_model(tokenizer, seed=0).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return lambda **settings: load_model(tmp_path, **settings)[0]


@contextmanager
def calls_of(module: nn.Module) -> Iterator[list[int]]:
    calls: list[int] = []
    handle = module.register_forward_pre_hook(lambda *_: calls.append(1))
    yield calls
    handle.remove()


def score(model: nn.Module, tokenizer, rows: TensorDictBase, packing: str = "none") -> torch.Tensor:
    return TransformersWrapper(model, tokenizer=tokenizer, generate=False, packing=packing).score(rows).log_probs


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("packing", PACKINGS)
def test_each_layer_runs_again_in_the_backward_pass(load, tokenizer, rows, packing: str) -> None:
    plain, model = load(), load(gradient_checkpointing=True)
    assert not any(m.training for m in model.modules())
    scorer = TransformersWrapper(model, tokenizer=tokenizer, generate=False, packing=packing)
    with calls_of(model.model.layers[0].mlp) as calls:
        log_probs = scorer.score(rows).log_probs
        assert len(calls) == 1 and not any(m.training for m in model.modules())
        log_probs.sum().backward()
        assert len(calls) == 2
    score(plain, tokenizer, rows, packing).sum().backward()
    expected = gradients(plain)
    assert expected.keys() == gradients(model).keys()
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected[name])


def test_nothing_runs_twice_without_a_gradient(load, tokenizer, rows) -> None:
    model = load(gradient_checkpointing=True)
    scorer = TransformersWrapper(model, tokenizer=tokenizer, generate=False)
    with torch.no_grad(), calls_of(model.model.layers[0].mlp) as calls:
        scorer.score(rows)
    assert len(calls) == 1


def test_an_adapter_is_trained_with_recomputed_layers(load, tokenizer, rows) -> None:
    model = add_adapter(load(gradient_checkpointing=True), {"r": 2, "target_modules": ["q_proj"]})
    with calls_of(model.get_decoder().layers[0].mlp) as calls:
        score(model, tokenizer, rows).sum().backward()
    assert len(calls) >= 2 and any(g.any() for g in gradients(model).values())


def test_the_critic_recomputes(load, rows) -> None:
    head = ValueHead(load(gradient_checkpointing=True))
    with calls_of(head.trunk.layers[0].mlp) as calls:
        head.values(rows)[0].sum().backward()
    assert len(calls) == 2


@pytest.mark.parametrize("reentrant", [True, False])
def test_dropout_of_the_layer_itself_stays_off(reentrant: bool) -> None:
    """OPT's layers call ``dropout(..., training=self.training)`` themselves."""
    sizes = {"hidden_size": 16, "ffn_dim": 16, "num_attention_heads": 2, "vocab_size": 32, "word_embed_proj_dim": 16}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("opt", dropout=0.9, num_hidden_layers=2, **sizes))
    model.eval()
    ids = torch.tensor([[3, 4, 5, 6]])
    expected = model(input_ids=ids).logits
    expected_gradients = torch.autograd.grad(expected.square().sum(), list(model.parameters()), allow_unused=True)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with recompute_in_eval(model), calls_of(model.model.decoder.layers[0].self_attn) as calls:
        logits = model(input_ids=ids, use_cache=False).logits
        logits.square().sum().backward()
    assert len(calls) == 2
    torch.testing.assert_close(logits, expected)
    for parameter, gradient in zip(model.parameters(), expected_gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_a_policy_samples_the_same_with_it(load, tokenizer, prompt_rows) -> None:
    def sample(model: nn.Module) -> list[list[int]]:
        policy = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 6, "seed": 0})
        return [row[keys.RESPONSE_TOKENS].tolist() for row in policy(prompt_rows([5, 6, 7], [8, 9])).unbind(0)]

    model = load(gradient_checkpointing=True)
    assert sample(model) == sample(load()) == sample(frozen_copy(model))
    with pytest.raises(ValueError, match=r"gradient checkpointing in training mode .*call model\.eval\(\)"):
        sample(model.train())


def test_a_model_without_such_layers_is_refused(load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchrl_rloo.modules.loading.checkpointing_layers", lambda model: [])
    with pytest.raises(ValueError, match="gradient_checkpointing=True, but Qwen2ForCausalLM has no layers"):
        load(gradient_checkpointing=True)


def test_dropout_of_an_adapter_is_refused(load) -> None:
    config = {"r": 2, "target_modules": "all-linear"}
    with pytest.raises(ValueError, match=r"lora_dropout=0\.1 would have no effect.*Set it to 0"):
        add_adapter(load(), config | {"lora_dropout": 0.1})
    assert add_adapter(load(), config | {"lora_dropout": 0.0}).peft_config
