"""Health of a run: rules about its metrics that say in words what is wrong, and what helps."""

from torchrl_rloo.diagnostics.health.monitor import Health
from torchrl_rloo.diagnostics.health.rule import Event, History, Rule
from torchrl_rloo.diagnostics.health.table import RULES

__all__ = ["RULES", "Event", "Health", "History", "Rule"]
