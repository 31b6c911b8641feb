"""Table of all checks before a run."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from torchrl_rloo.diagnostics.checks.base import Check
from torchrl_rloo.diagnostics.checks.data import check_answers, check_duplicates, check_overlap
from torchrl_rloo.diagnostics.checks.rewards import check_reward_failures, check_reward_order
from torchrl_rloo.diagnostics.checks.samples import (
    check_abstained,
    check_sampled_rewards,
    check_signal,
    check_truncation,
)
from torchrl_rloo.diagnostics.checks.settings import (
    check_disk,
    check_evaluation,
    check_in_flight,
    check_kl,
    check_memory,
    check_sizes,
    check_staleness,
    check_stop_rules,
)
from torchrl_rloo.diagnostics.checks.template import check_stop_ids, check_template

CHECKS: Mapping[str, Check] = MappingProxyType(
    {
        "answers": check_answers,
        "duplicates": check_duplicates,
        "overlap": check_overlap,
        "template": check_template,
        "stop ids": check_stop_ids,
        "reward failures": check_reward_failures,
        "reward order": check_reward_order,
        "signal": check_signal,
        "truncation": check_truncation,
        "rewards": check_sampled_rewards,
        "returns": check_abstained,
        "sizes": check_sizes,
        "KL": check_kl,
        "staleness": check_staleness,
        "turns in flight": check_in_flight,
        "evaluation": check_evaluation,
        "early stop": check_stop_rules,
        "disk": check_disk,
        "memory": check_memory,
    }
)
