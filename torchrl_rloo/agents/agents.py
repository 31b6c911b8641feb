"""Agents: what they are told of the endpoint, and agents that are commands or containers."""

from __future__ import annotations

import asyncio
import json
import math
import os
import selectors
import shutil
import signal
import ssl
import subprocess
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torchrl_rloo.runtime.lookup import import_object
from torchrl_rloo.runtime.processes import HelperProcess, descendants, reaped_command, short_environment
from torchrl_rloo.runtime.threads import PackageThread

ENGINES = ("podman", "docker")
LABEL = "torchrl_rloo.agent"
_CLIENT = ("XDG_RUNTIME_DIR", "DOCKER_*", "CONTAINER_*", "CONTAINERS_*")  # variables that lead a client to its engine
_ANSWER_S = 60.0


class ContainerAgent:
    """Agent that is a command in a container, of podman or docker. Each conversation has a new container.

    The command finds the endpoint, the row and its result as that of a :class:`CommandAgent` does. It has no
    capabilities, cannot gain privileges, and sees none of this machine's files. At its time limit, it receives SIGTERM,
    and the container is removed ``grace`` seconds later. If this process is killed, containers may be left: remove them
    with ``podman rm --force --filter label=torchrl_rloo.agent``.

    The endpoint is at ``127.0.0.1`` of this machine, so the default network is ``"host"``: the command sees the network
    of this machine, on which the endpoint's key protects it. Any other ``network`` must forward the endpoint's port to
    the container's ``127.0.0.1``, as podman's ``"pasta:-T,auto"`` does.

    Args:
        image: image that the engine has.
        command: program and its arguments; empty for the image's default.
        engine: ``"podman"`` or ``"docker"``, or the path of one; None takes the first that is installed.
        environment: further environment variables.
        memory: maximum bytes of memory, without swap; None does not limit it.
        processes: maximum number of processes; None does not limit it.
        network: network of the container.
        options: further options of the engine's ``run``, such as ``["--volume=/data:/data:ro"]``.
        grace: seconds between SIGTERM and the container's removal.

    Raises:
        FileNotFoundError: if there is no engine, or it has no such image.
        RuntimeError: if the engine does not answer.
        ValueError: if a number is out of range, or ``command`` is no list.

    Example::

        agent = ContainerAgent("my-agent:latest", ["python3", "agent.py"], memory=2 * 2**30)
        env = agent_env(agent, tokenizer, dataset=prompts, prompts_per_batch=8, num_generations=4)
    """

    def __init__(
        self,
        image: str,
        command: Sequence[str] = (),
        *,
        engine: str | None = None,
        environment: Mapping[str, str] | None = None,
        memory: int | None = None,
        processes: int | None = 512,
        network: str = "host",
        options: Sequence[str] = (),
        grace: float = 1.0,
    ):
        for name, value in (("command", command), ("options", options)):
            if isinstance(value, str):
                raise ValueError(f"{name}={value!r} must be a list; use [{value!r}]")
        if memory is not None and memory < 2**22:
            raise ValueError(f"memory={memory} must be at least 4194304 bytes, or None for no limit")
        if processes is not None and processes < 1:
            raise ValueError(f"processes={processes} must be at least 1, or None for no limit")
        if not grace >= 0:
            raise ValueError(f"grace={grace} must be at least 0 seconds")
        self.engine = _find_engine(engine)
        self.image, self.command, self.options, self.network = image, list(command), list(options), network
        self.environment, self.memory, self.processes, self.grace = dict(environment or {}), memory, processes, grace
        self._check_image()

    def run_line(self, name: str, variables: Sequence[str]) -> list[str]:
        """Return the command line that runs the agent; its variables' values are not on it."""
        line = [self.engine, "run", "--rm", "--interactive", "--init", f"--name={name}", f"--label={LABEL}"]
        line += [f"--network={self.network}", "--cap-drop=ALL", "--security-opt=no-new-privileges"]
        if self.memory is not None:
            line += [f"--memory={self.memory}", f"--memory-swap={self.memory}"]
        if self.processes is not None:
            line += [f"--pids-limit={self.processes}"]
        return [*line, *(f"--env={name}" for name in variables), *self.options, self.image, *self.command]

    async def __call__(self, context: AgentContext, row: dict[str, Any]) -> dict[str, Any] | None:
        """Run the container to its end; cancelling it removes the container."""
        name, own = f"torchrl-rloo-{uuid.uuid4().hex}", self.environment | context.environment()
        variables = _client_environment() | own
        try:
            return await run_command(
                self.run_line(name, list(own)), variables, row, grace=self.grace, name=f"container of {self.image}"
            )
        except BaseException:  # its client may have died before it
            await asyncio.shield(in_thread(self._remove, name))
            raise

    def _remove(self, name: str) -> None:
        subprocess.run(
            [self.engine, "rm", "--force", name],
            env=_client_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_ANSWER_S,
            check=False,
        )

    def _check_image(self) -> None:
        """Raise if the engine does not answer, or lacks the image."""
        program = os.path.basename(self.engine)
        for question in (["version"], ["image", "inspect", self.image]):
            try:
                answer = subprocess.run(
                    [self.engine, *question],
                    env=_client_environment(),
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    timeout=_ANSWER_S,
                    check=False,
                    text=True,
                )
            except subprocess.TimeoutExpired:
                raise RuntimeError(f"engine={program!r} does not answer within {_ANSWER_S:g} s; restart it") from None
            if answer.returncode == 0:
                continue
            reason = (answer.stderr.strip().splitlines() or ["no message"])[-1]
            if question == ["version"]:
                raise RuntimeError(f"engine={program!r} does not answer ({reason}); start it, or use a CommandAgent")
            raise FileNotFoundError(f"image={self.image!r} is not there ({reason}); run {program} pull or build")


