"""Bookkeeping of a training loop: resume, stop, checkpoint, log, time. Never sees a loss."""

from __future__ import annotations

import atexit
import gc
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

from torchrl_rloo.run.checkpoint import Checkpointer, gather_state, restore_state, rng_state, set_rng_state
from torchrl_rloo.run.interrupt import StopSignal
from torchrl_rloo.run.logging import RunLogger
from torchrl_rloo.run.settings import RESUME, check_same_settings, write_settings
from torchrl_rloo.run.timing import StepTimer, cpu_seconds


class Run:
    """Resume, stop signal, checkpoints, log and timer of a loop that its user writes.

    Entering restores the newest checkpoint. Each turn of :meth:`steps` ends by writing what was logged in it and, where
    one is due, a checkpoint. SIGINT or SIGTERM ends the loop after the current step, with a checkpoint.

    Args:
        directory: where all files of the run go.
        total_steps: number of the last step.
        parts: objects with ``state_dict`` and ``load_state_dict``, by name: model, optimizer, collector, ...; None for
            one that this run does not have.
        settings: the run's configuration in plain values; a resumed run must have the same.
        defaults: the configuration's defaults, which stand for settings that an older checkpoint lacks.
        resume: ``"auto"`` continues from the newest checkpoint, ``"extend"`` also where steps, engine, evaluation or
            logging differ, ``"never"`` starts over.
        checkpoint_every: steps between checkpoints; 0 writes one only at the end or when stopped.
        keep: newest checkpoints kept.
        headline: metrics shown in the progress display.
        loggers: see :class:`RunLogger`.
        logger_kwargs: see :class:`RunLogger`.

    Attributes:
        step: the current step, or the last one done; 0 before the first.
        metrics: logged so far in the current step.
        logger: the :class:`RunLogger`.

    Raises:
        ValueError: for a number or word out of range; on entering, if the settings are not those of the checkpoint.

    Example:
        >>> import tempfile, torch
        >>> model = torch.nn.Linear(2, 2)
        >>> with Run(tempfile.mkdtemp(), 3, {"model": model}, loggers=[]) as run:
        ...     for step in run.steps():
        ...         with run.time("train"):
        ...             run.log({"reward": step / 3})
        >>> run.finished, run.logger.history[-1]
        (True, {'step': 3, 'reward': 1.0})
    """

    def __init__(
        self,
        directory: str | Path,
        total_steps: int,
        parts: Mapping[str, Any],
        *,
        settings: Mapping[str, Any] | None = None,
        defaults: Mapping[str, Any] | None = None,
        resume: str = "auto",
        checkpoint_every: int = 10,
        keep: int = 2,
        headline: tuple[str, ...] = ("reward", "time/step"),
        loggers: tuple[str, ...] | list[str] = ("tensorboard",),
        logger_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ):
        if resume not in RESUME:
            raise ValueError(f"resume={resume!r} must be one of {list(RESUME)}")
        if checkpoint_every < 0:
            raise ValueError(f"checkpoint.every={checkpoint_every} must be at least 0")
        if total_steps < 1:
            raise ValueError(f"total_steps={total_steps} must be at least 1")
        for name, part in parts.items():
            if name == "logger" or (part is not None and not hasattr(part, "state_dict")):
                raise TypeError(
                    f"parts[{name!r}] is a {type(part).__name__}: give objects with state_dict and load_state_dict, "
                    "under another name than 'logger'"
                )
        self.directory, self.total_steps, self.step = Path(directory), total_steps, 0
        self.settings, self.defaults = dict(settings or {}), dict(defaults or {})
        self.logger = RunLogger(
            directory, total_steps=total_steps, headline=headline, loggers=loggers, logger_kwargs=logger_kwargs
        )
        self.parts = {name: part for name, part in parts.items() if part is not None} | {"logger": self.logger}
        self._resume, self._checkpoint_every = resume, checkpoint_every
        self._checkpoints = Checkpointer(self.directory / "checkpoints", keep=keep)
        self._timer, self._stop, self._stack = StepTimer(), StopSignal(), ExitStack()
        self.metrics: dict[str, float] = {}
        self._cpu_before, self._timings = 0.0, {}

    def __enter__(self) -> Run:
        if self._resume == "never":
            self._checkpoints.clear()
        elif (state := self._checkpoints.load()) is not None:
            self._restore(state)
        gc.collect()
        gc.freeze()  # models, prompts and libraries stay: no need to sweep them at every step
        atexit.register(gc.unfreeze)  # else libraries report what they take for leaks
        self._stack.enter_context(self._stop)
        self._stack.enter_context(self.logger)
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._stack.close()

    @property
    def finished(self) -> bool:
        """Whether the last step is done; not so after a stop signal."""
        return self.step >= self.total_steps

    @property
    def is_last(self) -> bool:
        """Whether the current step is the last."""
        return self.step == self.total_steps

    @property
    def cpu_seconds(self) -> float:
        """CPU seconds of the run so far, those of earlier processes included."""
        return self._cpu_before + cpu_seconds()

    def is_due(self, every: int) -> bool:
        """Return whether something done every ``every`` steps, never for 0, is due at the current step."""
        return every > 0 and self.step % every == 0

    def steps(self) -> Iterator[int]:
        """Yield the number of each step still to do; write log and checkpoint after each.

        What was logged before the first step is written as step 0.
        """
        self._write()
        for step in range(self.step + 1, self.total_steps + 1):
            self.step = step
            yield step
            self._write()
            if self.is_due(self._checkpoint_every) or self.is_last or self._stop.requested:
                self._save()
            if self._stop.requested and not self.is_last:
                print(f"stopped after step {step}; rerun the same command to resume", flush=True)
                return

    def time(self, phase: str) -> AbstractContextManager[None]:
        """Measure the wall-clock time of a block, logged as ``time/<phase>``."""
        return self._timer(phase)

    def seconds(self, phase: str) -> float:
        """Return the wall-clock seconds of a phase in the current step."""
        return self._timer.seconds(phase)

    def log(self, metrics: Mapping[str, float], *, timings: Mapping[str, float] | None = None) -> None:
        """Add metrics to those of the current step.

        Args:
            metrics: equal in every run of the same seed.
            timings: numbers that depend on the clock; they go to a file of their own.
        """
        self.metrics.update(metrics)
        self._timings.update(timings or {})

    def log_table(self, name: str, rows: list[Mapping[str, Any]]) -> None:
        """Record samples at the current step; see :meth:`RunLogger.log_table`."""
        self.logger.log_table(self.step, name, rows)

    def first_and_last(self, name: str) -> tuple[float, float]:
        """Return the first and the last value logged of a metric; NaN if there is none."""
        values = [record[name] for record in self.logger.history if name in record]
        return (values[0], values[-1]) if values else (math.nan, math.nan)

    def summary(self, *names: str) -> dict[str, float]:
        """Return ``cpu_seconds``, and each metric's first and last value as ``<name>_before`` and ``<name>_after``."""
        found = {"cpu_seconds": round(self.cpu_seconds, 1)}
        for name in names:
            found[f"{name}_before"], found[f"{name}_after"] = self.first_and_last(name)
        return found

    def _write(self) -> None:
        if not self.metrics and not self._timings:
            return
        timings = self._timer.take() | self._timings | {"cpu_seconds": self.cpu_seconds}
        self.logger.log(self.step, self.metrics, timings=timings)
        self.metrics, self._timings = {}, {}

    def _save(self) -> None:
        write_settings(self.directory, self.settings)
        state = {"step": self.step, "cpu_seconds": self.cpu_seconds, "settings": self.settings, "rng": rng_state()}
        self._checkpoints.save(self.step, state | {"parts": gather_state(**self.parts)})

    def _restore(self, state: Mapping[str, Any]) -> None:
        saved = state["settings"]
        check_same_settings(saved, self.settings, self.defaults, extend=self._resume == "extend", where=self.directory)
        restore_state(state["parts"], **self.parts)
        set_rng_state(state["rng"])
        self.step, self._cpu_before = state["step"], state["cpu_seconds"]
        if self.step > self.total_steps:
            raise ValueError(
                f"the checkpoint in {self.directory} is after step {self.step}, but the run ends at "
                f"{self.total_steps}: raise the number of steps, or set resume=never to start over"
            )
        print(f"resumed after step {self.step} from {self._checkpoints.directory}", flush=True)


def meters(*parts: Any) -> dict[str, float]:
    """Gather what parts have to report: ``part.metrics()``, and ``part.counts`` as ``count/<name>``.

    Parts that have neither are passed over; equal names of counts are summed.

    Example:
        >>> class Part:
        ...     counts = {"calls": 2}
        >>> meters(Part(), Part(), object())
        {'count/calls': 4}
    """
    found: dict[str, float] = {}
    for part in parts:
        metrics: Callable[[], Mapping[str, float]] | None = getattr(part, "metrics", None)
        found.update(metrics() if callable(metrics) else {})
        for name, number in dict(getattr(part, "counts", {})).items():  # a copy: other threads go on counting
            found[f"count/{name}"] = found.get(f"count/{name}", 0) + number
    return found
