"""Table of all rules."""

from __future__ import annotations

from torchrl_rloo.diagnostics.health.policy_rules import POLICY_RULES
from torchrl_rloo.diagnostics.health.reward_rules import REWARD_RULES
from torchrl_rloo.diagnostics.health.rule import Rule
from torchrl_rloo.diagnostics.health.system_rules import SYSTEM_RULES

RULES: tuple[Rule, ...] = POLICY_RULES + REWARD_RULES + SYSTEM_RULES
