"""Preference datasets: pairs of a chosen and a rejected completion, or labeled completions, as rows."""

from __future__ import annotations

import copy
import inspect
import os
import random
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase

from torchrl_rloo.data import keys
from torchrl_rloo.data.preference_formats import LABELED_FORMATS, PAIRED_FORMATS, Example
from torchrl_rloo.data.rows import entry_of, ragged, stack_rows
from torchrl_rloo.data.sources import PlainRow, describe_source, read_source
from torchrl_rloo.data.templates import Messages, encode, encode_conversation, encode_prompt, image_paths
from torchrl_rloo.functional.preference import PREFERENCE_OBJECTIVES
from torchrl_rloo.images.encoder import digests

CHOSEN, REJECTED = "chosen", "rejected"  # sub-rows of a pair
_MAX_MARGIN = 1e30  # float32 holds it, and products of it with rewards
MARGIN = "margin"  # optional, float []: smallest desired difference between the rewards of a pair
LABEL = "label"  # bool []: True if the completion of a labeled row is desirable


class Markup(NamedTuple):
    """Strings around the parts of a turn in a chat format: ``before role after content end between``."""

    before: str
    after: str
    end: str
    between: str
    tokens: tuple[str, ...]

    @property
    def template(self) -> str:
        """Chat template that marks the assistant's content and its end of turn as generation."""
        before, after, end, between = map(repr, self[:4])
        return (
            f"{{% for m in messages %}}{{{{ {before} + m['role'] + {after} }}}}"
            "{% if m['role'] == 'assistant' %}"
            f"{{% generation %}}{{{{ m['content'] + {end} }}}}{{% endgeneration %}}"
            f"{{% else %}}{{{{ m['content'] + {end} }}}}{{% endif %}}{{{{ {between} }}}}{{% endfor %}}"
            f"{{% if add_generation_prompt %}}{{{{ {before} + 'assistant' + {after} }}}}{{% endif %}}"
        )


MARKUPS = {
    "chatml": Markup("<|im_start|>", "\n", "<|im_end|>", "\n", ("<|im_start|>", "<|im_end|>")),
    "llama3": Markup(
        "<|start_header_id|>",
        "<|end_header_id|>\n\n",
        "<|eot_id|>",
        "",
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    ),
    "zephyr": Markup("<|", "|>\n", "</s>", "\n", ("</s>",)),
}
TOKENIZER_MARKUP = "tokenizer"


class PreferenceDataset(Sequence):
    """Immutable sequence of checked examples from :func:`load_preferences`.

    Attributes:
        markup: chat format for :func:`encode_preferences`: a name in ``MARKUPS``, or ``"tokenizer"`` for the
            tokenizer's chat template.
        dropped: fault of each dropped row.
    """

    def __init__(self, examples: Iterable[Example], *, markup: str = TOKENIZER_MARKUP, dropped: Sequence[str] = ()):
        self._examples, self.markup, self.dropped = list(examples), markup, tuple(dropped)

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return PreferenceDataset(self._examples[index], markup=self.markup)
        return copy.deepcopy(self._examples[index])

    def __repr__(self) -> str:
        return f"PreferenceDataset({len(self)} examples, markup={self.markup!r}, {len(self.dropped)} rows dropped)"


