"""The record of a run: files that are the same for the same seed, TorchRL's loggers, and a progress display."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrl.record.loggers.common import Logger

from torchrl_rloo.run.atomic import atomic_write, synced_size
from torchrl_rloo.run.loggers import build_logger, check_loggers
from torchrl_rloo.run.progress import make_progress

_KINDS = ("metrics", "timings", "completions")
_RESERVED = ("step", "table")
_SHOWN_ROWS = 2
_SHOWN_CHARACTERS = 240


class RunLogger:
    """Writes what a run reports, and goes on where a checkpoint left off.

    In ``directory`` it writes ``metrics.jsonl`` and ``completions.jsonl``, which two runs with the same seed write
    byte for byte alike, and ``timings.jsonl``, which holds whatever depends on the clock. A directory belongs to one
    run: unless :meth:`load_state_dict` comes first, the first entry starts these files anew.

    Args:
        directory: where the files go; made if it does not exist.
        loggers: any of ``"tensorboard"``, ``"csv"``, ``"wandb"`` and ``"mlflow"``. They are opened by the first entry.
        progress: ``None``: a bar on a terminal, otherwise about 20 plain lines in the run. ``True``: the bar anywhere.
            ``False``: nothing.
        total_steps: number of the last step, for the display.
        headline: metrics and timings to show in the display, on the steps that have them.
        logger_kwargs: keyword arguments for the loggers, by logger name. W&B and MLflow start a new run in every
            process unless told otherwise here, e.g. ``{"wandb": {"id": "run-7", "project": "rloo"}}``.

    Raises:
        ValueError: if a logger's name is unknown, or ``logger_kwargs`` names one that is not among ``loggers``.
        ImportError: if the package of a logger is missing.

    Example:
        >>> import tempfile
        >>> with RunLogger(tempfile.mkdtemp(), loggers=["csv"], progress=False) as logger:
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
    ) -> None:
        check_loggers(loggers)
        self._logger_kwargs = {name: dict(kwargs) for name, kwargs in (logger_kwargs or {}).items()}
        unused = sorted(set(self._logger_kwargs) - set(loggers))
        if unused:
            raise ValueError(f"logger_kwargs has arguments for {unused}, but loggers is {list(loggers)}.")
        self.directory = Path(directory).absolute()
        self.directory.mkdir(parents=True, exist_ok=True)
        self._logger_names = tuple(loggers)
        self._headline = tuple(headline)
        self._progress = make_progress(progress, total_steps)
        self._records: dict[str, list[dict[str, Any]]] = {kind: [] for kind in _KINDS}
        self._loggers: list[Logger] | None = None

    @property
    def history(self) -> list[dict[str, Any]]:
        """Every entry's ``step`` and metrics, in order; NaN where a value was not finite."""
        return self._records["metrics"]

    @property
    def tables(self) -> dict[str, list[dict[str, Any]]]:
        """The rows of every table by its name, each row with the ``step`` it was logged at."""
        tables: dict[str, list[dict[str, Any]]] = {}
        for record in self._records["completions"]:
            row = {key: value for key, value in record.items() if key != "table"}
            tables.setdefault(record["table"], []).append(row)
        return tables

    def log(self, step: int, metrics: Mapping[str, float], *, timings: Mapping[str, float] | None = None) -> None:
        """Records the metrics of a step.

        Args:
            step: the step.
            metrics: numbers (one-element tensors too) by name; they should be the same whenever the run is repeated.
            timings: numbers that depend on the clock: seconds, tokens per second.

        Raises:
            TypeError: if a value is not a number.
            ValueError: if one is called ``step``.
        """
        values, times = _numbers(metrics, "metrics"), _numbers(timings or {}, "timings")
        self._open()
        self._append("metrics", [{"step": step, **_without_infinities(values)}])
        if times:
            self._append("timings", [{"step": step, **_without_infinities(times)}])
        for logger in self._loggers:
            logger.log_metrics({**values, **times}, step=step)
        shown = values | times
        self._progress.show(step, {name: shown[name] for name in self._headline if name in shown})

    def log_table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> str:
        """Records samples of what the policy wrote.

        Args:
            step: the step.
            name: the table's name, e.g. ``"completions"``.
            rows: one dict per sample: text, numbers, lists and dicts (chat messages). ``step`` and ``table`` are taken.

        Returns:
            The first two rows in short, as the progress display printed them.

        Raises:
            TypeError: if a row holds something that JSON cannot.
            ValueError: if a row has a column called ``step`` or ``table``.
        """
        for row in rows:
            taken = [key for key in _RESERVED if key in row]
            if taken:
                raise ValueError(f"A row of table {name!r} has the column {taken[0]!r}; rename it, that name is taken.")
        plain = [{str(key): _plain(value, key) for key, value in row.items()} for row in rows]
        self._open()
        self._append("completions", [{"step": step, "table": name, **row} for row in plain])
        for logger in self._loggers:
            if hasattr(logger, "log_str"):
                logger.log_str(name, "\n\n---\n\n".join(_markdown(row) for row in plain), step=step)
        rendering = _render(step, name, plain)
        self._progress.write(rendering)
        return rendering

    def state_dict(self) -> dict[str, int]:
        """Return the size of each file in bytes; what it names is on the disk."""
        for logger in self._loggers or ():
            logger.flush()
        if self._loggers is None:  # nothing logged yet
            return dict.fromkeys(_KINDS, 0)
        return {kind: synced_size(self._file(kind)) for kind in _KINDS}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Take the run back to a checkpoint: drop what was written after it from files and loggers.

        Raises:
            ValueError: if a file is shorter than it was at the checkpoint.
        """
        self._close_loggers()
        for kind in _KINDS:
            text = self._file(kind).read_bytes() if self._file(kind).is_file() else b""
            if len(text) < state[kind]:
                raise ValueError(
                    f"{self._file(kind)} has {len(text)} bytes, fewer than the {state[kind]} of the checkpoint: put it "
                    "back, or set resume=never to start over"
                )
            lines = text[: state[kind]].decode().split("\n")[:-1]  # text has other breaks
            self._records[kind] = [json.loads(line) for line in lines]
        for record in [*self._records["metrics"], *self._records["timings"]]:
            record.update({name: math.nan for name, value in record.items() if value is None})
        self._open()

    def close(self) -> None:
        """Shows the last step and closes the loggers."""
        self._progress.close()
        self._close_loggers()

    def __enter__(self) -> RunLogger:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _open(self) -> None:
        """Brings the files to what is recorded and opens the loggers; not before it is known whether a run resumes."""
        if self._loggers is not None:
            return
        for kind in _KINDS:
            with atomic_write(self._file(kind)) as file:
                file.write("".join(map(_line, self._records[kind])).encode())
        records = [*self._records["metrics"], *self._records["timings"]]
        self._loggers = [
            build_logger(name, self.directory, records, self._logger_kwargs.get(name, {}))
            for name in self._logger_names
        ]

    def _close_loggers(self) -> None:
        for logger in self._loggers or ():
            logger.close()
        self._loggers = None

    def _append(self, kind: str, records: list[dict[str, Any]]) -> None:
        self._records[kind].extend(records)
        with open(self._file(kind), "ab") as file:
            file.write("".join(map(_line, records)).encode())

    def _file(self, kind: str) -> Path:
        return self.directory / f"{kind}.jsonl"


def _line(record: Mapping[str, Any]) -> str:
    finite = {key: None if isinstance(value, float) and math.isnan(value) else value for key, value in record.items()}
    return json.dumps(finite, ensure_ascii=False, allow_nan=False) + "\n"


def _numbers(values: Mapping[str, Any], argument: str) -> dict[str, float]:
    if "step" in values:
        raise ValueError(f"{argument} has the name 'step'; rename it, that name is taken.")
    numbers = {}
    for name, value in values.items():
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"{argument}[{name!r}] must be a number, got {value!r}.") from error
    return numbers


def _without_infinities(values: Mapping[str, float]) -> dict[str, float]:
    return {name: value if math.isfinite(value) else math.nan for name, value in values.items()}


def _plain(value: Any, place: str) -> Any:
    """The value in types that JSON has; what is not finite becomes None."""
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, str):
        # A sampled byte sequence may decode to half a surrogate pair, which no file can take.
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{place}[{key!r}]") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{place}[{index}]") for index, item in enumerate(value)]
    if hasattr(value, "tolist"):  # tensors and NumPy's arrays and scalars
        return _plain(value.tolist(), place)
    raise TypeError(f"The column {place} holds a {type(value).__name__}; text, numbers, lists and dicts can be logged.")


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _markdown(row: Mapping[str, Any]) -> str:
    """One row for TensorBoard: code blocks, so that markup in a completion stays text."""
    fields = []
    for key, value in row.items():
        lines = _text(value).split("\n")
        fields.append(f"**{key}**\n\n" + "\n".join(f"    {line}" for line in lines))
    return "\n\n".join(fields)


def _render(step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [f"{name} at step {step} ({min(len(rows), _SHOWN_ROWS)} of {len(rows)} rows)"]
    for row in rows[:_SHOWN_ROWS]:
        width = max(map(len, row), default=0)
        lines += [f"  {key:<{width}}  {_one_line(_text(value))}" for key, value in row.items()]
        lines.append("")
    return "\n".join(lines).rstrip("\n")


def _one_line(text: str) -> str:
    """Text cut in the middle, with line breaks and control characters as escapes: a completion may hold any."""
    if len(text) > _SHOWN_CHARACTERS:
        half = _SHOWN_CHARACTERS // 2
        text = f"{text[:half]} ... {text[-half:]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
