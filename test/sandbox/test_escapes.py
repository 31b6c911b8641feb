"""Attempts to escape from a program and from a Python session. Each succeeds outside, which proves that it is real."""

from __future__ import annotations

import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from torchrl_rloo.sandbox import PythonSession, Sandbox

pytestmark = pytest.mark.usefixtures("sandboxed")
X86 = platform.machine() == "x86_64"
ROOT = Path(__file__).parents[2]

SYSCALL = "import ctypes; call = ctypes.CDLL(None, use_errno=True).syscall\n"
# Each reads its targets from standard input and prints ESCAPED if it succeeds.
ESCAPES = {
    "tcp": "import socket; socket.create_connection(('127.0.0.1', a['tcp']), 2)",
    "listen": "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen()",
    "udp": "import socket; socket.socket(2, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', a['udp']))",
    "unix": "import socket; socket.socket(socket.AF_UNIX).connect(a['unix'])",
    "socketpair": "import socket; socket.socketpair()",
    "netlink": "import socket; socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)",
    "fork": "import os; pid = os.fork()\nif pid == 0: os._exit(0)",
    "subprocess": "import subprocess; subprocess.run(['/bin/true'], check=True)",
    "posix_spawn": "import os; os.posix_spawn('/bin/true', ['true'], {})",
    "system": "import os; assert os.system('true') == 0",
    "exec": "import os; os.execv('/bin/echo', ['echo', 'ESCAPED'])",
    "ctypes_fork": "import ctypes, os\nif ctypes.CDLL(None).fork() == 0: os._exit(0)\nassert os.wait()",
    "clone3": SYSCALL + "import struct\n"
    "r = call(435, struct.pack('=QQQQQQQQ', 0, 0, 0, 0, 17, 0, 0, 0), 64)\n"
    "if r == 0: import os; os._exit(0)\nassert r > 0",
    "write_file": "open(a['dir'] + '/new', 'w')",
    "append_file": "open(a['victim'], 'a').write('x')",
    "update_file": "open(a['victim'], 'r+').write('x')",
    "truncate": "import os; os.truncate(a['victim'], 0)",
    "write_repository": "open(a['repository'] + '/escape_of_a_test', 'w')",
    "write_temp": "import tempfile; tempfile.NamedTemporaryFile().write(b'x')",
    "write_shm": "import os; p = '/dev/shm/escape_of_a_test'; open(p, 'w').close(); os.remove(p)",
    "write_here": "open('new', 'w')",
    "temporary_directory": "import tempfile; tempfile.TemporaryDirectory()",
    "memfd": "import os; os.memfd_create('x')",
    "mkdir": "import os; os.mkdir(a['dir'] + '/new')",
    "remove": "import os; os.remove(a['victim'])",
    "rename": "import os; os.rename(a['victim'], a['dir'] + '/new')",
    "chmod": "import os; os.chmod(a['victim'], 0o777)",
    "chown": "import os; os.chown(a['victim'], os.getuid(), os.getgid())",
    "utime": "import os; os.utime(a['victim'])",
    "symlink": "import os; os.symlink(a['victim'], a['dir'] + '/new')",
    "hardlink": "import os; os.link(a['victim'], a['dir'] + '/new')",
    "read_through_symlink": "open(a['link']).read()",
    "fifo": "import os; os.mkfifo(a['dir'] + '/new')",
    "read_file": "assert 'hush' in open(a['victim']).read()",
    "list_folder": "import os; assert os.listdir(a['dir'])",
    "list_home": "import os; os.listdir(a['home'])",
    "read_etc": "open('/etc/passwd').read()",
    "environment": "import os; assert os.environ['TRAINER_SECRET']",
    "own_environment": "assert 'TRAINER' in open('/proc/self/environ').read()",
    "trainer_environment": "assert open(f'/proc/{a[\"trainer\"]}/environ').read()",
    "parent_environment": "import os; assert open(f'/proc/{os.getppid()}/environ').read()",
    "trainer_command": "assert open(f'/proc/{a[\"trainer\"]}/cmdline').read()",
    "trainer_memory": "open(f'/proc/{a[\"trainer\"]}/maps').read()",
    "trainer_folder": "import os; os.readlink(f'/proc/{a[\"trainer\"]}/cwd')",
    "own_memory": "open('/proc/self/mem', 'rb')",
    "inherited_file": "import os; assert b'hush' in os.pread(a['open'], 99, 0)",
    "signal_victim": "import os; os.kill(a['pid'], 9)",
    "signal_parent": "import os; os.kill(os.getppid(), 0)",
    "signal_everyone": "import os; os.kill(-1, 0)",
    "signal_group": "import os, signal; os.killpg(0, signal.SIGCONT)",
    "signal_by_pidfd": "import os, signal; signal.pidfd_send_signal(os.pidfd_open(a['pid']), 9)",
    "signal_by_file": "import fcntl; fcntl.fcntl(0, fcntl.F_SETOWN, a['pid'])",
    "signal_by_queue": "import ctypes; assert ctypes.CDLL(None).sigqueue(a['pid'], 0, None) == 0",
    "trace": "import ctypes; assert ctypes.CDLL(None).ptrace(0, 0, None, None) == 0",
    "raise_limits": "import resource as r; r.setrlimit(r.RLIMIT_CPU, r.getrlimit(r.RLIMIT_CPU))",
    "raise_limits_of_victim": "import resource as r; r.prlimit(a['pid'], r.RLIMIT_CORE, (0, 0))",
    "priority_of_victim": "import os; os.setpriority(os.PRIO_PROCESS, a['pid'], 5)",
    "pipe": "import os; os.pipe()",
    "shared_memory": SYSCALL + f"assert call({29 if X86 else 194}, 0, 4096, 0o1600) >= 0",
    "new_filter": "import ctypes; assert ctypes.CDLL(None).prctl(38, 1, 0, 0, 0) == 0",
    "change_folder": "import os; os.chdir(a['dir'])",
    # More attempts on another process
    "pidfd": "import os, signal; signal.pidfd_send_signal(os.pidfd_open(a['pid']), 0)",
    "signal_0": "import os; os.kill(a['pid'], 0)",
    "trace_victim": "import ctypes; assert ctypes.CDLL(None).ptrace(16, a['pid'], None, None) == 0",
    "read_memory": (
        "import ctypes\nlocal = ctypes.create_string_buffer(8)\n"
        "class V(ctypes.Structure): _fields_ = [('base', ctypes.c_void_p), ('size', ctypes.c_size_t)]\n"
        "mine, theirs = V(ctypes.addressof(local), 8), V(a['address'], 8)\n"
        "n = ctypes.CDLL(None).process_vm_readv(a['pid'], ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0)\n"
        "assert n == 8, n"
    ),
    "victim_memory": "open(f\"/proc/{a['pid']}/mem\", 'rb')",
    "victim_maps": "assert open(f\"/proc/{a['pid']}/maps\").read()",
    "victim_environment": "assert open(f\"/proc/{a['pid']}/environ\", 'rb') is not None",
    "victim_files": "import os; assert os.listdir(f\"/proc/{a['pid']}/fd\")",
    "victim_output": "open(f\"/proc/{a['pid']}/fd/1\", 'rb')",
    "parent_files": "import os; assert os.listdir(f'/proc/{os.getppid()}/fd')",
    "limits_of_victim": "import resource as r; r.prlimit(a['pid'], 4, r.prlimit(a['pid'], 4))",
    # More kinds of sockets and memory
    "every_family": (
        "import socket\nfor family in range(64):\n for kind in (1, 2, 3, 5):\n"
        "  try: socket.socket(family, kind); print('ESCAPED')\n  except OSError: pass\nraise SystemExit(1)"
    ),
    "socket_by_number": "import ctypes; assert ctypes.CDLL(None).socket(2, 1, 0) >= 0",
    "shared_segment": "from multiprocessing.shared_memory import SharedMemory as S; S(create=True, size=9).unlink()",
}
if os.getuid() == 0:
    ESCAPES["raw_socket"] = "import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)"
