"""Attacks of programs on the sandbox: random system calls and known escapes, run for real and checked from outside."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from support.processes import descendants, is_gone
from support.waiting import wait_until
from torchrl_rloo.rewards.sandbox import Sandbox

SECRET = "hush-canary"
X86_ONLY_MAX = 470  # highest number of a system call that is tried

# A program of random system calls. Arguments are small numbers, flags, pointers to known memory, paths and process ids.
# Calls that end or stop the program itself are left out, so that all calls are reached
FUZZ = """
import ctypes, json, os, random, sys
a = json.loads(input())
rng = random.Random(a["seed"])
libc = ctypes.CDLL(None, use_errno=True)
call = libc.syscall
call.restype = ctypes.c_long
paths = [ctypes.create_string_buffer(p.encode()) for p in [*a["paths"], "/proc/self/mem", "/dev/shm/x", ""]]
room = ctypes.create_string_buffer(1 << 16)
pointers = [ctypes.addressof(x) for x in (*paths, room)] + [0]
flags = [1 << n for n in range(32)] + [0o101, 0o1102, 0o777, 0x7E020000, 17, 0x4111]
numbers = [*range(-2, 8), 100, 101, 4096, -100, 2**31, 2**63 - 1]
ignored = {15, 23, 34, 35, 60, 61, 130, 202, 219, 230, 231, 270, 7, 271, 0, 19, 17, 9, 10, 11, 12, 25, 28, 56, 13, 14, 131, 3, 37, 38}
ignored = ignored if a["x86"] else {93, 94, 98, 101, 115, 73, 72, 139, 133, 128, 63, 65, 67, 222, 226, 215, 214, 216, 233, 220, 134, 135, 132, 57, 103}
entered = 0
for _ in range(a["calls"]):
    number = rng.choice([rng.randrange(a["last"]), rng.randrange(a["last"]), rng.randrange(0x40000000, 0x40000000 + 600)])
    if number in ignored:
        continue
    kinds = [rng.choice((pointers, flags, numbers, a["pids"])) for _ in range(6)]
    result = call(ctypes.c_long(number), *(ctypes.c_long(rng.choice(kind)) for kind in kinds))
    entered += 1
os.write(1, b"done")
"""


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
    machine = os.uname().machine
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "canary").write_text(SECRET)
        victim = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        sandbox = Sandbox(timeout=20.0, cpu_seconds=10)
        before = set(descendants(os.getpid()))
        try:
            for number in range(count):
                attack_seed = rng.randrange(1 << 30)
                fields = {"seed": attack_seed, "calls": 300, "x86": machine == "x86_64", "last": X86_ONLY_MAX}
                fields |= {"paths": [str(folder / "canary"), str(folder / "new"), name, sys.executable]}
                fields |= {"pids": [os.getpid(), victim.pid, sandbox._idle[0].process.pid, 1, -1, 0]}
                result = sandbox.run(FUZZ, __import__("json").dumps(fields))
                found = checks(folder, victim, before, {s.process.pid for s in sandbox._idle})
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
