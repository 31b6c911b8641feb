"""RewardRunner: scores a batch with several reward functions and tolerates bad samples and failing functions."""

from __future__ import annotations

import json
import logging
import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torchrl_rloo.images.parts import content_text
from torchrl_rloo.rewards.executors import Executor, InlineExecutor, run_async
from torchrl_rloo.rewards.protocol import (
    RewardBatch,
    RewardCall,
    RewardFailure,
    RewardFunction,
    final_text,
    reward_name,
)
from torchrl_rloo.rewards.registry import RewardSpec, load_reward
from torchrl_rloo.runtime.clock import Histogram
from torchrl_rloo.runtime.files import append, atomic_write, make_folder
from torchrl_rloo.runtime.lookup import is_async
from torchrl_rloo.runtime.threads import PackageThread

MAX_LINES = 1000  # per function
MAX_WARNINGS = 10  # per function
MAX_TRACEBACK_CHARS = 4000  # last characters of a traceback that are kept
MAX_FLOAT32 = 3.4028234663852886e38  # largest finite float32
MAX_EXCERPT_CHARS = 200  # characters of a prompt or completion in a log line
MAX_SAMPLES = 8  # completions that are scored in both forms
FORM_ERRORS = ("TypeError", "AttributeError", "KeyError", "IndexError")  # what the wrong form usually raises

_TEXT = (
    "it expects texts, but gets chat messages: set data.chat=false (load_prompts(chat=False)) for text prompts, or "
    "read completion[-1]['content']"
)
_MESSAGES = (
    "it expects chat messages, but gets texts: set data.chat=true with a tokenizer that has a chat template "
    "(model.chat_template), or read the completion itself"
)

_LOGGER = logging.getLogger(__name__)
_COUNTERS_LOCK = threading.Lock()  # guards counters and histograms: several threads may score batches

Run = Callable[[Sequence[RewardBatch]], "list[RewardCall | RewardFailure]"]


def form_hint(function: RewardFunction, batch: RewardBatch, run: Run) -> str:
    """Return advice if a function tells completions apart only in their other form; "" otherwise.

    Functions for TRL's standard format expect texts. On messages they fail, or give all the same score (``len``).
    Functions of this package read both forms.
    """
    while (inner := getattr(function, "function", None) or getattr(function, "func", None)) is not None:
        function = inner
    if (getattr(function, "__module__", None) or "").startswith(__package__):
        return ""
    first = {final_text(completion): i for i, completion in enumerate(batch.completions)}  # a row of each text
    batch = batch.select(list(first.values())[:MAX_SAMPLES])
    if not len(batch) or (other := _other_form(batch)) is None:
        return ""
    # All fail, or earn the same: try the other form
    scores = _scores(run, batch)
    if scores is None or len(set(scores)) > 1:
        return ""
    other_scores = _scores(run, other)
    if not other_scores or scores and len(set(other_scores)) == 1:
        return ""
    return _MESSAGES if isinstance(batch.completions[0], str) else _TEXT


def _scores(run: Run, batch: RewardBatch) -> list[float | None] | None:
    """Return the score of each trajectory; an empty list if all raise, None if only some do, or time out."""
    results = run([batch.select([i]) for i in range(len(batch))])
    scores = [result.scores[0] for result in results if isinstance(result, RewardCall)]
    raised = [r for r in results if isinstance(r, RewardFailure) and r.kind in ("raised", "malformed")]
    return scores if len(batch) in (len(scores), len(raised)) else None


def _other_form(batch: RewardBatch) -> RewardBatch | None:
    """Return texts as messages, or single messages as texts; None for longer conversations."""
    if isinstance(batch.completions[0], str):
        prompts = [[{"role": "user", "content": text}] for text in batch.prompts]
        completions = [[{"role": "assistant", "content": text}] for text in batch.completions]
    elif all(len(completion) == 1 for completion in batch.completions):
        prompts = [p if isinstance(p, str) else content_text(p[-1].get("content")) for p in batch.prompts]
        completions = [final_text(completion) for completion in batch.completions]
    else:
        return None
    return replace(batch, prompts=prompts, completions=completions)


