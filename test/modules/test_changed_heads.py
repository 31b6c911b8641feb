"""A wrapper uses the current head of its model, also after the head changed."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tensordict import TensorDict, TensorDictBase
from torch import nn

from torchrl_rloo.data import keys, stack_rows
from torchrl_rloo.embedded import build_model
from torchrl_rloo.engines import Request, TransformersEngine
from torchrl_rloo.modules import TransformersWrapper


@pytest.fixture(scope="module")
def rows() -> TensorDictBase:
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


def full_logits(model: nn.Module, rows: TensorDictBase) -> torch.Tensor:
    ids = rows[0][keys.TOKENS]
    log_probs = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
    return log_probs.gather(-1, ids[1:, None])[:, 0][rows[0][keys.ACTION_MASK][1:]]


@pytest.mark.parametrize("packing", ["none", "packed"])
@pytest.mark.parametrize("change", CHANGES)
def test_scores_are_of_the_present_head(tokenizer, rows, change: str, packing: str) -> None:
    model = build_model(tokenizer, seed=0).eval()
    scorer = TransformersWrapper(model, tokenizer=tokenizer, generate=False, packing=packing)
    before = scorer.score(rows).log_probs[0]
    CHANGES[change](model)
    after = scorer.score(rows).log_probs[0]
    assert (after - before).abs().max() > 0.1
    torch.testing.assert_close(after, full_logits(model, rows), rtol=0, atol=1e-5)


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


def test_packing_is_refused_once_the_head_is_no_longer_found(tokenizer, rows) -> None:
    model = build_model(tokenizer, seed=0).eval()
    scorer = TransformersWrapper(model, tokenizer=tokenizer, generate=False, packing="packed")
    get_peft_model(model, LoraConfig(r=4, target_modules=["lm_head"], use_dora=True))
    with pytest.raises(NotImplementedError, match="packing='packed' requires a model whose output head"):
        scorer.score(rows)
