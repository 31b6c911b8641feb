"""A tiny checkpoint for engines, and the models that they are compared with."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from torchrl_rloo.embedded import build_model
from torchrl_rloo.functional.sampling import SamplingDistribution, process_logits
from torchrl_rloo.modules.engines.base import Request, Sample

CONTEXT = 16_384


@pytest.fixture(scope="session")
def vllm() -> None:
    """Skips where vLLM is not installed. Not imported here: an engine imports it with the settings that it wants."""
    if find_spec("vllm") is None:
        pytest.skip("vllm is not installed")


@pytest.fixture(scope="session")
def wait_until() -> Callable[..., None]:
    """``wait_until(condition)``: until it holds; far longer than any machine takes, as time is not what is tested."""

    def wait(condition: Callable[[], Any], seconds: float = 60.0) -> None:
        until = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < until, f"it did not happen in {seconds} s"
            time.sleep(0.005)

    return wait


@pytest.fixture(scope="session")
def models(tokenizer: PreTrainedTokenizerFast) -> list[PreTrainedModel]:
    """Three models of one kind; the checkpoint is of the first. Not to be changed."""
    made = [build_model(tokenizer, seed).eval() for seed in range(3)]
    for model in made:
        model.config.max_position_embeddings = CONTEXT
    return made


@pytest.fixture(scope="session")
def checkpoint(
    models: list[PreTrainedModel], tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    models[0].save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def make_adapted(models: list[PreTrainedModel]) -> Callable[[int], PreTrainedModel]:
    """``make_adapted(seed)``: the first model with a random LoRA adapter."""

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
    """``deviation(model, requests, samples)``: largest difference of the samples' log-probs from the model's own.

    ``part`` is the tokens to look at, of all by default.
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
