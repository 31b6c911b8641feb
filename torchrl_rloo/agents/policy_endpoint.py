"""PolicyEndpoint: a policy behind an endpoint, for loops that run agents themselves; RolePlay: several roles at it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from functools import partial
from types import TracebackType
from typing import Any

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase

from torchrl_rloo.agents.agents import AgentContext
from torchrl_rloo.agents.server import EndpointServer
from torchrl_rloo.agents.session import AgentSession, derive_seed
from torchrl_rloo.collectors.conversation import finish_row
from torchrl_rloo.collectors.turn_source import Policy, make_turn_source
from torchrl_rloo.data import keys
from torchrl_rloo.data.templates import Messages
from torchrl_rloo.envs.chat import ChatEnv
from torchrl_rloo.envs.tools.parsers import Parser, resolve_parser
from torchrl_rloo.runtime.event_loop import EventLoop


class OpenConversation:
    """Conversation of a :class:`PolicyEndpoint`."""

    def __init__(self, endpoint: PolicyEndpoint, session: AgentSession, key: str, version: int):
        self.context = AgentContext(f"{endpoint.server.url}/v1", key)
        self.session, self._endpoint, self._version = session, endpoint, version

    def finish(
        self, reward: float = 0.0, reason: str | None = None, *, call_rewards: Mapping[str, float] | None = None
    ) -> TensorDictBase:
        """End the conversation; its key is refused from now on."""
        self._endpoint.server.remove(self.context.api_key)
        return self._endpoint.loop.run(self._finish(reward, reason, call_rewards))

    async def _finish(
        self, reward: float, reason: str | None, call_rewards: Mapping[str, float] | None
    ) -> TensorDictBase:
        session = self.session
        session.end()
        if session.error is not None:
            raise RuntimeError(f"the policy failed on a call: {session.error}") from session.error
        default = session.last_stop_reason() if session.tree.leaves() else "failed"
        row = session.finish(reason or session.limit or default, reward, call_rewards)
        self._endpoint.counts.update(session.counts)
        return finish_row(row, row[keys.REWARD], self._version)


class PolicyEndpoint:
    """Policy behind an endpoint of OpenAI's and Anthropic's formats, for loops that run agents themselves.

    :func:`~torchrl_rloo.agents.agent_env` runs agents in a collector instead. A context manager.

    Args:
        policy: policy of rows, as for :class:`LLMCollector`.
        env: environment with the tokenizer and the limits of a conversation; its ``max_seconds`` must be None.
        parser: parser of tool calls in replies to calls with tools, or its name; None leaves them in the text.
        version: function that returns the current policy version, for policies that do not report it.
        max_parallel: maximum number of concurrent calls of a conversation; others wait.

    Attributes:
        counts: those of :class:`~torchrl_rloo.agents.AgentTransform`.

    Raises:
        ValueError: if ``env`` has ``max_seconds``, or another ``input_mode`` than ``"tokens"``.

    Example::

        with PolicyEndpoint(policy, ChatEnv(tokenizer, max_turns=8)) as endpoint:
            conversation = endpoint.open([{"role": "user", "content": "What is 2+3?"}], seed=0)
            answer = my_agent(conversation.context.base_url, conversation.context.api_key)
            row = conversation.finish(reward=float("5" in answer))
    """

    def __init__(
        self,
        policy: Policy,
        env: ChatEnv,
        *,
        parser: str | Parser | None = None,
        version: Callable[[], int] = lambda: 0,
        max_parallel: int = 16,
    ):
        if env.max_seconds is not None:
            raise ValueError(
                f"max_seconds={env.max_seconds} cannot be combined with a PolicyEndpoint; limit your agent"
            )
        if env.input_mode != "tokens":
            raise ValueError(f"input_mode={env.input_mode!r} cannot be combined with a PolicyEndpoint; use 'tokens'")
        env.adapt_to(policy)
        self.env, self.version, self.max_parallel = env, version, max_parallel
        self.parser = None if parser is None else resolve_parser(parser)
        self.counts: Counter[str] = Counter()
        self._source = make_turn_source(policy, version, lambda: float("inf"), eager=True)
        self._opened = 0
        self.loop, self.server = EventLoop("policy-endpoint"), EndpointServer(counts=self.counts)
        try:
            self.server.start()
        except BaseException:
            self.loop.close()
            raise

    def open(self, query: Messages, *, seed: int | None = None, **columns: Any) -> OpenConversation:
        """Open a conversation."""
        self._opened += 1
        seed = int(torch.randint(2**62, ())) if seed is None else seed
        entries = {k: v if isinstance(v, torch.Tensor) else NonTensorData(v) for k, v in columns.items()}
        entries |= {keys.QUERY: NonTensorData(query), keys.SEED: torch.tensor(seed)}
        return self.loop.run(self._open(TensorDict(entries, []), (self._opened, 0)))

    async def _open(self, row: TensorDict, order: tuple[int, int]) -> OpenConversation:
        row = self.env.open_row(row, self.env.prompt_ids())
        if row["done"].any():
            raise ValueError(f"the query leaves no token of max_tokens={self.env.token_limit}; shorten it")
        sample = partial(self._source.turn, order=order)
        session = AgentSession(self.env, row, sample, parser=self.parser, max_parallel=self.max_parallel)
        return OpenConversation(self, session, self.server.add(session.by_role), self.version())

    def close(self) -> None:
        """Stop the endpoint. Calls in flight are cancelled."""
        self.server.close()
        self.loop.close()

    def __enter__(self) -> PolicyEndpoint:
        """Return the endpoint."""
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the endpoint."""
        self.close()


