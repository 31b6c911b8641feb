"""Loss that trains a reward model on pairs of completions."""

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
from torchrl_rloo.objectives.output import LossOutput, concatenate_field
from torchrl_rloo.objectives.ranks import mean_over_ranks


class RewardModelLossOutput(LossOutput, TensorClass["nocast"]):
    """Terms of :class:`RewardModelLoss`, and the scores (without gradient).

    Attributes:
        loss_objective: scalar, Bradley-Terry negative log-likelihood in nats.
        loss_centering: scalar, coefficient times the centering term. None if the loss has no such term.
        loss_batch_sum: scalar, coefficient times the sum-to-zero term. None if the loss has no such term.
        chosen_rewards: ``[P]``, scores of the better completions.
        rejected_rewards: ``[P]``, scores of the worse completions.
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

        The metrics are ``rewards/chosen``, ``rewards/rejected``, ``rewards/margin`` (their difference),
        ``rewards/accuracy`` (equal rewards count as half), ``rewards/chosen_std`` and ``rewards/rejected_std``.
        """
        chosen, rejected = concatenate_field(outputs, "chosen_rewards"), concatenate_field(outputs, "rejected_rewards")
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
    """Bradley-Terry loss of pairs, with margins and two terms that keep rewards near 0.

    Over the ``N`` pairs of a step, with ``u_i`` the weight of a pair::

        L = 1/N sum_i u_i * [L_BT(r_w_i, r_l_i, m_i) + centering_coeff * (r_w_i + r_l_i)^2] + batch_sum_coeff * r^2
        r = 1/(2N) sum_i u_i * (r_w_i + r_l_i)

    :mod:`torchrl_rloo.functional.reward_model` has the terms and their sources. Rows come from
    :func:`~torchrl_rloo.modules.reward_model.encode_pairs` or :func:`~torchrl_rloo.data.encode_preferences`. A pair has
    sub-rows ``"chosen"`` and ``"rejected"``, scored in one forward pass, and optionally a float ``"margin"`` (``m_i``),
    ``sample_weight`` and ``multiplicity``, whose product is ``u_i``. Returns a :class:`RewardModelLossOutput`.

    Args:
        reward_model: model that scores rows.
        centering_coeff: coefficient of the centering term; 0.01 in the paper. 0 disables it.
        batch_sum_coeff: coefficient of the sum-to-zero term. It costs one more forward pass in :meth:`normalizers`. 0
            disables it.
        label_smoothing: assumed share of swapped labels, in [0, 0.5).
        micro_batch_size: pairs per forward pass in :meth:`normalizers`. None takes all at once.

    Raises:
        ValueError: if a coefficient is out of range or the reward model cannot score.

    Example::

        loss_fn = RewardModelLoss(RewardModel(model), centering_coeff=0.01)
        loss_fn(encode_pairs(examples, tokenizer)).loss.backward()
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
            raise ValueError(f"reward_model={type(reward_model).__name__} must have a score(rows) method")
        for name, value in (("centering_coeff", centering_coeff), ("batch_sum_coeff", batch_sum_coeff)):
            if not 0 <= value < math.inf:
                raise ValueError(f"{name}={value} must be a finite number of at least 0")
        if not 0 <= label_smoothing < 0.5:
            raise ValueError(f"label_smoothing={label_smoothing} must be in [0, 0.5)")
        self.reward_model, self.label_smoothing = reward_model, label_smoothing
        self.centering_coeff, self.batch_sum_coeff = centering_coeff, batch_sum_coeff
        self.micro_batch_size = micro_batch_size
        self.in_keys = [CHOSEN, REJECTED]
        self.out_keys = list(RewardModelLossOutput.__annotations__)

    def normalizers(self, rows: TensorDictBase, process_group=None) -> Normalizers:
        """Compute the normalizers of an optimizer step from all its pairs.

        Args:
            rows: all pairs of the step on this rank.
            process_group: group of ranks whose gradients are averaged for this step. None for this rank only.
        """
        total = torch.stack([multiplicity(rows).double().sum(), torch.zeros((), dtype=torch.float64)])
        if self.batch_sum_coeff and len(rows):
            with torch.no_grad():
                parts = rows.split(self.micro_batch_size or len(rows))
                sums = torch.cat([torch.stack(self._score(part)).sum(0).double().cpu() for part in parts])
            total[1] = row_weights(rows).double().cpu() @ sums
        number, reward = mean_over_ranks(total.cpu(), process_group).tolist()
        mean_reward = reward / (2 * number) if number else 0.0  # no rank has a pair
        return Normalizers(number, mean_reward=mean_reward if self.batch_sum_coeff else None)

    def forward(self, tensordict: TensorDictBase, normalizers: Normalizers | None = None) -> RewardModelLossOutput:
        """Compute the loss of pairs ``[P]`` as their part of a step; see :meth:`RLOOLoss.forward`."""
        if not len(tensordict):
            zero, none = zero_loss(self.reward_model.score), torch.zeros(0)
            return RewardModelLossOutput(zero, None, None, none, none.clone())
        # Score both completions of each pair in one forward pass
        chosen, rejected = self._score(tensordict)
        weights = row_weights(tensordict).to(chosen)
        num_rows = float(multiplicity(tensordict).sum()) if normalizers is None else normalizers.num_rows
        margin = tensordict.get(MARGIN, None)
        margin = 0.0 if margin is None else margin.reshape(-1).to(chosen)
        # Sum the terms over pairs, normalized over the whole step
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
        """Return the scores of the better and the worse completions, ``[P]`` each."""
        return self.reward_model.score(concatenate([rows[CHOSEN], rows[REJECTED]])).chunk(2)
