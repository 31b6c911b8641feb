"""Escapes from the sandbox by root's rights, by packages, by rare system calls and as another user."""

from __future__ import annotations

import json
import os
import platform
import shutil
import site
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from support import attacks_processes
from support.processes import children, descendants
from support.waiting import wait_until
from torchrl_rloo.sandbox import Sandbox, kernel

pytestmark = pytest.mark.usefixtures("sandboxed")
X86 = platform.machine() == "x86_64"
ROOT = Path(__file__).parents[2]
VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    sandbox = Sandbox(timeout=60)
    yield sandbox
    sandbox.close()


# Packages

FOLDERS = {
    "base": f"{sys.base_prefix}/lib/{VERSION}/site-packages",
    "environment": sysconfig.get_paths()["purelib"],
    "user": site.getusersitepackages(),
    "debian": "/usr/lib/python3/dist-packages",
    "local": f"/usr/local/lib/{VERSION}/dist-packages",
    "bundled": f"{sys.base_prefix}/lib/{VERSION}/ensurepip/_bundled",
}
READ = """
import json, os, sys
folder, files = json.loads(input())
for name in [folder, os.path.dirname(folder), *{os.path.dirname(f) for f in files}]:
    try: print("ESCAPED", name, len(os.listdir(name)))
    except OSError: pass
for name in files:
    try: print("ESCAPED", name, len(open(name, "rb").read()))
    except OSError: pass
sys.path.insert(0, folder)
import importlib
importlib.invalidate_caches()
for name in {os.path.relpath(f, folder).split(os.sep)[0].removesuffix(".py") for f in files} | {"pip", "setuptools"}:
    if name in sys.stdlib_module_names or not name.isidentifier(): continue
    try: print("ESCAPED", __import__(name))
    except ImportError: pass
print("end")
"""


@pytest.mark.parametrize("name", FOLDERS)
def test_packages_of_no_interpreter_are_readable(sandbox: Sandbox, name: str):
    folder = Path(FOLDERS[name])
    patterns = ("*.pth", "*.py", "*/*.py", "*.whl")
    files = [str(path) for pattern in patterns for path in islice(folder.glob(pattern), 30)]
    if not files:
        pytest.skip(f"no packages in {folder}")
    assert sandbox.run(READ, json.dumps([str(folder), files])).stdout == "end\n"
    outside = subprocess.run([sys.executable, "-S", "-c", READ], input=json.dumps([str(folder), files]), text=True,
                             capture_output=True)  # fmt: skip
    assert "ESCAPED" in outside.stdout


def test_the_standard_library_is_complete(sandbox: Sandbox):
    text = (
        "import importlib, sys\nunwanted = {'antigravity', 'this', 'idlelib', 'ensurepip'}\n"
        "for n in sorted(sys.stdlib_module_names - unwanted):\n"
        " try: importlib.import_module(n)\n except ModuleNotFoundError: print(n)\n except ImportError as e: print(n, e)"
    )
    outside = subprocess.run([sys.executable, "-I", "-S", "-c", text], capture_output=True, text=True)
    assert sandbox.run(text).stdout == outside.stdout
    late = "import importlib, threading\nimportlib.invalidate_caches()\nimport colorsys, wave, xmlrpc.client\n"
    late += (
        "t = threading.Thread(target=lambda: print(1)); t.start(); t.join()\nimport ctypes; ctypes.CDLL('libm.so.6')"
    )
    assert sandbox.run(late).stdout == "1\n"


@pytest.mark.parametrize(
    "place", ["/usr/lib", "/lib64", "/usr/share", "/opt", "/var", "/etc", "/dev", "/sys", "/proc", "/"]
)
def test_no_other_folder_is_listed(sandbox: Sandbox, place: str):
    assert "PermissionError" in sandbox.run(f"import os; print(os.listdir({place!r}))").stderr


# Rights


def status_of_a_program(sandbox: Sandbox) -> dict[str, str]:
    thread = threading.Thread(target=sandbox.run, args=("import time; time.sleep(2)",))
    (starter,) = (s.process.pid for s in sandbox._idle)
    thread.start()
    try:
        (pid,) = wait_until(lambda: children(starter), what="the program")

        def read() -> dict[str, str]:
            return dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())

        return wait_until(lambda: (fields := read())["Seccomp"] == "2" and fields, what="the filter")
    finally:
        thread.join()


def test_a_program_has_no_capabilities(sandbox: Sandbox):
    status = status_of_a_program(sandbox)
    sets = ["CapInh", "CapPrm", "CapEff", "CapAmb", *(["CapBnd"] if os.getuid() == 0 else [])]
    assert {name: int(status[name], 16) for name in sets} == dict.fromkeys(sets, 0)
    assert status["NoNewPrivs"] == "1"


