"""Scores from a service over HTTP."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from torchrl_rloo.rewards.http_json import JsonEndpoint, JsonSession, gather_all
from torchrl_rloo.rewards.protocol import MalformedScoresError, final_text

_JOINED, _FINAL = "prompts+completions", "final_text"


class RemoteScorer:
    """One score per trajectory from a service that takes JSON by POST.

    The request holds up to ``batch_size`` rows as lists of one entry each, under the names in ``fields``; the reply
    holds as many numbers (or null: the service abstains) under the name in ``scores_field``:

    .. code-block:: text

        {"prompts": ["1+1?", "2+2?"], "completions": ["2", "5"]}  ->  {"rewards": [1.0, 0.0]}

    A server written for OpenRLHF's ``remote_rm_url`` reads ``query``, ``prompts`` and ``labels``:

    >>> scorer = RemoteScorer(
    ...     "http://localhost:5000/get_reward",
    ...     fields={"query": "prompts+completions", "prompts": "prompts", "labels": "answer"},
    ... )

    If one request fails for good the call raises, and its other requests are dropped. ``concurrency`` bounds one call,
    and how many calls of one row each run at a time. The object holds no connection: it pickles, and any number of
    threads and event loops may call it.

    Args:
        url: address of the service.
        fields: what to send, from names in the request to values: ``"prompts"``, ``"completions"`` (text or messages,
            as the environment has them), ``"completion_ids"``, ``"truncated"``, ``"prompts+completions"`` (one text, or
            one list of messages), ``"final_text"`` (of the last assistant message) or a column of the dataset.
        scores_field: where the scores are in the reply; dots lead into objects; None: the reply is the list.
        batch_size: rows per request.
        timeout: seconds one attempt may take.
        total_timeout: seconds one request may take with all its attempts.
        retries: further attempts after connection errors, time-outs, replies that are not JSON, 408, 425, 429 and 5xx.
        backoff: seconds before the second attempt, doubled for each after it.
        concurrency: requests under way at a time.
        headers: sent with each request; they are pickled, so no secrets.
        api_key_env: environment variable with a key to send as ``Authorization: Bearer``, read at each call.
        name: the name in the logs.

    Raises:
        ValueError: for a setting out of range, or no fields.
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
        name: str = "remote",
    ):
        self.fields = {"prompts": "prompts", "completions": "completions"} if fields is None else dict(fields)
        if not self.fields:
            raise ValueError("fields={} sends nothing: map names in the request to 'prompts', 'completions', ...")
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be at least 1 row per request")
        self.scores_field, self.batch_size, self.__name__ = scores_field, batch_size, name
        self.concurrency = concurrency  # also of calls, where each is one trajectory
        self.endpoint = JsonEndpoint(
            url, timeout, total_timeout, retries, backoff, concurrency, dict(headers or {}), api_key_env
        )

    async def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Sequence[Any], **columns: Any
    ) -> list[float | None]:
        """``B`` scores, None where the service abstains.

        Raises:
            RemoteRewardError: if a request fails for good: a 4xx at once, what may pass after all attempts.
            MalformedScoresError: if a reply does not hold one number or null for each row.
            KeyError: if the rows lack a column that ``fields`` names.
            TypeError: if a column has values that are not JSON.
        """
        available = {**columns, "prompts": prompts, "completions": completions, "completion_ids": completion_ids}
        payload = {field: self._values(source, available) for field, source in self.fields.items()}
        async with self.endpoint.session() as session:
            starts = range(0, len(completions), self.batch_size)
            parts = await gather_all(self._scores(session, payload, start, len(completions)) for start in starts)
        return [score for part in parts for score in part]

    def _values(self, source: str, available: Mapping[str, Any]) -> Sequence[Any]:
        if source == _JOINED:
            return [_join(p, c) for p, c in zip(available["prompts"], available["completions"], strict=True)]
        if source == _FINAL:
            return [final_text(completion) for completion in available["completions"]]
        if source not in available:
            raise KeyError(f"{self.__name__} sends the column {source!r}; the rows have {sorted(available)}")
        return available[source]

    async def _scores(
        self, session: JsonSession, payload: Mapping[str, Any], start: int, total: int
    ) -> list[float | None]:
        stop = min(start + self.batch_size, total)
        reply = await session.post({field: list(values[start:stop]) for field, values in payload.items()})
        scores = self._found(reply)
        if not isinstance(scores, list) or not all(
            s is None or (isinstance(s, Real) and not isinstance(s, bool)) for s in scores
        ):
            raise MalformedScoresError(f"{self.endpoint.url} must answer with numbers or nulls, got {_excerpt(scores)}")
        if len(scores) != stop - start:
            raise MalformedScoresError(f"{self.endpoint.url} gave {len(scores)} scores for {stop - start} rows")
        return scores

    def _found(self, reply: Any) -> Any:
        value = reply
        for part in self.scores_field.split(".") if self.scores_field is not None else ():
            if not isinstance(value, dict) or part not in value:
                raise MalformedScoresError(
                    f"{self.endpoint.url}: no {self.scores_field!r} in the reply {_excerpt(reply)}: set scores_field"
                )
            value = value[part]
        return value


def _join(prompt: Any, completion: Any) -> Any:
    return prompt + completion if isinstance(prompt, str) else [*prompt, *completion]


def _excerpt(value: Any) -> str:
    return json.dumps(value)[:300]
