"""Section of the recipes' configurations about stored rows: keep them, only collect them, or train on them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from torchrl_rloo.cli.sampling_config import CollectorConfig


@dataclass
class RolloutsConfig:
    """Rows as files: keep all of a run, only collect them, or train on stored ones."""

    path: str | None = None  # folder that keeps the rows of every step; null: none are kept
    max_gb: float | None = None  # disk space of kept rows in GB, beyond which the oldest go; null: no limit
    train: bool = True  # false: only collect and keep rows
    source: str | None = None  # folder of stored rows to train on, without sampling; null: sample

    def __post_init__(self):
        if self.max_gb is not None and self.path is None:
            raise ValueError(f"rollouts.max_gb={self.max_gb} has no effect without rollouts.path; set that")
        if self.max_gb is not None and not self.max_gb > 0:
            raise ValueError(f"rollouts.max_gb={self.max_gb} must be above 0")
        if not self.train and self.path is None:
            raise ValueError("rollouts.train=false requires rollouts.path, a folder for the rows; set that")
        if self.source is not None and self.path is not None:
            raise ValueError(
                f"rollouts.path={self.path} would store rows of rollouts.source={self.source} again; set one of them"
            )

    @property
    def max_bytes(self) -> int | None:
        """Disk space of kept rows in bytes; None for no limit."""
        return None if self.max_gb is None else max(1, int(self.max_gb * 1e9))


def check_stored(cfg: Any) -> None:
    """Raise ``ValueError`` if a setting of sampling has no effect on stored rows.

    Args:
        cfg: settings of RLOO training.
    """
    if cfg.rollouts.source is None:
        return
    given = f"with rollouts.source={cfg.rollouts.source}"
    for f in fields(CollectorConfig):
        value, default = getattr(cfg.collector, f.name), getattr(CollectorConfig(), f.name)
        if value != default and f.name not in ("max_staleness", "on_stale"):
            raise ValueError(f"collector.{f.name}={value} has no effect {given}; remove it")
    if cfg.collector.on_stale not in ("mask", "baseline"):
        raise ValueError(f"collector.on_stale={cfg.collector.on_stale} samples again; {given} set mask or baseline")
    for name in ("pass_rate", "rerolls"):
        if getattr(cfg.curriculum, name) is not None:
            raise ValueError(f"curriculum.{name} chooses prompts and has no effect {given}; set it to null")
    if cfg.reward.shaping:
        raise ValueError(f"reward.shaping has no effect {given}, whose rewards are shaped; set it to []")


def check_not_stored(rollouts: RolloutsConfig) -> None:
    """Raise ``ValueError`` if a section is set in a recipe whose rows never meet in one process."""
    for f in fields(RolloutsConfig):
        value = getattr(rollouts, f.name)
        if value != getattr(RolloutsConfig(), f.name):
            raise ValueError(f"rollouts.{f.name}={value} needs the rows on rank 0 and cannot be set here; use rloo")
