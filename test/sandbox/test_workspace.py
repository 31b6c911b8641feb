"""Workspaces: what commands can reach, how they end, limits, file operations, and states of conversations."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterator

import pytest

from support.processes import children, descendants, wait_until_gone
from support.waiting import wait_until
from torchrl_rloo.envs.tools.parsers import ToolCall, ToolResult
from torchrl_rloo.envs.tools.session import ToolSession
from torchrl_rloo.envs.tools.tool import ToolRegistry
from torchrl_rloo.envs.tools.workspace import FileEditTool, ShellTool, Workspace
from torchrl_rloo.sandbox import Sandbox, SessionResult, WorkspaceLostError, WorkspaceSession

MB = 1 << 20
PYTHON = "python3"
TMP = "/tmp"


@pytest.fixture(scope="module")
def workspace() -> Workspace:
    return Workspace(timeout=20, memory=256 * MB, disk=8 * MB, processes=24, max_output=1000)


@pytest.fixture
def folder(workspace: Workspace) -> Iterator[WorkspaceSession]:
    with workspace.open({"a.txt": "one\ntwo\none\n", "lib/b.py": "x = 1\n"}) as folder:
        yield folder


@pytest.fixture(scope="module")
def shared(workspace: Workspace) -> Iterator[WorkspaceSession]:
    """A folder like the other one, for tests that do not change it."""
    with workspace.open({"a.txt": "one\ntwo\none\n", "lib/b.py": "x = 1\n"}) as folder:
        run(folder, "printf '\\377\\376' > lib/binary; mkfifo lib/pipe")
        yield folder


def run(folder: WorkspaceSession, command: str, timeout: float | None = None) -> SessionResult:
    return folder.run(command, timeout)


def edit(folder: WorkspaceSession, operation: str, **arguments: object) -> tuple[bool, str]:
    return asyncio.run(folder.edit(operation, **arguments))


def python(folder: WorkspaceSession, code: str) -> str:
    return run(folder, f"{PYTHON} - <<'END'\n{code}\nEND").output


def below() -> set[int]:
    return set(descendants(os.getpid()))


def keepers(workspace: Workspace) -> list[int]:
    return children(workspace.sandbox.host().process.pid)


# --------------------------------------------------------------------------------------------- what a command can reach
def test_files_persist_between_commands_and_the_shell_does_not(folder):
    assert run(folder, "cd lib; x=1; echo hi > c.txt; echo oh > $TMPDIR/d").code == 0
    assert run(folder, "pwd; cat lib/c.txt $TMPDIR/d; echo $x").output == "/workspace\nhi\noh\n\n"
    assert run(folder, "echo out; echo err >&2; exit 3") == SessionResult("exit", "out\nerr\n", code=3)
    assert run(folder, "kill -9 $$").code == -signal.SIGKILL


def test_the_machine_is_out_of_reach(folder, tmp_path):
    secret, written = tmp_path / "secret", tmp_path / "written"
    secret.write_text("secret")
    result = run(
        folder, f"cat {secret}; cat /proc/1/root{secret} /etc/shadow ~root/.ssh/*; echo x > {written}; ls {tmp_path}"
    )
    assert result.output.count("No such file") >= 3 and "secret\n" not in result.output.replace(f"{secret}", "")
    assert not written.exists()
    for place in ("/", "/usr", "/etc", "/dev", "/proc", sys.base_prefix):
        assert run(folder, f"echo x > {place}/x-of-a-test").code == 1, place
        assert not os.path.exists(f"{place}/x-of-a-test")
    shown = set(run(folder, "ls /").output.split())
    assert shown <= {
        "bin",
        "dev",
        "etc",
        "lib",
        "lib32",
        "lib64",
        "libx32",
        "proc",
        "sbin",
        "tmp",
        "usr",
        "workspace",
    } | {sys.base_prefix.split("/")[1]}
    assert "SECRET" not in run(folder, "env; cat /proc/1/environ /proc/*/environ").output


def test_the_environment_is_short(workspace, monkeypatch):
    monkeypatch.setenv("API_KEY", "SECRET")
    with workspace.open() as folder:
        names = {line.split("=")[0] for line in run(folder, "env; cat /proc/1/environ").output.splitlines()}
    assert names <= {
        "HOME",
        "PWD",
        "TMPDIR",
        "PATH",
        "LANG",
        "TZ",
        "PYTHONDONTWRITEBYTECODE",
        "SHLVL",
        "_",
        "OLDPWD",
    } | {"cat: /proc/1/environ: Permission denied"}


def test_there_is_no_network_and_no_other_process(folder):
    assert run(folder, "grep : /proc/net/dev | cut -d: -f1").output.split() == ["lo"]
    code = """
