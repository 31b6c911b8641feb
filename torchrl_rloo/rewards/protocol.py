"""How a reward function is called, and what it gives back.

A reward is a plain callable ``f(prompts, completions, completion_ids, **columns) -> list[float | None]``, sync or
async. All these are lists of one entry per trajectory: prompts and completions as text or as chat messages, the sampled
ids, and each of the dataset's other columns by name. ``None`` abstains. Also passed, by name:

==================  ================================================================================================
``trainer_state``   :class:`TrainerState`: how far the run is
``log_extra``       ``log_extra(column, values)``: another column of the completions table, one value per trajectory
``log_metric``      ``log_metric(name, value)``: a scalar to plot; the mean over the calls of a step is logged, in which
                    identical trajectories count once
``truncated``       list of bool: whether a token, turn or time limit ended the trajectory
==================  ================================================================================================

A function without ``**kwargs`` is passed what its signature names and nothing else. The protocol is that of TRL's
reward functions, which run unchanged. How a function wants to be called it may say by two attributes:

==================  ================================================================================================
``whole_batch``     True: it compares trajectories, and must see all of a batch in one call, identical ones included
``concurrency``     of an async function: calls of it under way at a time, where each call is one trajectory
==================  ================================================================================================

Nothing here imports torch, so that a worker process starts in a fraction of a second.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from time import perf_counter
from typing import Any

from torchrl_rloo.lookup import did_you_mean

RewardFunction = Callable[..., "Sequence[float | None] | Awaitable[Sequence[float | None]]"]


class MalformedScoresError(TypeError, ValueError):
    """A reward function returned something other than one number or None for each trajectory."""


@dataclass
class TrainerState:
    """How far a run is, for rewards that change with it; names as in Transformers' class.

    Attributes:
        global_step: finished training steps.
        max_steps: steps of the whole run; 0 if unknown.
        epoch: passes over the dataset so far.
        num_input_tokens_seen: tokens of all trajectories so far.
    """

    global_step: int = 0
    max_steps: int = 0
    epoch: float = 0.0
    num_input_tokens_seen: int = 0


@dataclass(frozen=True)
class RewardBatch:
    """``B`` finished trajectories as reward functions see them: plain Python values, no tensors.

    Attributes:
        prompts: texts or lists of messages.
        completions: texts or lists of messages.
        completion_ids: the sampled ids of each.
        columns: the dataset's other columns, ``B`` values each.
        truncated: whether a limit ended the trajectory; empty: none was.
        trainer_state: how far the run is.
    """

    prompts: Sequence[Any]
    completions: Sequence[Any]
    completion_ids: Sequence[Sequence[int]]
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    truncated: Sequence[bool] = ()
    trainer_state: TrainerState = field(default_factory=TrainerState)

    def __len__(self) -> int:
        return len(self.completions)

    def select(self, indices: Sequence[int]) -> RewardBatch:
        """The trajectories at ``indices``, in that order."""
        return RewardBatch(
            [self.prompts[i] for i in indices],
            [self.completions[i] for i in indices],
            [self.completion_ids[i] for i in indices],
            {name: [values[i] for i in indices] for name, values in self.columns.items()},
            [self.truncated[i] for i in indices] if self.truncated else (),
            self.trainer_state,
        )


@dataclass
class RewardCall:
    """What one call of a reward function gave.

    Attributes:
        scores: one number or None for each trajectory, NaN and infinities as they came.
        extra: columns from ``log_extra``.
        metrics: values from ``log_metric``, in order.
        seconds: wall-clock time of the call.
    """

    scores: list[float | None]
    extra: dict[str, list[Any]] = field(default_factory=dict)
    metrics: list[tuple[str, float]] = field(default_factory=list)
    seconds: float = 0.0


@dataclass
class RewardFailure:
    """Why a call of a reward function gave no scores.

    Attributes:
        kind: ``"raised"``, ``"malformed"`` (not one number or None for each trajectory), ``"timed_out"``,
            ``"worker_died"`` or ``"not_finite"``.
        message: one line that says what happened.
        traceback: where, as far as that is known.
        seconds: wall-clock time of the call.
    """

    kind: str
    message: str
    traceback: str = ""
    seconds: float = 0.0

    @classmethod
    def of(cls, error: BaseException, seconds: float = 0.0) -> RewardFailure:
        """The failure that an exception is; even one that cannot be printed."""
        kind = "malformed" if isinstance(error, MalformedScoresError) else "raised"
        # around it may stand indented source (a SyntaxError), and behind it notes or the parts of a group
        message = next(line for line in traceback.format_exception_only(error) if not line.startswith(" "))
        return cls(kind, message.strip(), "".join(traceback.format_exception(error)), seconds)

    @classmethod
    def timed_out(cls, limit: float, seconds: float, traceback: str = "") -> RewardFailure:
        """A call that was given up after ``limit`` seconds."""
        return cls("timed_out", f"no answer within {limit:g} s", traceback, seconds)


def reward_name(function: RewardFunction) -> str:
    """The name under which a function's scores are logged."""
    while isinstance(function, partial) and not hasattr(function, "__name__"):
        function = function.func
    return getattr(function, "__name__", None) or type(function).__name__


