"""Hostile replies over real sockets to the client of remote rewards, from a corpus that a seed mutates."""

from __future__ import annotations

import asyncio
import base64
import gzip
import html
import json
import os
import random
import re
import resource
import socket
import threading
import traceback
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote, unquote

from torchrl_rloo.rewards.remote import JsonEndpoint, RemoteRewardError

KEY = "sk-Wire+Secret/Key=42~"
SECRETS = {
    "key": KEY,
    "header": "hdr-Secret-Value-77",
    "user": "us3r-of-the-Url",
    "password": "p4ss&w0rd<in>url",
    "query": "query-S3cret-19",
}
VARIABLE = "ATTACKED_KEY"
MAX_BYTES = 100_000
TIMEOUT = 2.0  # seconds of an attempt
Reply = Callable[[random.Random], bytes]


def disguised(rng: random.Random) -> str:
    """Return a secret in a spelling of an echo."""
    secret = rng.choice(list(SECRETS.values()))
    wrapped = "\n ".join(secret[i : i + 5] for i in range(0, len(secret), 5))
    forms = [
        secret, secret.upper(), quote(secret, safe=""), quote(quote(secret, safe=""), safe=""), json.dumps(secret),
        json.dumps(json.dumps(secret)), html.escape(secret), wrapped, wrapped.replace("\n", "\r\n\t"), repr(secret),
        base64.b64encode(secret.encode()).decode(), base64.urlsafe_b64encode(secret.encode()).decode(),
        base64.b64encode(f"user:{secret}".encode()).decode(), base64.b64encode(f"x{secret}yz".encode()).decode(),
        secret.encode().hex(), secret.encode().hex().upper(), "".join(f"\\u{ord(c):04X}" for c in secret),
        "".join(f"%{ord(c):02X}" for c in secret), "".join(f"&#{ord(c)};" for c in secret),
        "".join(f"\\x{ord(c):02x}" for c in secret), f"Bearer {secret}", f"https://u:{secret}@h/?k={secret}",
        '" + "'.join((secret[:4], secret[4:])),
    ]  # fmt: skip
    return rng.choice(forms)


def response(body: bytes, *headers: str, status: str = "200 OK", length: int | None = None) -> bytes:
    lines = [f"HTTP/1.1 {status}", *headers, f"Content-Length: {len(body) if length is None else length}", "", ""]
    return "\r\n".join(lines).encode("utf-8", "surrogateescape") + body


