"""LLM judge: scores by a language model behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

from torchrl_rloo.rewards.cache import LenientCache, cache_key
from torchrl_rloo.rewards.http_json import JsonEndpoint, JsonSession, RemoteRewardError, gather_all
from torchrl_rloo.rewards.protocol import final_text
from torchrl_rloo.rewards.rubrics import REMINDER, NoScoreError, fill_scale, judge_messages, parse_verdict, read_rubric

log = logging.getLogger(__name__)

_FATAL_STATUSES = frozenset({401, 403, 404, 405})  # independent of the text of a row
_MAX_QUOTED = 3  # failures quoted in one warning
_UNSCORED = "not scored: "  # prefix of the reason of a failed row


class Verdict(NamedTuple):
    """Score and reason of a judge for one trajectory."""

    score: float  # in [0, 1]; NaN without a score
    reason: str
    seconds: float = 0.0


class LLMJudge:
    """Reward in [0, 1] from a judge model behind an OpenAI-compatible ``/chat/completions`` endpoint.

    The prompt requests the reply ``{"reason": ..., "score": ...}``, which is parsed leniently. A reply without a score
    on the scale is answered with a reminder, up to ``retries`` times. Identical rows of a call share one request, and
    cached rows need none.

    A row without a score gets NaN, which counts as a failure of this reward, not as an abstention. One warning per call
    names the rows and reasons. Errors that concern all rows raise: 401, 403, 404, 405, a redirect, a missing key.

    Column of the completions table: ``<name>_reason``, the reason or the error. Metrics: ``<name>/failed`` and
    ``<name>/cached`` are shares of the rows, and ``<name>/seconds`` is the mean per request, with retries and waits.

    Completions may contain instructions to the judge. They are placed between tags that they cannot close and shortened
    to ``max_chars``, and the judge is told to ignore instructions in them. A policy may still learn to exploit the
    judge, so read the reasons and compare with another reward.

    Args:
        base_url: address of the API, up to and including ``/v1``.
        model: name of the judge at the endpoint.
        rubric: name in ``RUBRICS``, text with the placeholder ``{completion}`` and usually ``{prompt}``, or path of a
            file with such a text. Other braces are kept.
        columns: placeholder -> dataset column, such as ``{"reference": "answer"}`` for the rubric ``"correctness"``.
        scale: lowest and highest score of the judge, mapped to [0, 1].
        temperature: sampling temperature of the judge. At 0 most servers are nearly deterministic.
        max_tokens: maximum number of tokens of a reply, with its reasoning.
        extra_body: entries to add to the request or to replace. None removes an entry, as in
            ``{"max_tokens": None, "max_completion_tokens": 2000}``.
        max_chars: maximum number of characters per value; the middle of longer values is left out.
        cache: path of a :class:`~torchrl_rloo.rewards.cache.DiskCache`, keyed by the request without the address. After
            an error, requests continue without it, with one warning. None disables it.
        timeout: seconds per attempt.
        total_timeout: seconds per request, with all attempts.
        retries: maximum number of attempts after the first (connection errors, time-outs, 408, 425, 429, 5xx), and
            maximum number of reminders.
        backoff: seconds before the second attempt, doubled for each later one.
        concurrency: maximum number of requests in flight.
        api_key_env: environment variable with the key, read at each call and not stored. None sends no key.
        max_bytes: maximum size of a reply.
        name: name in logs.

    Raises:
        ValueError: if a setting is out of range, or the rubric lacks a placeholder.

    Example::

        judge = LLMJudge(
            "https://api.openai.com/v1", "gpt-4o-mini", rubric="correctness", columns={"reference": "answer"}
        )
        scores = await judge(["2+2?"], ["It is 4."], [[1]], answer=["4"])
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        rubric: str | os.PathLike = "quality",
        *,
        columns: Mapping[str, str] | None = None,
        scale: tuple[float, float] = (0, 10),
        temperature: float = 0.0,
        max_tokens: int = 512,
        extra_body: Mapping[str, Any] | None = None,
        max_chars: int = 20_000,
        cache: str | os.PathLike | None = None,
        timeout: float = 120.0,
        total_timeout: float = 600.0,
        retries: int = 4,
        backoff: float = 0.5,
        concurrency: int = 16,
        api_key_env: str | None = "OPENAI_API_KEY",
        max_bytes: int = 1 << 24,
        name: str = "judge",
    ):
        low, high = scale
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise ValueError(f"scale={scale} must be two finite numbers, lowest first")
        if max_chars < 2:
            raise ValueError(f"max_chars={max_chars} must be at least 2")
        # Check the placeholders of the rubric
        self.columns = dict(columns or {})
        if clash := {"prompt", "completion"} & set(self.columns):
            raise ValueError(f"columns={self.columns}: placeholders {sorted(clash)} are reserved; use other names")
        self.rubric, self.scale = read_rubric(os.fspath(rubric), self.columns), (float(low), float(high))
        # None removes a field, because some servers refuse max_tokens
        body = {"model": model, "temperature": temperature, "max_tokens": max_tokens, **(extra_body or {})}
        self.body = {field: value for field, value in body.items() if value is not None}
        self.max_chars, self.retries, self.__name__ = max_chars, retries, name
        self.cache = None if cache is None else LenientCache(cache)
        url = base_url.rstrip("/") + "/chat/completions"
        self.concurrency = concurrency  # also the number of calls in flight
        self.endpoint = JsonEndpoint(
            url, timeout, total_timeout, retries, backoff, concurrency, {}, api_key_env, max_bytes
        )

    async def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Any],
        log_extra: Callable[[str, Sequence[Any]], None] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """Return ``B`` scores in [0, 1], NaN where the judge gave none.

        Raises:
            KeyError: if the dataset lacks a column of ``columns``.
            RemoteRewardError: if the endpoint refuses every request, or the key is missing.
        """
        if missing := sorted(set(self.columns.values()) - set(columns)):
            raise KeyError(f"{self.__name__} requires columns {missing}; the rows have {sorted(columns)}")
        # Ask the judge once per distinct request that is not cached
        bodies = [self._body(prompts[i], completions[i], columns, i) for i in range(len(completions))]
        keys = [cache_key(body) for body in bodies]
        requests = dict(zip(keys, bodies, strict=True))
        cached = await self._read_cache(requests)
        uncached = {key: body for key, body in requests.items() if key not in cached}
        fresh = await self._ask_all(uncached)
        verdicts = [cached.get(key) or fresh[key] for key in keys]
        # Report failures, reasons and metrics
        self._warn(verdicts)
        if log_extra is not None:
            log_extra(f"{self.__name__}_reason", [verdict.reason for verdict in verdicts])
        if log_metric is not None and keys:
            log_metric(f"{self.__name__}/failed", sum(math.isnan(v.score) for v in verdicts) / len(keys))
            log_metric(f"{self.__name__}/cached", sum(key in cached for key in keys) / len(keys))
            if fresh:
                log_metric(f"{self.__name__}/seconds", sum(v.seconds for v in fresh.values()) / len(fresh))
        return [verdict.score for verdict in verdicts]

    def _body(self, prompt: Any, completion: Any, columns: Mapping[str, Sequence[Any]], i: int) -> dict[str, Any]:
        values = {"prompt": _transcript(prompt), "completion": final_text(completion)}
        values |= {placeholder: str(columns[column][i]) for placeholder, column in self.columns.items()}
        return {**self.body, "messages": judge_messages(self.rubric, values, self.scale, self.max_chars)}

    async def _read_cache(self, requests: Mapping[str, Any]) -> dict[str, Verdict]:
        if self.cache is None:
            return {}
        found = await asyncio.to_thread(self.cache.get_many, requests)  # may wait for the lock of another process
        return {key: Verdict(*value) for key, value in found.items() if _is_verdict(value)}

    async def _ask_all(self, requests: Mapping[str, dict[str, Any]]) -> dict[str, Verdict]:
        if not requests:
            return {}
        async with self.endpoint.session() as session:
            verdicts = await gather_all(self._ask(session, key, body) for key, body in requests.items())
        return dict(zip(requests, verdicts, strict=True))

    async def _ask(self, session: JsonSession, key: str, body: dict[str, Any]) -> Verdict:
        """Ask for the verdict on one request and cache it."""
        clock = asyncio.get_running_loop().time
        start = clock()
        try:
            score, reason = await self._ask_with_reminders(session, body)
        except (RemoteRewardError, NoScoreError) as error:
            # Raise errors that every request would meet; after others, leave only this one unscored
            status = getattr(error, "status", None) or 0
            if status in _FATAL_STATUSES or 300 <= status < 400:
                raise
            return Verdict(math.nan, f"{_UNSCORED}{error}", clock() - start)
        # Rescale the score to between 0 and 1
        verdict = Verdict((score - self.scale[0]) / (self.scale[1] - self.scale[0]), reason)
        if self.cache is not None:
            await asyncio.to_thread(self.cache.put, key, verdict[:2])
        return verdict._replace(seconds=clock() - start)

    async def _ask_with_reminders(self, session: JsonSession, body: dict[str, Any]) -> tuple[float, str]:
        """Return the score on the scale and the reason, after up to ``retries`` reminders."""
        messages = body["messages"]
        for reminders in count():
            content = session.redact(_content(await session.post({**body, "messages": messages})))
            try:
                return parse_verdict(content, self.scale)
            except NoScoreError as error:
                if reminders == self.retries:
                    raise NoScoreError(f"{reminders + 1} replies, the last with {error}") from error
            # Change the request: at temperature 0 the same one would get the same reply
            reminder = {"role": "user", "content": fill_scale(REMINDER, self.scale)}
            messages = [*body["messages"], {"role": "assistant", "content": content}, reminder]

    def _warn(self, verdicts: Sequence[Verdict]) -> None:
        failed = [i for i, verdict in enumerate(verdicts) if math.isnan(verdict.score)]
        if failed:
            quoted = "; ".join(f"row {i}: {verdicts[i].reason.removeprefix(_UNSCORED)}" for i in failed[:_MAX_QUOTED])
            more = f"; and {len(failed) - _MAX_QUOTED} more" if len(failed) > _MAX_QUOTED else ""
            counts = f"{len(failed)} of {len(verdicts)} rows not scored"
            log.warning("reward %s: %s: %s%s", self.__name__, counts, quoted, more)


def _is_verdict(value: Any) -> bool:
    """Return whether a cached value is a score in [0, 1] with a reason."""
    if not (isinstance(value, list) and len(value) == 2 and isinstance(value[1], str)):
        return False
    return type(value[0]) in (int, float) and 0 <= value[0] <= 1


def _transcript(prompt: Any) -> str:
    """Format a prompt as text: the text of its only message, or all messages with their roles."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1:
        return str(prompt[0]["content"])
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt)


def _content(reply: Any) -> str:
    """Return the text of a chat completion, "" without one (a reasoning model may run out of tokens)."""
    try:
        content = reply["choices"][0]["message"]["content"]
        return content if isinstance(content, str) else ""
    except (KeyError, IndexError, TypeError):
        return ""
