"""SFTLoss: supervised fine-tuning on given rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorClass, TensorDictBase
from torchrl.objectives import LossModule

from torchrl_rloo.data import keys
from torchrl_rloo.functional import AGGREGATIONS, Aggregation, aggregate, masked_mean, resolve
from torchrl_rloo.modules.policies import TransformersWrapper
from torchrl_rloo.objectives.choices import check_actor
from torchrl_rloo.objectives.normalizers import Normalizers, multiplicity, row_normalizers, row_weights, zero_loss
from torchrl_rloo.objectives.output import LossOutput, token_mean_of


class SFTLossOutput(LossOutput, TensorClass["nocast"]):
    """Loss of :class:`SFTLoss`, and metrics over action tokens (without gradient).

    Attributes:
        loss_sft: scalar to minimize.
        nll: mean negative log-prob per action token, in nats, whatever the aggregation and the sample weights.
        entropy: mean entropy of the model's distribution per action token, in nats.
        num_action_tokens: number of action tokens that the means are over.
    """

    loss_sft: torch.Tensor
    nll: torch.Tensor
    entropy: torch.Tensor
    num_action_tokens: torch.Tensor

    def is_empty(self) -> bool:
        """Return whether the output is of no action tokens."""
        return not bool(self.num_action_tokens)

    @classmethod
    def merge(cls, outputs: Sequence[SFTLossOutput], num_updates: int) -> dict[str, float]:
        """Return ``nll`` and ``entropy`` over all action tokens."""
        return {name: token_mean_of(outputs, name) for name in ("nll", "entropy")}


class SFTLoss(LossModule):
    r"""Negative log-likelihood of the rows' action tokens, e.g. for a warm start.

    Takes rows of tokens where TorchRL's class of this name takes a ``History``. ``normalize_by_seq_length=True`` there
    is ``aggregation="sequence_mean"`` here, ``False`` is ``"sequence_sum"``; a KL to a reference is not included.

    .. math:: L = -\frac{1}{\sum_i |y_i|} \sum_i \sum_t \log \pi_\theta(y_{it}|x_i, y_{i,<t})

    for the default ``"token_mean"``. Reads ``TOKENS`` and ``ACTION_MASK``; a row's ``sample_weight`` and
    ``multiplicity``, where present, multiply its loss. Returns an :class:`SFTLossOutput`.

    Args:
        actor_network: scores rows; :meth:`TransformersWrapper.score`.
        aggregation: a choice from :data:`~torchrl_rloo.functional.AGGREGATIONS`, or such a function.

    Raises:
        ValueError: for an unknown aggregation.
    """

    actor_network: TransformersWrapper

    def __init__(
        self,
        actor_network: TransformersWrapper,
        *,
        aggregation: str | Mapping[str, Any] | Aggregation = "token_mean",
    ):
        super().__init__()
        check_actor(actor_network)
        self.actor_network = actor_network
        self.aggregation = resolve("aggregation", aggregation, AGGREGATIONS)
        self.in_keys = [keys.TOKENS, keys.ACTION_MASK]
        self.out_keys = list(SFTLossOutput.__annotations__)

    def normalizers(self, rows: TensorDictBase, process_group=None) -> Normalizers:
        """Compute the normalizers of an optimizer step from all its rows; see :meth:`RLOOLoss.normalizers`."""
        return row_normalizers(rows, process_group=process_group)

    def forward(self, tensordict: TensorDictBase, normalizers: Normalizers | None = None) -> SFTLossOutput:
        """Compute the loss of rows of batch size ``[B]`` as their part of a step; see :meth:`RLOOLoss.forward`."""
        if not len(tensordict):
            zero = zero_loss(self.actor_network)
            nan = zero.detach() + math.nan
            return SFTLossOutput(loss_sft=zero, nll=nan, entropy=nan.clone(), num_action_tokens=zero.new_zeros(()))
        normalizers = self.normalizers(tensordict) if normalizers is None else normalizers
        scored = self.actor_network.score(tensordict)
        mask = scored.actions.mask
        weighted = -scored.log_probs * row_weights(tensordict)[:, None].to(mask.device)
        given = {"num_rows": normalizers.num_rows, "num_tokens": normalizers.num_tokens}
        with torch.no_grad():
            tokens = mask * multiplicity(tensordict)[:, None].to(mask.device)
        return SFTLossOutput(
            loss_sft=aggregate(weighted, mask, self.aggregation, **given),
            nll=masked_mean(-scored.log_probs.detach(), tokens),
            entropy=masked_mean(scored.entropy.detach(), tokens),
            num_action_tokens=tokens.sum(),
        )
