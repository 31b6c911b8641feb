"""Lock of an output directory: processes, forks, kills, and runs of one process."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import platform
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch

from support.processes import wait_until_gone
from support.waiting import PATIENCE, wait_until
from torchrl_rloo.run import Checkpointer, Run, RunLogger, lock

HOLD = """
import os, sys, time
from torchrl_rloo.run import Run
with Run(sys.argv[1], 3, {}, loggers=[]) as run:
    for step in run.steps():
        print(os.getpid(), flush=True)
        child = os.fork() if "fork" in sys.argv else 1
        if child == 0:
            time.sleep(600)
        if "end" not in sys.argv:
            time.sleep(600)
"""
ENTER = """
import sys
from torchrl_rloo.run import Run
with Run(sys.argv[1], 3, {}, loggers=[]) as run:
    for step in run.steps():
        run.log({"step_done": step})
print("entered")
"""


@pytest.fixture
def holder(tmp_path, fork_server):
    """``holder(*words)``: a process in a step of a run, and its id."""
    started = []

    def start(*words: str):
        process = fork_server.start(HOLD, [tmp_path, *words])
        started.append(process)
        wait_until(lambda: process.stdout.count("\n"), what="the first step")
        return process, int(process.stdout.split()[0])

    yield start
    for process in started:
        process.kill()


def test_a_second_process_is_refused_with_the_name_of_the_first(tmp_path, holder, fork_server):
    _, pid = holder()
    before = sorted(tmp_path.rglob("*"))
    done = fork_server.run(ENTER, [tmp_path])
    assert done.returncode == 1 and "entered" not in done.stdout
    line = done.stderr.strip().splitlines()[-1]
    assert f"directory={tmp_path} is in use by process {pid} on {platform.node()} since 20" in line
    assert "set another directory" in line and sorted(tmp_path.rglob("*")) == before


def test_the_end_of_a_run_frees_its_directory(tmp_path, fork_server):
    for _ in range(2):
        done = fork_server.run(ENTER, [tmp_path])
        assert done.returncode == 0, done.stderr
    assert not list(tmp_path.rglob(".lock")) and not list(tmp_path.rglob("*.tmp"))


def test_the_lock_of_a_killed_run_is_taken_over(tmp_path, holder, fork_server):
    process, pid = holder()
    (tmp_path / ".incomplete-1-aa.tmp").write_text("left")
    (tmp_path / "checkpoints" / ".incomplete-1-bb.tmp").write_text("left")
    (tmp_path / "transcripts").mkdir()
    (tmp_path / "transcripts" / ".incomplete-1-cc.tmp").write_text("left")
    process.kill()
    wait_until_gone(pid)
    done = fork_server.run(ENTER, [tmp_path])
    assert done.returncode == 0 and "entered" in done.stdout, done.stderr
    assert "in use" not in done.stderr and not list(tmp_path.rglob("*.tmp"))


def test_a_forked_child_does_not_keep_the_lock_of_a_killed_run(tmp_path, holder, fork_server):
    _, pid = holder("fork")
    os.kill(pid, signal.SIGKILL)  # the child, in another position of the same loop, lives
    wait_until_gone(pid)
    done = fork_server.run(ENTER, [tmp_path])
    assert done.returncode == 0 and "entered" in done.stdout, done.stderr


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver", "program"])
def test_children_do_not_keep_the_lock(tmp_path, method):
    with lock.DirectoryLock(tmp_path):
        if method == "program":
            child = subprocess.Popen(["sleep", "600"], close_fds=False)
        else:
            child = multiprocessing.get_context(method).Process(target=time.sleep, args=(600,), daemon=True)
            child.start()
        assert _is_locked(tmp_path)
    try:
        wait_until(lambda: not _is_locked(tmp_path))
    finally:
        child.kill()
        child.wait() if method == "program" else child.join()


def test_a_forked_child_is_refused_while_its_parent_writes(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"step": 1})
    child = os.fork()
    if child == 0:
        code = 3
        try:
            checkpointer.save(2, {"step": 2})
        except lock.DirectoryInUseError:
            code = 0
        finally:
            checkpointer.close()  # must not free the lock of the parent
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert checkpointer.steps() == [1] and _is_locked(tmp_path)


def _is_locked(directory: Path) -> bool:
    """Return whether a process other than this one holds or would be refused the lock."""
    with open(directory / ".lock", "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


NATIVE_FORK = """
import ctypes, os, sys, time
from torchrl_rloo.run.lock import DirectoryLock
lock = DirectoryLock(sys.argv[1])
child = ctypes.CDLL(None).fork()  # runs none of Python's hooks
if child == 0:
    time.sleep(600)
