"""OpenAI's chat completions: requests to calls, and replies to responses or streams of chunks.

Source of the format: the OpenAI API reference, "Chat Completions".
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torchrl_rloo.agents.session import Ask, Reply
from torchrl_rloo.data.templates import Messages
from torchrl_rloo.runtime.http import MAX_DEPTH, is_deep

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
# Parameters that change what is sampled. The policy's own settings hold, so that log-probs refer to its distribution
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "logit_bias", "seed")
MAX_CHOICES = 16
_MAX_NUMBER = 2**31 - 1


class FormatError(ValueError):
    """Request that is not of the format, or asks for what the endpoint does not have."""


def read_messages(value: Any) -> Messages:
    """Return the messages of a request, as chat templates take them."""
    if not isinstance(value, list) or not value:
        raise FormatError(f"messages={value!r:.100} must be a list with at least one message")
    return [_read_message(message, i) for i, message in enumerate(value)]


def _read_message(message: Any, i: int) -> dict[str, Any]:
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str) or role not in _ROLES:
        raise FormatError(f"messages[{i}].role={role!r:.50} must be one of {sorted(_ROLES)}")
    read: dict[str, Any] = {"role": "system" if role == "developer" else role}
    read["content"] = _read_content(message.get("content"), role, f"messages[{i}].content")
    if role == "assistant":
        if calls := message.get("tool_calls"):
            read["tool_calls"] = [
                _read_call(call, f"messages[{i}].tool_calls") for call in read_list(calls, "tool_calls")
            ]
    for name in ("name", "tool_call_id"):
        if (text := message.get(name)) is not None:
            if not isinstance(text, str):
                raise FormatError(f"messages[{i}].{name} must be text")
            read[name] = text
    return read


def _read_content(content: Any, role: str, what: str) -> str | list[dict[str, str]]:
    """Return a content as text, or if it has images, as parts of text and ``data:`` URIs."""
    parts = content if isinstance(content, list) and role in ("user", "tool") else []
    images = [isinstance(part, dict) and part.get("type") in ("image_url", "input_image") for part in parts]
    if not any(images):
        return read_text(content, what)
    return [
        image_part(part.get("image_url"), what) if is_image else {"type": "text", "text": read_text([part], what)}
        for part, is_image in zip(parts, images, strict=True)
    ]


def image_part(image: Any, what: str) -> dict[str, str]:
    """Return an image that a request contains as a part of a message."""
    url = image.get("url") if isinstance(image, dict) else image
    if not isinstance(url, str) or url[:5].lower() != "data:":
        raise FormatError(f"{what} has the image {url!r:.100}; nothing is downloaded or read: send a data: URI")
    return {"type": "image", "url": url}


def read_text(content: Any, what: str) -> str:
    """Return the text of a message's content: text, or parts of text. None is empty."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for part in read_list(content, what):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "input_text", "output_text", "refusal"):
            raise FormatError(f"{what} has a part of type {kind!r:.50}; only the user and tools may send images")
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise FormatError(f"{what} has a part without text")
        texts.append(text)
    return "".join(texts)


def _read_call(call: Any, what: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise FormatError(f"{what} must be calls of functions with a name")
    arguments = function.get("arguments") or "{}"
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        raise FormatError(f"{what} has arguments that are not JSON: {arguments!r:.100}") from None
    if not isinstance(arguments, dict) or is_deep(arguments, MAX_DEPTH):
        raise FormatError(f"{what} has arguments that are not a JSON object of at most {MAX_DEPTH} levels")
    named = {"name": function["name"], "arguments": arguments}
    return {"id": str(call.get("id", "")), "type": "function", "function": named}


def read_tools(value: Any) -> list[dict[str, Any]] | None:
    """Return the schemas of a request's tools, or None."""
    if not value:
        return None
    tools = read_list(value, "tools")
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise FormatError(f"tools has {tool!r:.100}; each must be a function with a name")
    return tools


def read_request(body: Mapping[str, Any]) -> tuple[Ask, int]:
    """Return the call of a request, and its number of choices."""
    choice, form = body.get("tool_choice", "auto"), body.get("response_format") or {"type": "text"}
    if choice not in ("auto", "none", None):
        raise FormatError(f"tool_choice={choice!r:.100} must be 'auto' or 'none': the policy is not constrained")
    if not isinstance(form, dict) or form.get("type") != "text":
        raise FormatError(f"response_format={form!r:.100} must be of type 'text': the policy is not constrained")
    choices = positive(body.get("n"), "n") or 1
    if choices > MAX_CHOICES:
        raise FormatError(f"n={choices} must be at most {MAX_CHOICES}")
    limits = (positive(body.get(name), name) for name in ("max_completion_tokens", "max_tokens"))
    limit = min(filter(None, limits), default=None)
    tools = None if choice == "none" else read_tools(body.get("tools"))
    return Ask(read_messages(body.get("messages")), tools, limit), choices


def positive(value: Any, what: str) -> int | None:
    """Return a positive integer of a request, or None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MAX_NUMBER:
        raise FormatError(f"{what}={value!r:.50} must be an integer from 1 to {_MAX_NUMBER}")
    return value


def read_list(value: Any, what: str) -> list[Any]:
    """Return a value that must be a list."""
    if not isinstance(value, list):
        raise FormatError(f"{what} must be a list, got {type(value).__name__}")
    return value


def response(replies: Sequence[Reply], model: str, number: str, tokenizer: Any, log_probs: bool) -> dict[str, Any]:
    """Return the response to a request."""
    choices = [
        {
            "index": i,
            "message": reply.message | {"content": reply.message["content"] or None},
            "finish_reason": reply.finish,
            "logprobs": _log_probs(reply, tokenizer) if log_probs else None,
        }
        for i, reply in enumerate(replies)
    ]
    return _envelope("chat.completion", model, number) | {"choices": choices, "usage": usage(replies)}


def chunks(
    replies: Sequence[Reply], model: str, number: str, tokenizer: Any, log_probs: bool, with_usage: bool
) -> Iterator[dict[str, Any]]:
    """Yield the response as chunks of a stream; see :func:`response`.

    A reply is complete before it is sent, so each choice has one chunk of content.
    """
    head = _envelope("chat.completion.chunk", model, number)
    for i, reply in enumerate(replies):
        delta = dict(reply.message)
        if "tool_calls" in delta:
            delta["tool_calls"] = [{"index": k} | call for k, call in enumerate(delta["tool_calls"])]
        shown = {"logprobs": _log_probs(reply, tokenizer)} if log_probs else {}
        yield head | {"choices": [{"index": i, "delta": delta, "finish_reason": None} | shown]}
        yield head | {"choices": [{"index": i, "delta": {}, "finish_reason": reply.finish}]}
    if with_usage:
        yield head | {"choices": [], "usage": usage(replies)}


def usage(replies: Sequence[Reply]) -> dict[str, int]:
    """Return the numbers of tokens of a response."""
    prompt, sampled = replies[0].prompt_tokens, sum(len(reply.call.sampled.tokens) for reply in replies)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _envelope(kind: str, model: str, number: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{number}", "object": kind, "created": int(time.time()), "model": model}


def _log_probs(reply: Reply, tokenizer: Any) -> dict[str, Any]:
    content = []
    for token, value in zip(reply.call.sampled.tokens.tolist(), reply.call.sampled.log_probs.tolist(), strict=True):
        text = tokenizer.decode([token])
        content.append({"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []})
    return {"content": content}
