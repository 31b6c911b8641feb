"""Answers to the policy's turns, which make an environment multi-turn: a function's, a request to think, a user's."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import replace
from hashlib import blake2b
from string import Formatter
from typing import Any

from tensordict import TensorDictBase

from torchrl_rloo.data import keys
from torchrl_rloo.data.stop_reasons import end_row, stop_reason
from torchrl_rloo.data.templates import Messages, decode_response, encode_prompt, image_paths, join_conversation
from torchrl_rloo.engines.base import MAX_ABORTS, AsyncEngine, Engine, EngineError, Request, Sample, check_sample
from torchrl_rloo.engines.generation import GenerationConfig, end_of_sequence_ids
from torchrl_rloo.envs.chat import plain_value
from torchrl_rloo.envs.tools.parsers import without_thinking
from torchrl_rloo.envs.turn_transform import TurnTransform
from torchrl_rloo.images.encoder import encoder_of
from torchrl_rloo.images.parts import content_text, join_contents
from torchrl_rloo.modules.vllm_policy import check_image_settings
from torchrl_rloo.runtime import event_loop
from torchrl_rloo.runtime.call_pool import CallLimit
from torchrl_rloo.runtime.lookup import is_async
from torchrl_rloo.runtime.torchrl_arguments import with_torchrl_arguments


class FeedbackTransform(TurnTransform):
    """Transform that answers each finished turn of the policy with feedback, such as a tool's result or a user's reply.

    Only the feedback is encoded; the ids that the policy sampled stay as they are. Feedback tokens are context: the
    action mask is False on them, so they carry no gradient, KL or log-prob. ``("next", "tokens", "prompt")`` grows by
    the feedback's ids, and ``("next", "done")`` becomes False.

    Args:
        respond: ``f(conversation, row) -> messages | None``. It returns the messages that answer the conversation's
            last assistant message, or None to end the conversation. ``row`` holds the dataset's columns. A sync
            function runs in a thread, an async one on an event loop. A content may be a list of texts, PIL images and
            parts ``{"type": "image", "image": ...}``; a model that reads text only sees ``[image WxH]``.
        max_turns: maximum number of policy turns; a conversation that ``respond`` would continue after them is
            truncated. None leaves it to the environment.

    Attributes:
        counts: truncated conversations: ``"feedback/turn_limit"`` at a limit on turns, ``"feedback/token_limit"`` at
            the environment's limit of tokens, ``"feedback/time_limit"`` at its ``max_seconds``. ``"feedback/failed"``
            counts those for which ``respond`` raised or its messages could not be rendered; the traceback is logged.

    Example:
        >>> def ask_again(conversation, row):
        ...     return [{"role": "user", "content": "Are you sure?"}] if len(conversation) < 4 else None
        >>> FeedbackTransform(ask_again, max_turns=2).max_turns
        2
    """

    part = "feedback"

    def __init__(
        self,
        respond: Callable[[Messages, TensorDictBase], Messages | None | Awaitable[Messages | None]],
        *,
        max_turns: int | None = None,
    ):
        super().__init__()
        if max_turns is not None and max_turns < 1:
            raise ValueError(f"max_turns={max_turns} must be at least 1, or None for no limit")
        self.respond, self.max_turns = respond, max_turns

    async def step_row(self, row: TensorDictBase, next_row: TensorDictBase) -> None:
        """Answer the turn if the policy ended it; see :meth:`TurnTransform.step_row`."""
        if next_row["terminated"].any():
            self._answer(next_row, await event_loop.call(self.respond, self.conversation(row, next_row), row))

    def _answer(self, next_row: TensorDictBase, messages: Messages | None) -> None:
        if not messages:
            return
        if self.max_turns is not None and int(next_row[keys.NUM_TURNS]) >= self.max_turns:
            end_row(next_row, "turns")
        elif self.chat_env.continue_row(next_row, messages):
            return
        self.counts[_LIMITS[stop_reason(next_row)]] += 1

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        if is_async(self.respond):
            return super()._step(tensordict, next_tensordict)
        self.check_parent()
        for row, next_row in zip(tensordict.unbind(0), next_tensordict.unbind(0), strict=True):
            with self.ending_on_error(row, next_row):
                if next_row["terminated"].any():
                    self._answer(next_row, self.respond(self.conversation(row, next_row), row))
        return next_tensordict


_LIMITS = {"turns": "feedback/turn_limit", "total_tokens": "feedback/token_limit", "time": "feedback/time_limit"}


Speaker = Callable[[Messages, int], str | Awaitable[str]]


class AddThinkingPrompt(TurnTransform):
    """Transform that answers a turn of the policy with a user message that asks it to think again.

    TorchRL's transform of the same name looks at the reward and edits the policy's answer. This one asks on a
    condition, and leaves the policy's tokens unchanged: ``("next", "tokens", "prompt")`` only grows.

    Args:
        prompt: the user message.
        condition: ``f(conversation, row) -> bool``, sync or async: whether to ask; None always asks. ``row`` holds
            the dataset's columns.
        max_times: maximum number of requests in one conversation.

    Attributes:
        counts: ``"thinking/asked_again"``, the number of requests made.

    Raises:
        ValueError: if ``prompt`` is empty or ``max_times`` is below 1.

    Example:
        >>> def has_no_box(conversation, row):
        ...     return "boxed" not in conversation[-1]["content"]
        >>> AddThinkingPrompt("Think again, and put your answer in a box.", has_no_box).max_times
        1
    """

    part = "thinking"

    @with_torchrl_arguments
    def __init__(
        self,
        prompt: str = "But wait, let me think about this more carefully.",
        condition: Callable[[Messages, TensorDictBase], bool | Awaitable[bool]] | None = None,
        *,
        max_times: int = 1,
    ):
        super().__init__()
        if not isinstance(prompt, str) or not prompt:
            raise ValueError(f"prompt={prompt!r:.80} must be a text, and not empty")
        if max_times < 1:
            raise ValueError(f"max_times={max_times} must be at least 1")
        self.message, self.condition, self.max_times = {"role": "user", "content": prompt}, condition, max_times

    async def step_row(self, row: TensorDictBase, next_row: TensorDictBase) -> None:
        """Answer a turn that nothing else answered; see :meth:`TurnTransform.step_row`."""
        asked = sum(message == self.message for message in next_row[keys.COMPLETION])
        if stop_reason(next_row) != "answered" or asked >= self.max_times:
            return
        if self.condition is not None:
            if not await event_loop.call(self.condition, self.conversation(row, next_row), row):
                return
        if self.chat_env.continue_row(next_row, [self.message]):
            self.counts["thinking/asked_again"] += 1


class UserSimulator(TurnTransform):
    """Transform that answers the policy's turns with another policy that plays the user.

    The simulator sees the conversation with swapped roles: the policy's messages as the user's, its own as the
    assistant's. An engine of a model that reads text only sees ``[image WxH ...]`` for an image. The simulator sees
    neither the policy's system prompt nor its thinking (``<think>``). It also sees no turn that
    another transform answered, such as one that runs tools. Its replies are feedback, so their tokens carry no
    gradient: ``("next", "tokens", "prompt")`` grows by their ids.

    The conversation ends when the simulator's reply contains ``stop_text`` or is empty; the policy never sees that
    reply. The simulator's thinking is removed from every reply.

    Args:
        speaker: engine that samples replies, or ``f(messages, seed) -> str``, sync or async, such as a request to a
            service. A sync function runs on a thread per reply. A synchronous engine gets all pending requests in one
            call.
        system_prompt: the simulator's system prompt. Names in braces are dataset columns, as in ``"You want {goal}."``
        tokenizer: tokenizer of the engine's model, with a chat template; for an engine only.
        generate_kwargs: sampling settings of an engine, see
            :class:`~torchrl_rloo.engines.generation.GenerationConfig`; None uses its defaults.
        stop_text: text by which the simulator ends the conversation; ``system_prompt`` should say so.
        max_replies: maximum number of replies; the policy's turn after the last one ends as truncated. None leaves it
            to the environment.
        greeting: message that the policy is assumed to have sent before the user's first one; many chat templates
            require a user message first.
        timeout: time limit of a reply in seconds; a conversation that waits longer ends as failed.
        seed: seed of the simulator; a rerun gives the same replies. A reply's seed also depends on the turn and on the
            row's ``"seed"``, or its group and trajectory if it has none.

    Attributes:
        counts: ``"user/replies"``; ``"user/ended"`` conversations, which the simulator ended; ``"user/limit"``
            conversations, which reached ``max_replies``; and ``"user/failed"`` ones, where it raised or timed out.

    Raises:
        ValueError: for a number out of range, an empty ``stop_text``, an engine without a tokenizer, or a tokenizer
            without an engine.
        KeyError: at ``reset``, if the rows lack a column that ``system_prompt`` names.

    Example:
        >>> async def shopper(messages, seed):
        ...     return "How much is it?" if len(messages) < 5 else "Thanks. ###STOP###"
        >>> user = UserSimulator(shopper, "You want to buy {item}. Say ###STOP### when you are done.", max_replies=3)
        >>> user.columns
        ['item']
    """

    part = "user"

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
        # Check settings
        if isinstance(speaker, Engine) != (tokenizer is not None):
            raise ValueError(
                f"tokenizer={tokenizer!r:.60} does not fit speaker={speaker!r:.60}: an engine needs its model's "
                "tokenizer, and a function requires tokenizer=None"
            )
        if generate_kwargs is not None and tokenizer is None:
            raise ValueError(f"generate_kwargs={dict(generate_kwargs)} requires an engine, got a {type(speaker)}")
        if not stop_text.strip():
            raise ValueError(f"stop_text={stop_text!r} must not be empty, since every reply would contain it")
        if max_replies is not None and max_replies < 1:
            raise ValueError(f"max_replies={max_replies} must be at least 1, or None for no limit")
        if not timeout > 0:
            raise ValueError(f"timeout={timeout} must be above 0 seconds")
        fields = {name for _, name, _, _ in Formatter().parse(system_prompt) if name is not None}
        if bad := sorted(name for name in fields if not name.isidentifier()):
            raise ValueError(
                f"system_prompt has {bad} in braces, which must be names of columns; double literal braces"
            )
        # Set up the speaker
        self.system_prompt, self.stop_text, self.max_replies = system_prompt, stop_text, max_replies
        self.greeting, self.timeout, self.seed = greeting, timeout, seed
        self.columns = sorted(fields)
        if isinstance(speaker, Engine):
            speaker = _EngineSpeaker(speaker, tokenizer, GenerationConfig.from_kwargs(generate_kwargs))
        self._speaker = speaker
        self._own_messages: dict[int, list[int]] = {}  # indices of the simulator's messages, by trajectory

    async def step_row(self, row: TensorDictBase, next_row: TensorDictBase) -> None:
        """Answer the turn if the policy ended it and nothing else answered; see :meth:`TurnTransform.step_row`."""
        if stop_reason(next_row) != "answered":
            return
        own = self._own_messages.setdefault(int(next_row[keys.TRAJECTORY_ID]), [])
        if self.max_replies is not None and len(own) >= self.max_replies:
            self.counts["user/limit"] += 1
            end_row(next_row, "turns")
            return
        # Sample a reply, and end the conversation or pass the reply to the policy
        index = len(next_row[keys.COMPLETION])
        reply = without_thinking(await self._reply(self.messages(row, next_row), self._seed(row, next_row)))
        if not reply.strip() or self.stop_text in reply:
            self.counts["user/ended"] += 1
            end_row(next_row, "ended")
        elif self.chat_env.continue_row(next_row, [{"role": "user", "content": reply.strip()}]):
            own.append(index)
            self.counts["user/replies"] += 1

    async def release(self, trajectory_id: int) -> None:
        """Forget which messages were the simulator's."""
        self._own_messages.pop(trajectory_id, None)

    def messages(self, row: TensorDictBase, next_row: TensorDictBase) -> Messages:
        """Return the conversation as the simulator sees it, with its system prompt first."""
        prompt = self.system_prompt.format_map({name: plain_value(row[name]) for name in self.columns})
        query, completion = row[keys.QUERY], next_row[keys.COMPLETION]
        # Keep the simulator's messages and the policy's turns that they answer; the next message will be its own
        own = {*self._own_messages.get(int(next_row[keys.TRAJECTORY_ID]), ()), len(completion)}
        visible = [message for k, message in enumerate(completion) if k in own or k + 1 in own]
        return [{"role": "system", "content": prompt}, *_swap_roles(join_conversation(query, visible), self.greeting)]

    async def _reply(self, messages: Messages, seed: int) -> str:
        if isinstance(self._speaker, _EngineSpeaker):
            return await asyncio.wait_for(self._speaker(messages, seed), self.timeout)
        reply = await event_loop.call(self._speaker, messages, seed, timeout=self.timeout)
        if not isinstance(reply, str):
            raise TypeError(f"the speaker must return a string, got {reply!r:.100} ({type(reply).__name__})")
        return reply

    def _seed(self, row: TensorDictBase, next_row: TensorDictBase) -> int:
        names = [keys.SEED] if row.get(keys.SEED, None) is not None else [keys.GROUP_ID, keys.TRAJECTORY_ID]
        own = [int(row[name]) for name in names if row.get(name, None) is not None]
        text = f"{self.seed} {own} {int(next_row[keys.NUM_TURNS])}"
        return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1  # below 2**63

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        if missing := [name for name in self.columns if name not in tensordict_reset.keys()]:
            raise KeyError(
                f"system_prompt names the columns {missing}, which the rows do not have; they have "
                f"{sorted(set(map(str, tensordict_reset.keys())) - keys.RESERVED)}. Double literal braces"
            )
        return tensordict_reset


