"""Loss that trains the critic of PPO."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from tensordict import TensorClass, TensorDictBase
from torchrl.objectives import LossModule

from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import gather_actions, ragged
from torchrl_rloo.functional.policy_loss import aggregate
from torchrl_rloo.functional.returns import clipped_value_loss, explained_variance
from torchrl_rloo.functional.statistics import masked_mean
from torchrl_rloo.modules.heads import ValueHead
from torchrl_rloo.objectives.step import (
    LossOutput,
    Normalizers,
    concatenate_field,
    mean_over_tokens,
    multiplicity,
    row_normalizers,
    row_weights,
    sum_field,
    zero_loss,
)


class ValueLossOutput(LossOutput, TensorClass["nocast"]):
    """Loss of :class:`ValueLoss`, and metrics over action tokens (without gradient).

    Attributes:
        loss_critic: scalar to minimize.
        explained_variance: share of the targets' variance that the values explain. 1 is perfect, NaN if all targets are
            equal.
        value_clip_fraction: share of the action tokens whose value moved by more than ``clip_epsilon``.
        value_estimates: ``[n]``, values at the action tokens; repeated for each row that a merged row stands for.
        value_targets: ``[n]``, their targets.
        num_action_tokens: number ``n`` of action tokens.
    """

    loss_critic: torch.Tensor
    explained_variance: torch.Tensor
    value_clip_fraction: torch.Tensor
    value_estimates: torch.Tensor
    value_targets: torch.Tensor
    num_action_tokens: torch.Tensor

    def is_empty(self) -> bool:
        """Return whether the output is of no action tokens."""
        return not len(self.value_targets)

    @classmethod
    def merge(cls, outputs: Sequence[ValueLossOutput], num_updates: int) -> dict[str, float]:
        """Return ``loss_critic``, and ``explained_variance`` and ``value_clip_fraction`` over all action tokens.

        ``loss_critic`` is ``loss`` under a name that the metrics of the policy's loss do not have.
        """
        values, targets = concatenate_field(outputs, "value_estimates"), concatenate_field(outputs, "value_targets")
        return {
            "loss_critic": sum_field(outputs, "loss_critic") / num_updates,
            "explained_variance": float(explained_variance(values, targets)),
            "value_clip_fraction": mean_over_tokens(outputs, "value_clip_fraction"),
        }


class ValueLoss(LossModule):
    """Clipped squared error of a value head, averaged over action tokens.

    See :func:`~torchrl_rloo.functional.returns.clipped_value_loss`. Rows come from a buffer with
    :class:`~torchrl_rloo.replay.gae.TokenGAE`. The loss reads ``TOKENS``, ``ACTION_MASK``, ``STATE_VALUE`` and
    ``VALUE_TARGET``. ``sample_weight`` and ``multiplicity``, if present, multiply the loss of a row. Returns a
    :class:`ValueLossOutput`.

    Args:
        value_head: critic that estimates the values.
        clip_epsilon: largest distance of a value from the one that its target was computed with. None disables the
            clip.
        mask_truncated_completions: True excludes the tokens of truncated rows.
        critic_coeff: factor of the loss, above 0, which matters for a trunk that the policy shares.

    Raises:
        ValueError: if ``clip_epsilon`` or ``critic_coeff`` is out of range.
        KeyError: at ``forward``, if rows have no values or targets.

    Example::

        loss_fn = ValueLoss(ValueHead(model), clip_epsilon=0.2)
        loss_fn(buffer.sample()).loss.backward()
    """

    value_head: ValueHead

    def __init__(
        self,
        value_head: ValueHead,
        *,
        clip_epsilon: float | None = 0.2,
        mask_truncated_completions: bool = False,
        critic_coeff: float = 1.0,
    ):
        super().__init__()
        if clip_epsilon is not None and not 0 < clip_epsilon < math.inf:
            raise ValueError(f"clip_epsilon={clip_epsilon} must be None or a number above 0")
        if not 0 < critic_coeff < math.inf:
            raise ValueError(f"critic_coeff={critic_coeff} must be a number above 0")
        self.value_head, self.critic_coeff = value_head, critic_coeff
        self.clip_epsilon, self.mask_truncated_completions = clip_epsilon, mask_truncated_completions
        self.in_keys = [keys.TOKENS, keys.ACTION_MASK, keys.STATE_VALUE, keys.VALUE_TARGET]
        self.out_keys = list(ValueLossOutput.__annotations__)

    def normalizers(self, rows: TensorDictBase, process_group=None) -> Normalizers:
        """Compute the normalizers of an optimizer step from all its rows; see :meth:`RLOOLoss.normalizers`."""
        masked = self.mask_truncated_completions
        return row_normalizers(rows, mask_truncated_completions=masked, process_group=process_group)

    def forward(self, tensordict: TensorDictBase, normalizers: Normalizers | None = None) -> ValueLossOutput:
        """Compute the loss of rows ``[B]`` as their part of a step; see :meth:`RLOOLoss.forward`."""
        if not len(tensordict):
            zero, nothing = zero_loss(lambda rows: self.value_head.values(rows)[0]), torch.zeros(0)
            nan = zero.detach() + math.nan
            return ValueLossOutput(zero, nan, nan.clone(), nothing, nothing.clone(), zero.new_zeros(()))
        # Estimate the values of the action tokens, and gather those that the targets were computed with
        normalizers = self.normalizers(tensordict) if normalizers is None else normalizers
        values, actions = self.value_head.values(tensordict)
        mask = actions.mask
        if self.mask_truncated_completions:
            mask = mask & ~tensordict[keys.TRUNCATED].to(mask.device)
        old, targets = (
            gather_actions([v[:, 0] for v in ragged(tensordict, key)], actions)
            for key in (keys.STATE_VALUE, keys.VALUE_TARGET)
        )
        # Average the clipped error over the tokens of the whole step
        errors = clipped_value_loss(values, old, targets, self.clip_epsilon)
        weighted = errors * row_weights(tensordict).to(values)[:, None]
        loss = self.critic_coeff * aggregate(weighted, mask, "token_mean", num_tokens=normalizers.num_tokens)
        # Measure the values without gradient; a merged row counts once for each row that it stands for
        with torch.no_grad():
            tokens = mask * multiplicity(tensordict).to(mask.device)[:, None]
            outside = (values - old).abs() > (math.inf if self.clip_epsilon is None else self.clip_epsilon)
            flat_values, flat_targets = (
                x.flatten().repeat_interleave(tokens.flatten().long()) for x in (values, targets)
            )
            return ValueLossOutput(
                loss_critic=loss,
                explained_variance=explained_variance(flat_values, flat_targets),
                value_clip_fraction=masked_mean(outside.float(), tokens),
                value_estimates=flat_values,
                value_targets=flat_targets,
                num_action_tokens=tokens.sum(),
            )
