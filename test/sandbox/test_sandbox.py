"""Programs in the sandbox: limits, results, starters, missing layers."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from support.processes import children
from support.waiting import PATIENCE, wait_until
from torchrl_rloo.sandbox import Sandbox, SandboxUnavailableError, kernel

pytestmark = pytest.mark.usefixtures("sandboxed")
MB = 1 << 20


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAINER_SECRET", "hush")
        sandbox = Sandbox(timeout=60, cpu_seconds=1, memory=128 * MB, max_output=100_000)
        yield sandbox
        sandbox.close()


@pytest.fixture(scope="module")
def impatient() -> Sandbox:
    return Sandbox(timeout=1, cpu_seconds=60)


LIMITS = {
    "cpu": ("while True: pass", "cpu"),
    "cpu_of_threads": ("import threading\ndef f():\n while 1: pass\nthreading.Thread(target=f).start()\nf()", "cpu"),
    "sleep": ("import time; time.sleep(99)", "timed_out"),
    "ignored_signals": (
        "import signal\nfor s in range(1, 65):\n"
        " try: signal.signal(s, signal.SIG_IGN)\n except (OSError, ValueError): pass\n"
        "while True: pass",
        "cpu",
    ),
    "no_exit": ("import threading; threading.Thread(target=threading.Event().wait).start()", "timed_out"),
    "one_big_array": ("x = bytearray(4 << 30)", "memory"),
    "many_small_objects": ("x = []\nwhile True: x.append([0])", "memory"),
    "mapped_memory": ("import mmap\nx = [mmap.mmap(-1, 1 << 20) for _ in range(4096)]\nprint('ESCAPED')", "exit"),
    "output": ("while True: print('x' * 10_000)", "output"),
    "errors": ("import sys\nwhile True: sys.stderr.write('x' * 10_000)", "output"),
    "output_by_seek": ("import os; os.lseek(1, 1 << 40, 0); os.write(1, b'x')", "exit"),
    "input_as_store": ("import os\nwhile True: os.write(0, b'x' * 10_000)", "exit"),
    "abort": ("import os; os.abort()", "killed"),
    "crash": ("import ctypes; ctypes.string_at(0)", "killed"),
    "closed_files": ("import os; os.closerange(0, 99); import time; time.sleep(99)", "timed_out"),
    "many_files": ("import os\nwhile True: os.dup(0)", "exit"),
    "many_threads": (
        "import threading, time\nthreading.stack_size(32768)\n"
        "while True:\n try: threading.Thread(target=time.sleep, args=(99,), daemon=True).start()\n"
        " except RuntimeError: time.sleep(.1)",
        "threads",
    ),
    "many_native_threads": (  # clone with shared memory: only the count of threads stops them
        "import ctypes, mmap, time\nlibc = ctypes.CDLL(None)\n"
        "libc.clone.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_int]\n"
        "stacks = mmap.mmap(-1, 1 << 22); at = ctypes.addressof(ctypes.c_char.from_buffer(stacks))\n"
        "pause = ctypes.cast(libc.pause, ctypes.c_void_p).value\n"
        "for i in range(1, 1 << 12): assert libc.clone(pause, at + 1024 * i, 0x10f00, None) > 0\ntime.sleep(9)",
        "threads",
    ),
}


@pytest.mark.parametrize("name", LIMITS)
def test_limits(sandbox: Sandbox, request: pytest.FixtureRequest, name: str):
    text, reason = LIMITS[name]
    limited = request.getfixturevalue("impatient") if reason == "timed_out" else sandbox
    result = limited.run(text)
    assert not result.ok and "ESCAPED" not in result.stdout
    assert result.reason == reason, result
    assert len(result.stdout) <= 100_000 and len(result.stderr) <= 2000
    assert limited.run("print('well')").stdout == "well\n"  # the next program is not affected


def test_limits_are_those_asked_for():
    text = (
        "import resource as r\nfor n in ('CPU', 'AS', 'FSIZE', 'CORE', 'NOFILE'):"
        " print(*r.getrlimit(getattr(r, 'RLIMIT_' + n)))"
    )
    limits = Sandbox(cpu_seconds=7, memory=99 * MB, max_output=12345).run(text).stdout.split()
    assert limits == [str(v) for v in (7, 7, 99 * MB, 99 * MB, 12345, 12345, 0, 0, 32, 32)]


def test_ordinary_programs_run(sandbox: Sandbox):
    assert sandbox.run("print(sum(map(int, input().split())))", "19 23\n").stdout == "42\n"
    assert sandbox.run("print('gr\u00fc\u00df', input())", "d\u00ef").stdout == "gr\u00fc\u00df d\u00ef\n"
    assert sandbox.run("import sys; sys.exit(3)").exit_code == 3
    assert sandbox.run("exit()").ok
    failed = sandbox.run("raise SystemExit('too bad')")
    assert (failed.exit_code, failed.stderr) == (1, "too bad\n")
    failed = sandbox.run("1 / 0")
    assert (failed.reason, failed.exit_code) == ("exit", 1) and "ZeroDivisionError" in failed.stderr
    assert sandbox.run("x = \x00").exit_code == 1
    assert sandbox.run("input()").exit_code == 1  # end of input, not a hang
    assert sandbox.run("import atexit, os; atexit.register(lambda: os.write(1, b'late'))").stdout == "late"
    threaded = (
        "import sys, threading\nthreading.stack_size(64 << 20)\nthreading.Thread(target=lambda: print(7)).start()"
    )
    assert sandbox.run(threaded).stdout == "7\n"
    deep = (
        "import sys, functools\nsys.setrecursionlimit(10**6)\n@functools.lru_cache(None)\n"
        "def f(n): return n and 1 + f(n - 1)\nprint(f(20_000))"
    )
    assert sandbox.run(deep).stdout == "20000\n"
    libraries = "import ssl, sqlite3, lzma, bz2, zlib, ctypes, xml.dom.minidom, unittest, code; print(code.__file__)"
    assert "rewards" not in sandbox.run(libraries).stdout and sandbox.run(libraries).ok
    assert sandbox.run("import __main__; x = 1; print(__name__, __main__.x)").stdout == "__main__ 1\n"


def test_same_program_same_output(sandbox: Sandbox):
    text = "import random; print({'a', 'b', 'c', 'd', 'e'}, random.random())"
    assert sandbox.run(text).stdout == sandbox.run(text).stdout == Sandbox().run(text).stdout != ""


def test_guest_talks_and_ends_with_the_program(sandbox: Sandbox):
    host = "import os; os.write(3, b'ping'); print(os.read(3, 99).decode(), end='')"
    guest = (
        "import os, time; assert os.read(3, 99) == b'ping'; os.write(3, input().encode())\nwhile True: time.sleep(9)"
    )
    assert sandbox.run(host, guest=guest, guest_stdin="pong").stdout == "pong"
    assert sandbox.run("import os; print(os.read(3, 9))", guest="1").stdout == "b''\n"  # the guest ends first
    owner = "import fcntl, os; fcntl.fcntl(3, fcntl.F_SETOWN, os.getppid())"
    assert "PermissionError" in sandbox.run(owner, guest="1").stderr


def test_nothing_is_left_behind(sandbox: Sandbox):
    sandbox.run("1")
    (starter,) = (s.process.pid for s in sandbox._idle)
    files = len(os.listdir("/proc/self/fd")), len(os.listdir(f"/proc/{starter}/fd"))
    for text in ("1", "import os; os.fork()", "while True: pass", "x = bytearray(4 << 30)"):
        sandbox.run(text, guest="while True: pass")
    assert children(starter) == []
    assert (len(os.listdir("/proc/self/fd")), len(os.listdir(f"/proc/{starter}/fd"))) == files
    own = Sandbox()
    (starter,) = (s.process for s in own._idle)
    del own
    assert starter.poll() is not None


def test_threads_at_once(sandbox: Sandbox):
    with ThreadPoolExecutor(4) as pool:
        results = pool.map(lambda i: sandbox.run("print(int(input()) ** 2)", str(i)).stdout, range(40))
        assert list(results) == [f"{i * i}\n" for i in range(40)]
    assert len(sandbox._idle) <= 4
    assert sandbox.run("print(1)").ok  # starters outlive the threads that created them


def test_pickles_and_survives_a_fork(sandbox: Sandbox):
    copy = pickle.loads(pickle.dumps(sandbox))
    assert copy.run("print(5)").stdout == "5\n" and copy.policy == sandbox.policy
    if (pid := os.fork()) == 0:
        code = 1
        try:
            code = 0 if sandbox.run("print(6)").stdout == "6\n" else 2
            sandbox.close()
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert sandbox.run("print(7)").stdout == "7\n"


def test_an_interrupted_run_leaves_its_answer_to_nobody():
    def interrupt(*_: Any) -> None:
        raise TimeoutError

    own = Sandbox(timeout=PATIENCE)
    pid = own._idle[0].process.pid

    def alarm() -> None:
        wait_until(lambda: children(pid), what="the program")
        os.kill(os.getpid(), signal.SIGALRM)

    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        threading.Thread(target=alarm, daemon=True).start()
        with pytest.raises(TimeoutError):
            own.run("import time; time.sleep(1); print('old')")
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert own.run("print('new')").stdout == "new\n"
    own.close()


def test_a_dead_starter_costs_one_program(sandbox: Sandbox):
    own = Sandbox(timeout=60)
    pid = own._idle[0].process.pid

    def kill() -> None:
        wait_until(lambda: children(pid), what="the program")
        os.kill(pid, signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    # This is not a failure of the program, so it must not get a score
    with pytest.raises(RuntimeError, match="starter process of the sandbox was killed"):
        own.run("import time; time.sleep(60)")
    assert own.run("print(1)").ok


WITHOUT = """
import struct, sys
from torchrl_rloo.sandbox import kernel
from torchrl_rloo.sandbox import Sandbox
i = kernel.instruction
refuse, allow = i(0x06, 0x00050026), i(0x06, 0x7FFF0000)
if sys.argv[1].startswith("landlock"):  # landlock_create_ruleset, or only landlock_restrict_self
    body = [i(0x20, 0), i(0x15, 446 if "restrict" in sys.argv[1] else 444, 0, 1), refuse, allow]
