"""Names of metrics and tables from outside: nothing leaves the directory, collides or ends the run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.runs import read_jsonl
from torchrl_rloo.diagnostics import write_report
from torchrl_rloo.run import RunLogger

HOSTILE = [
    "../../outside",
    "/outside",
    "..",
    ".",
    "",
    "/",
    "//",
    "a//b",
    "a/../b",
    "a/./b",
    "nul\0byte",
    "line\nbreak",
    "a" * 5000,
    "a/" * 3000,
    "\u00fc" * 200,
    "x",
    "\ud800 alone",
    "%2E%2E/a",
    "..%2fa",
    "\\..\\..\\a",
    "C:\\a",
    "$\\frac{",
    "_hidden",
    "\x1b[31m",
    "reward mean ($)",
    " ",
    "~/a",
    "-rf",
    "\u202eabc",
    "con",
    "*?[",
    ".lock",
    "a" * 250 + "/b",
]


def outside(directory: Path) -> list[Path]:
    return [path for path in directory.parent.rglob("*") if directory not in (path, *path.parents)]


def test_no_logger_writes_outside_or_mixes_metrics(tmp_path):
    directory = tmp_path / "a" / "run"
    metrics = {name: float(i) for i, name in enumerate(HOSTILE)}
    with RunLogger(directory, progress=True, headline=HOSTILE) as logger:
        logger.log(1, metrics, timings={f"time/{name}": value for name, value in metrics.items()})
        logger.log_table(1, "../../table\0\ud800", [{name: name for name in HOSTILE}])
        state = logger.state_dict()
    logger = RunLogger(directory, progress=False)
    logger.load_state_dict(state)
    logger.close()
    assert not outside(directory) and sorted(os.listdir(tmp_path)) == ["a"]
    (record,) = read_jsonl(directory / "metrics.jsonl")
    assert list(record.values())[1:] == list(metrics.values()) and len(record) == len(metrics) + 1


def test_a_report_of_such_metrics_is_written(tmp_path):
    names = [name.encode("utf-8", "backslashreplace").decode() for name in HOSTILE]
    history = [{"step": step} | {name: float(step) for name in names} for step in (1, 2)]
    page = write_report(
        tmp_path, history=history, summary=dict.fromkeys(names, 1.0), panels=[("[!a]*",), ("a*",)], title="a\0%POLICY%"
    )
    assert "\0" not in page.read_text() and "<h1>a\ufffd%POLICY%</h1>" in page.read_text()


@pytest.mark.parametrize("metrics", [{1: 1.0}, {None: 1.0}, {"\ud800": 1.0, "\\ud800": 2.0}])
def test_names_that_are_no_text_or_collide_are_refused(tmp_path, metrics):
    with RunLogger(tmp_path, loggers=[], progress=False) as logger:
        with pytest.raises(TypeError, match="which must be a text that differs from all others"):
            logger.log(1, metrics)
