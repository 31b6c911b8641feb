"""Scores from a language model that is asked for its opinion."""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

from torchrl_rloo.rewards.cache import DiskCache, cache_key
from torchrl_rloo.rewards.http_json import JsonEndpoint, JsonSession, RemoteRewardError, gather_all
from torchrl_rloo.rewards.protocol import final_text
from torchrl_rloo.rewards.rubrics import REMINDER, NoScoreError, judge_messages, on_scale, parse_verdict, read_rubric

log = logging.getLogger(__name__)

_EVERY_ROW = frozenset({401, 403, 404, 405})  # statuses that no row's text is to blame for
_SHOWN = 3  # failures quoted in one warning
_UNSCORED = "not scored: "  # begins the reason of a row that failed


class Verdict(NamedTuple):
    """What a judge thinks of one trajectory."""

    score: float  # in [0, 1]; NaN if there is none
    reason: str
    seconds: float = 0.0


class LLMJudge:
    """A score in [0, 1] per trajectory from any OpenAI-compatible ``/chat/completions`` endpoint.

    The judge is asked for ``{"reason": ..., "score": ...}`` and read leniently; a reply without a score on the scale is
    answered with a reminder, up to ``retries`` times. Equal rows of a call are asked about once, and what is in the
    cache never.

    A row that gets no score in the end costs only itself: it scores NaN, which counts as a failure of this function and
    not as an abstention; one WARNING per call names rows and reasons. What concerns every row (401, 403, 404, 405, a
    redirect, a missing key) raises.

    Column for the completions table: ``<name>_reason``, or what went wrong. Metrics: ``<name>/failed`` and
    ``<name>/cached``, shares of the rows; ``<name>/seconds``, mean over the requests, retries and waiting included.

    Completions may address the judge. They stand between tags that they cannot end, are shortened to ``max_chars``, and
    the judge is told that they are material; a policy in training may still find words that move it, so watch the
    reasons and compare with another reward.

    Args:
        base_url: up to and including ``/v1``.
        model: the judge's name there.
        rubric: a name in ``RUBRICS``, a text with ``{completion}`` and, as a rule, ``{prompt}`` in it, or the path of a
            file that holds one. Other braces are left alone.
        columns: dataset columns by placeholder, such as ``{"reference": "answer"}`` for the rubric ``"correctness"``.
        scale: lowest and highest score that the judge may give; mapped to [0, 1].
        temperature: of the judge; at 0 most servers answer alike each time.
        max_tokens: of its reply, thinking included.
        extra_body: more entries of the request, or others in place of those above; None takes one out, as in
            ``{"max_tokens": None, "max_completion_tokens": 2000}``.
        max_chars: characters of each value that the judge gets to see; the middle of longer ones is left out.
        cache: path of a :class:`~torchrl_rloo.rewards.cache.DiskCache`; its key is all of a request but the address.
        timeout: seconds one attempt may take.
        total_timeout: seconds one request may take with all its attempts.
        retries: further attempts after connection errors, time-outs, 408, 425, 429 and 5xx; reminders likewise.
        backoff: seconds before the second attempt, doubled for each after it.
        concurrency: requests under way at a time.
        api_key_env: environment variable with the key, read at each call and stored nowhere; None for a server without.
        name: the name in the logs.

    Raises:
        ValueError: for a setting out of range, or a rubric that lacks a placeholder.
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
        name: str = "judge",
    ):
        low, high = scale
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise ValueError(f"scale={scale} must be two finite numbers, the lower first")
        if max_chars < 2:
            raise ValueError(f"max_chars={max_chars} must be at least 2")
        self.columns = dict(columns or {})
        if clash := {"prompt", "completion"} & set(self.columns):
            raise ValueError(f"columns={self.columns}: {sorted(clash)} are filled already, choose other names")
        self.rubric, self.scale = read_rubric(os.fspath(rubric), self.columns), (float(low), float(high))
        body = {"model": model, "temperature": temperature, "max_tokens": max_tokens, **(extra_body or {})}
        self.body = {field: value for field, value in body.items() if value is not None}
        self.max_chars, self.retries, self.__name__ = max_chars, retries, name
        self.cache = None if cache is None else DiskCache(cache)
        url = base_url.rstrip("/") + "/chat/completions"
        self.concurrency = concurrency  # also of calls, where each is one trajectory
        self.endpoint = JsonEndpoint(url, timeout, total_timeout, retries, backoff, concurrency, {}, api_key_env)

    async def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Any],
        log_extra: Callable[[str, Sequence[Any]], None] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """``B`` scores in [0, 1], NaN where the judge gave none.

        Raises:
            KeyError: if the rows lack a column that ``columns`` names.
            RemoteRewardError: if the endpoint refuses every request.
            OSError: if the cache cannot be read.
        """
        if missing := sorted(set(self.columns.values()) - set(columns)):
            raise KeyError(f"{self.__name__} needs the columns {missing}; the rows have {sorted(columns)}")
        bodies = [self._body(prompts[i], completions[i], columns, i) for i in range(len(completions))]
        keys = [cache_key(body) for body in bodies]
        requests = dict(zip(keys, bodies, strict=True))
        cached = await self._from_cache(requests)
        asked = {key: body for key, body in requests.items() if key not in cached}
        fresh = await self._from_judge(asked)
        verdicts = [cached.get(key) or fresh[key] for key in keys]
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

    async def _from_cache(self, requests: Mapping[str, Any]) -> dict[str, Verdict]:
        if self.cache is None:
            return {}
        found = await asyncio.to_thread(self.cache.get_many, requests)  # other processes may hold its lock for a while
        return {key: Verdict(*value) for key, value in found.items()}

    async def _from_judge(self, requests: Mapping[str, dict[str, Any]]) -> dict[str, Verdict]:
        if not requests:
            return {}
        async with self.endpoint.session() as session:
            verdicts = await gather_all(self._ask(session, key, body) for key, body in requests.items())
        return dict(zip(requests, verdicts, strict=True))

    async def _ask(self, session: JsonSession, key: str, body: dict[str, Any]) -> Verdict:
        """The verdict on one request, in the cache by the time it is returned."""
        clock = asyncio.get_running_loop().time
        start = clock()
        try:
            score, reason = await self._scored(session, body)
        except (RemoteRewardError, NoScoreError) as error:
            status = getattr(error, "status", None) or 0
            if status in _EVERY_ROW or 300 <= status < 400:
                raise
            return Verdict(math.nan, f"{_UNSCORED}{error}", clock() - start)
        verdict = Verdict((score - self.scale[0]) / (self.scale[1] - self.scale[0]), reason)
        if self.cache is not None:
            try:
                await asyncio.to_thread(self.cache.put, key, verdict[:2])
            except OSError as error:  # the answer is here and paid for
                log.warning("reward %s: %s", self.__name__, error)
        return verdict._replace(seconds=clock() - start)

    async def _scored(self, session: JsonSession, body: dict[str, Any]) -> tuple[float, str]:
        """Score on the scale and reason, after as many reminders as it takes."""
        messages = body["messages"]
        for reminders in count():
            content = _content(await session.post({**body, "messages": messages}))
            try:
                return parse_verdict(content, self.scale)
            except NoScoreError as error:
                if reminders == self.retries:
                    raise NoScoreError(f"{reminders + 1} replies, the last with {error}") from error
            # asked the same again, a judge at temperature 0 would give the same reply
            reminder = {"role": "user", "content": on_scale(REMINDER, self.scale)}
            messages = [*body["messages"], {"role": "assistant", "content": content}, reminder]

    def _warn(self, verdicts: Sequence[Verdict]) -> None:
        failed = [i for i, verdict in enumerate(verdicts) if math.isnan(verdict.score)]
        if failed:
            shown = "; ".join(f"row {i}: {verdicts[i].reason.removeprefix(_UNSCORED)}" for i in failed[:_SHOWN])
            more = f"; and {len(failed) - _SHOWN} more" if len(failed) > _SHOWN else ""
            counts = f"{len(failed)} of {len(verdicts)} rows not scored"
            log.warning("reward %s: %s: %s%s", self.__name__, counts, shown, more)


def _transcript(prompt: Any) -> str:
    """A prompt as text: that of its only message, or all messages with their roles."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1:
        return str(prompt[0]["content"])
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt)


def _content(reply: Any) -> str:
    """The text of a chat completion; "" if there is none, as when a reasoning model runs out of tokens."""
    try:
        return reply["choices"][0]["message"]["content"] or ""
    except (KeyError, IndexError, TypeError):
        return ""
