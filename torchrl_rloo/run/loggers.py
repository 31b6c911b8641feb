"""TorchRL's loggers by name, with support for resumed runs."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from torchrl.record.loggers import MLFlowLogger, TensorboardLogger, WandbLogger
from torchrl.record.loggers.common import Logger
from torchrl.record.loggers.trackio import TrackioLogger

from torchrl_rloo.images.parts import image_label
from torchrl_rloo.images.store import ImageError, ImageStore

Records = Sequence[dict[str, Any]]
LOGGER_FILES = ("tensorboard", "mlflow", "mlflow.db")  # names in the directory that libraries write to


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


def log_images(logger: Logger, name: str, paths: Sequence[str], step: int) -> None:
    """Log images of a store to TensorBoard and W&B; other loggers have no images, and missing ones are left out."""
    for k, path in enumerate(paths):
        with suppress(ImageError):
            picture, name_of_image = ImageStore().load(path), f"{name}/{k}"
            if isinstance(logger, TensorboardLogger):
                logger.experiment.add_image(name_of_image, np.asarray(picture), global_step=step, dataformats="HWC")
            elif isinstance(logger, WandbLogger):
                image = importlib.import_module("wandb").Image(picture, caption=image_label(path))
                logger.experiment.log({name_of_image: image}, commit=False)  # the next metrics advance the step


def log_rows(logger: Logger, name: str, rows: Sequence[Mapping[str, Any]], step: int) -> None:
    """Log rows as a table of the logger, with a column ``step``; TensorBoard, which has no tables, gets text."""
    if isinstance(logger, TensorboardLogger):
        return logger.log_str(name, "\n\n---\n\n".join(map(markdown, rows)), step=step)
    columns = ["step", *dict.fromkeys(column for row in rows for column in row)]
    cells = [[_cell(({"step": step} | row).get(column)) for column in columns] for row in rows]
    if isinstance(logger, WandbLogger):
        table = importlib.import_module("wandb").Table(columns=columns, data=cells, allow_mixed_types=True)
        logger.experiment.log({name: table}, commit=False)  # the next metrics advance the step
    elif isinstance(logger, MLFlowLogger):  # appends to the table of earlier steps
        data = {column: [row[k] for row in cells] for k, column in enumerate(columns)}
        file = f"{re.sub(r'[^A-Za-z0-9_-]+', '_', name)}.json"
        importlib.import_module("mlflow").log_table(data, file, run_id=logger.experiment.info.run_id)
    elif isinstance(logger, TrackioLogger):
        data = [dict(zip(columns, row, strict=True)) for row in cells]
        logger.experiment.log({name: importlib.import_module("trackio").Table(data=data)}, step=step)


def _cell(value: Any) -> str | float | bool | None:
    return value if value is None or isinstance(value, (str, bool, int, float)) else as_text(value)


def as_text(value: Any) -> str:
    """Return a value of a table as text."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def markdown(row: Mapping[str, Any]) -> str:
    """Render a row for TensorBoard, with values as code blocks so that markup in a completion stays text."""
    fields = []
    for key, value in row.items():
        lines = as_text(value).split("\n")
        fields.append(f"**{key}**\n\n" + "\n".join(f"    {line}" for line in lines))
    return "\n\n".join(fields)


def _tensorboard(directory: Path, name: str, records: Records, kwargs: dict[str, Any]) -> Logger:
    purge_step = max((record["step"] for record in records), default=-1) + 1
    folder = "tensorboard" if name == directory.name else f"tensorboard/{name}"
    return ResumableTensorboardLogger(folder, str(directory), purge_step=purge_step, **kwargs)


def _wandb(directory: Path, name: str, records: Records, kwargs: dict[str, Any]) -> Logger:
    return WandbLogger(**{"exp_name": name, "log_dir": str(directory), **kwargs})


def _trackio(directory: Path, name: str, records: Records, kwargs: dict[str, Any]) -> Logger:
    return SteppedTrackioLogger(**{"exp_name": name, "project": "torchrl_rloo", **kwargs})


def _mlflow(directory: Path, name: str, records: Records, kwargs: dict[str, Any]) -> Logger:
    defaults = {"exp_name": directory.name, "tracking_uri": f"sqlite:///{directory / 'mlflow.db'}"}
    if "tracking_uri" not in kwargs:
        defaults["artifact_location"] = (directory / "mlflow").as_uri()
    logger = EndingMLFlowLogger(**{**defaults, **kwargs})
    if name != directory.name:
        importlib.import_module("mlflow").set_tag("mlflow.runName", name)
    return logger


_BUILDERS: dict[str, Callable[[Path, str, Records, dict[str, Any]], Logger]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "mlflow": _mlflow,
    "trackio": _trackio,
}
_EXTRAS = {"wandb": "loggers", "mlflow": "loggers", "trackio": "trackio"}


def check_loggers(names: Sequence[str]) -> None:
    """Raise unless every logger is known and its package is installed."""
    for name in names:
        if name not in _BUILDERS:
            raise ValueError(f"unknown logger {name!r}; valid: {sorted(_BUILDERS)}")
        if name in _EXTRAS and importlib.util.find_spec(name) is None:
            raise ImportError(f"logger {name!r} requires {name}; run: pip install 'torchrl_rloo[{_EXTRAS[name]}]'")


def build_logger(
    name: str, directory: Path, records: Records, kwargs: dict[str, Any], run_name: str | None = None
) -> Logger:
    """Open a logger that continues after the records of the run so far, each with ``step`` and values."""
    return _BUILDERS[name](directory, run_name or directory.name, records, kwargs)
