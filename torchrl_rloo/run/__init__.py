"""Run management for a training loop: checkpoints, stop signals, logs and timing."""

from torchrl_rloo.run.checkpoint import Checkpointer
from torchrl_rloo.run.health_log import repeat_after_rollback
from torchrl_rloo.run.lock import DirectoryInUseError
from torchrl_rloo.run.logging import RunLogger
from torchrl_rloo.run.meters import cpu_seconds, meters, timings
from torchrl_rloo.run.run import Run
from torchrl_rloo.run.settings import check_resumable

__all__ = [
    "Checkpointer",
    "DirectoryInUseError",
    "Run",
    "RunLogger",
    "check_resumable",
    "cpu_seconds",
    "meters",
    "repeat_after_rollback",
    "timings",
]