import socket, os
internet, vsock, netlink = 2, 40, 16
for family, address in ((internet, ("127.0.0.1", 1)), (internet, ("8.8.8.8", 53)), (vsock, (2, 1)), (netlink, (0, 0))):
    try:
        socket.socket(family, socket.SOCK_STREAM if family != 16 else socket.SOCK_RAW).connect(address)
        print("reached", family)
    except OSError as error:
        print(error.errno)
print(sorted(int(n) for n in os.listdir("/proc") if n.isdigit())[0], os.getppid() != 0)
"""
    lines = python(folder, code).splitlines()
    assert all(line != "reached" and int(line) in (1, 97, 101) for line in lines[:4]) and lines[4] == "1 True"


ESCAPES = {
    "namespaces": "unshare -Ur true",
    "mounts": "mount -t tmpfs x /tmp",
    "signals to the keeper": "kill -KILL 1; kill -TERM 1; kill -INT 1; kill -STOP 1; false",
    "capabilities": f"{PYTHON} -c 'import os; os.setuid(0)'",
    "memory of the keeper": f'{PYTHON} -c \'open("/proc/1/mem", "rb+")\'',
    "files of the keeper": "readlink /proc/1/fd/0",
    "devices": "mknod sda b 8 0",
    "host name": "hostname other",
    "limits of the keeper": f"{PYTHON} -c 'import resource; resource.prlimit(1, resource.RLIMIT_NOFILE, (3, 3))'",
    "priority of the keeper": f"{PYTHON} -c 'import os; os.setpriority(os.PRIO_PROCESS, 1, 19)'",
    "memory that no limit counts": f"{PYTHON} -c 'import os; os.memfd_create(\"x\")'",
    "kernel settings": "echo 1 > /proc/sys/kernel/randomize_va_space",
    "keys": f'{PYTHON} -c \'import ctypes; exit(ctypes.CDLL(None).syscall(248, b"user", b"a", b"b", 1, -3) < 0)\'',
}


@pytest.mark.parametrize("name", ESCAPES)
def test_an_escape_fails(shared, name: str):
    assert run(shared, ESCAPES[name]).code not in (0, None)
    assert run(shared, "echo alive").output == "alive\n"


def test_ids_own_no_file_of_the_trainer(folder):
    uid = run(folder, "cat /proc/self/uid_map").output.split()
    assert run(folder, "id -u").output == "1000\n"
    assert uid[-3:] == ["1000", "65534" if os.getuid() == 0 else str(os.getuid()), "1"]


# ------------------------------------------------------------------------------------------------------ ends and limits
DAEMON = (
    f"{PYTHON} - <<'END'\nimport os, time\nif os.fork(): os._exit(0)\nos.setsid()\nif os.fork(): os._exit(0)\n"
    "signals = __import__('signal')\nfor n in (1, 2, 15): signals.signal(n, signals.SIG_IGN)\n"
    "open(os.environ['TMPDIR'] + '/daemon', 'w').close()\ntime.sleep(1000)\nEND\n"
    "while ! test -e $TMPDIR/daemon; do sleep 0.01; done"
)


@pytest.mark.parametrize("command", ["sleep 1000 &", "nohup setsid sleep 1000 >/dev/null 2>&1 &", DAEMON])
def test_no_process_outlives_its_command(shared, command: str):
    run(shared, "true")
    before = below()
    assert run(shared, command).reason == "exit"
    assert below() <= before
    assert run(shared, "ps ax | grep -c 'slee[p] 1000'").output == "0\n"


def test_a_timeout_ends_all_processes(shared):
    run(shared, "true")
    before = below()
    result = run(shared, "echo begun; (setsid sleep 1000 &); trap '' TERM; sleep 1000", timeout=0.4)
    assert (result.reason, result.code, result.output) == ("timed_out", None, "begun\n")
    assert below() <= before


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (":(){ :|:& };:; sleep 10", "processes"),
        ("yes", "output"),
        (f"for i in 1 2 3; do {PYTHON} -c 'x = b\"1\" * (100 << 20); input()' < <(sleep 10) & done; wait", "memory"),
    ],
)
def test_limits(shared, command: str, reason: str):
    result = run(shared, command)
    assert result.reason == reason and result.code is None
    assert len(result.output) < 1200
    assert run(shared, "echo alive").output == "alive\n"


def test_limits_that_the_command_can_handle(folder):
    assert "MemoryError" in run(folder, f"{PYTHON} -c 'bytes(300 << 20)'").output
    assert (
        "No space left"
        in run(folder, "dd if=/dev/zero of=a bs=1M count=5; dd if=/dev/zero of=$TMPDIR/b bs=1M count=5").output
    )
    assert "No space left" in python(
        folder, "import os; os.remove('a')\nfor i in range(9999): open(f'f{i}', 'x').close()"
    )
    result = run(folder, f'{PYTHON} -c \'print("a" * 900 + "b" * 900)\'')
    assert (
        result.output.startswith("aaa")
        and result.output.endswith("bb\n")
        and "801 bytes of output are left" in result.output
    )


# ----------------------------------------------------------------------------------------------------------- file edits
def test_edits(folder):
    assert edit(folder, "view", path=".") == (True, "a.txt\nlib/")
    assert edit(folder, "view", path="a.txt", first=2, last=3) == (True, "     2\ttwo\n     3\tone")
    assert edit(folder, "replace", path="a.txt", old="two\n", new="2\n") == (
        True,
        "Replaced the text in line 2 of a.txt.",
    )
    assert edit(folder, "create", path="new/deep.txt", content="é\r\n") == (True, "Created new/deep.txt (1 lines).")
    assert run(folder, "cat a.txt; od -c new/deep.txt | head -1").output == "one\n2\none\n0000000 303 251  \\r  \\n\n"
    assert edit(folder, "create", path="/workspace/a.txt", content="")[1].startswith("Replaced")
    assert edit(folder, "view", path="a.txt") == (True, "(empty file)")


@pytest.mark.parametrize(
    ("operation", "arguments", "message"),
    [
        ("replace", {"path": "a.txt", "old": "one", "new": "x"}, "more than once in a.txt, in lines 1, 3: add text"),
        ("replace", {"path": "a.txt", "old": "three", "new": "x"}, "does not occur in a.txt: view the file"),
        ("replace", {"path": "a.txt", "old": "", "new": "x"}, "old is empty"),
        ("replace", {"path": "a.txt", "old": "two", "new": "two"}, "equal"),
        ("view", {"path": "b.txt"}, "there is no file b.txt: the folder has a.txt, lib; create"),
        ("view", {"path": "a.txt", "first": 4}, "lines 4 to 3 are not in a.txt: it has lines 1 to 3"),
        ("create", {"path": "lib", "content": ""}, "lib is a folder: give the path of a file"),
        ("create", {"path": "a.txt/b", "content": ""}, "cannot create a.txt/b: File exists"),
        ("create", {"path": "", "content": ""}, "is no path"),
        ("create", {"path": "big", "content": "x" * (MB + 1)}, "larger than 1 MB"),
        ("view", {"path": "lib/binary"}, "no UTF-8 text"),
        ("view", {"path": "lib/pipe"}, "no regular file"),
    ],
)
def test_errors_of_edits_say_what_to_do(shared, operation: str, arguments: dict, message: str):
    done, text = edit(shared, operation, **arguments)
    assert not done and message in text


WAYS_OUT = [
    "../x",
    "/etc/passwd",
    "lib/../../etc/passwd",
    "link/passwd",
    "file",
    "/proc/self/root" + "/etc/passwd",
    "loop",
    TMP + "/x",
]


def test_paths_cannot_leave_the_folder(folder):
    run(folder, "ln -s /etc link; ln -s /etc/passwd file; ln -s loop loop; echo 1 > $TMPDIR/x; ln -s ../x up")
    for path in [*WAYS_OUT, "up"]:
        for operation, more in (("view", {}), ("create", {"content": "x"}), ("replace", {"old": "1", "new": "2"})):
            done, text = edit(folder, operation, path=path, **more)
            assert not done, (path, operation, text)
    assert run(folder, "cat $TMPDIR/x").output == "1\n"
    assert run(folder, "ln /etc/passwd hard; ln $TMPDIR/x hard").code == 1
    run(folder, "ln a.txt hard")
    assert "several hard links: copy it" in edit(folder, "create", path="hard", content="")[1]


# ----------------------------------------------------------------------------------------------------- states and tools
def call(session: ToolSession, name: str, **arguments: object) -> ToolResult:
    return asyncio.run(session.call(ToolCall(name, arguments)))


@pytest.fixture
def make_session(workspace: Workspace) -> Iterator[Callable[..., ToolSession]]:
    before, sessions = keepers(workspace), []
    tools = ToolRegistry([ShellTool(workspace), FileEditTool(workspace)])

    def make(tools: ToolRegistry = tools, timeout: float = 60.0, **files: str) -> ToolSession:
        sessions.append(ToolSession(tools, {"files": files}, timeout=timeout))
        return sessions[-1]

    yield make
    for session in sessions:
        asyncio.run(session.close())
    wait_until(lambda: keepers(workspace) == before, what="the end of all keepers")


def test_tools_share_a_folder_and_conversations_do_not(make_session):
    one, other = make_session(a="1\n"), make_session()
    assert call(one, "edit", action="replace", path="a", old="1", new="2").outcome == "ok"
    assert call(one, "shell", command="cat a").text == "2"
    assert call(other, "shell", command="ls; false").text == "[exit code 1]"
    assert call(other, "shell", command="true").text == "(no output)"
    invalid = call(one, "edit", action="create", path="a")
    assert (invalid.outcome, invalid.text) == ("failed", "Error: action create requires content: add what is missing")
    assert "takes no old" in call(one, "edit", action="view", path="a", old="x").text
    assert call(one, "edit", action="delete", path="a").outcome == "invalid"


def test_concurrent_calls_of_a_conversation_keep_their_order(make_session):
    session = make_session()

    async def calls() -> list[ToolResult]:
        commands = [f"sleep 0.0{5 - i}; echo {i} >> log" for i in range(4)] + ["cat log"]
        return await asyncio.gather(*(session.call(ToolCall("shell", {"command": c})) for c in commands))

    assert asyncio.run(calls())[-1].text == "0\n1\n2\n3"


def test_limits_in_words_and_the_folder_stays(make_session):
    workspace = Workspace(timeout=0.5, processes=8)
    session = make_session(ToolRegistry([ShellTool(workspace)]))
    late = call(session, "shell", command="echo 1 > a; echo begun; sleep 100")
    assert (late.outcome, late.text.splitlines()[1:]) == ("timed_out", ["Before that it had printed:", "begun"])
    assert "longer than 0.5 s" in late.text
    assert "more than 8 processes" in call(session, "shell", command=":(){ :|:& };:; sleep 9").text
    assert call(session, "shell", command="cat a").text == "1"


def test_an_abandoned_call_loses_the_folder_and_the_next_one_begins_again(make_session):
    session = make_session(timeout=1.0, a="first\n")
    late = call(session, "shell", command="echo changed > a; sleep 100")
    assert late.outcome == "timed_out" and "its state is lost" in late.text
    assert call(session, "shell", command="cat a").text == "first"


def test_a_killed_keeper_is_noticed(workspace):
    with workspace.open() as folder:
        run(folder, "true")
        os.kill(folder.pid, signal.SIGKILL)
        with pytest.raises(WorkspaceLostError, match="lost"):
            run(folder, "true")


def test_copies_in_other_processes_work(workspace):
    shell, other = pickle.loads(pickle.dumps([ShellTool(workspace), FileEditTool(workspace)]))
    assert shell.state_key is other.state_key
    state = shell.open({"files": {"a": "1"}})
    assert asyncio.run(shell.call(state, command="cat a")) == "1"
    shell.close(state)


# --------------------------------------------------------------------------------------------------- without namespaces
WITHOUT = """
import asyncio, ctypes, os
user, group = os.getuid(), os.getgid()
assert ctypes.CDLL(None).unshare(0x10000000) == 0  # a user namespace, whose root forbids further ones
for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
    with open(f"/proc/self/{name}", "w") as file:
        file.write(text)
