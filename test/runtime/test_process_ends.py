"""Ends of helper processes: nothing outlives the close of an executor, nor the trainer, however either ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import cloudpickle
import pytest

from support.processes import children, descendants, is_gone, wait_until_gone
from support.waiting import PATIENCE, in_thread, wait_until
from torchrl_rloo.rewards.executors import ProcessExecutor
from torchrl_rloo.rewards.protocol import RewardBatch, RewardFailure
from torchrl_rloo.runtime import processes
from torchrl_rloo.runtime.processes import Guard, HelperProcess, reaped_command, short_environment

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test file
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reapers require Linux")
ROOT = Path(__file__).resolve().parents[2]

NOTE = "import os, time\ndef note(): os.open({path!r} + str(os.getpid()), os.O_CREAT)\n"
# Children that a reward may leave. Each writes a file with its process id as name
FAMILIES = {
    "fork": "if os.fork() == 0: note(); time.sleep(1000)",
    "own_group": "if os.fork() == 0: os.setpgid(0, 0); note(); time.sleep(1000)",
    "own_session": "if os.fork() == 0: os.setsid(); note(); time.sleep(1000)",
    "daemon": (
        "if (p := os.fork()) == 0:\n os.setsid()\n if os.fork(): os._exit(0)\n"
        " note(); time.sleep(1000)\nos.waitpid(p, 0)"
    ),
    "daemon_of_a_daemon": (
        "if (p := os.fork()) == 0:\n for _ in range(4):\n  os.setsid()\n  if os.fork(): os._exit(0)\n"
        " note(); time.sleep(1000)\nos.waitpid(p, 0)"
    ),
    "without_environment": (
        "import subprocess, sys\n"
        "c = 'import os, sys, time; os.open(sys.argv[1] + str(os.getpid()), os.O_CREAT); time.sleep(1000)'\n"
        "subprocess.Popen([sys.executable, '-I', '-S', '-c', c, {path!r}], env={{}}, start_new_session=True)"
    ),
    "shell_in_background": "os.system('setsid sh -c \"touch {path}\\$\\$; exec sleep 1000\" >/dev/null 2>&1 &')",
    "stopped": "if os.fork() == 0: os.setsid(); note(); os.kill(os.getpid(), 19); time.sleep(1000)",
    "deaf": (
        "import signal\nif os.fork() == 0:\n for n in {{*range(1, 32)}} - {{9, 19}}: signal.signal(n, signal.SIG_IGN)\n"
        " note()\n while True: time.sleep(1)"
    ),
    "grandchildren": (
        "if os.fork() == 0:\n os.setsid()\n for _ in range(3):\n  if os.fork() == 0: os.setsid(); break\n"
        " note(); time.sleep(1000)"
    ),
    "chain": (  # each process lives for a moment only
        "if (p := os.fork()) == 0:\n note()\n end = time.monotonic() + 100\n while time.monotonic() < end:\n"
        "  time.sleep(0.01)\n  if os.fork(): os._exit(0)\nos.waitpid(p, 0)"
    ),
    "chain_of_sessions": (
        "if (p := os.fork()) == 0:\n note()\n end = time.monotonic() + 100\n while time.monotonic() < end:\n"
        "  os.setsid(); time.sleep(0.01)\n  if os.fork(): os._exit(0)\nos.waitpid(p, 0)"
    ),
    "threads_that_fork": (
        "import threading\ndef f():\n for _ in range(5):\n  if os.fork() == 0: os.setsid(); note(); time.sleep(1000)\n"
        "t = [threading.Thread(target=f) for _ in range(3)]\n[x.start() for x in t]; [x.join() for x in t]"
    ),
    "pipes_held_open": (
        "if os.fork() == 0:\n os.setsid()\n for n in range(3, 40):\n"
        "  try: os.set_inheritable(n, True)\n  except OSError: pass\n"
        " note(); os.execvp('sleep', ['sleep', '1000'])"
    ),
}
ENDS = {
    "answer": "",
    "hang": "time.sleep(1000)",
    "spin": "9 ** (9 ** 9)",
    "crash": "os.kill(os.getpid(), 11)",
    "exit": "os._exit(3)",
}


def leave(completions, **_) -> list[float]:
    """Run the completion as a program."""
    exec(completions[0], {})
    return [1.0]


def program(family: str, path: Path, then: str = "") -> str:
    return NOTE.format(path=f"{path}/") + FAMILIES[family].format(path=f"{path}/") + "\n" + then


def noted(path: Path) -> list[int]:
    return [int(name) for name in os.listdir(path)]


def run(executor: ProcessExecutor, text: str) -> list:
    return executor.run(leave, [RewardBatch(["p"], [text], [[1]])])


@pytest.fixture
def everything_ends() -> Iterator[None]:
    """Check that the test leaves no process: orphans stay below this one."""
    processes._prctl(processes._PR_SET_CHILD_SUBREAPER, 1)
    before = set(descendants(os.getpid()))
    yield
    try:
        wait_until(lambda: all(map(is_gone, set(descendants(os.getpid())) - before)), timeout=20.0)
    finally:
        for pid in set(descendants(os.getpid())) - before:
            os.kill(pid, signal.SIGKILL)
        processes._prctl(processes._PR_SET_CHILD_SUBREAPER, 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_close_leaves_no_child_of_an_idle_worker(family: str, tmp_path: Path, everything_ends: None):
    executor = ProcessExecutor(1, timeout=PATIENCE)
    assert not isinstance(run(executor, program(family, tmp_path))[0], RewardFailure)
    pids = wait_until(lambda: noted(tmp_path), what="a child")
    executor.close()
    assert all(map(is_gone, pids)), "they have ended when close() returns"


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("family", ["own_session", "daemon", "without_environment"])
def test_a_call_that_ends_its_worker_leaves_no_child(family: str, end: str, tmp_path: Path, everything_ends: None):
    executor = ProcessExecutor(1, timeout=PATIENCE if end in ("crash", "exit", "answer") else 2.0)
    wait = f"\nwhile not os.listdir({str(tmp_path)!r}): time.sleep(0.01)\n"
    (result,) = run(executor, program(family, tmp_path, wait + ENDS[end]))
    kinds = {"answer": None, "hang": "timed_out", "spin": "timed_out", "crash": "worker_died", "exit": "worker_died"}
    assert getattr(result, "kind", None) == kinds[end]
    if end != "answer":
        assert all(map(is_gone, noted(tmp_path))), "they ended with the worker"
    executor.close()
    assert all(map(is_gone, noted(tmp_path)))


def worker_of(executor: ProcessExecutor) -> int:
    """Return an idle worker: its reaper's oldest child."""
    return min(children(executor._idle[-1]._helper.process.pid))


