"""Load of a vLLM engine, from the statistics of its steps. vLLM is imported with this file."""

from __future__ import annotations

from typing import Any

from vllm.v1.metrics.loggers import AggregateStatLoggerBase, PrometheusStatLogger

from torchrl_rloo.engines.base import EngineLoad


class LoadLogger(AggregateStatLoggerBase):
    """Stat logger that keeps the last load.

    Args:
        vllm_config: configuration of the engine; unused.
        engine_indexes: numbers of the engine's cores; unused, since there is one.
    """

    def __init__(self, vllm_config: Any, engine_indexes: list[int]):
        self._scheduler: Any = None
        self._tokens = self._preemptions = 0

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """Take the statistics of one step."""
        if scheduler_stats is not None:
            self._scheduler = scheduler_stats
        if iteration_stats is not None:
            self._tokens += iteration_stats.num_generation_tokens
            self._preemptions += iteration_stats.num_preempted_reqs

    def log(self) -> None:
        """Log nothing."""

    def log_engine_initialized(self) -> None:
        """Log nothing."""

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        """Record nothing."""

    def record_admission_rejection(self, reason: str) -> None:
        """Record nothing."""

    def load(self) -> EngineLoad:
        """Return the load after the last step."""
        if (s := self._scheduler) is None:
            return EngineLoad()
        waiting = s.num_waiting_reqs + s.num_skipped_waiting_reqs
        return EngineLoad(s.num_running_reqs, waiting, s.kv_cache_usage, self._preemptions, self._tokens)


class OnlyLoadLogger(LoadLogger, PrometheusStatLogger):
    """:class:`LoadLogger` in place of vLLM's logger for Prometheus, which costs time in each step."""


def load_logger(only: bool) -> type[LoadLogger]:
    """Return the class of the logger: the only one, or one in addition to those of vLLM."""
    return OnlyLoadLogger if only else LoadLogger
