"""What a training loop needs around it: checkpoints, a clean stop, and a record of what happened."""

from torchrl_rloo.run import run_state
from torchrl_rloo.run.checkpoint import Checkpointer, gather_state, restore_state, rng_state, set_rng_state
from torchrl_rloo.run.interrupt import StopSignal
from torchrl_rloo.run.logging import RunLogger
from torchrl_rloo.run.schedule import linear_schedule
from torchrl_rloo.run.timing import StepTimer, cpu_seconds

__all__ = [
    "Checkpointer",
    "RunLogger",
    "StepTimer",
    "StopSignal",
    "cpu_seconds",
    "gather_state",
    "linear_schedule",
    "restore_state",
    "rng_state",
    "run_state",
    "set_rng_state",
]