class _EngineSpeaker:
    """Speaker that samples from an engine; it may be awaited on several event loops."""

    def __init__(self, engine: Engine, tokenizer: Any, config: GenerationConfig):
        self.engine, self.tokenizer, self.config = engine, tokenizer, config
        self.encoder, excluded = encoder_of(tokenizer), config.distribution.excluded
        excluded = tuple(sorted({*excluded, *(() if self.encoder is None else self.encoder.excluded)}))
        self.distribution = replace(config.distribution, excluded=excluded)
        self.stop_ids = () if config.ignore_eos else (*end_of_sequence_ids(tokenizer), *engine.stop_ids)
        self.stop_ids = tuple(dict.fromkeys((*self.stop_ids, *config.stop_token_ids)))
        self._waiting: deque[tuple[Request, Future[Sample]]] = deque()
        self._one_call = CallLimit(1)
        self._serving: asyncio.Task | None = None

    async def __call__(self, messages: Messages, seed: int) -> str:
        paths = image_paths(messages)
        if self.encoder is not None and paths:
            check_image_settings(self.engine, self.encoder)
        if self.encoder is None and paths:
            messages = [message | {"content": content_text(message["content"])} for message in messages]
        prompt = encode_prompt(self.tokenizer, messages)
        images = () if self.encoder is None else self.encoder.spans(prompt, paths)
        limit = self.config.max_new_tokens
        if self.engine.context_length is not None:
            limit = min(limit, self.engine.context_length - len(prompt))
        if limit < 1:
            raise EngineError(f"{len(prompt)} tokens fill the simulator's context_length={self.engine.context_length}")
        # Retry a sample that a pause cut off; the next attempt waits until the engine resumes
        stops = self.stop_ids, self.config.stop_strings
        request = Request(prompt, limit, seed, self.distribution, *stops, images=images)
        for _ in range(MAX_ABORTS):
            answer = await self._sample(request)
            vocab_size, version = self.engine.vocab_size or len(self.tokenizer), self.engine.version
            sample = check_sample(answer, request, vocab_size=vocab_size, version=version)
            if sample.finish != "abort":
                break
        else:
            raise EngineError(f"the simulator's engine aborted a message {MAX_ABORTS} times; check what pauses it")
        reply = decode_response(self.tokenizer, sample.tokens)
        if sample.finish == "length" and not without_thinking(reply).strip():
            raise EngineError(f"the simulator used its {limit} tokens without a reply; raise its max_new_tokens")
        return reply

    async def _sample(self, request: Request) -> Sample:
        if isinstance(self.engine, AsyncEngine):
            return await asyncio.wrap_future(self.engine.submit(request))
        # Results are not bound to a loop: conversations of several loops share batches
        result: Future[Sample] = Future()
        self._waiting.append((request, result))
        serving = self._serving
        if serving is None or serving.done() or serving.get_loop() is not asyncio.get_running_loop():
            self._serving = asyncio.create_task(self._serve())
        return await asyncio.wrap_future(result)

    async def _serve(self) -> None:
        """Sample pending requests, one batch per engine call, until none is left; new ones join the next batch."""
        while self._waiting:
            batch = []
            with suppress(IndexError):  # another loop's thread takes requests too
                while True:
                    batch.append(self._waiting.popleft())
            try:
                await self._settle([(request, result) for request, result in batch if not result.done()])
            except BaseException as error:  # such as the end of this loop, while other loops wait for the batch
                for _, result in batch:
                    _settle(result, EngineError(f"the simulator's batch was lost: {error!r}"))
                raise

    async def _settle(self, batch: list[tuple[Request, Future[Sample]]]) -> None:
        try:
            requests = [request for request, _ in batch]
            async with self._one_call:
                samples = await event_loop.call_at_once(self.engine.generate, requests)
        except Exception as error:
            if len(batch) == 1:
                _settle(batch[0][1], error)
            else:
                for one in batch:  # a single request may have caused the error
                    await self._settle([one])
        else:
            for (_, result), sample in zip(batch, samples, strict=True):
                _settle(result, sample)


def _settle(result: Future[Sample], outcome: Sample | Exception) -> None:
    with suppress(InvalidStateError):  # the conversation may have been cancelled
        (result.set_exception if isinstance(outcome, Exception) else result.set_result)(outcome)


def _swap_roles(conversation: Messages, greeting: str) -> Messages:
    """Swap the roles of a conversation, and make them alternate, starting with ``"user"``."""
    swapped: Messages = []
    for message in conversation:
        if message["role"] not in _SWAPPED_ROLES:
            continue
        role, content = _SWAPPED_ROLES[message["role"]], message["content"]
        if role == "user":
            content = without_thinking(content_text(content)).strip()
        # Chat templates require a user message first
        if not swapped and role == "assistant":
            swapped.append({"role": "user", "content": greeting})
        # Join consecutive messages of one role
        if swapped and swapped[-1]["role"] == role:
            swapped[-1] = {"role": role, "content": join_contents(swapped[-1]["content"], content, between="\n\n")}
        else:
            swapped.append({"role": role, "content": content})
    return swapped


_SWAPPED_ROLES = {"user": "assistant", "assistant": "user"}