def chunked(*parts: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + end


def flat(text: str) -> str:
    return " ".join(text.split())


def packed(kind: str, size: int) -> bytes:
    data = b"[" + b"0," * (size // 2) + b"0]"
    if kind == "gzip":
        return gzip.compress(data, 9)
    return zlib.compress(data, 9)


CORPUS: dict[str, Reply] = {
    "right": lambda r: response(b'{"rewards": [1.0]}'),
    "gzip": lambda r: response(gzip.compress(b"[1]"), "Content-Encoding: gzip"),
    "bomb": lambda r: response(packed("gzip", r.choice((1, 30)) * 1_000_000), "Content-Encoding: gzip"),
    "deflate bomb": lambda r: response(packed("zlib", 5_000_000), "Content-Encoding: deflate"),
    "two members": lambda r: response(gzip.compress(b"[1]") * r.randint(2, 500), "Content-Encoding: gzip"),
    "cut gzip": lambda r: response(gzip.compress(b"[1]" * 99)[: r.randint(0, 30)], "Content-Encoding: gzip"),
    "no gzip": lambda r: response(r.randbytes(200), "Content-Encoding: gzip"),
    "encoding": lambda r: response(
        b"[1]", "Content-Encoding: " + r.choice(("br", "zstd", "gzip, gzip", "GZIP", "x", flat(disguised(r))))
    ),
    "large": lambda r: response(b" " * (MAX_BYTES + 1)),
    "long chunks": lambda r: chunked(*[b"9" * 60_000] * 40, end=b""),
    "chunk sizes": lambda r: chunked(b"[1]", end=r.choice((b"fffffffffffffffff\r\n", b"-1\r\n", b"zz\r\n", b"0\r\n"))),
    "length above": lambda r: response(b"[1]", length=r.choice((4, 10**6, 10**30))),
    "length below": lambda r: response(b"[1, 2, 3]", length=r.choice((0, 1, 3))),
    "length strange": lambda r: response(b"[1]", "Content-Length: " + r.choice(("-1", "x", "3, 4", disguised(r)))),
    "status": lambda r: response(b"[1]", status=r.choice(("99 x", "1000 x", "100 Continue", "600 ?", "204", "-1 x"))),
    "reason": lambda r: response(b"no", status=f"{r.choice((400, 401, 429, 503))} {flat(disguised(r))}"),
    "location": lambda r: response(b"", f"Location: http://x/{flat(disguised(r))}", status="307 Moved"),
    "echo": lambda r: response(disguised(r).encode() * r.randint(1, 3), status=f"{r.choice((400, 500))} no"),
    "echo in JSON": lambda r: response(json.dumps({"error": disguised(r)}).encode(), status="422 no"),
    "late echo": lambda r: response(b"x" * r.randint(900, 1010) + disguised(r).encode(), status="400 no"),
    "echo as a value": lambda r: response(json.dumps([disguised(r)]).encode()),
    "broken echo": lambda r: response(b"{" + disguised(r).encode()),
    "bad header": lambda r: response(b"[1]", disguised(r)),
    "retry": lambda r: response(b"", f"Retry-After: {r.choice(('9' * 400, 'nan', flat(disguised(r))))}", status="429"),
    "deep": lambda r: response(r.choice((b"[", b'{"a":')) * r.choice((101, 2_000, 15_000))),
    "deep, closed": lambda r: response(b"[" * 990 + b"]" * 990),
    "integer": lambda r: response(b"[" + b"9" * r.choice((301, 400, 5_000, 50_000)) + b"]"),
    "float": lambda r: response(r.choice((b"[1e999]", b"[-1e999]", b"[NaN]", b"[Infinity]", b'{"a": -Infinity}'))),
    "repeated key": lambda r: response(b'{"rewards": [0], "rewards": [1]}'),
    "surrogate": lambda r: response(
        r.choice((rb'["\ud800"]', rb'["\uDFFF x"]', rb'{"\uD800": 1}', rb'["\udc00\ud800"]'))
    ),
    "no UTF-8": lambda r: response(
        r.choice((b'["\xff"]', b'["\xed\xa0\x80"]', b'["\xc0\xaf"]', b"\xff\xfe[\x001\x00"))
    ),
    "empty": lambda r: response(b""),
    "nothing": lambda r: b"",
    "noise": lambda r: r.randbytes(r.randint(1, 3_000)),
    "other protocol": lambda r: r.choice(
        (b"SSH-2.0-x\r\n", b"\x16\x03\x01\x00\x05", b"220 mail\r\n", b"HTTP/9.9 200 x\r\n\r\n")
    ),
    "many headers": lambda r: response(b"[1]", *(f"X-{i}: {i}" for i in range(r.choice((100, 5_000))))),
    "long header": lambda r: response(b"[1]", "X: " + "x" * r.choice((8_000, 200_000))),
    "header without end": lambda r: b"HTTP/1.1 200 OK\r\nX: " + b"x" * 300_000,
    "pause": lambda r: b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n[",
}  # fmt: skip
MUTATIONS: dict[str, Callable[[random.Random, bytes], bytes]] = {
    "none": lambda r, data: data,
    "cut": lambda r, data: data[: r.randint(0, len(data))],
    "flip": lambda r, data: _flipped(r, data),
    "twice": lambda r, data: data + data,
    "insert": lambda r, data: data[: (at := r.randint(0, len(data)))] + disguised(r).encode() + data[at:],
    "newlines": lambda r, data: data.replace(b"\r\n", b"\n", r.randint(1, 5)),
}


def _flipped(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(min(len(data), rng.randint(1, 8))):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


@contextmanager
def hostile_server() -> Iterator[tuple[int, list[bytes], list[int]]]:
    """Yield a port, a list whose last entry answers each request, and the numbers of the entries that did."""
    asked: list[int] = []
    replies: list[bytes] = [b""]
    held: list[socket.socket] = []

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            try:
                if not connection.recv(1 << 16):
                    raise ConnectionError("no request")
                asked.append(len(replies))
                connection.sendall(replies[-1])
                if replies[-1].endswith(b"\r\n["):
                    held.append(connection)  # never ends
                    continue
                connection.shutdown(socket.SHUT_WR)
                connection.settimeout(0.05)
                connection.recv(1)  # otherwise unread data would reset the connection
            except OSError:
                pass
            if connection not in held:
                connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1], replies, asked
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(30)
        for connection in held:
            connection.close()


def endpoint_of(port: int, user: bool) -> JsonEndpoint:
    """Return an endpoint with secrets in its headers and query, and a user and password or a key."""
    userinfo = f"{quote(SECRETS['user'], safe='')}:{quote(SECRETS['password'], safe='')}@" if user else ""
    url, variable = f"http://{userinfo}127.0.0.1:{port}/score?token={SECRETS['query']}", None if user else VARIABLE
    headers = {"X-Team-Token": SECRETS["header"]}
    return JsonEndpoint(url, TIMEOUT, 2 * TIMEOUT, 0, headers=headers, api_key_env=variable, max_bytes=MAX_BYTES)


async def _post(endpoint: JsonEndpoint) -> Any:
    async with endpoint.session() as session:
        return await session.post({"completions": ["4"]})


def chain_of(error: BaseException) -> str:
    """Return everything that a log could show of an error and those behind it."""
    shown, todo, seen = [], [error], set()
    while todo:
        one = todo.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        shown += [str(one), repr(one), repr(one.args), repr(vars(one))]
        todo += [one.__cause__, one.__context__]
    return "\n".join([*shown, *traceback.format_exception(error)])


def leaks(text: str) -> list[str]:
    """Return the names of the secrets that someone could read from a text."""
    plain = [text]
    for _ in range(2):
        plain.append(html.unescape(unquote(re.sub(r"\\[ux]0*([0-9a-fA-F]{2})", r"%\1", plain[-1]))))
    for token in re.findall(r"[A-Za-z0-9+/_-]{8,}", text):
        for skip in range(4):
            part = token[skip:].replace("-", "+").replace("_", "/")
            part = part[:-1] if len(part) % 4 == 1 else part + "=" * (-len(part) % 4)
            plain.append(base64.b64decode(part).decode("latin-1"))
        if re.fullmatch("[0-9a-fA-F]+", token):
            plain.append(bytes.fromhex(token[: len(token) // 2 * 2]).decode("latin-1"))
    seen = [re.sub(r"[\s\\\"'+]", "", one).lower() for one in plain]
    return [name for name, secret in SECRETS.items() if any(secret.replace("+", "").lower() in one for one in seen)]


def strike(port: int, replies: list[bytes], reply: bytes) -> str | None:
    """Send one hostile reply to a request, and return what went wrong; None if it was contained."""
    replies.append(reply)
    user = len(replies) % 2 == 0
    secrets = SECRETS.keys() - ({"key"} if user else {"user", "password"})
    endpoint = endpoint_of(port, user)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        value = asyncio.run(_post(endpoint))
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except RemoteRewardError as error:
        if found := secrets.intersection(leaks(chain_of(error))):
            return f"shows the {found}: {error}"
        if len(str(error).splitlines()) != 1 or len(str(error)) > 2_000:
            return f"no single line: {error!s:.200}"
    except BaseException as error:
        return f"{type(error).__name__}: {error!s:.200}"
    if (grown := resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) > 20_000:
        return f"took {grown} kB"
    return None


def attack(count: int, seed: int) -> dict[str, Any]:
    """Send ``count`` hostile replies, and return the numbers of tried and contained ones, and the failures."""
    os.environ[VARIABLE] = KEY
    rng, failures = random.Random(seed), []
    try:
        with hostile_server() as (port, replies, asked):
            for number in range(count):
                name = rng.choice([name for name in CORPUS if name != "pause"])  # takes the whole time-out
                mutation = rng.choice(list(MUTATIONS))
                problem = strike(port, replies, MUTATIONS[mutation](rng, CORPUS[name](rng)))
                if len(replies) not in asked[-2:]:
                    problem = f"never sent: {problem}"
                if problem is not None:
                    failures.append(f"seed={seed} number={number} {name}, {mutation}: {problem}")
    finally:
        del os.environ[VARIABLE]
    return {"tried": count, "contained": count - len(failures), "failures": failures}
