"""Sandboxes for untrusted programs: a program and its result, Python sessions, and workspaces with files and a shell.

A program or a Python session can only compute and print. It runs in a separate Linux process, inside independent layers
of isolation:

=============================  =========================================================================================
attempt of a program           protection
=============================  =========================================================================================
endless loops, sleeping        CPU time limit; wall-clock limit of a supervising process
memory, huge output            limits on address space and on output size; no pipes, no locked memory, none shared
processes, many threads        seccomp: no fork, no exec; more than 64 threads end the program
network                        seccomp: no sockets; also Landlock, depending on the kernel
signals, tracing               seccomp: no signals, even to itself; also Landlock, depending on the kernel
writing, deleting              seccomp: files cannot be created, opened for writing, renamed or removed; also Landlock
reading                        Landlock: only the standard library and its shared libraries; no packages, ``/proc``,
                               ``/etc``, home directories or environment of the trainer
rights of root                 all capabilities are dropped, and no program can regain them
open files, leftovers          only the standard streams, which are in memory; the process ends with the call
work between calls             A session is stopped then, with its threads and timers.
reading other sessions         A session forks from its keeper, and that from a process that reads no code.
false answers                  They end the session; with the call's token they only falsify the session's own result.
=============================  =========================================================================================

``open(path, "w")`` and ``tempfile`` raise. ``asyncio``, which needs sockets, does not start. The standard library is
available without packages, with a fixed hash seed and the clock in UTC. Time zones come from the system's data, or else
from the package ``tzdata`` of this process. A program can test whether a path or a process id exists. It can read file
sizes, the user id, the host name and the kernel version. A root without capabilities must be able to read the standard
library.

A workspace is a small separate system, made of Linux namespaces (users, mounts, processes, network, IPC):

=============================  =========================================================================================
attempt of a command           protection
=============================  =========================================================================================
reading the machine            The root shows the system's programs (``/usr``, Python), read-only, and nothing else.
writing outside                Only the folder, ``/tmp`` and ``/dev/shm`` are writable. They are in memory.
network                        There is no interface. seccomp refuses sockets that no namespace holds, such as vsock.
other processes                It sees those of its workspace only, and cannot trace or change the keeper.
staying alive                  All processes, also daemons, are killed when the command ends or a limit is exceeded.
endless loops, sleeping        limit on wall-clock time
much memory                    limit on the address space of a process; on the memory of all, checked every 20 ms
many processes                 limit of the kernel, also checked every 20 ms
huge files or output           The file system has a size; a command may print 1 MB, of which head and tail are shown.
rights of root                 no capabilities, no set-user-ID programs; ids that own no file if the trainer is root
kernel interfaces              seccomp refuses mounts, namespaces, tracing, keys, BPF, io_uring, other sockets and more
=============================  =========================================================================================

Commands can read what is in the shown folders, the kernel version and the machine's load. Files in memory count as the
trainer's memory, up to ``disk`` for each workspace. All isolation relies on a kernel without security bugs.
"""

from torchrl_rloo.sandbox.sandbox import Policy, Sandbox, SandboxResult, SandboxUnavailableError
from torchrl_rloo.sandbox.sessions import PythonSession, SessionResult, WorkspaceLostError, WorkspaceSession

__all__ = [
    "Policy",
    "PythonSession",
    "Sandbox",
    "SandboxResult",
    "SandboxUnavailableError",
    "SessionResult",
    "WorkspaceLostError",
    "WorkspaceSession",
]
