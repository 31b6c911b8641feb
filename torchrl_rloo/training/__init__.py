"""Optimizer steps: accumulate gradients over micro-batches, clip, step, schedule; over one rank or several."""

from torchrl_rloo.training.optimizers import make_optimizer
from torchrl_rloo.training.schedules import catch_up, make_schedule
from torchrl_rloo.training.shard import check_copies, offload_activations, shard_model
from torchrl_rloo.training.step import accumulate, minibatches, optimizer_step

__all__ = [
    "accumulate",
    "catch_up",
    "check_copies",
    "make_optimizer",
    "make_schedule",
    "minibatches",
    "offload_activations",
    "optimizer_step",
    "shard_model",
]
