"""Writing of files: links, full and read-only disks, odd names, and folders in the way."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

from torchrl_rloo.collectors.ledger import GroupLedger
from torchrl_rloo.data import load_prompts
from torchrl_rloo.diagnostics import write_report
from torchrl_rloo.diagnostics.report import write_launch
from torchrl_rloo.envs.transforms.data import DataLoadingPrimer
from torchrl_rloo.modules import save_model
from torchrl_rloo.rewards.runner import Quarantine
from torchrl_rloo.run import Checkpointer, Run, RunLogger
from torchrl_rloo.run.settings import write_settings
from torchrl_rloo.runtime import files


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
    with RunLogger(directory, loggers=[], progress=False) as logger:
        logger.log(1, {"reward": 1.0}, timings={"t": 1.0})
        logger.log_table(1, "completions", [{"a": 1}])


WRITERS = {
    "checkpoint": ("step_00000001.pt", lambda d: Checkpointer(d).save(1, {"step": 1})),
    "settings": ("settings.json", lambda d: write_settings(d, {"a": 1})),
    "metrics": ("metrics.jsonl", log_step),
    "timings": ("timings.jsonl", log_step),
    "completions": ("completions.jsonl", log_step),
    "launch": ("launch.json", lambda d: write_launch(d, "run rloo")),
    "report": ("report.html", lambda d: write_report(d, history=[{"step": 1, "reward": 1.0}], summary={})),
    "summary": ("summary.json", lambda d: write_report(d, history=[{"step": 1, "reward": 1.0}], summary={})),
    "atomic": ("text", lambda d: files.write_text(d / "text", "new")),
}


def open_ledger(directory: Path) -> None:
    GroupLedger(DataLoadingPrimer(load_prompts([{"prompt": "?"}])), audit=directory / "ledger.jsonl")


APPENDERS = {
    "append": ("lines", lambda d: files.append(d / "lines", b"new\n")),
    "quarantine": ("bad.jsonl", lambda d: Quarantine(d / "bad.jsonl").add("f", {})),
    "ledger": ("ledger.jsonl", open_ledger),
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
    assert not target.exists() if dangling else target.read_text() == "precious"
    assert not (folder / file).is_symlink() and (folder / file).stat().st_size > 0


@pytest.mark.parametrize("kind", ["link", "dangling", "fifo", "folder", "device"])
@pytest.mark.parametrize("name", APPENDERS)
def test_what_is_no_regular_file_gets_no_lines(tmp_path, name, kind, caplog):
    file, write = APPENDERS[name]
    target, path = tmp_path / "precious", tmp_path / "run" / file
    path.parent.mkdir()
    target.write_text("precious")
    quarantine = Quarantine(path)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to({"link": target, "dangling": tmp_path / "nowhere", "device": "/dev/null"}[kind])
    if name == "quarantine":
        quarantine.add("f", {})
        message = caplog.text
    else:
        with pytest.raises(OSError) as error:
            write(path.parent)
        message = str(error.value)
    assert f"cannot write {path}: it is" in message and ("remove it" in message or "move it away" in message)
    assert target.read_text() == "precious" and not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("name", ["checkpoints", "transcripts", "model", "tensorboard", "tensorboard/a", "mlflow"])
def test_a_link_to_a_folder_is_refused_before_the_first_step(tmp_path, name):
    """Also where a library writes."""
    elsewhere, link = tmp_path / "elsewhere", tmp_path / "run" / name
    elsewhere.mkdir()
    link.parent.mkdir(parents=True)
    link.symlink_to(elsewhere)
    with pytest.raises(OSError, match=rf"cannot write \S+{name}: it is a symbolic link.*; remove it"):
        with Run(tmp_path / "run", 1, {}, checkpoint_every=1) as run:
            run.log({"a": 1.0})
            list(run.steps())
    assert not list(elsewhere.iterdir())


def test_links_in_the_folder_of_a_model_are_replaced(tmp_path, model, tokenizer):
    precious, folder = tmp_path / "precious", tmp_path / "model"
    precious.write_text("precious")
    folder.mkdir()
    names = ("config.json", "model.safetensors", "tokenizer.json", "generation_config.json", "chat_template.jinja")
    for name in names:
        (folder / name).symlink_to(precious)
    save_model(model, tokenizer, folder)
    assert precious.read_text() == "precious" and not any(path.is_symlink() for path in folder.iterdir())


def test_a_full_disk_keeps_the_older_checkpoint_and_the_next_save_works(small_disk):
    checkpointer = Checkpointer(small_disk / "c")
    checkpointer.save(1, {"step": 1})
    filler = fill(small_disk)
    for _ in range(2):
        with pytest.raises(OSError, match=r"^cannot write \S+step_00000002.pt: the disk is full; free space, or set a"):
            checkpointer.save(2, {"step": 2, "weights": torch.zeros(50_000)})
    assert checkpointer.load() == {"step": 1} and not list(small_disk.rglob("*.tmp"))
    filler.unlink()
    checkpointer.save(2, {"step": 2, "weights": torch.zeros(50_000)})
    assert checkpointer.load()["step"] == 2


def test_a_checkpoint_that_is_larger_than_the_disk_is_one_line(small_disk):
    """The writer of the format fails in the middle of a tensor."""
    with pytest.raises(OSError, match="the disk is full; free space") as error:
        Checkpointer(small_disk).save(1, {"weights": torch.zeros(2_000_000)})
    assert "\n" not in str(error.value) and error.value.errno


@pytest.mark.parametrize("name", sorted(WRITERS.keys() | {"append", "ledger"}))
def test_every_writer_names_the_full_disk(small_disk, name):
    file, write = (WRITERS | APPENDERS)[name]
    write(small_disk)
    fill(small_disk)
    with pytest.raises(OSError, match=rf"^cannot write {small_disk}\S*: the disk is full; free space, or set another"):
        for _ in range(1100):  # appended lines first fill the last block of their file
            write(small_disk)
    assert not list(small_disk.rglob("*.tmp"))


def test_a_line_that_does_not_fit_is_not_written_in_part(small_disk):
    path = small_disk / "lines"
    files.append(path, b"first\n")
    filler = fill(small_disk)
    with pytest.raises(OSError, match="the disk is full"):
        files.append(path, b"x" * 10_000)
    assert path.read_bytes() == b"first\n"
    filler.unlink()
    files.append(path, b"second\n")
    assert path.read_bytes() == b"first\nsecond\n"


def test_quarantine_writes_again_after_a_full_disk(small_disk, caplog):
    quarantine = Quarantine(small_disk / "bad.jsonl")
    quarantine.add("f", {"text": "first"})
    filler = fill(small_disk)
    for _ in range(50):
        quarantine.add("f", {"text": "x" * 5000})
    assert quarantine.lost["f"] == 50 and caplog.text.count("the disk is full") == 1
    filler.unlink()
    quarantine.add("f", {"text": "last"})
    texts = [json.loads(line)["text"] for line in (small_disk / "bad.jsonl").read_text().splitlines()]
    assert texts == ["first", "last"] and quarantine.lines["f"] == 2


def test_a_run_without_space_for_a_checkpoint_is_refused_before_the_first_step(small_disk):
    model = torch.nn.Linear(300, 300)  # 0.36 MB, and the moments of Adam twice as much
    parts = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    with Run(small_disk / "small", 1, {"model": model}, loggers=[]) as run:
        assert list(run.steps()) == [1]
    with pytest.raises(OSError, match=r"MB of free disk space, but a checkpoint takes at least 1.1 MB; free space"):
        Run(small_disk / "large", 1, parts, loggers=[]).__enter__()


@pytest.mark.parametrize("loggers", [[], ["tensorboard"]])
def test_a_run_whose_disk_fills_up_says_so_and_resumes(small_disk, loggers):
    model = torch.nn.Linear(100, 100)
    arguments = {"checkpoint_every": 1, "loggers": loggers}
    with pytest.raises(OSError, match=rf"^cannot write {small_disk}\S*: the disk is full; free space, or set another"):
        with Run(small_disk / "run", 900, {"model": model}, **arguments) as run:
            for step in run.steps():
                run.log({"weight": float(model.weight.detach().sum())})
                if step == 3:
                    fill(small_disk)
    assert Checkpointer(small_disk / "run" / "checkpoints").load()["step"] in (2, 3)
    assert not list(small_disk.rglob(".lock")) and not list(small_disk.rglob("*.tmp"))
    (small_disk / "filler").unlink()
    with Run(small_disk / "run", 5, {"model": model}, **arguments) as run:
        first, *_, last = run.steps()
    assert first in (3, 4) and last == 5
    assert [record["step"] for record in run.logger.history][:2] == [1, 2]


def test_a_disk_that_is_read_only_is_named_before_the_first_step(small_disk):
    directory = small_disk / "run"
    with Run(directory, 1, {}, loggers=[]) as run:
        list(run.steps())
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    for existing in (directory, small_disk / "new"):
        with pytest.raises(OSError, match=rf"^cannot write {existing}\S*: the file system is read-only; make it writ"):
            Run(existing, 2, {}, loggers=[]).__enter__()
    assert Checkpointer(directory / "checkpoints").load()["step"] == 1  # reading needs no lock


def test_a_file_in_the_place_of_a_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for directory in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OSError, match=rf"^cannot write {directory}: .*; move "):
            Run(directory, 1, {}, loggers=[])


@pytest.mark.parametrize("name", ["metrics.jsonl", "settings.json", "report.html", "text"])
def test_a_folder_in_the_place_of_a_file_is_named(tmp_path, name):
    write = next(write for file, write in WRITERS.values() if file == name)
    (tmp_path / name / "below").mkdir(parents=True)
    with pytest.raises(OSError, match=rf"^cannot write {tmp_path / name}: it is a folder; move it away"):
        write(tmp_path)
    assert (tmp_path / name / "below").is_dir() and not list(tmp_path.rglob("*.tmp"))


@pytest.mark.skipif(os.geteuid() != 0, reason="changes to another user")
def test_a_directory_without_rights_is_named():
    with tempfile.TemporaryDirectory() as folder:  # every folder above it can be entered by all users
        os.chmod(folder, 0o555)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.setuid(65534)
                Checkpointer(folder).save(1, {})
            except OSError as error:
                code = 0 if "permission denied; make it writable for this user" in str(error) else 2
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0


def test_an_interrupted_write_keeps_the_file_and_its_own_error(tmp_path):
    path = files.write_text(tmp_path / "text", "old")
    for fault in (KeyboardInterrupt, ZeroDivisionError, FileNotFoundError):
        with pytest.raises(fault), files.atomic_write(path) as file:
            file.write(b"new")
            raise fault("own")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["text"]


def test_files_have_the_rights_of_the_umask(tmp_path):
    previous = os.umask(0o027)
    try:
        files.append(tmp_path / "lines", b"")
        assert files.write_text(tmp_path / "text", "").stat().st_mode & 0o777 == 0o640
        assert (tmp_path / "lines").stat().st_mode & 0o777 == 0o640
    finally:
        os.umask(previous)


def test_writes_at_the_same_time_have_names_of_their_own(tmp_path):
    with files.atomic_write(tmp_path / "a") as first, files.atomic_write(tmp_path / "b") as second:
        first.write(b"first")
        second.write(b"second")
    assert (tmp_path / "a").read_text() == "first" and (tmp_path / "b").read_text() == "second"


def test_only_temporary_files_are_removed(tmp_path):
    kept = ["incomplete-1.tmp", ".incomplete", ".incomplete-1.tmp.pt", "step_00000001.pt", ".incomplete-2.tmp"]
    for name in kept[:-1]:
        (tmp_path / name).write_text("")
    (tmp_path / kept[-1]).mkdir()  # a folder is somebody's
    (tmp_path / ".incomplete-3.tmp").symlink_to("step_00000001.pt")
    (tmp_path / ".incomplete-4-ff.tmp").write_text("")
    (tmp_path / ".incomplete.tmp").write_text("")
    files.remove_temporaries(tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted(kept)
