"""How new weights reach a sampler: one transport per file."""

from torchrl_rloo.weight_update.base import WeightSyncError, WeightUpdater
from torchrl_rloo.weight_update.collective import Collective
from torchrl_rloo.weight_update.direct import Direct
from torchrl_rloo.weight_update.files import Files
from torchrl_rloo.weight_update.in_process import InProcessWeightUpdater
from torchrl_rloo.weight_update.lora import LoRAUpdater
from torchrl_rloo.weight_update.self_test import self_test
from torchrl_rloo.weight_update.sequential import SequentialWeightUpdater
from torchrl_rloo.weight_update.shared_memory import SharedMemory
from torchrl_rloo.weight_update.source import WeightSource
from torchrl_rloo.weight_update.transports import Transport
from torchrl_rloo.weight_update.vllm import Push, vLLMUpdater

__all__ = [
    "Collective",
    "Direct",
    "Files",
    "InProcessWeightUpdater",
    "LoRAUpdater",
    "Push",
    "SequentialWeightUpdater",
    "SharedMemory",
    "Transport",
    "WeightSource",
    "WeightSyncError",
    "WeightUpdater",
    "self_test",
    "vLLMUpdater",
]
