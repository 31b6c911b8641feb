"""Engines that sample for policies: vLLM, a Hugging Face model, a script, and a pool of several."""

from torchrl_rloo.engines.base import (
    AsyncEngine,
    Engine,
    EngineDeadError,
    EngineError,
    EngineTimeoutError,
    Request,
    Sample,
    Sampler,
    sleeping,
)
from torchrl_rloo.engines.head import find_head, score_positions
from torchrl_rloo.engines.pool import EnginePool
from torchrl_rloo.engines.routers import LeastLoaded, NearestFirst, Sticky
from torchrl_rloo.engines.scripted import ScriptedEngine, ScriptedTurn
from torchrl_rloo.engines.sglang_server import SGLangServer
from torchrl_rloo.engines.supervisor import Supervisor
from torchrl_rloo.engines.transformers_engine import TransformersEngine
from torchrl_rloo.engines.vllm_async import AsyncVLLMEngine
from torchrl_rloo.engines.vllm_inprocess import VLLMEngine
from torchrl_rloo.engines.vllm_server import VLLMServer

__all__ = [
    "AsyncEngine",
    "AsyncVLLMEngine",
    "Engine",
    "EngineDeadError",
    "EngineError",
    "EnginePool",
    "EngineTimeoutError",
    "LeastLoaded",
    "NearestFirst",
    "Request",
    "SGLangServer",
    "Sample",
    "Sampler",
    "ScriptedEngine",
    "ScriptedTurn",
    "Sticky",
    "Supervisor",
    "TransformersEngine",
    "VLLMEngine",
    "VLLMServer",
    "find_head",
    "score_positions",
    "sleeping",
]
