"""Run management for a training loop: checkpoints, stop signals, logs and timing."""

from torchrl_rloo.run.checkpoint import Checkpointer, gather_state, restore_state, rng_state, set_rng_state
from torchrl_rloo.run.interrupt import StopSignal
from torchrl_rloo.run.lock import DirectoryInUseError, DirectoryLock
from torchrl_rloo.run.logging import RunLogger
from torchrl_rloo.run.run import Run, meters
from torchrl_rloo.run.settings import check_resumable
from torchrl_rloo.run.timing import StepTimer, cpu_seconds

__all__ = [
    "Checkpointer",
    "DirectoryInUseError",
    "DirectoryLock",
    "Run",
    "RunLogger",
    "StepTimer",
    "StopSignal",
    "check_resumable",
    "cpu_seconds",
    "gather_state",
    "meters",
    "restore_state",
    "rng_state",
    "set_rng_state",
]
