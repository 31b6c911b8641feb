"""Protocol of reward functions: their arguments, their return value and their attributes.

A reward is a plain callable ``f(prompts, completions, completion_ids, **columns) -> list[float | None]``, sync or
async. Each argument is a list with one entry per trajectory. Prompts and completions are texts or lists of chat
messages, ``completion_ids`` are the sampled ids, and ``columns`` are the other columns of the dataset. ``None``
abstains. A list in place of a number has the rewards of the row's tokens, one for each of ``completion_ids``, plain
or as lists of one; their sum is the score. A list of another length is an error, and the row abstains. These arguments
are also passed by name:

==================  ================================================================================================
``trainer_state``   :class:`TrainerState`: the progress of the run
``log_extra``       ``log_extra(column, values)`` adds a column to the completions table, one value per trajectory
``log_metric``      ``log_metric(name, value)`` logs a scalar: its mean over the calls of a step, where identical
                    trajectories count once
``truncated``       list of bool: True where a token, turn or time limit ended the trajectory
``images``          list per trajectory of its images, RGB ``PIL.Image`` in the order of its messages; ``image`` is the
                    first of them, or None. They are loaded only for a function that names the argument
==================  ================================================================================================

A function without ``**kwargs`` gets only the arguments that its signature names. TRL's reward functions follow the
same protocol and run unchanged. Two optional attributes configure the calls:

==================  ================================================================================================
``whole_batch``     True: the function compares trajectories, so one call gets the whole batch, duplicates included
``concurrency``     of an async function: maximum number of calls in flight
==================  ================================================================================================

This module does not import torch, so a worker process starts in a fraction of a second.
"""

from __future__ import annotations

import inspect
import traceback
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from numbers import Real
from time import perf_counter
from typing import Any

from torchrl_rloo.images.parts import content_text, image_paths
from torchrl_rloo.images.store import ImageStore
from torchrl_rloo.runtime.lookup import did_you_mean, is_async

RewardFunction = Callable[..., "Sequence[float | None] | Awaitable[Sequence[float | None]]"]


MAX_HISTORY = 1_000  # entries of metrics that rewards see


class MalformedScoresError(TypeError, ValueError):
    """Error of a reward function that did not return one number or None per trajectory."""


@dataclass
class TrainerState:
    """Progress of the run, for rewards that follow a schedule. Fields are named as in Transformers' ``TrainerState``.

    ``log_history`` holds the latest entries of the run's metrics, each with its ``"step"``, at most
    :data:`MAX_HISTORY`. It is empty on a Ray cluster, and in a loop that reports none. It is also empty in a worker
    process for a function whose signature does not name ``trainer_state``. Only rank 0 scores.
    """

    global_step: int = 0
    max_steps: int = 0
    epoch: float = 0.0
    num_input_tokens_seen: int = 0
    log_history: list[dict[str, Any]] = field(default_factory=list)
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True


@dataclass(frozen=True)
class RewardBatch:
    """Batch of ``B`` finished trajectories, as plain Python values without tensors.

    Args:
        prompts: ``B`` texts or lists of messages.
        completions: ``B`` texts or lists of messages.
        completion_ids: ``B`` lists of sampled ids.
        columns: other columns of the dataset by name, ``B`` values each.
        truncated: ``B`` flags, True where a limit ended the trajectory. Empty means that none was truncated.
        trainer_state: progress of the run.
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
        """Return the trajectories at ``indices``, in that order."""
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
    """Result of one call of a reward function: a number or None per trajectory, and what the function logged."""

    scores: list[float | None]
    extra: dict[str, list[Any]] = field(default_factory=dict)
    metrics: list[tuple[str, float]] = field(default_factory=list)
    seconds: float = 0.0
    tokens: dict[int, list[float]] = field(default_factory=dict)  # by row, where the function returned a list


@dataclass
class RewardFailure:
    """Failed call of a reward function.

    The kind is ``"raised"``, ``"malformed"`` (not one number or None per trajectory), ``"timed_out"``,
    ``"worker_died"`` or ``"not_finite"``. The message is one line.
    """

    kind: str
    message: str
    traceback: str = ""
    seconds: float = 0.0

    @classmethod
    def from_exception(cls, error: BaseException, seconds: float = 0.0) -> RewardFailure:
        """Create a failure from an exception, even from one that cannot be printed."""
        kind = "malformed" if isinstance(error, MalformedScoresError) else "raised"
        # Indented source (SyntaxError) may precede the message, and notes or the parts of a group may follow it
        message = next(line for line in traceback.format_exception_only(error) if not line.startswith(" "))
        return cls(kind, message.strip(), "".join(traceback.format_exception(error)), seconds)

    @classmethod
    def timed_out(cls, limit: float, seconds: float, traceback: str = "") -> RewardFailure:
        """Create the failure of a call without a result within ``limit`` seconds."""
        return cls("timed_out", f"no answer within {limit:g} s", traceback, seconds)


def reward_name(function: RewardFunction) -> str:
    """Return the name under which a function's scores are logged."""
    while isinstance(function, partial) and not hasattr(function, "__name__"):
        function = function.func
    return getattr(function, "__name__", None) or type(function).__name__


