"""Engines that sample for policies: vLLM in this process, in a child or behind HTTP, a Hugging Face model, a script."""

from torchrl_rloo.engines.base import (
    AsyncEngine,
    Engine,
    EngineDeadError,
    EngineError,
    EngineTimeoutError,
    Request,
    Sample,
    sleeping,
)
from torchrl_rloo.engines.generation import Generated, GenerationConfig, end_of_sequence_ids, generate
from torchrl_rloo.engines.head import Head, find_head, score_positions
from torchrl_rloo.engines.scripted import ScriptedEngine, ScriptedTurn
from torchrl_rloo.engines.transformers_engine import TransformersEngine
from torchrl_rloo.engines.vllm_async import AsyncVLLMEngine
from torchrl_rloo.engines.vllm_inprocess import VLLMEngine
from torchrl_rloo.engines.vllm_server import VLLMServer, server_command, server_environment

__all__ = [
    "Generated",
    "GenerationConfig",
    "end_of_sequence_ids",
    "generate",
    "Head",
    "find_head",
    "score_positions",
    "AsyncEngine",
    "AsyncVLLMEngine",
    "Engine",
    "EngineDeadError",
    "EngineError",
    "EngineTimeoutError",
    "Request",
    "Sample",
    "ScriptedEngine",
    "ScriptedTurn",
    "TransformersEngine",
    "VLLMEngine",
    "VLLMServer",
    "server_command",
    "server_environment",
    "sleeping",
]
