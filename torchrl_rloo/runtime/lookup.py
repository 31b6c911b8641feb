"""Names in a configuration: near matches, objects at dotted paths, and async functions, without slow imports."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

DATA_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")
_MAX_HUB_ID = 200  # characters: the hub allows 96 for each part


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return ``" (did you mean 'x'?)"`` with the names close to ``name``, or ``""``.

    Example:
        >>> did_you_mean("gsm8", ["gsm8k", "math"])
        " (did you mean 'gsm8k'?)"
    """
    names = list(names)
    spelled = {known.lower(): known for known in names}
    matches = get_close_matches(name, names, n=3) or [spelled[m] for m in get_close_matches(name.lower(), spelled)]
    return f" (did you mean {' or '.join(map(repr, matches))}?)" if matches else ""


def snake_case(name: str) -> str:
    """Return the name of a class in lower case, with underscores between its words.

    Example:
        >>> snake_case("WebSearch")
        'web_search'
    """
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def import_object(path: str, what: str) -> Any:
    """Import the object at a dotted path.

    Args:
        path: ``"package.module.name"``.
        what: kind of object, for messages (``"reward"``).

    Returns:
        The object.

    Raises:
        ValueError: if the path has no dot, the module does not exist, or it has no such name.
        Exception: if the module raises on import.

    Example:
        >>> import_object("math.pi", "constant")
        3.141592653589793
    """
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
    """Raise if a path has no file or directory; a name that may be a hub id passes.

    Args:
        what: name of the setting or argument, for messages.
        name: path or hub id.

    Raises:
        FileNotFoundError: if the name cannot be a hub id, and the path does not exist.

    Example:
        >>> check_path("source", "openai/gsm8k")
        >>> check_path("source", "nowhere.jsonl")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        FileNotFoundError: source='nowhere.jsonl' is neither a local file or directory (no '...nowhere.jsonl') nor ...
    """
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
