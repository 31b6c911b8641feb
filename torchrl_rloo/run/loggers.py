"""TorchRL's loggers by name, with support for resumed runs."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torchrl.record.loggers import CSVLogger, MLFlowLogger, TensorboardLogger, WandbLogger
from torchrl.record.loggers.common import Logger

Records = Sequence[dict[str, Any]]


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


def _tensorboard(directory: Path, records: Records, kwargs: dict[str, Any]) -> Logger:
    purge_step = max((record["step"] for record in records), default=-1) + 1
    return ResumableTensorboardLogger("tensorboard", str(directory), purge_step=purge_step, **kwargs)


def _csv(directory: Path, records: Records, kwargs: dict[str, Any]) -> Logger:
    # TorchRL's logger appends to existing files: remove them and write the records of this run again.
    shutil.rmtree(directory / "csv" / "scalars", ignore_errors=True)
    logger = CSVLogger("csv", str(directory), **kwargs)
    for record in records:
        logger.log_metrics({name: value for name, value in record.items() if name != "step"}, step=record["step"])
    return logger


def _wandb(directory: Path, records: Records, kwargs: dict[str, Any]) -> Logger:
    return WandbLogger(**{"exp_name": directory.name, "log_dir": str(directory), **kwargs})


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
}
_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}


def check_loggers(names: Sequence[str]) -> None:
    """Check that every logger is known and its package is installed.

    Raises:
        ValueError: if a name is not tensorboard, csv, wandb or mlflow.
        ImportError: if the package of a logger is missing.
    """
    for name in names:
        if name not in _BUILDERS:
            raise ValueError(f"unknown logger {name!r}; valid: {sorted(_BUILDERS)}")
        package = _PACKAGES.get(name)
        if package is not None and importlib.util.find_spec(package) is None:
            raise ImportError(f"logger {name!r} requires the package {package}; run: pip install {package}")


def build_logger(name: str, directory: Path, records: Records, kwargs: dict[str, Any]) -> Logger:
    """Open a logger that continues after ``records``.

    Args:
        name: name that :func:`check_loggers` accepts.
        directory: absolute path of the run's directory.
        records: entries of the run so far, each a dict of ``step`` and values.
        kwargs: keyword arguments of the logger.
    """
    return _BUILDERS[name](directory, records, kwargs)
