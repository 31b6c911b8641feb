"""Weight updates of samplers: updaters, and transports with both of their ends."""

from torchrl_rloo.weight_update.base import (
    InProcessWeightUpdater,
    SequentialWeightUpdater,
    WeightSyncError,
    WeightUpdater,
)
from torchrl_rloo.weight_update.collective import Collective
from torchrl_rloo.weight_update.files import Files
from torchrl_rloo.weight_update.lora import LoRAPublisher
from torchrl_rloo.weight_update.publisher import Publisher
from torchrl_rloo.weight_update.shared_memory import SharedMemory
from torchrl_rloo.weight_update.source import WeightSource
from torchrl_rloo.weight_update.target import TargetGroup, WeightTarget
from torchrl_rloo.weight_update.transport import Direct, Link, Receiver, Storage, Transport
from torchrl_rloo.weight_update.vllm_ipc import VLLMIPC
from torchrl_rloo.weight_update.vllm_nccl import VLLMNCCL
from torchrl_rloo.weight_update.weight_publisher import Push, WeightPublisher

__all__ = [
    "Collective",
    "Direct",
    "Files",
    "InProcessWeightUpdater",
    "Link",
    "LoRAPublisher",
    "Publisher",
    "Push",
    "Receiver",
    "SequentialWeightUpdater",
    "SharedMemory",
    "Storage",
    "TargetGroup",
    "Transport",
    "VLLMIPC",
    "VLLMNCCL",
    "WeightPublisher",
    "WeightSource",
    "WeightSyncError",
    "WeightTarget",
    "WeightUpdater",
]