class RoleConversation:
    """Conversation of a :class:`RolePlay`."""

    def __init__(self, conversations: Mapping[str, OpenConversation], frozen: Collection[str]):
        self._conversations, self._frozen = dict(conversations), frozenset(frozen)
        self.contexts: dict[str, AgentContext] = {role: c.context for role, c in conversations.items()}

    def finish(self, rewards: Mapping[str, float]) -> dict[str, TensorDictBase]:
        """End the conversation of all roles; their keys are refused from now on."""
        trained = self._conversations.keys() - self._frozen
        if rewards.keys() != trained:
            raise ValueError(f"rewards={dict(rewards)} must have exactly the trained roles {sorted(trained)}")
        if any(math.isinf(reward) for reward in rewards.values()):
            raise ValueError(f"rewards={dict(rewards)} must be finite, or NaN to abstain")
        rows, errors = {}, []
        for role, conversation in self._conversations.items():
            called = bool(conversation.session.tree.leaves())
            try:  # End all roles, also if one of them failed
                row = conversation.finish(float(rewards.get(role, 0.0)) if called else math.nan)
            except RuntimeError as error:
                errors.append(error)
                continue
            if role not in self._frozen:
                rows[role] = row
        if errors:
            raise errors[0]
        return rows


class RolePlay:
    """Conversations of several roles, such as two players, or a proposer and a solver, over policy endpoints.

    Each role has its own key, and its calls join into its own row. The row has the ordinary schema and ``"role"``, the
    role's name. Its ``"group_id"`` is ``group_id * n_roles + i`` for the role of index ``i``. The baseline of
    :class:`~torchrl_rloo.replay.MCAdvantage` is therefore within a group and a role. It needs ``num_generations``. All
    rows of a buffer must come from conversations of the same roles.

    Args:
        endpoints: endpoint of each role. Roles of one policy share an endpoint; a role with weights or an adapter of
            its own has another.
        frozen: roles whose rows are not returned, such as a fixed opponent or a judge.

    Raises:
        ValueError: if there is no role to train, or ``frozen`` has an unknown role.

    Example::

        play = RolePlay({"white": endpoint, "black": endpoint})
        for _ in range(4):
            conversation = play.open({"white": rules, "black": rules}, group_id=0)
            winner = my_game(conversation.contexts["white"], conversation.contexts["black"])
            rows = conversation.finish({role: 1.0 if role == winner else -1.0 for role in play.endpoints})
    """

    def __init__(self, endpoints: Mapping[str, PolicyEndpoint], *, frozen: Collection[str] = ()):
        self.endpoints, self.frozen = dict(endpoints), frozenset([frozen] if isinstance(frozen, str) else frozen)
        if unknown := self.frozen - self.endpoints.keys():
            raise ValueError(f"frozen={sorted(unknown)} must be among the roles {list(self.endpoints)}")
        if self.frozen == self.endpoints.keys():
            raise ValueError(f"frozen={sorted(self.frozen)} leaves no role of {list(self.endpoints)} to train")

    def open(self, queries: Mapping[str, Messages], *, group_id: int, seed: int | None = None) -> RoleConversation:
        """Open a conversation."""
        if queries.keys() != self.endpoints.keys():
            raise ValueError(f"queries={sorted(queries)} must have exactly the roles {sorted(self.endpoints)}")
        seed = int(torch.randint(2**62, ())) if seed is None else seed
        conversations: dict[str, OpenConversation] = {}
        for i, (role, endpoint) in enumerate(self.endpoints.items()):
            columns = {keys.ROLE: role, keys.ROLE_ID: torch.tensor(i)}
            columns |= {keys.GROUP_ID: torch.tensor(group_id * len(self.endpoints) + i)}
            try:
                conversations[role] = endpoint.open(queries[role], seed=derive_seed(seed, role), **columns)
            except Exception:  # Withdraw the keys of the roles before it
                for opened in conversations.values():
                    opened.finish()
                raise
        return RoleConversation(conversations, self.frozen)
