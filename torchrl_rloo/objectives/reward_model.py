"""RewardModelLoss: training of a model that scores completions, on pairs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from tensordict import TensorClass, TensorDictBase
from torchrl.objectives import LossModule

from torchrl_rloo.data.preferences import CHOSEN, MARGIN, REJECTED
from torchrl_rloo.data.rows import concatenate
from torchrl_rloo.functional.reward_model import batch_sum_to_zero, bradley_terry, centering
from torchrl_rloo.functional.statistics import nanstd
from torchrl_rloo.modules.reward_model import RewardModel
from torchrl_rloo.objectives.normalizers import Normalizers, multiplicity, row_weights, zero_loss
from torchrl_rloo.objectives.output import LossOutput, concatenated
from torchrl_rloo.objectives.ranks import mean_over_ranks


class RewardModelLossOutput(LossOutput, TensorClass["nocast"]):
    """Terms of :class:`RewardModelLoss`, and the scores (without gradient).

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

    def is_empty(self) -> bool:
        """Return whether the output is of no pairs."""
        return not len(self.chosen_rewards)

    @classmethod
    def merge(cls, outputs: Sequence[RewardModelLossOutput], num_updates: int) -> dict[str, float]:
        """Return means and unbiased standard deviations of the scores.

        ``rewards/chosen``, ``rewards/rejected``, ``rewards/margin`` (their difference), ``rewards/accuracy`` (a pair of
        equal rewards counts half), ``rewards/chosen_std`` and ``rewards/rejected_std``.
        """
        chosen, rejected = concatenated(outputs, "chosen_rewards"), concatenated(outputs, "rejected_rewards")
        margins = chosen - rejected
        return {
            "rewards/chosen": float(chosen.mean()),
            "rewards/rejected": float(rejected.mean()),
            "rewards/margin": float(margins.mean()),
            "rewards/accuracy": float(((margins > 0).double() + 0.5 * (margins == 0)).mean()),
            "rewards/chosen_std": float(nanstd(chosen)),
            "rewards/rejected_std": float(nanstd(rejected)),
        }


class RewardModelLoss(LossModule):
    r"""Bradley-Terry likelihood of pairs, with margins and two terms that keep rewards near 0.

    .. math:: \frac1N \sum_i u_i \left[ L_{BT}(r_{w,i}, r_{l,i}, m_i) + c \, (r_{w,i} + r_{l,i})^2 \right]
        + s \, \bar r^2, \qquad \bar r = \frac1{2N} \sum_i u_i (r_{w,i} + r_{l,i})

    over the ``N`` pairs of a step. See :mod:`torchrl_rloo.functional.reward_model` for the terms and their sources. A
    pair has sub-rows ``"chosen"`` and ``"rejected"``, scored in one forward pass, and perhaps a float ``"margin"``
    :math:`m_i`: rows of :func:`~torchrl_rloo.modules.reward_model.encode_pairs` or
    :func:`~torchrl_rloo.data.encode_preferences`. A pair's ``sample_weight`` and ``multiplicity``, where present,
    multiply its loss (:math:`u_i`). Returns a :class:`RewardModelLossOutput`.

    Args:
        reward_model: scores rows.
        centering_coeff: :math:`c`; the paper's is 0.01.
        batch_sum_coeff: :math:`s`.
        label_smoothing: assumed share of swapped labels.
        micro_batch_size: pairs that :meth:`normalizers` scores at once for ``batch_sum_coeff``, which costs one more
            forward pass; None for all.

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
        micro_batch_size: int | None = None,
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
        self.micro_batch_size = micro_batch_size
        self.in_keys = [CHOSEN, REJECTED]
        self.out_keys = list(RewardModelLossOutput.__annotations__)

    def normalizers(self, rows: TensorDictBase, process_group=None) -> Normalizers:
        """Compute the normalizers of an optimizer step from all its pairs.

        Args:
            rows: all pairs of the step on this rank.
            process_group: ranks whose gradients are averaged for this step; None for this rank.
        """
        total = torch.stack([multiplicity(rows).double().sum(), torch.zeros((), dtype=torch.float64)])
        if self.batch_sum_coeff and len(rows):
            with torch.no_grad():
                parts = rows.split(self.micro_batch_size or len(rows))
                sums = torch.cat([torch.stack(self._score(part)).sum(0).double().cpu() for part in parts])
            total[1] = row_weights(rows).double().cpu() @ sums
        number, reward = mean_over_ranks(total.cpu(), process_group).tolist()
        return Normalizers(number, mean_reward=reward / (2 * number) if self.batch_sum_coeff else None)

    def forward(self, tensordict: TensorDictBase, normalizers: Normalizers | None = None) -> RewardModelLossOutput:
        """Compute the loss of pairs of batch size ``[P]`` as their part of a step; see :meth:`RLOOLoss.forward`."""
        if not len(tensordict):
            zero, none = zero_loss(self.reward_model), torch.zeros(0)
            return RewardModelLossOutput(zero, None, None, none, none.clone())
        chosen, rejected = self._score(tensordict)
        weights = row_weights(tensordict).to(chosen)
        num_rows = float(multiplicity(tensordict).sum()) if normalizers is None else normalizers.num_rows
        margin = tensordict.get(MARGIN, None)
        margin = 0.0 if margin is None else margin.reshape(-1).to(chosen)
        losses = bradley_terry(chosen, rejected, margin, label_smoothing=self.label_smoothing)
        centered = summed = None
        if self.centering_coeff:
            centered = self.centering_coeff * (centering(chosen, rejected) * weights).sum() / num_rows
        if self.batch_sum_coeff:
            part = ((chosen + rejected) * weights).sum() / (2 * num_rows)
            summed = self.batch_sum_coeff * batch_sum_to_zero(
                part, part if normalizers is None else normalizers.mean_reward
            )
        return RewardModelLossOutput(
            loss_objective=(losses * weights).sum() / num_rows,
            loss_centering=centered,
            loss_batch_sum=summed,
            chosen_rewards=chosen.detach(),
            rejected_rewards=rejected.detach(),
        )

    def _score(self, rows: TensorDictBase) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores of the better and of the worse completions, both ``[P]``."""
        return self.reward_model.score(concatenate([rows[CHOSEN], rows[REJECTED]])).chunk(2)
