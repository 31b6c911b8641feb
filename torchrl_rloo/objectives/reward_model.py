"""RewardModelLoss: a model that scores completions learns which of two is the better one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tensordict import TensorClass, TensorDictBase
from torchrl.objectives import LossModule

from torchrl_rloo.data.preferences import CHOSEN, MARGIN, REJECTED
from torchrl_rloo.data.rows import concatenate
from torchrl_rloo.functional.distributed import reduce_over_ranks
from torchrl_rloo.functional.reward_model import batch_sum_to_zero, bradley_terry, centering
from torchrl_rloo.functional.statistics import nanstd
from torchrl_rloo.modules.reward_model import RewardModel
from torchrl_rloo.objectives.counts import row_weights, zero_loss


class RewardModelLossOutput(TensorClass["nocast"]):
    """What :class:`RewardModelLoss` returns: its terms, and the scores (without gradient).

    Metrics: :func:`merge_reward_outputs`.

    Attributes:
        loss_objective: scalar, the Bradley-Terry negative log-likelihood in nats.
        loss_centering: scalar, coefficient times the centering term; None if it is not in the loss.
        loss_batch_sum: scalar, coefficient times the sum-to-zero term; None if it is not in the loss.
        chosen_rewards: ``[P]``, scores of the better completions.
        rejected_rewards: ``[P]``, of the worse ones.
    """

    loss_objective: torch.Tensor
    loss_centering: torch.Tensor | None
    loss_batch_sum: torch.Tensor | None
    chosen_rewards: torch.Tensor
    rejected_rewards: torch.Tensor

    @property
    def loss(self) -> torch.Tensor:
        """The scalar to minimise: the sum of the terms."""
        return sum(term for name in _TERMS if (term := getattr(self, name)) is not None)


_TERMS = tuple(name for name in RewardModelLossOutput.__annotations__ if name.startswith("loss_"))


@dataclass(frozen=True)
class RewardModelCounts:
    """What the micro-batches of an optimizer step share.

    Attributes:
        num_rows: pairs of the step, with their weights.
        mean_reward: mean score of all completions of the step, with their weights; None where no term needs it.
    """

    num_rows: float
    mean_reward: float | None = None


class RewardModelLoss(LossModule):
    r"""Bradley-Terry likelihood of pairs, with margins and two terms that keep rewards near 0.

    .. math:: \frac{1}{\sum_i u_i} \sum_i u_i \left[ L_{BT}(r_{w,i}, r_{l,i}, m_i) + c \, (r_{w,i} + r_{l,i})^2 \right]
        + s \, \bar r^2

    See ``functional.reward_model`` for the terms and their sources; :math:`\bar r` is the mean reward of the whole
    batch. A pair has sub-rows ``"chosen"`` and ``"rejected"``, scored in one forward pass, and perhaps a float
    ``"margin"`` :math:`m_i`: rows of :func:`~torchrl_rloo.modules.reward_model.encode_pairs` or
    :func:`~torchrl_rloo.data.encode_preferences`. A pair's ``sample_weight`` times its ``multiplicity``, where present,
    is its weight :math:`u_i`.

    Args:
        reward_model: scores rows.
        centering_coeff: :math:`c`; the paper's is 0.01.
        batch_sum_coeff: :math:`s`.
        label_smoothing: share of the labels taken to be the wrong way round.

    ``forward(rows, counts=None)`` divides by ``counts``, by default those of the rows given. When a batch is split into
    micro-batches, pass ``loss.count(whole_batch)`` with each: the summed gradient is then that of the whole. With
    ``batch_sum_coeff`` that costs a forward pass more, since the batch's mean has to be known first.

    Raises:
        ValueError: for a coefficient out of range, or a reward model that cannot score.
    """

    reward_model: RewardModel

    def __init__(
        self,
        reward_model: RewardModel,
        *,
        centering_coeff: float = 0.0,
        batch_sum_coeff: float = 0.0,
        label_smoothing: float = 0.0,
    ):
        super().__init__()
        if not callable(getattr(reward_model, "score", None)):
            raise ValueError(f"reward_model must have a score(rows) method, {type(reward_model).__name__} has none")
        for name, value in (("centering_coeff", centering_coeff), ("batch_sum_coeff", batch_sum_coeff)):
            if not 0 <= value < math.inf:
                raise ValueError(f"{name}={value} must be a finite number of at least 0")
        if not 0 <= label_smoothing < 0.5:
            raise ValueError(f"label_smoothing={label_smoothing} must be at least 0 and below 0.5")
        self.reward_model, self.label_smoothing = reward_model, label_smoothing
        self.centering_coeff, self.batch_sum_coeff = centering_coeff, batch_sum_coeff
        self.in_keys = [CHOSEN, REJECTED]
        self.out_keys = list(RewardModelLossOutput.__annotations__)

    def count(
        self, rows: TensorDictBase, process_group=None, *, micro_batch_size: int | None = None
    ) -> RewardModelCounts:
        """What the micro-batches of an optimizer step share, from all its pairs.

        Args:
            rows: all pairs of the step on this rank.
            process_group: the ranks whose gradients are averaged for this step; None counts this rank alone.
            micro_batch_size: pairs that are scored at once; None: all.
        """
        weights = row_weights(rows).double()
        total = torch.stack([weights.sum(), weights.new_zeros(())])
        if self.batch_sum_coeff and len(rows):
            with torch.no_grad():
                parts = rows.split(micro_batch_size or len(rows))
                sums = torch.cat([torch.stack(self._score(part)).sum(0).double().cpu() for part in parts])
            total[1] = weights.cpu() @ sums
        ranks = 1 if process_group is None else torch.distributed.get_world_size(process_group)
        number, reward = reduce_over_ranks(total.cpu(), process_group).tolist()
        return RewardModelCounts(number / ranks, reward / (2 * number) if self.batch_sum_coeff else None)

    def forward(self, tensordict: TensorDictBase, counts: RewardModelCounts | None = None) -> RewardModelLossOutput:
        """The loss of pairs of batch size ``[P]``; see the class."""
        if not len(tensordict):
            zero, none = zero_loss(self.reward_model), torch.zeros(0)
            return RewardModelLossOutput(zero, None, None, none, none.clone())
        chosen, rejected = self._score(tensordict)
        weights = row_weights(tensordict).to(chosen)
        num_rows = float(weights.sum()) if counts is None else counts.num_rows
        margin = tensordict.get(MARGIN, None)
        margin = 0.0 if margin is None else margin.reshape(-1).to(chosen)
        losses = bradley_terry(chosen, rejected, margin, label_smoothing=self.label_smoothing)
        centered = summed = None
        if self.centering_coeff:
            centered = self.centering_coeff * (centering(chosen, rejected) * weights).sum() / num_rows
        if self.batch_sum_coeff:
            part = ((chosen + rejected) * weights).sum() / (2 * num_rows)
            summed = self.batch_sum_coeff * batch_sum_to_zero(part, part if counts is None else counts.mean_reward)
        return RewardModelLossOutput(
            loss_objective=(losses * weights).sum() / num_rows,
            loss_centering=centered,
            loss_batch_sum=summed,
            chosen_rewards=chosen.detach(),
            rejected_rewards=rejected.detach(),
        )

    def _score(self, rows: TensorDictBase) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the better and of the worse completions, both ``[P]``."""
        return self.reward_model.score(concatenate([rows[CHOSEN], rows[REJECTED]])).chunk(2)


