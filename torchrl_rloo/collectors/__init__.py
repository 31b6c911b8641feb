"""Collectors, which drive an environment with a policy."""

from torchrl_rloo.collectors.concurrency import AdaptiveConcurrency
from torchrl_rloo.collectors.llm import CollectionProgress, LLMCollector
from torchrl_rloo.collectors.refill import RefilledBatch, RefillingCollector
from torchrl_rloo.collectors.source import GroupSource, StepRows

__all__ = [
    "AdaptiveConcurrency",
    "CollectionProgress",
    "GroupSource",
    "LLMCollector",
    "RefilledBatch",
    "RefillingCollector",
    "StepRows",
]
