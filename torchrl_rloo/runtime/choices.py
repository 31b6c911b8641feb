"""Choices: settings given as a name, as a mapping with a name and fields, or as an object."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, field, fields
from typing import Any

from torchrl_rloo.runtime.lookup import did_you_mean


def resolve(argument: str, spec: Any, table: Mapping[str, Any]) -> Any:
    """Build the object that ``spec`` describes.

    Args:
        argument: name of the argument, for errors.
        spec: name in ``table``, mapping ``{"name": name, field: value, ...}``, or object that is returned unchanged.
        table: dataclasses, functions or other objects by name. Only dataclasses have fields.

    Returns:
        An instance of the dataclass, the entry of ``table``, or ``spec`` itself.

    Raises:
        ValueError: if a name, field or value is invalid, or a required field is missing.

    Example:
        >>> from torchrl_rloo.functional import SURROGATES
        >>> resolve("surrogate", {"name": "clip", "low": 0.1, "high": 0.3}, SURROGATES)
        Clip(low=0.1, high=0.3, dual=None)
    """
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
