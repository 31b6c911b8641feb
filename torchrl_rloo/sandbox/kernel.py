"""Restrictions of a process by the kernel: resource limits, system calls (seccomp) and files (Landlock).

:mod:`torchrl_rloo.sandbox.starter` loads this module without site-packages. It therefore uses ctypes instead of
bindings such as pyseccomp, which also need a system library. It supports Linux on x86-64 and aarch64.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import struct
from collections.abc import Sequence

_libc = ctypes.CDLL(None, use_errno=True)

# Allowed system calls. All others are refused: processes, signals, sockets, pipes, mounts, tracing, shared memory and
# changes of files. Name: number on x86-64, number on aarch64 (None if the call does not exist).
SYSCALLS: dict[str, tuple[int | None, int | None]] = {
    "read": (0, 63),
    "write": (1, 64),
    "readv": (19, 65),
    "writev": (20, 66),
    "pread64": (17, 67),
    "pwrite64": (18, 68),
    "lseek": (8, 62),
    "close": (3, 57),
    "dup": (32, 23),
    "dup2": (33, None),
    "dup3": (292, 24),
    "stat": (4, None),
    "lstat": (6, None),
    "fstat": (5, 80),
    "newfstatat": (262, 79),
    "statx": (332, 291),
    "access": (21, None),
    "faccessat": (269, 48),
    "getdents64": (217, 61),
    "getcwd": (79, 17),
    "poll": (7, None),
    "ppoll": (271, 73),
    "select": (23, None),
    "pselect6": (270, 72),
    "munmap": (11, 215),
    "mprotect": (10, 226),
    "mremap": (25, 216),
    "brk": (12, 214),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sigaltstack": (131, 132),
    "pause": (34, None),
    "getitimer": (36, 102),
    "setitimer": (38, 103),
    "alarm": (37, None),
    "restart_syscall": (219, 128),
    "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "gettimeofday": (96, 169),
    "time": (201, None),
    "times": (100, 153),
    "getpid": (39, 172),
    "getppid": (110, 173),
    "gettid": (186, 178),
    "getuid": (102, 174),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getegid": (108, 177),
    "getrusage": (98, 165),
    "getrlimit": (97, 163),
    "uname": (63, 160),
    "sysinfo": (99, 179),
    "getrandom": (318, 278),
    "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123),
    "sched_getparam": (143, 121),
    "sched_getscheduler": (145, 120),
    "futex": (202, 98),
    "set_tid_address": (218, 96),
    "set_robust_list": (273, 99),
    "rseq": (334, 293),
    "exit": (60, 93),
    "exit_group": (231, 94),
}
# Allowed only with some arguments
_OPEN, _OPENAT, _CLONE, _FCNTL, _PRLIMIT = (2, None), (257, 56), (56, 220), (72, 25), (302, 261)
_MMAP, _MADVISE = (9, 222), (28, 233)
# Calls from this number on have one number on all machines. ENOSYS makes libraries fall back on older calls
_FIRST_COMMON = 424

ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column of SYSCALLS, AUDIT_ARCH
# O_WRONLY, O_RDWR, O_CREAT, O_TRUNC, O_PATH, __O_TMPFILE
_OPEN_REFUSED = 0o3 | 0o100 | 0o1000 | 0o10000000 | 0o20000000
_CLONE_THREAD = 0x10000
CLONE_NAMESPACES = 0x7E020000
# F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC. F_SETOWN could send signals to any process
_FCNTL_ALLOWED = (0, 1, 2, 3, 1030)
_MMAP_REFUSED = 0x2000 | 0x40000  # MAP_LOCKED, MAP_HUGETLB
# NORMAL, RANDOM, SEQUENTIAL, WILLNEED, DONTNEED, FREE, HUGEPAGE, NOHUGEPAGE, GUARD_INSTALL, GUARD_REMOVE. Others take
# pages of the machine out of use (HWPOISON, SOFT_OFFLINE) or compare them with those of other processes (MERGEABLE)
_MADVISE_ALLOWED = (0, 1, 2, 3, 4, 8, 14, 15, 102, 103)

_STARTER_BYTES = 2 << 30  # address space of a starter

KILL_PROCESS, ERRNO, ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
LOAD, EQUAL, AT_LEAST, AND, RETURN = 0x20, 0x15, 0x35, 0x54, 0x06
NUMBER, ARCH, ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data

_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 1, 22, 24, 38, 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_CAPABILITY_VERSION, _MAX_CAPABILITIES = 0x20080522, 64


class _FilterProgram(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]


def instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def seccomp_filter(machine: str = platform.machine()) -> bytes:
    """Build a classic BPF program that only lets a process compute, read files and start threads.

    Args:
        machine: name of the machine, as of ``platform.machine()``.

    Raises:
        OSError: (ENOSYS) if the machine is neither x86-64 nor aarch64.
    """
    if machine not in ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no system call numbers for {machine}, only for {', '.join(ARCHITECTURES)}")
    column, arch = ARCHITECTURES[machine]
    refuse = instruction(RETURN, ERRNO | errno.EPERM)
    allow = instruction(RETURN, ALLOW)

    def argument(index: int, high: bool = False) -> bytes:
        return instruction(LOAD, ARGUMENTS + 8 * index + 4 * high)  # both machines are little-endian

    def without(index: int, flags: int) -> list[bytes]:
        return [argument(index), instruction(AND, flags), instruction(EQUAL, 0, 0, 1), allow, refuse]

    def one_of(index: int, values: Sequence[int]) -> list[bytes]:
        return [argument(index), *(i for value in values for i in (instruction(EQUAL, value, 0, 1), allow)), refuse]

    conditions = {
        _OPEN: without(1, _OPEN_REFUSED),
        _OPENAT: without(2, _OPEN_REFUSED),
        _MMAP: without(3, _MMAP_REFUSED),
        _MADVISE: one_of(2, _MADVISE_ALLOWED),
        _FCNTL: one_of(1, _FCNTL_ALLOWED),
        _CLONE: [  # threads but no processes
            argument(0),
            instruction(AND, _CLONE_THREAD | CLONE_NAMESPACES),
            instruction(EQUAL, _CLONE_THREAD, 0, 1),
            allow,
            refuse,
        ],
        _PRLIMIT: [  # only to read its own limits: the process must be 0, the pointer to new ones null
            argument(0),
            instruction(EQUAL, 0, 0, 5),
            argument(2),
            instruction(EQUAL, 0, 0, 3),
            argument(2, high=True),
            instruction(EQUAL, 0, 0, 1),
            allow,
            refuse,
        ],
    }
    # Check the architecture and the range of the number, then the allowed calls
    program = [
        instruction(LOAD, ARCH),
        instruction(EQUAL, arch, 1, 0),
        instruction(RETURN, KILL_PROCESS),  # 32-bit calls
        instruction(LOAD, NUMBER),
        instruction(AT_LEAST, _FIRST_COMMON, 0, 1),  # includes x32 calls
        instruction(RETURN, ERRNO | errno.ENOSYS),
    ]
    for numbers in SYSCALLS.values():
        if (number := numbers[column]) is not None:
            program += [instruction(EQUAL, number, 0, 1), allow]
    for numbers, body in conditions.items():
        if (number := numbers[column]) is not None:
            program += [instruction(EQUAL, number, 0, len(body)), *body]
    return b"".join([*program, refuse])


def install_filter(program: bytes) -> None:
    """Install a BPF program permanently for the calling thread and for all that it starts.

    Raises:
        OSError: if the kernel or an outer sandbox refuses.
    """
    buffer = ctypes.create_string_buffer(program, len(program))
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_SECCOMP, 2, _FilterProgram(len(program) // 8, ctypes.addressof(buffer)))


def drop_capabilities() -> None:
    """Drop all capabilities of this process and of its children: root then has only the rights of a file's owner.

    Raises:
        OSError: if the kernel or an outer sandbox refuses.
    """
    for number in range(_MAX_CAPABILITIES):
        try:
            _prctl(_PR_CAPBSET_DROP, number)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EPERM):  # no such capability, or no right to drop it
                raise
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    if _libc.capset(struct.pack("=Ii", _CAPABILITY_VERSION, 0), bytes(24)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"capset: {os.strerror(code)}")


def die_with_parent() -> None:
    """Make the kernel kill this process when the thread that forked it ends."""
    _prctl(_PR_SET_PDEATHSIG, 9)


def _prctl(option: int, value: int, pointer: ctypes.Structure | None = None) -> None:
    address = None if pointer is None else ctypes.byref(pointer)
    if _libc.prctl(option, ctypes.c_ulong(value), address, ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")


_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_FS_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # ABI -> number of access rights to files


def landlock_ruleset(readable: Sequence[str]) -> int:
    """Create Landlock rules that only allow reading ``readable``.

    They also forbid TCP from ABI 4 of the kernel, and abstract Unix sockets and signals to others from ABI 6.

    Args:
        readable: files, and folders with their contents. Missing ones are skipped.

    Returns:
        File descriptor of the rules.

    Raises:
        OSError: if the kernel has no Landlock or an outer sandbox refuses.
    """
    abi = _landlock(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint(1))
    rights = (1 << _FS_RIGHTS[min(abi, 5)]) - 1
    attributes = struct.pack("=QQQ", rights, 3, 3)[: 24 if abi >= 6 else 16 if abi >= 4 else 8]
    ruleset = _landlock(_LANDLOCK_CREATE, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint(0))
    for path in readable:
        if not os.path.exists(path):
            continue
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", _READ_FILE | _READ_DIR if os.path.isdir(path) else _READ_FILE, handle)
        _landlock(_LANDLOCK_ADD, ctypes.c_int(ruleset), ctypes.c_int(1), rule, ctypes.c_uint(0))
        os.close(handle)
    return ruleset


def landlock_restrict(ruleset: int) -> None:
    """Apply the rules permanently to the calling thread and to all that it starts.

    Raises:
        OSError: if the kernel refuses.
    """
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _landlock(_LANDLOCK_RESTRICT, ctypes.c_int(ruleset), ctypes.c_uint(0))


def _landlock(number: int, *arguments: object) -> int:
    result = _libc.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"Landlock call {number}: {os.strerror(code)}")
    return result


def set_limits(cpu_seconds: int | None, memory: int, max_output: int) -> None:
    """Set the resource limits of the calling process.

    Args:
        cpu_seconds: CPU time of all threads, after which the process is killed. None keeps the inherited limit.
        memory: address space in bytes.
        max_output: maximum size in bytes of a file that it writes to.
    """
    stack = min(64 << 20, memory // 4)  # recursion through C code needs more than the default of 8 MB
    limits = {
        resource.RLIMIT_CPU: cpu_seconds,
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_FSIZE: max_output,
        resource.RLIMIT_STACK: stack,
        resource.RLIMIT_NOFILE: 32,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    # Keep lower limits that the process inherited, since it may not raise them
    for name, value in limits.items():
        if value is None:
            continue
        hard = resource.getrlimit(name)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(name, (value, value))


def limit_starter(max_files: int) -> None:
    """Set the resource limits of a process that starts programs: no core dumps, few open files, less memory.

    Args:
        max_files: number of open files.
    """
    # Programs may set a higher limit on memory, so only the soft one changes
    hard = {name: resource.getrlimit(name)[1] for name in (resource.RLIMIT_AS, resource.RLIMIT_NOFILE)}
    soft = _STARTER_BYTES if hard[resource.RLIMIT_AS] == -1 else min(_STARTER_BYTES, hard[resource.RLIMIT_AS])
    max_files = min(max_files, hard[resource.RLIMIT_NOFILE])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard[resource.RLIMIT_AS]))
    resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, max_files))
