"""Pushes under a chosen version, and a group of engines without a supervisor."""

from __future__ import annotations

from torchrl_rloo.weight_update import WeightTarget, WeightUpdater
from torchrl_rloo.weight_update.protocol import TargetGroup


def push(updater: WeightUpdater, version: int) -> None:
    """Push weights as ``version``, as if the earlier ones were spent."""
    updater.version = version - 1
    assert updater.push_weights() == version


class Group(TargetGroup):
    """Group of engines without a supervisor."""

    def __init__(self, *engines: WeightTarget):
        self.engines, self.failed = list(engines), []

    def targets(self):
        return [engine for engine in self.engines if engine not in self.failed]

    def attach(self, fill):
        self.fill = fill

    def mark_filled(self, engine, version):
        self.failed = [other for other in self.failed if other is not engine]

    def mark_failed(self, engine, error):
        self.failed.append(engine)
