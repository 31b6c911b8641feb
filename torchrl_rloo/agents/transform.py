"""AgentTransform: agents that own their loop, as conversations to train on."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import update_wrapper
from threading import Lock
from typing import Any

from tensordict import NonTensorData, TensorDictBase
from torchrl.envs import Transform

from torchrl_rloo.agents.agents import (
    Agent,
    AgentContext,
    read_call_rewards,
    read_result,
    read_role_rewards,
    resolve_agent,
)
from torchrl_rloo.agents.server import EndpointServer
from torchrl_rloo.agents.session import AgentSession, RoleSessions, Sample
from torchrl_rloo.data.prompts import PromptDataset
from torchrl_rloo.data.segments import Role, make_roles
from torchrl_rloo.envs.chat import dataset_columns
from torchrl_rloo.envs.dataset import DatasetChatEnv
from torchrl_rloo.envs.stepping import BrokenAgentError
from torchrl_rloo.envs.tools.parsers import Parser, resolve_parser
from torchrl_rloo.envs.turn_transform import TurnTransform
from torchrl_rloo.runtime import event_loop
from torchrl_rloo.runtime.lookup import is_async

_LOGGER = logging.getLogger(__name__)
_STARTING = Lock()
Score = Callable[[list[dict[str, Any]], dict[str, Any]], Any]


class AgentTransform(TurnTransform):
    """Transform by which an agent plays each conversation: it calls the policy at an endpoint until it has ended.

    The agent is ``f(context, row) -> result``, sync or async. ``context`` is an :class:`AgentContext`, and ``row`` has
    the columns of the dataset, ``"query"`` included. The result is None, a reward, or a dict with ``"reward"``,
    ``"metrics"`` and ``"call_rewards"``. The last has rewards by the ids of the responses that they are for
    (``"<id>:<i>"`` for one of several choices). All of them add up to the conversation's reward. If the conversation
    has one sample, a :class:`TurnRewardTransform` keeps those of calls apart. Reward functions of the environment see
    the conversation of the last call.

    The row has the ids that the policy sampled (:mod:`torchrl_rloo.agents.call_tree`). A conversation with several
    contexts is a row of several samples (:mod:`torchrl_rloo.data.segments`).

    Limits are those of :class:`~torchrl_rloo.envs.ChatEnv`. ``max_turns`` limits the calls, ``max_tokens`` each sample,
    ``max_turn_tokens`` each reply, and ``max_seconds`` the agent, which is then cancelled. The stop reason is that of
    the first limit that refused a call, ``"time"``, or ``"turn_tokens"`` if the last reply was cut, else ``"ended"``.
    An agent that raises, or receives no reply, ends as ``"failed"``, unless a limit was reached. Its trajectory
    abstains.

    With ``roles``, calls of each role make separate rows (:func:`~torchrl_rloo.data.segments.split_roles`), which the
    collector delivers in place of the conversation's. ``context.openai(role=...)`` is the client of a role; other
    clients name the role as model. The result may have ``"rewards"`` by role, and ``score`` may return such a dict.
    ``"reward"``, and reward functions of the environment, are for all roles. Limits hold for each role.

    Only a collector can run agents; ``env.step`` cannot.

    Args:
        agent: function, its dotted path, or a command as a list (:class:`CommandAgent`).
        parser: parser of tool calls in replies to calls with tools, or its name; None leaves them in the text.
        max_parallel: maximum number of concurrent calls of an agent, or of each role; others wait.
        roles: :class:`~torchrl_rloo.data.Role` or name of each role; empty for an agent without roles.
        score: function ``f(calls, row) -> float`` of the whole session, sync or async, whose reward is added to the
            agent's. See :meth:`AgentSession.transcript` for ``calls``. ``max_seconds`` limits it as well. None adds
            nothing.

    Attributes:
        counts: those of :class:`AgentSession` and :class:`EndpointServer`, and ``"agent/failed"`` and
            ``"agent/timed_out"`` conversations. ``"agent/failed_rewards"`` are those whose ``score`` raised, or that
            had rewards of unknown calls.

    Raises:
        TypeError: if the agent is no function, or ``roles`` is no list.
        ValueError: if ``max_parallel`` is below 1, the parser is unknown, or no role is trained.

    Example:
        >>> async def agent(context, row):
        ...     async with context.openai() as client:
        ...         reply = await client.chat.completions.create(model=context.model, messages=row["query"])
        ...     return float(row["answer"] in reply.choices[0].message.content)
        >>> AgentTransform(agent).counts["agent/failed"]
        0
    """

    def __init__(
        self,
        agent: Agent | str | Sequence[str],
        parser: str | Parser | None = None,
        *,
        max_parallel: int = 16,
        score: Score | None = None,
        roles: Sequence[str | Role] = (),
    ):
        super().__init__()
        self.score, self.roles = score, make_roles(roles)
        if max_parallel < 1:
            raise ValueError(f"max_parallel={max_parallel} must be at least 1")
        self.agent, self.max_parallel = resolve_agent(agent), max_parallel
        self.parser = None if parser is None else resolve_parser(parser)
        self._server: EndpointServer | None = None
        self._owner = os.getpid()
        self._broken, self._ever_ended = 0, False  # failures before any agent ended without one

    def __getstate__(self) -> dict[str, Any]:
        # Another process starts another server
        return super().__getstate__() | {"_server": None}

    def server(self) -> EndpointServer:
        """Return the endpoint of this process, started."""
        with _STARTING:
            if self._server is None or self._owner != os.getpid():
                self._server, self._owner = EndpointServer(self.counts).start(), os.getpid()
            return self._server

    async def play(self, row: TensorDictBase, sample: Sample) -> TensorDictBase:
        """Run the agent to its end."""
        server = await event_loop.call_at_once(self.server)
        settings = {"parser": self.parser, "max_parallel": self.max_parallel}
        session: AgentSession | RoleSessions
        if self.roles:
            session = RoleSessions(self.chat_env, row, sample, roles=self.roles, **settings)
        else:
            session = AgentSession(self.chat_env, row, sample, **settings)
        key = server.add(session.by_role)
        context = AgentContext(f"{server.url}/v1", key, roles=tuple(role.name for role in self.roles))
        calling = event_loop.call_at_once(
            _catching(self.agent), context, dataset_columns(row), timeout=self.chat_env.max_seconds
        )
        agent, broken = asyncio.ensure_future(calling), asyncio.ensure_future(session.broken.wait())
        try:
            # The policy's errors end the agent, which might wait for them to pass
            await asyncio.wait({agent, broken}, return_when=asyncio.FIRST_COMPLETED)
            if session.error is not None:
                raise session.error
            return await self._finish(session, agent, dataset_columns(row))
        finally:
            server.remove(key)
            session.end()
            self.counts.update(session.counts)
            for task in (agent, broken):
                task.cancel()
            await asyncio.gather(agent, broken, return_exceptions=True)

    async def _finish(
        self,
        session: AgentSession | RoleSessions,
        agent: asyncio.Future[tuple[Any, Exception | None]],
        columns: dict[str, Any],
    ) -> TensorDictBase:
        """Return the session's row, with the outcome of an agent that has ended."""
        (reward, metrics), call_rewards, reason = (0.0, {}), {}, session.limit
        trained = [role.name for role in self.roles if not role.frozen]
        of_roles: Counter[str] = Counter()
        try:
            result, error = agent.result()
            if error is not None:
                raise error
            self._ever_ended = True
            reward, metrics = read_result(result, ["rewards"] * bool(trained))
            call_rewards = read_call_rewards(result)
            if trained and isinstance(result, Mapping):
                of_roles.update(read_role_rewards(result.get("rewards"), trained))
        except Exception as error:
            if isinstance(agent.exception(), TimeoutError):  # its own errors are part of its result
                self.counts["agent/timed_out"] += 1
                reason = "time"
            elif reason is None:
                self._check_works(error)
                _LOGGER.warning("an agent failed; its conversation abstains", exc_info=error)
                reason = "failed"
        if reason is None:
            reason = session.last_stop_reason() if session.called else "failed"
            if not session.called:
                _LOGGER.warning("an agent ended without a reply of the policy; its conversation abstains")
        try:
            if self.score is not None and reason != "failed":
                limit = self.chat_env.max_seconds
                scored = await event_loop.call_at_once(self.score, session.transcript(), columns, timeout=limit)
                if trained and isinstance(scored, Mapping):
                    of_roles.update(read_role_rewards(scored, trained))
                else:
                    reward += float(scored)
            row = session.finish(reason, reward, call_rewards, **({"role_rewards": of_roles} if trained else {}))
        except Exception as error:
            _LOGGER.warning("the rewards of an agent failed; its conversation abstains", exc_info=error)
            self.counts["agent/failed_rewards"] += 1
            reason, row = "failed", session.finish("failed")
        self.counts["agent/failed"] += reason == "failed"
        row["next"].set("log_extra", NonTensorData(metrics))
        return row

    def _check_works(self, error: Exception) -> None:
        """Raise if a whole batch of agents has failed, and none has ever ended well."""
        self._broken += 1
        if not self._ever_ended and self._broken >= self.chat_env.batch_size.numel():
            raise BrokenAgentError(
                f"the first {self._broken} agents all failed, the last with {type(error).__name__}: {error}"
            ) from error

    async def process_turn(self, row: TensorDictBase, next_row: TensorDictBase) -> None:
        """Refuse a step, since an agent owns its loop."""
        raise RuntimeError("AgentTransform cannot be stepped, since an agent owns its loop; use LLMCollector")

    def close(self) -> None:
        """Stop the endpoint of this process."""
        server, self._server = self._server, None
        if server is not None and self._owner == os.getpid():
            server.close()


