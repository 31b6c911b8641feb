"""Management of a user's training loop: resume, stop, checkpoint, log, time."""

from __future__ import annotations

import atexit
import gc
import logging
import math
import shutil
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from torchrl_rloo.run.checkpoint import Checkpointer
from torchrl_rloo.run.health_log import (
    HealthLog,
    RollbackError,
    UnhealthyRunError,
    raise_verdict,
    scale_learning_rates,
)
from torchrl_rloo.run.lock import DirectoryLock
from torchrl_rloo.run.logging import MakeDigest, RunLogger
from torchrl_rloo.run.meters import StepTimer, cpu_seconds
from torchrl_rloo.run.settings import RESUME, check_resume, check_same_settings, write_settings
from torchrl_rloo.run.shards import agree, gather_state, restore_state
from torchrl_rloo.run.state import rng_state, set_rng_state
from torchrl_rloo.runtime.files import refuse_links
from torchrl_rloo.runtime.masking import mask_settings
from torchrl_rloo.runtime.ranks import Ranks

_log = logging.getLogger(__name__)

_PATIENCE_S = 30.0  # seconds that a failed rank waits for a save, in which the other ranks take part
_YOUNG_OBJECTS = 50_000  # new Python objects after which Python looks for cycles among them
_OWN_PARTS = ("logger", "health")
_ENTRIES = ("cpu_seconds", "parts", "rng", "settings", "step")  # of a checkpoint


