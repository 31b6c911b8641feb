"""Prompt datasets: rows from any source, checked once at loading."""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import operator
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from numbers import Integral
from typing import Any

from torchrl_rloo.data import keys
from torchrl_rloo.data.notices import notify_once
from torchrl_rloo.data.sources import Located, check_query, describe_source, plain_value, read_source, source_folder
from torchrl_rloo.data.templates import Messages, encode_prompts
from torchrl_rloo.images.encoder import encoder_of
from torchrl_rloo.images.parts import has_parts, image_paths, place_images
from torchrl_rloo.images.store import ImageError, ImageStore, digest_of
from torchrl_rloo.runtime.lookup import import_object

_LOGGER = logging.getLogger(__name__)
_MAX_NAME_CHARS = 200
PROMPT_COLUMNS = ("prompt", "query", "question", "problem", "messages", "instruction")
IMAGE_COLUMNS = ("image", "images")  # of prompts: one image, or a list of them
_ANSWER_COLUMNS = (keys.COMPLETION, "completion_ids")  # of rows for fine-tuning: here the policy writes them


@dataclass(frozen=True)
class PromptCounts:
    """Counts of a source's rows: read, dropped and kept."""

    read: int
    too_long: int  # dropped: the prompt is longer than max_prompt_length
    duplicates: int  # kept: the prompt repeats that of an earlier row
    kept: int
    unreadable: int = 0  # dropped: an image of the prompt cannot be read


