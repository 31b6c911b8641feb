from __future__ import annotations

import asyncio
import math
import pickle
import threading
import time
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime

import pytest
from aiohttp import web

from torchrl_rloo.rewards.executors import ThreadExecutor
from torchrl_rloo.rewards.protocol import MalformedScoresError, RewardBatch, call_reward_async
from torchrl_rloo.rewards.remote import RemoteRewardError, RemoteScorer, _retry_after
from torchrl_rloo.rewards.runner import RewardRunner
from torchrl_rloo.runtime.lookup import is_async

TEXTS = ["a", "bb", "ccc", "dddd", "eeeee"]
HANG = 30


async def lengths(n, request, body):
    return {"rewards": [len(text) for text in body["completions"]]}


def score(scorer, completions=TEXTS, **columns):
    batch = RewardBatch(["?"] * len(completions), completions, [[1]] * len(completions), columns)
    return asyncio.run(call_reward_async(scorer, batch)).scores


def scorer_of(service, **settings):
    return RemoteScorer(service.url, **{"backoff": 0.01, **settings})


def test_scores_come_in_the_order_of_the_rows_whatever_the_order_of_the_replies(serve):
    async def slower_first(n, request, body):
        await asyncio.sleep(0.3 / n)
        return await lengths(n, request, body)

    service = serve(slower_first)
    assert score(scorer_of(service, batch_size=2)) == [1, 2, 3, 4, 5]
    assert sorted(len(body["prompts"]) for body in service.bodies) == [1, 2, 2]


def test_no_rows_need_no_request(serve):
    service = serve(lengths)
    assert score(scorer_of(service), []) == []
    assert service.bodies == []


def test_fields_name_what_is_sent_and_where_the_scores_are(serve):
    async def answer(n, request, body):
        return {"data": {"scores": [0.5, None]}}

    service = serve(answer)
    fields = {"query": "prompts+completions", "labels": "gold", "last": "final_text", "cut": "truncated"}
    reply = [{"role": "assistant", "content": "hm"}, {"role": "assistant", "content": "4"}]
    question = [{"role": "user", "content": "2+2?"}]
    batch = RewardBatch([question, "1+1="], [reply, "2"], [[1], [2]], {"gold": ["4", 2]}, [False, True])
    call = call_reward_async(scorer_of(service, fields=fields, scores_field="data.scores"), batch)
    assert asyncio.run(call).scores == [0.5, None]
    assert service.bodies == [
        {"query": [question + reply, "1+1=2"], "labels": ["4", 2], "last": ["4", "2"], "cut": [False, True]}
    ]


def test_a_reply_may_be_the_list_itself(serve):
    async def answer(n, request, body):
        return web.Response(text="[0.5, 1, null]", content_type="application/json")

    assert score(scorer_of(serve(answer), scores_field=None), TEXTS[:3]) == [0.5, 1, None]


@pytest.mark.parametrize("fault", ["500", "503", "429", "drop", "cut", "hang", "no json"])
def test_two_passing_faults_are_survived(serve, fault):
    async def answer(n, request, body):
        if n > 2:
            return await lengths(n, request, body)
        if fault.isdigit():
            return web.Response(status=int(fault))
        if fault == "no json":
            return web.Response(text="<html>one moment</html>")
        if fault == "drop":
            request.transport.abort()
        if fault == "cut":
            reply = web.StreamResponse(headers={"Content-Length": "1000"})
            await reply.prepare(request)
            await reply.write(b'{"rewards": [')
            request.transport.abort()
            return reply
        await asyncio.sleep(HANG if fault == "hang" else 0)
        return web.Response()

    service = serve(answer)
    limit = 5.0 if fault == "hang" else 60.0  # also the limit of the healthy answer
    assert score(scorer_of(service, timeout=limit, retries=2)) == [1, 2, 3, 4, 5]
    assert len(service.bodies) == 3


def test_gives_up_after_its_retries_with_the_servers_words(serve):
    async def answer(n, request, body):
        return web.Response(status=503, text="the model is loading")

    service = serve(answer)
    with pytest.raises(RemoteRewardError, match="3 attempts failed.*503.*the model is loading") as caught:
        score(scorer_of(service, retries=2))
    assert len(service.bodies) == 3 and caught.value.status == 503
    assert pickle.loads(pickle.dumps(caught.value)).status == 503


def test_total_timeout_ends_a_request_that_hangs(serve):
    async def answer(n, request, body):
        await asyncio.sleep(HANG)

    start = time.monotonic()
    with pytest.raises(RemoteRewardError, match=r"no answer within.*total_timeout=0.5"):
        score(scorer_of(serve(answer), timeout=0.2, total_timeout=0.5, retries=1000))
    assert time.monotonic() - start < 30


def test_waits_as_long_as_the_server_asks(serve):
    times = []

    async def answer(n, request, body):
        times.append(time.monotonic())
        return web.Response(status=429, headers={"Retry-After": "1"}) if n == 1 else await lengths(n, request, body)

    assert score(scorer_of(serve(answer))) == [1, 2, 3, 4, 5]
    assert times[1] - times[0] >= 0.99


def test_a_wait_past_the_time_limit_is_not_begun(serve):
    async def answer(n, request, body):
        return web.Response(status=429, headers={"Retry-After": "3600"}, text="quota")

    start = time.monotonic()
    with pytest.raises(RemoteRewardError, match="quota.*3.6e"):
        score(scorer_of(serve(answer)))
    assert time.monotonic() - start < 30