class StopSignal:
    """Context manager that turns the first SIGINT or SIGTERM into a stop request; the second one aborts.

    Only the main thread can set signal handlers. In other threads the context manager does nothing, and only the caller
    can set ``requested``.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._previous.items():
            # None is a handler that was not set from Python and that Python cannot restore.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt(f"second signal: {signal.Signals(number).name}")
        self.requested = True
        _log.warning(
            "%s received: the run will save and stop at the end of this step; a second signal aborts it immediately",
            signal.Signals(number).name,
        )


class Run:
    """Context manager of a user's training loop: resume, stop signal, checkpoints, log and timer.

    Entering restores the newest checkpoint. After each step, :meth:`steps` writes the logged metrics and, if it is due,
    a checkpoint. SIGINT or SIGTERM ends the loop after the current step, with a checkpoint.

    Inside the ``with`` block the directory is locked: another process or another run of this process cannot enter it.
    After the block, this and other processes may continue the run.

    With several ranks, all enter the same run and iterate its steps together. Rank 0 locks, logs and writes; a stop
    signal to one rank ends the loop on all after the same step. Models and optimizers may be sharded, also in other
    ways than when they were saved. The other parts are restored from rank 0's state on each rank that has them.

    Args:
        directory: directory of all files of the run.
        total_steps: number of the last step.
        parts: objects with ``state_dict`` and ``load_state_dict`` by name: model, optimizer, collector, ... A part that
            the run, or this rank, does not have is None.
        settings: configuration of the run in plain values. A resumed run must have the same.
        defaults: default values of the configuration, which replace settings that an older checkpoint lacks.
        resume: ``"auto"`` continues from the newest checkpoint. ``"extend"`` does so even if steps, engine, evaluation
            or logging differ. ``"never"`` starts over. A number continues from the checkpoint of that step, and removes
            those of later steps.
        checkpoint_every: steps between checkpoints. 0 writes one only at the end or after a stop signal.
        keep: number of newest checkpoints to keep.
        stop_after: step after which the loop ends with a checkpoint, as after a stop signal. None never ends it.
        asynchronous: if True, a thread writes each checkpoint from a copy in CPU memory while training continues. Its
            error is raised after a later step or on leaving the block, which waits for the last one.
        ranks: ranks that train the model together. None is a single process.
        health: rules about the metrics, such as :class:`torchrl_rloo.diagnostics.health.Health`. Their events are
            written to ``health.jsonl`` and may end the loop or take it back. None checks nothing.
        headline: metrics in the progress display.
        loggers: see :class:`RunLogger`.
        logger_kwargs: see :class:`RunLogger`.
        digest: see :class:`RunLogger`.
        run_name: see :class:`RunLogger`.

    Attributes:
        step: current step, or the last one that is done. 0 before the first.
        metrics: metrics logged so far in the current step.
        logger: the :class:`RunLogger`.
        timer: the :class:`StepTimer`.

    Raises:
        ValueError: if an argument is out of range. On entering, if the settings differ from those of the checkpoint,
            its step is above ``total_steps``, or its newest readable checkpoint has other entries.
        FileNotFoundError: on entering, if ``resume`` is a number and there is no checkpoint of that step.
        RankError: on the other ranks, if rank 0 fails.
        DirectoryInUseError: on entering, if another process or run writes to the directory.
        OSError: on entering, if the directory is not writable or has no space for a checkpoint.
        TypeError: if a part has no ``state_dict`` or is named ``"logger"`` or ``"health"``.
        UnhealthyRunError: in the loop, if a rule of ``health`` ends the run; the step gets no checkpoint.
        RollbackError: in the loop, if one takes it back; see :func:`~torchrl_rloo.run.repeat_after_rollback`.

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
        resume: str | int = "auto",
        checkpoint_every: int = 10,
        keep: int = 2,
        stop_after: int | None = None,
        asynchronous: bool = False,
        ranks: Ranks | None = None,
        health: Any = None,
        headline: tuple[str, ...] = ("reward", "time/step"),
        loggers: tuple[str, ...] | list[str] = ("tensorboard",),
        logger_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
        digest: MakeDigest | None = None,
        run_name: str | None = None,
    ):
        check_resume(resume)
        if checkpoint_every < 0:
            raise ValueError(f"checkpoint_every={checkpoint_every} must be at least 0")
        if total_steps < 1:
            raise ValueError(f"total_steps={total_steps} must be at least 1")
        # Every part must have a state to save, or a resumed run would lose it
        for name, part in parts.items():
            if name in _OWN_PARTS or (part is not None and not hasattr(part, "state_dict")):
                raise TypeError(
                    f"parts[{name!r}] is a {type(part).__name__}, but must have state_dict and load_state_dict and a "
                    f"name other than {_OWN_PARTS}"
                )
        self.directory, self.total_steps, self.step = Path(directory), total_steps, 0
        self.settings, self.defaults = dict(settings or {}), dict(defaults or {})
        self.ranks = ranks or Ranks.single()
        shown = {"loggers": loggers, "logger_kwargs": logger_kwargs, "digest": digest, "run_name": run_name}
        shown = shown if self.ranks.is_main else {"loggers": []}
        self.logger = RunLogger(directory, total_steps=total_steps, headline=headline, **shown)
        # Save the logger as a part, so that a resumed run continues its records
        self.parts = {name: part for name, part in parts.items() if part is not None}
        show = self.logger.write_line
        self._health = None if health is None else HealthLog(self.directory, health, show)
        if self.ranks.is_main:
            self.parts |= {"logger": self.logger} | ({"health": self._health} if self._health else {})
        self._resume, self._checkpoint_every, self._stop_after = resume, checkpoint_every, stop_after
        checkpoints = self.directory / "checkpoints"
        self._checkpoints = Checkpointer(checkpoints, keep=keep, ranks=self.ranks, asynchronous=asynchronous)
        self.timer, self._stop, self._stack = StepTimer(), StopSignal(), ExitStack()
        self.metrics: dict[str, float] = {}
        self._cpu_before, self._timings = 0.0, {}

    def __enter__(self) -> Run:
        with ExitStack() as stack:  # an error on the way unlocks the directory
            # Lock and check the directory
            self.ranks.broadcast(lambda: self._lock(stack))
            # Continue from the newest checkpoint, or from the given one
            if self._resume == "never":
                self._checkpoints.clear()
            elif isinstance(self._resume, int):
                self._restore(*self._checkpoints.read(self._resume))
            elif (newest := self._checkpoints.newest()) is not None:
                self._restore(*newest)
            if self._health is not None and self.step == 0:
                self.ranks.broadcast(lambda: self._health.restore(0, None))
            # Prepare the process
            gc.collect()
            gc.freeze()  # exclude models, prompts and libraries from collections at every step
            atexit.register(gc.unfreeze)  # otherwise libraries report leaks at exit
            # Collect what a step made at its end. In between, a search for cycles would pass all rows again and again
            stack.callback(gc.set_threshold, *gc.get_threshold())
            gc.set_threshold(_YOUNG_OBJECTS)
            stack.enter_context(self._stop)
            stack.enter_context(self.logger)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        with self._stack:
            self._report_failure(exc_info[1])
            try:
                self._checkpoints.wait(_PATIENCE_S if exc_info[0] and self.ranks.size > 1 else None)
            except Exception as error:
                if exc_info[0] is None:
                    raise
                _log.warning("the last checkpoint was not written: %s", error)  # the run has its own error

    @property
    def finished(self) -> bool:
        """True if the last step is done, which a stop signal may prevent."""
        return self.step >= self.total_steps

    @property
    def is_last(self) -> bool:
        """True if the current step is the last."""
        return self.step == self.total_steps

    @property
    def cpu_seconds(self) -> float:
        """CPU seconds of the run so far, including earlier processes."""
        return self._cpu_before + cpu_seconds()

    def is_due(self, every: int) -> bool:
        """Return whether an action is due at the current step that runs every ``every`` steps; 0 means never."""
        return every > 0 and self.step % every == 0

    def steps(self) -> Iterator[int]:
        """Yield the number of each remaining step, and write log and checkpoint after it.

        Metrics logged before the first step are written as step 0.
        """
        self._write()
        for step in range(self.step + 1, self.total_steps + 1):
            self.step = step
            yield step
            gc.collect(1)
            self._write()
            stopped = self._is_stopped() or step == self._stop_after
            if self.is_due(self._checkpoint_every) or self.is_last or stopped:
                with self.time("checkpoint"):
                    self._save()
            if stopped and not self.is_last:
                same = "rerun the same command" if self._resume in RESUME else "rerun with resume=auto"
                self._print(f"stopped after step {step}; {same} to resume")
                return

    def time(self, phase: str) -> AbstractContextManager[None]:
        """Measure the wall-clock time of a block in seconds and log it as ``time/<phase>``."""
        return self.timer(phase)

    def seconds(self, phase: str) -> float:
        """Return the wall-clock seconds of a phase in the current step."""
        return self.timer.seconds(phase)

    def log(self, metrics: Mapping[str, float], *, timings: Mapping[str, float] | None = None) -> None:
        """Add metrics to the current step.

        Args:
            metrics: numbers that are equal for equal seeds.
            timings: numbers that depend on the clock, written to a separate file.
        """
        self.metrics.update(metrics)
        self._timings.update(timings or {})

    def log_table(self, name: str, rows: list[Mapping[str, Any]]) -> None:
        """Log samples at the current step, on rank 0; see :meth:`RunLogger.log_table`."""
        if self.ranks.is_main:
            self.logger.log_table(self.step, name, rows)

    def first_and_last(self, name: str) -> tuple[float, float]:
        """Return the first and the last logged value of a metric, or NaN if there is none."""
        values = [record[name] for record in self.logger.history if name in record]
        return (values[0], values[-1]) if values else (math.nan, math.nan)

    def summary(self, *names: str) -> dict[str, float]:
        """Return ``cpu_seconds`` and each metric's first and last value as ``<name>_before`` and ``<name>_after``."""
        found = {"cpu_seconds": round(self.cpu_seconds, 1)}
        for name in names:
            found[f"{name}_before"], found[f"{name}_after"] = self.first_and_last(name)
        return found

    def _lock(self, stack: ExitStack) -> None:
        stack.enter_context(DirectoryLock(self.directory, sole=True))
        stack.callback(self._checkpoints.close)
        self._checkpoints.lock()
        refuse_links(self.directory, ("checkpoints", "transcripts", "model"))
        _check_space(self.directory, self.parts.values())

    def _print(self, text: str) -> None:
        if self.ranks.is_main:
            print(text, flush=True)

    def _is_stopped(self) -> bool:
        """Return whether a rank got a stop signal; raise the error of a save in the background."""
        found = self.ranks.all_gather((self._stop.requested, self._checkpoints.failed))
        if any(failed for _, failed in found):
            self._checkpoints.wait()
        return any(requested for requested, _ in found)

    def _write(self) -> None:
        metrics, timings, self.metrics, self._timings = self.metrics, self._timings, {}, {}
        if metrics or timings:
            timings = self.timer.take() | timings | {"cpu_seconds": self.cpu_seconds}
            if self.ranks.is_main:
                self.logger.log(self.step, metrics, timings=timings)
        # All ranks meet there, also one that logged nothing
        self._check_health(metrics)

    def _check_health(self, metrics: Mapping[str, float]) -> None:
        """Evaluate the rules on rank 0; on all ranks, raise if one of them ends the run or takes it back."""
        if self._health is None:
            return

        def checkpoints() -> list[int]:
            self._checkpoints.wait()
            return self._checkpoints.steps()

        raise_verdict(self.ranks.broadcast(lambda: self._health.check(self.step, metrics, checkpoints)))

    def _report_failure(self, error: BaseException | None) -> None:
        """Show an error that has metrics, such as a gradient that is not finite, to the rules, which may go back."""
        if self._health is not None and (metrics := getattr(error, "metrics", None)):
            self.log(metrics)
            try:
                self._write()
            except RollbackError:
                raise
            except UnhealthyRunError as stop:
                _log.info("%s", stop)  # the error itself ends the run

    def _save(self) -> None:
        self.ranks.broadcast(lambda: write_settings(self.directory, self.settings))
        rng = dict(enumerate(self.ranks.all_gather(rng_state())))
        state = {
            "step": self.step,
            "cpu_seconds": self.cpu_seconds,
            "settings": mask_settings(self.settings),
            "rng": rng,
        }
        parts = agree(self.ranks, lambda: gather_state(**self.parts))
        self._checkpoints.save(self.step, state | {"parts": parts})

    def _restore(self, path: Path, state: Mapping[str, Any]) -> None:
        # Check the state before anything is restored
        _check_entries(path, state)
        saved, step = state["settings"], state["step"]
        check_same_settings(saved, self.settings, self.defaults, extend=self._resume == "extend", where=self.directory)
        if step > self.total_steps:
            raise ValueError(
                f"total_steps={self.total_steps} must be at least step {step} of the checkpoint in "
                f"{self.directory}; raise the number of steps, or set resume=never to start over"
            )
        # Restore the parts and the random generators, on all ranks or on none
        agree(self.ranks, lambda: self._restore_parts(path, state))
        if isinstance(self._resume, int):  # before the logs lose the later steps
            self._checkpoints.clear(after=step)
        if self.ranks.is_main:
            with _named_restore(path):
                self.logger.load_state_dict(state["parts"]["logger"])
        if self._health is not None:
            saved_health = state["parts"].get("health")
            factor = self.ranks.broadcast(lambda: self._health.restore(step, saved_health))
            scale_learning_rates(self.parts.values(), factor)
        self.step, self._cpu_before = step, state["cpu_seconds"]
        self._print(f"resumed after step {self.step} from {self._checkpoints.directory}")

    def _restore_parts(self, path: Path, state: Mapping[str, Any]) -> None:
        """Restore the parts of this rank, except the run's own, and the random generators."""
        parts = {name: part for name, part in self.parts.items() if name not in _OWN_PARTS}
        saved = {name: part for name, part in state["parts"].items() if name not in _OWN_PARTS}
        if not self.ranks.is_main:  # other ranks have only some of the parts
            saved = {name: part for name, part in saved.items() if name in parts}
        with _named_restore(path):
            restore_state(saved, **parts)
            rng = state["rng"]
            set_rng_state(rng[self.ranks.rank if self.ranks.rank in rng else 0])


