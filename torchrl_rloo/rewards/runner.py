"""RewardRunner: scores of several reward functions for a batch, which no bad sample and no bad function can break."""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torchrl_rloo.rewards.duplicates import find_distinct
from torchrl_rloo.rewards.executor_async import EventLoop
from torchrl_rloo.rewards.executors import Executor, InlineExecutor
from torchrl_rloo.rewards.latency import Histogram
from torchrl_rloo.rewards.protocol import (
    RewardBatch,
    RewardCall,
    RewardFailure,
    is_async,
    reward_name,
)
from torchrl_rloo.rewards.quarantine import TRACEBACK, Quarantine
from torchrl_rloo.rewards.registry import RewardSpec, load_reward

LARGEST = 3.4028234663852886e38  # a larger score is infinite in float32
EXCERPT = 200  # characters of a prompt and of a completion in a log

_LOGGER = logging.getLogger(__name__)
_BOOKS = threading.Lock()  # of counters and histograms: several threads may score batches


class RewardFailureError(RuntimeError):
    """A reward function failed on so many samples in a row that nothing can be learned from it."""


@dataclass
class RewardScores:
    """What ``F`` functions gave to ``B`` trajectories.

    Attributes:
        scores: ``F`` lists of ``B`` finite numbers, or None where a function abstained or failed.
        extra: columns from ``log_extra``, ``B`` values each, None where there is none for a trajectory.
        metrics: means of the values of each name from ``log_metric``, over all calls.
    """

    scores: list[list[float | None]]
    extra: dict[str, list[Any]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


class RewardRunner:
    """Calls reward functions on batches of trajectories.

    A sample on which a function raises, takes too long, kills its worker, returns NaN, infinity or something that is no
    score, gets no score from that function; others are not touched. If a call of several trajectories fails, each of
    them is tried alone. Every such sample is counted; one of each kind and batch is logged, all go to the quarantine.

    Identical trajectories (prompt, completion, ids and columns) are scored once. A function with an attribute
    ``whole_batch = True`` gets all trajectories in one call instead, identical ones included. Async functions run on an
    event loop, concurrently with each other and with the rest, with the time limit of the executor in their place.

    Args:
        functions: the reward functions, each as :func:`~torchrl_rloo.rewards.load_reward` takes it.
        executor: where they run (:mod:`torchrl_rloo.rewards.executors`); default: in line. A mapping gives functions
            one each by name; those that it does not name run in line.
        max_consecutive_failures: this many samples in a row that a function fails on end the run; None for no limit.
        quarantine: file for the samples that a function failed on, as lines of JSON, at most 1,000 a function.
        deduplicate: False scores identical trajectories each, for functions that draw random numbers.

    Attributes:
        names: of the functions.
        counts: how many samples so far, ``"<name>/<kind>"`` for the kinds ``raised``, ``malformed``, ``timed_out``,
            ``worker_died`` and ``not_finite``; ``"<name>/duplicates"`` that took over another's score; and
            ``"<name>/repeated"`` that were tried alone because a call of several failed.
        latency: ``"<name>/call"`` and ``"<name>/sample"``: seconds of a call, and of it divided by its trajectories.

    Raises:
        ValueError: for two functions of one name, an executor for a name that there is not, or a limit below 1.
        TypeError: if an executor cannot run a function.
    """

    def __init__(
        self,
        functions: RewardSpec | Sequence[RewardSpec],
        *,
        executor: Executor | Mapping[str, Executor] | None = None,
        max_consecutive_failures: int | None = 100,
        quarantine: str | os.PathLike | None = None,
        deduplicate: bool = True,
    ):
        single = callable(functions) or isinstance(functions, str | Mapping)
        self.functions = [load_reward(spec) for spec in ([functions] if single else functions)]
        self.names = [reward_name(f) for f in self.functions]
        if len(set(self.names)) != len(self.names):
            raise ValueError(f"reward functions are logged by name, but the names {self.names} are not all different")
        if max_consecutive_failures is not None and max_consecutive_failures < 1:
            raise ValueError(
                f"max_consecutive_failures={max_consecutive_failures} must be at least 1, or None for no limit"
            )
        self.executor = None if isinstance(executor, Mapping) else executor
        self.executors = self._executors(executor)
        self.max_consecutive_failures, self.deduplicate = max_consecutive_failures, deduplicate
        self.quarantine, self._loop = Quarantine(quarantine), EventLoop()
        self.counts: Counter[str] = Counter()
        self.latency = {f"{name}/{what}": Histogram() for name in self.names for what in ("call", "sample")}
        self._consecutive: Counter[str] = Counter()

    def _executors(self, executor: Executor | Mapping[str, Executor] | None) -> list[Executor]:
        inline = InlineExecutor()
        if isinstance(executor, Mapping):
            if unknown := sorted(executor.keys() - set(self.names)):
                raise ValueError(f"executor names {unknown}, but the reward functions are {self.names}")
            executors = [executor.get(name, inline) for name in self.names]
        else:
            executors = [inline if executor is None else executor] * len(self.names)
        for function, each in zip(self.functions, executors, strict=True):
            if not is_async(function):
                each.prepare(function)
        return executors

    def __call__(self, batch: RewardBatch) -> RewardScores:
        """Scores a batch.

        Raises:
            RewardFailureError: if a function has failed on ``max_consecutive_failures`` samples in a row.
        """
        first, place = find_distinct(batch) if self.deduplicate else (range(len(batch)), range(len(batch)))
        distinct = batch if len(first) == len(batch) else batch.select(first)
        outcomes = self._run_all(batch, distinct)
        scores, metrics = RewardScores([]), {}
        error = None
        for name, outcome in zip(self.names, outcomes, strict=True):
            rows = range(len(batch)) if outcome.batch is batch else place  # of the outcome, for each of the batch
            scores.scores.append([outcome.scores[i] for i in rows])
            for column, values in outcome.extra.items():
                old = scores.extra.setdefault(column, [None] * len(batch))
                scores.extra[column] = [old[k] if values[i] is None else values[i] for k, i in enumerate(rows)]
            for key, value in outcome.metrics:
                metrics.setdefault(key, []).append(value)
            with _BOOKS:
                error = self._account(name, outcome, rows) or error
        if error is not None:
            raise error
        scores.metrics = {key: sum(values) / len(values) for key, values in metrics.items()}
        return scores

    def _run_all(self, batch: RewardBatch, distinct: RewardBatch) -> list[_Outcome]:
        """Runs functions in line here, those of other executors beside them, and each async function beside those."""
        outcomes: list[Any] = [None] * len(self.functions)
        chains: dict[Any, list[int]] = {}
        for k, (function, executor) in enumerate(zip(self.functions, self.executors, strict=True)):
            inline = isinstance(executor, InlineExecutor)
            chain = ("async", k) if is_async(function) else "inline" if inline else id(executor)
            chains.setdefault(chain, []).append(k)

        def run(chain: Sequence[int]) -> None:
            for k in chain:
                whole = getattr(self.functions[k], "whole_batch", False)
                outcomes[k] = self._run(k, batch if whole else distinct)

        *beside, here = (chains[name] for name in sorted(chains, key=lambda name: name == "inline"))
        futures = [_in_background(partial(run, chain)) for chain in beside]
        run(here)
        for future in futures:
            future.result()
        return outcomes

    def _run(self, k: int, batch: RewardBatch) -> _Outcome:
        """One function's scores of a batch, in calls of as many rows as its executor likes."""
        function, executor, n = self.functions[k], self.executors[k], len(batch)
        whole = getattr(function, "whole_batch", False)
        outcome, first = _Outcome(batch, [None] * n), []

        def call(parts: Sequence[Sequence[int]]) -> list[Sequence[int]]:
            """Those parts that failed."""
            batches = [batch if len(part) == n else batch.select(part) for part in parts]
            if is_async(function):
                results = self._loop.run(function, batches, executor.timeout)
            else:
                results = executor.run(function, batches)
            for part, result in zip(parts, results, strict=True):
                if isinstance(result, RewardFailure) and not first:
                    first.append(result.message)
                with _BOOKS:
                    self.latency[f"{self.names[k]}/call"].add(result.seconds)
                    self.latency[f"{self.names[k]}/sample"].add(result.seconds / len(part), len(part))
                outcome.put(part, result)
            return [part for part, result in zip(parts, results, strict=True) if isinstance(result, RewardFailure)]

        size = n if whole else min(executor.rows_per_call or n, n)
        failed = call([range(i, min(i + size, n)) for i in range(0, n, size)]) if n else []
        alone = [] if whole else [[i] for part in failed if len(part) > 1 for i in part]
        if alone:
            outcome.repeated = len(alone)
            if not call(alone) and not self.counts[f"{self.names[k]}/repeated"]:  # not yet counted: the first time
                _LOGGER.warning(
                    "reward %s fails on %d rows at once (%s) and on none of them alone, so it is called row by row: "
                    "return one score for each completion",
                    self.names[k],
                    size,
                    first[0],
                )
        return outcome

    def _account(self, name: str, outcome: _Outcome, rows: Sequence[int]) -> RewardFailureError | None:
        """Counts, logs and keeps the failures of one function; ``rows`` are those of the outcome, for each sample."""
        for key, number in (("duplicates", len(rows) - len(outcome.scores)), ("repeated", outcome.repeated)):
            if number:
                self.counts[f"{name}/{key}"] += number
        if not outcome.failures:
            self._consecutive[name] = 0 if rows else self._consecutive[name]
            return None
        kinds = Counter(outcome.failures[i].kind for i in rows if i in outcome.failures)
        longest, longest_end = 0, None
        for i in rows:
            self._consecutive[name] = self._consecutive[name] + 1 if i in outcome.failures else 0
            if self._consecutive[name] > longest:
                longest, longest_end = self._consecutive[name], i
        for i, failure in outcome.failures.items():
            self._keep(name, outcome.batch, i, failure)
        for kind, number in kinds.items():
            self.counts[f"{name}/{kind}"] += number
            i, failure = next((i, f) for i, f in outcome.failures.items() if f.kind == kind)
            evidence = _evidence(outcome.batch, i, failure)
            _LOGGER.warning("reward %s: %s on %d samples, which it does not score: %s", name, kind, number, evidence)
        if self.max_consecutive_failures is None or longest < self.max_consecutive_failures:
            return None
        return self._error(name, longest, _evidence(outcome.batch, longest_end, outcome.failures[longest_end]))

    def _keep(self, name: str, batch: RewardBatch, i: int, failure: RewardFailure) -> None:
        entry = {
            "kind": failure.kind,
            "error": failure.message,
            "traceback": failure.traceback[-TRACEBACK:],
            "seconds": failure.seconds,
            "step": batch.trainer_state.global_step,
            "prompt": batch.prompts[i],
            "completion": batch.completions[i],
            "completion_ids": batch.completion_ids[i],
            "columns": {column: values[i] for column, values in batch.columns.items()},
            "truncated": bool(batch.truncated and batch.truncated[i]),
        }
        self.quarantine.add(name, entry)

    def _error(self, name: str, number: int, evidence: str) -> RewardFailureError:
        counts = {k.rpartition("/")[2]: v for k, v in self.counts.items() if k.rpartition("/")[0] == name}
        where = self.quarantine.path or "given no file: set quarantine='bad_samples.jsonl'"
        return RewardFailureError(
            f"reward {name} failed on {number} samples in a row, so nothing can be learned from it. Last: {evidence}. "
            f"So far: {counts}. All samples with tracebacks: {where}. Repair the function, or raise "
            f"max_consecutive_failures={self.max_consecutive_failures} (None: no limit)"
        )

    def close(self) -> None:
        """Ends the workers and the event loop; the next call starts them again."""
        for executor in (self.executor, *self.executors):
            if executor is not None:
                executor.close()
        self._loop.close()

    def state_dict(self) -> dict[str, dict[str, int]]:
        """The counters, failures in a row, and lines in the quarantine."""
        return {name: dict(counter) for name, counter in self._counters()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, int]]) -> None:
        """Restores :meth:`state_dict`, in place."""
        for name, counter in self._counters():
            counter.clear()
            counter.update(state[name])

    def _counters(self) -> Iterator[tuple[str, Counter[str]]]:
        yield from (("counts", self.counts), ("consecutive", self._consecutive), ("lines", self.quarantine.lines))


