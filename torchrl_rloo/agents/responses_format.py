"""OpenAI's responses: requests to calls, and replies to responses or streams of events.

The endpoint stores no responses: a client sends the whole conversation as ``input`` with every call.

Source of the format: the OpenAI API reference, "Responses".
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

from torchrl_rloo.agents.chat_format import FormatError, positive, read_list, read_messages, read_text, read_tools
from torchrl_rloo.agents.session import Ask, Reply
from torchrl_rloo.data.templates import Messages


def read_request(body: Mapping[str, Any]) -> Ask:
    """Return the call of a request."""
    if body.get("previous_response_id") or body.get("conversation"):
        raise FormatError("previous_response_id and conversation need stored responses; send the whole input")
    if body.get("background"):
        raise FormatError("background=true needs stored responses; set it to false")
    choice, text = body.get("tool_choice", "auto"), body.get("text") or {}
    form = text.get("format") if isinstance(text, dict) else text
    if choice not in ("auto", "none", None) or form not in (None, {"type": "text"}):
        raise FormatError("tool_choice must be 'auto' or 'none', and the format text: the policy is not constrained")
    messages: Messages = []
    if body.get("instructions") is not None:
        messages.append({"role": "system", "content": read_text(body["instructions"], "instructions")})
    sent = body.get("input")
    if not isinstance(sent, str | list) or not sent:
        raise FormatError("input must be text or a list of items")
    messages += [{"role": "user", "content": sent}] if isinstance(sent, str) else _read_items(sent)
    tools = (
        None if choice == "none" else read_tools([_nest(tool) for tool in read_list(body.get("tools") or [], "tools")])
    )
    return Ask(read_messages(messages), tools, positive(body.get("max_output_tokens"), "max_output_tokens"))


def _read_items(items: list[Any]) -> Messages:
    """Return the messages of a request's items: consecutive calls belong to the assistant's message before them."""
    messages: Messages = []
    for i, item in enumerate(items):
        if not isinstance(item, dict):
            raise FormatError(f"input[{i}] must be an object")
        kind = item.get("type", "message")
        if kind == "message":
            messages.append({"role": item.get("role"), "content": item.get("content")})
        elif kind == "function_call":
            call = {"id": item.get("call_id") or "", "function": {k: item.get(k) for k in ("name", "arguments")}}
            if not messages or messages[-1].get("role") != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1] = messages[-1] | {"tool_calls": [*messages[-1].get("tool_calls", ()), call]}
        elif kind == "function_call_output":
            output = read_text(item.get("output"), f"input[{i}].output")
            messages.append({"role": "tool", "content": output, "tool_call_id": item.get("call_id") or ""})
        elif kind != "reasoning":
            raise FormatError(f"input[{i}] has type {kind!r:.50}; the policy reads messages and function calls only")
    return messages


def _nest(tool: Any) -> Any:
    """Return the schema of a tool in the form of chat completions."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise FormatError(f"tools has {tool!r:.100}; the endpoint has functions only")
    return {"type": "function", "function": {k: v for k, v in tool.items() if k not in ("type", "strict")}}


def response(reply: Reply, model: str, number: str) -> dict[str, Any]:
    """Return the response to a request."""
    sampled, cut = len(reply.call.sampled.tokens), reply.finish == "length"
    return {
        "id": f"resp_{number}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None,
        "instructions": None,
        "metadata": {},
        "model": model,
        "output": _items(reply, number),
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "usage": {
            "input_tokens": reply.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": reply.prompt_tokens + sampled,
        },
    }


def _items(reply: Reply, number: str) -> list[dict[str, Any]]:
    message, items = reply.message, []
    status = "incomplete" if reply.finish == "length" else "completed"
    if message["content"] or not message.get("tool_calls"):
        content = [{"type": "output_text", "text": message["content"], "annotations": []}]
        said = {"type": "message", "id": f"msg_{number}", "role": "assistant", "status": status}
        items.append(said | {"content": content})
    for k, call in enumerate(message.get("tool_calls", ())):
        called = {"type": "function_call", "id": f"fc_{number}_{k}", "call_id": call["id"], "status": status}
        items.append(called | call["function"])
    return items


def events(reply: Reply, model: str, number: str) -> Iterator[str]:
    """Yield the response as events of a stream; each item has one delta."""
    whole, count = response(reply, model, number), 0

    def event(kind: str, **fields: Any) -> str:
        nonlocal count
        count += 1
        return f"event: {kind}\ndata: {json.dumps({'type': kind, 'sequence_number': count - 1} | fields)}\n\n"

    begun = whole | {"status": "in_progress", "output": []}
    yield event("response.created", response=begun)
    yield event("response.in_progress", response=begun)
    for i, item in enumerate(whole["output"]):
        place = {"item_id": item["id"], "output_index": i}
        if item["type"] == "message":
            (part,) = item["content"]
            inner = place | {"content_index": 0}
            yield event("response.output_item.added", output_index=i, item=item | {"content": []})
            yield event("response.content_part.added", part=part | {"text": ""}, **inner)
            yield event("response.output_text.delta", delta=part["text"], logprobs=[], **inner)
            yield event("response.output_text.done", text=part["text"], logprobs=[], **inner)
            yield event("response.content_part.done", part=part, **inner)
        else:
            named = {"arguments": item["arguments"], "name": item["name"]}
            yield event("response.output_item.added", output_index=i, item=item | {"arguments": ""})
            yield event("response.function_call_arguments.delta", delta=item["arguments"], **place)
            yield event("response.function_call_arguments.done", **named, **place)
        yield event("response.output_item.done", output_index=i, item=item)
    kind = "response.incomplete" if reply.finish == "length" else "response.completed"
    yield event(kind, response=whole)
