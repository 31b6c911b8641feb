"""Health of a run in its folder: events as lines of a file, and the decision to stop or to go back."""

from __future__ import annotations

import gc
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torchrl_rloo.runtime.files import append, write_text

_log = logging.getLogger(__name__)

FILE = "health.jsonl"
ROLLBACK = "rollback"  # rule of the lines that record a rollback
_FACTOR = "learning_rate_factor"


class UnhealthyRunError(RuntimeError):
    """A rule ended the run."""


class RollbackError(UnhealthyRunError):
    """A rule takes the run back to the checkpoint of a step; see :func:`repeat_after_rollback`."""

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step


class Verdict(NamedTuple):
    """Decision about a run: its end, or a rollback to the checkpoint of a step."""

    message: str
    step: int | None


class HealthLog:
    """Part of a run that passes its metrics to :class:`torchrl_rloo.diagnostics.health.Health`, and records events."""

    def __init__(self, directory: Path, monitor: Any, show: Callable[[str], None]) -> None:
        self.monitor, self._path, self._show = monitor, directory / FILE, show
        self._rollbacks, self._lr_scale = 0, 1.0

    def check(self, step: int, metrics: Mapping[str, float], checkpoints: Callable[[], list[int]]) -> Verdict | None:
        """Judge a step, record its events, and decide; ``checkpoints`` returns the steps of all, in ascending order."""
        if not metrics:
            return None
        events = self.monitor.update(step, metrics)
        for event in events:
            self._record(event.record())
            self._show(str(event))
        acting = {self.monitor.action(event): event for event in reversed(events)}
        if ROLLBACK in acting:
            return self._roll_back(step, acting[ROLLBACK], checkpoints())
        if "stop" in acting:
            return Verdict(f"stopped at step {step} by health rule {_described(acting['stop'])}", None)
        return None

    def restore(self, step: int, state: Mapping[str, Any] | None) -> float:
        """Continue from a checkpoint, or from step 0: restore the monitor, and drop lines that will be written again.

        Return the factor that the learning rates of the checkpoint have to be multiplied by, for rollbacks after it.
        """
        lines = kept_lines(self._path.read_text(encoding="utf-8"), step) if step and self._path.is_file() else []
        if lines or self._path.is_file():
            write_text(self._path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
        rollbacks = [line for line in lines if line.get("rule") == ROLLBACK]
        self._rollbacks = len(rollbacks)
        self._lr_scale = float(rollbacks[-1]["evidence"][_FACTOR]) if rollbacks else 1.0
        if state is None:
            return self._lr_scale
        self.monitor.load_state_dict(state["monitor"])
        return self._lr_scale / state["lr_scale"]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the monitor, and the factor of the learning rates."""
        return {"monitor": self.monitor.state_dict(), "lr_scale": self._lr_scale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the monitor only; a run calls :meth:`restore`."""
        self.monitor.load_state_dict(state["monitor"])

    def _roll_back(self, step: int, event: Any, checkpoints: list[int]) -> Verdict:
        cause = _described(event)
        if self._rollbacks >= self.monitor.max_rollbacks:
            return Verdict(f"stopped at step {step} after {self._rollbacks} rollbacks by health rule {cause}", None)
        if not checkpoints:
            return Verdict(f"stopped at step {step}, without a checkpoint to go back to, by health rule {cause}", None)
        target = max((s for s in checkpoints if s < event.since), default=checkpoints[0])
        self._rollbacks, self._lr_scale = self._rollbacks + 1, self._lr_scale * self.monitor.lr_factor
        evidence = {"to_step": target, _FACTOR: self._lr_scale, "rollbacks": self._rollbacks}
        message = (
            f"Went back from step {step} to the checkpoint of step {target}, with learning rates times "
            f"{self._lr_scale:g}, because of {event.rule}."
        )
        texts = {"sentence": message, "remedy": "Look at the settings if it happens again."}
        head = {"step": step, "rule": ROLLBACK, "severity": "info", "state": "fired"}
        self._record(head | texts | {"evidence": evidence})
        self._show(message)
        return Verdict(f"{message} Cause: {cause}", target)

    def _record(self, record: Mapping[str, Any]) -> None:
        append(self._path, (json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n").encode())


def raise_verdict(verdict: Verdict | None) -> None:
    """Raise the error of a decision."""
    if verdict is None:
        return
    if verdict.step is None:
        raise UnhealthyRunError(verdict.message)
    raise RollbackError(verdict.message, verdict.step)


def repeat_after_rollback(train: Callable[[int | None], None]) -> None:
    """Call a function that trains, and again after each rollback.

    Args:
        train: function that builds all parts, enters a :class:`~torchrl_rloo.run.Run` with ``resume=step`` and trains.
            Its argument is the step, or None for the first call.

    Example:
        >>> def train(resume):
        ...     print(f"train, resume={resume}")
        ...     if resume is None:
        ...         raise RollbackError("the reward fell", step=40)
        >>> repeat_after_rollback(train)
        train, resume=None
        train, resume=40
    """
    step = None
    while True:
        try:
            train(step)
            return
        except RollbackError as error:
            step = error.step
        # The parts of the failed attempt are garbage now, and their memory is needed
        gc.unfreeze()
        gc.collect()


def scale_learning_rates(parts: Iterable[Any], factor: float) -> None:
    """Multiply the learning rates of optimizers and of their schedules, in place; other parts stay as they are."""
    if factor == 1.0:
        return
    for part in parts:
        for group in getattr(part, "param_groups", ()):
            group |= {name: group[name] * factor for name in ("lr", "initial_lr") if name in group}
        for name in ("base_lrs", "_last_lr"):
            if hasattr(part, name):
                setattr(part, name, [rate * factor for rate in getattr(part, name)])


def kept_lines(text: str, step: int) -> list[dict[str, Any]]:
    """Return the events of a file that stay when a run continues after a step.

    These are the events up to that step, and all events up to the last rollback, which explain it. A line that a kill
    cut off, or that is no event, is dropped.
    """
    events = []
    for line in text.split("\n"):
        try:
            event = json.loads(line)
            if isinstance(event, dict) and type(event["step"]) is int:
                events.append(event)
        except (ValueError, KeyError, RecursionError):
            if line:
                _log.warning("dropped a damaged line of %s: %.80r", FILE, line)
    last = max((i for i, event in enumerate(events) if event.get("rule") == ROLLBACK), default=-1)
    return events[: last + 1] + [event for event in events[last + 1 :] if event["step"] <= step]


def _described(event: Any) -> str:
    return " ".join(str(event).partition(", ")[2].split()) or event.rule