class PromptDataset(Sequence):
    """Immutable, non-empty sequence of prompts with the dataset's other columns.

    :func:`load_prompts` builds one and checks its rows.

    Args:
        rows: rows ``{"query": messages or text, **columns}`` of plain Python values.
        too_long: number of rows dropped before, for ``counts``.
        chat: if True, :meth:`for_tokenizer` makes text prompts user messages. None decides by the chat template.
        unreadable: number of rows dropped before for their images, for ``counts``.

    Attributes:
        rows: the rows; do not change them. ``dataset[i]`` returns a copy.
        counts: numbers of rows read, dropped and kept.
        chat: value of the argument.

    Raises:
        ValueError: if there are no rows.
    """

    in_order = False  # whether a DataLoadingPrimer keeps the order of the rows

    def __init__(
        self, rows: Iterable[dict[str, Any]], *, too_long: int = 0, chat: bool | None = None, unreadable: int = 0
    ):
        self.rows, self.chat = list(rows), chat
        self._encoded: tuple[Any, str, list[list[int]]] | None = None  # tokenizer, settings, ids of each prompt
        kept = len(self.rows)
        if not kept:
            raise ValueError("rows=[] must have at least one row")
        distinct = len({canonical_content(row[keys.QUERY]) for row in self.rows})
        read = kept + too_long + unreadable
        self.counts = PromptCounts(read, too_long, duplicates=kept - distinct, kept=kept, unreadable=unreadable)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return plain_value(self.rows[operator.index(index)])

    @property
    def beginning(self) -> PromptDataset:
        """Rows for checks: all of them, or the first ones of a stream."""
        return self

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns besides ``query``."""
        return tuple(name for name in self.rows[0] if name != keys.QUERY)

    @property
    def conversational(self) -> bool:
        """True if the prompts are chat messages rather than plain text."""
        return not isinstance(self.rows[0][keys.QUERY], str)

    @cached_property
    def fingerprint(self) -> str:
        """Hex SHA-256 of the rows in order, equal in every process, so that a resumed run can compare datasets.

        Images count by their content, wherever their files are.
        """
        return hashlib.sha256("\n".join(map(canonical_content, self.rows)).encode()).hexdigest()

    def select(self, indices: Iterable[int]) -> PromptDataset:
        """Return the rows at ``indices``, in that order, as a dataset with new counts."""
        indices = [operator.index(i) for i in indices]
        part = PromptDataset((self.rows[i] for i in indices), chat=self.chat)
        if self._encoded is not None:
            tokenizer, settings, ids = self._encoded
            part._encoded = tokenizer, settings, [ids[i] for i in indices]
        return part

    def for_tokenizer(self, tokenizer) -> PromptDataset:
        """Return the prompts as a policy with this tokenizer reads them.

        If ``chat`` is None, text prompts become user messages if the tokenizer has a chat template. The log reports the
        decision once.
        """
        if self.conversational or self.chat is False:
            return self
        if self.chat is None:
            has_template = bool(getattr(tokenizer, "chat_template", None))
            notify_once(_CHAT_NOTICE if has_template else _TEXT_NOTICE)
            if not has_template:
                return self
        rows = [row | {keys.QUERY: as_chat(row[keys.QUERY])} for row in self.rows]
        dataset = PromptDataset(rows, too_long=self.counts.too_long)
        dataset.in_order = self.in_order
        return dataset

    def encode(self, tokenizer, **template_kwargs: Any) -> list[list[int]]:
        """Encode all prompts in one batch, and return and cache their ids, ``[P_i]`` each.

        Args:
            tokenizer: Hugging Face tokenizer.
            **template_kwargs: arguments of the chat template.
        """
        if (ids := self.encoded(tokenizer, **template_kwargs)) is None:
            ids = encode_prompts(tokenizer, [row[keys.QUERY] for row in self.rows], **template_kwargs)
            self._encoded = tokenizer, _encoding_key(tokenizer, template_kwargs), ids
        return ids

    def encoded(self, tokenizer, **template_kwargs: Any) -> list[list[int]] | None:
        """Return the ids that :meth:`encode` cached for these arguments, or None."""
        if self._encoded is None or self._encoded[0] is not tokenizer:
            return None
        return self._encoded[2] if self._encoded[1] == _encoding_key(tokenizer, template_kwargs) else None

    def longest(self, tokenizer, **template_kwargs: Any) -> int:
        """Return the length of the longest prompt in tokens."""
        return max(map(len, self.encode(tokenizer, **template_kwargs)))

    def __str__(self) -> str:
        """Describe the number of prompts, the columns and the dropped rows."""
        counts, kind = self.counts, "chat" if self.conversational else "text"
        notes = [
            f"{number:,} {what}"
            for number, what in (
                (counts.too_long, "too long and dropped"),
                (counts.unreadable, "with unreadable images and dropped"),
                (counts.duplicates, "repeated"),
            )
            if number
        ]
        columns = f" with {', '.join(self.columns)}" if self.columns else ""
        return f"{len(self):,} {kind} prompts{columns}" + (f" ({', '.join(notes)})" if notes else "")

    def __repr__(self) -> str:
        kind = "conversational" if self.conversational else "text"
        return f"PromptDataset({len(self)} {kind} prompts, columns={self.columns}, {self.counts})"


_CHAT_NOTICE = "text prompts become user messages: the tokenizer has a chat template; use chat=False to keep plain text"
_TEXT_NOTICE = (
    "text prompts stay plain text: the tokenizer has no chat template; set model.chat_template= to train on messages"
)


def _encoding_key(tokenizer, template_kwargs: Mapping[str, Any]) -> str:
    """Return a key of the settings that decide how ``tokenizer`` encodes prompts."""
    return _canonical([getattr(tokenizer, "chat_template", None), len(tokenizer), dict(template_kwargs)])


def load_prompts(
    source: str | os.PathLike | Iterable[Mapping[str, Any]] | Mapping[str, Iterable[Mapping[str, Any]]],
    *,
    split: str | None = "train",
    name: str | None = None,
    row_map: Callable[[Mapping[str, Any]], Mapping[str, Any]] | str | None = None,
    prompt_column: str | None = None,
    column_map: Mapping[str, str] | None = None,
    columns: Sequence[str] | None = None,
    system_prompt: str | None = None,
    chat: bool | None = None,
    tokenizer=None,
    template_kwargs: Mapping[str, Any] | None = None,
    max_prompt_length: int | None = None,
    limit: int | None = None,
    images: ImageStore | str | os.PathLike | None = None,
    streaming: int | None = None,
    exclude: Collection[str] = (),
) -> PromptDataset:
    """Read prompts and check every row.

    A column ``image`` or ``images`` (a list) belongs to the prompts, as in TRL: paths, bytes, ``PIL.Image`` or Arrow's
    mappings. Its images come before the text of the first user message, or fill the parts ``{"type": "image"}`` of the
    messages in order. Parts may also hold images (``image``, ``url``, ``path``, ``base64``, OpenAI's ``image_url``).
    Text prompts with images become user messages. In the rows an image is ``{"type": "image", "url": <path>}``. A row
    with an image that cannot be read is dropped. ``column_map={"image": "picture"}`` with ``columns`` omits images.

    Columns ``completion`` and ``completion_ids``, of rows for fine-tuning, are left out as in TRL: the policy writes
    them. ``column_map={"completion": "reference"}`` keeps one under another name.

    Args:
        source: hub id, ``.jsonl``, ``.json``, ``.parquet`` or ``.csv`` file (whose values stay text), directory from
            ``save_to_disk``, ``datasets.Dataset``, ``DatasetDict``, or iterable of mappings.
        split: split of a hub dataset or ``DatasetDict``. None takes the only one.
        name: configuration of a hub dataset.
        row_map: function from a source row to a row, for example to extract an answer from a text, or its dotted path.
            One of the first argument ``cfg`` is a transform of axolotl, which returns such a function and options.
            It sees images of a ``datasets.Dataset`` as mappings with ``bytes`` or ``path``.
        prompt_column: column of prompts, text or messages, after ``column_map``. None finds one of ``PROMPT_COLUMNS``.
        column_map: new names of columns, ``{name in the source: name in the rows}``.
        columns: other columns to keep, as named after ``column_map``. None keeps all.
        system_prompt: system message for conversations without one. It makes plain-text prompts conversational.
        chat: if True, plain-text prompts become user messages. None decides by the chat template of the policy's
            tokenizer: here if ``tokenizer`` is given, otherwise in :class:`~torchrl_rloo.envs.DatasetChatEnv` with
            :meth:`PromptDataset.for_tokenizer`.
        tokenizer: Hugging Face tokenizer that checks and measures the prompts.
        template_kwargs: arguments of the chat template.
        max_prompt_length: largest number of tokens, template included. Longer prompts are dropped. None disables it.
        limit: number of rows to read from the start. None reads all.
        images: store of the images, or its folder. None is that of the tokenizer, else
            :class:`~torchrl_rloo.images.ImageStore` in the user's cache. Relative paths start from the source's folder.
        streaming: number of rows among which a draw chooses, for a source larger than memory. Rows are then read and
            checked as they are drawn, a hub dataset without a download, and their number stays unknown. 1 keeps their
            order. Without a tokenizer, text prompts stay text unless ``chat`` is True. None reads all rows now.
        exclude: texts (``str(query)``) of prompts, such as held-out ones, that a stream leaves out.

    Raises:
        FileNotFoundError: if ``source`` is neither a local path nor a reachable hub dataset.
        TypeError: if ``source`` is neither a path nor iterable, or ``row_map`` is not callable.
        ValueError: if an argument, a column or a row is invalid, if all prompts are equal, or if no prompt is left.
            An image that cannot be read is an error only if no row is left.

    Example:
        >>> load_prompts([{"question": "2+2?", "answer": 4}], chat=True)[0]
        {'query': [{'role': 'user', 'content': '2+2?'}], 'answer': 4}
    """
    # Check arguments
    for argument, value in (("max_prompt_length", max_prompt_length), ("limit", limit), ("streaming", streaming)):
        if value is not None and not _is_positive_integer(value):
            raise ValueError(f"{argument}={value!r} must be a positive integer or None")
    if tokenizer is None and max_prompt_length is not None:
        raise ValueError(f"max_prompt_length={max_prompt_length} requires the policy's tokenizer; pass tokenizer=")
    if system_prompt is not None and chat is None:
        chat = tokenizer is None or bool(getattr(tokenizer, "chat_template", None))
    if isinstance(row_map, str):
        row_map = import_object(row_map, "row_map")
    if row_map is not None and not callable(row_map):
        raise TypeError(f"row_map={row_map!r:.100} must be a function of a row or its dotted path")
    row_map = row_map and _axolotl_transform(row_map)
    # Read rows and turn prompts into messages
    located = islice(read_source(source, split, name, streaming is not None), limit)
    located = located if row_map is None else _mapped(located, row_map)
    if images is None and (encoder := encoder_of(tokenizer)) is not None:
        images = encoder.store
    store = images if isinstance(images, ImageStore) else ImageStore(images)
    add_image = partial(store.add, base=source_folder(source))
    unreadable: list[str] = []
    drop = unreadable.append if streaming is None else partial(_LOGGER.warning, "%s; this row is dropped")
    checked = _checked_rows(located, prompt_column, column_map or {}, columns, add_image, drop)
    if streaming is not None:
        from torchrl_rloo.data.streamed import StreamedPrompts  # it has this file's class as its base

        chat = bool(tokenizer.chat_template) if chat is None and tokenizer is not None else chat
        if chat or system_prompt is not None:
            checked = (r | {keys.QUERY: as_chat(r[keys.QUERY], system_prompt, bool(chat))} for r in checked)
        checked = (row for row in checked if str(row[keys.QUERY]) not in exclude)
        if max_prompt_length is not None:
            ids = partial(encode_prompts, tokenizer, **template_kwargs or {})
            checked = (row for row in checked if len(ids([row[keys.QUERY]])[0]) <= max_prompt_length)
        return StreamedPrompts(checked, streaming, max_prompt_length)
    rows = list(checked)
    if unreadable:
        what = f"images of {len(unreadable)} of {len(rows) + len(unreadable)} rows of {describe_source(source)}"
        if not rows:
            raise ValueError(f"{what} cannot be read: {unreadable[0]}; correct them, or rename the column")
        _LOGGER.warning("%s cannot be read, so these rows are dropped; the first: %s", what, unreadable[0])
    if not rows:
        raise ValueError(f"{describe_source(source)} is empty; give at least one row")
    if chat is False and not isinstance(rows[0][keys.QUERY], str):
        raise ValueError(
            f"chat=False requires text prompts, but {describe_source(source)} has messages or images; remove chat"
        )
    for row in rows if chat or system_prompt is not None else ():
        row[keys.QUERY] = as_chat(row[keys.QUERY], system_prompt, bool(chat))
    dataset = PromptDataset(rows, chat=chat, unreadable=len(unreadable))
    # Drop long prompts; equal prompts mean that the wrong column was chosen
    if tokenizer is not None:
        dataset = _drop_long(dataset.for_tokenizer(tokenizer), tokenizer, template_kwargs or {}, max_prompt_length)
    if 1 < len(dataset) == dataset.counts.duplicates + 1:
        same = f"prompts of {describe_source(source)} are equal, {dataset.rows[0][keys.QUERY]!r:.200}"
        raise ValueError(f"all {len(dataset)} {same}; check prompt_column, or give one row")
    return dataset


def longest_prompt(tokenizer, datasets: Iterable[PromptDataset], **template_kwargs: Any) -> int:
    """Return the length of the longest prompt in tokens; the datasets cache the ids for the environment."""
    return max(dataset.longest(tokenizer, **template_kwargs) for dataset in datasets)


def show_examples(
    number: int, dataset: PromptDataset, *others: PromptDataset, chat: bool | None = False
) -> list[PromptDataset]:
    """Show solved prompts before each prompt, for base models, which continue text (few-shot, arXiv 2005.14165).

    A prompt becomes ``Q: <example>\\nA: <answer>\\n\\n ... Q: <prompt>\\nA:``. All rows of a task show the same
    examples, so that their prompts begin alike.

    Args:
        number: number of examples: the first rows of ``dataset`` (of each task, in a mixture), which it then lacks.
        dataset: text prompts with a column ``answer``.
        *others: further prompts, such as the held-out ones, that show the same examples.
        chat: if True, the results become user messages; None decides by the chat template, False keeps text.

    Returns:
        ``dataset`` and ``others`` with longer prompts.

    Raises:
        ValueError: if prompts are messages, or a row has no answer, or no row is left.

    Example:
        >>> rows = load_prompts([{"prompt": "1+1?", "answer": "2"}, {"prompt": "2+2?", "answer": "4"}])
        >>> show_examples(1, rows)[0][0]["query"]
        'Q: 1+1?\\nA: 2\\n\\nQ: 2+2?\\nA:'
    """
    beginnings: dict[Any, list[str]] = {}
    rest, has_messages = [], any(part.conversational for part in (dataset, *others))
    for index, row in enumerate(dataset.rows):
        shown = beginnings.setdefault(row.get(keys.TASK), [])
        if len(shown) == number:
            rest.append(index)
            continue
        if has_messages or row.get("answer") is None:
            raise ValueError(
                f"examples={number} requires text prompts with a column 'answer', got {dataset!r}; set examples to 0"
            )
        shown.append(f"Q: {row[keys.QUERY]}\nA: {row['answer']}\n\n")
    if not rest:
        raise ValueError(f"examples={number} leaves none of the {len(dataset)} prompts; lower it, or add prompts")

    def shown_before(row: dict[str, Any]) -> dict[str, Any]:
        before = "".join(beginnings[row.get(keys.TASK)])
        return row | {keys.QUERY: f"{before}Q: {row[keys.QUERY]}\nA:"}

    parts = (dataset.select(rest), *others)
    return [PromptDataset(map(shown_before, part.rows), too_long=part.counts.too_long, chat=chat) for part in parts]


def split_prompts(dataset: PromptDataset, eval_size: int | float, seed: int) -> tuple[PromptDataset, PromptDataset]:
    """Split a dataset into ``(train, eval)`` and keep rows with the same prompt together.

    The held-out prompts depend on the prompts and the seed, not on the order of the rows. Both parts keep that order.

    Args:
        dataset: dataset with at least two distinct prompts.
        eval_size: number (int) or fraction (float) of distinct prompts to hold out.
        seed: seed of the split.

    Raises:
        ValueError: if either part would have no prompt.
    """
    prompts = [canonical_content(row[keys.QUERY]) for row in dataset.rows]
    distinct = sorted(set(prompts), key=lambda prompt: hashlib.sha256(f"{seed}\n{prompt}".encode()).digest())
    held_out = eval_size
    if isinstance(eval_size, float) and 0 < eval_size < 1:
        held_out = round(eval_size * len(distinct))
    elif not _is_positive_integer(eval_size):
        raise ValueError(f"eval_size={eval_size!r} must be a positive integer or a fraction between 0 and 1")
    if not 0 < held_out < len(distinct):
        part, remedy = ("eval", "raise") if held_out == 0 else ("train", "lower")
        outcome = f"of {len(distinct)} distinct prompts leaves no {part} prompt"
        raise ValueError(f"eval_size={eval_size} {outcome}; {remedy} it or add prompts")
    chosen = set(distinct[:held_out])
    train = dataset.select(i for i, prompt in enumerate(prompts) if prompt not in chosen)
    return train, dataset.select(i for i, prompt in enumerate(prompts) if prompt in chosen)


def _axolotl_transform(row_map: Callable) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    """Return a function of a row; axolotl's maker of one, with its signature, is called with an empty configuration."""
    parameters = inspect.signature(row_map).parameters if inspect.isfunction(row_map) else {}
    if next(iter(parameters), None) != "cfg":
        return row_map
    function, options = row_map({})
    removed = options.get("remove_columns", ())

    def transform(row: Mapping[str, Any]) -> Mapping[str, Any]:
        return {name: value for name, value in row.items() if name not in removed} | function(row)

    return transform


def _mapped(located: Located, row_map: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> Located:
    for where, row in located:
        try:
            yield where, row_map(row)
        except Exception as error:
            content = f"it has columns {list(row)}" if isinstance(row, Mapping) else f"it is {row!r:.200}"
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"{where} does not have the expected format: {reason}; {content}") from error


def _checked_rows(
    located: Located,
    prompt_column: str | None,
    column_map: Mapping[str, str],
    columns: Sequence[str] | None,
    add_image: Callable[[Any], str],
    drop: Callable[[str], None],
) -> Iterator[dict[str, Any]]:
    """Yield checked rows ``{"query": ..., **columns}``, with the columns of the first row.

    ``drop`` gets the errors of unreadable images, whose rows are left out.
    """
    kind = None
    first, names, required, chosen = "", set(), set(), None
    for where, row in located:
        if not isinstance(row, Mapping) or not all(isinstance(name, str) for name in row):
            raise ValueError(f"{where} must be a mapping from column names to values, got {row!r:.200}")
        if (longest := max(map(len, row), default=0)) > _MAX_NAME_CHARS:
            raise ValueError(f"{where}: a column's name has {longest} characters, limit {_MAX_NAME_CHARS}; rename it")
        if chosen is None:
            first, names = where, set(plain_value(list(row), f"{where}: a column's name"))
            chosen = _choose_columns(list(row), prompt_column, column_map, columns)
            required = {chosen[0], *chosen[1]} | ({chosen[2]} if chosen[2] else set())
        prompt, others, image = chosen
        if different := names ^ set(row) if columns is None else required - set(row):
            remedy = "give all rows the same columns, or set columns to those to keep"
            raise ValueError(f"{where} and {first} differ in columns {sorted(different)}; {remedy}")
        if image is not None or not isinstance(row[prompt], str) and has_parts(row[prompt]):
            try:
                shown = None if image is None else row[image]
                if shown is not None and column_map.get(image, image) == "image":
                    shown = [shown]
                row = {**row, prompt: place_images(row[prompt], shown, add_image, where)}
            except ImageError as error:
                drop(f"{where}: {error}")
                continue
        values = {name: plain_value(row[name], f"{where}: column {name!r}") for name in (prompt, *others)}
        query = check_query(values[prompt], where, column_map.get(prompt, prompt))
        kind = kind or type(query)
        if type(query) is not kind:
            raise ValueError(f"{first} and {where} mix plain text and chat messages; use one kind for all prompts")
        yield {keys.QUERY: query} | {new_name: values[name] for name, new_name in others.items()}


def _choose_columns(
    available: list[str], prompt_column: str | None, column_map: Mapping[str, str], columns: Sequence[str] | None
) -> tuple[str, dict[str, str], str | None]:
    """Return the source's names of the prompt column and ``{source's name: new name}`` of the others to keep.

    The third is the source's name of the column of images, or None.
    """
    if unknown := [name for name in column_map if name not in available]:
        raise ValueError(f"unknown columns {unknown} in column_map; columns: {available}")
    source_name = {column_map.get(name, name): name for name in available}
    names = list(source_name)
    if len(names) < len(available):
        raise ValueError(f"column_map={dict(column_map)} must not give two of the columns {available} the same name")
    # Find the prompt column
    if prompt_column is None:
        candidates = [name for name in names if name in PROMPT_COLUMNS]
        if len(candidates) != 1:
            raise ValueError(f"prompt_column=None requires one candidate in {names}, got {candidates}; set it")
        prompt_column = candidates[0]
    if prompt_column not in names:
        raise ValueError(f"prompt_column={prompt_column!r} must be one of the columns {names}")
    # Choose the other columns: their names must not hide other entries of a row
    others = [name for name in names if name != prompt_column]
    if isinstance(columns, str) or not set(columns or ()) <= set(others):
        raise ValueError(f"columns={columns!r} must be a list of names from {others}")
    answers = [] if columns is not None else [n for n in others if n in _ANSWER_COLUMNS and source_name[n] == n]
    if answers:
        keep = {name: "reference" for name in answers[:1]}
        notify_once(f"columns {answers} are left out, since the policy writes them; to keep one, set column_map={keep}")
    pictured = [name for name in others if name in IMAGE_COLUMNS]
    if len(pictured) > 1:
        raise ValueError(f"columns {pictured} both hold images of the prompts; rename one of them with column_map")
    kept = [name for name in (others if columns is None else columns) if name not in (*answers, *pictured)]
    if reserved := [name for name in kept if name in keys.RESERVED or name == keys.TOOLS]:
        renamed = {source_name[name]: f"dataset_{name}" for name in reserved}
        raise ValueError(f"columns {reserved} have reserved names; set column_map={renamed} or columns")
    image = source_name[pictured[0]] if pictured else None
    return source_name[prompt_column], {source_name[name]: name for name in kept}, image


def as_chat(query: str | Messages, system_prompt: str | None = None, chat: bool = True) -> str | Messages:
    """Return a prompt as chat messages, with a system message if it has none."""
    if isinstance(query, str) and chat:
        query = [{"role": "user", "content": query}]
    if system_prompt is None:
        return query
    if isinstance(query, str):
        remedy = "set chat=True, or pass a tokenizer that has a chat template"
        raise ValueError(f"system_prompt={system_prompt!r:.80} cannot be combined with plain-text prompts; {remedy}")
    return (
        query
        if any(message["role"] == "system" for message in query)
        else [{"role": "system", "content": system_prompt}, *query]
    )


def _drop_long(
    dataset: PromptDataset, tokenizer, template_kwargs: Mapping[str, Any], limit: int | None
) -> PromptDataset:
    """Drop prompts of more than ``limit`` tokens; without a limit, check the template on the first prompt."""
    if limit is None:
        encode_prompts(tokenizer, [dataset.rows[0][keys.QUERY]], **template_kwargs)
        return dataset
    lengths = [len(ids) for ids in dataset.encode(tokenizer, **template_kwargs)]
    if min(lengths) > limit:
        spread = f"the shortest has {min(lengths)} tokens, the longest {max(lengths)}"
        raise ValueError(f"max_prompt_length={limit} drops all {len(dataset)} prompts: {spread}; raise it")
    kept = dataset.select(i for i, length in enumerate(lengths) if length <= limit)
    too_long, unreadable = len(dataset) - len(kept), dataset.counts.unreadable
    kept.counts = replace(kept.counts, read=len(dataset) + unreadable, too_long=too_long, unreadable=unreadable)
    return kept


def _canonical(value: Any) -> str:
    """Return text that is equal for equal plain values, in every process."""
    return json.dumps(value, sort_keys=True, default=repr)


def canonical_content(value: dict[str, Any] | str | Messages) -> str:
    """Return the canonical text of a row or a prompt, with the hash of each image in place of its path."""
    text = _canonical(value)
    if '"type": "image"' in text:  # never part of a text, whose quotes JSON escapes
        query = value[keys.QUERY] if isinstance(value, dict) else value
        for path in () if isinstance(query, str) else image_paths(query):
            text = text.replace(json.dumps(path), json.dumps(digest_of(path)))
    return text


def _is_positive_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and value > 0
