"""wrap: a factory of sessions from any environment with text in and text out."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

from torchrl_rloo.envs.text.adapters import EnvSession, OpenRLHFSession, VerifiersSession
from torchrl_rloo.envs.text.rollout import RolloutSession
from torchrl_rloo.envs.text.session import Outcome, TextSession
from torchrl_rloo.runtime.event_loop import call
from torchrl_rloo.runtime.lookup import is_async

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
