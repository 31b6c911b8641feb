"""Encoding of conversations with the tokenizer's chat template.

Prompts and feedback are encoded, but sampled text never again: a mark at the end of a turn's text tells where the
feedback starts. :func:`answer_turn` also detects whether a template then rewrites earlier text. Action tokens are known
from sampling, so no mask is recovered by searching text. The one exception is a conversation that the policy did not
sample (SFT, evaluation): :func:`encode_conversation` masks its assistant turns.

Only the chat template may open and close turns, tool results and the like with control tokens. Other texts may contain
the text of such a token, which is then split by a mark after its first character. After rendering, the text is encoded
in pieces between the marks, and no piece contains the token. Together the pieces decode to the original text. Text
without such tokens is one piece and is encoded as usual.

Control tokens are the tokenizer's special tokens and all its added tokens that are markup, such as ``<tool_call>``,
``</think>`` or ``[IMG]``. Added tokens of letters, digits and white space only are vocabulary: they stay whole, as do
single characters, which cannot be split. Who wrote a text decides which tokens are cut:

- Messages of ``"user"``, ``"tool"`` and all roles but the three below, tool schemas and documents: all control tokens.
- Messages of ``"system"``, ``"developer"`` and ``"assistant"``: special tokens and the form ``<|...|>`` only. The
  dataset's author writes ``<think>`` in few-shot answers and format instructions on purpose, as the model knows it.
"""

from __future__ import annotations

import re
import secrets
import unicodedata
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from itertools import chain, islice, takewhile
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from jinja2 import TemplateError
from tensordict import lazy_stack
from torchrl.data.llm import ContentBase, History

from torchrl_rloo.images.encoder import encoder_of
from torchrl_rloo.images.parts import content_parts, image_paths, join_contents


def make_mark() -> str:
    """Return a random text of private-use characters, which no conversation contains and no template looks for."""
    return "".join(chr(0xE000 + byte) for byte in secrets.token_bytes(12))


MARK = make_mark()
_CONTROL = re.compile(r"<[|\uff5c].+[|\uff5c]>", re.DOTALL)
_AUTHORED_ROLES = frozenset({"system", "developer", "assistant"})
_AUTHORED_FIELDS = frozenset({"content", "reasoning_content"})
_Trie = dict[str, "_Trie"]


class _Specials(NamedTuple):
    size: int  # number of the tokenizer's tokens, which grows with every added token
    texts: tuple[str, ...]
    special: re.Pattern[str]  # matches the first character of each special token in a text
    control: re.Pattern[str]  # matches the first character of each control token in a text


_SPECIALS: WeakKeyDictionary[Any, _Specials] = WeakKeyDictionary()


def special_texts(tokenizer) -> tuple[str, ...]:
    """Return the texts of the tokenizer's special tokens, sorted.

    Added tokens of the form ``<|...|>`` are included even if the tokenizer does not mark them as special: some open a
    turn. Single characters are excluded because they cannot be split. The result is cached until the tokenizer grows:
    reading its tokens takes longer than rendering a conversation.
    """
    return _specials(tokenizer).texts


def _specials(tokenizer) -> _Specials:
    known, size = _SPECIALS.get(tokenizer), len(tokenizer)
    if known is None or known.size != size:
        added = list(tokenizer.added_tokens_decoder.values())
        special = {token.content for token in added if token.special or _CONTROL.fullmatch(token.content)}
        special.update(tokenizer.all_special_tokens)
        if (images := encoder_of(tokenizer)) is not None:
            special.update(images.texts)
        markup = {token.content for token in added if not _is_vocabulary(token.content)}
        texts = tuple(sorted(text for text in special if len(text) > 1))
        patterns = _first_characters(special), _first_characters(special | markup)
        known = _SPECIALS[tokenizer] = _Specials(size, texts, *patterns)
    return known


def _is_vocabulary(text: str) -> bool:
    """Return whether a text has only letters, their marks, digits and white space (U+2581 in SentencePiece)."""
    return all(c.isspace() or c == "\u2581" or unicodedata.category(c)[0] in "LMNZ" for c in text)


