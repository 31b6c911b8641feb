"""Gauges and counters of this process that Ray exports to its dashboard and to Prometheus."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from torchrl_rloo.ray_session import require_ray

PREFIX = "torchrl_rloo_"  # Ray adds ray_ before it
_OTHER = re.compile(r"[^a-zA-Z0-9_]+")


class RayMetrics:
    """Gauges and counters, which are created at their first use.

    A name is that of a metric, with ``torchrl_rloo_`` before it and ``_`` in place of ``/`` and other signs. Each value
    has the labels that Ray adds, among them node and worker. Values reach the node's endpoint within seconds; Ray
    serves it if ``ray[default]`` is installed.

    Args:
        labels: labels of all values.

    Raises:
        ImportError: if Ray is not installed.
    """

    def __init__(self, labels: Mapping[str, str] | None = None):
        require_ray()
        from ray.util import metrics

        self._kinds, self._labels = metrics, dict(labels or {})
        self._made: dict[str, Any] = {}

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge; values that are not finite are left out."""
        if math.isfinite(value):
            self._get(self._kinds.Gauge, name, labels).set(value, tags=self._labels | labels)

    def add(self, name: str, increase: float, **labels: str) -> None:
        """Increase a counter."""
        if increase > 0:
            self._get(self._kinds.Counter, name, labels).inc(increase, tags=self._labels | labels)

    def _get(self, kind: type, name: str, labels: Mapping[str, str]) -> Any:
        if name not in self._made:
            exported = PREFIX + _OTHER.sub("_", name)
            self._made[name] = kind(exported, description=name, tag_keys=(*self._labels, *labels))
        return self._made[name]
