"""Preference datasets: pairs of a better and a worse completion, or single completions with a label, as rows."""

from __future__ import annotations

import copy
import inspect
import math
import os
import random
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase

from torchrl_rloo.data import keys
from torchrl_rloo.data.preference_formats import LABELLED_FORMATS, PAIRED_FORMATS, Example
from torchrl_rloo.data.rows import ragged, stack_rows
from torchrl_rloo.data.sources import read_source, shown
from torchrl_rloo.data.templates import Messages, encode, encode_conversation, encode_prompt
from torchrl_rloo.functional.preference import PREFERENCE_OBJECTIVES

CHOSEN, REJECTED = "chosen", "rejected"  # the sub-rows of a pair
MARGIN = "margin"  # optional, float []: how far apart the rewards of a pair should be at least
LABEL = "label"  # bool []: whether the completion of a labelled row is desirable


class Markup(NamedTuple):
    """How a chat format writes a turn: ``before role after content end between``."""

    before: str
    after: str
    end: str
    between: str
    tokens: tuple[str, ...]

    @property
    def template(self) -> str:
        """The chat template; the assistant's span is its content and the end of turn."""
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
OWN_MARKUP = "tokenizer"


class PreferenceDataset(Sequence):
    """An immutable sequence of checked examples, made by :func:`load_preferences`.

    Attributes:
        markup: what :func:`encode_preferences` puts the messages into: a name in ``MARKUPS``, or ``"tokenizer"`` for
            the tokenizer's own chat template.
        dropped: what was wrong with each row that was left out.
    """

    def __init__(self, examples: Iterable[Example], *, markup: str = OWN_MARKUP, dropped: Sequence[str] = ()):
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
    type: str,
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
    """Reads preferences in any of the layouts of ``preference_formats`` and checks every row.

    >>> load_preferences([{"question": "2+2?", "chosen": "4", "rejected": "5"}], "chatml.intel")[0]["chosen"]
    [{'role': 'assistant', 'content': '4'}]

    A type is ``<markup>.<layout>``. The markup (``chatml``, ``llama3``, ``zephyr``) is the chat format that the
    messages are put into, literally; ``chat_template`` means the tokenizer's own. ``chatml`` and ``llama3`` alone find
    the layout by the prompt's column. What the layouts mean where there is a choice:

    - Messages before the answer, wherever they stand, are the prompt, earlier answers included: only the last answer is
      learned from. A ``system`` column goes in front of a prompt that has no system message.
    - ``zephyr.nectar``: rank 1 is best. The best answer is paired with every answer ranked behind it.
    - ``chat_template.argilla``: a ``prompt`` stands for the user's message in lists of one exchange. In all other
      layouts a prompt that differs from what the lists begin with is an error.
    - KTO: every layout needs a column ``label``, true for desirable completions.
    - ``user_defined.default``: plain text; only the tokenizer's own BOS, if any, and a final EOS are added.

    Args:
        source: as of :func:`~torchrl_rloo.data.load_prompts`.
        type: ``"chatml.intel"``, ``"chat_template.default"``, ...
        objective: what the examples are for: ``"kto"`` reads labelled completions, all others read pairs.
        split: as of :func:`~torchrl_rloo.data.load_prompts`.
        name: as of :func:`~torchrl_rloo.data.load_prompts`.
        limit: read only the first so many rows.
        markup: a name in ``MARKUPS`` or ``"tokenizer"``, in place of the type's.
        drop_bad_rows: leave out rows with a fault and list the faults in ``dropped``, rather than raise the first.
        margin_column: the column of a pair's margin, a number: how far apart rewards should be at least.
        **options: of the type: ``chat_template.default`` has ``field_messages``, ``field_chosen``, ``field_rejected``,
            ``message_property_mappings`` and ``roles``, ``chat_template.argilla_chat`` the last four,
            ``user_defined.default`` has ``field_*`` and ``*_format``.

    Raises:
        ValueError: for an unknown argument, or a row that is not as its type says: with the row, column and remedy.
    """
    if objective not in PREFERENCE_OBJECTIVES:
        raise ValueError(f"objective={objective!r} must be one of {list(PREFERENCE_OBJECTIVES)}")
    formats = PAIRED_FORMATS if PREFERENCE_OBJECTIVES[objective].paired else LABELLED_FORMATS
    if type not in formats:
        raise ValueError(f"type={type!r} is none that objective={objective!r} has: set one of {sorted(formats)}")
    known = sorted(inspect.getfullargspec(formats[type]).kwonlyargs)
    if unknown := sorted(set(options) - set(known)):
        raise ValueError(f"type={type!r} has no options {unknown}; it has {known}")
    prefix = type.split(".")[0]
    markup = markup or (prefix if prefix in MARKUPS else OWN_MARKUP)
    if markup not in (*MARKUPS, OWN_MARKUP):
        raise ValueError(f"markup={markup!r} must be one of {[*MARKUPS, OWN_MARKUP]}")
    examples, faults = [], []
    for where, row in islice(read_source(source, split, name), limit):
        try:
            if not isinstance(row, Mapping):
                raise ValueError(f"a row must be a mapping from column names to values, got {row!r:.200}")
            found = formats[type](row, **options)
            margin = {} if margin_column is None else {MARGIN: _margin(row, margin_column)}
            examples += [{**example, **margin} for example in found]
        except ValueError as error:
            if not drop_bad_rows:
                raise ValueError(f"{where} as {type!r}: {error}") from error
            faults.append(f"{where}: {error}")
    if not examples:
        raise ValueError(f"{shown(source)} has no usable row" + (f"; the first fault: {faults[0]}" if faults else ""))
    return PreferenceDataset(examples, markup=markup, dropped=faults)


