"""Positions of messages and tool calls among the tokens of a row."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import Any, NamedTuple

from torchrl_rloo.data.templates import Messages, is_conversation

TOOL_CALL_PATTERN = re.compile(
    r"<(?P<tag>tool|tool_call|function_call)>.*?(?:</(?P=tag)>|\Z)"
    r"|<function=.*?(?:</function>|\Z)"
    r"|(?:\[TOOL_CALLS\]|<\|python_tag\|>).*",
    re.DOTALL,
)  # formats of Hermes and Qwen, Llama, Mistral, and the embedded tasks

_ERROR = re.compile(r"\W*(?:error|traceback|\w*(?:error|exception)\b)", re.IGNORECASE)
_ERROR_IN_USER = re.compile(r"<tool_response>\s*Error:")


class Block(NamedTuple):
    """One message of a transcript.

    Attributes:
        start: index of its first token; it ends at the start of the next block.
        role: role of the message, or ``"context"`` if unknown.
        label: further text for its heading, e.g. the name of the tool.
        error: True if it is a tool's error message.
    """

    start: int
    role: str
    label: str = ""
    error: bool = False


def find_blocks(
    texts: Sequence[str], special: Sequence[bool], actions: Sequence[bool], contexts: Sequence[Messages]
) -> list[Block]:
    """Split tokens into messages by searching the contents of messages in the decoded context.

    It encodes no text. The template's opening of a policy turn belongs to that turn.

    Args:
        texts: ``T`` texts of the tokens.
        special: ``T`` flags of special tokens, which separate messages in templates.
        actions: ``T`` flags, the action mask.
        contexts: messages before the first policy turn, between the first and second, and so on. It may be shorter than
            the number of turns, or empty if there are no messages.

    Returns:
        Blocks in order; the first starts at token 0.
    """
    blocks: list[Block] = []
    start = turn = 0
    opened = False  # the context before the turn ended with the opening of that turn
    # Walk over runs of action tokens, each one turn, and of context tokens
    for is_action, run in groupby(actions):
        end = start + len(list(run))
        if is_action:
            if not opened:
                blocks.append(Block(start, "assistant"))
            turn += 1
        else:
            messages = contexts[turn] if turn < len(contexts) else []
            last = end == len(actions)
            blocks += _split_context(texts[start:end], special[start:end], messages, start, last)
        opened = not is_action and blocks[-1].role == "assistant"
        start = end
    return blocks


def group_contexts(query: Any, completion: Any, before: int = 0) -> list[Messages]:
    """Group the messages of a conversation by the policy turn that follows them.

    Args:
        query: prompt of the conversation.
        completion: messages after the prompt, or text.
        before: number of policy turns that the tokens show as context.

    Returns:
        Messages before each policy turn and after the last; empty if the prompt is not a list of messages.
    """
    if not is_conversation(query):
        return []
    contexts = [list(query)]
    for message in completion if isinstance(completion, Sequence) and not isinstance(completion, str) else []:
        if message["role"] != "assistant":
            contexts[-1].append(message)
        elif before:
            contexts[-1].append(message)
            before -= 1
        else:
            contexts.append([])
    return contexts


def find_calls(
    texts: Sequence[str], actions: Sequence[bool], pattern: re.Pattern[str] = TOOL_CALL_PATTERN
) -> list[list[int]]:
    """Return ``[start, end]``, in tokens, of each tool call that the policy wrote."""
    found, start = [], 0
    for is_action, run in groupby(actions):
        end = start + len(list(run))
        if is_action:
            ends = list(accumulate(map(len, texts[start:end])))
            for call in pattern.finditer("".join(texts[start:end])):
                first, last = _token_at(ends, call.start()), _token_at(ends, call.end() - 1)
                found.append([start + first, start + last + 1])
        start = end
    return found


def is_tool_error(message: dict[str, Any]) -> bool:
    """Return whether a message from a tool, or from the user in place of a tool, reports an error."""
    content = str(message["content"])
    if message["role"] == "tool":
        return bool(_ERROR.match(content))
    return message["role"] == "user" and bool(_ERROR_IN_USER.search(content))


def _split_context(
    texts: Sequence[str], special: Sequence[bool], messages: Messages, offset: int, last: bool
) -> list[Block]:
    """Split a run of context tokens into blocks; if a message is not found, return one block."""
    text, ends = "".join(texts), list(accumulate(map(len, texts)))
    shown = [message for message in messages if str(message["content"]).strip()]
    spans = _find_contents(text, shown)
    if not spans:
        return [Block(offset, messages[0]["role"] if len(messages) == 1 else "context")]
    blocks, start = [], 0
    for message, (_, end), (next_start, _) in zip(shown, spans, [*spans[1:], (len(text), 0)], strict=True):
        blocks.append(Block(offset + start, message["role"], _label(message), is_tool_error(message)))
        after = _token_at(ends, next_start) if next_start < len(text) else len(texts)
        start = _find_message_start(special, _token_at(ends, end - 1) + 1, after)
    if start < len(texts) and not last:  # the template's opening of the policy turn
        blocks.append(Block(offset + start, "assistant"))
    return blocks


def _find_contents(text: str, messages: Messages) -> list[tuple[int, int]]:
    """Return the span of each message's content in a text, in order; empty if one is not found."""
    spans, position = [], 0
    for message in messages:
        whole = str(message["content"]).strip()
        for content in (whole, whole.rpartition("</think>")[2].strip()):  # templates drop earlier thinking
            at = text.find(content, position)
            if content and at >= 0:
                break
        else:
            return []
        position = at + len(content)
        spans.append((at, position))
    return spans


def _find_message_start(special: Sequence[bool], start: int, end: int) -> int:
    """Return the start of a message: the second special token after the last content, or after the only one."""
    marks = [i for i in range(start, end) if special[i]]
    return marks[1] if len(marks) > 1 else marks[0] + 1 if marks else end


def _token_at(ends: Sequence[int], position: int) -> int:
    """Return the index of the token that contains a character, given the end of each token's text."""
    return bisect_right(ends, position)


def _label(message: dict[str, Any]) -> str:
    return " ".join(str(message[key]) for key in ("name", "tool_call_id") if message.get(key))
