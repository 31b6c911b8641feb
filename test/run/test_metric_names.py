"""Names of metrics and tables from outside: nothing leaves the directory, collides or ends the run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from support.runs import read_jsonl
from torchrl_rloo.diagnostics import write_report
from torchrl_rloo.run import RunLogger
from torchrl_rloo.run.loggers import file_name

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
    "x.csv",
    "x.csv/y",
    "x.csv.csv",
    "x/y.csv/z",
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
    for _ in range(2):  # the second time it resumes and writes the records again
        with RunLogger(directory, loggers=["csv", "tensorboard"], progress=True, headline=HOSTILE) as logger:
            logger.log(1, metrics, timings={f"time/{name}": value for name, value in metrics.items()})
            logger.log_table(1, "../../table\0\ud800", [{name: name for name in HOSTILE}])
            state = logger.state_dict()
        logger = RunLogger(directory, loggers=["csv"], progress=False)
        logger.load_state_dict(state)
        logger.close()
        assert not outside(directory) and sorted(os.listdir(tmp_path)) == ["a"]
        values = [
            float(path.read_text().splitlines()[-1].split(",")[1])
            for path in (directory / "csv" / "scalars").rglob("*")
            if path.is_file()
        ]
        assert sorted(values) == sorted(2 * list(metrics.values()))  # one file for each metric and timing
    (record,) = read_jsonl(directory / "metrics.jsonl")
    assert list(record.values())[1:] == list(metrics.values()) and len(record) == len(metrics) + 1


def test_a_report_of_such_metrics_is_written(tmp_path):
    names = [name.encode("utf-8", "backslashreplace").decode() for name in HOSTILE]
    history = [{"step": step} | {name: float(step) for name in names} for step in (1, 2)]
    page = write_report(
        tmp_path, history=history, summary=dict.fromkeys(names, 1.0), panels=[("[!a]*",), ("a*",)], title="a\0%POLICY%"
    )
    assert "\0" not in page.read_text() and "<h1>a\ufffd%POLICY%</h1>" in page.read_text()


@given(st.lists(st.text(st.characters(), max_size=30) | st.sampled_from(HOSTILE), min_size=2, max_size=8, unique=True))
@settings(max_examples=200, deadline=None, derandomize=True)
@example(["a", "a/"])
@example(["A%2E", "A."])
def test_file_names_are_different_and_inside(names):
    found = [Path(f"/run/{file_name(name)}.csv") for name in names]
    assert len(set(found)) == len(names)
    for path in found:
        assert os.path.normpath(path) == str(path) and path.parts[:2] == ("/", "run")
        assert len(path.name) <= 255 and str(path).isascii() and str(path).isprintable() and len(str(path)) < 1100
        assert not set(path.parents) & set(found)


def test_usual_names_stay_as_they_are():
    for name in ("reward", "eval/pass@8", "count/tools/python_2/failed", "eval/tasks/gsm8k (hard)/greedy", "a.b-c"):
        assert file_name(name) == name


@pytest.mark.parametrize("metrics", [{1: 1.0}, {None: 1.0}, {"\ud800": 1.0, "\\ud800": 2.0}])
def test_names_that_are_no_text_or_collide_are_refused(tmp_path, metrics):
    with RunLogger(tmp_path, loggers=["csv"], progress=False) as logger:
        with pytest.raises(TypeError, match="which must be a text that differs from all others"):
            logger.log(1, metrics)


def test_many_metrics_keep_no_file_open(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    with RunLogger(tmp_path, loggers=["csv"], progress=False) as logger:
        logger.log(1, {f"score/{i}": 1.0 for i in range(2000)})
        assert len(os.listdir("/proc/self/fd")) < before + 20
    assert len(json.loads((tmp_path / "metrics.jsonl").read_text())) == 2001