def _first_characters(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern of the first character of each of the texts; texts of one character are left out."""
    trie: _Trie = {}
    for text in sorted(text for text in texts if len(text) > 1):
        node = trie
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}
    patterns = [f"{re.escape(first)}(?={_branches(node)})" for first, node in trie.items()]
    return re.compile("|".join(patterns) or "(?!)")


def _branches(node: _Trie) -> str:
    """Return a pattern of the shortest texts below a node, with shared prefixes so that a search stays fast."""
    prefix = ""
    while "" not in node and len(node) == 1:  # a chain needs no nesting
        ((character, node),) = node.items()
        prefix += re.escape(character)
    if "" in node:
        return prefix
    return f"{prefix}(?:{'|'.join(re.escape(character) + _branches(rest) for character, rest in node.items())})"


def cut_messages(tokenizer, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Cut the control tokens of messages, but only the special tokens of what a trusted role says (see the module)."""
    known = _specials(tokenizer)

    def cut_message(message: Mapping[str, Any]) -> dict[str, Any]:
        authored = _AUTHORED_FIELDS if message.get("role") in _AUTHORED_ROLES else ()
        patterns = {name: known.special if name in authored else known.control for name in message}
        return {_cut(tokenizer, k, known.control): _cut(tokenizer, v, patterns[k]) for k, v in message.items()}

    return [cut_message(message) for message in messages]


def cut_specials(tokenizer, value: Any) -> Any:
    """Insert :data:`MARK` after the first character of each control token in a text or in schemas."""
    return _cut(tokenizer, value, _specials(tokenizer).control)


def _cut(tokenizer, value: Any, pattern: re.Pattern[str]) -> Any:
    if isinstance(value, str):
        # Where normalizing makes a token of other characters, no two characters may stay together
        normalized = _normalize(tokenizer, value)
        if normalized != value and len(pattern.findall(normalized)) > len(pattern.findall(value)):
            return MARK.join(value)
        return pattern.sub(lambda match: match[0] + MARK, value)
    if isinstance(value, Mapping):
        return {_cut(tokenizer, k, pattern): _cut(tokenizer, v, pattern) for k, v in value.items()}
    return [_cut(tokenizer, v, pattern) for v in value] if isinstance(value, list | tuple) else value


def _normalize(tokenizer, text: str) -> str:
    """Normalize text as the tokenizer does before it looks for added tokens."""
    normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
    return text if normalizer is None else normalizer.normalize_str(text)


def cut_arguments(tokenizer, template_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a chat template's arguments with control tokens cut in ``tools`` and ``documents``, and trust the rest."""
    cut = {k: cut_specials(tokenizer, v) for k, v in template_kwargs.items() if k in ("tools", "documents")}
    return {**template_kwargs, **cut}


Messages = list[dict[str, Any]]

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
BOUNDARY = make_mark()  # marks the place of an assistant turn's text, or its end


def is_conversation(query: object) -> bool:
    """Return whether ``query`` is a non-empty list of messages, each a dict with ``role`` and ``content``."""
    return (
        isinstance(query, Sequence)
        and not isinstance(query, str)
        and len(query) > 0
        and all(isinstance(m, dict) and "role" in m and "content" in m for m in query)
    )


def _require_template(tokenizer) -> None:
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            f"tokenizer {getattr(tokenizer, 'name_or_path', '?')!r} has no chat_template, which messages require; "
            "pass plain-text prompts, or set tokenizer.chat_template, or model.chat_template=chatml of a recipe"
        )


def render(tokenizer, messages: Messages, **template_kwargs) -> str:
    """Render a conversation to text with the tokenizer's chat template, one placeholder for each image."""
    _require_template(tokenizer)
    if encoder_of(tokenizer) is not None:  # some of their templates accept lists of parts only
        messages = [message | {"content": content_parts(message.get("content"))} for message in messages]
    elif image_paths(messages):
        raise ValueError(
            f"the messages have images, but the model of tokenizer {getattr(tokenizer, 'name_or_path', '?')!r} reads "
            "text only; use a vision-language model, or drop the images"
        )
    return tokenizer.apply_chat_template(messages, tokenize=False, **template_kwargs)


def shows_images(tokenizer, role: str) -> bool:
    """Return whether the chat template shows images in messages of a role that answer the assistant."""
    image = {"role": role, "content": [{"type": "image", "url": ""}]}
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, image]
    for messages in (chat, _with_calls(chat)):
        try:
            text = render(tokenizer, messages, add_generation_prompt=True)
        except _REFUSALS:
            continue
        if text.count(encoder_of(tokenizer).family.placeholder) == 1:
            return True
    return False


