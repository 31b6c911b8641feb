"""Engines that sample for policies: vLLM, a Hugging Face model, a script, and a pool of several."""

from torchrl_rloo.engines.base import (
    AsyncEngine,
    Engine,
    EngineDeadError,
    EngineError,
    EngineLoad,
    EngineTimeoutError,
    Request,
    Sample,
    Sampler,
    sleeping,
)
from torchrl_rloo.engines.generation import Generated, GenerationConfig, end_of_sequence_ids, generate
from torchrl_rloo.engines.head import Head, find_head, score_positions
from torchrl_rloo.engines.member import Member
from torchrl_rloo.engines.pool import EnginePool
from torchrl_rloo.engines.pool_members import PoolEvent
from torchrl_rloo.engines.routers import LeastLoaded, NearestFirst, Router, Sticky
from torchrl_rloo.engines.scripted import ScriptedEngine, ScriptedTurn
from torchrl_rloo.engines.supervisor import Supervisor
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
    "EngineLoad",
    "EnginePool",
    "EngineTimeoutError",
    "LeastLoaded",
    "Member",
    "NearestFirst",
    "PoolEvent",
    "Request",
    "Router",
    "Sample",
    "Sampler",
    "ScriptedEngine",
    "ScriptedTurn",
    "Sticky",
    "Supervisor",
    "TransformersEngine",
    "VLLMEngine",
    "VLLMServer",
    "server_command",
    "server_environment",
    "sleeping",
]