@dataclass
class _Outcome:
    """What one function gave to a batch: a score, None or a failure for each row."""

    batch: RewardBatch
    scores: list[float | None]
    failures: dict[int, RewardFailure] = field(default_factory=dict)
    extra: dict[str, list[Any]] = field(default_factory=dict)
    metrics: list[tuple[str, float]] = field(default_factory=list)
    repeated: int = 0

    def put(self, rows: Sequence[int], result: RewardCall | RewardFailure) -> None:
        """Takes the result of a call for some rows, in place of what was known of them."""
        if isinstance(result, RewardFailure):
            self.failures |= dict.fromkeys(rows, result)
            return
        for i, score in zip(rows, result.scores, strict=True):
            self.failures.pop(i, None)
            if score is None or abs(score) <= LARGEST:
                self.scores[i] = score
            else:
                message = f"returned {score}; a score must be a finite float32 or None"
                self.failures[i] = RewardFailure("not_finite", message, seconds=result.seconds)
        for column, values in result.extra.items():
            known = self.extra.setdefault(column, [None] * len(self.scores))
            for i, value in zip(rows, values, strict=True):
                known[i] = value
        self.metrics += result.metrics


def _evidence(batch: RewardBatch, i: int, failure: RewardFailure) -> str:
    """One line on a failure, for a log."""
    prompt, completion = _excerpt(batch.prompts[i]), _excerpt(batch.completions[i])
    return f"{failure.message[:500]}; after {failure.seconds:.3g} s, on prompt {prompt!r}, completion {completion!r}"


def _excerpt(value: Any) -> str:
    if isinstance(value, list | tuple) and all(isinstance(m, Mapping) for m in value):
        value = " | ".join(str(message.get("content")) for message in value)
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= EXCERPT else f"{text[: EXCERPT // 2]} [...] {text[-EXCERPT // 2 :]}"


def _in_background(function: Callable[[], None]) -> Future:
    future: Future = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="rewards").start()
    return future