def load_preference_splits(
    source: Any,
    type: str,
    *,
    eval_source: Any = None,
    eval_split: str | None = None,
    eval_size: int = 512,
    seed: int = 0,
    **options: Any,
) -> tuple[list[Example], list[Example]]:
    """Load training and held-out preferences that share no prompt.

    Args:
        source: as of :func:`load_preferences`.
        type: layout of both sources.
        eval_source: held-out examples. Default: some of ``source``, whole prompts at a time.
        eval_split: split of ``eval_source``. Default: the same as of ``source``.
        eval_size: held-out examples, at most: a random choice, as sources may be in order of subject.
        seed: of the split of ``source``.
        **options: see :func:`load_preferences`.

    Raises:
        ValueError: if no example is left for one of the two, or ``eval_source`` has prompts of ``source``.

    Example:
        >>> rows = [{"question": f"{i}+1?", "chosen": str(i + 1), "rejected": "0"} for i in range(9)]
        >>> train, held_out = load_preference_splits(rows, "chatml.intel", eval_size=2)
        >>> len(train), len(held_out)
        (7, 2)
    """
    examples = list(load_preferences(source, type, **options))
    if eval_source is not None:
        options |= {"limit": None} | ({"split": eval_split} if eval_split else {})
        held_out = list(load_preferences(eval_source, type, **options))
        if len(held_out) > eval_size:
            held_out = random.Random(0).sample(held_out, eval_size)
        seen = {str(example["prompt"]) for example in examples}
        if shared := sum(str(example["prompt"]) in seen for example in held_out):
            raise ValueError(
                f"{shared} of the {len(held_out)} pairs of eval_source have prompts of training pairs: remove them"
            )
        return examples, held_out
    groups: dict[str, list[Example]] = {}
    for example in examples:
        groups.setdefault(str(example["prompt"]), []).append(example)
    train, held_out = [], []
    for group in random.Random(seed).sample(list(groups.values()), len(groups)):
        (held_out if len(held_out) + len(group) <= eval_size else train).extend(group)
    if not held_out or not train:
        raise ValueError(
            f"eval_size={eval_size} of {len(examples)} pairs leaves {len(train)} to train on and {len(held_out)} held "
            "out: choose a size in between, or give an eval_source"
        )
    return train, held_out


