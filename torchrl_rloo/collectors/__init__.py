"""Collectors, which drive an environment with a policy."""

from torchrl_rloo.collectors.async_llm import AsyncLLMCollector
from torchrl_rloo.collectors.llm import CollectionProgress, LLMCollector
from torchrl_rloo.collectors.refill import RefilledBatch, RefillingCollector
from torchrl_rloo.collectors.source import GroupSource, StepRows

__all__ = [
    "AsyncLLMCollector",
    "CollectionProgress",
    "GroupSource",
    "LLMCollector",
    "RefilledBatch",
    "RefillingCollector",
    "StepRows",
]
