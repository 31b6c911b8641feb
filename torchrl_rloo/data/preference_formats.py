"""Layouts of preference datasets: functions from a source row to examples.

A pair is ``{"prompt", "chosen", "rejected"}`` and a labeled example is ``{"prompt", "completion", "label"}``. The
prompt is a list of chat messages, and a completion is a list of one assistant message. Messages keep all their fields,
such as tool calls, and prompts are equal only if all fields are. In ``user_defined`` formats both are plain text.
Formats have Axolotl's names, ``<markup>.<layout>``. An invalid row raises a ``ValueError`` that names the column and
the fix; the caller adds the location of the row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torchrl_rloo.data.notices import notify_once
from torchrl_rloo.data.templates import Messages

Example = dict[str, Any]
Message = dict[str, Any]
Reader = Callable[..., list[Example]]  # (row, **options)

_NEXT_ROLES = {  # valid roles after a role; the conversation ends with the answer, an assistant message
    None: ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}
_ROLES = {role: [role] for role in ("system", "user", "assistant", "tool")}
_ROLE_AND_CONTENT = {"role": "role", "content": "content"}
_LABELS = {1: True, 0: False, "true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}


def _read_pair(prompt: str | None, chosen: str, rejected: str, row: Mapping) -> list[Example]:
    """Read two answers, each text or messages that end with the answer; those before it must equal any ``prompt``."""
    before, good = _split_answer(row, chosen)
    return [
        _make_pair(
            _build_context(row, prompt, before, chosen), before, good, _split_answer(row, rejected), chosen, rejected
        )
    ]


def _read_prompt_first(row: Mapping) -> list[Example]:
    """Read a pair in ORPO's layout: a prompt column replaces the user message in lists of one exchange."""
    before, good = _split_answer(row, "chosen")
    exchange = len(_without_system(before)) <= 1
    if exchange and _is_given(row, "prompt"):
        context = _build_context(row, "prompt", [], "chosen")
    else:
        context = _build_context(row, None, before, "chosen")
    return [_make_pair(context, before, good, _split_answer(row, "rejected"), "chosen", "rejected")]


def _read_template_default(
    row: Mapping,
    *,
    field_messages: str = "messages",
    field_chosen: str = "chosen",
    field_rejected: str = "rejected",
    message_property_mappings: Mapping[str, str] = _ROLE_AND_CONTENT,
    roles: Mapping[str, list[str]] = _ROLES,
) -> list[Example]:
    """Read a pair whose columns, message fields and roles have configured names."""
    columns = (field_messages, field_chosen, field_rejected)
    renamed = {name: _rename_fields(row, name, message_property_mappings, roles) for name in columns}
    return _read_pair(*columns, {"system": row.get("system")} | renamed)


def _read_template_argilla_chat(
    row: Mapping,
    *,
    field_chosen: str = "chosen",
    field_rejected: str = "rejected",
    message_property_mappings: Mapping[str, str] = _ROLE_AND_CONTENT,
    roles: Mapping[str, list[str]] = _ROLES,
) -> list[Example]:
    """Read a pair as :func:`_read_template_default` does, with the prompt in the lists of messages."""
    columns = (field_chosen, field_rejected)
    renamed = {name: _rename_fields(row, name, message_property_mappings, roles) for name in columns}
    return _read_pair(None, *columns, {"system": row.get("system")} | renamed)


def _read_nectar(row: Mapping) -> list[Example]:
    """Pair the best answer, that of the lowest rank number, with every answer of a higher one."""
    context, answers = _build_context(row, "prompt", [], "prompt"), _require_column(row, "answers")
    if not (
        isinstance(answers, list) and all(isinstance(a, Mapping) and {"answer", "rank"} <= set(a) for a in answers)
    ):
        raise ValueError(f"column 'answers' must contain a list of {{'answer', 'rank'}}, got {_preview(answers)}")
    if wrong := [a["rank"] for a in answers if not _is_number(a["rank"])]:
        raise ValueError(f"column 'answers' must contain finite numbers as ranks, got {_preview(wrong)}; convert them")
    ranked = sorted(answers, key=lambda a: a["rank"])
    worse = [a for a in ranked if a["rank"] > ranked[0]["rank"]]
    if not worse:
        raise ValueError("column 'answers' must contain at least two different ranks; remove the row")
    best = _text_answer(ranked[0]["answer"], "answers")
    return [
        _make_pair(context, [], best, ([], _text_answer(a["answer"], "answers")), "answers", "answers") for a in worse
    ]


