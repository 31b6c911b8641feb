"""What samples for a policy: vLLM here, in another process or behind HTTP, a Hugging Face model, or a script."""

from torchrl_rloo.modules.engines.base import (
    AsyncEngine,
    Engine,
    EngineDeadError,
    EngineError,
    EngineTimeoutError,
    Request,
    Sample,
    asleep,
)
from torchrl_rloo.modules.engines.scripted import ScriptedEngine, ScriptedTurn
from torchrl_rloo.modules.engines.transformers_engine import TransformersEngine
from torchrl_rloo.modules.engines.vllm_async import AsyncVLLMEngine
from torchrl_rloo.modules.engines.vllm_inprocess import VLLMEngine
from torchrl_rloo.modules.engines.vllm_server import VLLMServer, server_command, server_environment

__all__ = [
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
    "asleep",
    "server_command",
    "server_environment",
]