def find_distinct(batch: RewardBatch) -> tuple[list[int], list[int]]:
    """Find the trajectories that differ in prompt, completion, ids, a column or truncation.

    Return the index of the first trajectory of each set of identical ones, and for each trajectory the position of its
    set. Values that cannot be compared (arrays, for example) count as different.

    >>> find_distinct(RewardBatch(["p", "q", "p"], ["a", "a", "a"], [[1], [1], [1]]))
    ([0, 1], [0, 1, 0])
    """
    first: list[int] = []
    places: list[int] = []
    candidates: dict[Any, list[int]] = {}  # places, by a key that is cheap to compare
    for i, ids in enumerate(batch.completion_ids):
        prompt = batch.prompts[i]
        last = prompt[-1] if isinstance(prompt, list | tuple) and prompt else prompt
        text = last.get("content") if isinstance(last, Mapping) else last
        alike = candidates.setdefault((tuple(ids), text if isinstance(text, str) else ""), [])
        place = next((p for p in alike if _is_identical(batch, first[p], i)), None)
        if place is None:
            place = len(first)
            first.append(i)
            alike.append(place)
        places.append(place)
    return first, places


def _is_identical(batch: RewardBatch, i: int, j: int) -> bool:
    columns = [batch.prompts, batch.completions, *batch.columns.values()]
    if batch.truncated:
        columns.append(batch.truncated)
    try:
        return all(values[i] is values[j] or bool(values[i] == values[j]) for values in columns)
    except Exception as error:
        _LOGGER.debug("trajectories %d and %d cannot be compared: %s", i, j, error)
        return False


class Quarantine:
    """JSON-lines file of failed samples, at most 1,000 per function.

    A failed write loses its line, never the run: the first of several in a row is logged, and the next line is tried
    again. The file is never written through a symbolic link.

    The file is created with its folder at the first line; a path of None disables it. Counts by function are ``lines``
    written and ``lost``.
    """

    def __init__(self, path: str | os.PathLike | None):
        self.path = None if path is None else Path(path)
        if self.path is not None and self.path.is_dir():
            raise ValueError(f"quarantine={str(path)!r} is a folder; set the path of a file, such as bad.jsonl")
        self.lines: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()
        self._fails = False  # whether the last write failed

    def add(self, function: str, entry: Mapping[str, Any]) -> None:
        """Append a line of the function's name and ``entry``, with the ``repr`` of values that are not JSON."""
        if self.path is None or self.lines[function] >= MAX_LINES:
            return
        try:
            line = _line({"function": function} | dict(entry))
            make_folder(self.path.parent)
            append(self.path, (line + "\n").encode())
        except Exception as error:  # a full disk, values whose repr raises
            if not self._fails and self.lost[function] < MAX_WARNINGS:
                _LOGGER.warning("lost a line of quarantine %s: %s: %s", self.path, type(error).__name__, error)
            self._fails = True
            self.lost[function] += 1
        else:
            self._fails = False
            self.lines[function] += 1

    def rewind(self, step: int) -> None:
        """Remove the lines of ``step`` and later: a run that resumes from a checkpoint writes them again."""
        if self.path is None or not self.path.is_file():
            return
        kept = [line for line in self.path.read_bytes().splitlines(keepends=True) if _step(line) < step]
        with atomic_write(self.path) as file:
            file.write(b"".join(kept))


def _step(line: bytes) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):  # a partial or foreign line
        return math.inf


def _line(entry: Mapping[str, Any]) -> str:
    try:
        return json.dumps(entry, default=repr)
    except (TypeError, ValueError, RecursionError):  # keys that are not strings, cycles
        return json.dumps({key: _value(value) for key, value in entry.items()})


def _value(value: Any) -> Any:
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return repr(value)
    return value


class RewardFailureError(RuntimeError):
    """Error of a reward function that failed on ``max_consecutive_failures`` samples in a row."""

    def __init__(self, report: str, remedy: str = ""):
        super().__init__(f"{report} {remedy}".rstrip())
        self.report = report


