"""Conversations to token ids, by the tokenizer's own chat template.

Prompts and feedback are rendered here; what the policy sampled is never rendered or encoded again. Action tokens are
known because they were sampled, so no mask is ever recovered by searching text. The one exception is a conversation
that somebody else wrote (SFT, evaluation): :func:`encode_conversation` masks its assistant turns.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from torchrl.data.llm import History

Messages = list[dict[str, Any]]

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_BOUNDARY = "assistant-turn-ends-here-5f1c"


def is_conversation(query: object) -> bool:
    """True for a non-empty list of messages, each a mapping with ``role`` and ``content``."""
    return (
        isinstance(query, Sequence)
        and not isinstance(query, str)
        and len(query) > 0
        and all(isinstance(m, dict) and "role" in m and "content" in m for m in query)
    )


def _require_template(tokenizer) -> None:
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            f"tokenizer {getattr(tokenizer, 'name_or_path', '?')!r} has no chat_template, so it cannot render chat "
            "messages. Pass plain-text prompts, or set tokenizer.chat_template."
        )


def render(tokenizer, messages: Messages, **template_kwargs) -> str:
    """The conversation as the text that the tokenizer's template makes of it.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        messages: the conversation.
        **template_kwargs: passed to ``apply_chat_template`` (``add_generation_prompt=``, ``tools=``, ...).

    Raises:
        ValueError: if the tokenizer has no chat template.
    """
    _require_template(tokenizer)
    return tokenizer.apply_chat_template(messages, tokenize=False, **template_kwargs)


def encode(tokenizer, text: str) -> list[int]:
    """Ids of text that a template rendered: special tokens are recognised, none are added."""
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def encode_prompt(tokenizer, query: Messages | str, **template_kwargs) -> list[int]:
    """Ids of a prompt, ready to be continued by the policy.

    Args:
        tokenizer: a Hugging Face tokenizer.
        query: chat messages (rendered by the tokenizer's template, the assistant's turn opened; if the last message is
            the assistant's, that turn is left open to be continued) or plain text (encoded as the tokenizer encodes any
            text, its own special tokens such as BOS included).
        **template_kwargs: passed to the template.

    Raises:
        ValueError: if the query is neither, or the prompt is empty, or messages come without a chat template.
    """
    if isinstance(query, str):
        ids = list(tokenizer(query)["input_ids"])
    elif is_conversation(query):
        last = {"continue_final_message": True} if query[-1]["role"] == "assistant" else {"add_generation_prompt": True}
        ids = encode(tokenizer, render(tokenizer, query, **(template_kwargs | last)))
    else:
        raise ValueError(
            f"query must be a string or a non-empty list of messages with 'role' and 'content', got {query!r:.200}"
        )
    if not ids:
        raise ValueError(f"query {query!r:.200} has no tokens: give every prompt at least one token (a BOS is enough)")
    return ids


def encode_feedback(
    tokenizer, conversation: Messages, feedback: Messages, *, last_token: int, **template_kwargs
) -> list[int]:
    """Ids that follow a sampled assistant turn: the end of that turn, the feedback, and the next turn's opening.

    Only the new feedback is encoded. The turn's own text is replaced by a marker before rendering, so nothing that the
    policy wrote passes through the tokenizer again, whatever the template does to past turns.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        conversation: the messages so far; the last one is the assistant turn that was just sampled.
        feedback: the messages (tool results, user replies) that answer it.
        last_token: the last sampled id. If it is the template's end of turn it is not repeated.
        **template_kwargs: passed to the template.

    Raises:
        ValueError: if the template does not show the assistant's content exactly once.
    """
    opened = [*conversation[:-1], {"role": "assistant", "content": _BOUNDARY}]
    text = render(tokenizer, [*opened, *feedback], add_generation_prompt=True, **template_kwargs)
    if text.count(_BOUNDARY) != 1:
        raise ValueError(
            f"the chat template shows an assistant message {text.count(_BOUNDARY)} times when feedback follows it; "
            "multi-turn environments need a template that shows it once"
        )
    ids = encode(tokenizer, text.split(_BOUNDARY)[1])
    if last_token in ids:  # the end of turn, if nothing but white space comes before it
        before = ids.index(last_token)
        if not tokenizer.decode(ids[:before]).strip():
            return ids[before + 1 :]
    return ids


def encode_conversation(tokenizer, messages: Messages, **template_kwargs) -> tuple[list[int], list[bool]]:
    """Ids of a finished conversation and a mask of its assistant tokens, for SFT and evaluation.

    The mask comes from the template's ``{% generation %}`` blocks or, where it has none, from the differences between
    the rendered prefixes of the conversation (an assistant turn then ends with its end-of-turn token).

    Returns:
        ``(ids, mask)``, both of length ``T``.

    Raises:
        ValueError: if neither way is right: the template's ``{% generation %}`` marks nothing of the assistant's, or
            it has none and rewrites earlier turns.
    """
    _require_template(tokenizer)
    if _GENERATION_TAG.search(tokenizer.chat_template):
        out = tokenizer.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True, **template_kwargs
        )
        ids, mask = list(out["input_ids"]), [bool(m) for m in out["assistant_masks"]]
        if not any(mask) and any(m["role"] == "assistant" and m["content"] for m in messages):
            raise ValueError(
                "the chat template's {% generation %} blocks mark no token of this conversation's assistant messages: "
                "put them around the assistant's content in tokenizer.chat_template"
            )
        return ids, mask
    ids = encode(tokenizer, render(tokenizer, messages, **template_kwargs))
    mask = [False] * len(ids)
    for k, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = encode(tokenizer, _opening(tokenizer, messages[:k], **template_kwargs))
        after = encode(tokenizer, render(tokenizer, messages[: k + 1], **template_kwargs))
        if ids[: len(before)] != before or ids[: len(after)] != after or len(after) <= len(before):
            raise ValueError(
                f"the chat template renders message {k} differently once later messages follow, and has no "
                "{% generation %} block, so its assistant tokens cannot be told apart. Add {% generation %} ... "
                "{% endgeneration %} around the assistant's content in tokenizer.chat_template."
            )
        end = len(after)
        while (
            end > len(before)
            and tokenizer.eos_token_id in ids[len(before) : end]
            and ids[end - 1] != tokenizer.eos_token_id
        ):
            end -= 1  # drop what the template puts between the end of this turn and the next
        mask[len(before) : end] = [True] * (end - len(before))
    return ids, mask


def _opening(tokenizer, messages: Messages, **template_kwargs) -> str:
    """The text up to where the assistant's content begins; a template cannot be asked that of no messages at all."""
    if messages:
        return render(tokenizer, messages, add_generation_prompt=True, **template_kwargs)
    return render(tokenizer, [{"role": "assistant", "content": _BOUNDARY}], **template_kwargs).split(_BOUNDARY)[0]


