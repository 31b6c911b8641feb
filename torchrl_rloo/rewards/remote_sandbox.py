"""Sandbox behind HTTP that speaks the protocol of SandboxFusion, for code rewards and the Python tool."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torchrl_rloo.rewards.remote import JsonEndpoint, RemoteRewardError
from torchrl_rloo.runtime import event_loop
from torchrl_rloo.runtime.lookup import import_room

if TYPE_CHECKING:
    from torchrl_rloo.sandbox import SandboxResult

_MAX_STDERR, _QUEUE_SECONDS = 2000, 60.0  # the latter is added to a program's limit
# Runs a program and its tests in one process, in separate modules; verdicts begin with a mark that only this call knows
_DRIVER = """
import json, os, sys, types
task, out = json.load(sys.stdin), os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
def say(passed, *rest):
    print(task["mark"] + json.dumps([passed, *rest]), file=out, flush=True)
    return passed
def attempt(step):
    try:
        return step()
    except BaseException as error:
        say(False, f"{type(error).__name__}: {error}"[:300])
names = vars(sys.modules.setdefault("program", types.ModuleType("program")))
def find():
    name, owner = task["candidate"]
    return names[name] if name in names or owner not in names else getattr(names[owner](), name)
def load():
    exec(compile(task["program"], "program.py", "exec"), names)
    for name, module, attribute in task["library"]:
        source = __import__("importlib").import_module(module)
        names.setdefault(name, getattr(source, attribute) if attribute else source)
    exec(compile(task["setup"], "setup.py", "exec"), names)
    return True
def run(kind, *content):
    if kind == "call":
        return say(True, find()(*content[0]))
    exec(compile(content[0], "test.py", "exec"), names)
    if kind == "check":
        names["check"](find())
    return say(True)
if attempt(load):
    for test in task["tests"]:
        if not attempt(lambda: run(*test)) and not task["partial"]:
            break
"""


class RemoteSandbox:
    """Sandbox of a server with SandboxFusion's endpoint ``POST /run_code``, which runs Python programs.

    Outputs of programs and results of functions are compared in this process. Assertions run in the process of the
    program: one that looks for its tests there could forge their verdicts, which the local sandbox excludes. A request
    that fails for good, or that the server answers with ``SandboxError``, raises ``RemoteRewardError``.

    Args:
        url: address of the endpoint, such as ``http://127.0.0.1:8080/run_code``.
        timeout: limit of a program in seconds.
        memory: limit of a program in bytes; None leaves it to the server.
        retries: attempts after the first.
        **settings: ``headers``, ``api_key_env`` and ``max_bytes`` of :class:`~torchrl_rloo.rewards.RemoteScorer`.

    Raises:
        ValueError: if a setting is out of range.

    Example:
        >>> RemoteSandbox("http://127.0.0.1:8080/run_code", timeout=5).policy.timeout
        5
    """

    def __init__(
        self, url: str, *, timeout: float = 10.0, memory: int | None = None, retries: int = 4, **settings: Any
    ):
        if memory is not None and memory < 1 << 20:
            raise ValueError(f"memory={memory} must be at least {1 << 20} bytes, or None")
        self.policy, self.memory = import_room("sandbox", "RemoteSandbox").Policy(timeout=timeout), memory
        attempt = timeout + _QUEUE_SECONDS
        self.endpoint = JsonEndpoint(url, attempt, attempt * (retries + 1), retries, **settings)

    def run(self, program: str, stdin: str = "") -> SandboxResult:
        """Run a program to its end; raise ``RemoteRewardError`` if the server fails."""
        return event_loop.run(self.run_async(program, stdin))

    async def run_async(self, program: str, stdin: str = "") -> SandboxResult:
        """Run a program to its end; see :meth:`run`."""
        body = {"language": "python", "code": program, "stdin": stdin}
        body |= {"run_timeout": self.policy.timeout, "compile_timeout": self.policy.timeout}
        body |= {} if self.memory is None else {"memory_limit_MB": math.ceil(self.memory / (1 << 20))}
        async with self.endpoint.session() as session:
            reply = await session.post(body)
            run = reply.get("run_result") if isinstance(reply, dict) else None
            late = isinstance(run, dict) and run.get("status") == "TimeLimitExceeded"
            done = isinstance(run, dict) and run.get("status") == "Finished" and type(run.get("return_code")) is int
            if not (late or done) or reply.get("status") == "SandboxError":
                message = session.redact.line(json.dumps(reply))[:300]
                raise RemoteRewardError(f"{session.name}: no result of a program in the reply {message}")
        output, errors = (str(run.get(name) or "") for name in ("stdout", "stderr"))
        reason, code = ("timed_out", -9) if late else ("exit", run["return_code"])
        result = import_room("sandbox", "RemoteSandbox").SandboxResult
        return result(reason, code, output, errors[-_MAX_STDERR:], float(run.get("execution_time") or 0.0))

    def judge(self, tests: Mapping[str, Any], program: Mapping[str, Any]) -> SandboxResult:
        """Run tests and their program; the result's output has a line of JSON ``[passed, reason]`` for each."""
        mark, entries = f"\n{secrets.token_hex(16)}", tests["tests"]
        task = {name: tests[name] for name in ("setup", "library", "partial")} | {"mark": mark}
        task["tests"] = [entry[:2] for entry in entries]  # without expected results
        task |= {"program": program["prelude"] + program["program"], "candidate": tests["candidate"] or [None, None]}
        result = self.run(_DRIVER, json.dumps(task))
        lines = []
        for entry, line in zip(entries, f"\n{result.stdout}".split(mark)[1:], strict=False):
            try:
                passed, *rest = json.loads(line.partition("\n")[0])
            except (ValueError, TypeError, RecursionError):  # a limit cut it off
                break
            if passed and entry[0] == "call" and rest[0] != entry[2] and [rest[0]] != entry[2]:
                passed, rest = False, [f"AssertionError: {rest[0]!r:.100}"]
            lines.append(json.dumps([True, None] if passed else [False, str(rest[0])]) + "\n")
        return replace(result, stdout="".join(lines))


def make_sandbox(sandbox: Any) -> Any:
    """Return a sandbox: an object as it is, a remote one (URL, mapping with ``url``), or a local one."""
    if isinstance(sandbox, str) or (isinstance(sandbox, Mapping) and "url" in sandbox):
        return RemoteSandbox(**({"url": sandbox} if isinstance(sandbox, str) else sandbox))
    if sandbox is None or isinstance(sandbox, Mapping):
        return import_room("sandbox", "CodeTests").Sandbox(**(sandbox or {}))
    return sandbox