@dataclass
class RewardScores:
    """Scores of ``F`` reward functions for ``B`` trajectories."""

    scores: list[list[float | None]]  # F lists of B finite numbers, None where a function abstained or failed
    extra: dict[str, list[Any]] = field(default_factory=dict)  # columns of B values, None where a row has none
    metrics: dict[str, float] = field(default_factory=dict)  # means of the `log_metric` values over all calls
    tokens: list[dict[int, list[float]]] = field(default_factory=list)  # F rewards of tokens, of rows that have them


class RewardRunner:
    """Runner that scores batches of trajectories with reward functions and isolates their failures.

    A function fails on a sample if it raises, times out, kills its worker, or returns NaN, infinity or a malformed
    score. The sample then gets no score from that function; other samples keep theirs. If a call with several
    trajectories fails, each of them is retried alone. Failed samples are counted and written to the quarantine file.
    One sample of each failure kind is logged per batch.

    Identical trajectories (prompt, completion, ids, columns and truncation) are scored once. A function with the
    attribute ``whole_batch = True`` gets all trajectories in one call, duplicates included. Async functions run on an
    event loop, concurrently with each other and with the sync functions. Of their executor only ``timeout`` and
    ``rows_per_call`` apply.

    Args:
        functions: reward functions, each in a form that :func:`~torchrl_rloo.rewards.load_reward` accepts.
        executor: executor that runs the functions (:mod:`torchrl_rloo.rewards.executors`), or a mapping from function
            names to executors. None, and functions that are not in the mapping, run inline.
        max_consecutive_failures: number of consecutive samples that a function may fail on before the run ends; None
            disables the limit.
        quarantine: path of a JSON-lines file for failed samples, at most 1,000 per function, or a quarantine that other
            runners share. None disables it.
        deduplicate: True scores identical trajectories once. Use False for functions that draw random numbers.

    Attributes:
        names: names of the functions.
        counts: number of samples so far. ``"<name>/<kind>"`` counts failures of the kinds ``raised``, ``malformed``,
            ``timed_out``, ``worker_died`` and ``not_finite``. ``"<name>/duplicates"`` counts samples that reused the
            score of an identical one, and ``"<name>/repeated"`` samples that were retried alone.
        latency: histograms of seconds. ``"<name>/call"`` is the time of a call, and ``"<name>/sample"`` that time
            divided by its number of trajectories.

    Raises:
        ValueError: if two functions share a name, ``executor`` names an unknown function, or the limit is below 1.
        TypeError: if an executor cannot run a function.

    Example:
        >>> from torchrl_rloo.rewards import RewardBatch
        >>> runner = RewardRunner("boxed_accuracy")
        >>> batch = RewardBatch(["?"] * 2, [r"\\boxed{7}", "7"], [[1], [2]], {"answer": ["7", "7"]})
        >>> runner(batch).scores
        [[1.0, 0.0]]
    """

    def __init__(
        self,
        functions: RewardSpec | Sequence[RewardSpec],
        *,
        executor: Executor | Mapping[str, Executor] | None = None,
        max_consecutive_failures: int | None = 100,
        quarantine: str | os.PathLike | Quarantine | None = None,
        deduplicate: bool = True,
    ):
        single = callable(functions) or isinstance(functions, str | Mapping)
        self.functions = [load_reward(spec) for spec in ([functions] if single else functions)]
        self.names = [reward_name(f) for f in self.functions]
        if len(set(self.names)) != len(self.names):
            raise ValueError(f"reward functions are logged by name: names={self.names} must be unique; set name=...")
        if max_consecutive_failures is not None and max_consecutive_failures < 1:
            raise ValueError(
                f"max_consecutive_failures={max_consecutive_failures} must be at least 1; use None to disable the limit"
            )
        self.executor = None if isinstance(executor, Mapping) else executor
        self.executors = self._executors(executor)
        self._async = [is_async(function) for function in self.functions]
        self.max_consecutive_failures, self.deduplicate = max_consecutive_failures, deduplicate
        self.quarantine = quarantine if isinstance(quarantine, Quarantine) else Quarantine(quarantine)
        # Statistics of the calls
        self.counts: Counter[str] = Counter()
        self.latency = {f"{name}/{what}": Histogram() for name in self.names for what in ("call", "sample")}
        self._consecutive: Counter[str] = Counter()
        self._hints: dict[str, str] = {}  # advice by function that failed on all samples of a batch

    def _executors(self, executor: Executor | Mapping[str, Executor] | None) -> list[Executor]:
        inline = InlineExecutor()
        if isinstance(executor, Mapping):
            if unknown := sorted(executor.keys() - set(self.names)):
                raise ValueError(f"executor: unknown reward functions {unknown}; valid: {self.names}")
            executors = [executor.get(name, inline) for name in self.names]
        else:
            executors = [inline if executor is None else executor] * len(self.names)
        for function, each in zip(self.functions, executors, strict=True):
            if not is_async(function):
                each.prepare(function)
        return executors

    def __call__(self, batch: RewardBatch) -> RewardScores:
        """Score a batch of ``B`` trajectories with all ``F`` functions.

        Raises:
            RewardFailureError: if a function has failed on ``max_consecutive_failures`` samples in a row.
        """
        # Call the functions on one trajectory of each set of identical ones
        first, place = find_distinct(batch) if self.deduplicate else (range(len(batch)), range(len(batch)))
        distinct = batch if len(first) == len(batch) else batch.select(first)
        outcomes = self._run_all(batch, distinct)
        # Copy the results to the duplicates; count failures of all functions before one of them raises
        scores, metrics = RewardScores([]), {}
        error = None
        for name, outcome in zip(self.names, outcomes, strict=True):
            rows = range(len(batch)) if outcome.batch is batch else place  # row of the outcome for each trajectory
            scores.scores.append([outcome.scores[i] for i in rows])
            scores.tokens.append({k: outcome.tokens[i] for k, i in enumerate(rows) if i in outcome.tokens})
            for column, values in outcome.extra.items():
                old = scores.extra.setdefault(column, [None] * len(batch))
                scores.extra[column] = [old[k] if values[i] is None else values[i] for k, i in enumerate(rows)]
            for key, value in outcome.metrics:
                metrics.setdefault(key, []).append(value)
            with _COUNTERS_LOCK:
                error = self._account(name, outcome, rows) or error
        if error is not None:
            raise error
        scores.metrics = {key: sum(values) / len(values) for key, values in metrics.items()}
        return scores

    def _run_all(self, batch: RewardBatch, distinct: RewardBatch) -> list[_Outcome]:
        """Run all functions: inline ones in this thread, one thread per other executor, one per async function."""
        outcomes: list[Any] = [None] * len(self.functions)
        # Chain functions that share an executor, so that it runs one at a time
        chains: dict[Any, list[int]] = {}
        for k, executor in enumerate(self.executors):
            inline = isinstance(executor, InlineExecutor)
            chain = ("async", k) if self._async[k] else "inline" if inline else id(executor)
            chains.setdefault(chain, []).append(k)

        def run(chain: Sequence[int]) -> None:
            for k in chain:
                outcomes[k] = self._run(k, batch, distinct)

        # Start the background threads, then run the inline functions here, or the last chain if none is inline
        *background, foreground = (chains[name] for name in sorted(chains, key=lambda name: name == "inline"))
        futures = [_start_thread(partial(run, chain)) for chain in background]
        run(foreground)
        for future in futures:
            future.result()
        return outcomes

    def _run(self, k: int, batch: RewardBatch, distinct: RewardBatch) -> _Outcome:
        """Run one function on the whole batch or its distinct rows, in calls of ``executor.rows_per_call`` rows."""
        function, executor = self.functions[k], self.executors[k]
        whole = getattr(function, "whole_batch", False)
        batch = batch if whole else distinct
        n = len(batch)
        outcome, messages = _Outcome(batch, [None] * n), []

        def call(parts: Sequence[Sequence[int]]) -> list[Sequence[int]]:
            """Score the parts and return those that failed."""
            batches = [batch if len(part) == n else batch.select(part) for part in parts]
            failed = []
            for part, result in zip(parts, self._call(k, batches), strict=True):
                with _COUNTERS_LOCK:
                    self.latency[f"{self.names[k]}/call"].add(result.seconds)
                    self.latency[f"{self.names[k]}/sample"].add(result.seconds / len(part), len(part))
                outcome.put(part, result)
                if isinstance(result, RewardFailure):
                    messages.append(result.message)
                    failed.append(part)
            return failed

        size = n if whole else min(executor.rows_per_call or n, n)
        failed = call([range(i, min(i + size, n)) for i in range(0, n, size)]) if n else []
        # Retry the rows of failed calls one by one, so that a bad sample costs only its own score
        single_rows = [] if whole else [[i] for part in failed if len(part) > 1 for i in part]
        if single_rows:
            outcome.repeated = len(single_rows)
            # Warn once: the count is still zero at the first batch with retries
            if not call(single_rows) and not self.counts[f"{self.names[k]}/repeated"]:
                _LOGGER.warning(
                    "reward %s fails on %d rows at once (%s) but on none of them alone, so it is called row by row: "
                    "return one score per completion",
                    self.names[k],
                    size,
                    messages[0],
                )
        if n and len(outcome.failures) == n and all(m.startswith(FORM_ERRORS) for m in messages):
            self.form_hints(batch, [k])
        return outcome

    def form_hints(self, batch: RewardBatch, functions: Sequence[int] | None = None) -> dict[str, str]:
        """Return advice by name of each function (None tries all) that expects the other form; each is tried once."""
        for k in range(len(self.functions)) if functions is None else functions:
            if self.names[k] not in self._hints:
                self._hints[self.names[k]] = form_hint(self.functions[k], batch, partial(self._call, k))
        return {name: hint for name, hint in self._hints.items() if hint}

    def _call(self, k: int, batches: Sequence[RewardBatch]) -> list[RewardCall | RewardFailure]:
        if self._async[k]:
            return run_async(self.functions[k], batches, self.executors[k].timeout)
        return self.executors[k].run(self.functions[k], batches)

    def _account(self, name: str, outcome: _Outcome, rows: Sequence[int]) -> RewardFailureError | None:
        """Count, log and quarantine the failures of one function; ``rows`` maps samples to rows of the outcome."""
        for key, number in (("duplicates", len(rows) - len(outcome.scores)), ("repeated", outcome.repeated)):
            if number:
                self.counts[f"{name}/{key}"] += number
        if not outcome.failures:
            self._consecutive[name] = 0 if rows else self._consecutive[name]
            return None
        # Find the longest run of consecutive failures
        kinds = Counter(outcome.failures[i].kind for i in rows if i in outcome.failures)
        longest, longest_end = 0, None
        for i in rows:
            self._consecutive[name] = self._consecutive[name] + 1 if i in outcome.failures else 0
            if self._consecutive[name] > longest:
                longest, longest_end = self._consecutive[name], i
        # Quarantine every failure, but log only one of each kind
        for i, failure in outcome.failures.items():
            self._quarantine_sample(name, outcome.batch, i, failure)
        for kind, number in kinds.items():
            self.counts[f"{name}/{kind}"] += number
            i, failure = next((i, f) for i, f in outcome.failures.items() if f.kind == kind)
            evidence = _evidence(outcome.batch, i, failure) + self._advice(name)
            _LOGGER.warning("reward %s: %s on %d samples, which get no score: %s", name, kind, number, evidence)
        if self.max_consecutive_failures is None or longest < self.max_consecutive_failures:
            return None
        return self._error(name, longest, _evidence(outcome.batch, longest_end, outcome.failures[longest_end]))

    def _quarantine_sample(self, name: str, batch: RewardBatch, i: int, failure: RewardFailure) -> None:
        entry = {
            "kind": failure.kind,
            "error": failure.message,
            "traceback": failure.traceback[-MAX_TRACEBACK_CHARS:],
            "seconds": failure.seconds,
            "step": batch.trainer_state.global_step,
            "prompt": batch.prompts[i],
            "completion": batch.completions[i],
            "completion_ids": batch.completion_ids[i],
            "columns": {column: values[i] for column, values in batch.columns.items()},
            "truncated": bool(batch.truncated and batch.truncated[i]),
        }
        self.quarantine.add(name, entry)

    def _advice(self, name: str) -> str:
        return f"; {hint}" if (hint := self._hints.get(name)) else ""

    def _error(self, name: str, number: int, evidence: str) -> RewardFailureError:
        counts = {k.rpartition("/")[2]: v for k, v in self.counts.items() if k.rpartition("/")[0] == name}
        where = self.quarantine.path or "not recorded; pass quarantine='bad_samples.jsonl'"
        return RewardFailureError(
            f"reward {name} failed on {number} samples in a row{self._advice(name)}. Last: {evidence}. "
            f"So far: {counts}. Failed samples with tracebacks: {where}.",
            f"Fix the function, or raise max_consecutive_failures={self.max_consecutive_failures}, which None disables",
        )

    def close(self) -> None:
        """Stop the workers; the next call restarts them."""
        for executor in (self.executor, *self.executors):
            if executor is not None:
                executor.close()

    def state_dict(self) -> dict[str, dict[str, int]]:
        """Return the counters, the consecutive failures and the numbers of quarantined samples."""
        return {name: dict(counter) for name, counter in self._counters()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, int]]) -> None:
        """Restore the counters of :meth:`state_dict` in place."""
        for name, counter in self._counters():
            counter.clear()
            counter.update(state[name])

    def _counters(self) -> Iterator[tuple[str, Counter[str]]]:
        yield from (("counts", self.counts), ("consecutive", self._consecutive), ("lines", self.quarantine.lines))