def load_preferences(
    source: str | os.PathLike | Iterable[Mapping[str, Any]] | Mapping[str, Iterable[Mapping[str, Any]]],
    type: str | Mapping[str, Any],
    *,
    objective: str = "dpo",
    split: str | None = "train",
    name: str | None = None,
    limit: int | None = None,
    markup: str | None = None,
    drop_bad_rows: bool = False,
    margin_column: str | None = None,
    **options: Any,
) -> PreferenceDataset:
    """Load preferences in any layout of ``preference_formats`` and check every row.

    A type is ``<markup>.<layout>``. The markup is the chat format of the messages: ``chatml``, ``llama3``, ``zephyr``,
    or ``chat_template`` for the tokenizer's chat template. The types ``chatml`` and ``llama3`` find the layout by the
    prompt's column. The layouts follow these rules:

    - Messages before the last answer are the prompt, earlier answers included: only the last answer is trained on. A
      ``system`` column precedes a prompt without a system message.
    - ``zephyr.nectar``: rank 1 is best. The best answer is paired with every answer of a higher rank number.
    - ``chat_template.argilla``: a ``prompt`` column replaces the user message in lists of one exchange. In all other
      layouts the prompt must equal the beginning of the lists.
    - KTO: every layout requires a column ``label``, true for desirable completions.
    - ``user_defined.default``: plain text. Only the tokenizer's BOS, if any, and a final EOS are added.
    - Messages keep all fields. The markups write roles and contents only, so they refuse messages with other fields,
      such as tool calls.

    Args:
        source: see :func:`~torchrl_rloo.data.load_prompts`.
        type: name of the format, such as ``"chatml.intel"`` or ``"chat_template.default"``. A mapping, as in Axolotl's
            YAML, holds the options of ``user_defined.default``; None in it is the default.
        objective: preference objective. ``"kto"`` reads labeled completions, all others read pairs.
        split: see :func:`~torchrl_rloo.data.load_prompts`.
        name: see :func:`~torchrl_rloo.data.load_prompts`.
        limit: number of rows to read from the start. None reads all.
        markup: name in ``MARKUPS`` or ``"tokenizer"``. None takes the type's.
        drop_bad_rows: if True, drop invalid rows and list their faults in ``dropped``. By default the first raises. A
            file that cannot be parsed raises in any case.
        margin_column: column of a pair's margin, a number: the smallest desired difference of rewards.
        **options: options of the type. ``chat_template.default`` has ``field_messages``, ``field_chosen``,
            ``field_rejected``, ``message_property_mappings`` and ``roles``. ``chat_template.argilla_chat`` has the
            last four. ``user_defined.default`` has ``field_*`` and ``*_format``.

    Returns:
        A dataset of at least one example.

    Raises:
        ValueError: if an argument is unknown or a row is invalid. The message names the row, the column and the fix.

    Example:
        >>> load_preferences([{"question": "2+2?", "chosen": "4", "rejected": "5"}], "chatml.intel")[0]["chosen"]
        [{'role': 'assistant', 'content': '4'}]
    """
    # Resolve the type and its options
    if objective not in PREFERENCE_OBJECTIVES:
        raise ValueError(f"objective={objective!r} must be one of {list(PREFERENCE_OBJECTIVES)}")
    formats = PAIRED_FORMATS if PREFERENCE_OBJECTIVES[objective].paired else LABELED_FORMATS
    if isinstance(type, Mapping):
        given = {name: value for name, value in type.items() if value is not None}
        if repeated := sorted(set(map(str, given)) & set(options)):
            raise ValueError(f"options {repeated} are set in type={dict(type)!r:.200} and as arguments; remove one")
        type, options = "user_defined.default", given | options
    if not isinstance(type, str) or type not in formats:
        raise ValueError(f"type={type!r} must be one of {sorted(formats)} for objective={objective!r}")
    known = sorted(inspect.getfullargspec(formats[type]).kwonlyargs)
    if unknown := sorted(map(str, set(options) - set(known))):
        raise ValueError(f"unknown options {unknown} of type={type!r}; valid: {known}")
    prefix = type.split(".")[0]
    markup = markup or (prefix if prefix in MARKUPS else TOKENIZER_MARKUP)
    if markup not in (*MARKUPS, TOKENIZER_MARKUP):
        raise ValueError(f"markup={markup!r} must be one of {[*MARKUPS, TOKENIZER_MARKUP]}")

    # Read rows; a row may hold several examples
    examples, faults = [], []
    for where, row in islice(read_source(source, split, name), limit):
        try:
            if not isinstance(row, Mapping):
                raise ValueError(f"a row must be a mapping from column names to values, got {row!r:.200}")
            row = PlainRow(row)
            found = formats[type](row, **options)
            margin = {} if margin_column is None else {MARGIN: _margin(row, margin_column)}
            _check_fields(found, markup)
            examples += [{**example, **margin} for example in found]
        except Exception as error:  # no fault of one row may end the load, whatever a value does
            fault = str(error) if isinstance(error, ValueError) else f"{error.__class__.__name__}: {error}"
            if not drop_bad_rows:
                raise ValueError(f"{where} as {type!r}: {fault}") from error
            faults.append(f"{where}: {fault}")
    if not examples:
        raise ValueError(
            f"{describe_source(source)} has no valid row" + (f"; the first fault: {faults[0]}" if faults else "")
        )
    return PreferenceDataset(examples, markup=markup, dropped=faults)


