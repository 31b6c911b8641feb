"""Health of a run: rules about its metrics that say in words what is wrong, and what helps."""

from torchrl_rloo.diagnostics.health.conditions import above, below, both, counted, grown, not_finite, shrunk
from torchrl_rloo.diagnostics.health.history import History
from torchrl_rloo.diagnostics.health.monitor import Health, load_rules, make_health
from torchrl_rloo.diagnostics.health.rule import SEVERITIES, Event, Rule
from torchrl_rloo.diagnostics.health.table import RULES

__all__ = [
    "RULES",
    "SEVERITIES",
    "Event",
    "Health",
    "History",
    "Rule",
    "above",
    "below",
    "both",
    "counted",
    "grown",
    "load_rules",
    "make_health",
    "not_finite",
    "shrunk",
]
