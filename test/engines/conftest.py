"""Fixtures that compare engines' samples with models, and LoRA adapters."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from support import waiting
from torchrl_rloo.engines.base import Request, Sample
from torchrl_rloo.functional.sampling import SamplingDistribution, process_logits


@pytest.fixture(scope="session")
def wait_until() -> Callable[..., None]:
    """:func:`support.waiting.wait_until`."""
    return waiting.wait_until


@pytest.fixture(scope="session")
def make_adapted(models: list[PreTrainedModel]) -> Callable[[int], PreTrainedModel]:
    """``make_adapted(seed)`` returns the first model with a random LoRA adapter."""

    def make(seed: int) -> PreTrainedModel:
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"])
        adapted = peft.get_peft_model(copy.deepcopy(models[0]), config)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if ".lora_" in name:
                    parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
        return adapted.eval()

    return make


@pytest.fixture(scope="session")
def deviation() -> Callable[..., float]:
    """``deviation(model, requests, samples)`` returns the largest difference of log-probs from the model's.

    ``part`` is a slice of the tokens to compare; all by default.
    """

    def worst(
        model: PreTrainedModel, requests: list[Request], samples: list[Sample], part: slice = slice(None)
    ) -> float:
        found = 0.0
        for request, sample in zip(requests, samples, strict=True):
            own = _log_probs(model, list(request.prompt), sample.tokens, request.distribution)
            found = max(found, (own - torch.tensor(sample.log_probs))[part].abs().max().item())
        return found

    return worst


@torch.no_grad()
def _log_probs(
    model: PreTrainedModel, prompt: list[int], tokens: list[int], distribution: SamplingDistribution
) -> torch.Tensor:
    ids = torch.tensor(prompt + tokens)
    logits = model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1].float()
    seen = torch.zeros_like(logits, dtype=torch.bool)
    for i in range(len(tokens)):
        seen[i, ids[: len(prompt) + i]] = True
    sampled = torch.tensor(tokens)
    return process_logits(logits, distribution, seen).log_softmax(-1).gather(-1, sampled[:, None])[:, 0]
