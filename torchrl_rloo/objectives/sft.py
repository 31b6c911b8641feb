"""SFTLoss: supervised fine-tuning on rows that somebody else wrote."""

from __future__ import annotations

import math

import torch
from tensordict import TensorClass, TensorDictBase
from torchrl.objectives import LossModule

from torchrl_rloo.data import keys
from torchrl_rloo.functional import AGGREGATIONS, Aggregation, aggregate, masked_mean
from torchrl_rloo.modules.policies import TransformersWrapper
from torchrl_rloo.objectives.choices import check_actor, named
from torchrl_rloo.objectives.counts import LossCounts, count_rows, multiplicity, row_weights, zero_loss


class SFTLossOutput(TensorClass["nocast"]):
    """What :class:`SFTLoss` returns: the loss, and metrics over action tokens alone (without gradient).

    Attributes:
        loss_objective: scalar to minimise.
        nll: mean negative log-prob per action token, in nats, whatever the aggregation and the sample weights.
        entropy: mean entropy of the model's distribution per action token, in nats.
        num_action_tokens: how many action tokens the means are over.
    """

    loss_objective: torch.Tensor
    nll: torch.Tensor
    entropy: torch.Tensor
    num_action_tokens: torch.Tensor


class SFTLoss(LossModule):
    r"""Negative log-likelihood of the rows' action tokens, e.g. for a warm start.

    .. math:: L = -\frac{1}{\sum_i |y_i|} \sum_i \sum_t \log \pi_\theta(y_{it}|x_i, y_{i,<t})

    for the default ``"token_mean"``. A row's ``sample_weight`` and ``multiplicity``, where present, multiply its loss.

    Args:
        actor_network: scores rows; :meth:`TransformersWrapper.score`.
        aggregation: a name in ``AGGREGATIONS``, or such a function.
        aggregation_constant: the fixed length of ``aggregation="constant"``.

    ``forward(rows, counts=None)`` divides by ``counts``, by default those of the rows given. When a batch is split into
    micro-batches, pass ``loss.count(whole_batch)`` with each: the summed gradient is then that of the whole.

    Raises:
        ValueError: for an unknown aggregation, or one that does not go with ``aggregation_constant``.
    """

    actor_network: TransformersWrapper

    def __init__(
        self,
        actor_network: TransformersWrapper,
        *,
        aggregation: str | Aggregation = "token_mean",
        aggregation_constant: float | None = None,
    ):
        super().__init__()
        check_actor(actor_network)
        if isinstance(aggregation, str) and (aggregation == "constant") != (aggregation_constant is not None):
            raise ValueError(
                f"aggregation={aggregation!r} with aggregation_constant={aggregation_constant}: the constant goes with "
                "aggregation='constant', and with it alone"
            )
        self.actor_network = actor_network
        self.aggregation = named("aggregation", aggregation, AGGREGATIONS)
        self.aggregation_constant = aggregation_constant
        self.in_keys = [keys.TOKENS, keys.ACTION_MASK]
        self.out_keys = list(SFTLossOutput.__annotations__)

    def count(self, rows: TensorDictBase, process_group=None) -> LossCounts:
        """Normalisers of an optimizer step, from all its rows; see :func:`count_rows`."""
        return count_rows(rows, process_group=process_group)

    def forward(self, tensordict: TensorDictBase, counts: LossCounts | None = None) -> SFTLossOutput:
        """The loss of rows of batch size ``[B]``; see the class."""
        if not len(tensordict):
            zero = zero_loss(self.actor_network)
            nan = zero.detach() + math.nan
            return SFTLossOutput(
                loss_objective=zero, nll=nan, entropy=nan.clone(), num_action_tokens=zero.new_zeros(())
            )
        counts = self.count(tensordict) if counts is None else counts
        scored = self.actor_network.score(tensordict)
        mask = scored.actions.mask
        loss = aggregate(
            -scored.log_probs * row_weights(tensordict)[:, None].to(mask.device),
            mask,
            self.aggregation,
            num_rows=counts.num_rows,
            num_tokens=counts.num_tokens,
            constant=self.aggregation_constant,
        )
        with torch.no_grad():
            tokens = mask * multiplicity(tensordict)[:, None].to(mask.device)
            return SFTLossOutput(
                loss_objective=loss,
                nll=masked_mean(-scored.log_probs, tokens),
                entropy=masked_mean(scored.entropy, tokens),
                num_action_tokens=tokens.sum(),
            )