def load_preference_splits(
    source: Any,
    type: str | Mapping[str, Any],
    *,
    sources: Sequence[Mapping[str, Any]] = (),
    eval_source: Any = None,
    eval_split: str | None = None,
    eval_size: int = 512,
    seed: int = 0,
    **options: Any,
) -> tuple[PreferenceDataset, PreferenceDataset]:
    """Load training and held-out preferences that share no prompt.

    Args:
        source: see :func:`load_preferences`.
        type: format of both sources; see :func:`load_preferences`.
        sources: several sources in place of ``source``, each as arguments of :func:`load_preferences` that replace the
            others: ``[{"source": "a.jsonl"}, {"source": "my/b", "type": "chatml.intel", "limit": 1000}]``.
        eval_source: source of held-out examples. None takes them from ``source``, whole prompts at a time.
        eval_split: split of ``eval_source``. None takes that of ``source``.
        eval_size: largest number of held-out examples. They are chosen at random because sources may be sorted by
            subject.
        seed: seed of the choice of held-out examples.
        **options: arguments of :func:`load_preferences`.

    Returns:
        Training examples and held-out examples, with the markup of the type. Faults of dropped rows are with the
        examples of the same source.

    Raises:
        ValueError: if either list would be empty, or if ``eval_source`` and ``source`` share prompts.

    Example:
        >>> rows = [{"question": f"{i}+1?", "chosen": str(i + 1), "rejected": "0"} for i in range(9)]
        >>> train, held_out = load_preference_splits(rows, "chatml.intel", eval_size=2)
        >>> len(train), len(held_out)
        (7, 2)
    """
    # With a separate source, check that it shares no prompt with the training examples
    arguments = {"source": source, "type": type, **options}
    parts = [load_preferences(**arguments | each) for each in sources or [{}]]
    if len(markups := {part.markup for part in parts}) > 1:
        raise ValueError(
            f"the sources have the markups {sorted(markups)}; set markup, since a model has one chat format"
        )
    dropped = [fault for part in parts for fault in part.dropped]
    examples = PreferenceDataset(chain.from_iterable(parts), markup=parts[0].markup, dropped=dropped)
    if eval_source is not None:
        options |= {"limit": None} | ({"split": eval_split} if eval_split else {})
        held_out = load_preferences(eval_source, type, **options)
        if len(held_out) > eval_size:
            chosen = random.Random(seed).sample(list(held_out), eval_size)
            held_out = PreferenceDataset(chosen, markup=held_out.markup, dropped=held_out.dropped)
        seen = {str(example["prompt"]) for example in examples}
        if shared := sum(str(example["prompt"]) in seen for example in held_out):
            raise ValueError(
                f"{shared} of {len(held_out)} examples of eval_source have prompts of training examples; remove them"
            )
        return examples, held_out

    # Otherwise hold out whole prompts of the training source
    groups: dict[str, list[Example]] = {}
    for example in examples:
        groups.setdefault(str(example["prompt"]), []).append(example)
    train, held_out = [], []
    for group in random.Random(seed).sample(list(groups.values()), len(groups)):
        (held_out if len(held_out) + len(group) <= eval_size else train).extend(group)
    if not held_out or not train:
        raise ValueError(
            f"eval_size={eval_size} of {len(examples)} examples leaves {len(train)} to train on and {len(held_out)} "
            "held out; choose a size in between, or set eval_source"
        )
    return (
        PreferenceDataset(train, markup=examples.markup, dropped=examples.dropped),
        PreferenceDataset(held_out, markup=examples.markup),
    )


