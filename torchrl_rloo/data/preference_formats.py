"""The layouts in which preference datasets come, each a function from a source's row to examples.

An example of a *pair* is ``{"prompt", "chosen", "rejected"}``, a *labelled* one ``{"prompt", "completion", "label"}``.
The prompt is chat messages and a completion one assistant message in a list; only ``user_defined`` has plain text for
both. Formats have the names that Axolotl's users know them by: ``<markup>.<layout>``. A fault in a row is a
``ValueError`` that names the column and a remedy; whoever calls adds where the row is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torchrl_rloo.data.templates import Messages

Example = dict[str, Any]
Reader = Callable[..., list[Example]]  # (row, **options)

_NEXT = {  # which roles may follow a role; the conversation ends with the answer, an assistant message
    None: ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}
_ROLES = {role: [role] for role in ("system", "user", "assistant", "tool")}
_ROLE_AND_CONTENT = {"role": "role", "content": "content"}
_LABELS = {"true": True, "1": True, "false": False, "0": False}


def _pair(prompt: str | None, chosen: str, rejected: str, row: Mapping) -> list[Example]:
    """Two answers to a prompt, each text or messages that end with the answer and, if longer, repeat the prompt."""
    before, good = _answer(row, chosen)
    return [_paired(_context(row, prompt, before, chosen), before, good, _answer(row, rejected), chosen, rejected)]


def _pair_prompt_first(row: Mapping) -> list[Example]:
    """ORPO's: the prompt, if there is one, takes the place of the user's message in lists of one exchange."""
    before, good = _answer(row, "chosen")
    exchange = len(_without_system(before)) <= 1
    if exchange and row.get("prompt"):
        context = _context(row, "prompt", [], "chosen")
    else:
        context = _context(row, None, before, "chosen")
    return [_paired(context, before, good, _answer(row, "rejected"), "chosen", "rejected")]


def _template_default(
    row: Mapping,
    *,
    field_messages: str = "messages",
    field_chosen: str = "chosen",
    field_rejected: str = "rejected",
    message_property_mappings: Mapping[str, str] = _ROLE_AND_CONTENT,
    roles: Mapping[str, list[str]] = _ROLES,
) -> list[Example]:
    """Columns, message fields and roles under names of the dataset's own."""
    columns = (field_messages, field_chosen, field_rejected)
    ours = {name: _renamed(row, name, message_property_mappings, roles) for name in columns}
    return _pair(*columns, {"system": row.get("system")} | ours)


def _template_argilla_chat(
    row: Mapping,
    *,
    field_chosen: str = "chosen",
    field_rejected: str = "rejected",
    message_property_mappings: Mapping[str, str] = _ROLE_AND_CONTENT,
    roles: Mapping[str, list[str]] = _ROLES,
) -> list[Example]:
    """The same, with the prompt in the lists."""
    columns = (field_chosen, field_rejected)
    ours = {name: _renamed(row, name, message_property_mappings, roles) for name in columns}
    return _pair(None, *columns, {"system": row.get("system")} | ours)


def _nectar(row: Mapping) -> list[Example]:
    """The answer of the lowest rank number, the best, against every answer that is ranked behind it."""
    context, answers = _context(row, "prompt", [], "prompt"), _column(row, "answers")
    if not (
        isinstance(answers, list) and all(isinstance(a, Mapping) and {"answer", "rank"} <= set(a) for a in answers)
    ):
        raise ValueError(f"column 'answers' must be a list of {{'answer', 'rank'}}, got {_shown(answers)}")
    ranked = sorted(answers, key=lambda a: a["rank"])
    worse = [a for a in ranked if a["rank"] > ranked[0]["rank"]]
    if not worse:
        raise ValueError(
            "column 'answers' ranks no answer behind another, so there is nothing to prefer: remove the row"
        )
    best = _text(ranked[0]["answer"], "answers")
    return [_paired(context, [], best, ([], _text(a["answer"], "answers")), "answers", "answers") for a in worse]


def _labelled(prompt: str, row: Mapping) -> list[Example]:
    """One answer to a prompt, and whether it is good; a list of more than the answer holds the prompt, too."""
    before, answer = _answer(row, "completion")
    context = _context(row, None if before and prompt == "chosen" else prompt, before, "completion")
    return [{"prompt": context, "completion": _said(answer), "label": _label(row, "label")}]