_STANDARD_ARGUMENTS = (
    "prompts",
    "completions",
    "completion_ids",
    "truncated",
    "trainer_state",
    "log_extra",
    "log_metric",
    "image",
    "images",
)


def find_missing_columns(function: RewardFunction, columns: Collection[str]) -> list[str]:
    """Return the required columns of a function that are not in ``columns``.

    Required are its arguments without a default, and names that it holds in an attribute ``column`` or ``*_column``.
    """
    known = {*columns, *_STANDARD_ARGUMENTS}
    settings = getattr(function, "__dict__", {}).items()
    named = [v for k, v in settings if (k == "column" or k.endswith("_column")) and isinstance(v, str) and v]
    parameters = _parameters(function).values()
    asked = [p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return [name for name in (*asked, *named) if name not in known]


def check_columns(functions: Sequence[RewardFunction], columns: Sequence[str], what: str = "reward") -> None:
    """Raise ``ValueError`` if a function requires a column that the dataset lacks, or accepts no argument of a reward.

    ``what`` is the noun for the functions in error messages.
    """
    for function in functions:
        if (accepted := _accepted(_parameters(function))) is not None and not accepted & {
            *columns,
            *_STANDARD_ARGUMENTS,
        }:
            raise ValueError(
                f"{what} {reward_name(function)} accepts none of the arguments of a reward: add completions, "
                f"completion_ids, prompts or a column of {list(columns)} to its signature"
            )
        if missing := find_missing_columns(function, columns):
            hint = did_you_mean(missing[0], [*columns, *_STANDARD_ARGUMENTS])
            remedy = "" if what == "reward" else f", or set another {what} (eval.scorer, or task=custom: the rewards)"
            raise ValueError(
                f"{what} {reward_name(function)} requires {missing}, which the dataset does not have{hint}: its "
                f"columns are {list(columns)}. Rename a column (load_prompts(column_map=...), data.column_map={{old: "
                f"{missing[0]}}}), or give the argument a default{remedy}"
            )


def without_history(function: RewardFunction, batch: RewardBatch) -> RewardBatch:
    """Return a batch to send to another process: with the run's metrics only for a function that names its state."""
    if not batch.trainer_state.log_history or "trainer_state" in _parameters(function):
        return batch
    return replace(batch, trainer_state=replace(batch.trainer_state, log_history=[]))


def prepare_reward(function: RewardFunction) -> None:
    """Call ``function.prepare()``, if it exists, so that missing models or packages fail before the run starts."""
    if callable(prepare := getattr(function, "prepare", None)):
        prepare()


def call_reward(function: RewardFunction, batch: RewardBatch) -> RewardCall:
    """Call a sync function once with the whole batch.

    Raises:
        MalformedScoresError: if it does not return one number or None per trajectory.
        Exception: any exception of the function.
    """
    call, arguments = _prepare(function, batch)
    start = perf_counter()
    scores = function(**arguments)
    return _finish(function, call, scores, batch.completion_ids, start)


async def call_reward_async(function: RewardFunction, batch: RewardBatch) -> RewardCall:
    """Call an async function once with the whole batch; see :func:`call_reward`."""
    call, arguments = _prepare(function, batch)
    start = perf_counter()
    scores = await function(**arguments)
    return _finish(function, call, scores, batch.completion_ids, start)


def attempt_reward(
    function: RewardFunction, batch: RewardBatch, catch: type[BaseException] = Exception
) -> RewardCall | RewardFailure:
    """Call a function, sync or async (in a new event loop); return the exceptions in ``catch`` as failures."""
    start = perf_counter()
    try:
        if is_async(function):
            # Import here: asyncio doubles the start time of a worker, and few workers need it
            import asyncio

            return asyncio.run(call_reward_async(function, batch))
        return call_reward(function, batch)
    except catch as error:
        return RewardFailure.from_exception(error, perf_counter() - start)


def final_text(completion: str | Sequence[Mapping[str, Any]]) -> str:
    """Return the text of a completion, or the content of its last assistant message ("" without one).

    A message without a role counts as the assistant's.
    """
    if isinstance(completion, str):
        return completion
    for message in reversed(completion):
        if message.get("role", "assistant") == "assistant":
            return content_text(message.get("content"))  # None or missing in a message of tool calls
    return ""


def check_column(column: str) -> str:
    """Return the name of a column of golds; raise ``ValueError`` if it is none."""
    if not column or not isinstance(column, str):
        raise ValueError(f"column={column!r} must name the dataset's column of gold answers")
    return column


def take_columns(name: str, wanted: Sequence[str], columns: Mapping[str, Sequence[Any]]) -> list[Sequence[Any]]:
    """Return the wanted columns; raise ``KeyError`` with the name of the reward if the dataset lacks one."""
    if missing := [column for column in wanted if column not in columns]:
        raise KeyError(f"{name} requires column {missing[0]!r}; the rows have {sorted(columns)}")
    return [columns[column] for column in wanted]


class RowReward(ABC):
    """Reward of each completion alone: of its final text, or of its ids, and its row's values.

    Attributes:
        reads: columns of the values.
        judges_ids: True for a reward of the sampled ids.
    """

    __name__: str
    reads: Sequence[str] = ()
    judges_ids = False

    @abstractmethod
    def score(self, completion: Any, *values: Any) -> float | None:
        """Return the score of a text or of ids, given the values of the row; None abstains."""

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Sequence[Any], **columns: Any
    ) -> list[float | None]:
        """Return ``B`` scores; raise ``KeyError`` if the dataset lacks a column."""
        values = take_columns(self.__name__, self.reads, columns)
        judged = completion_ids if self.judges_ids else [final_text(completion) for completion in completions]
        return [self.score(*row) for row in zip(judged, *values, strict=True)]


