"""Report of a run, rewritten while it continues."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchrl_rloo.diagnostics.metrics import DEFINITIONS
from torchrl_rloo.diagnostics.model_card import write_model_card
from torchrl_rloo.diagnostics.report import write_launch, write_report


class RunReport:
    """Report of a :class:`~torchrl_rloo.run.Run`: rewritten every few steps, and at its end.

    Args:
        run: the run, which other ranks than rank 0 also have; only rank 0 writes.
        command: command line of the run.

    Example::

        with Run(directory, 100, parts) as run:
            report = RunReport(run, "python loop.py")
            for step in run.steps():
                ...
                report.refresh()
        report.write(run.summary("reward"))
    """

    def __init__(self, run: Any, command: str):
        self.run, self.command = run, command
        if run.ranks.is_main:
            write_launch(run.directory, command)

    def refresh(self) -> None:
        """Rewrite the page of an unfinished run if it is due: less often as the run gets longer."""
        run = self.run
        if run.ranks.is_main and run.logger.history and run.is_due(max(5, run.step // 50)):
            self.write({}, finished=False)

    def write(self, summary: Mapping[str, Any], **options: Any) -> Path:
        """Write the report on rank 0, with a card of the saved model if the run has finished, and return its page.

        Args:
            summary: key figures by name.
            **options: further arguments of :func:`write_report`.
        """
        run = self.run
        shared = {"history": run.logger.history, "summary": summary, "settings": run.settings, "command": self.command}
        if run.finished and (run.directory / "model").is_dir():
            write_model_card(run.directory / "model", defaults=run.defaults, **shared)
        tables = {"timings": run.logger.timings, "tables": run.logger.tables, "definitions": DEFINITIONS}
        return write_report(run.directory, **shared, **tables, **options)
