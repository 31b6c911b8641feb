"""Text environments in the styles of other libraries, as sessions."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torchrl_rloo.data import keys
from torchrl_rloo.data.templates import Messages
from torchrl_rloo.envs.text.session import Outcome, RolloutSession, TextSession, as_messages
from torchrl_rloo.runtime.event_loop import call
from torchrl_rloo.runtime.lookup import is_async

ENV_SEED = "env_seed"


class EnvSession(TextSession):
    """Session of an environment with sync or async ``reset`` and ``step``, as in Gymnasium, Gym or OpenEnv.

    ``step`` returns one of

    * Gymnasium's ``(observation, reward, terminated, truncated, info)``,
    * the older Gym's ``(observation, reward, done, info)`` or ``(observation, reward, done)``,
    * OpenEnv's result with ``.observation``, ``.reward`` and ``.done``.

    ``reset`` returns ``(observation, info)``, an observation, or such a result. It receives those of its keyword
    arguments that are ``seed``, ``options`` (a dictionary of the dataset's columns) or names of columns. With
    ``**kwargs`` it receives the seed and all columns, and ``options`` only if it names them. The older Gym's
    ``seed(seed)`` is called before a ``reset`` that takes no seed.
    """

    def __init__(
        self,
        env: Any,
        *,
        action: Callable[[str], Any] | None = None,
        observe: Callable[[Any], str | Messages] | None = None,
    ):
        self.env, self.action, self.observe = env, action, observe

    async def reset(self, row: dict[str, Any]) -> str | Messages | None:
        """Reset the environment and return the first observation; see :meth:`TextSession.reset`."""
        columns = {name: value for name, value in row.items() if name not in (keys.QUERY, ENV_SEED)}
        # Pass the arguments that reset takes
        given = columns | {"seed": row[ENV_SEED]}
        named, anything = _parameters(self.env.reset)
        if "seed" not in named and not anything and callable(getattr(self.env, "seed", None)):
            await call(self.env.seed, row[ENV_SEED])
        if not anything:
            given = {name: value for name, value in given.items() if name in named}
        if "options" in named:
            given["options"] = columns
        result = await call(self.env.reset, **given)
        if isinstance(result, tuple) and len(result) == 2:
            result = result[0]
        return await self._text(getattr(result, "observation", result))

    async def step(self, text: str) -> Outcome:
        """Step the environment; see :meth:`TextSession.step`."""
        return await self._outcome(*await self._take(text))

    async def _take(self, text: str) -> tuple[Any, Any, bool, bool, Any]:
        """Step the environment, and return its result as Gymnasium does; at most one of its two ends is set."""
        result = await call(self.env.step, text if self.action is None else await call(self.action, text))
        info: Any = {}
        if hasattr(result, "observation"):
            observation, reward, done = result.observation, result.reward, bool(result.done)
            truncated = bool(getattr(result, "truncated", False))
        elif isinstance(result, tuple) and len(result) == 5:
            observation, reward, done, truncated, info = result
            truncated = bool(truncated) and not done  # terminated wins if both are set
        elif isinstance(result, tuple) and len(result) in (3, 4):
            observation, reward, done, *rest = result
            info = rest[0] if rest else {}
            truncated = bool(done) and isinstance(info, Mapping) and bool(info.get("TimeLimit.truncated"))
        else:
            raise TypeError(
                f"step returned {result!r:.200}; it must return (observation, reward, terminated, truncated, info), "
                "(observation, reward, done[, info]), or a result with .observation, .reward and .done"
            )
        return observation, reward, bool(done) and not truncated, bool(truncated), info

    async def _outcome(self, observation: Any, reward: Any, terminated: bool, truncated: bool, info: Any) -> Outcome:
        return Outcome(
            feedback=None if terminated or truncated else await self._text(observation),  # an end has no feedback
            reward=_number(reward),
            terminated=terminated,
            truncated=truncated,
            metrics=_plain(info),
        )

    async def _text(self, observation: Any) -> str | Messages | None:
        if self.observe is not None:
            observation = await call(self.observe, observation)
        return None if observation is None else as_messages(observation, "an observation")

    async def close(self) -> None:
        """Close the environment if it has a ``close`` method."""
        if callable(close := getattr(self.env, "close", None)):
            await call(close)


class OpenRLHFSession(TextSession):
    """Session of an OpenRLHF agent with ``async reset(states)`` and ``async step(states)``.

    ``reset`` gets ``"observation"`` and ``"prompt"`` (the query, or the text of its only message) and ``"label"`` (that
    column). ``step`` gets ``"observation_text"``, ``"action_text"`` and ``"label"``. Observations and feedback become
    the contents of messages. An agent that writes a chat template's markers into them needs an ``observe`` that removes
    these.
    """

    def __init__(self, agent: Any, *, observe: Callable[[Any], str | Messages] | None = None):
        self.agent, self.observe = agent, observe
        self._past, self._label = "", None

    async def reset(self, row: dict[str, Any]) -> Messages | None:
        """Reset the agent and return its first observation; see :meth:`TextSession.reset`."""
        query = row[keys.QUERY]
        prompt = query[0]["content"] if isinstance(query, list) and len(query) == 1 else query
        self._label = row.get("label")
        states = {"observation": prompt, "prompt": prompt, "label": self._label}
        if callable(getattr(self.agent, "reset", None)):
            states = await call(self.agent.reset, states)
        if states["observation"] is query:
            return None
        return await self._text(states["observation"])

    async def step(self, text: str) -> Outcome:
        """Step the agent; see :meth:`TextSession.step`."""
        states = {"observation_text": self._past, "action_text": text, "label": self._label, "sampling_params": None}
        result = await call(self.agent.step, states)
        done, truncated = bool(result["done"]), bool(result.get("truncated", False))
        self._past += text
        metrics = dict(result.get("extra_logs") or {})
        if result.get("scores") is not None:
            metrics["scores"] = _number(result["scores"])
        return Outcome(
            feedback=None if done or truncated else await self._text(result["environment_feedback"]),
            reward=_number(result["rewards"]),
            terminated=done and not truncated,
            truncated=truncated,
            metrics=_plain(metrics),
        )

    async def _text(self, observation: Any) -> Messages:
        if self.observe is not None:
            observation = await call(self.observe, observation)
        messages = as_messages(observation, "an agent's observation or feedback")
        self._past += "".join(message["content"] for message in messages)
        return messages


def _parameters(function: Callable[..., Any]) -> tuple[set[str], bool]:
    """Return the names of a function's arguments, and whether it takes any keyword argument."""
    parameters = inspect.signature(function).parameters.values()
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return named, any(p.kind is p.VAR_KEYWORD for p in parameters)


def _number(reward: Any) -> float:
    return 0.0 if reward is None else float(reward)


def _plain(info: Any) -> dict[str, Any]:
    """Select the values of an environment's info that can be logged: numbers, booleans and short strings."""
    if not isinstance(info, Mapping):
        return {}
    values = {str(k): v.item() if getattr(v, "ndim", None) == 0 else v for k, v in info.items()}
    return {
        k: v for k, v in values.items() if isinstance(v, bool | int | float) or (isinstance(v, str) and len(v) < 80)
    }


FORMAT = "Write exactly one command for the shell in a block between ``` and ```, such as\n```\nls\n```"
_BLOCK = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)
_SCORE = r"{} Score: \{{[^}}]*?: *(-?[\d.]+(?:[eE][-+]?\d+)?)"


