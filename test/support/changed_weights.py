"""Fixtures that change a model's weights and compare an engine with the training model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from torchrl_rloo.engines.base import Engine, Request
from torchrl_rloo.functional.sampling import SamplingDistribution

PROMPT = tuple(range(5, 85))  # two and a half blocks of vLLM's prefix cache


@pytest.fixture(scope="session")
def change() -> Callable[[nn.Module, int], None]:
    """Change a model's weights enough to change its samples: ``change(model, seed)``."""

    def change(model: nn.Module, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                if parameter.dim() == 1:  # norms and biases
                    parameter.add_(0.02 * noise)
                else:  # keep the mean size over repeated changes
                    parameter.mul_(0.95).add_(0.31 * parameter.float().std() * noise)

    return change


@pytest.fixture(scope="session")
def log_prob_error() -> Callable[..., float]:
    """Return the largest difference of log-probs (nats) of sampled tokens: ``log_prob_error(engine, model)``."""

    def error(engine: Engine, model: nn.Module, prompt: tuple[int, ...] = PROMPT) -> float:
        requests = [Request(prompt=prompt, limit=12, seed=seed) for seed in range(2)]
        largest = 0.0
        for sample in engine.generate(requests):
            assert len(sample.tokens) == 12 and set(sample.versions) == {engine.version}
            scores = _log_probs(model, [*prompt, *sample.tokens]).gather(-1, torch.tensor(sample.tokens)[:, None])
            largest = max(largest, (scores[:, 0] - torch.tensor(sample.log_probs)).abs().max().item())
        return largest

    return error


@pytest.fixture(scope="session")
def assert_greedy_tokens_equal() -> Callable[..., None]:
    """Check that the engine's greedy tokens are the model's: ``assert_greedy_tokens_equal(engine, model)``."""

    def check(engine: Engine, model: nn.Module) -> None:
        greedy = Request(prompt=PROMPT, limit=12, seed=0, distribution=SamplingDistribution(temperature=0))
        (sample,) = engine.generate([greedy])
        assert sample.tokens == _log_probs(model, [*PROMPT, *sample.tokens]).argmax(-1).tolist()

    return check


def _log_probs(model: nn.Module, ids: list[int]) -> torch.Tensor:
    """Return the log-probs at the last 12 ids, ``[12, V]``."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0, -13:-1].float().log_softmax(-1)