def is_async(function: RewardFunction) -> bool:
    """Whether a call of the function has to be awaited."""
    while isinstance(function, partial):
        function = function.func
    call = getattr(function, "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


_ALWAYS_GIVEN = (
    "prompts",
    "completions",
    "completion_ids",
    "truncated",
    "trainer_state",
    "log_extra",
    "log_metric",
)


def missing_columns(function: RewardFunction, columns: Collection[str]) -> list[str]:
    """Return the columns that a function asks for and ``columns`` lack.

    A function asks by its signature, or by an attribute ``column`` or ``*_column`` that holds a name.

    >>> def graded(completions, answer, hint=None, **others): ...
    >>> missing_columns(graded, ["question"])
    ['answer']
    """
    known = {*columns, *_ALWAYS_GIVEN}
    settings = getattr(function, "__dict__", {}).items()
    named = [v for k, v in settings if (k == "column" or k.endswith("_column")) and isinstance(v, str) and v]
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some built-in callables have none
        parameters = []
    asked = [p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return [name for name in (*asked, *named) if name not in known]


def check_columns(functions: Sequence[RewardFunction], columns: Sequence[str], what: str = "reward") -> None:
    """Refuse functions that ask for a column that the dataset does not have.

    Args:
        functions: reward functions, or scorers of an evaluation.
        columns: of the dataset, :attr:`~torchrl_rloo.data.PromptDataset.columns`.
        what: what to call the functions in the message.

    Raises:
        ValueError: naming the function, the column and the remedy; also for one that takes nothing to judge by.
    """
    for function in functions:
        if (accepted := _accepted(function)) is not None and not accepted & {*columns, *_ALWAYS_GIVEN}:
            raise ValueError(
                f"{what} {reward_name(function)} takes none of the arguments that it could judge by: name completions, "
                f"completion_ids, prompts, or a column of {list(columns)} in its signature"
            )
        if missing := missing_columns(function, columns):
            hint = did_you_mean(missing[0], [*columns, *_ALWAYS_GIVEN])
            remedy = "" if what == "reward" else f", choose another {what} (eval.scorer, or task=custom: the rewards)"
            raise ValueError(
                f"{what} {reward_name(function)} asks for {missing}, which the dataset does not have{hint}: its "
                f"columns are {list(columns)}. Rename one (load_prompts(column_map=...), data.column_map={{old: "
                f"{missing[0]}}}), give the argument a default{remedy}"
            )


def call_reward(function: RewardFunction, batch: RewardBatch) -> RewardCall:
    """One call of a sync function for all of a batch.

    Raises:
        MalformedScoresError: if it does not return as many numbers and Nones as there are trajectories.
        Exception: whatever the function raises.
    """
    call, arguments = _prepare(function, batch)
    start = perf_counter()
    scores = function(**arguments)
    return _finish(function, call, scores, len(batch), start)


async def call_reward_async(function: RewardFunction, batch: RewardBatch) -> RewardCall:
    """As :func:`call_reward`, of an async function."""
    call, arguments = _prepare(function, batch)
    start = perf_counter()
    scores = await function(**arguments)
    return _finish(function, call, scores, len(batch), start)


def attempt_reward(
    function: RewardFunction, batch: RewardBatch, catch: type[BaseException] = Exception
) -> RewardCall | RewardFailure:
    """One call of a function, sync or async, whose exceptions become failures.

    Args:
        function: an async one runs in an event loop of its own.
        batch: the trajectories.
        catch: what is a failure; other exceptions come through.
    """
    start = perf_counter()
    try:
        if is_async(function):
            import asyncio  # as much time to import as the rest together, and few workers need it

            return asyncio.run(call_reward_async(function, batch))
        return call_reward(function, batch)
    except catch as error:
        return RewardFailure.of(error, perf_counter() - start)


def final_text(completion: str | Sequence[Mapping[str, Any]]) -> str:
    """What a completion says in the end: its text, or the content of its last assistant message ("" without one)."""
    if isinstance(completion, str):
        return completion
    for message in reversed(completion):
        if message["role"] == "assistant":
            return message.get("content") or ""  # None, or no such key, beside tool calls
    return ""


def _prepare(function: RewardFunction, batch: RewardBatch) -> tuple[RewardCall, dict[str, Any]]:
    call = RewardCall([])

    def log_extra(column: str, values: Sequence[Any]) -> None:
        values = list(values)
        if len(values) != len(batch):
            raise ValueError(
                f"log_extra({column!r}) of reward {reward_name(function)} got {len(values)} values for {len(batch)} "
                "trajectories: give one for each"
            )
        call.extra[column] = values

    def log_metric(name: str, value: float) -> None:
        call.metrics.append((name, float(value)))

    arguments = {
        **batch.columns,
        "prompts": list(batch.prompts),
        "completions": list(batch.completions),
        "completion_ids": list(batch.completion_ids),
        "truncated": list(batch.truncated) or [False] * len(batch),
        "trainer_state": batch.trainer_state,
        "log_extra": log_extra,
        "log_metric": log_metric,
    }
    accepted = _accepted(function)
    return call, arguments if accepted is None else {k: v for k, v in arguments.items() if k in accepted}


def _accepted(function: RewardFunction) -> frozenset[str] | None:
    """Return the names that a function takes; None for any."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some built-in callables have none
        return None
    any_name = any(p.kind is p.VAR_KEYWORD for p in parameters)
    unnamed = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
    return None if any_name else frozenset(p.name for p in parameters if p.kind not in unnamed)


def _finish(function: RewardFunction, call: RewardCall, scores: Any, n: int, start: float) -> RewardCall:
    call.seconds = perf_counter() - start
    name = reward_name(function)
    scores = scores.tolist() if hasattr(scores, "tolist") else scores
    if isinstance(scores, list | tuple):
        scores = [s.item() if hasattr(s, "item") else s for s in scores]
    if not isinstance(scores, list) or not all(s is None or isinstance(s, Real) for s in scores):
        raise MalformedScoresError(f"reward {name} returned {scores!r:.100}; it must return a list of numbers or None")
    if len(scores) != n:
        raise MalformedScoresError(f"reward {name} returned {len(scores)} scores for {n} completions")
    call.scores = [None if s is None else float(s) for s in scores]
    return call