def encode_preferences(examples: PreferenceDataset | Iterable[Example], tokenizer) -> TensorDictBase:
    """Examples as rows for :class:`~torchrl_rloo.objectives.preference.PreferenceLoss`.

    A pair becomes a row with sub-rows ``"chosen"`` and ``"rejected"``; a labelled completion a row with ``"label"``.
    Each has ``("tokens", "full")`` and ``("masks", "all_assistant_mask")``, True on the completion alone: the last
    assistant message and its end of turn, or the completion's text and an EOS (unless it ends with a special token).

    Args:
        examples: of :func:`load_preferences`, or of the same form, which are put into the tokenizer's own template.
        tokenizer: a Hugging Face tokenizer.

    Returns:
        Ragged rows, batch size ``[P]``.

    Raises:
        ValueError: if the tokenizer lacks tokens that the dataset's markup is made of, or two completions have the same
            tokens.
    """
    tokenizer = _with_markup(tokenizer, getattr(examples, "markup", OWN_MARKUP))
    rows = []
    for i, example in enumerate(examples):
        if LABEL in example:
            row = _encoded(tokenizer, example["prompt"], example["completion"])
            row.set(LABEL, torch.tensor(example["label"]))
        else:
            parts = {part: _encoded(tokenizer, example["prompt"], example[part]) for part in (CHOSEN, REJECTED)}
            if torch.equal(*(part[keys.TOKENS] for part in parts.values())):
                raise ValueError(
                    f"example {i}: chosen and rejected have the same tokens, so there is nothing to prefer"
                )
            row = TensorDict(parts, [])
        rows.append(row)
    return stack_rows(rows)


def encode_demonstrations(conversations: Iterable[Messages], tokenizer) -> TensorDictBase:
    """Conversations as rows for :class:`~torchrl_rloo.objectives.sft.SFTLoss`; all assistant turns are learned."""
    return stack_rows([_row(*encode_conversation(tokenizer, messages)) for messages in conversations])


def mismatched_rows(rows: TensorDictBase) -> TensorDictBase:
    """Each row's prompt with the completion of the next row, the last one's with that of the first.

    KTO's estimate of the divergence needs completions that do not belong to their prompts. A prompt is what comes
    before the first action token.

    Args:
        rows: batch size ``[B]``, with token ids and action masks.

    Raises:
        ValueError: for a single row, which has no other's completion to take.
    """
    if len(rows) < 2:
        raise ValueError(f"the KL reference point needs at least 2 rows to exchange completions, got {len(rows)}")
    tokens, masks = ragged(rows, keys.TOKENS), ragged(rows, keys.ACTION_MASK)
    starts = [int(mask.int().argmax()) for mask in masks]
    result = []
    for i in range(len(tokens)):
        j = (i + 1) % len(tokens)
        full = torch.cat([tokens[i][: starts[i]], tokens[j][starts[j] :]])
        mask = torch.cat([torch.zeros_like(masks[i][: starts[i]]), masks[j][starts[j] :]])
        result.append(TensorDict({keys.TOKENS: full, keys.ACTION_MASK: mask}, []))
    return stack_rows(result)


def _margin(row: Mapping[str, Any], column: str) -> float:
    margin = row.get(column)
    if isinstance(margin, bool) or not isinstance(margin, (int, float)) or not math.isfinite(margin):
        raise ValueError(f"margin_column={column!r} must hold a finite number, got {margin!r}")
    return float(margin)


def _with_markup(tokenizer, markup: str):
    """The tokenizer with the markup's template in place of its own."""
    if markup == OWN_MARKUP:
        return tokenizer
    tokens = MARKUPS[markup].tokens
    if missing := [token for token in tokens if len(encode(tokenizer, token)) != 1]:
        raise ValueError(
            f"the dataset's type asks for {markup} markup, but the tokenizer has no token {missing}: load the dataset "
            f"with markup={OWN_MARKUP!r} for the tokenizer's own chat template, or add the tokens"
        )
    begins = tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]  # some have a BOS that they never put
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = ("{{ bos_token }}" if begins else "") + MARKUPS[markup].template
    return tokenizer


def _encoded(tokenizer, prompt: Messages | str, completion: Messages | str) -> TensorDictBase:
    if isinstance(prompt, str):
        before, after = encode_prompt(tokenizer, prompt), encode(tokenizer, completion)
        if after[-1] not in tokenizer.all_special_ids:
            after = [*after, tokenizer.eos_token_id]
        return _row(before + after, [False] * len(before) + [True] * len(after))
    ids, mask = encode_conversation(tokenizer, [*prompt, *completion])
    end = start = len(mask) - mask[::-1].index(True)
    while start and mask[start - 1]:
        start -= 1
    return _row(ids[:end], [False] * start + [True] * (end - start))


def _row(ids: list[int], mask: list[bool]) -> TensorDictBase:
    return TensorDict({keys.TOKENS: torch.tensor(ids), keys.ACTION_MASK: torch.tensor(mask)}, [])