def encode_preferences(examples: PreferenceDataset | Iterable[Example], tokenizer) -> TensorDictBase:
    """Encode examples as rows for :class:`~torchrl_rloo.objectives.preference.PreferenceLoss`.

    A pair becomes a row with sub-rows ``"chosen"`` and ``"rejected"``. A labeled completion becomes a row with
    ``"label"`` (bool, ``[]``). Each row or sub-row has ``("tokens", "full")`` (``[T]``) and
    ``("masks", "all_assistant_mask")`` (``[T]``), True only on the completion. A completion is the last assistant
    message and its end of turn, or plain text and an EOS unless it ends with a special token.

    Args:
        examples: dataset from :func:`load_preferences`, or examples of the same form, which are rendered with the
            tokenizer's template.
        tokenizer: Hugging Face tokenizer.

    Returns:
        Ragged rows, batch size ``[P]``, where ``P`` is the number of examples.

    Raises:
        ValueError: if the tokenizer lacks tokens of the dataset's markup, or if the completions of a pair have the
            same tokens.
    """
    tokenizer = _with_markup(tokenizer, getattr(examples, "markup", TOKENIZER_MARKUP))
    rows = []
    for i, example in enumerate(examples):
        if LABEL in example:
            row = _encode_example(tokenizer, example["prompt"], example["completion"])
            row.set(LABEL, torch.tensor(example["label"]))
        else:
            parts = {part: _encode_example(tokenizer, example["prompt"], example[part]) for part in (CHOSEN, REJECTED)}
            if torch.equal(*(part[keys.TOKENS] for part in parts.values())):
                raise ValueError(f"example {i}: chosen and rejected have the same tokens; remove the example")
            row = TensorDict(parts, [])
        rows.append(row)
    return stack_rows(rows)


def encode_demonstrations(
    conversations: Iterable[Messages | Mapping[str, Any]], tokenizer, **template_kwargs: Any
) -> TensorDictBase:
    """Encode conversations as rows for :class:`~torchrl_rloo.objectives.sft.SFTLoss`.

    Args:
        conversations: chat messages of ``B`` conversations, or mappings ``{"query", "demonstration"}`` of two lists of
            messages or two texts. A query is a prompt, which is not learned; a blank demonstration makes it a text.
        tokenizer: Hugging Face tokenizer with a chat template.
        **template_kwargs: arguments of the chat template.

    Returns:
        Ragged rows, batch size ``[B]``. The action mask is True on all assistant turns after a query, and on texts.
        Rows of messages with images (``{"type": "image", "url": <path in the store>}``) also have ``"images"``.
    """
    rows = []
    for given in conversations:
        prompt, rest = (given[keys.QUERY], given["demonstration"]) if isinstance(given, Mapping) else ([], given)
        if isinstance(prompt, str):
            row = _encode_example(tokenizer, prompt, rest or tokenizer.eos_token)
            row[keys.ACTION_MASK][1:] |= not rest  # nothing predicts the first token
            rows.append(row)
            continue
        ids, mask = encode_conversation(tokenizer, [*prompt, *rest], **template_kwargs)
        for _ in range(sum(message["role"] == "assistant" for message in prompt)):
            start = mask.index(True)
            end = mask.index(False, start)
            mask[start:end] = [False] * (end - start)
        rows.append(_row(ids, mask, image_paths([*prompt, *rest])))
    return stack_rows(rows)


