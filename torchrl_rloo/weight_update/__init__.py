"""Weight updates of samplers: updaters, and transports with both of their ends."""

from torchrl_rloo.weight_update.base import (
    InProcessWeightUpdater,
    SequentialWeightUpdater,
    WeightSyncError,
    WeightUpdater,
)
from torchrl_rloo.weight_update.collective import Collective
from torchrl_rloo.weight_update.engine_updater import EngineUpdater, Push
from torchrl_rloo.weight_update.files import Files
from torchrl_rloo.weight_update.lora import LoRAUpdater
from torchrl_rloo.weight_update.shared_memory import SharedMemory
from torchrl_rloo.weight_update.source import WeightSource
from torchrl_rloo.weight_update.target import Lifecycle, TargetGroup, WeightTarget
from torchrl_rloo.weight_update.transport import Direct, Receiver, Transport

__all__ = [
    "Collective",
    "Direct",
    "EngineUpdater",
    "Files",
    "InProcessWeightUpdater",
    "Lifecycle",
    "LoRAUpdater",
    "Push",
    "Receiver",
    "SequentialWeightUpdater",
    "SharedMemory",
    "TargetGroup",
    "Transport",
    "WeightSource",
    "WeightSyncError",
    "WeightTarget",
    "WeightUpdater",
]
