"""Optimizer steps: accumulate gradients over micro-batches, clip, step, schedule; over one rank or several."""

from torchrl_rloo.training.accumulate import accumulate, minibatches
from torchrl_rloo.training.adamw_8bit import AdamW8bit
from torchrl_rloo.training.copies import check_copies
from torchrl_rloo.training.offload import offload_activations
from torchrl_rloo.training.optimizer import NonFiniteGradientError, optimizer_step
from torchrl_rloo.training.optimizers import check_optimizer, make_optimizer
from torchrl_rloo.training.schedules import catch_up, linear_schedule, make_schedule
from torchrl_rloo.training.shard import shard_model

__all__ = [
    "AdamW8bit",
    "NonFiniteGradientError",
    "accumulate",
    "catch_up",
    "check_copies",
    "check_optimizer",
    "linear_schedule",
    "make_optimizer",
    "make_schedule",
    "minibatches",
    "offload_activations",
    "optimizer_step",
    "shard_model",
]
