"""Optimizer steps: accumulate gradients over micro-batches, clip, step, schedule."""

from torchrl_rloo.training.accumulate import accumulate, minibatches
from torchrl_rloo.training.optimizer import catch_up, linear_schedule, optimizer_step

__all__ = ["accumulate", "catch_up", "linear_schedule", "minibatches", "optimizer_step"]
