"""Encoding of the feedback on a sampled assistant turn, and detection of templates that rewrite earlier text.

The sampled turn itself is never encoded again: a mark at the end of its text tells where the feedback starts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from jinja2 import TemplateError

from torchrl_rloo.data.templates import (
    BOUNDARY,
    Messages,
    cut_arguments,
    cut_messages,
    encode_rendered,
    render,
    render_opening,
    special_texts,
)


class Answer(NamedTuple):
    """Tokens that follow an answered turn."""

    ids: list[int]  # ids of the turn's end, the feedback, and the opening of the next turn
    rewritten: bool  # True if the template now renders the earlier conversation differently from what the policy saw


def encode_feedback(
    tokenizer, conversation: Messages, feedback: Messages, *, last_token: int, **template_kwargs
) -> list[int]:
    """Return the ids of :func:`answer_turn`: the turn's end, the feedback, and the opening of the next turn."""
    return answer_turn(tokenizer, conversation, feedback, last_token=last_token, **template_kwargs).ids


def answer_turn(
    tokenizer,
    conversation: Messages,
    feedback: Messages,
    *,
    last_token: int,
    end_ids: Collection[int] = (),
    seen_arguments: Mapping[str, Any] | None = None,
    **template_kwargs,
) -> Answer:
    """Encode the feedback on a sampled assistant turn, and detect whether the template rewrites earlier text.

    Only the new feedback is encoded. The end of the turn's text is marked before rendering, so sampled text is never
    encoded again, even if the template changes past turns. Renderings are compared without white space, which
    templates trim.

    If a template accepts tool results only after tool calls, calls are added to the conversation. Such a template does
    not show the turn's text, which does not count as rewriting.
    """
    # Cut special tokens, also in the conversation: some templates show the system message with the last message
    feedback, kwargs = cut_messages(tokenizer, feedback), cut_arguments(tokenizer, template_kwargs)
    seen_arguments = kwargs if seen_arguments is None else cut_arguments(tokenizer, seen_arguments)
    conversation = cut_messages(tokenizer, conversation)

    # Render the feedback, if necessary with tool calls before the tools' results
    try:
        tail, rewritten = _tail(tokenizer, conversation, feedback, kwargs, seen_arguments)
    except _REFUSALS as error:
        if not any(m["role"] == "tool" for m in (*conversation, *feedback)):
            raise ValueError(_cannot(error)) from error
        whole, n = _with_calls([*conversation, *feedback]), len(conversation)
        tail_of = _tail_of_calls if feedback[0]["role"] == "tool" else _tail
        try:
            tail, rewritten = tail_of(tokenizer, whole[:n], whole[n:], kwargs, seen_arguments)
        except _REFUSALS as second:
            raise ValueError(f"{_cannot(error)}; with added calls before the tools' results: {second}") from error

    # Drop the end of turn if the policy sampled it, or another: only white space may come before it
    ids = encode_rendered(tokenizer, tail)
    first = _first_visible(tokenizer, ids)
    if first is not None and last_token != ids[first] and last_token in end_ids:
        last_token = _end_of_turn(tokenizer, conversation, kwargs)
    if first is not None and last_token == ids[first]:
        ids = ids[first + 1 :]
    return Answer(ids, rewritten)


def _first_visible(tokenizer, ids: Sequence[int]) -> int | None:
    """Return the index of the first id that is not white space, or None."""
    return next((k for k, i in enumerate(ids) if tokenizer.decode([i]).strip()), None)


def _end_of_turn(tokenizer, conversation: Messages, kwargs: Mapping[str, Any]) -> int | None:
    """Return the special token by which the template ends a last assistant turn, or None if it writes none."""
    marked = {"role": "assistant", "content": BOUNDARY}
    try:
        text = render(tokenizer, [*conversation[:-1], marked], **kwargs | {"add_generation_prompt": False})
    except _REFUSALS:
        return None
    ids = encode_rendered(tokenizer, text.rpartition(BOUNDARY)[2])
    first = _first_visible(tokenizer, ids)
    return ids[first] if first is not None and tokenizer.decode([ids[first]]) in special_texts(tokenizer) else None


class _NotShownOnceError(Exception):
    pass


# A template raises one of the first two if a field is missing
_REFUSALS = (TemplateError, TypeError, _NotShownOnceError)


def _cannot(error: Exception) -> str:
    return f"several turns require a chat template that shows feedback on an assistant message: {error}"


def _tail(tokenizer, conversation: Messages, feedback: Messages, kwargs, seen_arguments) -> tuple[str, bool]:
    """Return the rendered text after the last turn, and whether the text before differs from what the policy saw."""
    *before, turn = conversation

    def render_around(content: str) -> list[str]:
        marked = {"role": "assistant", "content": content + BOUNDARY}
        text = render(tokenizer, [*before, marked, *feedback], **kwargs | {"add_generation_prompt": True})
        return text.split(BOUNDARY)

    # Compare the text before the mark with the text that the policy saw
    seen = render_opening(tokenizer, before, **seen_arguments) + turn["content"]
    parts = render_around(turn["content"])
    if len(parts) == 2 and parts[0] == seen:
        return parts[1], False
    rewritten = len(parts) != 2 or _without_whitespace(parts[0]) != _without_whitespace(seen)

    # Render again without the turn's text, which the template may have changed or dropped
    parts = render_around("")
    if len(parts) != 2:
        raise _NotShownOnceError(f"it shows an assistant message {len(parts) - 1} times when feedback follows it")
    return parts[1], rewritten


def _tail_of_calls(tokenizer, conversation: Messages, feedback: Messages, kwargs, seen_arguments) -> tuple[str, bool]:
    """Return the same as :func:`_tail` if the last turn shows calls, not text: all after its end-of-turn token."""
    closed = render(tokenizer, conversation, **kwargs)
    after = render(tokenizer, [*conversation, *feedback], **kwargs | {"add_generation_prompt": True})
    if not after.startswith(closed):
        raise _NotShownOnceError("it changes the messages before the tools' results")
    seen = render_opening(tokenizer, conversation[:-1], **seen_arguments)
    turn = closed.rstrip()
    ends = [len(text) for text in special_texts(tokenizer) if turn.endswith(text)]
    start = len(turn) - max(ends) if ends else len(closed)
    return after[start:], not _without_whitespace(closed).startswith(_without_whitespace(seen))


def _with_calls(messages: Messages) -> Messages:
    """Add a call for every tool's result to the assistant message before it, and an id to both."""
    default = [{"tool_call_id": f"call{i:05d}", "name": "tool"} for i in range(len(messages))]
    messages = [{**d, **m} if m["role"] == "tool" else m for d, m in zip(default, messages, strict=True)]
    for i, message in enumerate(messages):
        if message["role"] == "assistant" and not message.get("tool_calls"):
            results = takewhile(lambda m: m["role"] == "tool", messages[i + 1 :])
            calls = [_call(result["tool_call_id"], result["name"]) for result in results]
            messages[i] = {**message, "tool_calls": calls} if calls else message
    return messages


def _call(call_id: str, name: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": {}}}


def _without_whitespace(text: str) -> str:
    return "".join(text.split())