def _user_pair(
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
    """Plain text, put together by formats."""
    prompt = _user_prompt(row, field_prompt, field_system, prompt_format)
    chosen = _filled("chosen_format", chosen_format, chosen=_text(_column(row, field_chosen), field_chosen))
    rejected = _filled("rejected_format", rejected_format, rejected=_text(_column(row, field_rejected), field_rejected))
    _differ(chosen, rejected, field_chosen, field_rejected)
    return [{"prompt": prompt, "chosen": chosen, "rejected": rejected}]


def _user_labelled(
    row: Mapping,
    *,
    field_prompt: str = "prompt",
    field_system: str | None = "system",
    field_completion: str = "completion",
    field_label: str = "label",
    prompt_format: str = "{prompt}",
    completion_format: str = "{completion}",
) -> list[Example]:
    """Plain text, put together by formats, and a label."""
    answer = _text(_column(row, field_completion), field_completion)
    completion = _filled("completion_format", completion_format, completion=answer)
    prompt = _user_prompt(row, field_prompt, field_system, prompt_format)
    return [{"prompt": prompt, "completion": completion, "label": _label(row, field_label)}]


def _by_columns(layouts: Mapping[str, Reader], row: Mapping) -> list[Example]:
    """For a type without a layout: the one whose prompt column the row has."""
    found = [layout for column, layout in layouts.items() if row.get(column) is not None]
    if len(found) != 1:
        raise ValueError(
            f"{len(found)} of the columns {list(layouts)} are there: name the layout, as in 'chatml.intel'"
        )
    return found[0](row)


_PAIR_COLUMNS = {
    "argilla": ("instruction", "chosen_response", "rejected_response"),
    "argilla_chat": (None, "chosen", "rejected"),
    "icr": ("input", "chosen", "rejected"),
    "intel": ("question", "chosen", "rejected"),
    "prompt_pairs": ("prompt", "chosen", "rejected"),
    "ultra": ("prompt", "chosen", "rejected"),
}
_LABELLED_PROMPTS = {
    "argilla": "instruction",
    "argilla_chat": "chosen",
    "intel": "question",
    "prompt_pairs": "prompt",
    "ultra": "prompt",
}
_PAIRS_BY_PROMPT = {columns[0]: partial(_pair, *columns) for columns in _PAIR_COLUMNS.values() if columns[0]}
_LABELLED_BY_PROMPT = {
    prompt: partial(_labelled, prompt) for prompt in _LABELLED_PROMPTS.values() if prompt != "chosen"
}

PAIRED_FORMATS: dict[str, Reader] = {
    **{
        f"{m}.{name}": partial(_pair, *columns) for m in ("chatml", "llama3") for name, columns in _PAIR_COLUMNS.items()
    },
    **{m: partial(_by_columns, _PAIRS_BY_PROMPT) for m in ("chatml", "llama3")},
    "zephyr.nectar": _nectar,
    "chat_template.argilla": _pair_prompt_first,
    "chat_template.argilla_chat": _template_argilla_chat,
    "chat_template.default": _template_default,
    "user_defined.default": _user_pair,
}
LABELLED_FORMATS: dict[str, Reader] = {
    **{
        f"{m}.{name}": partial(_labelled, prompt)
        for m in ("chatml", "llama3")
        for name, prompt in _LABELLED_PROMPTS.items()
    },
    **{m: partial(_by_columns, _LABELLED_BY_PROMPT) for m in ("chatml", "llama3")},
    "user_defined.default": _user_labelled,
}


def _shown(value: Any) -> str:
    return f"{value!r:.200}"


def _column(row: Mapping, name: str) -> Any:
    if row.get(name) is None:
        there = sorted(column for column, value in row.items() if value is not None)
        raise ValueError(f"there is no column {name!r} but {there}: choose the type that fits, or rename the column")
    return row[name]


def _text(value: Any, column: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(
            f"column {column!r} must hold text that is not blank, got {_shown(value)}: fill it or remove the row"
        )
    return value


def _messages(value: Any, column: str) -> Messages:
    if not isinstance(value, list) or not value:
        raise ValueError(f"column {column!r} must hold text or a list of messages, got {_shown(value)}")
    for k, message in enumerate(value):
        if not (isinstance(message, Mapping) and all(isinstance(message.get(f), str) for f in ("role", "content"))):
            raise ValueError(
                f"message {k} of column {column!r} must have text as 'role' and 'content', got {_shown(message)}"
            )
    return [{"role": m["role"], "content": m["content"]} for m in value]


def _answer(row: Mapping, column: str) -> tuple[Messages, str]:
    """The messages before the answer, if the column has any, and the answer's text."""
    value = _column(row, column)
    if isinstance(value, str):
        return [], _text(value, column)
    messages = _messages([value] if isinstance(value, Mapping) else value, column)
    if messages[-1]["role"] != "assistant":
        role = messages[-1]["role"]
        raise ValueError(
            f"column {column!r} ends with a message of role {role!r}, but the assistant answers: correct it"
        )
    return messages[:-1], _text(messages[-1]["content"], column)


def _context(row: Mapping, prompt: str | None, before: Messages, column: str) -> Messages:
    """The conversation up to the answer: from the prompt column if one is named, else from before the answer."""
    context = before
    if prompt is not None:
        value = _column(row, prompt)
        asked = (
            [{"role": "user", "content": _text(value, prompt)}] if isinstance(value, str) else _messages(value, prompt)
        )
        if before and _stripped(before) != _stripped(asked):
            raise ValueError(
                f"column {prompt!r} is not what column {column!r} answers, {_shown(asked)} against {_shown(before)}: "
                "correct one, or choose a type that has its prompt in the lists (argilla_chat)"
            )
        context = before or asked
    if not context:
        raise ValueError(
            f"column {column!r} holds an answer without a prompt before it: choose a type with a prompt column"
        )
    if row.get("system") and context[0]["role"] != "system":
        context = [{"role": "system", "content": _text(row["system"], "system")}, *context]
    last = None
    for k, role in enumerate([*(m["role"] for m in context), "assistant"]):
        if role not in _NEXT[last]:
            what = "the answer" if k == len(context) else f"message {k}"
            raise ValueError(
                f"column {prompt or column!r}: {what} has role {role!r} after {last or 'nothing'!r}, where one of "
                f"{_NEXT[last]} belongs: correct the order of roles"
            )
        last = role
    return context


def _without_system(messages: Messages) -> Messages:
    return messages[1:] if messages and messages[0]["role"] == "system" else messages


def _stripped(messages: Messages) -> list[tuple[str, str]]:
    return [(m["role"], m["content"].strip()) for m in _without_system(messages)]


def _paired(
    context: Messages, before: Messages, good: str, other: tuple[Messages, str], chosen: str, rejected: str
) -> Example:
    other_before, bad = other
    if _stripped(before) != _stripped(other_before):
        raise ValueError(
            f"columns {chosen!r} and {rejected!r} differ before their last messages, so they answer different prompts: "
            "correct them or remove the row"
        )
    _differ(good, bad, chosen, rejected)
    return {"prompt": context, "chosen": _said(good), "rejected": _said(bad)}


def _differ(good: str, bad: str, chosen: str, rejected: str) -> None:
    if good == bad:
        raise ValueError(f"columns {chosen!r} and {rejected!r} hold the same answer, {good!r:.100}: remove the row")


def _said(text: str) -> Messages:
    return [{"role": "assistant", "content": text}]


def _label(row: Mapping, column: str) -> bool:
    if row.get(column) is None:
        raise ValueError(f"there is no label in column {column!r}: KTO needs true (desirable) or false for every row")
    if (label := _LABELS.get(str(row[column]).strip().lower())) is None:
        raise ValueError(f"column {column!r} must be true, false, 1 or 0, got {row[column]!r:.80}: convert it")
    return label


def _renamed(row: Mapping, column: str, properties: Mapping[str, str], roles: Mapping[str, list[str]]) -> Any:
    """A column's messages under our names of fields and roles; text as it is."""
    value = _column(row, column)
    if isinstance(value, str):
        return value
    role_of = {theirs: ours for ours, names in roles.items() for theirs in names}
    messages = []
    for k, message in enumerate([value] if isinstance(value, Mapping) else value):
        if not isinstance(message, Mapping) or any(properties.get(f, f) not in message for f in ("role", "content")):
            raise ValueError(
                f"message {k} of column {column!r} lacks fields: set message_property_mappings, now {dict(properties)}"
            )
        role = message[properties.get("role", "role")]
        if role not in role_of:
            raise ValueError(
                f"message {k} of column {column!r} has role {role!r}, not among {sorted(role_of)}: add it to roles"
            )
        messages.append({"role": role_of[role], "content": message[properties.get("content", "content")]})
    return messages


def _user_prompt(row: Mapping, field_prompt: str, field_system: str | None, prompt_format: str) -> str:
    system = row.get(field_system) if field_system else None
    if system and "{system}" not in prompt_format:
        raise ValueError(
            f"column {field_system!r} has no place in prompt_format={prompt_format!r}: put {{system}} into it, or set "
            "field_system=None"
        )
    return _filled(
        "prompt_format", prompt_format, system=system or "", prompt=_text(_column(row, field_prompt), field_prompt)
    )


def _filled(name: str, template: str, **values: str) -> str:
    needed = list(values)[-1]
    if f"{{{needed}}}" not in template:
        raise ValueError(f"{name}={template!r} leaves the column out: put {{{needed}}} into it")
    try:
        return template.format(**values)
    except (KeyError, IndexError, ValueError) as error:
        raise ValueError(f"{name}={template!r} may only name {sorted(values)}; write other braces twice") from error