def _read_labeled(prompt: str, row: Mapping) -> list[Example]:
    """Read one answer and its label; messages before the answer are the prompt."""
    before, answer = _split_answer(row, "completion")
    context = _build_context(row, None if before and prompt == "chosen" else prompt, before, "completion")
    return [{"prompt": context, "completion": [answer], "label": _parse_label(row, "label")}]


def _read_user_pair(
    row: Mapping,
    *,
    field_prompt: str = "prompt",
    field_system: str | None = "system",
    field_chosen: str = "chosen",
    field_rejected: str = "rejected",
    prompt_format: str = "{prompt}",
    chosen_format: str = "{chosen}",
    rejected_format: str = "{rejected}",
) -> list[Example]:
    """Read a pair of plain texts and fill the format strings."""
    prompt = _fill_prompt(row, field_prompt, field_system, prompt_format)
    chosen = _fill(
        "chosen_format", chosen_format, chosen=_require_text(_require_column(row, field_chosen), field_chosen)
    )
    rejected = _fill(
        "rejected_format", rejected_format, rejected=_require_text(_require_column(row, field_rejected), field_rejected)
    )
    if chosen == rejected:
        raise _same_answer(field_chosen, field_rejected, chosen)
    return [{"prompt": prompt, "chosen": chosen, "rejected": rejected}]


def _read_user_labeled(
    row: Mapping,
    *,
    field_prompt: str = "prompt",
    field_system: str | None = "system",
    field_completion: str = "completion",
    field_label: str = "label",
    prompt_format: str = "{prompt}",
    completion_format: str = "{completion}",
) -> list[Example]:
    """Read a labeled plain text and fill the format strings."""
    answer = _require_text(_require_column(row, field_completion), field_completion)
    completion = _fill("completion_format", completion_format, completion=answer)
    prompt = _fill_prompt(row, field_prompt, field_system, prompt_format)
    return [{"prompt": prompt, "completion": completion, "label": _parse_label(row, field_label)}]


def _read_by_columns(layouts: Mapping[str, Reader], row: Mapping) -> list[Example]:
    """Read a row of a type without a layout by its prompt column."""
    readers = [layout for column, layout in layouts.items() if row.get(column) is not None]
    if len(readers) != 1:
        raise ValueError(
            f"the row must have one of the columns {list(layouts)}, but has {len(readers)}; name the layout, as in "
            "'chatml.intel'"
        )
    return readers[0](row)


_PAIR_COLUMNS = {
    "argilla": ("instruction", "chosen_response", "rejected_response"),
    "argilla_chat": (None, "chosen", "rejected"),
    "icr": ("input", "chosen", "rejected"),
    "intel": ("question", "chosen", "rejected"),
    "prompt_pairs": ("prompt", "chosen", "rejected"),
    "ultra": ("prompt", "chosen", "rejected"),
}
_LABELED_PROMPT_COLUMNS = {
    "argilla": "instruction",
    "argilla_chat": "chosen",
    "intel": "question",
    "prompt_pairs": "prompt",
    "ultra": "prompt",
}
_PAIRS_BY_PROMPT = {columns[0]: partial(_read_pair, *columns) for columns in _PAIR_COLUMNS.values() if columns[0]}
_LABELED_BY_PROMPT = {
    prompt: partial(_read_labeled, prompt) for prompt in _LABELED_PROMPT_COLUMNS.values() if prompt != "chosen"
}

