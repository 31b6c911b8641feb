"""Settings of the health rules of a run; imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torchrl_rloo.cli.schema import parse_section


@dataclass
class RollbackConfig:
    """Return to an earlier checkpoint when a health rule fires."""

    on: list[str] = field(default_factory=lambda: ["stop"])  # rules or severities (info, warn, stop) that go back
    lr_factor: float = 0.5  # factor of the learning rate after each rollback
    max_rollbacks: int = 3  # rollbacks after which the rules end the run


@dataclass
class HealthConfig:
    """Rules about the metrics of a run."""

    rules: list[str] = field(default_factory=list)  # further rules: dotted paths of a Rule or of a list of them
    ignore: list[str] = field(default_factory=list)  # names of rules to leave out
    stop_on: list[str] = field(
        default_factory=lambda: ["nan"]
    )  # rules or severities (info, warn, stop) that end the run
    rollback: Any = None  # go back to a checkpoint: {on: [stop], lr_factor: 0.5, max_rollbacks: 3}; null: never

    def __post_init__(self):
        self.rollback = parse_section(RollbackConfig, self.rollback, "health.rollback")
