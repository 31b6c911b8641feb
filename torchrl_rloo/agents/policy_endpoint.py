"""PolicyEndpoint: a policy behind an endpoint, for loops that run agents themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Any

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase

from torchrl_rloo.agents.agents import AgentContext
from torchrl_rloo.agents.server import EndpointServer
from torchrl_rloo.agents.session import AgentSession
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
        """End the conversation, whose key is refused from now on, and return its finished row.

        A ``reason`` of None is the limit that refused a call, that of the last reply, or ``"failed"`` without a reply.
        ``call_rewards`` are further rewards by the ids of their responses. A policy that failed is a RuntimeError.
        """
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
        self.loop, self.server = EventLoop("policy-endpoint"), EndpointServer(self.counts)
        try:
            self.server.start()
        except BaseException:
            self.loop.close()
            raise

    def open(self, query: Messages, *, seed: int | None = None, **columns: Any) -> OpenConversation:
        """Open a conversation; ``query`` begins its first call, and ``columns`` are further entries of its row."""
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
