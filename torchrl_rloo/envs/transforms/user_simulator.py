"""UserSimulator: another policy in the role of the user, so that conversations of several turns need no people."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from hashlib import blake2b
from string import Formatter
from typing import Any

from tensordict import TensorDictBase

from torchrl_rloo.data import keys
from torchrl_rloo.data.stop_reasons import end_row, stop_reason
from torchrl_rloo.data.templates import Messages, decode_response, encode_prompt, join_conversation
from torchrl_rloo.engines.base import AsyncEngine, Engine, EngineError, Request, Sample
from torchrl_rloo.engines.generation import GenerationConfig, end_of_sequence_ids
from torchrl_rloo.envs import event_loop
from torchrl_rloo.envs.tools.parsers import without_thinking
from torchrl_rloo.envs.turn_transform import TurnTransform

Speaker = Callable[[Messages, int], str | Awaitable[str]]


class UserSimulator(TurnTransform):
    """Answers the policy's turns as a user would, by another policy that plays one.

    The simulator sees the conversation from the other side: what the policy said are its user's messages, what it said
    itself are the assistant's. It sees neither the policy's system prompt nor its thinking (``<think>``), and no turn
    that something else answered, such as a transform before this one that runs tools. What it says is feedback: its
    tokens carry no gradient.

    The conversation ends when the simulator says ``stop_text``, or nothing; what it says beside it is not passed on,
    and neither is its own thinking.

    Args:
        speaker: an engine, which samples a message from the simulator's prompt; or ``f(messages, seed) -> str``, sync
            or async, such as a request to another service. A sync function has a thread for each message. A synchronous
            engine gets all messages that wait for it in one call.
        system_prompt: the simulator's own. Names in braces are the dataset's columns: ``"You want {goal}."``
        tokenizer: of the engine's model, with a chat template; for an engine only.
        generate_kwargs: how an engine samples, see :class:`~torchrl_rloo.engines.generation.GenerationConfig`.
        stop_text: what the simulator says to end the conversation. Tell it so in ``system_prompt``.
        max_replies: its messages at most; a conversation that would go on is truncated. None: no limit but the
            environment's.
        greeting: what the assistant is taken to have said before the user's first message. Many chat templates want a
            user's message first.
        timeout: seconds a message may take; a conversation that waits longer ends as failed.
        seed: of the simulator. A message's own seed also depends on the row's ``"seed"`` or else its group and
            trajectory, and on the turn, so that a run says the same again.

    Attributes:
        counts: ``"user_replies"`` given, ``"user_ended"`` conversations that the simulator ended, ``"user_limit"``
            those at ``max_replies``; ``"failed"`` if it raised or took too long.

    Raises:
        ValueError: for a number out of range, an empty ``stop_text``, or an engine without a tokenizer or the reverse.
        KeyError: at ``reset``, if the rows lack a column that ``system_prompt`` names.

    Example:
        >>> async def shopper(messages, seed):
        ...     return "How much is it?" if len(messages) < 5 else "Thanks. ###STOP###"
        >>> user = UserSimulator(shopper, "You want to buy {item}. Say ###STOP### when you are done.", max_replies=3)
        >>> user.columns
        ['item']
    """

    def __init__(
        self,
        speaker: Engine | Speaker,
        system_prompt: str,
        *,
        tokenizer: Any = None,
        generate_kwargs: Mapping[str, Any] | None = None,
        stop_text: str = "###STOP###",
        max_replies: int | None = None,
        greeting: str = "Hello! How can I help you?",
        timeout: float = 300.0,
        seed: int = 0,
    ):
        super().__init__()
        if isinstance(speaker, Engine) != (tokenizer is not None):
            raise ValueError(f"tokenizer={tokenizer!r:.60}: an engine needs its model's, and nothing else has a use")
        if generate_kwargs is not None and tokenizer is None:
            raise ValueError(f"generate_kwargs={dict(generate_kwargs)} are for an engine, not a {type(speaker)}")
        if not stop_text.strip():
            raise ValueError(f"stop_text={stop_text!r} must not be empty: anything would contain it")
        if max_replies is not None and max_replies < 1:
            raise ValueError(f"max_replies={max_replies} must be at least 1, or None for no limit")
        if not timeout > 0:
            raise ValueError(f"timeout={timeout} must be above 0 seconds")
        fields = {name for _, name, _, _ in Formatter().parse(system_prompt) if name is not None}
        if bad := sorted(name for name in fields if not name.isidentifier()):
            raise ValueError(f"system_prompt has {bad} in braces, where the names of columns belong; {{{{}}}} is text")
        self.system_prompt, self.stop_text, self.max_replies = system_prompt, stop_text, max_replies
        self.greeting, self.timeout, self.seed = greeting, timeout, seed
        self.columns = sorted(fields)
        if isinstance(speaker, Engine):
            speaker = _EngineSpeaker(speaker, tokenizer, GenerationConfig.from_kwargs(generate_kwargs))
        self._speaker = speaker
        self._own: dict[int, list[int]] = {}  # by trajectory, the places of the simulator's messages in the completion

    async def step_row(self, row: TensorDictBase, next_row: TensorDictBase) -> None:
        """Answers the turn if the policy ended it and nothing else did; see :meth:`TurnTransform.step_row`."""
        if stop_reason(next_row) != "answered":
            return
        own = self._own.setdefault(int(next_row[keys.TRAJECTORY_ID]), [])
        if self.max_replies is not None and len(own) >= self.max_replies:
            self.counts["user_limit"] += 1
            end_row(next_row, "turns")
            return
        place = len(next_row[keys.COMPLETION])
        said = without_thinking(await self._reply(self.messages(row, next_row), self._seed(row, next_row)))
        if not said.strip() or self.stop_text in said:
            self.counts["user_ended"] += 1
            end_row(next_row, "ended")
        elif self.chat_env.continue_row(next_row, [{"role": "user", "content": said.strip()}]):
            own.append(place)
            self.counts["user_replies"] += 1

    async def release(self, trajectory_id: int) -> None:
        """Forgets which messages were the simulator's."""
        self._own.pop(trajectory_id, None)

    def messages(self, row: TensorDictBase, next_row: TensorDictBase) -> Messages:
        """The conversation as the simulator sees it, its own system prompt first.

        Args:
            row: the turn, with the dataset's columns.
            next_row: the state after it.
        """
        prompt = self.system_prompt.format_map({name: _plain(row[name]) for name in self.columns})
        query, completion = row[keys.QUERY], next_row[keys.COMPLETION]
        own = {*self._own.get(int(next_row[keys.TRAJECTORY_ID]), ()), len(completion)}  # the next will be, too
        aloud = [message for k, message in enumerate(completion) if k in own or k + 1 in own]
        return [{"role": "system", "content": prompt}, *_swapped(join_conversation(query, aloud), self.greeting)]

    async def _reply(self, messages: Messages, seed: int) -> str:
        if isinstance(self._speaker, _EngineSpeaker):
            return await asyncio.wait_for(self._speaker(messages, seed), self.timeout)
        said = await event_loop.call(self._speaker, messages, seed, timeout=self.timeout)
        if not isinstance(said, str):
            raise TypeError(f"the speaker must return a string, got {said!r:.100} ({type(said).__name__})")
        return said

    def _seed(self, row: TensorDictBase, next_row: TensorDictBase) -> int:
        names = [keys.SEED] if row.get(keys.SEED, None) is not None else [keys.GROUP_ID, keys.TRAJECTORY_ID]
        own = [int(row[name]) for name in names if row.get(name, None) is not None]
        text = f"{self.seed} {own} {int(next_row[keys.NUM_TURNS])}"
        return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1  # below 2**63

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        if missing := [name for name in self.columns if name not in tensordict_reset.keys()]:
            raise KeyError(
                f"system_prompt names the columns {missing}, which the rows have not; they have "
                f"{sorted(set(map(str, tensordict_reset.keys())) - keys.RESERVED)}. Braces that are text are doubled"
            )
        return tensordict_reset


