"""Signatures of environments, which TorchRL's metaclass hides behind ``(*args, **kwargs)``."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from torchrl_rloo.lookup import did_you_mean


class SignedEnv:
    """Mixin whose subclasses show the signature of their ``__init__`` to ``help`` and editors.

    Attributes:
        passes_to: a class whose keyword arguments stand in the place of ``**kwargs``; None: nothing does.
        sets: the keyword arguments of that class that this one sets.
    """

    passes_to: type | None = None
    sets: frozenset[str] = frozenset()

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        cls.__signature__ = inspect.Signature(list(_parameters(cls)))


def _parameters(cls: type[SignedEnv]) -> Iterator[inspect.Parameter]:
    own = list(inspect.signature(cls.__init__).parameters.values())[1:]
    names = {parameter.name for parameter in own}
    for parameter in own:
        if parameter.kind is parameter.VAR_KEYWORD and cls.passes_to is not None:
            others = inspect.signature(cls.passes_to).parameters.values()
            yield from (p for p in others if p.kind is p.KEYWORD_ONLY and p.name not in names | cls.sets)
        else:
            yield parameter


def refuse_unknown(cls: type, given: Mapping[str, Any], remedies: Mapping[str, str]) -> None:
    """Refuse keyword arguments that a class does not have, by the name of that class.

    Args:
        cls: whose signature counts.
        given: the keyword arguments.
        remedies: for names of other things, what to write instead.

    Raises:
        TypeError: naming the argument, a near match or the remedy.
    """
    known = inspect.signature(cls).parameters
    for name in given:
        if name not in known:
            hint = f": {remedies[name]}" if name in remedies else did_you_mean(name, known)
            raise TypeError(f"{cls.__name__} has no argument {name!r}{hint}")