def _show_images(tokenizer, text: str, messages: Iterable[Mapping[str, Any]]) -> str:
    """Replace the placeholders of rendered messages by the tokens of their images."""
    images = encoder_of(tokenizer)
    return text if images is None else images.expand(text, image_paths(messages))


def encode(tokenizer, text: str) -> list[int]:
    """Return the ids of rendered text: special tokens are recognized, none are added."""
    return tokenizer(text, add_special_tokens=False)["input_ids"]


class _Piece(NamedTuple):
    text: str
    lead: int  # number of first ids that stand for no text of the piece
    start: int  # characters of ``text`` before the piece


def _pieces(tokenizer, text: str) -> list[_Piece]:
    """Split the rendered text of cut messages at the cuts."""
    texts = [piece for piece in text.split(MARK) if piece]
    lead, ids = _lead(tokenizer) if len(texts) > 1 else ("", [])
    return [_Piece(lead + piece, len(ids), len(lead)) if k else _Piece(piece, 0, 0) for k, piece in enumerate(texts)]


def _lead(tokenizer) -> tuple[str, list[int]]:
    """Return a text, and its ids, that keeps the tokenizer from adding a space before what follows; often empty."""
    ids, alone, after = (encode(tokenizer, text) for text in ("\n", "a", "\na"))
    adds_space = after != ids + alone and after[: len(ids)] == ids and tokenizer.decode(after[len(ids) :]) == "a"
    return ("\n", ids) if adds_space else ("", [])


def encode_rendered(tokenizer, text: str) -> list[int]:
    """Return the ids of the rendered text of cut messages."""
    return [i for piece in _pieces(tokenizer, text) for i in encode(tokenizer, piece.text)[piece.lead :]]


def _render_cut(tokenizer, messages: Messages, template_kwargs: Mapping[str, Any]) -> str:
    """Render a conversation with its special tokens cut and its images expanded."""
    cut, arguments = cut_messages(tokenizer, messages), cut_arguments(tokenizer, template_kwargs)
    return _show_images(tokenizer, render(tokenizer, cut, **arguments), messages)


def encode_messages(tokenizer, messages: Messages, **template_kwargs) -> list[int]:
    """Return the ids of a rendered conversation, whose content never becomes a special token."""
    return encode_rendered(tokenizer, _render_cut(tokenizer, messages, template_kwargs))


def encode_prompt(tokenizer, query: Messages | str, **template_kwargs) -> list[int]:
    """Return the ids of a prompt, ready for the policy to continue.

    Chat messages are rendered with the tokenizer's template, and the assistant's turn is opened. If the last message is
    the assistant's, its turn stays open and the policy continues it. Plain text is encoded with the tokenizer's special
    tokens, such as BOS. Special tokens in plain text stay special: without messages, its author writes the template's
    part.

    Args:
        tokenizer: Hugging Face tokenizer.
        query: chat messages or plain text.
        **template_kwargs: arguments of the template.

    Raises:
        ValueError: if the query is neither messages nor text, if it has no tokens, or if messages lack a chat template.
    """
    return encode_prompts(tokenizer, [query], **template_kwargs)[0]


def encode_prompts(tokenizer, queries: Sequence[Messages | str], **template_kwargs) -> list[list[int]]:
    """Return the ids of many prompts in one call of the tokenizer; see :func:`encode_prompt`."""
    # Encode all texts and all pieces of chats as one batch each, and restore their order
    texts = [query for query in queries if isinstance(query, str)]
    rendered = [_render_prompt(tokenizer, query, template_kwargs) for query in queries if not isinstance(query, str)]
    pieces = [_pieces(tokenizer, text) for text in rendered]
    flat = list(chain.from_iterable(pieces))
    text_ids = iter(_encode_batch(tokenizer, texts, add_special_tokens=True))
    encoded_pieces = _encode_batch(tokenizer, [piece.text for piece in flat], add_special_tokens=False)
    piece_ids = (ids[piece.lead :] for piece, ids in zip(flat, encoded_pieces, strict=True))
    chat_ids = (list(chain.from_iterable(islice(piece_ids, len(chat)))) for chat in pieces)
    encoded = [list(next(text_ids)) if isinstance(query, str) else next(chat_ids) for query in queries]
    for query, ids in zip(queries, encoded, strict=True):
        if not ids:
            raise ValueError(f"query={query!r:.200} has no tokens; give every prompt at least one token, such as a BOS")
    return encoded