def read_scores(observation: str) -> tuple[float, float] | None:
    """Return the evaluation's score and the baseline's in an answer of MLGym, or None if it has no evaluation."""
    found = [re.search(_SCORE.format(name), observation) for name in ("Evaluation", "Baseline")]
    return None if None in found else (float(found[0].group(1)), float(found[1].group(1)))


class MLGymWrapper(EnvSession):
    """Session of an MLGym environment (https://github.com/facebookresearch/MLGym), for ``text_env``.

    The last block between triple backticks of a turn is its command; a turn without one gets a message. The return is
    the last score minus the baseline's: each evaluation earns the change of the score, so repeating one earns nothing.
    TorchRL's class of the same name is an ``EnvBase``, and adds evaluation minus baseline at every evaluation.

    Args:
        env: environment of this conversation, or a function that makes it.
        task: first message if ``reset`` has no observation. None uses the row's ``"query"``.
        state: function of the environment whose text is appended to each observation. None appends nothing.
        lower_is_better: whether a smaller score is better.
        format_reward: reward of a turn without a command.

    Example::

        env = text_env(lambda: MLGymWrapper(make_titanic, task=TASK), tokenizer, prompts_per_batch=1, timeout=600.0)
    """

    def __init__(
        self,
        env: Any,
        *,
        task: str | Messages | None = None,
        state: Callable[[Any], str] | None = None,
        lower_is_better: bool = False,
        format_reward: float = 0.0,
    ):
        super().__init__(env)
        self.task, self.state, self.format_reward = task, state, format_reward
        self.sign, self._last = -1.0 if lower_is_better else 1.0, None

    async def reset(self, row: dict[str, Any]) -> Messages | None:
        """Make and reset the environment, and return the first observation, the task or None."""
        self.env = self.env if hasattr(self.env, "reset") else await call(self.env)
        first = await super().reset(row)
        return first if first is not None or self.task is None else as_messages(self.task, "task")

    async def step(self, text: str) -> Outcome:
        """Run the turn's command; see :meth:`TextSession.step`."""
        if not (blocks := _BLOCK.findall(text)):
            return Outcome(feedback=FORMAT, reward=self.format_reward)
        result = await self._take(blocks[-1].strip())
        outcome = await self._outcome(*result)
        if (scores := read_scores(result[0] or "")) is None:
            return outcome
        before, self._last = scores[1] if self._last is None else self._last, scores[0]
        gained = self.sign * (self._last - before)
        return replace(outcome, reward=outcome.reward + gained, metrics=outcome.metrics | {"score": self._last})

    async def _text(self, observation: Any) -> Messages | None:
        observation = observation.get("observation") if isinstance(observation, dict) else observation  # of reset
        if observation is None:
            return None
        said = observation or "(no output)"
        return await super()._text(said if self.state is None else f"{said}\n{await call(self.state, self.env)}")


