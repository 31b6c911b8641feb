"""Errors of Python code in the words of the command line: ``device='cpu'`` becomes ``model.device=cpu``."""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from torchrl_rloo.cli.fields import known_settings

MAPPINGS = {"RLOOLoss": "loss", "MCAdvantage": "advantage"}  # classes whose arguments are keys of a section
RENAMED = {  # arguments with another name than their setting, the first that the recipe has
    "scorers": ("eval.scorers", "eval.scorer"),
    "tokenizer.chat_template": ("model.chat_template",),
    "total_steps": ("plan.steps", "train.steps"),
}
_TOKEN = re.compile(
    r"(?<![\w.'\"\[/={-])(?P<name>tokenizer\.chat_template|[a-z]\w*)"
    r"(?:=(?:'(?P<text>[\w./:+-]+)'|(?P<word>None|True|False)\b)?|(?![\w.(=]))"
)
_VERBS = ("set ", "raise ", "lower ", "increase ", "limit ", "remove ")  # before the name of an argument in a remedy
_WORDS = {"None": "null", "True": "true", "False": "false"}


def in_settings(message: str, error: BaseException, cfg: Any) -> str:
    """Replace the names of arguments in an error by those of settings.

    A name is that of a setting if the section whose method raised the error has it. It also is if only one setting has
    this name and the value shown. In a remedy, the only setting with this name is enough. Others stay.

    Args:
        message: message of the error.
        error: error with its traceback.
        cfg: settings of the recipe.
    """
    sections, known, values = dict(_sections(error, cfg)), known_settings(type(cfg)), dict(_values(cfg))

    def find(name: str, shown: str, remedy: bool) -> str | None:
        owned = [f"{section}.{name}".lstrip(".") for section, names in sections.items() if name in names]
        if found := next((setting for setting in (*owned, *RENAMED.get(name, ())) if setting in known), None):
            return found
        same = [setting for setting in {**dict.fromkeys(known), **values} if setting.rpartition(".")[2] == name]
        if len(same) == 1 and ((remedy and "_" in name) or (shown and _is_shown(values.get(same[0]), shown))):
            return same[0]
        return owned[0] if owned else None  # a key of a free mapping

    def replace(match: re.Match[str]) -> str:
        name, shown, before = match["name"], match[0], message[: match.start()].lower()
        after = re.match(r"[^\s;,:)]+", message[match.end() :]) if shown.endswith("=") else None
        value = match["text"] or _WORDS.get(match["word"] or "", "")
        named = "=" in shown or "_" in name or before.endswith(_VERBS)
        setting = find(name, value or (after[0] if after else ""), before.endswith(_VERBS)) if named else None
        return shown if setting is None else setting + ("=" if "=" in shown else "") + value

    text = _TOKEN.sub(replace, message)
    if text == message:
        return text
    return re.sub(r"\b(use|to|or|which) (None|True|False)\b(?!=)", lambda m: f"{m[1]} {_WORDS[m[2]]}", text)


def _sections(error: BaseException | None, cfg: Any) -> Iterator[tuple[str, set[str]]]:
    """Yield the sections whose methods an error passed, innermost first, and the names of their settings."""
    names = {id(section): name for name, section in _walk(cfg)}
    while error is not None:
        for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
            owner = frame.f_locals.get("self")
            if id(owner) in names:
                yield names[id(owner)], {f.name for f in fields(owner)}
            elif (section := MAPPINGS.get(type(owner).__name__)) is not None and hasattr(cfg, section):
                yield section, set(inspect.signature(type(owner)).parameters)
        error = error.__cause__


def _walk(section: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the sections of a configuration with their dotted names; the configuration itself has no name."""
    yield name, section
    for f in fields(section):
        if is_dataclass(value := getattr(section, f.name)):
            yield from _walk(value, f"{name}.{f.name}".lstrip("."))


def _values(cfg: Any) -> Iterator[tuple[str, Any]]:
    """Yield the dotted names and values of all settings, also of keys in free mappings."""
    for name, section in _walk(cfg):
        for f in fields(section):
            value, setting = getattr(section, f.name), f"{name}.{f.name}".lstrip(".")
            yield setting, value
            yield from ((f"{setting}.{key}", v) for key, v in (value.items() if isinstance(value, dict) else ()))


def _is_shown(value: Any, shown: str) -> bool:
    """Return whether a message shows a value."""
    try:
        return float(value) == float(shown)
    except (TypeError, ValueError):
        return _WORDS.get(str(value), str(value)) == shown
