"""Collectors, which drive an environment with a policy."""

from torchrl_rloo.collectors.concurrency import AdaptiveConcurrency
from torchrl_rloo.collectors.ledger import GroupLedger, Lease, check_audit
from torchrl_rloo.collectors.llm import LLMCollector
from torchrl_rloo.collectors.refill import RefillingCollector
from torchrl_rloo.collectors.shared_source import SharedSource
from torchrl_rloo.collectors.source import GroupSource, StepRows
from torchrl_rloo.collectors.staleness import token_staleness
from torchrl_rloo.collectors.stored import StoredRollouts, add_missing_kl

__all__ = [
    "AdaptiveConcurrency",
    "GroupLedger",
    "GroupSource",
    "LLMCollector",
    "Lease",
    "RefillingCollector",
    "SharedSource",
    "StepRows",
    "StoredRollouts",
    "add_missing_kl",
    "check_audit",
    "token_staleness",
]