STYLES = {
    "env": "reset and step, as in Gymnasium, the older Gym or OpenEnv",
    "openrlhf": "async reset(states) and step(states), as in OpenRLHF's agents",
    "rollout": "async def rollout(row, generate) -> float | None",
    "session": "a TextSession",
}
_ADAPTERS = {"env": EnvSession, "openrlhf": OpenRLHFSession, "rollout": RolloutSession}


def wrap(
    environment: Any,
    *,
    style: str | None = None,
    action: Callable[[str], Any] | None = None,
    observe: Callable[[Any], Any] | None = None,
) -> Callable[[], TextSession]:
    """Return a function that makes a separate session for each conversation."""
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
    """Return the style of an environment, or of a class of environments."""
    kind = environment if inspect.isclass(environment) else type(environment)
    if issubclass(kind, TextSession):
        return "session"
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
    if any(hasattr(environment, name) for name in ("reset", "step")):
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
        if self.style == "rollout":  # a function keeps no state of a conversation
            return environment
        # Copy instances, whose state belongs to one conversation
        try:
            return await call(copy.deepcopy, environment)
        except Exception as error:
            raise TypeError(
                f"{type(environment).__name__} cannot be copied for each conversation ({error}); pass its class, or a "
                "function that makes one"
            ) from error
