"""ValueLoss: what trains the critic of PPO."""

from __future__ import annotations

import math

import torch
from tensordict import TensorClass, TensorDictBase
from torchrl.objectives import LossModule

from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import gather_actions, ragged
from torchrl_rloo.functional.aggregation import aggregate
from torchrl_rloo.functional.statistics import masked_mean
from torchrl_rloo.functional.value_loss import clipped_value_loss, explained_variance
from torchrl_rloo.modules.value import ValueHead
from torchrl_rloo.objectives.counts import LossCounts, count_rows, multiplicity, row_weights, zero_loss


class ValueLossOutput(TensorClass["nocast"]):
    """What :class:`ValueLoss` returns: the loss, and metrics over action tokens alone (all without gradient).

    Attributes:
        loss_critic: scalar to minimise.
        explained_variance: share of the targets' variance that the values explain; 1 is perfect, NaN where targets are
            all alike.
        value_clip_fraction: share of the action tokens whose value has gone further than ``clip_epsilon``.
        num_action_tokens: how many action tokens the metrics are over.
    """

    loss_critic: torch.Tensor
    explained_variance: torch.Tensor
    value_clip_fraction: torch.Tensor
    num_action_tokens: torch.Tensor


class ValueLoss(LossModule):
    """The clipped squared error of a value head, averaged over action tokens.

    See :func:`~torchrl_rloo.functional.value_loss.clipped_value_loss`. Rows come from a buffer with
    :class:`~torchrl_rloo.replay.gae.GAE`.

    Args:
        value_head: estimates the values.
        clip_epsilon: how far a value may go from the one that the targets were computed with; None for no clip.
        mask_truncated_completions: leave out the tokens of truncated rows.

    A row's ``sample_weight`` and ``multiplicity``, where present, multiply its loss. ``forward(rows, counts=None)``
    divides by ``counts.num_tokens``, by default that of the rows given. When a batch is split into micro-batches, pass
    ``loss.count(whole_batch)`` with each: the summed gradient is then that of the whole.

    Raises:
        ValueError: for a value out of range.
        KeyError: at ``forward`` for rows without values or targets.
    """

    value_head: ValueHead

    def __init__(
        self, value_head: ValueHead, *, clip_epsilon: float | None = 0.2, mask_truncated_completions: bool = False
    ):
        super().__init__()
        if clip_epsilon is not None and not 0 < clip_epsilon < math.inf:
            raise ValueError(f"clip_epsilon={clip_epsilon} must be None or a number above 0")
        self.value_head = value_head
        self.clip_epsilon, self.mask_truncated_completions = clip_epsilon, mask_truncated_completions
        self.in_keys = [keys.TOKENS, keys.ACTION_MASK, keys.STATE_VALUE, keys.VALUE_TARGET]
        self.out_keys = list(ValueLossOutput.__annotations__)

    def count(self, rows: TensorDictBase, process_group=None) -> LossCounts:
        """Normalisers of an optimizer step, from all its rows; see :func:`count_rows`."""
        masked = self.mask_truncated_completions
        return count_rows(rows, mask_truncated_completions=masked, process_group=process_group)

    def forward(self, tensordict: TensorDictBase, counts: LossCounts | None = None) -> ValueLossOutput:
        """The loss of rows of batch size ``[B]``; see the class."""
        if not len(tensordict):
            zero = zero_loss(self.value_head)
            nan = zero.detach() + math.nan
            return ValueLossOutput(zero, nan, nan.clone(), zero.new_zeros(()))
        counts = self.count(tensordict) if counts is None else counts
        values, actions = self.value_head.values(tensordict)
        mask = actions.mask
        if self.mask_truncated_completions:
            mask = mask & ~tensordict[keys.TRUNCATED].to(mask.device)
        old, targets = (
            gather_actions([v[:, 0] for v in ragged(tensordict, key)], actions)
            for key in (keys.STATE_VALUE, keys.VALUE_TARGET)
        )
        errors = clipped_value_loss(values, old, targets, self.clip_epsilon)
        weighted = errors * row_weights(tensordict).to(values)[:, None]
        loss = aggregate(weighted, mask, "token_mean", num_tokens=counts.num_tokens)
        with torch.no_grad():
            tokens = mask * multiplicity(tensordict).to(mask.device)[:, None]
            outside = (values - old).abs() > (math.inf if self.clip_epsilon is None else self.clip_epsilon)
            return ValueLossOutput(
                loss_critic=loss,
                explained_variance=explained_variance(values, targets, tokens),
                value_clip_fraction=masked_mean(outside.float(), tokens),
                num_action_tokens=tokens.sum(),
            )
