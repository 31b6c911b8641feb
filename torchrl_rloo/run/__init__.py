"""Run management for a training loop: checkpoints, stop signals, logs and timing."""

from torchrl_rloo.run.checkpoint import Checkpointer
from torchrl_rloo.run.health_log import RollbackError, UnhealthyRunError, repeat_after_rollback
from torchrl_rloo.run.interrupt import StopSignal
from torchrl_rloo.run.lock import DirectoryInUseError, DirectoryLock
from torchrl_rloo.run.logging import RunLogger
from torchrl_rloo.run.meters import meters, timings
from torchrl_rloo.run.parts import gather_state, restore_state
from torchrl_rloo.run.run import Run
from torchrl_rloo.run.settings import check_resumable
from torchrl_rloo.run.state import rng_state, set_rng_state
from torchrl_rloo.run.timing import StepTimer, StepTimes, cpu_seconds

__all__ = [
    "Checkpointer",
    "DirectoryInUseError",
    "DirectoryLock",
    "RollbackError",
    "Run",
    "RunLogger",
    "StepTimer",
    "StepTimes",
    "StopSignal",
    "UnhealthyRunError",
    "check_resumable",
    "cpu_seconds",
    "gather_state",
    "meters",
    "repeat_after_rollback",
    "restore_state",
    "rng_state",
    "set_rng_state",
    "timings",
]