PAIRED_FORMATS: dict[str, Reader] = {
    **{
        f"{m}.{name}": partial(_read_pair, *columns)
        for m in ("chatml", "llama3")
        for name, columns in _PAIR_COLUMNS.items()
    },
    **{m: partial(_read_by_columns, _PAIRS_BY_PROMPT) for m in ("chatml", "llama3")},
    "zephyr.nectar": _read_nectar,
    "chat_template.argilla": _read_prompt_first,
    "chat_template.argilla_chat": _read_template_argilla_chat,
    "chat_template.default": _read_template_default,
    "user_defined.default": _read_user_pair,
}
LABELED_FORMATS: dict[str, Reader] = {
    **{
        f"{m}.{name}": partial(_read_labeled, prompt)
        for m in ("chatml", "llama3")
        for name, prompt in _LABELED_PROMPT_COLUMNS.items()
    },
    **{m: partial(_read_by_columns, _LABELED_BY_PROMPT) for m in ("chatml", "llama3")},
    "user_defined.default": _read_user_labeled,
}


def _preview(value: Any) -> str:
    return f"{value!r:.200}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_given(row: Mapping, name: str) -> bool:
    return row.get(name) not in (None, "")


def _require_column(row: Mapping, name: str) -> Any:
    if row.get(name) is None:
        columns = _preview(sorted(map(str, row)))
        raise ValueError(
            f"the row must have a column {name!r}, got {columns}; choose another type or rename the column"
        )
    return row[name]


