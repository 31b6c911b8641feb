"""Logs of a run: files that are equal for equal seeds, TorchRL's loggers, and a progress display."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrl.record.loggers.common import Logger

from torchrl_rloo.run.lock import DirectoryLock
from torchrl_rloo.run.loggers import LOGGER_FILES, as_text, build_logger, check_loggers, log_images, log_rows
from torchrl_rloo.run.progress import Progress
from torchrl_rloo.runtime.files import append, atomic_write, explained, make_folder, refuse_links, synced_size

_KINDS = ("metrics", "timings", "completions")
_RESERVED = ("step", "table")
Entry = Mapping[str, Any]  # step, metrics and timings
MakeDigest = Callable[[Sequence[Entry], Entry | None], str]
_RUN_NAME = re.compile(r"\w[\w .=,+-]{0,99}")
_SHOWN_ROWS = 2
_SHOWN_CHARACTERS = 240
_PER_RUN = 4  # digests
_MIN_STEPS, _STEPS = 10, 50  # fewest steps between two digests, and steps if their total is unknown
_SECONDS = 600.0  # longest time between two digests


class RunLogger:
    """Logger of a run that can continue from a checkpoint.

    It writes three files to ``directory``: ``metrics.jsonl`` and ``completions.jsonl``, which are byte-identical for
    equal seeds, and ``timings.jsonl`` for values that depend on the clock. A directory belongs to one run: the first
    entry overwrites these files unless :meth:`load_state_dict` was called before.

    Args:
        directory: directory of the files, created if necessary.
        loggers: any of ``"tensorboard"``, ``"wandb"``, ``"mlflow"`` and ``"trackio"``. The first entry opens them.
        progress: True shows one line that each step renews, False nothing. None shows such a line on a terminal, and
            otherwise about 20 plain lines per run.
        total_steps: number of the last step, for the display.
        headline: metrics and timings in the display, on the steps that have them.
        logger_kwargs: keyword arguments by logger name. By default W&B and MLflow start a new run in every process;
            ``{"wandb": {"id": "run-7", "project": "rloo"}}`` continues one.
        digest: function of the entries since the last text, and of the entry before them or None. The display shows
            its text about four times in a run, unless it is empty. None shows none.
        run_name: name of the run in all loggers. None takes that of the directory.

    Raises:
        ValueError: if a logger is unknown, ``run_name`` has other characters, or ``logger_kwargs`` names a logger that
            is not in ``loggers``.
        ImportError: if the package of a logger is missing.

    Example:
        >>> import tempfile
        >>> with RunLogger(tempfile.mkdtemp(), loggers=[], progress=False) as logger:
        ...     logger.log(1, {"reward": 0.5}, timings={"time/step": 1.9})
        >>> logger.history
        [{'step': 1, 'reward': 0.5}]
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        loggers: Sequence[str] = ("tensorboard",),
        progress: bool | None = None,
        total_steps: int | None = None,
        headline: Sequence[str] = ("reward", "eval/accuracy"),
        logger_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
        digest: MakeDigest | None = None,
        run_name: str | None = None,
    ) -> None:
        check_loggers(loggers)
        if run_name is not None and not _RUN_NAME.fullmatch(run_name):
            raise ValueError(f"run_name={run_name!r:.100} must have 1 to 100 letters, digits, spaces and _ . = , + -")
        self._run_name = run_name
        self._logger_kwargs = {name: dict(kwargs) for name, kwargs in (logger_kwargs or {}).items()}
        unused = sorted(set(self._logger_kwargs) - set(loggers))
        if unused:
            raise ValueError(f"logger_kwargs has arguments for {unused}, which loggers={list(loggers)} must contain")
        self.directory = Path(directory).absolute()
        make_folder(self.directory)
        self._lock: DirectoryLock | None = None
        self._logger_names = tuple(loggers)
        self._headline = tuple(headline)
        self._progress = Progress(progress, total_steps)
        self._digest = None if digest is None else Digest(digest, total_steps)
        self._records: dict[str, list[dict[str, Any]]] = {kind: [] for kind in _KINDS}
        self._loggers: list[Logger] | None = None

    @property
    def history(self) -> list[dict[str, Any]]:
        """Entries in order, each with ``step`` and metrics; NaN where a value was not finite."""
        return self._records["metrics"]

    @property
    def timings(self) -> list[dict[str, Any]]:
        """Entries in order, each with ``step`` and values that depend on the clock; NaN as in :attr:`history`."""
        return self._records["timings"]

    @property
    def tables(self) -> dict[str, list[dict[str, Any]]]:
        """Rows of every table by its name, each with the ``step`` at which it was logged."""
        tables: dict[str, list[dict[str, Any]]] = {}
        for record in self._records["completions"]:
            row = {key: value for key, value in record.items() if key != "table"}
            tables.setdefault(record["table"], []).append(row)
        return tables

    def log(self, step: int, metrics: Mapping[str, float], *, timings: Mapping[str, float] | None = None) -> None:
        """Log the metrics of a step.

        Args:
            step: number of the step.
            metrics: numbers or one-element tensors by name. They should be equal for equal seeds.
            timings: numbers that depend on the clock, such as seconds or tokens per second.

        Raises:
            TypeError: if a value is not a number.
            ValueError: if a name is ``step``.
        """
        values, times = _numbers(metrics, "metrics"), _numbers(timings or {}, "timings")
        self._open()
        self._append("metrics", [{"step": step, **_without_infinities(values)}])
        if times:
            self._append("timings", [{"step": step, **_without_infinities(times)}])
        for logger, name in zip(self._loggers, self._logger_names, strict=True):
            with explained(self.directory / name):
                logger.log_metrics({**values, **times}, step=step)
        shown = values | times
        self._progress.show(step, {name: shown[name] for name in self._headline if name in shown})
        if self._digest is not None and (text := self._digest.text({"step": step, **shown})):
            self._progress.write(text)

    def log_table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> str:
        """Log samples of the policy.

        Args:
            step: number of the step.
            name: name of the table, such as ``"completions"``.
            rows: one dict per sample with text, numbers, lists and dicts (chat messages). The names ``step`` and
                ``table`` are reserved. ``images`` are paths in a store; those of the first two rows go to the loggers.

        Returns:
            Shortened text of the first two rows, as the progress display prints it.

        Raises:
            TypeError: if a row contains a value that JSON does not support.
            ValueError: if a row has a column ``step`` or ``table``.
        """
        for row in rows:
            reserved = [key for key in _RESERVED if key in row]
            if reserved:
                raise ValueError(f"a row of table {name!r} has the reserved column {reserved[0]!r}; rename it")
        name = _encodable(name)
        plain = [{_encodable(str(key)): _plain(value, key) for key, value in row.items()} for row in rows]
        self._open()
        self._append("completions", [{"step": step, "table": name, **row} for row in plain])
        for logger in self._loggers:
            log_rows(logger, name, plain, step)
        if pictures := [path for row in plain[:_SHOWN_ROWS] for path in _paths(row)]:
            for logger in self._loggers:
                log_images(logger, f"{name}/images", list(dict.fromkeys(pictures)), step)
        rendering = _render(step, name, plain)
        self._progress.write(rendering)
        return rendering

    def write_line(self, text: str) -> None:
        """Print text next to the progress display."""
        self._progress.write(text)

    def state_dict(self) -> dict[str, int]:
        """Flush the files to disk and return their sizes in bytes."""
        for logger in self._loggers or ():
            logger.flush()
        if self._loggers is None:  # nothing logged yet
            return dict.fromkeys(_KINDS, 0)
        return {kind: synced_size(self._file(kind)) for kind in _KINDS}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore files and loggers to a checkpoint, and drop all later entries.

        Raises:
            ValueError: if a file is shorter than at the checkpoint, or damaged.
        """
        self._close_loggers()
        for kind in _KINDS:
            text = self._file(kind).read_bytes() if self._file(kind).is_file() else b""
            if len(text) < state[kind]:
                raise ValueError(
                    f"{self._file(kind)} has {len(text)} bytes, fewer than the {state[kind]} of the checkpoint; "
                    "restore it, or set resume=never to start over"
                )
            self._records[kind] = _parse_lines(self._file(kind), text[: state[kind]])
        for record in [*self._records["metrics"], *self._records["timings"]]:
            record.update({name: math.nan for name, value in record.items() if value is None})
        self._open()

    def close(self) -> None:
        """Show the last step and close the loggers."""
        self._progress.close()
        self._close_loggers()
        if self._lock is not None:
            self._lock.close()

    def __enter__(self) -> RunLogger:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _open(self) -> None:
        """Write the recorded entries to the files and open the loggers, once it is known whether the run resumes."""
        if self._loggers is not None:
            return
        self._lock = DirectoryLock(self.directory)
        refuse_links(self.directory, LOGGER_FILES, below=True)
        for kind in _KINDS:
            with atomic_write(self._file(kind)) as file:
                file.write("".join(map(_line, self._records[kind])).encode())
        records = [*self._records["metrics"], *self._records["timings"]]
        self._loggers = []
        for name in self._logger_names:
            with explained(self.directory / name):
                kwargs = self._logger_kwargs.get(name, {})
                self._loggers.append(build_logger(name, self.directory, records, kwargs, self._run_name))

    def _close_loggers(self) -> None:
        for logger in self._loggers or ():
            logger.close()
        self._loggers = None

    def _append(self, kind: str, records: list[dict[str, Any]]) -> None:
        self._records[kind].extend(records)
        append(self._file(kind), "".join(map(_line, records)).encode())

    def _file(self, kind: str) -> Path:
        return self.directory / f"{kind}.jsonl"


def _parse_lines(file: Path, content: bytes) -> list[dict[str, Any]]:
    try:
        lines = content.decode().split("\n")[:-1]  # splitlines would also split inside text
        records = [json.loads(line) for line in lines]
        if content[-1:] not in (b"", b"\n") or not all(
            isinstance(record, dict) and type(record["step"]) is int for record in records
        ):
            raise ValueError("a line is not a record of a step")
    except (ValueError, KeyError, RecursionError) as error:
        raise ValueError(f"{file} is damaged: {error}; restore it, or set resume=never to start over") from error
    return records


def _line(record: Mapping[str, Any]) -> str:
    finite = {key: None if isinstance(value, float) and math.isnan(value) else value for key, value in record.items()}
    return json.dumps(finite, ensure_ascii=False, allow_nan=False) + "\n"


def _numbers(values: Mapping[str, Any], argument: str) -> dict[str, float]:
    if "step" in values:
        raise ValueError(f"{argument} has the reserved name 'step'; rename it")
    numbers = {}
    for name, value in values.items():
        if not isinstance(name, str) or _encodable(name) in numbers:
            raise TypeError(f"{argument} has the name {name!r}, which must be a text that differs from all others")
        try:
            numbers[_encodable(name)] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"{argument}[{name!r}] must be a number, got {value!r}") from error
    return numbers


def _without_infinities(values: Mapping[str, float]) -> dict[str, float]:
    return {name: value if math.isfinite(value) else math.nan for name, value in values.items()}


def _plain(value: Any, place: str) -> Any:
    """Convert a value to JSON types; values that are not finite become None."""
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, str):
        return _encodable(value)
    if isinstance(value, Mapping):
        return {_encodable(str(key)): _plain(item, f"{place}[{key!r}]") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{place}[{index}]") for index, item in enumerate(value)]
    if hasattr(value, "tolist"):  # tensors and NumPy's arrays and scalars
        return _plain(value.tolist(), place)
    raise TypeError(f"column {place} has a {type(value).__name__}, but must have text, numbers, lists or dicts")


def _encodable(text: str) -> str:
    """Escape halves of surrogate pairs, to which sampled bytes may decode, because UTF-8 cannot encode them."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _paths(row: Mapping[str, Any]) -> list[str]:
    images = row.get("images")
    return [path for path in images if isinstance(path, str)] if isinstance(images, list) else []