CLOSES = {
    "twice": lambda e: (e.close(), e.close()),
    "in_a_thread": lambda e: in_thread(e.close).result(PATIENCE),
    "in_threads_at_once": lambda e: [f.result(PATIENCE) for f in [in_thread(e.close) for _ in range(4)]],
    "by_deletion": lambda e: None,
    "after_a_crash_while_idle": lambda e: (os.kill(worker_of(e), signal.SIGKILL), e.close()),
}


@pytest.mark.parametrize("how", CLOSES)
def test_every_close_leaves_nothing(how: str, tmp_path: Path, everything_ends: None):
    executor = ProcessExecutor(2, timeout=PATIENCE)
    run(executor, program("daemon", tmp_path))
    wait_until(lambda: noted(tmp_path), what="a child")
    CLOSES[how](executor)
    del executor
    wait_until_gone(noted(tmp_path))


@pytest.mark.parametrize("busy", ["time.sleep(1000)", "9 ** (9 ** 9)", "os.kill(os.getpid(), 19)"])
def test_a_close_during_a_hung_call_ends_it(busy: str, tmp_path: Path, everything_ends: None):
    executor = ProcessExecutor(1, timeout=None)
    future = in_thread(run, executor, program("daemon", tmp_path, busy))
    pids = wait_until(lambda: noted(tmp_path), what="a child")
    executor.close()
    with pytest.raises(RuntimeError, match="closed during a run"):
        future.result(PATIENCE)
    assert all(map(is_gone, pids))