with open("/proc/sys/user/max_user_namespaces", "w") as file:
    file.write("0")
from torchrl_rloo.envs.tools import Workspace
from torchrl_rloo.sandbox import SandboxUnavailableError
try:
    Workspace()
except SandboxUnavailableError as error:
    print(error)
weaker = Workspace(allow_weaker=True)
print(len(weaker.sandbox.missing))
with weaker.open({"a": "1"}) as folder:
    print(folder.run("cat a; (setsid sleep 98765 &); pwd").output)
    print(folder.run("sleep 1000", 0.2).reason)
    print(asyncio.run(folder.edit("create", path="../x", content="")))
    print(folder.run("ps ax | grep -c 'slee[p] 98765'").output)
"""


def test_a_system_without_namespaces_is_refused_unless_the_user_allows_it(tmp_path, fork_server):
    done = fork_server.run(WITHOUT, environment={"TMPDIR": str(tmp_path)})
    message, missing, text, _, reason, edited, count, *_ = done.stdout.splitlines() or [done.stderr]
    assert "user namespaces" in message and "allow_weaker=True" in message and missing == "1"
    assert text.startswith(f"1{tmp_path}/workspace-")
    assert reason == "timed_out" and edited.startswith("(False") and count == "0"
    assert not list(tmp_path.iterdir()), "a folder is left behind"


def test_bad_settings_are_refused(tmp_path):
    for settings, message in [
        ({"timeout": 0}, "timeout=0 must be"),
        ({"memory": 1}, "memory=1 at least"),
        ({"disk": 0}, "disk=0 must be at least 1"),
        ({"readable": [tmp_path / "none"]}, "must be folders that exist"),
        ({"readable": ["/"]}, "would hide a folder of the workspace"),
        ({"readable": ["/tmp"]}, "would hide a folder of the workspace"),
    ]:
        with pytest.raises(ValueError, match=message):
            Workspace(**settings)
    workspace = Workspace()
    with pytest.raises(ValueError, match="must be a mapping of paths to texts"):
        workspace.open(["a"])
    with pytest.raises(ValueError, match="disk=67108864 must be 0 to run a program"):
        workspace.sandbox.run("1")
    with pytest.raises(ValueError, match="require a policy with a disk"):
        Sandbox().open({"a": ""})


def test_a_readable_folder_is_shown_read_only(tmp_path):
    tmp_path.chmod(0o755)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "greet").write_text("#!/bin/sh\necho hello\n")
    (tmp_path / "bin" / "greet").chmod(0o755)
    with Workspace(readable=[tmp_path]).open() as folder:
        assert run(folder, f"greet; echo x > {tmp_path}/x; rm {tmp_path}/bin/greet").output.startswith("hello\n")
    assert os.listdir(tmp_path) == ["bin"] and os.listdir(tmp_path / "bin") == ["greet"]


TRAINER = """
import asyncio
from torchrl_rloo.envs.tools import Workspace
folder = Workspace().open()
print(folder.pid, flush=True)
folder.run("sleep 1000", 1000)
"""


def test_nothing_is_left_when_the_trainer_is_killed(fork_server):
    trainer = fork_server.start(TRAINER)
    keeper = int(wait_until(lambda: trainer.stdout.endswith("\n") and trainer.stdout))
    wait_until(lambda: len(descendants(keeper)) >= 2)
    family = [keeper, *descendants(keeper)]
    trainer.send_signal(signal.SIGKILL)
    wait_until_gone(family)
