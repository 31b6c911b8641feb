"""Gradient checkpointing in evaluation mode: each layer runs twice, without dropout, with the same gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tensordict import TensorDict, TensorDictBase
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from torchrl_rloo.data import keys, stack_rows
from torchrl_rloo.data.rows import PACKINGS
from torchrl_rloo.embedded import build_model
from torchrl_rloo.engines import Request, TransformersEngine
from torchrl_rloo.modules import TransformersWrapper, ValueHead, add_adapter, frozen_copy, load_model
from torchrl_rloo.modules.policies import recompute_in_eval


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
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, msg=name)
    with torch.no_grad(), calls_of(model.model.layers[0].mlp) as calls:
        scorer.score(rows)
    assert len(calls) == 1  # nothing runs twice without a gradient


def test_adapters_and_critics_are_trained_with_recomputed_layers(load, tokenizer, rows) -> None:
    model = add_adapter(load(gradient_checkpointing=True), {"r": 2, "target_modules": ["q_proj"]})
    with calls_of(model.get_decoder().layers[0].mlp) as calls:
        score(model, tokenizer, rows).sum().backward()
    assert len(calls) >= 2 and any(p.grad.any() for p in model.parameters() if p.grad is not None)
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


@pytest.fixture(scope="module")
def changed_heads_rows() -> TensorDictBase:
    ids = torch.arange(3, 15)
    return stack_rows([TensorDict({keys.TOKENS: ids, keys.ACTION_MASK: torch.arange(12) > 3}, [])])


def with_adapter(model: nn.Module) -> None:
    get_peft_model(model, LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False)).eval()


def resized(model: nn.Module) -> None:
    model.config.tie_word_embeddings = False
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    model.resize_token_embeddings(model.config.vocab_size + 64, mean_resizing=False)
    with torch.no_grad():
        model.lm_head.weight.mul_(3)


CHANGES = {"adapter": with_adapter, "resized": resized}


def full_logits(model: nn.Module, changed_heads_rows: TensorDictBase) -> torch.Tensor:
    ids = changed_heads_rows[0][keys.TOKENS]
    log_probs = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
    return log_probs.gather(-1, ids[1:, None])[:, 0][changed_heads_rows[0][keys.ACTION_MASK][1:]]


@pytest.mark.parametrize("packing", ["none", "packed"])
@pytest.mark.parametrize("change", CHANGES)
def test_scores_are_of_the_present_head(tokenizer, changed_heads_rows, change: str, packing: str) -> None:
    model = build_model(tokenizer, seed=0).eval()
    scorer = TransformersWrapper(model, tokenizer=tokenizer, generate=False, packing=packing)
    before = scorer.score(changed_heads_rows).log_probs[0]
    CHANGES[change](model)
    after = scorer.score(changed_heads_rows).log_probs[0]
    assert (after - before).abs().max() > 0.1
    torch.testing.assert_close(after, full_logits(model, changed_heads_rows), rtol=0, atol=1e-5)


@pytest.mark.parametrize("change", CHANGES)
def test_samples_are_of_the_present_head(tokenizer, prompt_rows, change: str) -> None:
    model = build_model(tokenizer, seed=0).eval()
    policy = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 6, "seed": 0})
    engine = TransformersEngine(model)
    CHANGES[change](model)
    sampled = policy(prompt_rows([5, 6, 7]))
    torch.testing.assert_close(
        sampled[0][keys.LOG_PROBS][sampled[0][keys.ACTION_MASK]], full_logits(model, sampled), rtol=0, atol=1e-5
    )
    sample = engine.generate([Request(prompt=[5, 6, 7], limit=6, seed=0)])[0]
    ids = torch.tensor([5, 6, 7, *sample.tokens])
    row = stack_rows([TensorDict({keys.TOKENS: ids, keys.ACTION_MASK: torch.arange(len(ids)) > 2}, [])])
    torch.testing.assert_close(torch.tensor(sample.log_probs), full_logits(model, row), rtol=0, atol=1e-5)


def test_packing_is_refused_once_the_head_is_no_longer_found(tokenizer, changed_heads_rows) -> None:
    model = build_model(tokenizer, seed=0).eval()
    scorer = TransformersWrapper(model, tokenizer=tokenizer, generate=False, packing="packed")
    get_peft_model(model, LoraConfig(r=4, target_modules=["lm_head"], use_dora=True))
    with pytest.raises(NotImplementedError, match="packing='packed' requires a model whose output head"):
        scorer.score(changed_heads_rows)
