"""RayLogger: metrics of a run as gauges of its Ray cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchrl_rloo.ray_metrics import RayMetrics
from torchrl_rloo.ray_session import require_ray


class RayLogger:
    """Logger that exports the last value of each metric through Ray, and the phase in which the run is.

    Ray's dashboard and Prometheus read them from the nodes, see :class:`~torchrl_rloo.ray_metrics.RayMetrics`. The
    gauge ``torchrl_rloo_phase`` is 1 for the current phase and 0 for the others.

    Args:
        run: label of all values, which tells runs of one cluster apart.

    Raises:
        ImportError: if Ray is not installed.
    """

    def __init__(self, run: str):
        self._metrics = RayMetrics({"run": run})
        self._phase: str | None = None

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Send the metrics of a step."""
        for name, value in metrics.items():
            self._metrics.set(name, float(value))
        if step is not None:
            self._metrics.set("step", step)

    def log_phase(self, phase: str | None) -> None:
        """Send what the run does now; None between two phases."""
        if self._phase is not None:
            self._metrics.set("phase", 0.0, phase=self._phase)
        self._phase = phase
        if phase is not None:
            self._metrics.set("phase", 1.0, phase=phase)

    def flush(self) -> None:
        """Do nothing, since Ray exports at intervals."""

    def close(self) -> None:
        """End the current phase."""
        if require_ray().is_initialized():  # its metrics end with it
            self.log_phase(None)