ATTEMPTS = {
    "locked": "mmap.mmap(-1, 1 << 20, flags=0x22 | 0x2000)",
    "locked_shared": "mmap.mmap(-1, 1 << 20, flags=0x21 | 0x2000)",
    "huge_pages": "mmap.mmap(-1, 2 << 20, flags=0x22 | 0x40000)",
    "write_library": "mmap.mmap(os.open(os.__file__, os.O_RDONLY), 0, flags=1, prot=3)",
    "append_library": "os.open(os.__file__, os.O_WRONLY | os.O_APPEND)",
    "mlock": "ok(libc.mlock(area, 4096))",
    "mlockall": "ok(libc.mlockall(1))",
    "setuid": "os.setuid(65534)",
    "setgroups": "os.setgroups([])",
    "nice": "os.nice(1)",
    "affinity": "os.sched_setaffinity(0, {0})",
    "scheduler": "os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))",
    "limits_of_the_parent": "resource.prlimit(os.getppid(), resource.RLIMIT_CORE)",
    "lease": "fcntl.fcntl(0, fcntl.F_SETLEASE, fcntl.F_RDLCK)",
    "notify": "fcntl.fcntl(0, fcntl.F_NOTIFY, 1)",
    "lock": "fcntl.flock(0, fcntl.LOCK_SH)",
    "append": "fcntl.fcntl(1, fcntl.F_SETFL, 0)",
    "terminal": "fcntl.ioctl(0, termios.FIONREAD, bytearray(4))",
    "truncate_input": "os.ftruncate(0, 1 << 40)",
    "allocate": "os.posix_fallocate(1, 0, 4096)",
    "sendfile": "os.sendfile(1, 0, 0, 9)",
    "splice": "os.copy_file_range(0, 1, 9)",
    "eventfd": "os.eventfd(0)",
    "memfd": "os.memfd_create('x')",
    "epoll": "select.epoll()",
    "session": "os.getsid(os.getppid())",
    "environment_of_the_starter": "open(f'/proc/{os.getppid()}/environ')",
    "files_of_the_starter": "os.listdir(f'/proc/{os.getppid()}/fd')",
    "file_of_the_starter": "os.open(f'/proc/{os.getppid()}/fd/3', os.O_RDONLY)",
    "own_files": "os.listdir('/proc/self/fd')",
    "mounts": "open('/proc/mounts')",
    "kernel_log": "open('/proc/version')",
    "terminal_device": "open('/dev/tty')",
    "random_device": "open('/dev/urandom', 'rb')",
    "null_device": "open('/dev/null')",
}
ATTEMPT = "import ctypes, fcntl, mmap, os, resource, select, termios\nlibc = ctypes.CDLL(None, use_errno=True)\n"
ATTEMPT += "area = ctypes.create_string_buffer(8192)\n"
ATTEMPT += "def ok(result):\n if result < 0: raise OSError(ctypes.get_errno(), 'x')\n"


@pytest.mark.parametrize("name", ATTEMPTS)
def test_an_attempt_is_refused(sandbox: Sandbox, name: str):
    result = sandbox.run(ATTEMPT + ATTEMPTS[name] + "\nprint('ESCAPED')", "some input")
    assert result.stdout == "" and "PermissionError" in result.stderr, result


@pytest.mark.parametrize("advice", [9, 10, 11, 12, 13, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 100, 101])
def test_rare_advice_on_memory_is_refused(sandbox: Sandbox, advice: int):
    text = ATTEMPT + "m = mmap.mmap(-1, 8192)\nat = ctypes.addressof(ctypes.c_char.from_buffer(m))\n"
    text += "libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]\n"
    text += f"assert libc.madvise(at, 8192, 4) == 0\nok(libc.madvise(at, 8192, {advice}))"
    assert "PermissionError: [Errno 1]" in sandbox.run(text).stderr


@pytest.mark.skipif(not X86, reason="numbers of x86-64")
def test_only_the_listed_calls_enter_the_kernel(sandbox: Sandbox):
    allowed = {numbers[0] for numbers in kernel.SYSCALLS.values()}
    allowed |= {numbers[0] for numbers in kernel.CONDITIONAL.values()}
    tried = [n for n in [*range(600), *range(0x40000000, 0x40000000 + 600)] if n not in allowed | UPROBES]
    text = (
        "import ctypes, json\nlibc = ctypes.CDLL(None, use_errno=True)\nfor n in json.loads(input()):\n"
        " if libc.syscall(ctypes.c_long(n), *[ctypes.c_long(0)] * 6) >= 0 or ctypes.get_errno() not in (1, 38):\n"
        "  print('ESCAPED', n, ctypes.get_errno())\nprint('end')"
    )
    assert len(tried) > 1100
    assert sandbox.run(text, json.dumps(tried)).stdout == "end\n"


