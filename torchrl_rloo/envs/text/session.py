"""TextSession: a text environment's side of one conversation, opened once and stepped turn by turn."""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from torchrl_rloo.data.templates import Messages, is_conversation
from torchrl_rloo.envs.text.adapters import EnvSession, OpenRLHFSession, VerifiersSession
from torchrl_rloo.runtime.event_loop import call
from torchrl_rloo.runtime.lookup import is_async


@dataclass(frozen=True)
class Outcome:
    """Result of a policy turn.

    Attributes:
        feedback: the environment's answer, as text (a user message) or messages; None ends the conversation. Feedback
            on the last turn is discarded.
        reward: reward of this turn.
        terminated: whether the environment has ended.
        truncated: whether one of the environment's limits has ended it.
        metrics: numbers, booleans and short strings about the conversation so far, for the log.
    """

    feedback: str | Messages | None = None
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    metrics: dict[str, Any] = field(default_factory=dict)


class TextSession:
    """Text environment's side of one conversation.

    Its methods are called one at a time, on the users' loop. Make blocking calls through
    :func:`~torchrl_rloo.runtime.event_loop.call`.

    Example::

        class Echo(TextSession):
            async def reset(self, row):
                return "Say something."

            async def step(self, text):
                return Outcome(feedback=text, reward=1.0)
    """

    async def reset(self, row: dict[str, Any]) -> str | Messages | None:
        """Open the conversation.

        Args:
            row: the dataset's columns, including ``"query"``, and ``"env_seed"``. The members of a group have the same
                ``"env_seed"``, and their sessions must return the same prompt.

        Returns:
            The prompt, as text (a user message) or messages; None uses the row's query.
        """
        raise NotImplementedError

    async def step(self, text: str) -> Outcome:
        """Process a turn that the policy has ended.

        Args:
            text: the policy's text.
        """
        raise NotImplementedError

    async def close(self) -> None:
        """Release what the session holds; called once, whether or not the environment has ended."""


def as_messages(said: Any, what: str) -> Messages:
    """Convert text to a user message, and copy messages.

    Args:
        said: text or messages.
        what: name of the value, for the error.

    Raises:
        TypeError: if ``said`` is neither text nor messages.
    """
    if isinstance(said, str):
        return [{"role": "user", "content": said}]
    if is_conversation(said) and all(isinstance(m["role"], str) and isinstance(m["content"], str) for m in said):
        return [dict(message) for message in said]
    raise TypeError(
        f"{what} must be text or a list of messages with 'role' and 'content', got {said!r:.200}; convert it to "
        "text (in styles with observe=, by that function)"
    )


Generate = Callable[[Messages | str], Awaitable[str]]


