"""RoleAdapters: one model whose roles have different adapters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from tensordict import TensorDictBase

from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import action_tokens, stack_rows
from torchrl_rloo.engines.generation import Generated
from torchrl_rloo.modules.checkpointing import checkpointing_layers
from torchrl_rloo.modules.policies import TransformersWrapper
from torchrl_rloo.modules.reference import adapter_disabled
from torchrl_rloo.modules.scoring import ScoredActions
from torchrl_rloo.runtime.lookup import did_you_mean


class RoleAdapters(TransformersWrapper):
    """Policy and scorer that computes each row with the adapter of its role; the roles share the base weights.

    Rows of conversations with roles have a ``"role_id"`` (:class:`~torchrl_rloo.data.Role`). A batch is split by
    adapter, and the results are in its order. Use it wherever a :class:`TransformersWrapper` is used: in a collector
    and, as ``get_new_version(generate=False)``, in a loss.

    Args:
        model: peft's ``PeftModel`` with an adapter of each name; see :func:`~torchrl_rloo.modules.add_adapter`.
        adapters: name of the adapter of each role, in the order of the environment's ``roles``. None is the base model,
            such as for a frozen judge.
        **kwargs: further arguments of :class:`TransformersWrapper`.

    Raises:
        TypeError: if the model is not a ``PeftModel``.
        ValueError: if the model has no adapter of a name.
        KeyError: at a call, if a row has no ``"role_id"``.
        IndexError: at a call, if ``adapters`` has no entry for a role.
        NotImplementedError: at a score with gradients, if the model has gradient checkpointing, which would recompute
            layers with another adapter.

    Example::

        model = add_adapter(model, {"r": 8, "target_modules": "all-linear"}, "proposer")
        model = add_adapter(model, {"r": 8, "target_modules": "all-linear"}, "solver")
        policy = RoleAdapters(model, ["proposer", "solver", None], tokenizer=tokenizer)  # None: a judge
        loss_fn = RLOOLoss(policy.get_new_version(generate=False))
    """

    def __init__(self, model: torch.nn.Module, adapters: Sequence[str | None], **kwargs: Any):
        known = getattr(model, "peft_config", None)
        if known is None or not hasattr(model, "disable_adapter"):
            raise TypeError(f"model={type(model).__name__} must be a peft PeftModel; use add_adapter(model, ...)")
        if unknown := [name for name in adapters if name is not None and name not in known]:
            hint = did_you_mean(str(unknown[0]), list(known))
            raise ValueError(f"adapters={list(adapters)} must be among those of the model, {list(known)}{hint}")
        super().__init__(model, **kwargs)
        self.adapters = tuple(adapters)

    def get_new_version(self, **kwargs: Any) -> RoleAdapters:
        """Return a policy of the same model and adapters with other settings; see :class:`TransformersWrapper`."""
        return super().get_new_version(**({"adapters": self.adapters} | kwargs))

    def _sample(self, rows: TensorDictBase, prompts: list[torch.Tensor]) -> list[Generated]:
        turns: dict[int, Generated] = {}
        for name, places in self._places(rows).items():
            with adapter_active(self.model, name):
                found = super()._sample(_select(rows, places), [prompts[i] for i in places])
            turns |= dict(zip(places, found, strict=True))
        return [turns[i] for i in range(len(prompts))]

    def _score(self, rows: TensorDictBase, entropy: bool, router_loss: bool) -> ScoredActions:
        if torch.is_grad_enabled() and checkpointing_layers(self.model):
            raise NotImplementedError("RoleAdapters cannot train with gradient checkpointing; disable it on the model")
        if router_loss:
            raise NotImplementedError("RoleAdapters has no router_loss; set router_loss=False")
        actions = action_tokens(rows, self.tokenizer.pad_token_id or 0)
        width, order, log_probs, entropies = actions.mask.shape[1], [], [], []
        for name, places in self._places(rows).items():
            with adapter_active(self.model, name):
                scored = super()._score(_select(rows, places), entropy, False)
            missing = (0, width - scored.log_probs.shape[1])
            log_probs.append(F.pad(scored.log_probs, missing))
            if scored.entropy is not None:
                entropies.append(F.pad(scored.entropy, missing))
            order += places
        back = torch.tensor(order).argsort().to(log_probs[0].device)
        actions = type(actions)(*(t.to(self.model.device) for t in actions))
        return ScoredActions(torch.cat(log_probs)[back], torch.cat(entropies)[back] if entropy else None, actions)

    def _places(self, rows: TensorDictBase) -> dict[str | None, list[int]]:
        """Return the rows of each adapter."""
        places: dict[str | None, list[int]] = {}
        for i, row in enumerate(rows.unbind(0)):
            if (role := row.get(keys.ROLE_ID, None)) is None:
                raise KeyError(f"row {i} has no {keys.ROLE_ID!r}; RoleAdapters requires an environment with roles")
            if int(role) >= len(self.adapters):
                raise IndexError(f"row {i} has {keys.ROLE_ID}={int(role)}, but adapters={self.adapters} end before it")
            places.setdefault(self.adapters[int(role)], []).append(i)
        return places


@contextmanager
def adapter_active(model: torch.nn.Module, name: str | None) -> Iterator[None]:
    """Make a ``PeftModel`` compute with one adapter within the context, or with its base model if ``name`` is None."""
    if name is None:
        with adapter_disabled(model):
            yield
        return
    before = model.active_adapter
    parameters = [(p, p.requires_grad) for p in model.parameters()]
    try:
        model.set_adapter(name)
        _restore(parameters)  # peft freezes the other adapters
        yield
    finally:
        model.set_adapter(before)
        _restore(parameters)


def _restore(parameters: list[tuple[torch.nn.Parameter, bool]]) -> None:
    for parameter, required in parameters:
        parameter.requires_grad_(required)


def _select(rows: TensorDictBase, places: list[int]) -> TensorDictBase:
    members = rows.unbind(0)
    return stack_rows([members[i] for i in places])
