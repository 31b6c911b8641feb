"""Real vLLM engines that test files share, and the models to compare them with.

A vLLM engine takes ten or more CPU seconds to start, so a session has one of each kind. Tests that use one run on one
xdist worker, and start with the weights of the first model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from support.checkpoints import save_checkpoint
from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import stack_rows
from torchrl_rloo.embedded import build_model
from torchrl_rloo.engines import AsyncVLLMEngine, EngineError, TransformersEngine, VLLMEngine
from torchrl_rloo.engines.vllm_base import VLLMEngineBase
from torchrl_rloo.modules import vLLMWrapper
from torchrl_rloo.weight_update import WeightPublisher

CONTEXT = 16_384
SETTINGS = {"dtype": "float32", "enable_lora": True, "max_lora_rank": 8, "max_loras": 1}
GROUP = "vllm"  # of xdist: the tests that share engines
SHARED = ("shared_async_engine", "vllm_engines")


@pytest.fixture(scope="session")
def vllm() -> None:
    """Skip if vLLM is not installed. The engines import it, with their settings."""
    if find_spec("vllm") is None:
        pytest.skip("vllm is not installed")


@pytest.fixture(scope="session")
def models(tokenizer: PreTrainedTokenizerFast) -> list[PreTrainedModel]:
    """Three models of one architecture; the engines' checkpoint has the first. Do not change them."""
    made = [build_model(tokenizer, seed).eval() for seed in range(3)]
    for model in made:
        model.config.max_position_embeddings = CONTEXT
    return made


@pytest.fixture(scope="session")
def engine_checkpoint(
    models: list[PreTrainedModel], tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Folder of the first of ``models``. Do not change it."""
    return save_checkpoint(tmp_path_factory.mktemp("engine_checkpoint"), models[0], tokenizer)


@pytest.fixture(scope="session")
def shared_async_engine(vllm, engine_checkpoint: Path) -> Iterator[AsyncVLLMEngine]:
    """vLLM in a child process; use ``async_engine``."""
    with AsyncVLLMEngine(engine_checkpoint, request_timeout=300.0, max_model_len=CONTEXT, **SETTINGS) as engine:
        yield engine


@pytest.fixture
def async_engine(shared_async_engine: AsyncVLLMEngine, models: list[PreTrainedModel]) -> AsyncVLLMEngine:
    """vLLM in a child process, with the weights of the first model."""
    return _reset(shared_async_engine, models[0])


class VLLMEngines:
    """Engines in this process, of which only one can exist: a request for other settings closes the current one."""

    _engine: VLLMEngine | None = None  # class attribute: the engine in this process
    _key: tuple | None = None

    def __init__(self, checkpoint: Path):
        self._checkpoint = checkpoint

    def get(self, model: Path | None = None, **arguments: Any) -> VLLMEngine:
        """Return an engine of a checkpoint, by default the shared one; start it unless it is the current one."""
        key = (model or self._checkpoint, tuple(sorted(arguments.items())))
        if self._engine is None or self._engine.closed or key != self._key:
            self.close()
            VLLMEngines._engine = VLLMEngine(key[0], **{"max_model_len": 256} | SETTINGS | arguments)
            VLLMEngines._key = key
        return self._engine

    @classmethod
    def close(cls) -> None:
        """Close the current engine."""
        if cls._engine is not None:
            cls._engine.close()
            cls._engine = None


@pytest.fixture(scope="session")
def vllm_engines(vllm, engine_checkpoint: Path) -> Iterator[VLLMEngines]:
    """``vllm_engines.get(checkpoint, **arguments)``: vLLM in this process."""
    engines = VLLMEngines(engine_checkpoint)
    yield engines
    engines.close()


@pytest.fixture
def vllm_engine(vllm_engines: VLLMEngines, models: list[PreTrainedModel]) -> VLLMEngine:
    """vLLM in this process, with the weights of the first model."""
    return _reset(vllm_engines.get(), models[0])


@pytest.fixture
def make_vllm_engine(
    vllm_engines: VLLMEngines, tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., VLLMEngine]:
    """``make_vllm_engine(model, **arguments)``: a new engine in this process, without LoRA; the others are closed."""

    def make(model: PreTrainedModel, **arguments: Any) -> VLLMEngine:
        folder = save_checkpoint(tmp_path_factory.mktemp("model"), model, tokenizer)
        return vllm_engines.get(folder, **{"enable_lora": False} | arguments)

    return make


def _reset(engine: VLLMEngineBase, model: PreTrainedModel) -> VLLMEngineBase:
    """Undo weight updates of an earlier test."""
    if engine.version or engine._adapter or engine.failed_version is not None:
        WeightPublisher(model, engine).initialize()  # under version 0
    return engine


def check_scores(engine: VLLMEngineBase, model: PreTrainedModel) -> None:
    """Check that an engine scores rows as the model does."""
    rows = [[5], [7, 8, 9], [40 + i % 200 for i in range(70)]]
    with TransformersEngine(model) as own:
        for found, expected in zip(engine.score(rows), own.score(rows), strict=True):
            assert found == pytest.approx(expected, abs=1e-5)
    with pytest.raises(EngineError, match="temperature=0.5 must be 1"):
        engine.score(rows, temperature=0.5)
    with pytest.raises(EngineError, match="empty|at least"):
        engine.score([[]])


def check_turn_settings(
    engine: VLLMEngineBase, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, settings: dict[str, Any]
) -> None:
    """Check that the ratio is 1 for settings that depend on a turn's tokens, and that the settings have an effect."""
    policy = vLLMWrapper(engine, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 20, "seed": 0} | settings)
    prompts = [torch.tensor([40 + i % 200 for i in range(n)]) for n in (1, 3, 70, 71)]
    rows = policy(stack_rows([TensorDict({keys.PROMPT_TOKENS: prompt}) for prompt in prompts * 2]))
    sampled = torch.cat([row[keys.LOG_PROBS][row[keys.ACTION_MASK]] for row in rows.unbind(0)])
    plain = {"generate_kwargs": {}}
    for changes, equal in (({}, True), (plain, False)):
        scored = policy.get_new_version(generate=False, model=model, **changes).score(rows)
        gap = (scored.log_probs[scored.actions.mask] - sampled).abs().max().item()
        assert (gap < 1e-5) == equal, f"log-probs differ by {gap}"
