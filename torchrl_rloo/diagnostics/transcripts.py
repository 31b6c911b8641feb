"""Transcripts of conversations as one HTML page, with the text, log-prob and advantage of each token."""

from __future__ import annotations

import base64
import math
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from ctypes import c_float
from functools import cached_property
from itertools import accumulate, groupby
from os.path import commonprefix
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase

from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import stack_rows
from torchrl_rloo.data.segments import LAST_SAMPLE_KEYS, split_segments
from torchrl_rloo.data.stop_reasons import STOP_REASONS, stop_reason
from torchrl_rloo.data.templates import Messages, is_conversation
from torchrl_rloo.diagnostics.pages import read_static, render_page
from torchrl_rloo.images.encoder import encoder_of
from torchrl_rloo.images.parts import content_text, image_label, image_paths
from torchrl_rloo.images.shown import thumbnail
from torchrl_rloo.images.store import ImageStore, digest_of
from torchrl_rloo.runtime.files import make_folder, write_text

# Text of each token of a sequence; the texts join to the decoded sequence


_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_CONTROL = re.compile(r"<[|\uff5c].+[|\uff5c]>", re.DOTALL)
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_REMAPPED = sorted(set(range(256)) - set(_PRINTABLE))
# Byte of each character in the vocabulary of byte-level BPE
_BYTES = {chr(b): b for b in _PRINTABLE} | {chr(256 + i): b for i, b in enumerate(_REMAPPED)}