def mismatched_rows(rows: TensorDictBase) -> TensorDictBase:
    """Combine each row's prompt with the completion of the next row, cyclically.

    KTO's estimate of the KL divergence needs completions of other prompts. A prompt is the tokens before the first
    action token.
    """
    if len(rows) < 2:
        raise ValueError(f"the KL reference point requires at least 2 rows, got {len(rows)}; use larger batches")
    tokens, masks = ragged(rows, keys.TOKENS), ragged(rows, keys.ACTION_MASK)
    starts = [int(mask.int().argmax()) for mask in masks]
    result = []
    for i in range(len(tokens)):
        j = (i + 1) % len(tokens)
        full = torch.cat([tokens[i][: starts[i]], tokens[j][starts[j] :]])
        mask = torch.cat([torch.zeros_like(masks[i][: starts[i]]), masks[j][starts[j] :]])
        images = entry_of(rows[i], keys.IMAGES)
        images = {} if images is None else {keys.IMAGES: images}
        result.append(TensorDict({keys.TOKENS: full, keys.ACTION_MASK: mask, **images}, []))
    return stack_rows(result)


def _check_fields(examples: Iterable[Example], markup: str) -> None:
    """Raise if messages have fields that a markup does not write."""
    for example in examples if markup in MARKUPS else ():
        for part in example.values():
            for message in part if isinstance(part, list) else ():
                if lost := sorted(set(message) - {"role", "content"}):
                    raise ValueError(
                        f"a message has fields {lost}, which markup={markup!r} does not write; remove them, or set "
                        f"markup={TOKENIZER_MARKUP!r} for the tokenizer's chat template"
                    )


def _margin(row: Mapping[str, Any], column: str) -> float:
    margin = row.get(column)
    if isinstance(margin, bool) or not isinstance(margin, (int, float)) or not abs(margin) < _MAX_MARGIN:
        raise ValueError(f"margin_column={column!r} must contain a finite number, got {margin!r}")
    return float(margin)


def _with_markup(tokenizer, markup: str):
    """Return a copy of the tokenizer with the markup's chat template."""
    if markup == TOKENIZER_MARKUP:
        return tokenizer
    tokens = MARKUPS[markup].tokens
    if missing := [token for token in tokens if len(encode(tokenizer, token)) != 1]:
        raise ValueError(
            f"markup={markup!r} requires the tokens {missing}, which the tokenizer lacks; set "
            f"markup={TOKENIZER_MARKUP!r} for the tokenizer's chat template, or add the tokens"
        )
    adds_bos = tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]  # some tokenizers never add their BOS
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = ("{{ bos_token }}" if adds_bos else "") + MARKUPS[markup].template
    return tokenizer


def _encode_example(tokenizer, prompt: Messages | str, completion: Messages | str) -> TensorDictBase:
    if isinstance(prompt, str):
        before, after = encode_prompt(tokenizer, prompt), encode(tokenizer, completion)
        if after[-1] not in tokenizer.all_special_ids:
            after = [*after, tokenizer.eos_token_id]
        return _row(before + after, [False] * len(before) + [True] * len(after))
    ids, mask = encode_conversation(tokenizer, [*prompt, *completion])
    if not any(mask):
        raise ValueError(f"the chat template writes no token of completion={completion!r:.200}; correct the template")
    end = start = len(mask) - mask[::-1].index(True)
    while start and mask[start - 1]:
        start -= 1
    return _row(ids[:end], [False] * start + [True] * (end - start), image_paths([*prompt, *completion]))


def _row(ids: list[int], mask: list[bool], paths: Sequence[str] = ()) -> TensorDictBase:
    images = {keys.IMAGES: digests(paths)} if paths else {}
    return TensorDict({keys.TOKENS: torch.tensor(ids), keys.ACTION_MASK: torch.tensor(mask), **images}, [])