def _render(step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [f"{name} at step {step} ({min(len(rows), _SHOWN_ROWS)} of {len(rows)} rows)"]
    for row in rows[:_SHOWN_ROWS]:
        width = max(map(len, row), default=0)
        lines += [f"  {key:<{width}}  {_one_line(as_text(value))}" for key, value in row.items()]
        lines.append("")
    return "\n".join(lines).rstrip("\n")


def _one_line(text: str) -> str:
    """Truncate text in the middle, and escape line breaks and control characters."""
    if len(text) > _SHOWN_CHARACTERS:
        half = _SHOWN_CHARACTERS // 2
        text = f"{text[:half]} ... {text[-half:]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


class Digest:
    """Text about the steps since the last text: at most four times in a run, at its end, and every ten minutes."""

    def __init__(self, make: MakeDigest, total_steps: int | None, clock: Callable[[], float] = time.monotonic):
        self._make, self._total, self._clock = make, total_steps, clock
        self._every = _STEPS if total_steps is None else max(_MIN_STEPS, total_steps // _PER_RUN)
        self._entries: list[Entry] = []
        self._before: Entry | None = None
        self._made_at = clock()

    def text(self, entry: Entry) -> str:
        """Take the entry of a step, and return the text if it is due, otherwise an empty one."""
        self._entries.append(entry)
        step = entry["step"]
        late = self._clock() - self._made_at >= _SECONDS
        if not (late or step == self._total or (step > 0 and step % self._every == 0)):
            return ""
        text = self._make(self._entries, self._before)
        self._entries, self._before, self._made_at = [], entry, self._clock()
        return text
