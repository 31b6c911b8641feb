"""Helper processes of the package: they have a short environment, and end with their handle or with this process."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torchrl_rloo.runtime import reaper

_LOGGER = logging.getLogger(__name__)

# Environment variables of helpers: paths, locale, threads and devices, but no keys and no tokens
VARIABLES = (
    "PATH HOME USER LOGNAME SHELL LANG LANGUAGE LC_* TZ TMPDIR TEMP TMP LD_LIBRARY_PATH DYLD_LIBRARY_PATH VIRTUAL_ENV "
    "CONDA_PREFIX PYTHONPATH PYTHONHOME PYTHONHASHSEED PYTHONUTF8 PYTHONIOENCODING PYTHONWARNINGS PYTHONNOUSERSITE "
    "PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX OMP_NUM_THREADS MKL_NUM_THREADS OPENBLAS_NUM_THREADS "
    "CUDA_VISIBLE_DEVICES NVIDIA_VISIBLE_DEVICES HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES CUDA_HOME HF_HOME "
    "HF_HUB_CACHE HF_HUB_OFFLINE HF_DATASETS_CACHE HF_DATASETS_OFFLINE TRANSFORMERS_OFFLINE TORCH_HOME NLTK_DATA "
    "TOKENIZERS_PARALLELISM XDG_CACHE_HOME XDG_CONFIG_HOME XDG_DATA_HOME SSL_CERT_FILE SSL_CERT_DIR"
).split()


def short_environment(names: Iterable[str] = ()) -> dict[str, str]:
    """Return the variables of this process that helpers may see.

    Args:
        names: names in addition to ``VARIABLES``; ``*`` matches any characters, so ``"*"`` alone means all variables.
    """
    patterns = [*VARIABLES, *names]
    return {name: value for name, value in os.environ.items() if any(fnmatchcase(name, p) for p in patterns)}


def reaped_command(
    command: Sequence[str], environment: Mapping[str, str] | None = None, folder: str | os.PathLike | None = None
) -> list[str]:
    """Return a command that runs ``command`` below a reaper, which ends it and all its children with this process.

    Args:
        command: program and its arguments.
        environment: variables of the program, of which ``PATH`` tells where it is searched. None means those of this
            process.
        folder: working directory of the program. None is this process's.

    Raises:
        FileNotFoundError: if there is no such program.
    """
    program = os.path.join(folder or "", command[0]) if os.path.dirname(command[0]) else command[0]
    if shutil.which(program, path=(environment or {}).get("PATH")) is None:
        raise FileNotFoundError(f"command={command[0]!r}: there is no such program; install it or give its full path")
    return [sys.executable, "-I", "-S", reaper.__file__, "run", str(os.getpid()), *command]


class HelperProcess:
    """Handle of a process that is killed with its descendants by :meth:`end`, with this handle, or with this process.

    Args:
        command: program and its arguments.
        environment: all environment variables of the process.
        **options: further arguments of :class:`subprocess.Popen`.

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
            [sys.executable, "-I", "-S", reaper.__file__, "guard", str(self.owner)],
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
        reaper.kill_tree(process.pid)  # even if the process has exited, its children may still run
        guard.unwatch(process.pid)
        process.wait()


def _release(process: subprocess.Popen, owner: int) -> None:
    process.stdin.close()
    if os.getpid() == owner:
        process.wait()