def test_a_close_during_the_start_of_a_worker(everything_ends: None):
    executor = ProcessExecutor(2, timeout=None)
    future = in_thread(run, executor, "import time; time.sleep(1000)")
    wait_until(lambda: executor._lock.locked(), what="the run")
    executor.close()
    with pytest.raises(RuntimeError, match="closed during a run"):
        future.result(PATIENCE)


def test_a_signal_handler_may_close_the_executor_in_a_run(everything_ends: None):
    executor = ProcessExecutor(1, timeout=None)
    before = signal.signal(signal.SIGUSR1, lambda *_: executor.close())
    try:
        me = threading.main_thread().ident
        threading.Timer(0.5, lambda: signal.pthread_kill(me, signal.SIGUSR1)).start()
        with pytest.raises(RuntimeError, match="closed during a run"):
            run(executor, "import time; time.sleep(1000)")
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_worker_keeps_no_zombies(tmp_path: Path, everything_ends: None):
    executor = ProcessExecutor(1, timeout=PATIENCE)
    text = "import os\nfor _ in range(20):\n if (p := os.fork()) == 0:\n  os.fork(); os._exit(0)\n os.waitpid(p, 0)"
    run(executor, text)

    def zombies() -> int:
        family = set(descendants(os.getpid()))
        stats = [processes._stat(int(name)) for name in os.listdir("/proc") if name.isdigit()]
        return sum(s[0] == "Z" and int(s[1]) in family for s in stats if s)

    wait_until(lambda: zombies() == 0, what="the reaping of orphans")
    executor.close()


# Trainers: each starts all kinds of helpers, writes their ids, and ends

TRAINER = r"""
import json, os, signal, sys, threading, time
from torchrl_rloo.runtime.processes import HelperProcess, reaped_command, short_environment
from torchrl_rloo.rewards.executors import ProcessExecutor
from torchrl_rloo.rewards.process_judge import ProcessJudge
from torchrl_rloo.rewards.protocol import RewardBatch
from torchrl_rloo.sandbox import Sandbox
from support.processes import children, descendants
def leave(completions, **_):
    exec(completions[0], {})
    return [1.0]

def batch(text):
    return [RewardBatch(["p"], [text], [[1]])]

def train(folder, forked, end, judged):
    daemon = "import os, time\nif (p := os.fork()) == 0:\n os.setsid()\n if os.fork(): os._exit(0)\n"
    daemon += f" os.open({folder!r} + '/' + str(os.getpid()), os.O_CREAT); time.sleep(1000)\nos.waitpid(p, 0)\n"
    idle, hung = ProcessExecutor(1, 1000.0), ProcessExecutor(1, 1000.0)
    idle.run(leave, batch(daemon))
    threading.Thread(target=hung.run, args=(leave, batch(daemon + "9 ** (9 ** 9)")), daemon=True).start()
    sandbox, quiet, sessions = Sandbox(timeout=1000), Sandbox(), Sandbox(timeout=1000)
    program = lambda: sandbox.run("import time; time.sleep(1000)", guest="import time; time.sleep(1000)")
    threading.Thread(target=program, daemon=True).start()
    busy, other = sessions.open(), sessions.open()
    threading.Thread(target=busy.run, args=("import time; time.sleep(1000)",), daemon=True).start()
    other.run("1")
    server = HelperProcess(reaped_command([sys.executable, "-c", daemon + "time.sleep(1000)"]), short_environment())
    judge = ProcessJudge("json", 5.0)
    if judged:
        judge.judge("{}", "1")
    me, fork = os.getpid(), 0
    while len(os.listdir(folder)) < 3 or len(descendants(me)) < 18 + 2 * judged:
        time.sleep(0.01)
    if forked and (fork := os.fork()) == 0:
        time.sleep(1000)  # holds open all sockets and pipes of the trainer
    print(json.dumps([me, fork, sorted(set(descendants(me)) - {fork})]), flush=True)
    signal.sigwait([signal.SIGUSR1])
    {"exit": sys.exit, "os_exit": lambda: os._exit(0), "abort": os.abort, "raise": lambda: 1 / 0,
     "wait": lambda: time.sleep(1000)}[end]()

signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
for line in sys.stdin:  # a trainer for each line
    if (pid := os.fork()) == 0:
        train(*json.loads(line))
        break
    os.waitpid(pid, 0)
    print("ended", flush=True)
"""
HOW = {
    "exit": ("exit", None),
    "os_exit": ("os_exit", None),
    "abort": ("abort", None),
    "raise": ("raise", None),
    "kill": ("wait", signal.SIGKILL),
    "terminate": ("wait", signal.SIGTERM),
    "segfault": ("wait", signal.SIGSEGV),
}
CASES = [(how, "alone", "running") for how in HOW] + [
    ("kill", "forked", "running"),
    ("os_exit", "forked", "running"),
    ("kill", "alone", "stopped"),
    ("kill", "forked", "stopped"),
    ("kill", "forked", "guard_killed"),
]


