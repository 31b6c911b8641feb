"""TorchRL's loggers by name, with support for resumed runs."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from torchrl.record.loggers import CSVLogger, MLFlowLogger, TensorboardLogger, WandbLogger
from torchrl.record.loggers.common import Logger
from torchrl.record.loggers.csv import CSVExperiment
from torchrl.record.loggers.trackio import TrackioLogger

from torchrl_rloo.runtime.files import append, make_folder

Records = Sequence[dict[str, Any]]
LOGGER_FILES = ("tensorboard", "csv", "mlflow", "mlflow.db")  # names in the directory that libraries write to
_KEPT = " @+=,:()[]"  # characters of metric names that files keep, in addition to letters, digits and _.-~
_LONGEST_PART, _LONGEST_NAME = 200, 1000  # bytes of a file's name and of its path


class ResumableTensorboardLogger(TensorboardLogger):
    """TorchRL's TensorBoard logger plus ``purge_step``: drops points that a killed run logged after its checkpoint."""

    def __init__(self, exp_name: str, log_dir: str, *, purge_step: int, **writer_kwargs: Any) -> None:
        self._writer_kwargs = {"purge_step": purge_step, **writer_kwargs}
        super().__init__(exp_name=exp_name, log_dir=log_dir)

    def _create_experiment(self):
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(log_dir=str(Path(self.log_dir) / self.exp_name), **self._writer_kwargs)

    def log_str(self, name: str, value: str, step: int) -> None:
        self.experiment.add_text(name, value, global_step=step)


class EndingMLFlowLogger(MLFlowLogger):
    """TorchRL's MLflow logger, which here also ends its run at ``close``, so that the process can start another."""

    def shutdown(self, timeout: float | None = None) -> None:
        import mlflow

        super().shutdown(timeout)
        mlflow.end_run()


class SteppedTrackioLogger(TrackioLogger):
    """TorchRL's trackio logger, which here sends the metrics of a step in one call."""

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None, **kwargs: Any) -> dict[str, Any]:
        self.experiment.log(dict(metrics), step=step)
        return metrics


def file_name(metric: str) -> str:
    """Return a relative path without suffix for a metric, different for each and inside its folder.

    Usual names are unchanged. Other characters are percent-encoded; a long name is cut and gets a hash.

    Example:
        >>> file_name("eval/pass@8"), file_name("../a\\0"), file_name("/x.csv/y")
        ('eval/pass@8', '%2E%2E/a%00', '%/x%2Ecsv/y')
    """
    parts = [quote(part, safe=_KEPT, errors="surrogatepass") for part in metric.split("/")]
    parts = [part.replace(".", "%2E") if part in (".", "..") else part or "%" for part in parts]
    # A folder must not have the name of another metric's file
    parts[:-1] = [part[:-4] + "%2Ecsv" if part.endswith(".csv") else part for part in parts[:-1]]
    name = "/".join(parts)
    if len(name) <= _LONGEST_NAME and max(map(len, parts)) <= _LONGEST_PART:
        return name
    digest = hashlib.sha256(metric.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{quote(name, safe='%')[:100]}-{digest[:32]}"


class SafeCSVExperiment(CSVExperiment):
    """TorchRL's CSV files, which here stay inside their folder for any name, follow no link and stay closed."""

    def add_scalar(self, name: str, value: float, global_step: int | None = None) -> None:
        path = Path(self.log_dir, "scalars", f"{file_name(name)}.csv")
        make_folder(path.parent)
        append(path, f"{global_step},{float(value)}\n".encode())


class SafeCSVLogger(CSVLogger):
    """TorchRL's CSV logger with :class:`SafeCSVExperiment`."""

    def _create_experiment(self) -> CSVExperiment:
        return SafeCSVExperiment(str(Path(self.log_dir) / self.exp_name))


def _tensorboard(directory: Path, records: Records, kwargs: dict[str, Any]) -> Logger:
    purge_step = max((record["step"] for record in records), default=-1) + 1
    return ResumableTensorboardLogger("tensorboard", str(directory), purge_step=purge_step, **kwargs)


def _csv(directory: Path, records: Records, kwargs: dict[str, Any]) -> Logger:
    # TorchRL's logger appends to existing files: remove them and write the records of this run again.
    if (directory / "csv" / "scalars").is_dir():  # removal of a FIFO would block
        shutil.rmtree(directory / "csv" / "scalars")
    logger = SafeCSVLogger("csv", str(directory), **kwargs)
    for record in records:
        logger.log_metrics({name: value for name, value in record.items() if name != "step"}, step=record["step"])
    return logger


def _wandb(directory: Path, records: Records, kwargs: dict[str, Any]) -> Logger:
    return WandbLogger(**{"exp_name": directory.name, "log_dir": str(directory), **kwargs})


def _trackio(directory: Path, records: Records, kwargs: dict[str, Any]) -> Logger:
    return SteppedTrackioLogger(**{"exp_name": directory.name, "project": "torchrl_rloo", **kwargs})


def _mlflow(directory: Path, records: Records, kwargs: dict[str, Any]) -> Logger:
    defaults = {"exp_name": directory.name, "tracking_uri": f"sqlite:///{directory / 'mlflow.db'}"}
    if "tracking_uri" not in kwargs:
        defaults["artifact_location"] = (directory / "mlflow").as_uri()
    return EndingMLFlowLogger(**{**defaults, **kwargs})


_BUILDERS: dict[str, Callable[[Path, Records, dict[str, Any]], Logger]] = {
    "tensorboard": _tensorboard,
    "csv": _csv,
    "wandb": _wandb,
    "mlflow": _mlflow,
    "trackio": _trackio,
}
_EXTRAS = {"wandb": "loggers", "mlflow": "loggers", "trackio": "trackio"}


def check_loggers(names: Sequence[str]) -> None:
    """Check that every logger is known and its package is installed.

    Raises:
        ValueError: if a name is not tensorboard, csv, wandb, mlflow or trackio.
        ImportError: if the package of a logger is missing.
    """
    for name in names:
        if name not in _BUILDERS:
            raise ValueError(f"unknown logger {name!r}; valid: {sorted(_BUILDERS)}")
        if name in _EXTRAS and importlib.util.find_spec(name) is None:
            raise ImportError(f"logger {name!r} requires {name}; run: pip install 'torchrl_rloo[{_EXTRAS[name]}]'")


def build_logger(name: str, directory: Path, records: Records, kwargs: dict[str, Any]) -> Logger:
    """Open a logger that continues after ``records``.

    Args:
        name: name that :func:`check_loggers` accepts.
        directory: absolute path of the run's directory.
        records: entries of the run so far, each a dict of ``step`` and values.
        kwargs: keyword arguments of the logger.
    """
    return _BUILDERS[name](directory, records, kwargs)
