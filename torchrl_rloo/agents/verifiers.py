"""Environments of verifiers (its v1 interface), whose model is the endpoint of a conversation."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import AsyncExitStack
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

from torchrl_rloo.agents.agents import AgentContext
from torchrl_rloo.data import keys
from torchrl_rloo.envs.text.packages import import_package
from torchrl_rloo.runtime.event_loop import call

HARNESS = "torchrl_rloo"


def make_environment(name: str, arguments: Mapping[str, Any]) -> Any:
    """Return the v1 environment of a taskset, with ``arguments`` as its settings.

    An agent whose settings name no harness or runtime runs verifiers' chat program on this machine, in this process.
    """
    vf = _with_harness()
    settings = {**arguments, "taskset": {**arguments.get("taskset", {}), "id": name}}
    bundled = vf.default_harness_id(name) != "bash"
    for role, default in vf.env_config_type(name, settings.get("id", ""))():
        if isinstance(default, vf.AgentConfig):
            own = {} if "runtime" in default.model_fields_set else {"runtime": {"type": "subprocess"}}
            own |= {} if bundled or default.harness is not None else {"harness": {"id": HARNESS}}
            settings[role] = own | dict(settings.get(role) or {})
    return vf.load_environment(vf.resolve_env_config(settings))


def load_rows(row: Mapping[str, Any], size: int) -> list[dict[str, Any]]:
    """Return at most ``size`` tasks of the row's taskset as rows, which :func:`play` plays."""
    rows = []
    for task in itertools.islice(make_environment(row["environment"], row["arguments"]).taskset, size):
        if row[keys.QUERY][:-1]:
            task = task.with_data(system_prompt=row[keys.QUERY][0]["content"])
        data = task.data
        system = [] if data.system_prompt is None else [{"role": "system", "content": data.system_prompt}]
        query = [*system, {"role": "user", "content": data.prompt_text or "(the environment begins)"}]
        rows.append({**row, keys.QUERY: query, "data": data.model_dump_json()})
    return rows


async def play(context: AgentContext, row: dict[str, Any]) -> dict[str, Any]:
    """Run one episode of a v1 environment, as an agent of :class:`~torchrl_rloo.agents.AgentTransform`.

    Roles of the transform, if it has any, must have the names of the environment's agents. An episode that failed is a
    RuntimeError, so that its conversation abstains.
    """
    vf = await call(_with_harness)
    arguments = dict(row["arguments"])
    for role in context.roles:
        arguments[role] = {"model": role, **arguments.get(role, {})}
    environment = await call(make_environment, row["environment"], arguments)
    kind = type(environment.taskset).task_type()
    task = kind(kind.data_type().model_validate_json(row["data"]), environment.config.taskset.task)
    # The address has the key, since verifiers reads keys from variables of the process
    address = f"{context.base_url.removesuffix('/v1')}/k/{context.api_key}/v1"
    client = vf.EvalClientConfig(base_url=address, api_key_var="TORCHRL_RLOO_UNUSED")
    async with environment.serving():
        episode = await environment.run_episode(task, vf.ModelContext(model=context.model, client=client))
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors) or "the episode failed")
    rewards: Counter[str] = Counter()
    for trace in (played := [trace for trace in episode.traces if trace.agent.trainable]):
        rewards[trace.agent.name] += trace.reward
    metrics = {name: value for trace in played for name, value in trace.metrics.items() if value is not None}
    return {"metrics": metrics} | ({"rewards": rewards} if context.roles else {"reward": sum(rewards.values())})


def _with_harness() -> Any:
    """Return verifiers with a further harness: its own chat program, in this process, without an environment of uv."""
    vf = import_package("verifiers.v1", "verifiers")
    from verifiers.v1.dialects.chat import message_to_wire as wire
    from verifiers.v1.harnesses.null import NullHarness
    from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE

    if (path := f"verifiers.v1.harnesses.{HARNESS}") in sys.modules:
        return vf
    program: dict[str, Any] = {"__name__": HARNESS}
    exec(CHAT_PROGRAM_SOURCE, program)

    class InProcessHarness(NullHarness):
        SUPPORTS_TOOL_INTERCEPTION = False

        async def setup(self, runtime: Any) -> None:
            """Prepare nothing."""

        async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
            system, prompt = self.resolve_prompt(data)
            prompt = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else prompt or []
            messages = [wire(m) for m in [*([vf.SystemMessage(content=system)] if system else []), *prompt]]
            servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
            options = SimpleNamespace(bash=False, edit=False, search=False, tool_interception_url=None)
            try:
                async with AgentContext(endpoint, secret).openai() as client, AsyncExitStack() as stack:
                    tools, *calls = await program["connect_mcp"]({"mcpServers": servers}, stack, set())
                    compactor = program["Compactor"](client, ctx.model, tools, False, None)
                    await program["run_chat_loop"](options, compactor, messages, *calls, None)
            except SystemExit as error:  # of a lost connection
                raise ConnectionError(f"the chat program exited with {error.code}") from error
            return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    module = sys.modules[path] = ModuleType(path)
    module.__spec__, module.__all__ = ModuleSpec(path, None), ["InProcessHarness"]
    module.InProcessHarness = InProcessHarness
    return vf
