"""When to generate: collectors drive an environment with a policy."""

from torchrl_rloo.collectors.llm import CollectionProgress, LLMCollector

__all__ = ["CollectionProgress", "LLMCollector"]
