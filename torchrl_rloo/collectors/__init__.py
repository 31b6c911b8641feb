"""Collectors, which drive an environment with a policy."""

from torchrl_rloo.collectors.base import CollectionProgress
from torchrl_rloo.collectors.concurrency import AdaptiveConcurrency
from torchrl_rloo.collectors.ledger import Audit, Group, GroupLedger, GroupState, Lease, check_audit
from torchrl_rloo.collectors.llm import LLMCollector
from torchrl_rloo.collectors.refill import RefilledBatch, RefillingCollector
from torchrl_rloo.collectors.source import GroupSource, StepRows
from torchrl_rloo.collectors.staleness import token_staleness

__all__ = [
    "AdaptiveConcurrency",
    "Audit",
    "CollectionProgress",
    "Group",
    "GroupLedger",
    "GroupSource",
    "GroupState",
    "LLMCollector",
    "Lease",
    "RefilledBatch",
    "RefillingCollector",
    "StepRows",
    "check_audit",
    "token_staleness",
]
