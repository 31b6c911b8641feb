"""Signatures of environments, which TorchRL's metaclass otherwise hides behind ``(*args, **kwargs)``."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from torchrl_rloo.runtime.lookup import did_you_mean
from torchrl_rloo.runtime.torchrl_arguments import refuse_text_transform


class SignedEnv:
    """Mixin that shows ``help`` and editors the signature of the subclass's ``__init__``.

    Attributes:
        forwards_to: class whose keyword arguments replace ``**kwargs`` in the signature; None keeps ``**kwargs``.
        own_arguments: keyword arguments of that class that the subclass sets itself.
    """

    forwards_to: type | None = None
    own_arguments: frozenset[str] = frozenset()

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        cls.__signature__ = inspect.Signature(list(_parameters(cls)))

    def append_transform(self, transform: Any) -> Any:
        """Append a transform; refuse those of TorchRL that edit conversations as text."""
        refuse_text_transform(transform)
        return super().append_transform(transform)

    @classmethod
    def from_dataloader(cls, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise: an environment draws prompts from a loaded dataset, not from a data loader as TorchRL's does."""
        raise TypeError(
            f"{cls.__name__}.from_dataloader is TorchRL's; use DatasetChatEnv(load_prompts(rows), tokenizer, "
            "prompts_per_batch=..., num_generations=...), which draws and groups prompts"
        )


def _parameters(cls: type[SignedEnv]) -> Iterator[inspect.Parameter]:
    own = list(inspect.signature(cls.__init__).parameters.values())[1:]
    names = {parameter.name for parameter in own}
    for parameter in own:
        if parameter.kind is parameter.VAR_KEYWORD and cls.forwards_to is not None:
            others = inspect.signature(cls.forwards_to).parameters.values()
            yield from (p for p in others if p.kind is p.KEYWORD_ONLY and p.name not in names | cls.own_arguments)
        else:
            yield parameter


def refuse_unknown(cls: type, given: Mapping[str, Any], remedies: Mapping[str, str]) -> None:
    """Raise for keyword arguments that are not in the signature of a class.

    Args:
        cls: class whose signature is checked.
        given: the keyword arguments.
        remedies: for misplaced argument names, what to write instead.

    Raises:
        TypeError: for an unknown argument; the message has its remedy or a near match.
    """
    known = inspect.signature(cls).parameters
    for name in given:
        if name not in known:
            hint = f": {remedies[name]}" if name in remedies else did_you_mean(name, known)
            raise TypeError(f"{cls.__name__} got an unknown argument {name!r}{hint}")
