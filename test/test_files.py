"""Writing of files: links, full and read-only disks, odd names, and folders in the way."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
from pathlib import Path

import pytest
import torch

from torchrl_rloo import files
from torchrl_rloo.collectors import ledger
from torchrl_rloo.diagnostics import write_report
from torchrl_rloo.rewards.quarantine import Quarantine
from torchrl_rloo.run import Checkpointer, Run, RunLogger
from torchrl_rloo.run.settings import write_settings


@pytest.fixture
def small_disk(tmp_path):
    """Real file system of 1 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", disk], capture_output=True).returncode:
        pytest.skip("only root can mount a file system")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def fill(disk: Path) -> Path:
    """Fill a disk to the last byte."""
    path = disk / "filler"
    with open(path, "wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError:
            return path


def log_step(directory: Path) -> None:
    with RunLogger(directory, loggers=["csv"], progress=False) as logger:
        logger.log(1, {"reward": 1.0}, timings={"t": 1.0})
        logger.log_table(1, "completions", [{"a": 1}])


WRITERS = {
    "checkpoint": ("step_00000001.pt", lambda d: Checkpointer(d).save(1, {"step": 1})),
    "settings": ("settings.json", lambda d: write_settings(d, {"a": 1})),
    "metrics": ("metrics.jsonl", log_step),
    "timings": ("timings.jsonl", log_step),
    "completions": ("completions.jsonl", log_step),
    "report": ("report.html", lambda d: write_report(d, history=[{"step": 1, "reward": 1.0}], summary={})),
    "curves": ("curves.png", lambda d: write_report(d, history=[{"step": 1, "reward": 1.0}], summary={})),
    "summary": ("summary.json", lambda d: write_report(d, history=[{"step": 1, "reward": 1.0}], summary={})),
    "atomic": ("text", lambda d: files.write_text(d / "text", "new")),
}
APPENDERS = {
    "append": ("lines", lambda d: files.append(d / "lines", b"new\n")),
    "quarantine": ("bad.jsonl", lambda d: Quarantine(d / "bad.jsonl").add("f", {})),
    "ledger": ("ledger.jsonl", lambda d: ledger.GroupLedger(None, audit=d / "ledger.jsonl")._write({"a": 1})),
}


@pytest.mark.parametrize("dangling", [False, True])
@pytest.mark.parametrize("name", WRITERS)
def test_a_link_at_a_file_is_replaced_and_its_target_kept(tmp_path, name, dangling):
    file, write = WRITERS[name]
    target, folder = tmp_path / "precious", tmp_path / "run"
    folder.mkdir()
    if not dangling:
        target.write_text("precious")
    (folder / file).symlink_to(target)
    write(folder)
    assert target.read_text() == "precious" if not dangling else not target.exists()
    assert not (folder / file).is_symlink() and (folder / file).stat().st_size > 0


@pytest.mark.parametrize("name", APPENDERS)
def test_a_link_at_an_appended_file_is_refused(tmp_path, name, caplog):
    file, write = APPENDERS[name]
    target = tmp_path / "precious"
    target.write_text("precious")
    (tmp_path / file).symlink_to(target)
    try:
        write(tmp_path)
    except (OSError, AttributeError) as error:
        caplog.text += str(error)
    assert target.read_text() == "precious"
