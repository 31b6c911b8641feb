"""Linux namespaces of a workspace: its ids, its root and its folders.

The root of a workspace is a read-only file system in memory. It shows the programs of the system and nothing else of
the machine. The folder, ``/tmp`` and ``/dev/shm`` share one file system in memory, whose size is the limit on the disk.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Sequence

from torchrl_rloo.sandbox.kernel import check, libc, prctl

FOLDER = "/workspace"
USER = 1000  # id of the commands inside
_UNMAPPED = 3  # exit code
_NOBODY = 65534  # id of the commands outside, if the trainer is root
_WRITABLE = {FOLDER: 0o755, "/tmp": 0o1777, "/dev/shm": 0o1777}
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
_DEVICES = ("null", "zero", "full", "random", "urandom")
_LINKS = {"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2"}
_TEXTS = {
    "/etc/passwd": f"root:x:0:0::/:/bin/sh\nuser:x:{USER}:{USER}::{FOLDER}:/bin/sh\n",
    "/etc/group": f"root:x:0:\nuser:x:{USER}:\n",
    "/etc/hosts": "127.0.0.1 localhost\n",
}
_NEW_ROOT = "/sys"  # hidden in the workspace, so nothing in it is needed

_NEW_NS, _NEW_UTS, _NEW_IPC, _NEW_USER, _NEW_PID, _NEW_NET = 0x20000, 1 << 26, 1 << 27, 1 << 28, 1 << 29, 1 << 30
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _BIND, _REC, _PRIVATE = 1, 2, 4, 8, 1 << 12, 1 << 14, 1 << 18
_DETACH, _AT_FDCWD, _AT_RECURSIVE, _PR_SET_DUMPABLE = 2, -100, 0x8000, 4
_MOUNT_SETATTR, _PIVOT_ROOT = 442, {"x86_64": 155, "aarch64": 41}


def enter_namespaces() -> None:
    """Move this process to new namespaces, of which its next child is the first process.

    If the trainer is root, commands get an id that owns no files.
    """
    # Ids are mapped from outside of the new user namespace
    user, group, target = os.getuid(), os.getgid(), os.getpid()
    entered = os.pipe()
    if (pid := os.fork()) == 0:
        code = _UNMAPPED
        try:
            os.close(entered[1])
            if os.read(entered[0], 1):
                code = _write_maps(target, user, group)
        finally:
            os._exit(code)
    try:
        check("unshare", libc.unshare(_NEW_USER | _NEW_NS | _NEW_NET | _NEW_IPC | _NEW_UTS | _NEW_PID))
        os.write(entered[1], b"x")
    finally:
        for end in entered:
            os.close(end)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code == _UNMAPPED:
        raise OSError(errno.EPERM, "the ids of the user namespace cannot be mapped")


def _write_maps(pid: int, user: int, group: int) -> int:
    """Map the ids of a process and return 0."""

    def write(name: str, text: str) -> None:
        with open(f"/proc/{pid}/{name}", "w") as file:
            file.write(text)

    if user == group == 0:
        try:
            for name in ("gid_map", "uid_map"):
                write(name, f"0 0 1\n{USER} {_NOBODY} 1\n")
            return 0
        except OSError as error:  # root without that right, as in some containers
            if error.errno != errno.EPERM:
                raise
    write("setgroups", "deny")
    write("gid_map", f"{USER} {group} 1\n")
    write("uid_map", f"{USER} {user} 1\n")
    return 0


def build_root(readable: Sequence[str], disk: int) -> None:
    """Make the root of the workspace, with ``disk`` writable bytes, and move the first process of its namespaces there.

    ``readable`` are folders to show in addition to the system's, at the same paths.
    """
    _mount(None, "/", None, _REC | _PRIVATE)
    _mount("tmpfs", _NEW_ROOT, "tmpfs", _NOSUID | _NODEV, "mode=755,size=4m")
    # Only these folders can be written to
    store = f"{_NEW_ROOT}/store"
    os.mkdir(store)
    _mount("tmpfs", store, "tmpfs", _NOSUID | _NODEV, f"mode=755,size={disk},nr_inodes={max(1024, disk >> 12)}")
    for path, mode in _WRITABLE.items():
        place = f"{store}/{os.path.basename(path)}"
        os.mkdir(place)
        if os.getuid() == 0:
            os.chown(place, USER, USER)
        os.chmod(place, mode)
        _bind(place, _NEW_ROOT + path)
    check("umount", libc.umount2(store.encode(), _DETACH))
    os.rmdir(store)
    # Show programs and devices of the system, without rights
    shown: list[str] = []
    for path in (*_SYSTEM, *readable):
        if os.path.islink(path):
            os.makedirs(os.path.dirname(_NEW_ROOT + path), exist_ok=True)
            os.symlink(os.readlink(path), _NEW_ROOT + path)
        elif os.path.exists(path) and not any(path == other or path.startswith(other + "/") for other in shown):
            _bind(path, _NEW_ROOT + path)
            _set_attributes(_NEW_ROOT + path, _RDONLY | _NOSUID | _NODEV, recursive=True)
            shown.append(path)
    for name in _DEVICES:
        _bind(f"/dev/{name}", f"{_NEW_ROOT}/dev/{name}")
    for name, target in _LINKS.items():
        os.symlink(target, f"{_NEW_ROOT}/dev/{name}")
    for path, text in _TEXTS.items():
        with open(_NEW_ROOT + path, "w") as file:
            file.write(text)
    os.mkdir(f"{_NEW_ROOT}/proc")
    _mount("proc", f"{_NEW_ROOT}/proc", "proc", _RDONLY | _NOSUID | _NODEV | _NOEXEC)
    # Leave the old root
    os.chdir(_NEW_ROOT)
    check("pivot_root", libc.syscall(ctypes.c_long(_PIVOT_ROOT[platform.machine()]), b".", b"."))
    check("umount", libc.umount2(b".", _DETACH))
    os.chdir("/")
    _set_attributes("/", _RDONLY | _NOSUID | _NODEV, recursive=False)
    check("sethostname", libc.sethostname(b"workspace", 9))


def hide_memory() -> None:
    """Keep processes of the same user from reading this one in ``/proc``; forks inherit that, programs do not."""
    prctl(_PR_SET_DUMPABLE, 0)


def _bind(source: str, target: str) -> None:
    is_folder = os.path.isdir(source)
    os.makedirs(target if is_folder else os.path.dirname(target), exist_ok=True)
    if not is_folder:
        open(target, "w").close()
    _mount(source, target, None, _BIND | _REC)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    texts = [text.encode() if text else None for text in (source, target, kind, options)]
    check(f"mount of {source or target}", libc.mount(*texts[:3], ctypes.c_ulong(flags), texts[3]))


def _set_attributes(path: str, flags: int, *, recursive: bool) -> None:
    attributes = struct.pack("=QQQQ", flags, 0, 0, 0)
    where, options = ctypes.c_int(_AT_FDCWD), ctypes.c_uint(_AT_RECURSIVE * recursive)
    size = ctypes.c_size_t(len(attributes))
    result = libc.syscall(ctypes.c_long(_MOUNT_SETATTR), where, path.encode(), options, attributes, size)
    check(f"mount_setattr of {path}", result)


def set_identity() -> None:
    """Take the id of the commands, where it is not that of this process."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(USER, USER, USER)
        os.setresuid(USER, USER, USER)
