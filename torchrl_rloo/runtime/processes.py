"""Helper processes, their short environment, and their ends: with their handle, or with this process.

The file needs only the standard library, since it is also run by its path, in one of three roles. ``run`` gives a
helper a parent, its reaper. Orphans below a reaper become its children, by ``PR_SET_CHILD_SUBREAPER``, so daemons also
end with the helper, even after its crash. ``exec`` runs a command that the kernel kills with its parent. ``guard`` is
one process per trainer. It kills the registered helpers when the trainer ends in any way, even those that are stopped.

Neither reaper nor guard relies on the end of a pipe, which any forked child of the trainer may hold open. A
parent-death signal is no alternative: it fires when the *thread* that started the helper ends.
"""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

_LOGGER = logging.getLogger(__name__)

KILL_SECONDS = 10.0  # limit for a tree that forks faster than it is killed
TERM_SECONDS = 1.0  # for a helper to end after SIGTERM
PARENT_SECONDS = 1.0  # between checks that the trainer lives
MAX_FILES = 4096  # open files of a process
GUARD_BYTES = 256 << 20  # address space of the guard


# Environment variables of helpers: paths, locale, threads and devices, but no keys and no tokens
VARIABLES = (
    "PATH HOME USER LOGNAME SHELL LANG LANGUAGE LC_* TZ TMPDIR TEMP TMP LD_LIBRARY_PATH DYLD_LIBRARY_PATH VIRTUAL_ENV "
    "CONDA_PREFIX PYTHONPATH PYTHONHOME PYTHONHASHSEED PYTHONUTF8 PYTHONIOENCODING PYTHONWARNINGS PYTHONNOUSERSITE "
    "PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX OMP_NUM_THREADS MKL_NUM_THREADS OPENBLAS_NUM_THREADS "
    "CUDA_VISIBLE_DEVICES NVIDIA_VISIBLE_DEVICES HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES CUDA_HOME HF_HOME "
    "HF_HUB_CACHE HF_HUB_OFFLINE HF_DATASETS_CACHE HF_DATASETS_OFFLINE TRANSFORMERS_OFFLINE TORCH_HOME NLTK_DATA "
    "TOKENIZERS_PARALLELISM XDG_CACHE_HOME XDG_CONFIG_HOME XDG_DATA_HOME SSL_CERT_FILE SSL_CERT_DIR"
).split()

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_FORWARDED = {signal.SIGTERM, signal.SIGUSR2}


def kill_tree(root: int) -> None:
    """Kill a process and its descendants.

    No descendant escapes if the root adopts orphans: the root dies last, when nothing is left below it.
    """
    kill_below(root)
    if _group(root) == root:
        _kill(-root)
    _kill(root)


def kill_below(root: int) -> None:
    """Kill the descendants of a process until none is left, for at most ``KILL_SECONDS``."""
    deadline = time.monotonic() + KILL_SECONDS
    while (family := descendants(root)) and time.monotonic() < deadline:
        # A group is killed at once, so no fork escapes; the root and this process may share one with outsiders
        groups = set(family.values()) - {_group(root), os.getpgrp()}
        for target in [-group for group in groups] + list(family):
            _kill(target)


def descendants(root: int) -> dict[int, int]:
    """Return the living processes below ``root`` and the process group of each."""
    children: dict[int, list[tuple[int, int]]] = {}
    found: dict[int, int] = {}
    alive: set[int] = set()
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if name.isdigit() and (fields := _stat(int(name))):
            children.setdefault(int(fields[1]), []).append((int(name), int(fields[2])))
            if fields[0] not in "ZX":
                alive.add(int(name))
    parents = [root]
    for parent in parents:  # grows in the loop
        for pid, group in children.get(parent, ()):
            parents.append(pid)
            found[pid] = group
    return {pid: group for pid, group in found.items() if pid in alive}


def _stat(pid: int) -> list[str]:
    """Return state, parent, process group and the later fields of a process; nothing if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            return stat.read().rpartition(")")[2].split()  # the name in parentheses may hold any character
    except OSError:
        return []


def _group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return pid  # it was the leader: each root is


def _kill(target: int) -> None:
    try:
        os.kill(target, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # it has ended, or runs as another user
        return


def limit_process(*, address_space: int | None = None, data: int | None = None) -> None:
    """Set the resource limits of this process and of its children: no core dumps, few open files, less memory."""
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: MAX_FILES,
        resource.RLIMIT_AS: address_space,
        resource.RLIMIT_DATA: data,
    }
    for name, value in limits.items():
        hard = resource.getrlimit(name)[1]
        if value is not None:
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(name, (value, value))


def reap(trainer: int) -> None:
    """Fork this process and return in the child; the parent becomes its reaper and ends with it or with the trainer.

    The reaper exits as the child did. It forwards SIGTERM, and SIGUSR2, which requests a traceback. Other systems than
    Linux have no reaper: there this process continues.
    """
    if not sys.platform.startswith("linux"):
        return
    # Block the signals before the fork, so that none is lost
    reaper = os.getpid()
    adopt_orphans()
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED | {signal.SIGCHLD})
    child = os.fork()
    if child == 0:
        # Use a new session, so that signals to the group do not reach the reaper
        die_with_parent(reaper)
        os.setsid()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED | {signal.SIGCHLD})
        return
    # Hold no file open and outlive the signals that end the trainer
    code = 1
    try:
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        null = os.open(os.devnull, os.O_RDWR)
        for file in range(3):
            os.dup2(null, file)
        os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        code = _supervise(child, trainer)
        kill_below(reaper)
        if code < 0:
            signal.signal(-code, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
            os.kill(reaper, -code)
    finally:
        os._exit(code & 255)


def adopt_orphans() -> None:
    """Make orphans below this process its children."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent dies; on other systems than Linux it continues."""
    if sys.platform.startswith("linux"):
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def _supervise(child: int, trainer: int) -> int:
    """Reap children until the helper or the trainer ends; return the exit code of the helper, or minus its signal."""
    deadline, code = float("inf"), None
    while code is None and os.getppid() == trainer and time.monotonic() < deadline:
        received = signal.sigtimedwait(_FORWARDED | {signal.SIGCHLD}, PARENT_SECONDS)
        code = _collect(child)
        if code is None and received is not None and received.si_signo in _FORWARDED:
            os.kill(child, received.si_signo)
            if received.si_signo == signal.SIGTERM:
                deadline = time.monotonic() + TERM_SECONDS
    return -signal.SIGKILL if code is None else code


