"""AgentSession: the policy's side of one agent, until it has ended; RoleSessions: of the roles of a conversation."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase

from torchrl_rloo.agents.call_tree import (
    Call,
    CallTree,
    Prompt,
    Sampled,
    message_key,
    read_sample,
    rewarded_calls,
    write_sample,
)
from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import copy_row, drop_entries, make_non_tensor
from torchrl_rloo.data.segments import Role, stash_segment
from torchrl_rloo.data.stop_reasons import end_row
from torchrl_rloo.data.templates import Messages, decode_response
from torchrl_rloo.envs.chat import CONVERSATION_KEYS, ChatEnv, make_stepped_row
from torchrl_rloo.envs.tools.parsers import MalformedCall, Parser, ToolCall, without_thinking
from torchrl_rloo.images.encoder import encoder_of
from torchrl_rloo.images.shown import stored_messages

_LOGGER = logging.getLogger(__name__)

Sample = Callable[[TensorDictBase], Awaitable[TensorDictBase]]


class Ask(NamedTuple):
    """Call of an agent."""

    messages: Messages
    tools: Sequence[Mapping[str, Any]] | None = None
    max_tokens: int | None = None


class Reply(NamedTuple):
    """Reply to a call."""

    call: Call  # raise its deliveries once the agent is to receive it
    message: dict[str, Any]  # with "content", and if there are any "reasoning_content" and "tool_calls"
    finish: str  # "stop", "length" or "tool_calls"
    prompt_tokens: int


class RefusedCallError(ValueError):
    """Call that the session refuses."""

    def __init__(self, message: str, code: str):
        super().__init__(message)
        self.code = code


class AgentSession:
    """Calls of one conversation, and the row that they make. Its methods run on the loop that makes it."""

    def __init__(
        self,
        env: ChatEnv,
        row: TensorDictBase,
        sample: Sample,
        *,
        parser: Parser | None = None,
        max_parallel: int = 16,
        broken: asyncio.Event | None = None,
    ):
        if env.input_mode != "tokens":
            raise ValueError(f"input_mode={env.input_mode!r} cannot be combined with agents; use 'tokens'")
        self.env, self.row, self.parser = env, row, parser
        self._sample, self._places = sample, asyncio.Semaphore(max_parallel)
        self.loop = asyncio.get_running_loop()
        self.tree = CallTree(env.tokenizer, end_ids=env.end_ids, on_rewrite=env.on_rewrite)
        self.counts: Counter[str] = Counter()
        self.limit: str | None = None  # stop reason of the first limit that refused a call
        self.error: Exception | None = None  # first error of the policy
        self.broken = broken or asyncio.Event()  # set with ``error``
        self._tasks: set[asyncio.Task] = set()
        self._ended = False
        self._first_prompt = tuple(map(message_key, row[keys.QUERY])) if isinstance(row[keys.QUERY], list) else ()
        self._begun, self.version = 0, None  # the oldest policy version that sampled a call

    # Calls

    async def reply(self, ask: Ask) -> Reply:
        """Sample the policy's reply to a call, in a separate task. Cancelling it cancels the request."""
        if self._ended:
            raise _ended_error()
        self._tasks.add(task := asyncio.current_task())
        try:
            return await self._reply(ask)
        except asyncio.CancelledError:
            if self._ended:
                raise _ended_error() from None
            raise
        finally:
            self._tasks.discard(task)

    def end(self) -> None:
        """Cancel the calls in flight, and refuse others."""
        self._ended = True
        for task in self._tasks:
            task.cancel()

    async def _reply(self, ask: Ask) -> Reply:
        if (reason := self._limit_reached()) is not None:
            raise self._refuse(reason, f"the conversation reached its limit {_LIMIT_NAMES[reason]}; end it")
        self._begun += 1
        try:
            async with self._places:
                prompt, row = self._prepare(ask)
                try:
                    sampled = await self._sample(row)
                except BaseException:
                    self.tree.release(prompt)
                    raise
        except (asyncio.CancelledError, RefusedCallError) as error:
            self._begun -= 1
            self.counts["agent/cancelled_calls"] += isinstance(error, asyncio.CancelledError)
            raise
        except Exception as error:
            self.counts["agent/failed_calls"] += 1
            self.error = self.error or error
            self.broken.set()
            raise
        return self._record(prompt, ask, sampled)

    def _prepare(self, ask: Ask) -> tuple[Prompt, TensorDictBase]:
        """Return prompt and row of a call, or refuse it: what fails before the policy samples is the agent's fault."""
        prompt = None
        try:
            prompt = self._prompt(ask)
            return prompt, self._call_row(prompt, ask)
        except RefusedCallError:
            raise
        except Exception as error:  # templates raise any
            if prompt is not None:
                self.tree.release(prompt)
            self.counts["agent/refused_calls"] += 1
            message = " ".join(f"{type(error).__name__}: {error}"[:1000].split())
            raise RefusedCallError(message, "invalid_messages") from error

    def _prompt(self, ask: Ask) -> Prompt:
        arguments = dict(self.env.template_kwargs) | ({"tools": list(ask.tools)} if ask.tools else {})
        prompt = self.tree.prompt(self._stored(ask.messages), arguments)
        room = self.env.token_limit
        if room is not None and len(prompt) >= room:
            self.tree.release(prompt)
            message = f"a prompt of {len(prompt)} tokens leaves none of {room}; shorten the conversation"
            raise self._refuse("total_tokens", message)
        return prompt

    def _stored(self, messages: Messages) -> Messages:
        """Return messages with their images in the store."""
        encoder = encoder_of(self.env.tokenizer)
        if encoder is None and any(isinstance(message.get("content"), list) for message in messages):
            raise RefusedCallError("the policy reads text only; send no images", "invalid_messages")
        return stored_messages(messages, encoder)

    def _limit_reached(self) -> str | None:
        if self.env.max_turns is not None and self._begun >= self.env.max_turns:
            return "turns"
        return None

    def _refuse(self, reason: str, message: str) -> RefusedCallError:
        self.counts["agent/refused_calls"] += 1
        self.limit = self.limit or reason
        return RefusedCallError(message, "context_length_exceeded" if reason == "total_tokens" else "limit_reached")

    def _call_row(self, prompt: Prompt, ask: Ask) -> TensorDictBase:
        """Return the row on which the policy samples: the conversation's, with the context of the call."""
        context = prompt.context
        row = copy_row(drop_entries(self.row, CONVERSATION_KEYS))
        row.set(keys.NUM_TURNS, torch.tensor(len(prompt.path)))
        row.set(keys.QUERY, make_non_tensor(prompt.conversation))
        row.set(keys.COMPLETION, make_non_tensor([]))
        if self.version is not None:
            row.set(keys.POLICY_VERSION, self.version)
        self.env.set_context(row, context.tokens, context.mask, context.log_probs)
        write_sample(row, context)
        if ask.max_tokens is not None:
            own = row.get(keys.MAX_NEW_TOKENS, None)
            limit = ask.max_tokens if own is None else min(int(own), ask.max_tokens)
            row.set(keys.MAX_NEW_TOKENS, torch.tensor(limit))
        # Calls that differ get different random numbers, whatever the order in which they arrive
        if (seed := self.row.get(keys.SEED, None)) is not None:
            root = prompt.path[0].prompt if prompt.path else prompt
            apart = (() if root.keys == self._first_prompt else root.keys, prompt.repeats)
            row.set(keys.SEED, seed if apart == ((), 0) else torch.tensor(derive_seed(int(seed), *apart)))
        return row

    def _record(self, prompt: Prompt, ask: Ask, row: TensorDictBase) -> Reply:
        version = row.get(keys.POLICY_VERSION, None)
        if self.version is None or (version is not None and version < self.version):
            self.version = version
        sampled = read_sample(row, len(prompt))
        text = decode_response(self.env.tokenizer, sampled.tokens.tolist())
        truncated = bool(row[keys.RESPONSE_TRUNCATED].any())
        number = len(self.tree.calls)
        calls = self._parse(sampled, number) if ask.tools else []
        message = client_message(text, calls)
        finish = "tool_calls" if calls else "length" if truncated else "stop"
        self.counts["agent/calls"] += 1
        call = self.tree.add(Call(prompt, sampled, text, message, truncated))
        return Reply(call, message, finish, len(prompt))

    def _parse(self, sampled: Sampled, number: int) -> list[dict[str, Any]]:
        """Return the tool calls of a reply, as clients read them; none if one of them is malformed."""
        if self.parser is None:
            return []
        ids, tokenizer = sampled.tokens.tolist(), self.env.tokenizer
        if not tokenizer.decode(ids[-1:], skip_special_tokens=True):
            ids = ids[:-1]
        text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        found: list[ToolCall | MalformedCall] = self.parser(without_thinking(text))
        if any(isinstance(call, MalformedCall) for call in found):
            return []
        return [
            {
                "id": call.id or f"call{number:03d}{k:02d}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for k, call in enumerate(found)
        ]

    # The finished row

    @property
    def by_role(self) -> dict[str, AgentSession]:
        """This session, which has no role."""
        return {"": self}

    @property
    def called(self) -> bool:
        """True if the agent received a reply."""
        return bool(self.tree.leaves())

    def last_stop_reason(self) -> str:
        """Return the stop reason of a conversation that the agent has ended, from the end of its last reply."""
        last, limit = self.tree.leaves()[-1], self.env.token_limit
        if not last.truncated:
            return "ended"
        return "turn_tokens" if limit is None or len(last) < limit else "total_tokens"

    def transcript(self) -> list[dict[str, Any]]:
        """Return the calls whose replies the agent received, in the order of their ends.

        Each has ``"messages"``, ``"reply"`` (the assistant message that the agent received), ``"text"`` (all that the
        policy wrote), ``"tokens"`` (number of sampled tokens) and ``"truncated"``.
        """
        return [
            {
                "messages": list(call.prompt.conversation),
                "reply": dict(call.reply),
                "text": call.text,
                "tokens": len(call.sampled.tokens),
                "truncated": call.truncated,
            }
            for call in self.tree.calls
            if call.delivered
        ]

    def finish(
        self, reason: str, reward: float = 0.0, call_rewards: Mapping[str, float] | None = None
    ) -> TensorDictBase:
        """Return the conversation's row with its outcome in ``"next"``."""
        rewarded = rewarded_calls(self.tree.calls, call_rewards or {})
        self.count_tree()
        samples, leaves = self.tree.samples(), self.tree.leaves()
        row = self.make_row(samples, reason, reward + sum(value for _, value in rewarded), len(self.tree.calls))
        after = row["next"]
        after.set(keys.COMPLETION, make_non_tensor(self.completion(leaves[-1]) if leaves else []))
        if rewarded and len(samples) == 1:
            after.set("call_rewards", _token_rewards([*leaves[0].prompt.path, leaves[0]], rewarded))
        if self.version is not None:
            row.set(keys.POLICY_VERSION, self.version)
        return row

    def count_tree(self) -> None:
        """Add the counters of the ended calls to ``counts``."""
        self.counts += self.tree.counts
        self.counts["agent/orphans"] += self.tree.orphans()

    def make_row(self, samples: Sequence[Sampled], reason: str, reward: float, calls: int) -> TensorDictBase:
        """Return the conversation's row with these samples and outcome in ``"next"``, without a completion."""
        row = copy_row(self.row)
        after = make_stepped_row(row, "")
        after.set(keys.NUM_TURNS, torch.tensor(calls))
        after.set("reward", torch.full((1, 1), reward))
        for i, sample in enumerate(samples or [_unsampled(row)]):
            if i:
                stash_segment(after)
            self.env.set_context(after, sample.tokens, sample.mask, sample.log_probs)
            write_sample(after, sample)
        end_row(after, reason)
        return row.set("next", after)

    def completion(self, leaf: Call) -> Messages:
        """Return the messages after the conversation's query; of another prompt, all from the first reply on."""
        messages, named, size = leaf.conversation, leaf.prompt.keys, len(self._first_prompt)
        if named[:size] != self._first_prompt:
            size = next((i for i, key in enumerate(named) if key[0] == "assistant"), len(named))
        return messages[size:]


class RoleSessions:
    """Sessions of the roles of one conversation, to be used like one :class:`AgentSession`.

    Limits hold for each role. The row has the samples of all roles that are trained, and ``ROLE_RECORD`` tells whose
    they are; :func:`~torchrl_rloo.data.segments.split_roles` makes one row of each role of it.
    """

    def __init__(self, env: ChatEnv, row: TensorDictBase, sample: Sample, *, roles: Sequence[Role], **settings: Any):
        self.roles, self.broken = roles, asyncio.Event()
        self.by_role: dict[str, AgentSession] = {}
        for i, role in enumerate(roles):
            own = copy_row(row)
            own.set(keys.ROLE_ID, torch.tensor(i))
            if (seed := row.get(keys.SEED, None)) is not None:
                own.set(keys.SEED, torch.tensor(derive_seed(int(seed), role.name)))
            self.by_role[role.name] = AgentSession(env, own, sample, broken=self.broken, **settings)
        self._row = row

    @property
    def _trained(self) -> dict[str, AgentSession]:
        return {role.name: self.by_role[role.name] for role in self.roles if not role.frozen}

    @property
    def counts(self) -> Counter[str]:
        """Counters of all roles."""
        return sum((session.counts for session in self.by_role.values()), Counter())

    @property
    def error(self) -> Exception | None:
        """First error of the policy, by the order of roles."""
        return next((s.error for s in self.by_role.values() if s.error is not None), None)

    @property
    def limit(self) -> str | None:
        """Stop reason of the first limit that refused a call, by the order of roles."""
        return next((s.limit for s in self.by_role.values() if s.limit is not None), None)

    @property
    def called(self) -> bool:
        """True if a role that is trained received a reply."""
        return any(session.called for session in self._trained.values())

    def end(self) -> None:
        """Cancel the calls in flight, and refuse others."""
        for session in self.by_role.values():
            session.end()

    def last_stop_reason(self) -> str:
        """Return ``"ended"``, or the stop reason of the first role whose last reply was cut."""
        reasons = [session.last_stop_reason() for session in self._trained.values() if session.called]
        return next((reason for reason in reasons if reason != "ended"), "ended")

    def transcript(self) -> list[dict[str, Any]]:
        """Return the calls of one role after the other, each as of :class:`AgentSession`, with its ``"role"``."""
        return [{"role": role, **call} for role, session in self.by_role.items() for call in session.transcript()]

    def finish(
        self,
        reason: str,
        reward: float = 0.0,
        call_rewards: Mapping[str, float] | None = None,
        role_rewards: Mapping[str, float] | None = None,
    ) -> TensorDictBase:
        """Return the conversation's row with its outcome in ``"next"``."""
        trained = self._trained
        calls = [call for session in trained.values() for call in session.tree.calls]
        rewarded = {id(call): 0.0 for call in calls}
        for call, value in rewarded_calls(calls, call_rewards or {}):
            rewarded[id(call)] += value
        samples, record = [], []
        for role in self.roles:
            session = self.by_role[role.name]
            session.count_tree()
            if role.frozen:
                continue
            samples += session.tree.samples()
            own = reason if reason in ("failed", "time") else session.limit
            credited: set[int] = set()
            for leaf in session.tree.leaves():
                path = [id(call) for call in (*leaf.prompt.path, leaf)]
                new = [call for call in path if call not in credited]
                credited.update(path)
                # A sample earns what its calls did, also those that it shares; the row of a role counts each call once
                earning = path if role.compare == "conversation" else new
                record.append(
                    {
                        "role": role.name,
                        "reward": sum(rewarded[call] for call in earning),
                        "turns": len(new),
                        "completion": session.completion(leaf),
                        "reason": own or session.last_stop_reason(),
                    }
                )
        n_calls = sum(len(session.tree.calls) for session in self.by_role.values())
        row = next(iter(trained.values())).make_row(samples, reason, reward, n_calls)
        row["next"].set(keys.COMPLETION, make_non_tensor(record[-1]["completion"] if record else []))
        row["next"].set(keys.ROLE_RECORD[1], make_non_tensor({"samples": record, "rewards": dict(role_rewards or {})}))
        versions = [s.version for s in trained.values() if s.version is not None]
        if versions:
            row.set(keys.POLICY_VERSION, min(versions))
        if (seed := self._row.get(keys.SEED, None)) is not None:
            row.set(keys.SEED, seed)
        return row


def _ended_error() -> RefusedCallError:
    return RefusedCallError("the conversation has ended; call no more", "session_ended")


_LIMIT_NAMES = {"turns": "max_turns", "total_tokens": "max_tokens"}


def client_message(text: str, calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the assistant message that an agent receives."""
    content = without_thinking(text)
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if content != text:
        thinking = text.partition("</think>")[0].partition("<think>")
        message["reasoning_content"] = (thinking[2] or thinking[0]).strip()
        message["content"] = content.lstrip()
    if calls:
        starts = [place for mark in _CALL_MARKS if (place := message["content"].find(mark)) >= 0]
        message["content"] = message["content"][: min(starts, default=0)].strip()
        message["tool_calls"] = list(calls)
    return message


# Beginnings of calls in the formats of the parsers
_CALL_MARKS = ("<tool_call>", "<function=", "[TOOL_CALLS]", "<|python_tag|>", "<tool>", "```", '{"')


def _token_rewards(path: Sequence[Call], rewarded: Sequence[tuple[Call, float]]) -> torch.Tensor:
    """Return ``[T]``, the reward of each call of a path at its last token."""
    rewards = torch.zeros(len(path[-1]))
    for call, value in rewarded:
        rewards[len(call) - 1] += value
    return rewards


def _unsampled(row: TensorDictBase) -> Sampled:
    """Return the prompt of a conversation in which the policy sampled nothing."""
    tokens = row[keys.PROMPT_TOKENS]
    mask, images = torch.zeros(len(tokens), dtype=torch.bool), row.get(keys.IMAGES, None)
    return Sampled(tokens, mask, torch.zeros(len(tokens)), images=images)


def derive_seed(*values: Any) -> int:
    """Return a seed below ``2**62`` that depends on all values."""
    return int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=8).digest(), "little") >> 2