@pytest.fixture(scope="module")
def trainers() -> Iterator[subprocess.Popen]:
    """Process that imports everything once and forks a trainer for each line of its input."""
    variables = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'test'}", "OMP_NUM_THREADS": "1"}
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, "-c", TRAINER], env=variables, text=True, **streams) as process:
        yield process
        process.kill()


@pytest.mark.usefixtures("sandboxed")
@pytest.mark.parametrize(("how", "forked", "state"), CASES, ids=["-".join(case) for case in CASES])
def test_nothing_outlives_the_trainer(how: str, forked: str, state: str, tmp_path: Path, trainers: subprocess.Popen):
    end, number = HOW[how]
    judged = state != "guard_killed"  # without the guard, a judge ends with its pipes, which a fork may hold open
    print(json.dumps([str(tmp_path), forked == "forked", end, judged]), file=trainers.stdin, flush=True)
    trainer, fork, helpers = json.loads(trainers.stdout.readline())
    try:
        guards = [p for p in helpers if b"\0guard\0" in Path(f"/proc/{p}/cmdline").read_bytes()]
        assert len(guards) == 1, "all helpers share one"
        if state == "stopped":
            for pid in set(helpers) - set(guards):
                os.kill(pid, signal.SIGSTOP)
        if state == "guard_killed":
            os.kill(guards[0], signal.SIGKILL)
        os.kill(trainer, signal.SIGUSR1 if number is None else number)
        assert trainers.stdout.readline() == "ended\n"
        wait_until_gone(helpers)
        assert not fork or not is_gone(fork), "the fork is none of the helpers"
    finally:
        for pid in {trainer, *helpers, *[fork] * bool(fork)}:
            if not is_gone(pid):
                os.kill(pid, signal.SIGKILL)


# Limits and environment


SECRETS = {"OPENAI_API_KEY": "hush", "HF_TOKEN": "hush", "AWS_SECRET_ACCESS_KEY": "hush", "PYTHON_TOKEN": "hush"}
SECRETS |= {"HF_HUB_TOKEN": "hush", "PATH_TO_KEY": "hush", "LCXKEY": "hush", "HTTPS_PROXY": "http://user:hush@proxy"}


def facts(pid: int) -> tuple[str, dict[str, str]]:
    limits = dict(line.split("  ", 1) for line in Path(f"/proc/{pid}/limits").read_text().splitlines()[1:])
    return Path(f"/proc/{pid}/environ").read_text(), {name.strip(): value.split()[0] for name, value in limits.items()}


