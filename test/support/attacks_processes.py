"""Attacks of programs on the sandbox: random system calls and known escapes, run for real and checked from outside."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from support.processes import descendants, is_gone
from support.waiting import wait_until
from torchrl_rloo.sandbox import Sandbox, kernel

SECRET = "hush-canary"
LAST_CALL = 470  # highest number of a system call that is tried

# A program of random system calls. Arguments are small numbers, flags, pointers to known memory, paths and process ids.
# Calls that end or stop the program itself are left out, so that all calls are reached
FUZZ = """
import ctypes, json, os, random, sys
a = json.loads(input())
rng = random.Random(a["seed"])
libc = ctypes.CDLL(None, use_errno=True)
call = libc.syscall
call.restype = ctypes.c_long
paths = [ctypes.create_string_buffer(p.encode(), 1 << 16) for p in [*a["paths"], "/proc/self/mem", "/dev/shm/x", ""]]
room = ctypes.create_string_buffer(1 << 16)
pointers = [ctypes.addressof(x) for x in (*paths, room)] + [0]
flags = [1 << n for n in range(32)] + [0o101, 0o1102, 0o777, 0x7E020000, 17, 0x4111]
numbers = [*range(-2, 8), 100, 101, 4096, -100, 2**31, 2**63 - 1]
ignored, entered = set(a["ignored"]), set()
for _ in range(a["calls"]):
    number = rng.randrange(a["last"]) + rng.choice((0, 0, 1 << 30))
    if number in ignored:
        continue
    kinds = [rng.choice((pointers, flags, numbers, a["pids"])) for _ in range(6)]
    result = call(ctypes.c_long(number), *(ctypes.c_long(rng.choice(kind)) for kind in kinds))
    if result >= 0 or ctypes.get_errno() not in (1, 38):
        entered.add(number)
os.write(1, json.dumps(sorted(entered)).encode())
os._exit(0)
"""
# Calls that end, stop or break the program itself without an effect outside, so that later ones are reached
OWN = """read readv pread64 write writev pwrite64 lseek dup dup2 dup3 close mprotect munmap mremap brk rt_sigaction
rt_sigprocmask rt_sigreturn sigaltstack pause nanosleep clock_nanosleep setitimer alarm poll ppoll select pselect6 futex
exit exit_group restart_syscall rseq set_robust_list set_tid_address""".split()
UPROBES = {335, 336}  # on x86-64, these end the caller


def checks(folder: Path, victim: subprocess.Popen, before: set[int], starters: set[int]) -> list[str]:
    """Return what an attack has changed outside the sandbox."""
    failures = []
    if (folder / "canary").read_text() != SECRET or sorted(os.listdir(folder)) != ["canary"]:
        failures.append("a file changed")
    if victim.poll() is not None:
        failures.append("another process was killed")
    left = set(descendants(os.getpid())) - before - starters
    try:
        wait_until(lambda: all(map(is_gone, left)), 10.0)
    except TimeoutError:
        failures.append(f"processes {sorted(left)} are left")
    return failures


def attack(count: int, seed: int) -> dict[str, Any]:
    """Run ``count`` programs of random system calls in the sandbox.

    Returns:
        ``tried`` and ``contained`` are numbers of programs; ``failures`` has a line for each other one.
    """
    rng, failures = random.Random(seed), []
    column = {"x86_64": 0, "aarch64": 1}[os.uname().machine]
    numbers = {name: pair[column] for name, pair in (kernel.SYSCALLS | kernel.CONDITIONAL).items()}
    ignored = [*(numbers[name] for name in (*OWN, "mmap", "madvise", "clone", "fcntl")), *UPROBES]
    allowed = set(numbers.values()) - {numbers[name] for name in ("mmap", "madvise", "clone")}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "canary").write_text(SECRET)
        victim = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        sandbox = Sandbox(timeout=20.0, cpu_seconds=10)
        before = set(descendants(os.getpid()))
        try:
            for number in range(count):
                attack_seed = rng.randrange(1 << 30)
                fields = {"seed": attack_seed, "calls": 300, "ignored": ignored, "last": LAST_CALL}
                fields |= {"paths": [str(folder / "canary"), str(folder / "new"), name, sys.executable]}
                fields |= {"pids": [os.getpid(), victim.pid, sandbox._idle[0].process.pid, 1, -1, 0]}
                result = sandbox.run(FUZZ, json.dumps(fields))
                found = checks(folder, victim, before, {s.process.pid for s in sandbox._idle})
                if result.ok and not set(json.loads(result.stdout.splitlines()[-1])) <= allowed:
                    found.append(f"a system call that is not allowed: {result}")
                if SECRET in result.stdout + result.stderr:
                    found.append("the file was read")
                if not sandbox.run("print(1)").ok:
                    found.append("the next program fails")
                failures += [f"program {number} (seed {attack_seed}): {line}" for line in found]
        finally:
            sandbox.close()
            victim.kill()
            victim.wait()
    broken = len({line.partition(":")[0] for line in failures})
    return {"tried": count, "contained": count - broken, "failures": failures}
