"""Names in a configuration: near matches, objects at dotted paths, dtypes, and choices; without slow imports.

A choice is a setting given as a name, as a mapping with a name and fields, or as an object.
"""

from __future__ import annotations

import inspect
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, field, fields
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


DATA_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")
_MAX_HUB_ID = 200  # characters: the hub allows 96 for each part


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return ``" (did you mean 'x'?)"`` with the names close to ``name``, or ``""``."""
    names = list(names)
    spelled = {known.lower(): known for known in names}
    matches = get_close_matches(name, names, n=3) or [spelled[m] for m in get_close_matches(name.lower(), spelled)]
    return f" (did you mean {' or '.join(map(repr, matches))}?)" if matches else ""


def snake_case(name: str) -> str:
    """Return the name of a class in lower case, with underscores between its words."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def import_object(path: str, what: str) -> Any:
    """Import the object at a dotted path."""
    module, _, name = path.rpartition(".")
    if not module:
        raise ValueError(f"{what} {path!r} must be a dotted path, module.name")
    try:
        found = import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module exists, but one of its imports does not
        raise ValueError(f"{what} {path!r}: there is no module {error.name!r}") from error
    if not hasattr(found, name):
        raise ValueError(f"{what} {path!r}: module {module!r} has no {name!r}{did_you_mean(name, dir(found))}")
    return getattr(found, name)


def import_room(name: str, user: str) -> Any:
    """Import an optional folder of the package; ``ImportError`` names it and its ``user`` if it is missing."""
    try:
        return import_module(f"torchrl_rloo.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"torchrl_rloo.{name}":
            raise  # the folder exists, but one of its imports does not
        raise ImportError(f"{user} requires the folder torchrl_rloo/{name}: reinstall torchrl_rloo") from error


def check_path(what: str, name: str | os.PathLike) -> None:
    """Raise if a path has no file or directory; a name that may be a hub id passes."""
    text, path = os.fspath(name), Path(os.path.expanduser(name))
    local = text.startswith((".", "/", "~")) or text.count("/") > 1 or path.suffix.lower() in DATA_SUFFIXES
    if (local or len(text) > _MAX_HUB_ID) and not os.path.exists(path):
        where = str(path.absolute())
        raise FileNotFoundError(
            f"{what}={text!r} is neither a local file or directory (no {where!r}) nor a hub id: correct the path"
        )


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether a call of the function must be awaited."""
    while isinstance(function, partial):
        function = function.func
    call = getattr(function, "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def parse_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a name such as ``"bfloat16"``.

    Raises:
        ValueError: if torch has no dtype of that name.

    Example:
        >>> parse_dtype("bfloat16")
        torch.bfloat16
    """
    import torch  # takes 2 s

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype={name!r} is not a torch dtype; use 'float32' or 'bfloat16'")
    return dtype


HUB_KWARGS = ("revision", "trust_remote_code", "token", "cache_dir", "subfolder", "local_files_only")


def resolve(argument: str, spec: Any, table: Mapping[str, Any]) -> Any:
    """Build the object that a name in ``table``, or a mapping with one and its fields, describes; return others."""
    # Return an object that is already built
    if not isinstance(spec, (str, Mapping)):
        classes = tuple(entry for entry in table.values() if isinstance(entry, type))
        if isinstance(spec, classes) or (callable(spec) and not isinstance(spec, type)):
            return spec
        raise ValueError(f"{argument}={spec!r} must be one of {sorted(table)}, a mapping with a name, or an object")
    # Find the entry by its name
    settings = {"name": spec} if isinstance(spec, str) else dict(spec)
    name = settings.pop("name", None)
    if name not in table:
        raise ValueError(f"{argument}={name!r} is unknown{did_you_mean(str(name), table)}; valid: {sorted(table)}")
    # Check the fields: functions and other objects have none
    entry = table[name]
    known = {f.name: f for f in fields(entry)} if isinstance(entry, type) else {}
    for key in settings:
        if key not in known:
            hint = f"valid: {sorted(known)}" if known else "it has no fields"
            raise ValueError(f"{argument}={name!r}: unknown field {key!r}{did_you_mean(key, known)}; {hint}")
    required = (f.name for f in known.values() if f.default is MISSING and f.default_factory is MISSING)
    if missing := [key for key in required if key not in settings]:
        raise ValueError(f"{argument}={name!r} requires {missing}: set {argument}={{name: {name}, {missing[0]}: ...}}")
    return entry(**settings) if isinstance(entry, type) else entry


def number_field(default: Any = MISSING, *, low: float = 0.0, high: float = math.inf, above: bool = False) -> Any:
    """Declare a :class:`Choice` field: a number in ``[low, high]``, without ``low`` itself if ``above`` is True."""
    return field(default=default, metadata={"limits": (low, high, above)})


class Choice:
    """Base class of frozen dataclasses that check the fields declared with :func:`number_field`."""

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if "limits" in f.metadata and not (value is None and f.default is None):
                self._check(f.name, value, *f.metadata["limits"])

    def _check(self, name: str, value: Any, low: float, high: float, above: bool = False) -> None:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not low <= value <= high or (above and value == low):
            least = f"above {low:g}" if above else f"of at least {low:g}"
            most = "" if high == math.inf else f" and at most {high:g}"
            raise ValueError(f"{type(self).__name__}: {name}={value!r} must be a number {least}{most}")
