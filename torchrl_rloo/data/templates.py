"""Conversations to token ids, by the tokenizer's own chat template.

Prompts and feedback are encoded here; what the policy sampled is never encoded again. Action tokens are known because
they were sampled, so no mask is ever recovered by searching text. The one exception is a conversation that somebody
else wrote (SFT, evaluation): :func:`encode_conversation` masks its assistant turns.

Special tokens are the template's alone: :mod:`torchrl_rloo.data.special_tokens`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import chain, islice, takewhile
from typing import Any, NamedTuple

from jinja2 import TemplateError
from torchrl.data.llm import History

from torchrl_rloo.data.special_tokens import CUT, cut_arguments, cut_specials, make_mark, special_texts

Messages = list[dict[str, Any]]

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_BOUNDARY = make_mark()  # where the text of an assistant turn ends


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


def _pieces(text: str) -> list[str]:
    """Split text that a template rendered of cut messages at the cuts."""
    return [piece for piece in text.split(CUT) if piece]


def _encode_pieces(tokenizer, text: str) -> list[int]:
    """Ids of text that a template rendered of cut messages."""
    return [i for piece in _pieces(text) for i in encode(tokenizer, piece)]


def _render_cut(tokenizer, messages: Messages, template_kwargs: Mapping[str, Any]) -> str:
    """Render a conversation with its special tokens cut."""
    messages, arguments = cut_specials(tokenizer, messages), cut_arguments(tokenizer, template_kwargs)
    return render(tokenizer, messages, **arguments)


def encode_messages(tokenizer, messages: Messages, **template_kwargs) -> list[int]:
    """Ids of a conversation as the template renders it; no content of it becomes a special token.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        messages: the conversation.
        **template_kwargs: passed to the template.

    Raises:
        ValueError: if the tokenizer has no chat template.
    """
    return _encode_pieces(tokenizer, _render_cut(tokenizer, messages, template_kwargs))


def encode_prompt(tokenizer, query: Messages | str, **template_kwargs) -> list[int]:
    """Return the ids of a prompt, ready to be continued by the policy.

    Args:
        tokenizer: a Hugging Face tokenizer.
        query: chat messages (rendered by the tokenizer's template, the assistant's turn opened; if the last message is
            the assistant's, that turn is left open to be continued) or plain text (encoded as the tokenizer encodes any
            text, its own special tokens such as BOS included; those that the text spells are special tokens, too: a
            user who does without messages writes the template's part himself).
        **template_kwargs: passed to the template.

    Raises:
        ValueError: if the query is neither, or the prompt is empty, or messages come without a chat template.
    """
    return encode_prompts(tokenizer, [query], **template_kwargs)[0]


def encode_prompts(tokenizer, queries: Sequence[Messages | str], **template_kwargs) -> list[list[int]]:
    """Return the ids of many prompts, as :func:`encode_prompt` does for each, in one call of the tokenizer."""
    texts = [query for query in queries if isinstance(query, str)]
    pieces = [_pieces(_render_prompt(tokenizer, q, template_kwargs)) for q in queries if not isinstance(q, str)]
    of_texts = iter(_encode_batch(tokenizer, texts, add_special_tokens=True))
    of_pieces = iter(_encode_batch(tokenizer, list(chain.from_iterable(pieces)), add_special_tokens=False))
    of_chats = (list(chain.from_iterable(islice(of_pieces, len(each)))) for each in pieces)
    encoded = [list(next(of_texts)) if isinstance(query, str) else next(of_chats) for query in queries]
    for query, ids in zip(queries, encoded, strict=True):
        if not ids:
            raise ValueError(
                f"query {query!r:.200} has no tokens: give every prompt at least one token (a BOS is enough)"
            )
    return encoded


def _render_prompt(tokenizer, query: Messages, template_kwargs: Mapping[str, Any]) -> str:
    if not is_conversation(query):
        raise ValueError(
            f"query must be a string or a non-empty list of messages with 'role' and 'content', got {query!r:.200}"
        )
    last = {"continue_final_message": True} if query[-1]["role"] == "assistant" else {"add_generation_prompt": True}
    return _render_cut(tokenizer, query, {**template_kwargs, **last})


def _encode_batch(tokenizer, texts: list[str], *, add_special_tokens: bool) -> list[list[int]]:
    if not texts:  # some tokenizers refuse an empty batch
        return []
    given = {"return_attention_mask": False, "return_token_type_ids": False}
    return tokenizer(texts, add_special_tokens=add_special_tokens, **given)["input_ids"]


class Answer(NamedTuple):
    """What follows an answered turn.

    Attributes:
        ids: the end of that turn, the feedback, and the next turn's opening.
        rewritten: the template would now show what came before otherwise than the policy saw it.
    """

    ids: list[int]
    rewritten: bool


def encode_feedback(
    tokenizer, conversation: Messages, feedback: Messages, *, last_token: int, **template_kwargs
) -> list[int]:
    """Ids that follow a sampled assistant turn: the end of that turn, the feedback, and the next turn's opening.

    Only the new feedback is encoded; see :func:`answer_turn`.
    """
    return answer_turn(tokenizer, conversation, feedback, last_token=last_token, **template_kwargs).ids


def answer_turn(
    tokenizer,
    conversation: Messages,
    feedback: Messages,
    *,
    last_token: int,
    shown: Mapping[str, Any] | None = None,
    **template_kwargs,
) -> Answer:
    """Ids that follow a sampled assistant turn, and whether the template would rewrite what precedes them.

    Only the new feedback is encoded: the end of the turn's text is marked before rendering, so nothing that the policy
    wrote passes through the tokenizer again, whatever the template does to past turns. Renderings are compared without
    their white space, which templates trim. A template that wants to see a tool's results after calls alone is given
    calls; the text of such a turn it does not show, and that is no rewriting.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        conversation: the messages so far; the last one is the assistant turn that was just sampled.
        feedback: the messages (tool results, user replies) that answer it.
        last_token: the last sampled id. If it is the template's end of turn it is not repeated.
        shown: what the template was given for the turn that was just sampled; None for ``template_kwargs``.
        **template_kwargs: passed to the template.

    Raises:
        ValueError: if the template refuses the feedback, or does not show the assistant's content exactly once.
    """
    feedback, kwargs = cut_specials(tokenizer, feedback), cut_arguments(tokenizer, template_kwargs)
    shown = kwargs if shown is None else cut_arguments(tokenizer, shown)
    conversation = cut_specials(tokenizer, conversation)  # some templates show the system's message at the last one
    try:
        tail, rewritten = _tail(tokenizer, conversation, feedback, kwargs, shown)
    except _REFUSALS as error:
        if not any(m["role"] == "tool" for m in (*conversation, *feedback)):
            raise ValueError(_cannot(error)) from error
        whole, n = _with_calls([*conversation, *feedback]), len(conversation)
        tail_of = _tail_of_calls if feedback[0]["role"] == "tool" else _tail
        try:
            tail, rewritten = tail_of(tokenizer, whole[:n], whole[n:], kwargs, shown)
        except _REFUSALS as second:
            raise ValueError(f"{_cannot(error)}. With calls before the tools' results: {second}") from error
    ids = _encode_pieces(tokenizer, tail)
    if last_token in ids:  # the end of turn, if nothing but white space comes before it
        before = ids.index(last_token)
        if not tokenizer.decode(ids[:before]).strip():
            ids = ids[before + 1 :]
    return Answer(ids, rewritten)


class _NotShownOnceError(Exception):
    pass


_REFUSALS = (TemplateError, TypeError, _NotShownOnceError)  # a template that misses something raises any of the former


def _cannot(error: Exception) -> str:
    return f"the chat template cannot show feedback on an assistant message, which several turns need: {error}"


def _tail(tokenizer, conversation: Messages, feedback: Messages, kwargs, shown) -> tuple[str, bool]:
    """What the template shows after the text of the conversation's last turn, and whether what is before is new."""
    *before, turn = conversation

    def around(said: str) -> list[str]:
        marked = {"role": "assistant", "content": said + _BOUNDARY}
        text = render(tokenizer, [*before, marked, *feedback], **kwargs | {"add_generation_prompt": True})
        return text.split(_BOUNDARY)

    seen = _opening(tokenizer, before, **shown) + turn["content"]
    parts = around(turn["content"])
    if len(parts) == 2 and parts[0] == seen:
        return parts[1], False
    rewritten = len(parts) != 2 or _without_whitespace(parts[0]) != _without_whitespace(seen)
    parts = around("")  # what the template makes of the turn's text has no part in what follows it
    if len(parts) != 2:
        raise _NotShownOnceError(f"it shows one {len(parts) - 1} times when feedback follows it")
    return parts[1], rewritten


def _tail_of_calls(tokenizer, conversation: Messages, feedback: Messages, kwargs, shown) -> tuple[str, bool]:
    """The same where calls are shown in place of the last turn's text: from its end-of-turn token on."""
    closed = render(tokenizer, conversation, **kwargs)
    after = render(tokenizer, [*conversation, *feedback], **kwargs | {"add_generation_prompt": True})
    if not after.startswith(closed):
        raise _NotShownOnceError("it changes the messages before the tools' results")
    seen = _opening(tokenizer, conversation[:-1], **shown)
    turn = closed.rstrip()
    ends = [len(text) for text in special_texts(tokenizer) if turn.endswith(text)]
    start = len(turn) - max(ends) if ends else len(closed)
    return after[start:], not _without_whitespace(closed).startswith(_without_whitespace(seen))


def _with_calls(messages: Messages) -> Messages:
    """The messages with a call for every tool's result, in the assistant message before, and an id for both."""
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
    """A text without its white space."""
    return "".join(text.split())


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
    messages, template_kwargs = cut_specials(tokenizer, messages), cut_arguments(tokenizer, template_kwargs)
    if _GENERATION_TAG.search(tokenizer.chat_template):
        ids, mask = _encode_generation(tokenizer, messages, template_kwargs)
        if not any(mask) and any(m["role"] == "assistant" and m["content"] for m in messages):
            raise ValueError(
                "the chat template's {% generation %} blocks mark no token of this conversation's assistant messages: "
                "put them around the assistant's content in tokenizer.chat_template"
            )
        return ids, mask
    ids = _encode_pieces(tokenizer, render(tokenizer, messages, **template_kwargs))
    mask = [False] * len(ids)
    for k, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _encode_pieces(tokenizer, _opening(tokenizer, messages[:k], **template_kwargs))
        after = _encode_pieces(tokenizer, render(tokenizer, messages[: k + 1], **template_kwargs))
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


def _encode_generation(tokenizer, messages: Messages, template_kwargs: dict[str, Any]) -> tuple[list[int], list[bool]]:
    """Ids and mask by the template's ``{% generation %}`` blocks: tokens that reach into one are the assistant's."""
    from transformers.utils.chat_template_utils import render_jinja_template  # takes 2 s

    variables = {**tokenizer.special_tokens_map, "chat_template": tokenizer.chat_template, **template_kwargs}
    texts, spans = render_jinja_template([messages], return_assistant_tokens_mask=True, **variables)
    ids, mask, start = [], [], 0
    for piece in texts[0].split(CUT):
        out = tokenizer(piece, add_special_tokens=False, return_offsets_mapping=True)
        ids += out["input_ids"]
        for first, last in out["offset_mapping"]:
            mask.append(any(begin < start + last and start + first < end for begin, end in spans[0]))
        start += len(piece) + len(CUT)
    return ids, mask


def _opening(tokenizer, messages: Messages, **template_kwargs) -> str:
    """The text up to where the assistant's content begins; a template cannot be asked that of no messages at all."""
    if messages:
        return render(tokenizer, messages, **template_kwargs | {"add_generation_prompt": True})
    return render(tokenizer, [{"role": "assistant", "content": _BOUNDARY}], **template_kwargs).split(_BOUNDARY)[0]


def to_history(conversations: Sequence[Messages]) -> History:
    """Chat messages of ``B`` conversations as TorchRL's ``History``, shape ``[B, n_messages]``.

    What a message has that a History does not know (a tool's name, the id of a call) is left out.
    """
    known = {field.name for field in fields(History)}
    return History.from_chats([[{k: v for k, v in m.items() if k in known} for m in chat] for chat in conversations])


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
