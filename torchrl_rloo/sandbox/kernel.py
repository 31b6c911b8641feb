"""Restrictions of a process by the kernel: system calls (seccomp), files (Landlock), rights and resource limits.

:mod:`torchrl_rloo.sandbox.starter` loads this module without site-packages. It therefore uses ctypes instead of
bindings such as pyseccomp, which also need a system library. It supports Linux on x86-64 and aarch64.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import platform
import resource
import struct
import sys
import zoneinfo
from collections.abc import Sequence
from importlib.machinery import FileFinder
from pkgutil import get_importer

libc = ctypes.CDLL(None, use_errno=True)

# Calls by name: number on x86-64, number on aarch64 (- if the call does not exist).
# A program may make these and no others: no processes, signals, sockets, pipes, mounts, tracing, shared memory, and no
# changes of files
_ALLOWED = """
read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, pwrite64 18 68, lseek 8 62, close 3 57, dup 32 23,
dup2 33 -, dup3 292 24, stat 4 -, lstat 6 -, fstat 5 80, newfstatat 262 79, statx 332 291, access 21 -,
faccessat 269 48, getdents64 217 61, getcwd 79 17, poll 7 -, ppoll 271 73, select 23 -, pselect6 270 72, munmap 11 215,
mprotect 10 226, mremap 25 216, brk 12 214, rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139,
sigaltstack 131 132, pause 34 -, getitimer 36 102, setitimer 38 103, alarm 37 -, restart_syscall 219 128,
nanosleep 35 101, clock_nanosleep 230 115, clock_gettime 228 113, clock_getres 229 114, gettimeofday 96 169,
time 201 -, times 100 153, getpid 39 172, getppid 110 173, gettid 186 178, getuid 102 174, geteuid 107 175,
getgid 104 176, getegid 108 177, getrusage 98 165, getrlimit 97 163, uname 63 160, sysinfo 99 179, getrandom 318 278,
sched_yield 24 124, sched_getaffinity 204 123, sched_getparam 143 121, sched_getscheduler 145 120, futex 202 98,
set_tid_address 218 96, set_robust_list 273 99, rseq 334 293, exit 60 93, exit_group 231 94
"""
# A command of a workspace may make all but these. They change namespaces or mounts, reach into other processes, leave
# things in the kernel, or use memory that no limit counts. Others are rare and intricate
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


def _numbers(table: str) -> dict[str, tuple[int | None, ...]]:
    entries = (entry.split() for entry in table.replace("\n", " ").split(","))
    return {name: tuple(None if n == "-" else int(n) for n in numbers) for name, *numbers in entries}


SYSCALLS, REFUSED = _numbers(_ALLOWED), _numbers(_REFUSED)
# Calls that are allowed only with some arguments, to programs and to commands
CONDITIONAL = _numbers(
    "open 2 -, openat 257 56, mmap 9 222, madvise 28 233, fcntl 72 25, clone 56 220, prlimit 302 261"
)
CONDITIONAL_COMMANDS = _numbers("clone 56 220, prlimit 302 261, socket 41 198")
# Calls from this number on have one number on all machines. ENOSYS makes libraries fall back on older calls
_FIRST_COMMON, _CLONE3, _FIRST_X32 = 424, 435, 0x40000000

_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column of the tables, AUDIT_ARCH
# O_WRONLY, O_RDWR, O_CREAT, O_TRUNC, O_PATH, __O_TMPFILE
_OPEN_REFUSED = 0o3 | 0o100 | 0o1000 | 0o10000000 | 0o20000000
_CLONE_THREAD, _CLONE_NAMESPACES = 0x10000, 0x7E020000
# F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC. F_SETOWN could send signals to any process
_FCNTL_ALLOWED = (0, 1, 2, 3, 1030)
_MMAP_REFUSED = 0x2000 | 0x40000  # MAP_LOCKED, MAP_HUGETLB
# NORMAL, RANDOM, SEQUENTIAL, WILLNEED, DONTNEED, FREE, HUGEPAGE, NOHUGEPAGE, GUARD_INSTALL, GUARD_REMOVE. Others take
# pages of the machine out of use (HWPOISON, SOFT_OFFLINE) or compare them with those of other processes (MERGEABLE)
_MADVISE_ALLOWED = (0, 1, 2, 3, 4, 8, 14, 15, 102, 103)
_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET and AF_INET6, which the network namespace holds; not AF_VSOCK, for example

_KILL_PROCESS, _ERRNO, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
_LOAD, _EQUAL, _AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data

MAX_THREADS = 64
_STARTER_BYTES = 2 << 30  # address space of a starter
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 1, 22, 24, 38, 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_CAPABILITY_VERSION, _MAX_CAPABILITIES = 0x20080522, 64


def check(call: str, result: int) -> int:
    """Return the result of a C function; raise ``OSError`` if it is negative."""
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{call}: {os.strerror(code)}")
    return result


# System calls


class _FilterProgram(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]


def instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """Return an instruction of classic BPF; a comparison skips ``if_true`` or ``if_false`` instructions."""
    return struct.pack("=HBBI", code, if_true, if_false, value)


def seccomp_filter(machine: str = platform.machine(), *, commands: bool = False) -> bytes:
    """Build a BPF program that only lets a process compute, read files and start threads.

    With ``commands``, it instead allows all calls but the refused ones, for processes in their own namespaces.
    """
    if machine not in _ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no system call numbers for {machine}, only for {', '.join(_ARCHITECTURES)}")
    column, arch = _ARCHITECTURES[machine]
    refuse, unknown = (instruction(_RETURN, _ERRNO | code) for code in (errno.EPERM, errno.ENOSYS))
    allow = instruction(_RETURN, _ALLOW)

    def argument(index: int, high: bool = False) -> bytes:
        return instruction(_LOAD, _ARGUMENTS + 8 * index + 4 * high)  # both machines are little-endian

    def masked(index: int, flags: int, wanted: int = 0) -> list[bytes]:
        return [argument(index), instruction(_AND, flags), instruction(_EQUAL, wanted, 0, 1), allow, refuse]

    def one_of(index: int, values: Sequence[int]) -> list[bytes]:
        return [argument(index), *(i for value in values for i in (instruction(_EQUAL, value, 0, 1), allow)), refuse]

    if commands:
        first, listed, verdict, default, numbers = _FIRST_X32, REFUSED, refuse, allow, CONDITIONAL_COMMANDS
        # The flags of clone3 are in memory, out of reach: libraries fall back on clone
        extra = [instruction(_EQUAL, _CLONE3, 0, 1), unknown]
        bodies = {
            "clone": masked(0, _CLONE_NAMESPACES),
            "prlimit": one_of(0, [0]),  # only its own limits
            "socket": one_of(0, _FAMILIES),
        }
    else:
        first, listed, verdict, default, numbers, extra = _FIRST_COMMON, SYSCALLS, allow, refuse, CONDITIONAL, []
        bodies = {
            "open": masked(1, _OPEN_REFUSED),
            "openat": masked(2, _OPEN_REFUSED),
            "mmap": masked(3, _MMAP_REFUSED),
            "madvise": one_of(2, _MADVISE_ALLOWED),
            "fcntl": one_of(1, _FCNTL_ALLOWED),
            "clone": masked(0, _CLONE_THREAD | _CLONE_NAMESPACES, _CLONE_THREAD),  # threads but no processes
            "prlimit": [  # only to read its own limits: the process must be 0, the pointer to new ones null
                argument(0),
                instruction(_EQUAL, 0, 0, 5),
                argument(2),
                instruction(_EQUAL, 0, 0, 3),
                argument(2, high=True),
                instruction(_EQUAL, 0, 0, 1),
                allow,
                refuse,
            ],
        }
    # Check the architecture and the range of the number, then the listed calls
    program = [
        instruction(_LOAD, _ARCH),
        instruction(_EQUAL, arch, 1, 0),
        instruction(_RETURN, _KILL_PROCESS),  # 32-bit calls
        instruction(_LOAD, _NUMBER),
        instruction(_AT_LEAST, first, 0, 1),  # includes x32 calls
        unknown,
        *extra,
    ]
    for entry in listed.values():
        if (number := entry[column]) is not None:
            program += [instruction(_EQUAL, number, 0, 1), verdict]
    for name, body in bodies.items():
        if (number := numbers[name][column]) is not None:
            program += [instruction(_EQUAL, number, 0, len(body)), *body]
    return b"".join([*program, default])


def install_filter(program: bytes) -> None:
    """Install a BPF program permanently for the calling thread and for all that it starts."""
    buffer = ctypes.create_string_buffer(program, len(program))
    prctl(_PR_SET_NO_NEW_PRIVS, 1)
    prctl(_PR_SET_SECCOMP, 2, _FilterProgram(len(program) // 8, ctypes.addressof(buffer)))


def prctl(option: int, value: int, pointer: ctypes.Structure | None = None) -> None:
    address = None if pointer is None else ctypes.byref(pointer)
    zero = ctypes.c_ulong(0)
    check(f"prctl({option})", libc.prctl(option, ctypes.c_ulong(value), address, zero, zero))


# Rights and limits


def drop_capabilities() -> None:
    """Drop all capabilities of this process and of its children: root then has only the rights of a file's owner."""
    for number in range(_MAX_CAPABILITIES):
        try:
            prctl(_PR_CAPBSET_DROP, number)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EPERM):  # no such capability, or no right to drop it
                raise
    prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    check("capset", libc.capset(struct.pack("=Ii", _CAPABILITY_VERSION, 0), bytes(24)))