def _catching(agent: Agent) -> Callable[..., Any]:
    """Return a function that returns an agent's result and its error, one of which is None."""

    async def run_async(*args: Any) -> tuple[Any, Exception | None]:
        try:
            return await agent(*args), None
        except Exception as error:
            return None, error

    def run(*args: Any) -> tuple[Any, Exception | None]:
        try:
            return agent(*args), None
        except Exception as error:
            return None, error

    return update_wrapper(run_async if is_async(agent) else run, agent, updated=())  # keeps its name


def agent_env(
    agent: Agent | str | Sequence[str],
    tokenizer: Any,
    *,
    dataset: PromptDataset,
    prompts_per_batch: int,
    num_generations: int = 1,
    parser: str | Parser | None = None,
    max_parallel: int = 16,
    score: Score | None = None,
    roles: Sequence[str | Role] = (),
    max_turns: int | None = 64,
    max_seconds: float | None = 600.0,
    transforms: Sequence[Transform] = (),
    **kwargs: Any,
) -> DatasetChatEnv:
    """Build an environment for a collector from an agent.

    Args:
        agent: see :class:`AgentTransform`.
        tokenizer: the policy's tokenizer.
        dataset: rows that the agent receives.
        prompts_per_batch: rows per reset.
        num_generations: conversations per row.
        parser, max_parallel, score, roles: see :class:`AgentTransform`.
        max_turns: maximum number of calls of an agent, or of each role; None disables it.
        max_seconds: time limit of an agent, in seconds; None disables it.
        transforms: transforms of the rows' columns at a reset.
        **kwargs: further arguments of :class:`~torchrl_rloo.envs.DatasetChatEnv`, such as ``rewards``, ``max_tokens``.

    Example:
        >>> from torchrl_rloo.data import load_prompts
        >>> from torchrl_rloo.embedded import build_tokenizer
        >>> rows = load_prompts([{"query": [{"role": "user", "content": "What is 2+3?"}], "answer": "5"}])
        >>> env = agent_env(["python3", "agent.py"], build_tokenizer(), dataset=rows, prompts_per_batch=1)
        >>> env.max_turns
        64
    """
    played = AgentTransform(agent, parser, max_parallel=max_parallel, score=score, roles=roles)
    return DatasetChatEnv(
        dataset,
        tokenizer,
        prompts_per_batch=prompts_per_batch,
        num_generations=num_generations,
        transforms=[*transforms, played],
        max_turns=max_turns,
        max_seconds=max_seconds,
        **kwargs,
    )