class _EngineSpeaker:
    """Messages sampled by an engine. Calls come from the conversations' loop alone."""

    def __init__(self, engine: Engine, tokenizer: Any, config: GenerationConfig):
        self.engine, self.tokenizer, self.config = engine, tokenizer, config
        self.stop_ids = () if config.ignore_eos else (*end_of_sequence_ids(tokenizer), *engine.stop_ids)
        self.stop_ids = tuple(dict.fromkeys((*self.stop_ids, *config.stop_token_ids)))
        self._waiting: list[tuple[Request, asyncio.Future[Sample]]] = []
        self._serving: asyncio.Task | None = None

    async def __call__(self, messages: Messages, seed: int) -> str:
        prompt = encode_prompt(self.tokenizer, messages)
        limit = self.config.max_new_tokens
        if self.engine.context_length is not None:
            limit = min(limit, self.engine.context_length - len(prompt))
        if limit < 1:
            raise EngineError(f"{len(prompt)} tokens fill the simulator's context of {self.engine.context_length}")
        request = Request(prompt, limit, seed, self.config.distribution, self.stop_ids, self.config.stop_strings)
        while (sample := await self._sample(request)).finish == "abort":
            pass  # cut off by a pause; the next attempt waits for the engine to go on
        said = decode_response(self.tokenizer, sample.tokens)
        if sample.finish == "length" and not without_thinking(said).strip():
            raise EngineError(f"the simulator's {limit} tokens ended before it said anything: raise its max_new_tokens")
        return said

    async def _sample(self, request: Request) -> Sample:
        if isinstance(self.engine, AsyncEngine):
            return await asyncio.wrap_future(self.engine.submit(request))
        result: asyncio.Future[Sample] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, result))
        if self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._serve())
        return await result

    async def _serve(self) -> None:
        """Samples all that wait, again and again until nothing does. Each call is a batch; others join the next one."""
        while self._waiting:
            batch, self._waiting = self._waiting, []
            await self._settle([(request, result) for request, result in batch if not result.done()])

    async def _settle(self, batch: list[tuple[Request, asyncio.Future[Sample]]]) -> None:
        try:
            samples = await event_loop.call(self.engine.generate, [request for request, _ in batch])
        except Exception as error:
            if len(batch) == 1:
                _settle(batch[0][1], error)
            else:
                for one in batch:  # it may be the fault of one of them
                    await self._settle([one])
        else:
            for (_, result), sample in zip(batch, samples, strict=True):
                _settle(result, sample)


def _settle(result: asyncio.Future[Sample], outcome: Sample | Exception) -> None:
    if not result.done():  # whoever waited may have given up
        (result.set_exception if isinstance(outcome, Exception) else result.set_result)(outcome)


def _swapped(conversation: Messages, greeting: str) -> Messages:
    """A conversation as the user sees it: roles change places, and alternate, the other side's coming first."""
    heard: Messages = []
    for message in conversation:
        if message["role"] not in _SWAPPED:
            continue
        role, content = _SWAPPED[message["role"]], message["content"]
        if role == "user":
            content = without_thinking(content).strip()
        if not heard and role == "assistant":
            heard.append({"role": "user", "content": greeting})
        if heard and heard[-1]["role"] == role:
            heard[-1] = {"role": role, "content": f"{heard[-1]['content']}\n\n{content}"}
        else:
            heard.append({"role": role, "content": content})
    return heard


_SWAPPED = {"user": "assistant", "assistant": "user"}


def _plain(value: Any) -> Any:
    """A column's entry as the dataset had it."""
    return value.tolist() if hasattr(value, "tolist") else value