def _render_prompt(tokenizer, query: Messages, template_kwargs: Mapping[str, Any]) -> str:
    if not is_conversation(query):
        raise ValueError(
            f"query={query!r:.200} must be a string or a non-empty list of messages with 'role' and 'content'"
        )
    last = {"continue_final_message": True} if query[-1]["role"] == "assistant" else {"add_generation_prompt": True}
    try:
        return _render_cut(tokenizer, query, {**template_kwargs, **last})
    except ValueError:
        raise
    except Exception as error:  # a template may raise anything for messages that it does not know
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"query={query!r:.200} cannot be rendered ({reason:.200}); correct its messages") from error


def _encode_batch(tokenizer, texts: list[str], *, add_special_tokens: bool) -> list[list[int]]:
    if not texts:  # some tokenizers refuse an empty batch
        return []
    options = {"return_attention_mask": False, "return_token_type_ids": False}
    return tokenizer(texts, add_special_tokens=add_special_tokens, **options)["input_ids"]


def encode_conversation(tokenizer, messages: Messages, **template_kwargs) -> tuple[list[int], list[bool]]:
    """Encode a finished conversation and mask its assistant tokens, for SFT and evaluation.

    The mask comes from the template's ``{% generation %}`` blocks. Without such blocks it comes from the differences
    between the rendered prefixes of the conversation, and an assistant turn ends with its end-of-turn token.
    """
    # Use the template's generation blocks if it has them
    _require_template(tokenizer)
    conversation = messages
    messages, template_kwargs = cut_messages(tokenizer, messages), cut_arguments(tokenizer, template_kwargs)
    if _GENERATION_TAG.search(tokenizer.chat_template):
        ids, mask = _encode_generation(tokenizer, messages, conversation, template_kwargs)
        if not any(mask) and any(m["role"] == "assistant" and m["content"] for m in messages):
            raise ValueError(
                "the chat template's {% generation %} blocks mark no token of this conversation's assistant messages; "
                "put them around the assistant's content in tokenizer.chat_template"
            )
        return ids, mask

    # Otherwise compare the prefixes before and after each assistant message
    def encode_shown(text: str, count: int) -> list[int]:
        return encode_rendered(tokenizer, _show_images(tokenizer, text, conversation[:count]))

    ids = encode_shown(render(tokenizer, messages, **template_kwargs), len(messages))
    mask = [False] * len(ids)
    for k, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = encode_shown(render_opening(tokenizer, messages[:k], **template_kwargs), k)
        after = encode_shown(render(tokenizer, messages[: k + 1], **template_kwargs), k + 1)
        if ids[: len(before)] != before or ids[: len(after)] != after or len(after) <= len(before):
            raise ValueError(
                f"the chat template has no {{% generation %}} block and renders message {k} differently once later "
                "messages follow; add {% generation %} ... {% endgeneration %} around the assistant's content in "
                "tokenizer.chat_template"
            )
        # Exclude the text between the end of this turn and the next
        end = len(after)
        while (
            end > len(before)
            and tokenizer.eos_token_id in ids[len(before) : end]
            and ids[end - 1] != tokenizer.eos_token_id
        ):
            end -= 1
        mask[len(before) : end] = [True] * (end - len(before))
    return ids, mask