else:  # refuse prctl calls with PR_SET_SECCOMP as first argument
    number = 157 if "x86" in kernel.platform.machine() else 167
    body = [i(0x20, 0), i(0x15, number, 0, 3), i(0x20, 16), i(0x15, 22, 0, 1), refuse, allow]
kernel.install_filter(b"".join(body))
try:
    Sandbox()
except RuntimeError as error:
    print(error)
weaker = Sandbox(allow_weaker=True)
print(len(weaker.missing), weaker.run("import os; os.fork()").ok, weaker.run("open('/etc/passwd')").ok)
print(weaker.open().run("1").reason)
"""


@pytest.mark.parametrize(
    ("layer", "left"),
    [("landlock", "1 False True"), ("landlock restrict", "1 False True"), ("seccomp", "1 True False")],
    ids=["landlock", "landlock-restrict", "seccomp"],
)
def test_a_missing_layer_is_refused_by_default(layer: str, left: str):
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", WITHOUT, layer]
    result = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=60)
    message, facts, reason = result.stdout.splitlines()
    assert layer.split()[0] in message.lower() and "allow_weaker=True" in message
    assert (facts, reason) == (left, "ok")


def test_unusable_settings_are_refused():
    for settings in ({"timeout": 0}, {"timeout": float("nan")}, {"memory": MB}, {"max_output": 0}, {"cpu_seconds": 0}):
        with pytest.raises(ValueError, match=next(iter(settings))):
            Sandbox(**settings)
    with pytest.raises(OSError, match="sparc"):
        kernel.seccomp_filter("sparc")
    assert issubclass(SandboxUnavailableError, RuntimeError)


def test_filter_of_the_other_machine_has_no_call_it_should_not():
    names = set(kernel.SYSCALLS)
    assert not names & {"fork", "vfork", "execve", "socket", "connect", "kill", "tgkill", "ptrace", "mount", "unlink"}
    for machine in ("x86_64", "aarch64"):
        assert len(kernel.seccomp_filter(machine)) % 8 == 0