def test_retry_after_is_seconds_or_a_date():
    soon = datetime.now(timezone.utc) + timedelta(seconds=100)
    assert 98 < _retry_after(format_datetime(soon, usegmt=True)) <= 100
    past = soon - timedelta(days=1)
    assert [_retry_after(v) for v in (None, "", "-5", "soon", "nan", "inf", "2", " 1.5 ")] == [0, 0, 0, 0, 0, 0, 2, 1.5]
    assert _retry_after(format_datetime(past, usegmt=True)) == 0


@pytest.mark.parametrize("status", [400, 401, 404, 422])
def test_a_refusal_fails_at_once_with_the_servers_words(serve, status):
    async def answer(n, request, body):
        return web.Response(status=status, text="unknown field 'prompts'")

    service = serve(answer)
    with pytest.raises(RemoteRewardError, match=f"{status}.*unknown field 'prompts'"):
        score(scorer_of(service))
    assert len(service.bodies) == 1


def test_redirects_are_not_followed(serve):
    other = serve(lengths)

    async def answer(n, request, body):
        return web.Response(status=307, headers={"Location": other.url})

    with pytest.raises(RemoteRewardError, match=f"redirects to {other.url}"):
        score(scorer_of(serve(answer)))
    assert other.bodies == []


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        ({"rewards": [1, 2]}, "2 scores for 5 rows"),
        ({"rewards": ["1"] * 5}, "numbers or nulls"),
        ({"rewards": [True] * 5}, "numbers or nulls"),
        ({"rewards": {"0": 1}}, "numbers or nulls"),
        ({"scores": [1] * 5}, "no 'rewards' in the reply.*scores_field"),
        ([1] * 5, "no 'rewards'"),
    ],
)
def test_replies_of_another_form_are_errors_at_once(serve, reply, words):
    async def answer(n, request, body):
        return reply

    service = serve(answer)
    with pytest.raises(MalformedScoresError, match=words):
        score(scorer_of(service))
    assert len(service.bodies) == 1


def test_one_refused_request_ends_the_others(serve):
    async def answer(n, request, body):
        if body["completions"] == ["a"]:
            return web.Response(status=400, text="bad row")
        await asyncio.sleep(HANG)

    start = time.monotonic()
    with pytest.raises(RemoteRewardError, match="bad row"):
        score(scorer_of(serve(answer), batch_size=1))
    assert time.monotonic() - start < 30


def test_requests_overlap_up_to_the_limit(serve):
    async def answer(n, request, body):
        while service.most < 4:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)  # time for a fifth request, if there were no limit
        return await lengths(n, request, body)

    service = serve(answer)
    scorer = scorer_of(service, batch_size=1, concurrency=4)
    assert score(scorer, TEXTS * 4) == [1, 2, 3, 4, 5] * 4
    assert service.most == 4
    service.most, runner = 0, RewardRunner(scorer, executor=ThreadExecutor(1, 60.0), deduplicate=False)
    batch = RewardBatch(["?"] * 20, TEXTS * 4, [[1]] * 20)
    # The limit also holds for calls with one row each
    assert runner(batch).scores == [[1, 2, 3, 4, 5] * 4] and service.most == 4
    runner.close()


def test_the_key_is_read_at_the_call_and_kept_nowhere(serve, monkeypatch):
    async def answer(n, request, body):
        if n == 2:
            return web.Response(status=400, text=f"bad key {request.headers['Authorization']}")
        return await lengths(n, request, body)

    service = serve(answer)
    scorer = scorer_of(service, api_key_env="SCORER_KEY", headers={"X-Team": "blue"})
    monkeypatch.delenv("SCORER_KEY", raising=False)
    with pytest.raises(RemoteRewardError, match="SCORER_KEY is not set"):
        score(scorer)
    monkeypatch.setenv("SCORER_KEY", "s3cret")
    score(scorer)
    assert service.headers[0]["Authorization"] == "Bearer s3cret" and service.headers[0]["X-Team"] == "blue"
    with pytest.raises(RemoteRewardError) as caught:
        score(scorer)
    assert "s3cret" not in str(caught.value) and "bad key Bearer ***" in str(caught.value)
    assert b"s3cret" not in pickle.dumps(scorer) and "s3cret" not in repr(vars(scorer))


def test_pickles_and_serves_several_loops_and_threads(serve):
    service = serve(lengths)
    scorer = pickle.loads(pickle.dumps(scorer_of(service, name="helpful")))
    assert scorer.__name__ == "helpful" and is_async(scorer)
    results = []
    threads = [threading.Thread(target=lambda: results.append(score(scorer))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert results == [[1, 2, 3, 4, 5]] * 4 and score(scorer) == [1, 2, 3, 4, 5]


def test_columns_have_to_be_there_and_json(serve):
    scorer = scorer_of(serve(lengths), fields={"labels": "gold"})
    with pytest.raises(KeyError, match="requires column 'gold'"):
        score(scorer)
    with pytest.raises(TypeError, match="object.*cannot be sent as JSON"):
        score(scorer, gold=[object()] * 5)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"url": "localhost:5000"}, "http://"),
        ({"fields": {}}, "fields={}"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"timeout": 0}, "timeout=0"),
        ({"total_timeout": math.inf}, "total_timeout=inf"),
        ({"retries": -1}, "retries=-1"),
        ({"concurrency": 0}, "concurrency=0"),
    ],
)
def test_settings_out_of_range(settings, named):
    with pytest.raises(ValueError, match=named):
        RemoteScorer(**{"url": "http://localhost:5000", **settings})
