"""Anthropic's messages: requests to calls, and replies to responses or streams of events.

Source of the format: the Anthropic API reference, "Messages" and "Streaming messages".
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from torchrl_rloo.agents.chat_format import FormatError, image_part, positive, read_list
from torchrl_rloo.agents.session import Ask, Reply
from torchrl_rloo.data.templates import Messages

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def read_request(body: Mapping[str, Any]) -> Ask:
    """Return the call of a request."""
    choice = body.get("tool_choice") or {"type": "auto"}
    if not isinstance(choice, dict) or choice.get("type") not in ("auto", "none"):
        raise FormatError(
            f"tool_choice={choice!r:.100} must be of type 'auto' or 'none': the policy is not constrained"
        )
    if (sent := body.get("messages")) is None or not isinstance(sent, list) or not sent:
        raise FormatError("messages must be a list with at least one message")
    messages: Messages = []
    if system := body.get("system"):
        messages.append({"role": "system", "content": _text(system, "system")})
    for i, message in enumerate(sent):
        messages += _read_message(message, f"messages[{i}]")
    tools = (
        None if choice["type"] == "none" else [_read_tool(tool) for tool in read_list(body.get("tools") or [], "tools")]
    )
    return Ask(messages, tools or None, positive(body.get("max_tokens"), "max_tokens"))


def _read_message(message: Any, what: str) -> Messages:
    """Return the messages of one: results of tools are separate messages."""
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ("user", "assistant"):
        raise FormatError(f"{what}.role={role!r:.50} must be 'user' or 'assistant'")
    content = message.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise FormatError(f"{what}.content must be text or a list of blocks")
    texts, calls, results, images = [], [], [], False
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text" and isinstance(block.get("text"), str):
            texts.append({"type": "text", "text": block["text"]})
        elif kind == "image" and role == "user":
            source = block.get("source")
            if not isinstance(source, dict) or source.get("type") != "base64":
                raise FormatError(f"{what}.content has an image without data; nothing is downloaded: send base64")
            url = f"data:{source.get('media_type', '')};base64,{source.get('data', '')}"
            texts.append(image_part(url, f"{what}.content"))
            images = True
        elif kind == "tool_use" and role == "assistant" and isinstance(block.get("name"), str):
            named = {"name": block["name"], "arguments": block.get("input") or {}}
            calls.append({"id": str(block.get("id", "")), "type": "function", "function": named})
        elif kind == "tool_result" and role == "user":
            text = _text(block.get("content") or "", f"{what}.content")
            results.append({"role": "tool", "content": text, "tool_call_id": str(block.get("tool_use_id", ""))})
        elif kind not in ("thinking", "redacted_thinking"):
            raise FormatError(
                f"{what}.content has a block of type {kind!r:.50}; the policy does not read it: remove it"
            )
    read: Messages = list(results)
    if texts or calls or not results:
        joined = texts if images else "".join(part["text"] for part in texts)
        said: dict[str, Any] = {"role": role, "content": joined}
        read.append(said | ({"tool_calls": calls} if calls else {}))
    return read


def _text(content: Any, what: str) -> str:
    if isinstance(content, str):
        return content
    blocks = content if isinstance(content, list) else [content]
    if not all(isinstance(block, dict) and isinstance(block.get("text"), str) for block in blocks):
        raise FormatError(f"{what} must be text; the policy reads nothing else")
    return "".join(block["text"] for block in blocks)


def _read_tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
        raise FormatError(f"tools has {tool!r:.100}; each must have a name")
    function = {"name": tool["name"], "description": tool.get("description") or ""}
    return {"type": "function", "function": function | {"parameters": tool.get("input_schema") or {"type": "object"}}}


def response(reply: Reply, model: str, number: str) -> dict[str, Any]:
    """Return the response to a request."""
    return {
        "id": f"msg_{number}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": _blocks(reply),
        "stop_reason": _STOP_REASONS[reply.finish],
        "stop_sequence": None,
        "usage": {"input_tokens": reply.prompt_tokens, "output_tokens": len(reply.call.sampled.tokens)},
    }


def _blocks(reply: Reply) -> list[dict[str, Any]]:
    message, blocks = reply.message, []
    if message["content"] or not message.get("tool_calls"):
        blocks.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls", ()):
        function = call["function"]
        blocks.append(
            {"type": "tool_use", "id": call["id"], "name": function["name"], "input": json.loads(function["arguments"])}
        )
    return blocks


def events(reply: Reply, model: str, number: str) -> Iterator[str]:
    """Yield the response as events of a stream; each block has one delta."""
    whole = response(reply, model, number)
    yield _event("message_start", message=whole | {"content": [], "stop_reason": None})
    for i, block in enumerate(whole["content"]):
        if block["type"] == "text":
            start, delta = block | {"text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            start, delta = (
                block | {"input": {}},
                {"type": "input_json_delta", "partial_json": json.dumps(block["input"])},
            )
        yield _event("content_block_start", index=i, content_block=start)
        yield _event("content_block_delta", index=i, delta=delta)
        yield _event("content_block_stop", index=i)
    end = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    yield _event("message_delta", delta=end, usage={"output_tokens": whole["usage"]["output_tokens"]})
    yield _event("message_stop")


def _event(kind: str, **fields: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind} | fields)}\n\n"