class TokenTexts:
    """Splitter of decoded text into the characters that each token completes, for any tokenizer.

    A character whose bytes span several tokens belongs to the last of them, and the tokens before it have empty text.
    Invalid bytes become replacement characters, as in the decoded text.

    Example:
        >>> from torchrl_rloo.embedded import build_tokenizer
        >>> tokenizer = build_tokenizer()
        >>> TokenTexts(tokenizer)(tokenizer("What is 5°")["input_ids"])
        ['Wh', 'at', ' is', ' ', '5', '', '°']
    """

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        state = b"" if decoder is None else decoder.__getstate__()
        self._byte_level, self._byte_fallback = b'"ByteLevel"' in state, b'"ByteFallback"' in state
        self._known: dict[int, bytes | str] = {}

    def __call__(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each of ``T`` ids."""
        whole, texts = self.decode(ids), self._texts_by_bytes(ids)
        return texts if "".join(texts) == whole else self._texts_by_prefixes(ids, whole)

    def decode(self, ids: Sequence[int]) -> str:
        """Decode a sequence, including special tokens."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def vocabulary_entry(self, token: int) -> str | None:
        """Return a token as the vocabulary spells it, or None for an unknown id."""
        try:
            return self.tokenizer.convert_ids_to_tokens(token)
        except (IndexError, KeyError, OverflowError, TypeError):
            return None

    def token_text(self, token: int) -> str | None:
        """Return the text of a token, or None if it depends on neighboring tokens."""
        known = self._get_own(token)
        if isinstance(known, str):
            return known
        try:
            return known.decode()
        except UnicodeDecodeError:
            return None

    def token_bytes(self, token: int) -> bytes | None:
        """Return the bytes of a token that is not valid text by itself, or None."""
        known = self._get_own(token)
        return known if isinstance(known, bytes) and self.token_text(token) is None else None

    def is_special(self, token: int) -> bool:
        """Return whether a token is special to the tokenizer, or looks special (``<|...|>``)."""
        return token in self._special

    @cached_property
    def _special(self) -> frozenset[int]:
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        marks = {i for i, token in added.items() if token.special or _CONTROL.fullmatch(token.content)}
        return frozenset(self.tokenizer.all_special_ids) | marks

    @cached_property
    def _anchor(self) -> tuple[list[int], str]:
        """Ordinary token and its text, after which another token keeps its leading space."""
        ids = self.tokenizer("a", add_special_tokens=False)["input_ids"][-1:]
        return ids, self.decode(ids)

    def _get_own(self, token: int) -> bytes | str:
        if token not in self._known:
            self._known[token] = self._find_own(token)
        return self._known[token]

    def _find_own(self, token: int) -> bytes | str:
        piece = self.vocabulary_entry(token)
        if piece is None:
            return ""
        if self._byte_level:  # as in tokenizers, a piece with any other character is literal text
            return bytes(_BYTES[c] for c in piece) if all(c in _BYTES for c in piece) else piece.encode()
        if self._byte_fallback and (byte := _BYTE_TOKEN.fullmatch(piece)):
            return bytes.fromhex(byte[1])
        ids, before = self._anchor
        text = self.decode([*ids, token])
        return text[len(before) :] if text.startswith(before) else self.decode([token])

    def _texts_by_bytes(self, ids: Sequence[int]) -> list[str]:
        """Return the texts if those of single tokens join; replacement characters stand for invalid bytes."""
        parts = [own if isinstance(own, bytes) else own.encode() for own in map(self._get_own, ids)]
        texts, ends = [""] * len(parts), list(accumulate(map(len, parts)))
        place = position = 0
        for text, size in _characters(b"".join(parts)):
            position += size
            while ends[place] < position:
                place += 1
            texts[place] += text
        return texts

    def _texts_by_prefixes(self, ids: Sequence[int], whole: str) -> list[str]:
        """Return the texts by decoding every prefix, which is slow but correct for any tokenizer."""
        texts, done = [], 0
        for i in range(1, len(ids) + 1):
            end = len(whole) if i == len(ids) else len(commonprefix([self.decode(ids[:i]), whole]))
            texts.append(whole[done:end])
            done = max(done, end)
        return texts


def _characters(data: bytes) -> list[tuple[str, int]]:
    """Decode UTF-8 into characters with their number of bytes; invalid bytes become replacement characters."""
    found: list[tuple[str, int]] = []
    while data:
        try:
            good, bad, data = data.decode(), 0, b""
        except UnicodeDecodeError as error:
            good, bad, data = data[: error.start].decode(), error.end - error.start, data[error.end :]
        found += [(c, len(c.encode())) for c in good]
        if bad:
            found.append(("\ufffd", bad))
    return found


# Blocks of a row


TOOL_CALL_PATTERN = re.compile(
    r"<(?P<tag>tool|tool_call|function_call)>.*?(?:</(?P=tag)>|\Z)"
    r"|<function=.*?(?:</function>|\Z)"
    r"|(?:\[TOOL_CALLS\]|<\|python_tag\|>).*",
    re.DOTALL,
)  # formats of Hermes and Qwen, Llama, Mistral, and the embedded tasks

_ERROR = re.compile(r"\W*(?:error|traceback|\w*(?:error|exception)\b)", re.IGNORECASE)
_ERROR_IN_USER = re.compile(r"<tool_response>\s*Error:")


class Block(NamedTuple):
    """One message of a transcript."""

    start: int
    role: str
    label: str = ""
    error: bool = False


def find_blocks(
    texts: Sequence[str], special: Sequence[bool], actions: Sequence[bool], contexts: Sequence[Messages]
) -> list[Block]:
    """Split tokens into messages by searching the contents of messages in the decoded context.

    It encodes no text. The template's opening of a policy turn belongs to that turn.
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
    """Group the messages of a conversation by the policy turn that follows them."""
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


def find_calls(texts: Sequence[str], actions: Sequence[bool]) -> list[list[int]]:
    """Return ``[start, end]``, in tokens, of each tool call that the policy wrote."""
    found, start = [], 0
    for is_action, run in groupby(actions):
        end = start + len(list(run))
        if is_action:
            ends = list(accumulate(map(len, texts[start:end])))
            for call in TOOL_CALL_PATTERN.finditer("".join(texts[start:end])):
                first, last = _token_at(ends, call.start()), _token_at(ends, call.end() - 1)
                found.append([start + first, start + last + 1])
        start = end
    return found


def is_tool_error(message: dict[str, Any]) -> bool:
    """Return whether a message from a tool, or from the user in place of a tool, reports an error."""
    content = content_text(message["content"])
    if message["role"] == "tool":
        return bool(_ERROR.match(content))
    return message["role"] == "user" and bool(_ERROR_IN_USER.search(content))


def _split_context(
    texts: Sequence[str], special: Sequence[bool], messages: Messages, offset: int, last: bool
) -> list[Block]:
    """Split a run of context tokens into blocks; if a message is not found, return one block."""
    text, ends = "".join(texts), list(accumulate(map(len, texts)))
    shown = [message for message in messages if any(_texts(message))]
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
        start = None
        for whole in filter(None, _texts(message)):
            for content in (whole, whole.rpartition("</think>")[2].strip()):  # templates drop earlier thinking
                at = text.find(content, position)
                if content and at >= 0:
                    break
            else:
                return []
            start, position = at if start is None else start, at + len(content)
        spans.append((start, position))
    return spans


def _texts(message: dict[str, Any]) -> list[str]:
    """Return the texts of a message: its content, or those between its images."""
    content = message["content"]
    parts = [part.get("text") for part in content] if isinstance(content, list) else [content]
    return [str(part).strip() for part in parts if part is not None]


def _find_message_start(special: Sequence[bool], start: int, end: int) -> int:
    """Return the start of a message: the second special token after the last content, or after the only one."""
    marks = [i for i in range(start, end) if special[i]]
    return marks[1] if len(marks) > 1 else marks[0] + 1 if marks else end


def _token_at(ends: Sequence[int], position: int) -> int:
    """Return the index of the token that contains a character, given the end of each token's text."""
    return bisect_right(ends, position)


def _label(message: dict[str, Any]) -> str:
    return " ".join(str(message[key]) for key in ("name", "tool_call_id") if message.get(key))


# Page


MAX_ROWS = 500  # of a page
_PAGE = Path(__file__).parent / "transcripts_page"
_MAX_INTEGER = 2**53  # JavaScript represents integers up to here exactly
_SNIPPET = 160  # characters of a prompt or completion in the list
_HIDDEN_KEYS = (keys.TOOLS, keys.TASK, *keys.RESERVED)


def write_transcripts(
    path: str | Path,
    rows: TensorDictBase | Sequence[TensorDictBase],
    tokenizer,
    *,
    title: str = "Transcripts",
    settings: Mapping[str, Any] | None = None,
    reward_names: Sequence[str] = (),
    fields: Sequence[Mapping[str, Any]] | None = None,
) -> Path:
    """Write finished conversations as one self-contained HTML page.

    The page lists, sorts and filters the conversations, and shows the exact tokens of each, with action mask,
    log-probs, rewards and advantages. Markup in completions is shown as text. A row of 1,000 tokens takes about 15 kB.
    Thumbnails stand in the places of images; one that is missing or changed is shown as a text.

    Args:
        path: HTML file to write; its directory is created if missing.
        rows: finished trajectories (:mod:`torchrl_rloo.data.keys`), of which the page has the first 500. Tokens and
            action mask are required; the page also shows every other entry of the schema that a row has. Without
            messages, tokens have no roles.
        tokenizer: tokenizer of the policy.
        title: title of the page.
        settings: settings to show, e.g. step and sampling parameters; None shows none.
        reward_names: names of the reward functions, in the order of ``("next", "rewards")``.
        fields: entries that replace those of each row's head, such as ``kind`` or ``reward``; None replaces none.

    Returns:
        ``path``.

    Raises:
        KeyError: if a row has no tokens or no action mask.
        ValueError: if ``rows`` is empty.
    """
    rows = list(rows.unbind(0)) if isinstance(rows, TensorDictBase) else list(rows)
    if not rows:
        raise ValueError("rows is empty; a page requires at least one finished trajectory")
    reader = _Reader(tokenizer)
    entries = [reader.entry(row, place) for place, row in enumerate(rows[:MAX_ROWS])]
    for entry, changed in zip(entries, fields or (), strict=False):
        entry |= _to_plain(changed)
    data = {
        "title": title,
        "settings": _to_plain(settings or {}),
        "reward_names": list(reward_names),
        "stop_reasons": STOP_REASONS,
        "total": len(rows),
        "vocabulary": reader.vocabulary(),
        "images": reader.images,
        "rows": entries,
    }
    make_folder(Path(path).parent)
    page = render_page(
        read_static(_PAGE, ["page.html"]),
        title=title,
        script=read_static(_PAGE, ("tokens.js", "transcript.js", "list.js")),
        style=read_static(_PAGE, ["page.css"]),
        data=data,
    )
    return write_text(Path(path), page)


class _Reader:
    """Converter of rows to plain data, which collects the vocabulary that they use."""

    def __init__(self, tokenizer):
        self.texts = TokenTexts(tokenizer)
        self.used: set[int] = set()
        self.images: dict[str, dict[str, str | None]] = {}  # label and thumbnail by hash
        self.encoder, self.paths = encoder_of(tokenizer), {}  # paths of images by hash

    def entry(self, row: TensorDictBase, place: int) -> dict[str, Any]:
        """Return the data of a row for the page."""
        query, completion = row.get(keys.QUERY, None), row.get(keys.COMPLETION, None)
        query = query if query is None else row[keys.QUERY]
        completion = completion if completion is None else row[keys.COMPLETION]
        # Split the row into samples: a template that rewrites the past makes several
        messages = [m for part in (query, completion) if is_conversation(part) for m in part]
        with suppress(ValueError, KeyError):  # an image that is not in a store
            self.paths |= {digest_of(path): path for path in image_paths(messages)}
        parts, turns = [], 0
        for sample in _split_samples(row):
            parts.append(self._part(sample, group_contexts(query, completion, before=turns)))
            turns += len(parts[-1]["mask"])
        ended = any(key in row.keys(True) for key in (keys.STOP_REASON, keys.STOP_REASON[1]))
        return {
            "place": place,
            "kind": "",
            "group": _number(row, keys.GROUP_ID),
            "prompt_id": _number(row, keys.PROMPT_ID),
            "version": _number(row, keys.POLICY_VERSION),
            "turns": _number(row, keys.NUM_TURNS),
            "calls": _number(row, keys.NUM_TOOL_CALLS, sum(len(part["calls"]) for part in parts)),
            "errors": sum(block[3] for part in parts for block in part["blocks"]),
            "tokens": sum(part["tokens"] for part in parts),
            "actions": sum(part["actions"] for part in parts),
            "stop": stop_reason(row) if ended else None,
            "task": _to_plain(row[keys.TASK]) if keys.TASK in row.keys() else None,
            "reward": _number(row, keys.REWARD),
            "rewards": _to_plain(row[keys.REWARDS]) if keys.REWARDS in row.keys(True) else [],
            "advantage": _advantage(row),
            "prompt": self._prompt_snippet(row, query),
            "answer": self._completion_snippet(row, completion),
            "columns": _columns(row),
            "parts": parts,
        }

    def _part(self, row: TensorDictBase, contexts: list[Messages]) -> dict[str, Any]:
        ids, actions = row[keys.TOKENS].tolist(), row[keys.ACTION_MASK].tolist()
        texts, special = self.texts(ids), [self.texts.is_special(i) for i in ids]
        self.used.update(ids)
        mask = row[keys.ACTION_MASK].cpu()
        part = {
            "tokens": len(ids),
            "actions": sum(actions),
            "ids": _pack(row[keys.TOKENS], torch.int32),
            "mask": _find_runs(actions),
            "blocks": [list(b) for b in find_blocks(texts, special, actions, contexts)],
            "calls": find_calls(texts, actions),
            "texts": {i: text for i, text in enumerate(texts) if text != self.texts.token_text(ids[i])},
        }
        # Entries that only some rows have
        if (images := row.get(keys.IMAGES, None)) is not None and len(images):
            part["images"] = self._show_images(ids, images)
        names = {"log_probs": keys.LOG_PROBS, "ref_log_probs": keys.REF_LOG_PROBS}
        for name, key in (names | {"new_log_probs": keys.PROXIMAL_LOG_PROBS}).items():
            if (values := row.get(key, None)) is not None:
                part[name] = _pack(values.cpu()[mask], torch.float32)
        if (advantages := row.get(keys.ADVANTAGE, None)) is not None and advantages.numel() == len(ids) > 1:
            part["advantages"] = _pack(advantages.reshape(-1).cpu()[mask], torch.float32)
        if (versions := row.get(keys.ACTION_VERSIONS, None)) is not None:
            part["versions"] = _pack(versions, torch.int32)
        if (rewards := row.get(keys.TOKEN_REWARDS, None)) is not None:
            part["token_rewards"] = {i: _to_plain(r) for i, r in enumerate(rewards.tolist()) if r != 0}
        return part

    def _show_images(self, ids: list[int], images: torch.Tensor) -> list[list[Any]]:
        """Return ``[start, end, hash]`` of each image; start and end are 0 where its tokens are not known."""
        store = ImageStore() if self.encoder is None else self.encoder.store
        hashes, places = [bytes(image).hex() for image in images.tolist()], []
        with suppress(ValueError):  # an image is missing, or the row has other tokens
            self.paths |= {name: str(store.path(name)) for name in hashes if name not in self.paths}
            if self.encoder is not None:
                spans = self.encoder.spans(ids, [self.paths[name] for name in hashes])
                places = [(span.start, span.stop) for span in spans]
        for name in set(hashes) - self.images.keys():
            path = self.paths.get(name, str(store.folder / f"{name}.png"))
            self.images[name] = {"label": image_label(path), "picture": thumbnail(path)}
        return [[*place, name] for place, name in zip(places or [(0, 0)] * len(hashes), hashes, strict=True)]

    def _prompt_snippet(self, row: TensorDictBase, query: Any) -> str:
        if is_conversation(query):
            query = content_text(next((m for m in reversed(query) if m["role"] == "user"), query[-1])["content"])
        if not isinstance(query, str):
            mask = row[keys.ACTION_MASK]
            query = self.texts.decode(row[keys.TOKENS][: int(mask.int().argmax())].tolist()[-2 * _SNIPPET :])
        return query[:_SNIPPET]

    def _completion_snippet(self, row: TensorDictBase, completion: Any) -> str:
        if isinstance(completion, Sequence) and not isinstance(completion, str):
            replies = [content_text(m["content"]) for m in completion if m["role"] == "assistant"]
            completion = replies[-1] if replies else ""
        if completion is None:
            completion = self.texts.decode(row[keys.TOKENS][row[keys.ACTION_MASK]].tolist())
        return completion if len(completion) <= _SNIPPET else f"\u2026{completion[-_SNIPPET:]}"

    def vocabulary(self) -> dict[int, list[Any]]:
        """Return ``[text, piece, special, bytes]`` of each used id, without redundant entries at the end."""
        return {token: self._token(token) for token in sorted(self.used)}

    def _token(self, token: int) -> list[Any]:
        text, piece = self.texts.token_text(token), self.texts.vocabulary_entry(token)
        own = self.texts.token_bytes(token)
        if own is not None:
            return [None, piece, 0, own.hex(" ")]
        if piece is None or self.texts.is_special(token):
            return [text, piece, 1]
        return [text] if text == piece else [text, piece]


def _split_samples(row: TensorDictBase) -> list[TensorDictBase]:
    """Return the earlier samples with actions, if the template rewrote the past, then the row itself."""
    if keys.PREVIOUS_SEGMENTS not in row.keys():
        return [row]
    samples = split_segments(stack_rows([row.exclude(*LAST_SAMPLE_KEYS)])).unbind(0)
    masks = row[keys.PREVIOUS_SEGMENTS]["mask"].split(row[keys.PREVIOUS_SEGMENTS]["sizes"].tolist())
    return [*samples[: sum(bool(mask.any()) for mask in masks)], row]


def _columns(row: TensorDictBase) -> dict[str, Any]:
    columns = {name: _to_plain(row[name]) for name in row.keys() if name not in _HIDDEN_KEYS}
    return columns | (_to_plain(row[keys.LOG_EXTRA]) if keys.LOG_EXTRA in row.keys(True) else {})


def _number(row: TensorDictBase, key: Any, default: float | None = None) -> float | None:
    value = row.get(key, None)
    return default if value is None else _to_plain(value.reshape(-1)[0].item())


def _advantage(row: TensorDictBase) -> float | None:
    """Return the advantage of the row, or the mean over its action tokens."""
    values = row.get(keys.ADVANTAGE, None)
    if values is None:
        return None
    values = values.reshape(-1).cpu()
    mask = row[keys.ACTION_MASK].cpu()
    return _to_plain(float((values[mask] if len(values) == len(mask) else values).mean()))


def _find_runs(flags: Sequence[bool]) -> list[list[int]]:
    """Return ``[start, end]`` of each run of True."""
    edges = [i for i, (a, b) in enumerate(zip([False, *flags], [*flags, False], strict=True)) if a != b]
    return [[start, end] for start, end in zip(edges[::2], edges[1::2], strict=True)]


def _pack(values: torch.Tensor, dtype: torch.dtype) -> str:
    """Encode numbers as base64 of their little-endian bytes, which is exact and half the size of decimals."""
    array = values.detach().cpu().reshape(-1).to(dtype).numpy()
    return base64.b64encode(array.astype(array.dtype.newbyteorder("<")).tobytes()).decode("ascii")


def _to_plain(value: Any) -> Any:
    """Convert a value to JSON types: None if it is not finite, text for large integers and other types."""
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(name): _to_plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_plain(item) for item in value]
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        single = c_float(value).value == value  # then 0.8 rather than 0.800000011920929
        return float(str(np.float32(value))) if single else value
    if isinstance(value, int) and abs(value) > _MAX_INTEGER:
        return str(value)
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)