UPROBES = {335, 336}  # these end the caller


# Floods


@pytest.mark.parametrize(
    "text",
    [
        "import sys\nwhile True: sys.stdout.write('x' * 100_000); sys.stderr.write('y' * 100_000)",
        "import os\nwhile True: os.write(1, b'x'); os.lseek(1, 0, 0)",
        "import os\nwhile True:\n for i in range(99): os.dup2(0, 10 + i % 20)",
        "import signal\nsignal.signal(14, lambda *_: None)\nsignal.setitimer(0, 1e-6, 1e-6)\nwhile True: pass",
        "x = []\nwhile True: x.append(bytearray(1 << 20))",
        "exec('x=' + '(' * 90 + '1' + ')' * 90)\nimport gc\nwhile True: gc.collect()",
        "import _thread, time\nwhile True:\n try: _thread.start_new_thread(time.sleep, (9,))\n except OSError: pass",
        "raise SystemExit('x' * 1_000_000)",
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
        "import sys; sys.argv[0] = 'x' * 10**6; import os; os.environ['A'] = 'x' * 10**6; os._exit(9)",
    ],
)
def test_a_flood_ends_and_the_next_program_runs(text: str):
    flooded = Sandbox(timeout=1.5, cpu_seconds=1, max_output=10_000)
    result = flooded.run(text)
    assert not result.ok and len(result.stdout) <= 10_000 and len(result.stderr) <= 2000
    assert flooded.run("print(1)").stdout == "1\n"
    flooded.close()


# Another user


OTHER = """
import importlib.util, os, sys, types
package = types.ModuleType("torchrl_rloo"); package.__path__ = ["torchrl_rloo"]
sys.modules["torchrl_rloo"] = package
from torchrl_rloo.sandbox import Sandbox
sandbox = Sandbox()
assert os.getuid() == 65534 and not sandbox.missing
print(sandbox.run("import json, ssl, sqlite3; print(6 * 7)").stdout, end="")
for attempt in open("attempts").read().split("\\0"):
    result = sandbox.run(attempt)
    if "ESCAPED" in result.stdout or "PermissionError" not in result.stderr:
        print(attempt, result)
sandbox.close()
"""


def is_usable(python: str) -> bool:
    """Return whether there is a Python from 3.10 on with the modules that the program imports."""
    check = "import sys, json, ssl, sqlite3; sys.exit(sys.version_info < (3, 10))"
    return os.path.exists(python) and not subprocess.run([python, "-I", "-c", check], capture_output=True).returncode


@pytest.mark.skipif(os.getuid() != 0 or not is_usable("/usr/bin/python3"), reason="requires root and a system Python")
def test_it_contains_the_same_as_another_user(tmp_path_factory: pytest.TempPathFactory):
    folder = Path("/var/tmp") / tmp_path_factory.mktemp("user").name
    shutil.rmtree(folder, ignore_errors=True)
    victim = subprocess.Popen(["sleep", "1000"], user=65534)
    try:
        # Copy the few files that it needs to a folder that all users may read
        for path in [*ROOT.glob("torchrl_rloo/sandbox/*.py"), *ROOT.glob("torchrl_rloo/runtime/*.py")]:
            target = folder / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
        attempts = [ATTEMPT + text + "\nprint('ESCAPED')" for name, text in ATTEMPTS.items()]
        attempts += [
            ATTEMPT + f"os.kill({victim.pid}, 9)\nprint('ESCAPED')",
            ATTEMPT + "os.kill(-1, 9)\nprint('ESCAPED')",
        ]
        (folder / "attempts").write_text("\0".join(attempts))
        for path in [folder, *folder.rglob("*")]:
            path.chmod(0o755)
        done = subprocess.run(
            ["/usr/bin/python3", "-I", "-c", "import sys; sys.path.insert(0, ''); exec(sys.stdin.read())"],
            input=OTHER, text=True, capture_output=True, cwd=folder, user=65534, group=65534, extra_groups=[], env={},
        )  # fmt: skip
        assert (done.stdout, victim.poll()) == ("42\n", None), done.stderr
    finally:
        victim.kill()
        victim.wait()
        shutil.rmtree(folder)


# Random system calls


def test_random_system_calls_escape_nowhere():
    assert attacks_processes.attack(20, seed=0) == {"tried": 20, "contained": 20, "failures": []}


def test_the_checks_find_what_an_escape_would_change(tmp_path: Path):
    (tmp_path / "canary").write_text("changed")
    dead = subprocess.Popen(["true"])
    dead.wait()
    assert attacks_processes.checks(tmp_path, dead, set(descendants(os.getpid())), set()) == [
        "a file changed", "another process was killed"
    ]  # fmt: skip
