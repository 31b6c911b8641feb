"""Scores of a remote service over HTTP."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from torchrl_rloo.rewards.http_json import JsonEndpoint, JsonSession, gather_all
from torchrl_rloo.rewards.protocol import MalformedScoresError, final_text

_JOINED, _FINAL = "prompts+completions", "final_text"
_MAX_EXCERPT = 300  # characters of a reply in an error


class RemoteScorer:
    """Reward from a service that accepts JSON by POST, one score per trajectory.

    A request holds lists of up to ``batch_size`` values, under the names in ``fields``. The reply holds as many numbers
    (null abstains), under the name in ``scores_field``:

    .. code-block:: text

        {"prompts": ["1+1?", "2+2?"], "completions": ["2", "5"]}  ->  {"rewards": [1.0, 0.0]}

    If a request fails for good, the call raises and cancels its other requests. ``concurrency`` limits the requests of
    one call, and also the number of calls in flight. The object holds no connections, so it can be pickled and called
    by several threads and event loops.

    Args:
        url: address of the service.
        fields: name in the request -> source of the values. ``"prompts"`` and ``"completions"`` are texts or messages,
            as in the environment, and ``"prompts+completions"`` joins them. ``"final_text"`` is that of the last
            assistant message. Other sources are ``"completion_ids"``, ``"truncated"`` and dataset columns. Default:
            prompts and completions.
        scores_field: path of the scores in the reply, with dots between the names of nested objects. None means that
            the reply is the list.
        batch_size: maximum number of rows per request.
        timeout: seconds per attempt.
        total_timeout: seconds per request, with all attempts.
        retries: maximum number of attempts after the first, for connection errors, time-outs, replies that are not
            JSON, 408, 425, 429 and 5xx.
        backoff: seconds before the second attempt, doubled for each later one.
        concurrency: maximum number of requests in flight.
        headers: headers of each request. They are pickled, so they must not hold secrets.
        api_key_env: environment variable with a key, sent as ``Authorization: Bearer`` and read at each call. None
            sends no key.
        max_bytes: maximum size of a reply.
        name: name in logs.

    Raises:
        ValueError: if a setting is out of range, or ``fields`` is empty.

    Example:
        >>> scorer = RemoteScorer(  # a server for OpenRLHF's remote_rm_url
        ...     "http://localhost:5000/get_reward",
        ...     fields={"query": "prompts+completions", "prompts": "prompts", "labels": "answer"},
        ... )
    """

    def __init__(
        self,
        url: str,
        *,
        fields: Mapping[str, str] | None = None,
        scores_field: str | None = "rewards",
        batch_size: int = 64,
        timeout: float = 60.0,
        total_timeout: float = 300.0,
        retries: int = 4,
        backoff: float = 0.5,
        concurrency: int = 8,
        headers: Mapping[str, str] | None = None,
        api_key_env: str | None = None,
        max_bytes: int = 1 << 24,
        name: str = "remote",
    ):
        self.fields = {"prompts": "prompts", "completions": "completions"} if fields is None else dict(fields)
        if not self.fields:
            raise ValueError("fields={} must not be empty; map names in the request to 'prompts', 'completions', ...")
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be at least 1 row per request")
        self.scores_field, self.batch_size, self.__name__ = scores_field, batch_size, name
        self.concurrency = concurrency  # also the number of calls in flight
        self.endpoint = JsonEndpoint(
            url, timeout, total_timeout, retries, backoff, concurrency, dict(headers or {}), api_key_env, max_bytes
        )

    async def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Sequence[Any], **columns: Any
    ) -> list[float | None]:
        """Return ``B`` scores, None where the service abstains.

        Raises:
            RemoteRewardError: if a request fails after all attempts, or with a status that is not retried.
            MalformedScoresError: if a reply does not hold one number or null per row.
            KeyError: if the dataset lacks a column of ``fields``.
            TypeError: if a column has values that are not JSON.
        """
        available = {**columns, "prompts": prompts, "completions": completions, "completion_ids": completion_ids}
        payload = {field: self._values(source, available) for field, source in self.fields.items()}
        async with self.endpoint.session() as session:
            starts = range(0, len(completions), self.batch_size)
            parts = await gather_all(self._score_rows(session, payload, start, len(completions)) for start in starts)
        return [score for part in parts for score in part]

    def _values(self, source: str, available: Mapping[str, Any]) -> Sequence[Any]:
        if source == _JOINED:
            return [_join(p, c) for p, c in zip(available["prompts"], available["completions"], strict=True)]
        if source == _FINAL:
            return [final_text(completion) for completion in available["completions"]]
        if source not in available:
            raise KeyError(f"{self.__name__} requires column {source!r}; the rows have {sorted(available)}")
        return available[source]

    async def _score_rows(
        self, session: JsonSession, payload: Mapping[str, Any], start: int, total: int
    ) -> list[float | None]:
        stop = min(start + self.batch_size, total)
        reply = await session.post({field: list(values[start:stop]) for field, values in payload.items()})
        scores = self._find_scores(reply, session)
        if not isinstance(scores, list) or not all(
            s is None or (isinstance(s, Real) and not isinstance(s, bool)) for s in scores
        ):
            got = session.redact.line(json.dumps(scores))[:_MAX_EXCERPT]
            raise MalformedScoresError(f"{session.name} must reply with numbers or nulls, got {got}")
        if len(scores) != stop - start:
            raise MalformedScoresError(f"{session.name} returned {len(scores)} scores for {stop - start} rows")
        return scores

    def _find_scores(self, reply: Any, session: JsonSession) -> Any:
        value = reply
        for part in self.scores_field.split(".") if self.scores_field is not None else ():
            if not isinstance(value, dict) or part not in value:
                got = session.redact.line(json.dumps(reply))[:_MAX_EXCERPT]
                raise MalformedScoresError(
                    f"{session.name}: no {self.scores_field!r} in the reply {got}; set scores_field"
                )
            value = value[part]
        return value


def _join(prompt: Any, completion: Any) -> Any:
    return prompt + completion if isinstance(prompt, str) else [*prompt, *completion]