def die_with_parent(parents: Sequence[int]) -> None:
    """Make the kernel kill this process when the thread that forked it ends, unless that has ended before."""
    prctl(_PR_SET_PDEATHSIG, 9)
    if os.getppid() not in parents:
        os._exit(1)


def set_limits(limits: dict[int, int | None]) -> None:
    """Set resource limits of this process, and none above the inherited one, which it may not raise."""
    for name, value in limits.items():
        if value is not None:
            hard = resource.getrlimit(name)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(name, (value, value))


def program_limits(cpu_seconds: int | None, memory: int, max_output: int) -> dict[int, int | None]:
    """Return the resource limits of a program: CPU time of all threads, address space, and size of a written file."""
    return {
        resource.RLIMIT_CPU: cpu_seconds,
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_FSIZE: max_output,
        resource.RLIMIT_STACK: min(64 << 20, memory // 4),  # recursion in C code needs more than the default of 8 MB
        resource.RLIMIT_NOFILE: 32,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }


def keep_files(files: Sequence[int]) -> None:
    """Make ``files`` the first descriptors of this process and close all others."""
    # Move them to high numbers first, so that none is overwritten
    for number, file in enumerate([fcntl.fcntl(file, fcntl.F_DUPFD, 100) for file in files]):
        os.dup2(file, number)
    os.closerange(len(files), resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def has_many_threads(pid: int) -> bool:
    """Return whether a process has more than ``MAX_THREADS`` threads, which no resource limit bounds for root."""
    try:
        return os.stat(f"/proc/{pid}/task").st_nlink - 2 > MAX_THREADS
    except FileNotFoundError:
        return False


def limit_starter(max_files: int) -> None:
    """Set the limits of a process that starts programs: no core dumps, ``max_files`` open files, less memory."""
    set_limits({resource.RLIMIT_CORE: 0, resource.RLIMIT_NOFILE: max_files})
    # Programs may set a higher limit on memory, so only the soft one changes
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    soft = _STARTER_BYTES if hard == resource.RLIM_INFINITY else min(_STARTER_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


# Files

_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_FS_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # ABI -> number of access rights to files


def landlock_ruleset(readable: Sequence[str]) -> int:
    """Return a descriptor of Landlock rules that only allow reading files, and folders with their contents.

    They also forbid TCP from ABI 4 of the kernel, and abstract Unix sockets and signals to others from ABI 6.
    """
    abi = _landlock(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint(1))
    rights = (1 << _FS_RIGHTS[min(abi, 5)]) - 1
    attributes = struct.pack("=QQQ", rights, 3, 3)[: 24 if abi >= 6 else 16 if abi >= 4 else 8]
    ruleset = _landlock(_LANDLOCK_CREATE, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint(0))
    for path in filter(os.path.exists, readable):
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", _READ_FILE | _READ_DIR if os.path.isdir(path) else _READ_FILE, handle)
        _landlock(_LANDLOCK_ADD, ctypes.c_int(ruleset), ctypes.c_int(1), rule, ctypes.c_uint(0))
        os.close(handle)
    return ruleset


def landlock_restrict(ruleset: int) -> None:
    """Apply the rules permanently to the calling thread and to all that it starts."""
    prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _landlock(_LANDLOCK_RESTRICT, ctypes.c_int(ruleset), ctypes.c_uint(0))


def _landlock(number: int, *arguments: object) -> int:
    return check(f"Landlock call {number}", libc.syscall(ctypes.c_long(number), *arguments))


# Files that programs may read: the standard library without packages, and its shared libraries. Landlock cannot exclude
# files of an allowed folder. So the parts of the library's folder are allowed one by one, and programs cannot list it

# Parts of the library's folder that are not modules. The top-level compiled files are in __pycache__
_PARTS, _PACKAGES = {"__pycache__", "lib-dynload"}, {"ensurepip"}  # which holds pip
_DYNLOAD = "lib-dynload"
# Loaded only in the middle of a program: by the end of a thread, by ctypes
_LATE_LIBRARIES = ("libgcc_s.so.1", "libm.so.6")
_DATA = ("/etc/ld.so.cache", "/usr/lib/locale", *zoneinfo.TZPATH)


def readable_paths() -> list[str]:
    """Return the files and folders that an interpreter without site-packages reads."""
    return [*standard_library(), *shared_libraries(), *_DATA]


def standard_library() -> list[str]:
    """Return the parts of the folders in ``sys.path`` that belong to the standard library."""
    names = (sys.stdlib_module_names | _PARTS) - _PACKAGES
    found = []
    for place in sys.path:
        if not os.path.isdir(place):  # the zipped library
            found.append(place)
        elif os.path.basename(place) == _DYNLOAD:
            found.append(place)
        else:
            stems = {entry: entry.partition(".")[0] for entry in os.listdir(place)}
            found += [
                os.path.join(place, entry)
                for entry, stem in stems.items()
                if stem in names or stem.startswith("_sysconfigdata_")
            ]
    return found


def shared_libraries() -> list[str]:
    """Return the shared libraries of the interpreter and of its extension modules, which a child process loads."""
    folders = [place for place in sys.path if os.path.basename(place) == _DYNLOAD and os.path.isdir(place)]
    modules = [os.path.join(folder, name) for folder in folders for name in os.listdir(folder)]
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            for module in [*modules, *_LATE_LIBRARIES]:
                with contextlib.suppress(OSError):  # its own libraries are not installed
                    ctypes.CDLL(module, mode=os.RTLD_LAZY)
            with open("/proc/self/maps") as maps, open(write, "w") as pipe:
                paths = {line.split(maxsplit=5)[5].rstrip("\n") for line in maps if line.count("/") > 0}
                pipe.write("\n".join(path for path in paths if ".so" in os.path.basename(path)))
        finally:
            os._exit(0)
    os.close(write)
    with open(read) as pipe:
        libraries = pipe.read().splitlines()
    os.waitpid(pid, 0)
    return sorted(libraries)


def pin_finders() -> None:
    """Read the folders of ``sys.path`` now and never again, because programs cannot list them."""
    for place in sys.path:
        finder = get_importer(place)
        if isinstance(finder, FileFinder):
            finder.find_spec("sys")  # reads the folder
            finder._fill_cache = lambda: None
