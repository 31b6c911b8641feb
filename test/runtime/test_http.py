"""Replies over HTTP: limits before and after unpacking, strict JSON, and secrets in no error."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import logging
import os
import pickle
import random
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support import attacks_http
from support.attacks_http import CORPUS, KEY, MAX_BYTES, SECRETS, chunked, hostile_server, leaks, response, strike
from torchrl_rloo.engines.base import EngineError
from torchrl_rloo.engines.vllm_server import VLLMServer
from torchrl_rloo.rewards.judge import LLMJudge
from torchrl_rloo.rewards.protocol import MalformedScoresError
from torchrl_rloo.rewards.remote import JsonEndpoint, RemoteRewardError, RemoteScorer
from torchrl_rloo.rewards.runner import Quarantine
from torchrl_rloo.runtime.http import MAX_DEPTH, Redactor, ReplyError, strict_json


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(attacks_http.VARIABLE, KEY)


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[int, list[bytes], list[int]]]:
    with hostile_server() as made:
        yield made


def post(port: int, **settings: object) -> object:
    async def run() -> object:
        endpoint = JsonEndpoint(f"http://127.0.0.1:{port}", 20.0, 20.0, **{"retries": 0, **settings})
        async with endpoint.session() as session:
            return await session.post({})

    return asyncio.run(run())


@pytest.mark.parametrize("name", CORPUS)
def test_each_hostile_reply_is_contained(server, name: str):
    port, replies, asked = server
    for seed in range(1 if name == "pause" else 6):
        assert strike(port, replies, CORPUS[name](random.Random(seed))) is None, seed
        assert asked[-1] == len(replies)


@settings(derandomize=True, max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_mutated_replies_are_contained(seed: int):
    assert attacks_http.attack(8, seed)["failures"] == []


@pytest.mark.parametrize("secret", SECRETS)
def test_the_oracle_sees_every_disguise(secret: str):
    rng = random.Random(0)
    for _ in range(100):
        assert leaks(f"400 {attacks_http.disguised(rng)} there")
    assert leaks(SECRETS[secret]) == [secret] and not leaks("nothing of the kind")


def pack(data: bytes, coding: str) -> bytes:
    raw = zlib.compressobj(9, zlib.DEFLATED, 31 if coding == "gzip" else 15)
    return raw.compress(data) + raw.flush()


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_a_bomb_ends_at_the_limit_and_is_not_asked_for_again(server, coding: str):
    port, replies, asked = server
    replies.append(response(pack(b" " * 50_000_000, coding), f"Content-Encoding: {coding}"))
    before, began = len(asked), time.process_time()
    with pytest.raises(RemoteRewardError, match="more than max_bytes=1000000; raise max_bytes"):
        post(port, max_bytes=1_000_000, retries=5)
    assert len(asked) == before + 1 and time.process_time() - began < 5


@pytest.mark.parametrize("size", [MAX_BYTES - 1, MAX_BYTES, MAX_BYTES + 1])
@pytest.mark.parametrize("way", ["length", "chunked", "gzip", "deflate"])
def test_the_limit_is_exact(server, size: int, way: str):
    port, replies, _ = server
    body = b"[" + b" " * (size - 2) + b"]"
    replies.append(
        chunked(*(body[i : i + 999] for i in range(0, size, 999)))
        if way == "chunked"
        else response(body)
        if way == "length"
        else response(pack(body, way), f"Content-Encoding: {way}")
    )
    if size <= MAX_BYTES:
        assert post(port, max_bytes=MAX_BYTES) == []
    else:
        with pytest.raises(RemoteRewardError, match=f"more than max_bytes={MAX_BYTES}"):
            post(port, max_bytes=MAX_BYTES)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"[" * 100_000, f"must be nested at most {MAX_DEPTH} deep"),
        (b'{"a":' * 5_000 + b"1" + b"}" * 5_000, f"at most {MAX_DEPTH} deep"),
        (b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), f"at most {MAX_DEPTH} deep"),
        (b"9" * 5_000, "an integer of 5000 digits"),
        (b"[-1" + b"0" * 301 + b"]", "an integer of 302 digits"),
        (b"NaN", "number=NaN must be finite"),
        (b"[-Infinity]", "number=-Infinity"),
        (b"1e400", "number=1e400"),
        (b'{"a": 1, "a": 1}', "repeats a key"),
        (b'[{"x": {"a": 1, "b": 2, "\\u0061": 1}}]', "repeats a key"),
        (b'["\xff"]', "no UTF-8 at byte 2"),
        (b'["\xed\xa0\x80"]', "no UTF-8 at byte 2"),
        (rb'["\ud800"]', "surrogate"),
        (rb'{"\uDBFF": 1}', "surrogate"),
        (rb'"\udc00\ud800"', "surrogate"),
        (b"\xef\xbb\xbf[]", "no JSON"),
        (b"[1", "no JSON"),
        (b"", "no JSON"),
        (b"[1] [2]", "no JSON"),
    ],
)
def test_what_is_no_strict_json_is_named(body: bytes, words: str):
    with pytest.raises(ReplyError, match=words) as caught:
        strict_json(body)
    assert len(str(caught.value).splitlines()) == 1 and caught.value.__cause__ is None


@pytest.mark.parametrize(
    "value",
    [
        None,
        1.5,
        -(10**299),
        "\U0001f600",
        {"a": [{}] * 500},
        "[" * 500,
        '\\"[{' * 99,
        json.loads("[" * 100 + "]" * 100),
    ],
    ids=str,
)
def test_other_json_is_read(value: object):
    assert strict_json(json.dumps(value).encode()) == value
    assert strict_json(json.dumps(value, ensure_ascii=False).encode()) == value


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_json_or_an_error(body: bytes):
    try:
        json.dumps(strict_json(body), allow_nan=False)
    except ReplyError:
        pass


@pytest.mark.parametrize(
    ("url", "headers", "keys", "text"),
    [
        ("http://h", {}, [KEY], f"key {KEY}!"),
        ("http://h", {}, ["a" * 40], "a" * 20 + "\n" + "a" * 20),
        ("http://h", {"Authorization": "Bearer abc-1234"}, [], "bad token abc-1234"),
        ("http://h", {"Authorization": "Basic dXNlcjpzM2NyZXQ="}, [], "user s3cret"),
        ("http://h", {"Cookie": "sid=0123abcd; b=c"}, [], "sid 0123abcd"),
        ("http://u:p%40ss@h", {}, [], "p@ss or p%40ss"),
        ("http://h?sig=a%2Fb%2Bcd", {}, [], "a/b+cd or a%2fb%2bcd"),
        ("http://h", {}, ["pässwörd"], "p%C3%A4ssw%C3%B6rd p\\u00e4ssw\\u00f6rd pässwörd"),
        ("http://h", {}, ['q"uo\\te'], json.dumps('q"uo\\te') + repr('q"uo\\te')),
    ],
)
def test_secrets_are_masked(url: str, headers: dict, keys: list, text: str):
    shown = Redactor(url, headers, keys)(text)
    assert "***" in shown
    for piece in ("Wire", "a" * 10, "1234", "s3cret", "0123", "p@ss", "p%40", "a/b", "a%2f", "ssw", "uo"):
        assert piece not in shown


@pytest.mark.parametrize("filler", ["\\", " ", "s", "&#0", "%25", "sk-", "\\n", "c2st"])
def test_hostile_text_is_masked_in_little_time(filler: str):
    redact, began = Redactor("http://h", {"X": "s" * 60}, [KEY]), time.process_time()
    redact.line(filler * 100_000 + KEY)
    assert time.process_time() - began < 5


def test_no_secret_is_in_logs_files_or_pickles(server, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    port, replies, _ = server
    url = f"http://127.0.0.1:{port}?t={SECRETS['query']}"
    scorer = RemoteScorer(url, headers={"X": SECRETS["header"]}, api_key_env=attacks_http.VARIABLE, retries=0)
    judge = LLMJudge(f"http://127.0.0.1:{port}", "m", api_key_env=attacks_http.VARIABLE, retries=0)
    quarantine, shown = Quarantine(tmp_path / "bad.jsonl"), []
    echoes = [KEY, f"Bearer {KEY}", base64.b64encode(KEY.encode()).decode(), SECRETS["header"], SECRETS["query"]]
    for echo in echoes:
        for reply in (response(b"no", status=f"400 {echo}"), response(json.dumps({"error": echo}).encode())):
            replies.append(reply)
            with pytest.raises((RemoteRewardError, MalformedScoresError)) as caught:
                asyncio.run(scorer(["p"], ["c"], [[1]]))
            logging.getLogger("torchrl_rloo").error("failed", exc_info=caught.value)
            quarantine.add("remote", {"error": caught.value, "text": attacks_http.chain_of(caught.value)})
            shown.append(repr(pickle.loads(pickle.dumps(caught.value))))
    verdict = json.dumps({"reason": f"the key is {KEY}", "score": 5})
    replies.append(response(json.dumps({"choices": [{"message": {"content": verdict}}]}).encode()))
    tables: dict[str, list] = {}
    assert asyncio.run(judge(["p"], ["c"], [[1]], log_extra=tables.__setitem__)) == [0.5]
    files = [path.read_bytes().decode("latin-1") for path in tmp_path.rglob("*") if path.is_file()]
    assert files and leaks("\n".join([*shown, *files, caplog.text, repr(tables), repr(scorer.endpoint)])) == []


@pytest.mark.parametrize("value", ["line\nbreak-S3cret", "nül-\u4e2d-S3cret", "nul\0-S3cret"])
def test_a_key_that_no_header_can_hold_is_not_shown(server, value: str, monkeypatch: pytest.MonkeyPatch):
    if "\0" not in value:
        monkeypatch.setenv(attacks_http.VARIABLE, value)
    headers = {"X-Key": value}
    server[1].append(response(value.encode(), status="400 no"))
    with pytest.raises(RemoteRewardError) as caught:
        post(server[0], headers=headers, api_key_env=attacks_http.VARIABLE)
    assert "S3cret" not in attacks_http.chain_of(caught.value)


def test_a_bad_address_is_shown_without_its_password():
    with pytest.raises(ValueError, match=r"url='htp://\*\*\*@h'") as caught:
        JsonEndpoint("htp://user-name:pass-word@h")
    assert "pass-word" not in str(caught.value)


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_below_one_byte_is_refused(limit: int):
    with pytest.raises(ValueError, match=f"max_bytes={limit} must be at least 1"):
        JsonEndpoint("http://h", max_bytes=limit)


@pytest.mark.parametrize(
    "reply",
    [
        response(pack(b" " * 5_000_000, "gzip"), "Content-Encoding: gzip"),
        response(b"[" * 100_000, "Content-Type: application/json"),
        response(b"x" * (MAX_BYTES + 1)),
        response(b'{"error": {"message": "Bearer server-S3cret-key"}}', status="500 server-S3cret-key"),
        response(b"", "Location: http://x/?k=server-S3cret-key", status="307 to"),
        response(b"server-S3cret-key" * 9_000, status="400 no"),
        b"HTTP/1.1 2x0 server-S3cret-key\r\n\r\n",
        response(os.urandom(99), "Content-Encoding: gzip"),
    ],
    ids=["bomb", "deep", "large", "echo", "redirect", "large error", "no HTTP", "broken"],
)
def test_the_engine_of_a_server_has_the_same_limits(server, reply: bytes):
    port, replies, _ = server
    replies.append(reply)
    key = "-".join(("server", "S3cret", "key"))
    with pytest.raises(EngineError) as caught:
        VLLMServer(f"http://127.0.0.1:{port}", api_key=key, connect_timeout=1.0, max_bytes=MAX_BYTES)
    assert "S3cret" not in attacks_http.chain_of(caught.value)


def test_gzip_is_read(server):
    port, replies, _ = server
    replies.append(response(gzip.compress(b'{"a": 1}'), "Content-Encoding: gzip"))
    assert post(port) == {"a": 1}