def _find_engine(engine: str | None) -> str:
    found = next(filter(None, map(shutil.which, ENGINES if engine is None else [engine])), None)
    if found is None:
        raise FileNotFoundError(
            f"engine={engine!r}: there is no {'podman or docker' if engine is None else 'such program'}; install one, "
            "or use a CommandAgent without a container"
        )
    return os.path.abspath(found)


def _client_environment() -> dict[str, str]:
    return short_environment(_CLIENT)


MODEL = "policy"
_TAIL = 64 * 1024  # bytes of a command's output that are kept
_POLL_S = 0.02  # time between looks at a command that has received SIGTERM
_SHOWN = 2000  # characters of a failed command's errors in the message


@dataclass(frozen=True)
class AgentContext:
    """Access of one agent to the policy.

    Attributes:
        base_url: address of the endpoint, with ``/v1``, for clients of OpenAI.
        api_key: key of the conversation. It is valid until the agent has ended.
        model: name of the model. The endpoint accepts any, unless the conversation has roles: it is then a role's.
        roles: names of the conversation's roles; empty if it has none.

    Example:
        >>> AgentContext("http://127.0.0.1:8000/v1", "KEY").environment()["ANTHROPIC_BASE_URL"]
        'http://127.0.0.1:8000'
    """

    base_url: str
    api_key: str
    model: str = MODEL
    roles: tuple[str, ...] = ()

    def role(self, name: str) -> AgentContext:
        """Return the access of a role of the conversation. Its key is valid for calls of this role only."""
        if name not in self.roles:
            raise ValueError(f"role={name!r} must be one of {list(self.roles)}; name roles in agent_env(roles=)")
        return AgentContext(self.base_url, f"{self.api_key}.{name}", name)

    def environment(self) -> dict[str, str]:
        """Return the environment variables from which clients and frameworks read address, key and model."""
        variables = {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_BASE": self.base_url,
            "OPENAI_MODEL": self.model,
            "ANTHROPIC_BASE_URL": self.base_url.removesuffix("/v1"),
            "ANTHROPIC_MODEL": self.model,
        }
        return variables | {"OPENAI_API_KEY": self.api_key, "ANTHROPIC_API_KEY": self.api_key}

    def openai(self, role: str | None = None) -> Any:
        """Return a new ``openai.AsyncOpenAI``, to be used in ``async with``. It has no retries and uses no proxy.

        Its requests have no time limit, as the agent has one: OpenAI's default leaves a busy endpoint after 5 s.
        """
        if role is not None:
            return self.role(role).openai()
        try:
            from openai import AsyncOpenAI, DefaultAsyncHttpxClient
        except ImportError as error:
            raise ImportError("AgentContext.openai requires openai; pip install torchrl_rloo[agents]") from error
        # The endpoint has no TLS; a context with all certificates would take 30 ms
        direct = DefaultAsyncHttpxClient(trust_env=False, verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
        return AsyncOpenAI(
            base_url=self.base_url, api_key=self.api_key, timeout=None, max_retries=0, http_client=direct
        )


Agent = Callable[[AgentContext, dict[str, Any]], Any | Awaitable[Any]]


class CommandAgent:
    """Agent that is a command. It runs in a temporary folder, and is killed with all its children when it ends.

    The command finds the endpoint in its environment (:meth:`AgentContext.environment`), and the dataset's row on its
    standard input, as JSON. If the last line that it prints is a JSON object, that is its result, such as
    ``{"reward": 1.0, "metrics": {"steps": 3}}``. The command sees few variables of this process, and none of its keys.

    At its time limit, the command and all its children receive SIGTERM, and ``grace`` seconds later SIGKILL. In
    between, the endpoint refuses their calls. Children that outlive the command are killed.

    Args:
        command: program and its arguments.
        environment: further environment variables.
        memory: maximum bytes of private memory of each process of the command; None does not limit it.
        grace: seconds between SIGTERM and SIGKILL.

    Raises:
        FileNotFoundError: if there is no such program.
        ValueError: if the command is empty, ``memory`` is below 1 MiB, or ``grace`` is negative.

    Example:
        >>> CommandAgent(["python3", "-c", "print('no calls')"], memory=2**30).memory
        1073741824
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        memory: int | None = None,
        grace: float = 1.0,
    ):
        if isinstance(command, str) or not command:
            raise ValueError(f"command={command!r} must be a list: a program and its arguments")
        if memory is not None and memory < 2**20:
            raise ValueError(f"memory={memory} must be at least 1048576 bytes, or None for no limit")
        if not grace >= 0:
            raise ValueError(f"grace={grace} must be at least 0 seconds")
        program = shutil.which(command[0], path=(environment or {}).get("PATH"))
        if program is None:
            raise FileNotFoundError(f"command={command[0]!r}: there is no such program; install it or give its path")
        self.command = [os.path.abspath(program), *command[1:]]
        self.environment, self.memory, self.grace = dict(environment or {}), memory, grace

    async def __call__(self, context: AgentContext, row: dict[str, Any]) -> dict[str, Any] | None:
        """Run the command to its end; cancelling it ends the command and its children."""
        command = self.command
        if self.memory is not None:  # the shell limits itself and becomes the command
            command = ["/bin/sh", "-c", f'ulimit -d {self.memory // 1024} && exec "$@"', "sh", *command]
        variables = short_environment() | self.environment | context.environment()
        return await run_command(command, variables, row, grace=self.grace, name=os.path.basename(self.command[0]))


async def run_command(
    command: Sequence[str], variables: Mapping[str, str], row: dict[str, Any], *, grace: float, name: str
) -> dict[str, Any] | None:
    """Run an agent's command in a temporary folder to its end; cancelling it ends the command and its children."""
    with tempfile.TemporaryDirectory(prefix="agent-", ignore_cleanup_errors=True) as folder:
        with tempfile.TemporaryFile() as text:
            text.write(json.dumps(row, default=str).encode())
            text.seek(0)
            helper = HelperProcess(
                reaped_command(command, variables, folder),
                variables,
                cwd=folder,
                stdin=text,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        try:
            output, errors = await in_thread(_read_tails, helper.process)
        except asyncio.CancelledError:
            await _terminate(helper, grace)
            raise
        finally:
            helper.end()
    if (code := helper.process.returncode) != 0:
        raise RuntimeError(f"{name} exited with code {code}: {errors[-_SHOWN:].strip()}")
    return _last_object(output)


async def _terminate(helper: HelperProcess, grace: float) -> None:
    """Send SIGTERM to all processes of a command, and wait for their end, at most ``grace`` seconds."""
    deadline = time.monotonic() + grace
    for pid in descendants(helper.process.pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    while time.monotonic() < deadline and not helper.has_exited():
        await asyncio.sleep(min(_POLL_S, grace))


def _read_tails(process: subprocess.Popen) -> tuple[str, str]:
    """Return the ends of a process's output and errors, once it has exited."""
    tails = {process.stdout: b"", process.stderr: b""}
    with selectors.DefaultSelector() as selector, process.stdout, process.stderr:
        for pipe in tails:
            selector.register(pipe, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                if chunk := os.read(key.fd, _TAIL):
                    tails[key.fileobj] = (tails[key.fileobj] + chunk)[-_TAIL:]
                else:
                    selector.unregister(key.fileobj)
    if hasattr(os, "waitid"):  # leave it to its handle, so that no other process gets its id before
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    else:
        process.wait()
    return tuple(tail.decode(errors="replace") for tail in tails.values())


async def in_thread(function: Callable[..., Any], *args: Any) -> Any:
    """Run a function that waits on a separate thread, since thousands may wait."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def deliver(value: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    def run() -> None:
        value, error = None, None
        try:
            value = function(*args)
        except Exception as raised:
            error = raised
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(deliver, value, error)

    PackageThread(run, name="agent-command").start()
    return await future


def _last_object(output: str) -> dict[str, Any] | None:
    """Return the JSON object in the last line of an output, or None."""
    lines = output.strip().splitlines()
    try:
        value = json.loads(lines[-1]) if lines else None
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def resolve_agent(agent: Agent | str | Sequence[str]) -> Agent:
    """Return an agent: a function as it is, the object at a dotted path, or the command of a list."""
    if isinstance(agent, str):
        agent = import_object(agent, "agent")
    elif isinstance(agent, list | tuple):
        agent = CommandAgent(agent)
    if not callable(agent):
        raise TypeError(f"agent={agent!r:.100} must be a function, its dotted path, or a command as a list")
    return agent


def read_rewards(rewards: Any, what: str) -> dict[str, float]:
    """Return rewards by name, from a mapping to finite numbers; ``what`` says where an agent's result has them."""
    rewards = {} if rewards is None else rewards
    if not (isinstance(rewards, Mapping) and all(isinstance(v, int | float) for v in rewards.values())):
        raise TypeError(f"{what}={rewards!r:.200} must map names to numbers")
    if not all(map(math.isfinite, rewards.values())):
        raise ValueError(f"{what}={rewards!r:.200} must be finite")
    return {str(name): float(value) for name, value in rewards.items()}


def read_role_rewards(rewards: Any, roles: Collection[str]) -> dict[str, float]:
    """Return the rewards of roles in an agent's result."""
    found = read_rewards(rewards, "rewards")
    if unknown := [name for name in found if name not in roles]:
        raise ValueError(f"rewards has {unknown}, but the trained roles are {list(roles)}; use these")
    return found


def read_result(result: Any, more: Collection[str] = ()) -> tuple[float, dict[str, Any]]:
    """Return the reward and the metrics of an agent's result."""
    fields = result if isinstance(result, Mapping) else {"reward": result}
    reward, metrics = fields.get("reward"), fields.get("metrics") or {}
    allowed = ["reward", "call_rewards", "metrics", *more]
    if not (set(fields) <= set(allowed) and isinstance(metrics, Mapping)):
        raise TypeError(f"result={result!r:.200} must have no other entries than {allowed}")
    if not isinstance(reward, int | float | None):
        raise TypeError(f"reward={reward!r:.100} of an agent must be a number, or None for 0")
    if not math.isfinite(reward or 0.0):
        raise ValueError(f"reward={reward} of an agent must be finite")
    return float(reward or 0.0), dict(metrics)


def read_call_rewards(result: Any) -> dict[str, float]:
    """Return the rewards of single calls in an agent's result, by the ids of their responses."""
    return read_rewards(result.get("call_rewards") if isinstance(result, Mapping) else None, "call_rewards")