def _prepare(function: RewardFunction, batch: RewardBatch) -> tuple[RewardCall, dict[str, Any]]:
    call = RewardCall([])

    # Recorders that the function may call
    def log_extra(column: str, values: Sequence[Any]) -> None:
        values = list(values)
        if len(values) != len(batch):
            raise ValueError(
                f"log_extra({column!r}) of reward {reward_name(function)} got {len(values)} values for {len(batch)} "
                "trajectories; pass one value per trajectory"
            )
        call.extra[column] = values

    def log_metric(name: str, value: float) -> None:
        call.metrics.append((name, float(value)))

    # Pass only the arguments that the function accepts
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
    parameters = _parameters(function)
    if "images" in parameters or "image" in parameters:
        arguments = _load_images(batch) | arguments
    accepted = _accepted(parameters)
    return call, arguments if accepted is None else {k: v for k, v in arguments.items() if k in accepted}


def _load_images(batch: RewardBatch) -> dict[str, list[Any]]:
    """Return the images of each trajectory, each file decoded once; copies, so that a function may change them."""
    load = cache(ImageStore().load)
    messages = [
        [message for part in row if not isinstance(part, str) for message in part]
        for row in zip(batch.prompts, batch.completions, strict=True)
    ]
    images = [[load(path).copy() for path in image_paths(row)] for row in messages]
    return {"images": images, "image": [row[0] if row else None for row in images]}


def _parameters(function: RewardFunction) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function; for a built-in callable without a signature, ``**columns``."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {"columns": inspect.Parameter("columns", inspect.Parameter.VAR_KEYWORD)}


def _accepted(arguments: Mapping[str, inspect.Parameter]) -> frozenset[str] | None:
    """Return the argument names that a function with these parameters accepts; None if it accepts any."""
    parameters = arguments.values()
    any_name = any(p.kind is p.VAR_KEYWORD for p in parameters)
    unnamed = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
    return None if any_name else frozenset(p.name for p in parameters if p.kind not in unnamed)


def _finish(
    function: RewardFunction, call: RewardCall, scores: Any, ids: Sequence[Sequence[int]], start: float
) -> RewardCall:
    call.seconds = perf_counter() - start
    name = reward_name(function)
    scores = scores.tolist() if hasattr(scores, "tolist") else scores
    if isinstance(scores, list | tuple):
        scores = [s.tolist() if hasattr(s, "tolist") else s for s in scores]
    if not isinstance(scores, list) or not all(s is None or isinstance(s, Real | list | tuple) for s in scores):
        raise MalformedScoresError(f"reward {name} returned {scores!r:.100}; return a list of numbers or None")
    if len(scores) != len(ids):
        raise MalformedScoresError(
            f"reward {name} returned {len(scores)} scores for {len(ids)} completions; return one score per completion"
        )
    for i, score in enumerate(scores):
        if isinstance(score, list | tuple):
            call.tokens[i] = _token_rewards(name, score, len(ids[i]))
            score = sum(call.tokens[i])
        call.scores.append(None if score is None else float(score))
    return call


def _token_rewards(name: str, rewards: Sequence[Any], length: int) -> list[float]:
    """Return the rewards of a row's tokens, also of a column ``[length, 1]`` as TorchRL has it."""
    values = [v[0] if isinstance(v, list | tuple) and len(v) == 1 else v for v in rewards]
    if not all(isinstance(v, Real) for v in values):
        raise MalformedScoresError(f"reward {name} returned {rewards!r:.100} for a row; return a number per token")
    if len(values) != length:
        raise MalformedScoresError(
            f"reward {name} returned {len(values)} rewards for a row of {length} tokens; return one for each of "
            "completion_ids, or one number for the row"
        )
    return [float(v) for v in values]