def merge_reward_outputs(outputs: Sequence[RewardModelLossOutput]) -> dict[str, float]:
    """Metrics of an optimizer step from the outputs of its micro-batches, the same as if it had been one.

    Returns:
        ``loss`` and its terms beside the likelihood, ``loss_centering`` and ``loss_batch_sum``, where in use; means
        ``rewards/chosen``, ``rewards/rejected``, ``rewards/margin`` (their difference) and ``rewards/accuracy`` (a pair
        of equal rewards counts half); unbiased standard deviations ``rewards/chosen_std`` and ``rewards/rejected_std``.
    """
    chosen, rejected = (
        torch.cat([getattr(o, name) for o in outputs]).double() for name in ("chosen_rewards", "rejected_rewards")
    )
    metrics = {"loss": float(sum(o.loss.detach() for o in outputs))}
    for name in _TERMS[1:]:
        if terms := [float(term) for o in outputs if (term := getattr(o, name)) is not None]:
            metrics[name] = sum(terms)
    margins = chosen - rejected
    return metrics | {
        "rewards/chosen": float(chosen.mean()),
        "rewards/rejected": float(rejected.mean()),
        "rewards/margin": float(margins.mean()),
        "rewards/accuracy": float(((margins > 0).double() + 0.5 * (margins == 0)).mean()),
        "rewards/chosen_std": float(nanstd(chosen)),
        "rewards/rejected_std": float(nanstd(rejected)),
    }
