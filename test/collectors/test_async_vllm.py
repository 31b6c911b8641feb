"""Tests of LLMCollector over real vLLM in a child process, updated while it samples."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Iterator
from itertools import groupby

import pytest
import torch
from tensordict import TensorDictBase
from transformers import PreTrainedModel

from support.engines import GROUP
from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import keys
from torchrl_rloo.engines.vllm_async import AsyncVLLMEngine
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.envs.transforms import FeedbackTransform
from torchrl_rloo.modules import TransformersWrapper, vLLMWrapper
from torchrl_rloo.weight_update import WeightPublisher

pytestmark = pytest.mark.xdist_group(GROUP)

LIMIT = 48
EXACT = 1e-4  # float32


@pytest.fixture
def engine(async_engine: AsyncVLLMEngine) -> AsyncVLLMEngine:
    return async_engine


@pytest.fixture
def make(engine: AsyncVLLMEngine, tokenizer, prompts) -> Iterator[Callable[..., LLMCollector]]:
    made: list[LLMCollector] = []

    def build(updater: WeightPublisher, held: set[int] = frozenset(), **kwargs) -> LLMCollector:
        """Build a collector whose environment does not reply to groups in ``held``."""

        async def respond(conversation, row):
            while int(row[keys.GROUP_ID]) in held:
                await asyncio.sleep(0.01)
            return [{"role": "user", "content": "and?"}] if len(conversation) < 2 * row["turns"] else None

        env = DatasetChatEnv(
            prompts,
            tokenizer,
            prompts_per_batch=4,
            num_generations=2,
            rewards=lambda completions, **_: [float(len(c)) for c in completions],
            transforms=[FeedbackTransform(respond)],
        )
        settings = {"max_new_tokens": LIMIT, "ignore_eos": True, "stop_token_ids": list(range(40, 56))}
        policy = vLLMWrapper(engine, tokenizer=tokenizer, generate_kwargs=settings)
        made.append(LLMCollector(env, policy, weight_updater=updater, **kwargs))
        return made[-1]

    yield build
    for collector in made:
        collector.shutdown()


def assert_on_policy(rows: TensorDictBase, weights: dict[int, PreTrainedModel], tokenizer) -> None:
    """Assert that the weights of each token's version sampled it."""
    for row in rows.unbind(0):
        behaviour, versions = row[keys.LOG_PROBS][row[keys.ACTION_MASK]], row[keys.ACTION_VERSIONS]
        assert int(row[keys.POLICY_VERSION]) == int(versions.min())
        for version in set(versions.tolist()):
            kwargs = {"stop_token_ids": list(range(40, 56)), "ignore_eos": True}
            scorer = TransformersWrapper(weights[version], tokenizer=tokenizer, generate=False, generate_kwargs=kwargs)
            with torch.no_grad():
                scored = scorer.score(row.unsqueeze(0)).log_probs[0]
            own = versions == version
            torch.testing.assert_close(scored[own], behaviour[own], rtol=0, atol=EXACT)


@pytest.mark.parametrize("in_flight", ["finish", "abort"])
def test_weights_change_under_conversations(
    in_flight: str, make: Callable, engine: AsyncVLLMEngine, model: PreTrainedModel, tokenizer
) -> None:
    """Turns in flight continue with the new weights, and each token has the version that sampled it."""
    trained = copy.deepcopy(model)
    updater = WeightPublisher(trained, engine, in_flight=in_flight)
    updater.initialize()
    held = set(range(4, 12))
    collector, weights = make(updater, held, ahead=8), {0: copy.deepcopy(trained)}
    seen: list[TensorDictBase] = []
    for version in range(1, 4):
        seen.append(collector.collect())
        with torch.no_grad():
            for p in trained.parameters():
                p.mul_(1.02)
        weights[version] = copy.deepcopy(trained)
        collector.update_policy_weights_()
        held.clear()
    seen.append(collector.collect())
    for rows in seen:
        assert_on_policy(rows, weights, tokenizer)
    runs = [[v for v, _ in groupby(row[keys.ACTION_VERSIONS].tolist())] for rows in seen for row in rows.unbind(0)]
    assert all(run == sorted(run) for run in runs) and any(len(run) > 1 for run in runs)
    groups = [int(row[keys.GROUP_ID]) for rows in seen for row in rows.unbind(0)]
    assert len(set(groups)) * 2 == len(groups) == 32
