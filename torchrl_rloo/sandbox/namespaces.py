"""Linux namespaces and system calls of a workspace; loaded by :mod:`torchrl_rloo.sandbox.workspace_keeper`.

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
from types import ModuleType

_libc = ctypes.CDLL(None, use_errno=True)

FOLDER = "/workspace"
OWN = (FOLDER, "/tmp", "/dev", "/proc", "/etc")  # not the machine's
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

# Calls that commands may not make: name, number on x86-64, number on aarch64. They change namespaces or mounts, reach
# into other processes, leave things in the kernel, or use memory that no limit counts. Others are rare and intricate
_REFUSED = """
mount 165 40, umount2 166 39, pivot_root 155 41, chroot 161 51, unshare 272 97, setns 308 268, open_tree 428 428,
move_mount 429 429, fsopen 430 430, fsconfig 431 431, fsmount 432 432, fspick 433 433, mount_setattr 442 442,
ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, kcmp 312 272, pidfd_getfd 438 438,
setpriority 141 140, sched_setaffinity 203 122, sched_setscheduler 144 119, sched_setparam 142 118,
sched_setattr 314 274, ioprio_set 251 30, migrate_pages 256 238, move_pages 279 239,
add_key 248 217, request_key 249 218, keyctl 250 219, shmget 29 194, msgget 68 186, semget 64 190, mq_open 240 180,
memfd_create 319 279, memfd_secret 447 447, bpf 321 280, perf_event_open 298 241, userfaultfd 323 282,
io_uring_setup 425 425, io_uring_enter 426 426, io_uring_register 427 427, fanotify_init 300 262,
name_to_handle_at 303 264, open_by_handle_at 304 265, quotactl 179 60, syslog 103 116, acct 163 89, reboot 169 142,
swapon 167 224, swapoff 168 225, kexec_load 246 104, init_module 175 105, finit_module 313 273, delete_module 176 106
"""
_CLONE, _PRLIMIT, _SOCKET, _CLONE3 = (56, 220), (302, 261), (41, 198), 435
_FIRST_X32 = 0x40000000
_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET and AF_INET6, which the network namespace holds; not AF_VSOCK, for example


def refusing_filter(kernel: ModuleType) -> bytes:
    """Build a classic BPF program that refuses the calls above, and allows all others.

    Args:
        kernel: the module ``kernel``.

    Raises:
        OSError: (ENOSYS) if the machine is neither x86-64 nor aarch64.
    """
    machine = platform.machine()
    if machine not in kernel.ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no system call numbers for {machine}")
    column, arch = kernel.ARCHITECTURES[machine]
    step, load, equal = kernel.instruction, kernel.LOAD, kernel.EQUAL
    allow, refuse, unknown = (
        step(kernel.RETURN, value) for value in (kernel.ALLOW, kernel.ERRNO | errno.EPERM, kernel.ERRNO | errno.ENOSYS)
    )

    def argument(index: int) -> bytes:
        return step(load, kernel.ARGUMENTS + 8 * index)

    def one_of(values: Sequence[int]) -> list[bytes]:
        return [argument(0), *(i for value in values for i in (step(equal, value, 0, 1), allow)), refuse]

    program = [
        step(load, kernel.ARCH),
        step(equal, arch, 1, 0),
        step(kernel.RETURN, kernel.KILL_PROCESS),  # 32-bit calls
        step(load, kernel.NUMBER),
        step(kernel.AT_LEAST, _FIRST_X32, 0, 1),
        unknown,
        step(equal, _CLONE3, 0, 1),  # its flags are in memory, out of reach: libraries fall back on clone
        unknown,
    ]
    for entry in _REFUSED.replace("\n", " ").split(","):
        program += [step(equal, int(entry.split()[1 + column]), 0, 1), refuse]
    conditions = {
        _CLONE: [argument(0), step(kernel.AND, kernel.CLONE_NAMESPACES), step(equal, 0, 0, 1), allow, refuse],
        _PRLIMIT: one_of([0]),  # only its own limits
        _SOCKET: one_of(_FAMILIES),
    }
    for numbers, body in conditions.items():
        program += [step(equal, numbers[column], 0, len(body)), *body]
    return b"".join([*program, allow])


def enter_namespaces() -> None:
    """Move this process to new namespaces, of which its next child is the first process.

    If the trainer is root, commands get an id that owns no files.

    Raises:
        OSError: if the kernel or an outer sandbox refuses.
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
        _check("unshare", _libc.unshare(_NEW_USER | _NEW_NS | _NEW_NET | _NEW_IPC | _NEW_UTS | _NEW_PID))
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
    """Make the root of the workspace and move this process, the first one of its namespaces, there.

    Args:
        readable: folders in addition to the system's, at the same paths.
        disk: size in bytes of the writable file system.

    Raises:
        OSError: if the kernel or an outer sandbox refuses.
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
    _check("umount", _libc.umount2(store.encode(), _DETACH))
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
    _check("pivot_root", _libc.syscall(ctypes.c_long(_PIVOT_ROOT[platform.machine()]), b".", b"."))
    _check("umount", _libc.umount2(b".", _DETACH))
    os.chdir("/")
    _set_attributes("/", _RDONLY | _NOSUID | _NODEV, recursive=False)
    _check("sethostname", _libc.sethostname(b"workspace", 9))


def hide_memory() -> None:
    """Keep processes of the same user from reading this one in ``/proc``; forks inherit that, programs do not."""
    _check("prctl", _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0))


def _bind(source: str, target: str) -> None:
    is_folder = os.path.isdir(source)
    os.makedirs(target if is_folder else os.path.dirname(target), exist_ok=True)
    if not is_folder:
        open(target, "w").close()
    _mount(source, target, None, _BIND | _REC)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    texts = [text.encode() if text else None for text in (source, target, kind, options)]
    _check(f"mount of {source or target}", _libc.mount(*texts[:3], ctypes.c_ulong(flags), texts[3]))


def _set_attributes(path: str, flags: int, *, recursive: bool) -> None:
    attributes = struct.pack("=QQQQ", flags, 0, 0, 0)
    where, options = ctypes.c_int(_AT_FDCWD), ctypes.c_uint(_AT_RECURSIVE * recursive)
    size = ctypes.c_size_t(len(attributes))
    result = _libc.syscall(ctypes.c_long(_MOUNT_SETATTR), where, path.encode(), options, attributes, size)
    _check(f"mount_setattr of {path}", result)


def _check(call: str, result: int) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{call}: {os.strerror(code)}")


def set_identity() -> None:
    """Take the id of the commands, where it is not that of this process."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(USER, USER, USER)
        os.setresuid(USER, USER, USER)