if X86:
    NATIVE = "import ctypes, mmap; m = mmap.mmap(-1, 4096, prot=7); m.write(bytes.fromhex({code!r}))\n"
    NATIVE += "assert ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))() > 0"
    ESCAPES["32_bit_call"] = NATIVE.format(code="b814000000cd80c3")  # mov eax, 20 (getpid); int 0x80; ret


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAINER_SECRET", "hush")
        sandbox = Sandbox(timeout=60, cpu_seconds=1, memory=128 << 20, max_output=100_000)
        yield sandbox
        sandbox.close()


@pytest.fixture(scope="module")
def bystander(sandbox: Sandbox) -> PythonSession:
    """Return the session of another trajectory, with a variable."""
    session = sandbox.open()
    session.run("import os; mine = 'mi' + 'ne'; pid = os.getpid()")
    return session


@pytest.fixture
def attack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Targets of the programs: listening servers, a file, a process, an inheritable open file."""
    monkeypatch.setenv("TRAINER_SECRET", "hush")
    victim, folder = tmp_path / "victim", tmp_path / "folder"
    victim.write_text("hush")
    folder.mkdir()
    (folder / "file").touch()
    (tmp_path / "link").symlink_to(victim)
    tcp, udp, unix = socket.socket(), socket.socket(type=socket.SOCK_DGRAM), socket.socket(socket.AF_UNIX)
    unix_path = os.path.join(tempfile.mkdtemp(), "s")  # tmp_path may be too long for a socket
    code = "import time, ctypes; b = ctypes.create_string_buffer(9)\n"
    code += "print(ctypes.addressof(b), flush=True); time.sleep(60)"
    command = [sys.executable, "-I", "-S", "-c", code]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    with tcp, udp, unix, victim.open() as opened:
        tcp.bind(("127.0.0.1", 0))
        udp.bind(("127.0.0.1", 0))
        unix.bind(unix_path)
        tcp.listen()
        unix.listen()
        os.set_inheritable(opened.fileno(), True)
        yield {
            "tcp": tcp.getsockname()[1],
            "udp": udp.getsockname()[1],
            "unix": unix_path,
            "victim": str(victim),
            "dir": str(folder),
            "link": str(tmp_path / "link"),
            "home": str(Path.home()),
            "repository": str(tmp_path),
            "trainer": os.getpid(),
            "pid": process.pid,
            "address": int(process.stdout.readline()),
            "open": opened.fileno(),
        }
    process.kill()
    process.communicate()
    os.remove(unix_path)
    os.rmdir(os.path.dirname(unix_path))


def check_nothing_changed(attack: dict[str, Any]) -> None:
    assert os.waitpid(attack["pid"], os.WNOHANG) == (0, 0)  # the target process is alive
    assert Path(attack["victim"]).read_text() == "hush"
    assert os.listdir(attack["dir"]) == ["file"]
    assert not list(ROOT.glob("escape_of_a_test"))


def program(escape: str) -> str:
    return f"import json, sys\na = json.loads(input())\n{ESCAPES[escape]}\nprint('ESCAPED', flush=True)"


@pytest.mark.parametrize("escape", ESCAPES)
def test_a_program_is_contained(sandbox: Sandbox, attack: dict[str, Any], escape: str):
    result = sandbox.run(program(escape), json.dumps(attack | {"repository": str(ROOT)}))
    assert "ESCAPED" not in result.stdout
    assert result.reason in ("exit", "killed") and not result.ok
    check_nothing_changed(attack)


@pytest.mark.parametrize("escape", ESCAPES)
def test_a_session_is_contained(sandbox: Sandbox, bystander: PythonSession, attack: dict[str, Any], escape: str):
    other, session = int(bystander.run("pid").output), sandbox.open()
    for pid in (other, os.getpid(), attack["pid"]):  # another trajectory, the trainer, and another process
        a = attack | {"repository": str(ROOT), "pid": pid}
        result = session.run(f"import sys\na = {a}\n{ESCAPES[escape]}\nprint('ESCAPED')")
        assert result.reason in ("error", "killed") and "ESCAPED" not in result.output, result
    session.close()
    assert bystander.run("mine").output == "'mine'\n"
    check_nothing_changed(attack)


@pytest.mark.parametrize("escape", ESCAPES)
def test_it_succeeds_outside(attack: dict[str, Any], escape: str, tmp_path: Path):
    command = [sys.executable, "-I", "-S", "-c", program(escape)]
    result = subprocess.run(
        command,
        input=json.dumps(attack) + "\n",
        text=True,
        capture_output=True,
        close_fds=False,
        cwd=tmp_path,
        start_new_session=True,
    )
    if escape == "32_bit_call" and result.returncode == -signal.SIGSEGV:
        pytest.skip("this kernel has no 32-bit calls")
    if escape in ("trace_victim", "read_memory", "victim_memory") and "ESCAPED" not in result.stdout and os.getuid():
        pytest.skip("this system lets no process trace another")
    assert "ESCAPED" in result.stdout, result.stderr
