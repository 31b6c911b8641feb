"""Pushes under a chosen version."""

from __future__ import annotations

from torchrl_rloo.weight_update import WeightUpdater


def push(updater: WeightUpdater, version: int) -> None:
    """Push weights as ``version``, as if the earlier ones were spent."""
    updater.version = version - 1
    assert updater.push_weights() == version