class RolloutSession(TextSession):
    """Session that runs ``async def rollout(row, generate) -> float | None`` concurrently with one conversation.

    ``await generate(messages)`` returns the policy's reply as text. The first call opens the conversation. Every later
    call must repeat the conversation so far, including the unchanged reply, and append new messages, the feedback. The
    function returns the reward of the last turn; None is 0. If a limit ends the conversation, the function is cancelled
    while it waits for a reply.

    Args:
        function: the rollout function.

    Example::

        async def rollout(row, generate):
            messages = [{"role": "user", "content": row["question"]}]
            reply = await generate(messages)
            messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "Are you sure?"}]
            return float(row["answer"] in await generate(messages))
    """

    def __init__(self, function: Callable[[dict[str, Any], Generate], Awaitable[float | None]]):
        self.function = function
        self._conversation: Messages = []  # so far, replies included
        self._reply: asyncio.Future[str] | None = None  # the reply that the function waits for
        self._task: asyncio.Task | None = None
        self._events: asyncio.Queue[Outcome | BaseException] = asyncio.Queue()

    async def reset(self, row: dict[str, Any]) -> Messages:
        """Start the function, and wait for its first call of ``generate``.

        Args:
            row: see :meth:`TextSession.reset`.

        Raises:
            ValueError: if the function returns without a call.
        """
        self._task = asyncio.ensure_future(self._run(row))
        outcome = await self._next()
        if outcome.terminated:
            raise ValueError(
                "the rollout function returned without a call of generate; it must call generate at least once"
            )
        return outcome.feedback

    async def step(self, text: str) -> Outcome:
        """Pass the reply to the function, and wait until it calls ``generate`` again or returns.

        Args:
            text: the policy's reply.
        """
        self._conversation = [*self._conversation, {"role": "assistant", "content": text}]
        reply, self._reply = self._reply, None
        reply.set_result(text)
        return await self._next()

    async def close(self) -> None:
        """Cancel the function if it has not returned."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _next(self) -> Outcome:
        event = await self._events.get()
        if isinstance(event, BaseException):
            raise event
        return event

    async def _run(self, row: dict[str, Any]) -> None:
        try:
            value = await self.function(row, self._generate)
            self._events.put_nowait(Outcome(reward=0.0 if value is None else float(value), terminated=True))
        except Exception as error:
            self._events.put_nowait(error)
        except BaseException as error:  # an exit or a cancellation from within, which nothing else would report
            self._events.put_nowait(RuntimeError(f"the rollout function raised {error!r}"))

    async def _generate(self, messages: Messages | str) -> str:
        try:
            messages = as_messages(messages, "the argument of generate")
            feedback = self._extension(messages)
        except Exception as error:
            self._events.put_nowait(error)  # the conversation fails even if the function catches the error
            raise
        self._conversation = messages
        self._reply = asyncio.get_running_loop().create_future()
        self._events.put_nowait(Outcome(feedback=feedback))
        return await self._reply

    def _extension(self, messages: Messages) -> Messages:
        """Return the messages that extend the conversation so far."""
        if self._reply is not None:
            raise RuntimeError("generate was called while a reply is pending; await one reply at a time")
        for i, was in enumerate(self._conversation):
            now = messages[i] if i < len(messages) else None
            if now is None or any(now[name] != was[name] for name in ("role", "content")):
                raise ValueError(
                    f"generate got a changed conversation: message {i} was {was!r:.200}, now it is {now!r:.200}; "
                    "append the unchanged reply, then new messages"
                )
        if len(messages) == len(self._conversation):
            raise ValueError("generate got no new message after the last reply; append what the policy should answer")
        return messages[len(self._conversation) :]


STYLES = {
    "env": "reset and step, as in Gymnasium, the older Gym or OpenEnv",
    "openrlhf": "async reset(states) and step(states), as in OpenRLHF's agents",
    "verifiers": "env_response(messages, state) and is_completed, as in verifiers",
    "rollout": "async def rollout(row, generate) -> float | None",
    "session": "a TextSession",
}
_ADAPTERS = {"env": EnvSession, "openrlhf": OpenRLHFSession, "verifiers": VerifiersSession, "rollout": RolloutSession}


def wrap(
    environment: Any,
    *,
    style: str | None = None,
    action: Callable[[str], Any] | None = None,
    observe: Callable[[Any], Any] | None = None,
) -> Callable[[], TextSession]:
    """Return a function that makes a separate session for each conversation.

    Args:
        environment: one of

            - a class of environments,
            - a sync or async function without arguments that makes an environment,
            - an environment, of which each conversation gets a deep copy; in the ``verifiers`` style, whose state is
              kept outside, all share it,
            - an async rollout function.

        style: name in :data:`STYLES`; None detects the style.
        action: function from the policy's text to what ``step`` takes, such as an OpenEnv action; None passes the text.
        observe: function from an observation to text or messages; None uses the observation itself.

    Returns:
        A function without arguments that makes a :class:`TextSession`.

    Raises:
        ValueError: for an unknown style, an environment without a known style, or an option that its style does not
            have.

    Example:
        >>> from torchrl_rloo.envs.text.games import GuessNumber
        >>> make_session = wrap(lambda: GuessNumber(1, 8))
        >>> isinstance(make_session(), TextSession)
        True
    """
    if style is not None and style not in STYLES:
        raise ValueError(f"style={style!r} is unknown; valid: {_list_styles()}")
    options = {name: f for name, f in (("action", action), ("observe", observe)) if f is not None}
    is_factory = _is_factory(environment)
    known = style if style is not None or is_factory else detect_style(environment)
    if known is not None:
        _check_options(known, options)

    def make() -> TextSession:
        return _Wrapped(environment, is_factory, known, options)

    return make


def detect_style(environment: Any) -> str:
    """Return the style of an environment, or of a class of environments.

    Args:
        environment: see :func:`wrap`.

    Returns:
        A name in :data:`STYLES`.

    Raises:
        ValueError: if no style fits; the message lists the styles.
    """
    # Styles with a distinctive class or method
    kind = environment if inspect.isclass(environment) else type(environment)
    if issubclass(kind, TextSession):
        return "session"
    if callable(getattr(kind, "env_response", None)):
        return "verifiers"
    # Styles with a step method; OpenRLHF's takes its states
    step = getattr(kind, "step", None) or getattr(environment, "step", None)
    if callable(step):
        names = list(inspect.signature(step).parameters)[:2]
        agents = {base.__name__ for base in kind.__mro__} & {"AgentInstanceBase"}
        if agents or (is_async(step) and {"states", "state_dict"} & set(names)):
            return "openrlhf"
        if callable(getattr(environment, "reset", None)):
            return "env"
    if inspect.isroutine(environment) and is_async(environment) and _required(environment) == 2:
        return "rollout"
    raise ValueError(f"environment={environment!r:.200} has no known style; set style= to one of {_list_styles()}")


def _is_factory(environment: Any) -> bool:
    """Return whether it is a function that makes an environment."""
    if inspect.isclass(environment) or not callable(environment):
        return False
    if any(hasattr(environment, name) for name in ("reset", "step", "env_response")):
        return False
    return _required(environment) == 0


def _required(function: Callable[..., Any]) -> int:
    """Return the number of required arguments of a function."""
    parameters = inspect.signature(function).parameters.values()
    return sum(p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)


def _check_options(style: str, options: dict[str, Any]) -> None:
    supported = {"env": {"action", "observe"}, "openrlhf": {"observe"}}.get(style, set())
    if unused := sorted(options.keys() - supported):
        raise ValueError(f"{unused} cannot be combined with style={style!r} ({STYLES[style]}); omit them")


def _list_styles() -> str:
    return "; ".join(f"{name!r}: {meaning}" for name, meaning in STYLES.items())


class _Wrapped(TextSession):
    """Session that makes the environment in ``reset``, where the timeout applies."""

    def __init__(self, environment: Any, is_factory: bool, style: str | None, options: dict[str, Any]):
        self.environment, self.is_factory, self.style, self.options = environment, is_factory, style, options
        self.inner: TextSession | None = None

    async def reset(self, row: dict[str, Any]) -> Any:
        environment = await self._make()
        style = detect_style(environment) if self.style is None else self.style
        if style == "session":
            self.inner = environment
        else:
            _check_options(style, self.options)
            self.inner = _ADAPTERS[style](environment, **self.options)
        return await self.inner.reset(row)

    async def step(self, text: str) -> Outcome:
        return await self.inner.step(text)

    async def close(self) -> None:
        if self.inner is not None:
            await self.inner.close()

    async def _make(self) -> Any:
        environment = self.environment
        if self.is_factory:
            return await call(environment)
        # Classes: make an environment for each conversation
        if inspect.isclass(environment):
            if not inspect.iscoroutinefunction(environment.__init__):
                return await call(lambda: environment())
            agent = environment.__new__(environment)  # the class of an actor, whose constructor is awaited
            await call(agent.__init__)
            return agent
        # Instances of these styles keep no state of a conversation, so all share them
        if self.style in ("rollout", "verifiers"):
            return environment
        # Copy other instances, whose state belongs to one conversation
        try:
            return await call(copy.deepcopy, environment)
        except Exception as error:
            raise TypeError(
                f"{type(environment).__name__} cannot be copied for each conversation ({error}); pass its class, or a "
                "function that makes one"
            ) from error