@dataclass
class _Outcome:
    """Result of one function for a batch: a score, None or a failure per row."""

    batch: RewardBatch
    scores: list[float | None]
    failures: dict[int, RewardFailure] = field(default_factory=dict)
    extra: dict[str, list[Any]] = field(default_factory=dict)
    metrics: list[tuple[str, float]] = field(default_factory=list)
    repeated: int = 0
    tokens: dict[int, list[float]] = field(default_factory=dict)

    def put(self, rows: Sequence[int], result: RewardCall | RewardFailure) -> None:
        """Store the result of a call for ``rows``; it replaces an earlier one."""
        if isinstance(result, RewardFailure):
            self.failures |= dict.fromkeys(rows, result)
            return
        for k, (i, score) in enumerate(zip(rows, result.scores, strict=True)):
            self.failures.pop(i, None)
            if score is None or abs(score) <= MAX_FLOAT32:
                self.scores[i] = score
                if k in result.tokens:
                    self.tokens[i] = result.tokens[k]
            else:
                message = f"returned {score}; return a finite float32 or None"
                self.failures[i] = RewardFailure("not_finite", message, seconds=result.seconds)
        for column, values in result.extra.items():
            known = self.extra.setdefault(column, [None] * len(self.scores))
            for i, value in zip(rows, values, strict=True):
                known[i] = value
        self.metrics += result.metrics


def _evidence(batch: RewardBatch, i: int, failure: RewardFailure) -> str:
    """Describe a failure in one line, for a log."""
    prompt, completion = _excerpt(batch.prompts[i]), _excerpt(batch.completions[i])
    return f"{failure.message[:500]}; after {failure.seconds:.3g} s, on prompt {prompt!r}, completion {completion!r}"


def _excerpt(value: Any) -> str:
    if isinstance(value, list | tuple) and all(isinstance(m, Mapping) for m in value):
        value = " | ".join(content_text(message.get("content")) for message in value)
    text = value if isinstance(value, str) else repr(value)
    if len(text) <= MAX_EXCERPT_CHARS:
        return text
    return f"{text[: MAX_EXCERPT_CHARS // 2]} [...] {text[-MAX_EXCERPT_CHARS // 2 :]}"


def _start_thread(function: Callable[[], None]) -> Future:
    future: Future = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    PackageThread(run, name="rewards").start()
    return future
