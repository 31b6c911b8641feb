"""Weight updates of samplers: updaters, and transports with both of their ends."""

from torchrl_rloo.weight_update.files import Files
from torchrl_rloo.weight_update.in_process import InProcessWeightUpdater, SequentialWeightUpdater
from torchrl_rloo.weight_update.lora import LoRAPublisher
from torchrl_rloo.weight_update.protocol import WeightTarget
from torchrl_rloo.weight_update.publisher import WeightSyncError, WeightUpdater
from torchrl_rloo.weight_update.shared_memory import SharedMemory
from torchrl_rloo.weight_update.source import WeightSource
from torchrl_rloo.weight_update.transport import Direct, Receiver, Storage, Transport
from torchrl_rloo.weight_update.vllm_gpu import VLLMIPC, VLLMNCCL
from torchrl_rloo.weight_update.weight_publisher import WeightPublisher

__all__ = [
    "Direct",
    "Files",
    "InProcessWeightUpdater",
    "LoRAPublisher",
    "Receiver",
    "SequentialWeightUpdater",
    "SharedMemory",
    "Storage",
    "Transport",
    "VLLMIPC",
    "VLLMNCCL",
    "WeightPublisher",
    "WeightSource",
    "WeightSyncError",
    "WeightTarget",
    "WeightUpdater",
]