@contextmanager
def _named_restore(path: Path) -> Iterator[None]:
    """Replace an error of parts, which is of any type, by one that names the checkpoint and the remedy."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"cannot restore {path}: {reason}; remove it to continue from the checkpoint before it, or set "
            "resume=never to start over"
        ) from error


def _check_entries(path: Path, state: Mapping[str, Any]) -> None:
    """Raise a ``ValueError`` if the entries of a state are not those that a run saves."""
    wrong = sorted(set(_ENTRIES) ^ set(state), key=str)
    if wrong or path.stem != f"step_{state['step']:08}":
        raise ValueError(
            f"{path} is no checkpoint of a run, or a damaged one: see its entries {wrong or ['step']}; remove it to "
            "continue from the checkpoint before it, or set resume=never to start over"
        )


def _check_space(directory: Path, parts: Iterable[Any]) -> None:
    """Raise an ``OSError`` if the disk has less free space than the models and optimizers of a checkpoint take."""
    needed = sum(map(_bytes_of, parts))
    if (free := shutil.disk_usage(directory).free) < needed:
        raise OSError(
            f"directory={directory} has {free / 1e6:.1f} MB of free disk space, but a checkpoint takes at least "
            f"{needed / 1e6:.1f} MB; free space, or set another output directory"
        )


def _bytes_of(part: Any) -> int:
    """Return the bytes of the tensors of a model or optimizer; 0 for other parts."""
    if isinstance(part, torch.nn.Module):
        tensors = (t for t in part.state_dict(keep_vars=True).values() if isinstance(t, torch.Tensor))
        return sum({id(tensor): tensor.nbytes for tensor in tensors}.values())  # tied weights are stored once
    if isinstance(part, torch.optim.Adam):  # and AdamW; two moments, which exist only after the first step
        return 2 * sum(p.nbytes for group in part.param_groups for p in group["params"] if p.requires_grad)
    return 0