print(os.getpid(), child, flush=True)
time.sleep(600)
"""


def test_a_child_that_keeps_the_lock_after_the_end_is_told(tmp_path, fork_server):
    process = fork_server.start(NATIVE_FORK, [tmp_path])
    pid, child = map(int, wait_until(lambda: process.stdout.split()))
    os.kill(pid, signal.SIGKILL)
    wait_until_gone(pid)
    try:
        with pytest.raises(lock.DirectoryInUseError, match=f"process {pid} .* has ended and left a child that keeps"):
            lock.DirectoryLock(tmp_path)
    finally:
        os.kill(child, signal.SIGKILL)
    wait_until_gone(child)
    lock.DirectoryLock(tmp_path).close()


def test_a_lock_file_of_another_is_not_removed(tmp_path):
    with lock.DirectoryLock(tmp_path):
        (tmp_path / ".lock").unlink()
        (tmp_path / ".lock").write_text("of another")
    assert (tmp_path / ".lock").read_text() == "of another"


def test_a_directory_that_is_moved_or_removed_under_its_lock(tmp_path):
    with lock.DirectoryLock(tmp_path / "a"):
        (tmp_path / "a").rename(tmp_path / "b")
        with lock.DirectoryLock(tmp_path / "a"):  # a new directory of the old name
            assert _is_locked(tmp_path / "a") and _is_locked(tmp_path / "b")
    with lock.DirectoryLock(tmp_path / "c"):
        shutil.rmtree(tmp_path / "c")


def test_one_process_has_one_run_in_a_directory_at_a_time(tmp_path):
    with Run(tmp_path, 2, {}, loggers=[]):
        with pytest.raises(lock.DirectoryInUseError, match="another open run in this process"):
            Run(tmp_path / ".." / tmp_path.name, 2, {}, loggers=[]).__enter__()
        with pytest.raises(lock.DirectoryInUseError):  # the refused one has freed nothing
            Run(tmp_path, 2, {}, loggers=[]).__enter__()
        assert _is_locked(tmp_path)
    for steps in (1, 2):  # one after the other; the second resumes
        with Run(tmp_path, steps, {}, loggers=[]) as run:
            assert list(run.steps()) == [steps]


def test_a_run_that_cannot_start_frees_its_directory(tmp_path):
    with Run(tmp_path, 1, {}, loggers=[]) as run:
        list(run.steps())
    with pytest.raises(ValueError, match="settings"):
        Run(tmp_path, 1, {}, settings={"a": 1}, loggers=[]).__enter__()
    assert not (tmp_path / ".lock").exists() and not (tmp_path / "checkpoints" / ".lock").exists()


def test_a_link_to_a_locked_directory_is_the_same_directory(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with Run(tmp_path / "real", 1, {}, loggers=[]), pytest.raises(lock.DirectoryInUseError):
        Run(tmp_path / "link", 1, {}, loggers=[]).__enter__()


def test_objects_that_are_dropped_free_the_directory(tmp_path):
    Checkpointer(tmp_path).save(1, {})
    assert not (tmp_path / ".lock").exists()
    RunLogger(tmp_path, loggers=[], progress=False).log(1, {"a": 1.0})
    assert not (tmp_path / ".lock").exists()


def test_threads_share_the_lock(tmp_path):
    faults = []

    def work():
        try:
            for _ in range(30):
                with lock.DirectoryLock(tmp_path):
                    assert (tmp_path / ".lock").exists()
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not faults and not (tmp_path / ".lock").exists()


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b'{"pid": "x"}', b"\xff\x00", b"[" * 999, b'{"pid": 1, "host": 3, "since": null}']
)
def test_any_content_of_a_lock_file_is_survived(tmp_path, content):
    (tmp_path / ".lock").write_bytes(content)
    with lock.DirectoryLock(tmp_path):
        assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()
    (tmp_path / ".lock").write_bytes(content)
    with open(tmp_path / ".lock", "rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(lock.DirectoryInUseError, match=r"is in use by (another )?process") as error:
            lock.DirectoryLock(tmp_path)
    assert str(error.value).isprintable()


def test_a_host_cannot_write_to_the_terminal(tmp_path):
    (tmp_path / ".lock").write_text(json.dumps({"pid": 1, "host": "\x1b[31mevil\n", "since": "\x07"}))
    with open(tmp_path / ".lock", "rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(lock.DirectoryInUseError) as error:
            lock.DirectoryLock(tmp_path)
    assert str(error.value).isprintable()


@pytest.mark.parametrize("kind", ["link", "dangling", "hard_link", "folder", "fifo"])
def test_a_lock_file_that_is_none_is_named_and_not_followed(tmp_path, kind):
    target, path = tmp_path / "target", tmp_path / "run" / ".lock"
    path.parent.mkdir()
    target.write_text("precious")
    if kind in ("link", "dangling"):
        path.symlink_to(target if kind == "link" else tmp_path / "nowhere")
    elif kind == "hard_link":
        path.hardlink_to(target)
    else:
        path.mkdir() if kind == "folder" else os.mkfifo(path)
    with pytest.raises(OSError, match=rf"cannot write {path}: it is .*; (remove it|move it away)"):
        Run(path.parent, 1, {}, loggers=[]).__enter__()
    assert target.read_text() == "precious" and not (tmp_path / "nowhere").exists()


# The kernel itself refuses flock with an error, as file systems without locks do
WITHOUT_LOCKS = """
import ctypes, logging, platform, struct, sys
logging.basicConfig()
from torchrl_rloo.run import Checkpointer
number, error = {"x86_64": 73, "aarch64": 32}[platform.machine()], int(sys.argv[2])
code = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050000 | error), (0x06, 0, 0, 0x7FFF0000)]
packed = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
program = Program(len(code), ctypes.addressof(packed))
assert libc.prctl(22, 2, ctypes.byref(program), 0, 0) == 0, ctypes.get_errno()
checkpointer = Checkpointer(sys.argv[1])
checkpointer.save(1, {"step": 1})
print(checkpointer.load())
"""


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="numbers of system calls")
def test_a_file_system_without_locks_gets_a_warning(tmp_path, fork_server, error):
    done = fork_server.run(WITHOUT_LOCKS, [tmp_path, str(error)])
    assert done.returncode == 0 and "{'step': 1}" in done.stdout, done.stderr
    assert f"the file system of {tmp_path} has no locks" in done.stderr


SAVES = """
import sys, torch
from torchrl_rloo.run import Checkpointer
directory, n = sys.argv[1], int(sys.argv[2])
checkpointer, weights, done = Checkpointer(directory, keep=1000), torch.zeros(200_000), 0
for i in range(30):
    step = 2 * i + n
    try:
        checkpointer.save(step, {"step": step, "who": n, "weights": weights + n})
    except RuntimeError as error:
        assert "is in use by process" in str(error), error
        continue
    state = checkpointer.load(step)
    assert state["who"] == n and state["step"] == step and bool((state["weights"] == n).all())
    done += 1
print(done)
"""


def test_two_processes_that_save_in_one_directory_never_mix(tmp_path, fork_server):
    processes = [fork_server.start(SAVES, [tmp_path, str(n)]) for n in range(2)]
    assert [process.wait(PATIENCE) for process in processes] == [0, 0], [process.stderr for process in processes]
    assert 30 in [int(process.stdout) for process in processes]
    states = [torch.load(path, weights_only=True) for path in tmp_path.glob("step_*.pt")]
    assert states and all(bool((state["weights"] == state["who"]).all()) for state in states)
