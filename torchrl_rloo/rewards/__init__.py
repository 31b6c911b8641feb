"""Reward functions: plain functions from completions to floats."""

from torchrl_rloo.rewards.boxed import boxed_accuracy, last_boxed

__all__ = ["boxed_accuracy", "last_boxed"]
