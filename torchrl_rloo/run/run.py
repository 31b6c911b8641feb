"""Management of a user's training loop: resume, stop, checkpoint, log, time."""

from __future__ import annotations

import atexit
import gc
import math
import shutil
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import torch

from torchrl_rloo.files import refuse_links
from torchrl_rloo.lookup import snake_case
from torchrl_rloo.run.checkpoint import Checkpointer, gather_state, restore_state, rng_state, set_rng_state
from torchrl_rloo.run.interrupt import StopSignal
from torchrl_rloo.run.lock import DirectoryLock
from torchrl_rloo.run.logging import RunLogger
from torchrl_rloo.run.settings import RESUME, check_same_settings, write_settings
from torchrl_rloo.run.timing import StepTimer, cpu_seconds

_ENTRIES = {  # entries of a checkpoint and their types
    "step": (int,),
    "cpu_seconds": (float, int),
    "settings": (dict, OrderedDict),
    "rng": (dict,),
    "parts": (dict,),
}


class Run:
    """Context manager of a user's training loop: resume, stop signal, checkpoints, log and timer.

    Entering restores the newest checkpoint. After each step, :meth:`steps` writes the logged metrics and, if it is due,
    a checkpoint. SIGINT or SIGTERM ends the loop after the current step, with a checkpoint.

    Inside the ``with`` block the directory is locked: another process or another run of this process cannot enter it.
    After the block, this and other processes may continue the run.

    Args:
        directory: directory of all files of the run.
        total_steps: number of the last step.
        parts: objects with ``state_dict`` and ``load_state_dict`` by name: model, optimizer, collector, ... A part that
            the run does not have is None.
        settings: configuration of the run in plain values. A resumed run must have the same.
        defaults: default values of the configuration, which replace settings that an older checkpoint lacks.
        resume: ``"auto"`` continues from the newest checkpoint. ``"extend"`` does so even if steps, engine, evaluation
            or logging differ. ``"never"`` starts over.
        checkpoint_every: steps between checkpoints. 0 writes one only at the end or after a stop signal.
        keep: number of newest checkpoints to keep.
        headline: metrics in the progress display.
        loggers: see :class:`RunLogger`.
        logger_kwargs: see :class:`RunLogger`.

    Attributes:
        step: current step, or the last one that is done. 0 before the first.
        metrics: metrics logged so far in the current step.
        logger: the :class:`RunLogger`.

    Raises:
        ValueError: if an argument is out of range. On entering, if the settings differ from those of the checkpoint,
            its step is above ``total_steps``, or its newest readable checkpoint has other entries.
        DirectoryInUseError: on entering, if another process or run writes to the directory.
        OSError: on entering, if the directory is not writable or has no space for a checkpoint.
        TypeError: if a part has no ``state_dict`` or is named ``"logger"``.

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
            raise ValueError(f"checkpoint_every={checkpoint_every} must be at least 0")
        if total_steps < 1:
            raise ValueError(f"total_steps={total_steps} must be at least 1")
        # Every part must have a state to save, or a resumed run would lose it
        for name, part in parts.items():
            if name == "logger" or (part is not None and not hasattr(part, "state_dict")):
                raise TypeError(
                    f"parts[{name!r}] is a {type(part).__name__}, but must have state_dict and load_state_dict and a "
                    "name other than 'logger'"
                )
        self.directory, self.total_steps, self.step = Path(directory), total_steps, 0
        self.settings, self.defaults = dict(settings or {}), dict(defaults or {})
        self.logger = RunLogger(
            directory, total_steps=total_steps, headline=headline, loggers=loggers, logger_kwargs=logger_kwargs
        )
        # Save the logger as a part, so that a resumed run continues its records
        self.parts = {name: part for name, part in parts.items() if part is not None} | {"logger": self.logger}
        self._resume, self._checkpoint_every = resume, checkpoint_every
        self._checkpoints = Checkpointer(self.directory / "checkpoints", keep=keep)
        self._timer, self._stop, self._stack = StepTimer(), StopSignal(), ExitStack()
        self.metrics: dict[str, float] = {}
        self._cpu_before, self._timings = 0.0, {}

    def __enter__(self) -> Run:
        with ExitStack() as stack:  # an error on the way unlocks the directory
            # Lock and check the directory
            stack.enter_context(DirectoryLock(self.directory, sole=True))
            stack.callback(self._checkpoints.close)
            self._checkpoints.lock()
            refuse_links(self.directory, ("checkpoints", "transcripts", "model"))
            _check_space(self.directory, self.parts.values())
            # Continue from the newest checkpoint
            if self._resume == "never":
                self._checkpoints.clear()
            elif (newest := self._checkpoints.newest()) is not None:
                self._restore(*newest)
            # Prepare the process
            gc.collect()
            gc.freeze()  # exclude models, prompts and libraries from collections at every step
            atexit.register(gc.unfreeze)  # otherwise libraries report leaks at exit
            stack.enter_context(self._stop)
            stack.enter_context(self.logger)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._stack.close()

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
            self._write()
            if self.is_due(self._checkpoint_every) or self.is_last or self._stop.requested:
                self._save()
            if self._stop.requested and not self.is_last:
                print(f"stopped after step {step}; rerun the same command to resume", flush=True)
                return

    def time(self, phase: str) -> AbstractContextManager[None]:
        """Measure the wall-clock time of a block in seconds and log it as ``time/<phase>``."""
        return self._timer(phase)

    def seconds(self, phase: str) -> float:
        """Return the wall-clock seconds of a phase in the current step."""
        return self._timer.seconds(phase)

    def log(self, metrics: Mapping[str, float], *, timings: Mapping[str, float] | None = None) -> None:
        """Add metrics to the current step.

        Args:
            metrics: numbers that are equal for equal seeds.
            timings: numbers that depend on the clock, written to a separate file.
        """
        self.metrics.update(metrics)
        self._timings.update(timings or {})

    def log_table(self, name: str, rows: list[Mapping[str, Any]]) -> None:
        """Log samples at the current step; see :meth:`RunLogger.log_table`."""
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
        # Restore the parts and the random generators
        try:
            restore_state(state["parts"], **self.parts)
            set_rng_state(state["rng"])
        except Exception as error:  # parts raise errors of any type
            reason = " ".join(str(error).split())
            raise ValueError(
                f"cannot restore {path}: {reason}; remove the file to continue from the checkpoint before it, or set "
                "resume=never to start over"
            ) from error
        self.step, self._cpu_before = step, state["cpu_seconds"]
        print(f"resumed after step {self.step} from {self._checkpoints.directory}", flush=True)


def _check_entries(path: Path, state: Mapping[str, Any]) -> None:
    """Raise a ``ValueError`` if the entries of a state are not those that a run saves."""
    wrong = sorted(set(_ENTRIES) ^ set(state), key=str)
    wrong += [name for name, types in _ENTRIES.items() if name in state and type(state[name]) not in types]
    if not wrong and path.stem != f"step_{state['step']:08d}":
        wrong = ["step"]
    if wrong:
        raise ValueError(
            f"{path} is no checkpoint of a run, or a damaged one: see its entries {wrong}; remove it to continue from "
            "the checkpoint before it, or set resume=never to start over"
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


def meters(*parts: Any) -> dict[str, float]:
    """Gather the metrics of parts: ``part.metrics()``, and ``part.counts`` as ``count/<part>/<name>``.

    Parts without either are ignored. Names of counters start with the name of their part, such as
    ``"tools/python/failed"``; the class's name is added to a name of one word. Two parts are never counted together:
    the names of a second one of the same kind get a number, such as ``feedback_2``.

    Raises:
        ValueError: if parts of different kinds have a counter of the same name.

    Example:
        >>> class Search:
        ...     counts = {"calls": 2}
        >>> meters(Search(), Search(), object())
        {'count/search/calls': 2, 'count/search_2/calls': 2}
    """
    found: dict[str, float] = {}
    kinds: Counter[str] = Counter()
    for part in {id(part): part for part in parts}.values():
        metrics: Callable[[], Mapping[str, float]] | None = getattr(part, "metrics", None)
        found.update(metrics() if callable(metrics) else {})
        if not hasattr(part, "counts"):
            continue
        # Number the parts of a kind in their order, whether or not they have counted anything yet
        kind = getattr(part, "part", type(part).__name__)
        kinds[kind] += 1
        number = "" if kinds[kind] == 1 else f"_{kinds[kind]}"
        for name, count in dict(part.counts).items():  # a copy, because other threads keep counting
            owner, _, rest = (name if "/" in name else f"{snake_case(kind)}/{name}").partition("/")
            if (key := f"count/{owner}{number}/{rest}") in found:
                raise ValueError(
                    f"{type(part).__name__} and a part before it both count {key!r}; rename one of the two"
                )
            found[key] = count
    return found