def _require_text(value: Any, column: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(
            f"column {column!r} must contain non-blank text, got {_preview(value)}; fill it or remove the row"
        )
    return value


def _require_list(value: Any, column: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"column {column!r} must contain text or a list of messages, got {_preview(value)}")
    return value


def _require_messages(value: Any, column: str) -> Messages:
    for k, message in enumerate(_require_list(value, column)):
        if not (isinstance(message, Mapping) and all(isinstance(message.get(f), str) for f in ("role", "content"))):
            raise ValueError(
                f"message {k} of column {column!r} must have text as 'role' and 'content', got {_preview(message)}"
            )
    # Drop None: Arrow adds it for optional fields that a message lacks
    return [{field: entry for field, entry in message.items() if entry is not None} for message in value]


def _text_answer(value: Any, column: str) -> Message:
    return {"role": "assistant", "content": _require_text(value, column)}


def _split_answer(row: Mapping, column: str) -> tuple[Messages, Message]:
    """Return the messages before the answer and the answer, an assistant message."""
    value = _require_column(row, column)
    if isinstance(value, str):
        return [], _text_answer(value, column)
    messages = _require_messages([value] if isinstance(value, Mapping) else value, column)
    answer = messages[-1]
    if answer["role"] != "assistant":
        role = answer["role"]
        raise ValueError(f"column {column!r} must end with role 'assistant', got role {role!r}; correct it")
    if not answer.get("tool_calls"):
        _require_text(answer["content"], column)
    return messages[:-1], answer


def _build_context(row: Mapping, prompt: str | None, before: Messages, column: str) -> Messages:
    """Return the conversation before the answer, from the prompt column or from the messages before the answer."""
    # Join both sources of the prompt: they must agree
    context = before
    if prompt is not None:
        value = _require_column(row, prompt)
        asked = (
            [{"role": "user", "content": _require_text(value, prompt)}]
            if isinstance(value, str)
            else _require_messages(value, prompt)
        )
        if before and _comparable(before) != _comparable(asked):
            raise ValueError(
                f"column {prompt!r} must be the prompt in column {column!r}, got {_preview(asked)} and "
                f"{_preview(before)}; correct one, or choose a type with the prompt in the lists (argilla_chat)"
            )
        context = before or asked
    if not context:
        raise ValueError(f"column {column!r} has an answer without a prompt; choose a type with a prompt column")

    # Add the system message, and check the order of roles
    if _is_given(row, "system") and context[0]["role"] != "system":
        context = [{"role": "system", "content": _require_text(row["system"], "system")}, *context]
    last = None
    for k, role in enumerate([*(m["role"] for m in context), "assistant"]):
        if role not in _NEXT_ROLES[last]:
            place = "the answer" if k == len(context) else f"message {k}"
            raise ValueError(
                f"column {prompt or column!r}: {place} has role {role!r} after {last or 'nothing'!r}, but must have "
                f"one of {_NEXT_ROLES[last]}; correct the order of roles"
            )
        last = role
    return context


def _without_system(messages: Messages) -> Messages:
    return messages[1:] if messages and messages[0]["role"] == "system" else messages


def _comparable(messages: Messages) -> Messages:
    return [{**m, "content": m["content"].strip()} for m in _without_system(messages)]


def _make_pair(
    context: Messages, before: Messages, good: Message, other: tuple[Messages, Message], chosen: str, rejected: str
) -> Example:
    other_before, bad = other
    if _comparable(before) != _comparable(other_before):
        raise ValueError(
            f"columns {chosen!r} and {rejected!r} must answer the same prompt, but differ before their last messages; "
            "correct them or remove the row"
        )
    if good == bad:
        raise _same_answer(chosen, rejected, good["content"])
    return {"prompt": context, "chosen": [good], "rejected": [bad]}


def _same_answer(chosen: str, rejected: str, answer: str) -> ValueError:
    return ValueError(f"columns {chosen!r} and {rejected!r} have the same answer, {answer!r:.100}; remove the row")


def _parse_label(row: Mapping, column: str) -> bool:
    if row.get(column) is None:
        raise ValueError(f"KTO requires a label in column {column!r}; set it to true (desirable) or false in every row")
    value = row[column].strip().lower() if isinstance(row[column], str) else row[column]
    if isinstance(value, (list, dict)) or value not in _LABELS:
        raise ValueError(f"column {column!r} must be true, false, 1 or 0, got {row[column]!r:.80}; convert it")
    return _LABELS[value]


def _rename_fields(row: Mapping, column: str, properties: Mapping[str, str], roles: Mapping[str, list[str]]) -> Any:
    """Return a column's messages with standard names of fields and roles, or its text unchanged."""
    value = _require_column(row, column)
    if isinstance(value, str):
        return value
    # Invert the mappings, to look up the dataset's names
    role_of = {theirs: ours for ours, names in roles.items() for theirs in names}
    name_of = {theirs: ours for ours, theirs in (_ROLE_AND_CONTENT | dict(properties)).items()}
    messages = []
    for k, message in enumerate([value] if isinstance(value, Mapping) else _require_list(value, column)):
        renamed = {name_of.get(f, f): v for f, v in message.items()} if isinstance(message, Mapping) else {}
        if not {"role", "content"} <= set(renamed) or len(renamed) < len(message):
            raise ValueError(
                f"message {k} of column {column!r} must have the fields of "
                f"message_property_mappings={dict(properties)}; correct the mapping"
            )
        if not isinstance(renamed["role"], str) or renamed["role"] not in role_of:
            raise ValueError(
                f"message {k} of column {column!r} has unknown role {_preview(renamed['role'])}; valid: "
                f"{sorted(role_of)}; add it to roles"
            )
        messages.append({**renamed, "role": role_of[renamed["role"]]})
    return messages


def _fill_prompt(row: Mapping, field_prompt: str, field_system: str | None, prompt_format: str) -> str:
    system = _require_text(row[field_system], field_system) if field_system and _is_given(row, field_system) else ""
    if system and "{system}" not in prompt_format:
        notify_once(
            f"column {field_system!r} is left out, as in axolotl: prompt_format={prompt_format!r} does not contain "
            "{system}; add it to train on the system texts"
        )
    return _fill(
        "prompt_format",
        prompt_format,
        system=system,
        prompt=_require_text(_require_column(row, field_prompt), field_prompt),
    )


def _fill(name: str, template: str, **values: str) -> str:
    needed = list(values)[-1]
    if f"{{{needed}}}" not in template:
        raise ValueError(f"{name}={template!r} must contain {{{needed}}}; add it")
    try:
        return template.format(**values)
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise ValueError(f"{name}={template!r} must name only {sorted(values)}; double other braces") from error
