"""When to generate: collectors drive an environment with a policy."""

from torchrl_rloo.collectors.llm import CollectionProgress, LLMCollector
from torchrl_rloo.collectors.refill import Refill, RefillingCollector

__all__ = [
    "CollectionProgress",
    "LLMCollector",
    "Refill",
    "RefillingCollector",
]