@pytest.mark.usefixtures("sandboxed")
def test_helpers_have_limits_and_no_secrets(monkeypatch: pytest.MonkeyPatch):
    from torchrl_rloo.sandbox import Sandbox

    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    guard = Guard.shared()  # an earlier test may have started it
    before = set(descendants(os.getpid())) - {guard.process.pid}
    executor, sandbox, sessions = ProcessExecutor(1), Sandbox(), Sandbox()
    server = HelperProcess(reaped_command(["sleep", "1000"]), short_environment())
    run(executor, "")
    session = sessions.open()
    session.run("1")
    wait_until(lambda: len(set(descendants(os.getpid())) - before) == 9, what="all helpers")
    for pid in set(descendants(os.getpid())) - before:
        environment, limits = facts(pid)
        command = Path(f"/proc/{pid}/cmdline").read_text()
        assert "hush" not in environment, command
        assert limits["Max core file size"] == "0", command
        assert int(limits["Max open files"]) <= 4300, command
        bounds = [limits["Max address space"], limits["Max data size"]]
        assert bounds != ["unlimited"] * 2 or "sleep" in command, command
    for helper in (executor, sandbox, sessions):
        helper.close()
    server.end()


def test_a_worker_gets_the_variables_that_are_named(monkeypatch: pytest.MonkeyPatch):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    text = "import os; raise KeyError(' '.join(sorted(n for n, v in os.environ.items() if 'hush' in v)))"
    for names in ([], ["HF_TOKEN"], ["HF_*"], ["*"]):
        executor = cloudpickle.loads(cloudpickle.dumps(ProcessExecutor(1, environment=names)))
        (failure,) = run(executor, text)
        wanted = [n for n in sorted(SECRETS) if "*" in names or n in names or names == ["HF_*"] and n[:3] == "HF_"]
        assert failure.message == f"KeyError: {' '.join(wanted)!r}"
        executor.close()
    with pytest.raises(ValueError, match="environment='HF_TOKEN' must be a list"):
        ProcessExecutor(1, environment="HF_TOKEN")


def test_a_worker_raises_beyond_its_memory():
    executor = ProcessExecutor(1, timeout=PATIENCE, memory=256 << 20)
    (failure,) = run(executor, "x = bytearray(1 << 30)")
    assert failure.message == "MemoryError: "[: len(failure.message)] and failure.kind == "raised"
    assert run(executor, "x = bytearray(1 << 24)")[0].scores == [1.0]
    executor.close()
    with pytest.raises(ValueError, match="memory=5 must be at least"):
        ProcessExecutor(1, memory=5)
    everything = ProcessExecutor(1, timeout=PATIENCE)
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") + (1 << 30)
    (failure,) = run(everything, f"import mmap; mmap.mmap(-1, {size}, flags=mmap.MAP_PRIVATE | mmap.MAP_ANON)")
    assert failure.kind == "raised" and "memory" in failure.message.lower()
    everything.close()


def test_kill_tree_spares_outsiders_of_the_same_group():
    bystander, root = subprocess.Popen(["sleep", "1000"]), subprocess.Popen(["sh", "-c", "sleep 1000 & sleep 1000"])
    child = wait_until(lambda: len(descendants(root.pid)) == 2 and descendants(root.pid))
    processes.kill_tree(root.pid)
    root.wait(PATIENCE)
    wait_until_gone(child)
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()


def test_signals_to_the_reaper_reach_the_helper():
    text = (
        "import signal, time; signal.signal(signal.SIGTERM, lambda *_: exit(7)); print(1, flush=True); time.sleep(1000)"
    )
    for number, code in ((signal.SIGTERM, 7), (signal.SIGUSR2, -signal.SIGUSR2)):
        command = reaped_command([sys.executable, "-c", text])
        helper = HelperProcess(command, short_environment(), stdout=subprocess.PIPE)
        helper.process.stdout.readline()
        helper.process.send_signal(number)
        assert helper.process.wait(PATIENCE) == code
        helper.end()
        helper.process.stdout.close()


def test_a_missing_program_is_refused(tmp_path: Path):
    for command in ("no-such-program", str(tmp_path / "x"), "./x"):
        with pytest.raises(FileNotFoundError, match="there is no such program"):
            reaped_command([command])
    (tmp_path / "x").write_text("")
    (tmp_path / "x").chmod(0o755)
    assert reaped_command(["./x"], folder=tmp_path)[-1] == "./x"
    assert reaped_command(["x"], {"PATH": str(tmp_path)})[-1] == "x"