def to_history(conversations: Sequence[Messages]) -> History:
    """Chat messages of ``B`` conversations as TorchRL's ``History``, shape ``[B, n_messages]``."""
    return History.from_chats(list(conversations))


def from_history(history: History) -> Messages:
    """One conversation (shape ``[n_messages]``) as chat messages."""
    return [{"role": item.role, "content": item.content} for item in history.unbind(0) if item.role != "<none>"]


def join_conversation(query: Messages, completion: Messages) -> Messages:
    """The prompt and what followed it as one conversation, in which a turn that the prompt left open is one message."""
    if query[-1]["role"] == "assistant" and completion and completion[0]["role"] == "assistant":
        joined = {**query[-1], "content": query[-1]["content"] + completion[0]["content"]}
        return [*query[:-1], joined, *completion[1:]]
    return [*query, *completion]


def decode_response(tokenizer, tokens: Sequence[int]) -> str:
    """The text of a sampled turn, for people, tools and rewards; special tokens, the end of turn too, are left out."""
    return tokenizer.decode(tokens, skip_special_tokens=True)


def longest_prompt(tokenizer, queries: Iterable[Messages | str], **template_kwargs) -> int:
    """Length in tokens of the longest of the prompts, as the policy will see it."""
    return max(len(encode_prompt(tokenizer, query, **template_kwargs)) for query in queries)