def _collect(child: int) -> int | None:
    """Wait for all children that have ended; return the exit code of ``child``, if it is one of them."""
    code = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if pid == 0:
            return code
        if pid == child:
            code = os.waitstatus_to_exitcode(status)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def short_environment(names: Iterable[str] = ()) -> dict[str, str]:
    """Return the variables of this process that helpers may see; ``*`` in further ``names`` is any text."""
    patterns = [*VARIABLES, *names]
    return {name: value for name, value in os.environ.items() if any(fnmatchcase(name, p) for p in patterns)}


def reaped_command(
    command: Sequence[str], environment: Mapping[str, str] | None = None, folder: str | os.PathLike | None = None
) -> list[str]:
    """Return a command that runs ``command`` below a reaper, which ends it and all its children with this process."""
    program = os.path.join(folder or "", command[0]) if os.path.dirname(command[0]) else command[0]
    if shutil.which(program, path=(environment or {}).get("PATH")) is None:
        raise FileNotFoundError(f"command={command[0]!r}: there is no such program; install it or give its full path")
    return [sys.executable, "-I", "-S", __file__, "run", str(os.getpid()), *command]


class HelperProcess:
    """Handle of a process that is killed with its descendants by :meth:`end`, with this handle, or with this process.

    Attributes:
        process: the process, the leader of a new session. Ctrl-C does not reach it.
        owner: id of the process that started it; a forked process must not use it.
        end: function that kills the tree. Later calls do nothing.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], **options: Any):
        self.owner, guard = os.getpid(), Guard.shared()
        self.process = subprocess.Popen(command, env=dict(environment), start_new_session=True, **options)
        self.end = weakref.finalize(self, _end, self.process, guard, self.owner)
        guard.watch(self.process.pid)

    def is_usable(self) -> bool:
        """Return whether the process runs and belongs to this one."""
        return self.owner == os.getpid() and not self.has_exited()

    def has_exited(self) -> bool:
        """Return whether the process has exited. Its pid stays reserved until :meth:`end`."""
        if self.process.returncode is not None or not hasattr(os, "waitid"):  # macOS before Python 3.13 has none
            return self.process.poll() is not None
        try:
            return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # another thread has waited for it
            return True


class Guard:
    """Handle of the process that kills helpers if this process dies; all helpers of a process share one."""

    _current: weakref.ref[Guard] | None = None

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, "guard", str(self.owner)],
            bufsize=0,
            env={},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # not reached by Ctrl-C and signals to this process group
        )
        weakref.finalize(self, _release, self.process, self.owner)

    @classmethod
    def shared(cls) -> Guard:
        """Return the running guard of this process, which ends with its last user."""
        guard = cls._current and cls._current()
        if guard is None or guard.owner != os.getpid() or guard.process.poll() is not None:
            guard = cls()
            cls._current = weakref.ref(guard)
        return guard

    def watch(self, pid: int) -> None:
        """Register a process to kill when this process dies."""
        self._send(f"+{pid}\n")

    def unwatch(self, pid: int) -> None:
        """Forget a dead process, because another may get its pid."""
        self._send(f"-{pid}\n")

    def _send(self, line: str) -> None:
        try:
            self.process.stdin.write(line.encode())
        except OSError as error:
            _LOGGER.warning("the guard of the helper processes has died (%s); the next helper starts a new one", error)


def _end(process: subprocess.Popen, guard: Guard, owner: int) -> None:
    if os.getpid() == owner:
        kill_tree(process.pid)  # even if the process has exited, its children may still run
        guard.unwatch(process.pid)
        process.wait()


def _release(process: subprocess.Popen, owner: int) -> None:
    process.stdin.close()
    if os.getpid() == owner:
        process.wait()


def guard(trainer: int) -> None:
    """Kill the registered processes when the trainer ends; lines ``+<pid>`` and ``-<pid>`` on the input change them."""
    limit_process(address_space=GUARD_BYTES)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    poll, text, registered = select.poll(), b"", set()
    poll.register(0, select.POLLIN)
    while os.getppid() == trainer:
        if poll.poll(1000 * PARENT_SECONDS):
            if not (part := os.read(0, 1 << 16)):
                break
            *lines, text = (text + part).split(b"\n")
            for line in lines:
                (registered.add if line[:1] == b"+" else registered.discard)(int(line[1:]))
    for pid in registered:
        kill_tree(pid)


def main(role: str, trainer: str, *command: str) -> None:
    """Run as the guard of a trainer, or run a command below a reaper, or one that the kernel kills with its parent."""
    if role == "guard":
        return guard(int(trainer))
    if role == "exec":
        die_with_parent(int(trainer))
    else:
        limit_process()
        reap(int(trainer))
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(*sys.argv[1:])
