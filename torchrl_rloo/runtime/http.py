"""Replies over HTTP: a limit for their size, strict JSON, and messages without secrets."""

from __future__ import annotations

import asyncio
import base64
import html
import json
import math
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from torchrl_rloo.runtime.masking import MASK

MAX_DEPTH = 100  # of nested arrays and objects
ENCODINGS = "gzip, deflate"  # that read_body unpacks
_CHUNK_BYTES = 1 << 16
_LARGE = 1 << 16  # characters that are decoded on another thread
_MAX_MESSAGE = 1000
_SCHEMES = frozenset({"basic", "bearer", "digest", "token", "application/json"})
_MIN_SECRET = 4  # characters; shorter values of headers and URLs are not masked


class ReplyError(ValueError):
    """Reply that is no JSON, or not of the form that is read."""


class OversizedReplyError(ReplyError):
    """Reply above the limit."""


async def read_body(reply: Any, max_bytes: int) -> bytes:
    """Return the unpacked body of an aiohttp reply, whose session must not unpack by itself."""
    encoding = reply.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("identity", "gzip", "deflate"):
        raise ReplyError(f"Content-Encoding={encoding[:40]!r} must be one of: identity, {ENCODINGS}")
    unpacker = (
        None if encoding == "identity" else zlib.decompressobj(zlib.MAX_WBITS | (32 if encoding == "gzip" else 0))
    )
    body, packed = bytearray(), 0
    async for chunk in reply.content.iter_chunked(_CHUNK_BYTES):
        packed += len(chunk)
        body += chunk if unpacker is None else _unpack(unpacker, chunk, max_bytes + 1 - len(body))
        if max(packed, len(body)) > max_bytes:
            raise OversizedReplyError(f"the reply has more than max_bytes={max_bytes}; raise max_bytes")
    if unpacker is not None and not unpacker.eof and packed:
        raise ReplyError(f"the {encoding} data ends early")
    return bytes(body)


def _unpack(unpacker: Any, chunk: bytes, limit: int) -> bytes:
    try:
        unpacked = unpacker.decompress(chunk, limit)
    except zlib.error as error:
        raise ReplyError(f"broken compressed data: {error}") from None
    if unpacker.unused_data:
        raise ReplyError("data after the end of the compressed data")
    return unpacked


async def decode(body: bytes, load: Callable[[bytes], Any]) -> Any:
    """Return ``load(body)``, found on another thread if the body is large."""
    return load(body) if len(body) <= _LARGE else await asyncio.to_thread(load, body)


def plain_json(body: bytes) -> Any:
    """Return the value of a JSON text as Python reads it, or raise ReplyError."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ReplyError(f"no JSON: {error}") from None


def strict_json(body: bytes) -> Any:
    """Return the value of a JSON text, or raise ReplyError.

    Refused are deep nesting, repeated keys, numbers that no float can hold, and half of a surrogate pair.
    """
    try:
        text = body.decode()
        value = json.loads(
            text, object_pairs_hook=_object, parse_int=_integer, parse_float=_number, parse_constant=_number
        )
        if is_deep(value, MAX_DEPTH):
            raise RecursionError
        if re.search(r"\\u[dD][89a-fA-F]", text):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise ReplyError(f"no UTF-8 at byte {error.start}") from None
    except UnicodeEncodeError:
        raise ReplyError("half of a surrogate pair") from None
    except ReplyError:
        raise
    except RecursionError:
        raise ReplyError(f"the JSON must be nested at most {MAX_DEPTH} deep") from None
    except ValueError as error:
        raise ReplyError(f"no JSON: {error}") from None
    return value


def is_deep(value: Any, limit: int) -> bool:
    """Return whether lists and dicts are nested deeper than a limit, at which their use may exhaust the stack."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(limit):
        children = (child for parent in level for child in (parent.values() if isinstance(parent, dict) else parent))
        level = [child for child in children if isinstance(child, dict | list)]
    return bool(level)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ReplyError("an object repeats a key")
    return found


def _integer(text: str) -> int:
    if (digits := len(text.lstrip("-"))) > 300:
        raise ReplyError(f"an integer of {digits} digits must have at most 300")
    return int(text)


def _number(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ReplyError(f"number={text[:20]} must be finite")
    return value


class Redactor:
    """Function that masks the secrets of a request in messages, in many spellings.

    It knows values that are plain, split by white space, escaped for URLs, JSON or HTML, or in Base64 or hexadecimals.
    Case does not matter.
    """

    def __init__(self, url: str, headers: Mapping[str, str], keys: Iterable[str | None] = ()):
        secrets = {key for key in keys if key} | {s for s in _secrets(url, headers) if len(s) >= _MIN_SECRET}
        patterns = [pattern for secret in sorted(secrets, key=len, reverse=True) for pattern in _patterns(secret)]
        self._pattern = re.compile("|".join(patterns), re.IGNORECASE) if patterns else None

    def __call__(self, text: str) -> str:
        """Return a text with masks instead of secrets."""
        return text if self._pattern is None else self._pattern.sub(MASK, text)

    def line(self, text: str) -> str:
        """Return the redacted text as one line of limited length."""
        return " ".join(self(text[: 20 * _MAX_MESSAGE]).split())[:_MAX_MESSAGE]


def _secrets(url: str, headers: Mapping[str, str]) -> set[str]:
    parts = urlsplit(url)
    userinfo = parts.netloc.rpartition("@")[0]
    found = {userinfo, *userinfo.split(":", 1)} | {value for _, value in parse_qsl(parts.query)}
    found |= {pair.partition("=")[2] for pair in re.split("[&;]", parts.query)}
    for value in headers.values():
        found |= {value, *re.split(r"[\s,;=:]+", value)}
    found |= {_decoded(value) for value in list(found)}
    found |= {part for value in list(found) for part in value.split(":", 1)}
    return {value for secret in found for value in (secret, unquote(secret)) if value.lower() not in _SCHEMES}


def _decoded(value: str) -> str:
    """Return the text of credentials in Base64; "" if they are none."""
    try:
        text = base64.b64decode(value + "=" * (-len(value) % 4), validate=True).decode()
    except ValueError:
        return ""
    return text if text.isprintable() and ":" in text else ""


def _patterns(secret: str) -> list[str]:
    """Return regular expressions for the spellings of a secret."""
    between = r"(?:\s|\\{1,8}[nrt]|\\{0,8}[\"'+]){0,80}"
    found = [between.join(map(_spellings, secret))]
    data = secret.encode(errors="surrogateescape")
    if len(data) >= 6:
        found.append(between.join(data.hex()))
        for shift in range(3):  # of the text around it
            whole = base64.b64encode(bytes(shift) + data).decode().rstrip("=")
            inner = whole[math.ceil(shift * 8 / 6) : (shift + len(data)) * 8 // 6]
            found.append(
                between.join("[+-]" if c == "+" else "[/_]" if c == "/" else c for c in inner) + "[A-Za-z0-9=]?"
            )
    return found


def _spellings(character: str) -> str:
    code, data = ord(character), character.encode(errors="surrogateescape")
    escaped = "".join(f"%{byte:02x}" for byte in data)
    spelled = [escaped, escaped.replace("%", "%25"), rf"\\{{1,8}}u{code:04x}", rf"\\{{1,8}}x{code:02x}"]
    spelled += [f"&#0{{0,8}}{code};", f"&#x0{{0,8}}{code:x};", rf"\\{{0,8}}{re.escape(character)}"]
    spelled += [re.escape(html.escape(character))] if html.escape(character) != character else []
    return f"(?:{'|'.join(spelled)})"
