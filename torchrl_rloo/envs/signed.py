"""SignedEnv: mixin that shows the arguments of an environment, and refuses what TorchRL does with text."""

from __future__ import annotations

import inspect
from typing import Any, NoReturn

from torchrl_rloo.runtime.torchrl_arguments import refuse_text_transform


class SignedEnv:
    """Mixin of chat environments: it shows their arguments to ``help``, and refuses what TorchRL does with text.

    TorchRL's metaclass hides the signature of ``__init__`` behind ``(*args, **kwargs)``.
    """

    forwards_to: type | None = None  # class whose keyword arguments replace **kwargs in the signature

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
        if cls.forwards_to is not None and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD:
            own = {"batch_size", *(parameter.name for parameter in parameters)}
            forwarded = inspect.signature(cls.forwards_to).parameters.values()
            parameters[-1:] = [p for p in forwarded if p.kind is p.KEYWORD_ONLY and p.name not in own]
        cls.__signature__ = inspect.Signature(parameters)

    def append_transform(self, transform: Any) -> Any:
        """Append a transform, or a tool; refuse transforms of TorchRL that edit conversations as text."""
        from torchrl_rloo.envs.transforms.tools import as_transform  # which imports environments

        refuse_text_transform(transform)
        return super().append_transform(as_transform(transform))

    @classmethod
    def from_dataloader(cls, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise: an environment draws prompts from a loaded dataset, not from a data loader as TorchRL's does."""
        raise TypeError(
            f"{cls.__name__}.from_dataloader is TorchRL's; use DatasetChatEnv(load_prompts(rows), tokenizer, "
            "prompts_per_batch=..., num_generations=...), which draws and groups prompts"
        )