def _encode_generation(
    tokenizer, messages: Messages, conversation: Messages, template_kwargs: dict[str, Any]
) -> tuple[list[int], list[bool]]:
    """Return ids and a mask of all tokens that overlap the template's ``{% generation %}`` blocks."""
    from transformers.utils.chat_template_utils import render_jinja_template  # takes 2 s to import

    variables = {**tokenizer.special_tokens_map, "chat_template": tokenizer.chat_template, **template_kwargs}
    if encoder_of(tokenizer) is not None:
        messages = [message | {"content": content_parts(message.get("content"))} for message in messages]
    texts, spans = render_jinja_template([messages], return_assistant_tokens_mask=True, **variables)
    text, blocks = texts[0], spans[0]
    if (images := encoder_of(tokenizer)) is not None:
        text, blocks = images.expand_spans(text, image_paths(conversation), blocks)
    ids, mask, start = [], [], 0
    for piece in _pieces(tokenizer, text):
        out = tokenizer(piece.text, add_special_tokens=False, return_offsets_mapping=True)
        ids += out["input_ids"][piece.lead :]
        for first, last in out["offset_mapping"][piece.lead :]:
            place = start - piece.start
            mask.append(any(begin < place + last and place + first < end for begin, end in blocks))
        start += len(piece.text) - piece.start + len(MARK)
    return ids, mask


def render_opening(tokenizer, messages: Messages, **template_kwargs) -> str:
    """Return the rendered text up to the assistant's content."""
    if messages:
        return render(tokenizer, messages, **template_kwargs | {"add_generation_prompt": True})
    # A template cannot render an empty conversation
    return render(tokenizer, [{"role": "assistant", "content": BOUNDARY}], **template_kwargs).split(BOUNDARY)[0]


def to_history(conversations: Sequence[Messages]) -> History:
    """Convert the chat messages of ``B`` conversations to TorchRL's ``History``, shape ``[B, n_messages]``.

    Fields that ``History`` does not have (a tool's name, the id of a call) are dropped. A content that is a list of
    parts ``{"type": ...}`` becomes a ``ContentBase`` ``[n_parts]``.
    """
    known = {field.name for field in fields(History)}
    chats = [[{k: v for k, v in m.items() if k in known} for m in chat] for chat in conversations]
    return History.from_chats([[{**m, "content": _to_content(m["content"])} for m in chat] for chat in chats])


def from_history(history: History) -> Messages:
    """Convert the ``History`` of one conversation (shape ``[n_messages]``) to chat messages with their tool calls."""
    chat = []
    for m in (m for m in history.unbind(0) if m.role != "<none>"):
        calls = {"tool_calls": _plain(m.tool_calls)} if m.tool_calls else {}
        chat.append({"role": m.role, "content": _from_content(m.content), **calls})
    return chat


def _plain(value: Any) -> Any:
    """Return the lists and dicts of a value as plain ones, in place of those that tensordict makes."""
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list) else value


def _to_content(content: Any) -> Any:
    """Return parts of a message that TorchRL has fields for as a ``ContentBase``, and any other content unchanged."""
    if not isinstance(content, list) or not content:
        return content
    known = {field.name for field in fields(ContentBase)}
    if not all(set(part) <= known for part in content):
        return content
    return lazy_stack([ContentBase(**part) for part in content])


def _from_content(content: Any) -> Any:
    if not isinstance(content, ContentBase):
        return content
    parts = content.tolist(tolist_first=True)
    return parts if isinstance(parts, list) else [parts]


def join_conversation(query: Messages, completion: Messages) -> Messages:
    """Join a prompt and its completion to one conversation; a turn that the prompt left open becomes one message."""
    if query[-1]["role"] == "assistant" and completion and completion[0]["role"] == "assistant":
        joined = {**query[-1], "content": join_contents(query[-1]["content"], completion[0]["content"])}
        return [*query[:-1], joined, *completion[1:]]
    return [*query, *completion]


def decode_response(tokenizer, tokens: Sequence[int]) -> str:
    """Decode a sampled turn for people, tools and rewards, without special tokens such as the end of turn."""
    return tokenizer.decode(tokens, skip_special_tokens=True)


class Answer(NamedTuple):
    """Tokens that follow an answered turn."""

    ids: list[int]  # ids of the turn's end, the feedback, and the opening of the next turn
    rewritten: bool  # True if the template now renders the earlier conversation differently from what the policy saw


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
    shown, kwargs = feedback, cut_arguments(tokenizer, template_kwargs)
    feedback = cut_messages(tokenizer, feedback)
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
    ids = encode_rendered(tokenizer, _show_images(tokenizer, tail, shown))
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
