"""Loss of supervised fine-tuning on given rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorClass, TensorDictBase
from torchrl.objectives import LossModule

from torchrl_rloo.data import keys
from torchrl_rloo.functional import AGGREGATIONS
from torchrl_rloo.functional.policy_loss import Aggregation, aggregate
from torchrl_rloo.functional.statistics import masked_mean
from torchrl_rloo.modules.policies import TransformersWrapper
from torchrl_rloo.objectives.step import (
    LossOutput,
    Normalizers,
    check_actor,
    mean_over_tokens,
    multiplicity,
    row_normalizers,
    row_weights,
    zero_loss,
)
from torchrl_rloo.runtime.lookup import resolve


class SFTLossOutput(LossOutput, TensorClass["nocast"]):
    """Loss of :class:`SFTLoss`, and metrics over action tokens (without gradient)."""

    loss_sft: torch.Tensor  # scalar to minimize
    nll: torch.Tensor  # mean negative log-prob per action token, in nats, for every aggregation and sample weight
    entropy: torch.Tensor  # mean entropy of the model's distribution per action token, in nats
    num_action_tokens: torch.Tensor  # number of action tokens that the means cover

    def is_empty(self) -> bool:
        """Return whether the output is of no action tokens."""
        return not bool(self.num_action_tokens)

    @classmethod
    def merge(cls, outputs: Sequence[SFTLossOutput], num_updates: int) -> dict[str, float]:
        """Return ``nll`` and ``entropy`` over all action tokens."""
        return {name: mean_over_tokens(outputs, name) for name in ("nll", "entropy")}


class SFTLoss(LossModule):
    """Negative log-likelihood of the rows' action tokens, e.g. for a warm start.

    With the default ``"token_mean"``::

        L = -1 / sum_i |y_i| * sum_i sum_t log pi(y_it | x_i, y_i,<t)

    The loss reads ``TOKENS`` and ``ACTION_MASK``. ``sample_weight`` and ``multiplicity``, if present, multiply the loss
    of a row. Returns an :class:`SFTLossOutput`.

    TorchRL's ``SFTLoss`` takes a ``History`` instead of rows. Its ``normalize_by_seq_length=True`` is
    ``aggregation="sequence_mean"`` here, ``False`` is ``"sequence_sum"``. A KL to a reference is not included.

    Args:
        actor_network: policy that scores rows with :meth:`TransformersWrapper.score`.
        aggregation: choice from :data:`~torchrl_rloo.functional.AGGREGATIONS`, or a function of the same signature.

    Raises:
        ValueError: if the aggregation is unknown.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl_rloo.data import stack_rows
        >>> from torchrl_rloo.embedded import build_model, build_tokenizer
        >>> tokenizer = build_tokenizer()
        >>> model = build_model(tokenizer, seed=0).eval()
        >>> loss_fn = SFTLoss(TransformersWrapper(model, tokenizer=tokenizer, generate=False))
        >>> rows = stack_rows([TensorDict({
        ...     keys.TOKENS: torch.tensor([5, 6, 7]),
        ...     keys.ACTION_MASK: torch.tensor([False, True, True]),
        ... })])
        >>> out = loss_fn(rows)
        >>> torch.equal(out.loss, out.nll), int(out.num_action_tokens)
        (True, 2)
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
        """Compute the loss of rows ``[B]`` as their part of a step; see :meth:`RLOOLoss.forward`."""
        # Without rows, return zero gradients, so that the optimizer step behaves as usual
        if not len(tensordict):
            zero = zero_loss(lambda rows: self.actor_network.score(rows).log_probs)
            nan = zero.detach() + math.nan
            return SFTLossOutput(loss_sft=zero, nll=nan, entropy=nan.clone(), num_action_tokens=zero.new_zeros(()))
        # Score the rows under the current weights, and weigh their tokens
        normalizers = self.normalizers(tensordict) if normalizers is None else normalizers
        scored = self.actor_network.score(tensordict)
        mask = scored.actions.mask
        weighted = -scored.log_probs * row_weights(tensordict)[:, None].to(mask.device)
        totals = {"num_rows": normalizers.num_rows, "num_tokens": normalizers.num_tokens}
        # In metrics, count a merged row once for each row that it stands for
        with torch.no_grad():
            tokens = mask * multiplicity(tensordict)[:, None].to(mask.device)
        return SFTLossOutput(
            loss_sft=aggregate(weighted, mask, self.aggregation, **totals),
            nll=masked_mean(-scored.log_probs.detach(), tokens),
            entropy=masked_mean(scored.entropy.detach(), tokens),
            num_action_tokens=tokens.sum(),
        )
