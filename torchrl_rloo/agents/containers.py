"""ContainerAgent: an agent that runs in a container of podman or docker."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from torchrl_rloo.agents.agents import AgentContext, in_thread, run_command
from torchrl_rloo.runtime.processes import short_environment

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
        """Return the command line that runs the agent; its variables' values are not on it.

        Args:
            name: name of the container.
            variables: names of the variables that the engine's client passes on.
        """
        line = [self.engine, "run", "--rm", "--interactive", "--init", f"--name={name}", f"--label={LABEL}"]
        line += [f"--network={self.network}", "--cap-drop=ALL", "--security-opt=no-new-privileges"]
        if self.memory is not None:
            line += [f"--memory={self.memory}", f"--memory-swap={self.memory}"]
        if self.processes is not None:
            line += [f"--pids-limit={self.processes}"]
        return [*line, *(f"--env={name}" for name in variables), *self.options, self.image, *self.command]

    async def __call__(self, context: AgentContext, row: dict[str, Any]) -> dict[str, Any] | None:
        """Run the container to its end; cancelling it removes the container.

        Raises:
            RuntimeError: if the command exits with another code than 0.
        """
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
