"""What a training loop needs around it: checkpoints, a clean stop, and a record of what happened."""

from torchrl_rloo.run.checkpoint import Checkpointer, gather_state, restore_state, rng_state, set_rng_state
from torchrl_rloo.run.interrupt import StopSignal
from torchrl_rloo.run.logging import RunLogger

__all__ = [
    "Checkpointer",
    "RunLogger",
    "StopSignal",
    "gather_state",
    "restore_state",
    "rng_state",
    "set_rng_state",
]
