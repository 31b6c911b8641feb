"""Messages between a RayEngine and its actor: requests, answers and states in few objects."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import groupby, islice
from typing import Any, NamedTuple

from torchrl_rloo.engines.base import (
    AsyncEngine,
    EngineDeadError,
    EngineError,
    EngineLoad,
    EngineTimeoutError,
    Request,
    Sample,
)
from torchrl_rloo.engines.occupancy import Reading

_ERRORS = {kind.__name__: kind for kind in (EngineError, EngineDeadError, EngineTimeoutError)}


class EngineState(NamedTuple):
    """State of the engine inside an actor.

    Attributes:
        number: number of the report. A report with a lower number is older.
        version: policy version of the weights.
        failed_version: version whose update failed halfway, or None.
        asleep: whether the engine sleeps.
        paused: whether sampling is paused.
        load: work inside the engine, of all clients.
        occupancy: number of requests of all clients inside, and its integrals.
    """

    number: int = 0
    version: int = 0
    failed_version: int | None = None
    asleep: bool = False
    paused: bool = False
    load: EngineLoad = EngineLoad()
    occupancy: Reading = Reading()

    @classmethod
    def of(cls, engine: AsyncEngine, number: int, occupancy: Reading) -> EngineState:
        """Return the state of an engine. That of a dead one has an empty load."""
        try:
            load = engine.load()
        except EngineError:
            load = EngineLoad()
        return cls(number, engine.version, engine.failed_version, engine.asleep, engine.paused, load, occupancy)


class Failure(NamedTuple):
    """Error of a request or a call, as text, so that any process can read it.

    Attributes:
        kind: name of its class.
        text: its message.
        late: whether its cause is an :class:`EngineTimeoutError`, as that of a call without an answer.
    """

    kind: str
    text: str
    late: bool = False

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Describe an error. One of another class becomes an ``EngineError``."""
        if isinstance(error, EngineError):
            kind = next(name.__name__ for name in type(error).__mro__ if name.__name__ in _ERRORS)
            return cls(kind, str(error), isinstance(error.__cause__, EngineTimeoutError))
        return cls(EngineError.__name__, f"{type(error).__name__}: {error}")

    def error(self) -> EngineError:
        """Return the error."""
        error = _ERRORS[self.kind](self.text)
        error.__cause__ = EngineTimeoutError(self.text) if self.late else None
        return error


class RequestBatch(NamedTuple):
    """Several requests: the fields of each, and the ids of all prompts in int32."""

    fields: list[tuple]
    prompts: bytes

    @staticmethod
    def entry(number: int, request: Request) -> tuple[tuple, array]:
        """Encode one numbered request.

        Raises:
            TypeError, OverflowError: if the prompt has something else than ids.
        """
        r = request
        options = (r.limit, r.seed, r.distribution, r.stop_ids, r.stop_strings, r.session)
        return (number, len(r.prompt), options), array("i", r.prompt)

    @classmethod
    def of(cls, entries: Iterable[tuple[tuple, array]]) -> RequestBatch:
        """Join encoded requests.

        Example:
            >>> batch = RequestBatch.of([RequestBatch.entry(7, Request([1, 2], limit=4, seed=0))])
            >>> batch.requests() == [(7, Request([1, 2], limit=4, seed=0))]
            True
        """
        fields, prompts = [], array("i")
        for one, prompt in entries:
            fields.append(one)
            prompts.extend(prompt)
        return cls(fields, prompts.tobytes())

    def requests(self) -> list[tuple[int, Request]]:
        """Return the numbered requests."""
        prompts, found, start = _numbers("i", self.prompts), [], 0
        for number, length, options in self.fields:
            found.append((number, Request(prompts[start : start + length], *options)))
            start += length
        return found


class AnswerBatch(NamedTuple):
    """Several answers: the fields of each, and all tokens in int32 and log-probs in float64.

    The fields of a sample are its number, its numbers of tokens and log-probs, its finish, and ``(version, tokens)`` of
    each span of equal versions. An error, or an answer that cannot be encoded, has its :class:`Failure` in their place.
    """

    fields: list[tuple]
    tokens: bytes
    log_probs: bytes

    @classmethod
    def of(cls, answers: Sequence[tuple[int, Sample | BaseException]]) -> AnswerBatch:
        """Encode numbered answers.

        Example:
            >>> answer = Sample([5, 6], [-0.5, -0.25], "stop", [0, 1])
            >>> AnswerBatch.of([(7, answer)]).answers() == [(7, answer)]
            True
        """
        fields, tokens, log_probs = [], array("i"), array("d")
        for number, answer in answers:
            if isinstance(answer, BaseException):
                fields.append((number, Failure.of(answer)))
                continue
            try:
                ids, values = array("i", answer.tokens), array("d", answer.log_probs)
                spans = [(version, len(list(equal))) for version, equal in groupby(answer.versions)]
                fields.append((number, len(ids), len(values), answer.finish, spans))
            except (AttributeError, TypeError, OverflowError) as error:
                text = f"the engine answered {answer!r:.100} ({error}); return a Sample of plain numbers"
                fields.append((number, Failure.of(EngineError(text))))
            else:
                tokens.extend(ids)
                log_probs.extend(values)
        return cls(fields, tokens.tobytes(), log_probs.tobytes())

    def answers(self) -> list[tuple[int, Sample | EngineError]]:
        """Return the numbered answers."""
        tokens, log_probs = iter(_numbers("i", self.tokens)), iter(_numbers("d", self.log_probs))
        found = []
        for number, *rest in self.fields:
            if len(rest) == 1:
                found.append((number, rest[0].error()))
                continue
            n, n_log_probs, finish, spans = rest
            versions = [version for version, count in spans for _ in range(count)]
            found.append((number, Sample([*islice(tokens, n)], [*islice(log_probs, n_log_probs)], finish, versions)))
        return found


class EngineFacts(NamedTuple):
    """Facts of a started engine that do not change.

    Attributes:
        context_length: see :class:`~torchrl_rloo.engines.base.Sampler`.
        vocab_size: see :class:`~torchrl_rloo.engines.base.Sampler`.
        stop_ids: see :class:`~torchrl_rloo.engines.base.Sampler`.
        counts_running_tokens: see :class:`~torchrl_rloo.engines.base.AsyncEngine`.
        node_id: Ray's id of the actor's node.
        pid: process id of the actor.
    """

    context_length: int | None
    vocab_size: int | None
    stop_ids: tuple[int, ...]
    counts_running_tokens: bool
    node_id: str
    pid: int


class CallResult(NamedTuple):
    """Result of a call of the engine, or its failure, and the state after it."""

    value: Any
    failure: Failure | None
    state: EngineState


def _numbers(kind: str, data: bytes) -> list:
    values = array(kind)
    values.frombytes(data)
    return values.tolist()
