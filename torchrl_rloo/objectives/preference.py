"""Losses on preferences: a policy on pairs or labeled completions, and a reward model on pairs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from tensordict import TensorClass, TensorDictBase
from torchrl.objectives import LossModule

from torchrl_rloo.data import keys
from torchrl_rloo.data.preferences import CHOSEN, LABEL, MARGIN, REJECTED, mismatched_rows
from torchrl_rloo.data.rows import concatenate
from torchrl_rloo.functional.preference import (
    PREFERENCE_OBJECTIVES,
    PreferenceObjective,
    batch_sum_to_zero,
    bradley_terry,
    centering,
    kto_reference_point,
)
from torchrl_rloo.functional.statistics import nanstd
from torchrl_rloo.modules.heads import RewardModel
from torchrl_rloo.modules.policies import TransformersWrapper
from torchrl_rloo.modules.reference import Scorer
from torchrl_rloo.objectives.step import (
    RECORDED,
    LossOutput,
    Normalizers,
    check_actor,
    check_reference,
    concatenate_field,
    mean_over_ranks,
    multiplicity,
    reduce_over_ranks,
    reference_log_probs,
    row_weights,
    zero_loss,
)
from torchrl_rloo.runtime.lookup import resolve


class PreferenceLossOutput(LossOutput, TensorClass["nocast"]):
    """Loss of :class:`PreferenceLoss`, and values of single completions (without gradient).

    For pairs ``C = R = P``. For labeled rows ``C`` counts the desirable completions and ``R`` the undesirable ones.
    Log-probs are summed or averaged over the tokens of a completion, as in the objective.

    Attributes:
        loss_preference: scalar to minimize.
        chosen_rewards: ``[C]``, ``beta`` times the log-ratio to the reference, or times the log-prob without one. An
            objective without ``beta`` counts as 1.
        rejected_rewards: ``[R]``, rewards of the other completions.
        chosen_log_probs: ``[C]``, log-probs in nats.
        rejected_log_probs: ``[R]``, log-probs of the other completions.
        correct: ``[P]``, 1 if the chosen reward is higher, 0.5 for a tie; for labeled rows 1 if the reward is on the
            label's side of the reference point.
        reference_point: scalar, KTO's ``z_0`` in nats. NaN for pairs.
    """

    loss_preference: torch.Tensor
    chosen_rewards: torch.Tensor
    rejected_rewards: torch.Tensor
    chosen_log_probs: torch.Tensor
    rejected_log_probs: torch.Tensor
    correct: torch.Tensor
    reference_point: torch.Tensor

    def is_empty(self) -> bool:
        """Return whether the output is of no rows."""
        return not len(self.correct)

    @classmethod
    def merge(cls, outputs: Sequence[PreferenceLossOutput], num_updates: int) -> dict[str, float]:
        """Return means over the completions; NaN if there is no such completion.

        The metrics are ``rewards/chosen``, ``rewards/rejected``, ``rewards/margin`` (their difference),
        ``rewards/accuracy``, ``log_probs/chosen``, ``log_probs/rejected`` and, for KTO, ``kl/reference_point``.
        """
        fields = {"rewards/chosen": "chosen_rewards", "rewards/rejected": "rejected_rewards"}
        fields |= {"log_probs/chosen": "chosen_log_probs", "log_probs/rejected": "rejected_log_probs"}
        metrics = {name: float(concatenate_field(outputs, f).mean()) for name, f in fields.items()}
        metrics["rewards/margin"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
        metrics["rewards/accuracy"] = float(concatenate_field(outputs, "correct").mean())
        if not math.isnan(point := float(outputs[0].reference_point)):
            metrics["kl/reference_point"] = point
        return metrics


class PreferenceLoss(LossModule):
    """Offline preference objectives: DPO, IPO, ORPO and SimPO on pairs, KTO on labeled completions.

    The loss is the mean of the objective (:mod:`torchrl_rloo.functional.preference`) over the rows, which come from
    :func:`~torchrl_rloo.data.preferences.encode_preferences`. A pair has sub-rows ``"chosen"`` and ``"rejected"``,
    scored in one forward pass. A labeled row has ``"label"``. ``sample_weight`` and ``multiplicity``, if present,
    multiply the loss of a row. Returns a :class:`PreferenceLossOutput`.

    Args:
        actor_network: policy that scores rows with :meth:`TransformersWrapper.score`.
        objective: choice from ``PREFERENCE_OBJECTIVES``: a name, a mapping such as ``{"name": "dpo", "beta": 0.2}``, or
            an object such as ``DPO(beta=0.2)``.
        reference: scorer such as ``frozen_reference(policy)`` or ``AdapterReference``, for objectives that need one.
            ``"recorded"`` reads ``keys.REF_LOG_PROBS`` of the sub-rows, written by
            ``record_log_probs(reference, rows["chosen"], log_probs=keys.REF_LOG_PROBS)``. KTO requires a scorer,
            because its reference point scores completions after other prompts. None for objectives without a reference.
        micro_batch_size: rows per forward pass of KTO's reference point. None takes all rows of a step at once.

    Raises:
        ValueError: if the objective or a field is unknown, a value is out of range, or a reference is missing or
            unused.
        KeyError: at ``forward``, if ``"recorded"`` log-probs of the reference are missing.

    Example::

        loss_fn = PreferenceLoss(policy, {"name": "dpo", "beta": 0.1}, reference=frozen_reference(policy))
        loss_fn(encode_preferences(examples, tokenizer)).loss.backward()
    """

    actor_network: TransformersWrapper

    def __init__(
        self,
        actor_network: TransformersWrapper,
        objective: str | Mapping[str, Any] | PreferenceObjective = "dpo",
        *,
        reference: Scorer | Literal["recorded"] | None = None,
        micro_batch_size: int | None = None,
    ):
        super().__init__()
        check_actor(actor_network)
        self.micro_batch_size = micro_batch_size
        self.objective = resolve("objective", objective, PREFERENCE_OBJECTIVES)
        objective, needed = self.objective, self.objective.reference
        check_reference(actor_network, f"objective={objective}", reference, needed, recorded=objective.paired)
        self.actor_network = actor_network
        self.__dict__["reference"] = reference  # not a submodule: its weights are not trained or saved
        self.in_keys = [CHOSEN, REJECTED] if self.objective.paired else [keys.TOKENS, keys.ACTION_MASK, LABEL]
        self.out_keys = list(PreferenceLossOutput.__annotations__)

    def normalizers(self, rows: TensorDictBase, process_group=None) -> Normalizers:
        """Compute the normalizers of an optimizer step from all its rows; KTO requires at least 2.

        Args:
            rows: all rows of the step on this rank.
            process_group: group of ranks whose gradients are averaged for this step. None for this rank only.
        """
        normalizers = Normalizers(float(mean_over_ranks(multiplicity(rows).sum(), process_group)))
        if self.objective.paired:
            return normalizers
        with torch.no_grad():
            parts = mismatched_rows(rows).split(self.micro_batch_size or len(rows))
            mismatched = torch.cat([self._score(part)[1] for part in parts])
        total = torch.stack([mismatched.sum(), mismatched.new_tensor(float(len(mismatched)))])
        total, number = reduce_over_ranks(total, process_group)
        return replace(normalizers, reference_point=float(kto_reference_point((total / number)[None])))

    def forward(self, tensordict: TensorDictBase, normalizers: Normalizers | None = None) -> PreferenceLossOutput:
        """Compute the loss of rows ``[P]`` as their part of a step; see :meth:`RLOOLoss.forward`."""
        if not len(tensordict):
            zero, none = zero_loss(lambda rows: self._score(rows, idle=True)[1]), torch.zeros(0)
            empty = [none.clone() for _ in range(5)]
            return PreferenceLossOutput(zero, *empty, zero.detach().new_tensor(math.nan))
        # Score the completions and evaluate the objective
        normalizers = self.normalizers(tensordict) if normalizers is None else normalizers
        if self.objective.paired:
            log_probs, scores = self._score(concatenate([tensordict[CHOSEN], tensordict[REJECTED]]))
            chosen, rejected = torch.arange(len(scores), device=scores.device).chunk(2)
            losses = self.objective(scores[chosen], scores[rejected])
            correct, point = ((scores[chosen] - scores[rejected]).detach().sign() + 1) / 2, math.nan
        else:
            log_probs, scores = self._score(tensordict)
            desirable, point = tensordict[LABEL].reshape(-1).to(scores.device), normalizers.reference_point
            chosen, rejected = desirable.nonzero()[:, 0], (~desirable).nonzero()[:, 0]
            losses = self.objective(scores, desirable, point)
            correct = (scores > point) == desirable
        # Reduce to a scalar, and report rewards and log-probs of single completions
        weights = row_weights(tensordict).to(losses.device)
        rewards, log_probs = getattr(self.objective, "beta", 1.0) * scores.detach(), log_probs.detach()
        return PreferenceLossOutput(
            loss_preference=(losses * weights).sum() / normalizers.num_rows,
            chosen_rewards=rewards[chosen],
            rejected_rewards=rewards[rejected],
            chosen_log_probs=log_probs[chosen],
            rejected_log_probs=log_probs[rejected],
            correct=correct.float(),
            reference_point=scores.new_tensor(point),
        )

    def _score(self, rows: TensorDictBase, idle: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each completion's log-prob and the value that the objective takes, ``[B]`` each."""
        scored = self.actor_network.score(rows)
        log_probs, mask = scored.log_probs, scored.actions.mask
        # Sum over each completion, or average over its tokens if the objective does
        lengths = mask.sum(-1).clamp(min=1) if self.objective.mean else 1

        def reduce(values: torch.Tensor) -> torch.Tensor:
            return torch.where(mask, values, 0.0).sum(-1) / lengths

        if self.reference is None or (idle and self.reference == RECORDED):
            return reduce(log_probs), reduce(log_probs)
        return reduce(log_probs), reduce(log_probs - reference_log_probs(self.reference, rows, scored))


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

    :mod:`torchrl_rloo.functional.preference` has the terms and their sources. Rows come from
    :func:`~torchrl_rloo.modules.heads.encode_pairs` or :func:`~torchrl_rloo.data.encode_preferences`. A pair has
    sub-rows ``"chosen"`` and ``"rejected"``, scored in one forward pass, and optionally a float ``"margin"`` (``m_i``),
    ``sample_weight`` and ``multiplicity``, whose product is ``u_i``. Scores of a Gaussian reward model are its means.
    Returns a :class:`RewardModelLossOutput`.

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
                sums = torch.cat([torch.stack(self._score(part)[:2]).sum(0).double().cpu() for part in parts])
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
        chosen, rejected, variance = self._score(tensordict)
        weights = row_weights(tensordict).to(chosen)
        num_rows = float(multiplicity(tensordict).sum()) if normalizers is None else normalizers.num_rows
        margin = tensordict.get(MARGIN, None)
        margin = 0.0 if margin is None else margin.reshape(-1).to(chosen)
        # Sum the terms over pairs, normalized over the whole step
        losses = bradley_terry(chosen, rejected, margin, variance=variance, label_smoothing=self.label_smoothing)
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

    def _score(self, rows: TensorDictBase) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return the scores of the better and the worse completions, and their variance if Gaussian, ``[P]`` each."""
        both = concatenate([rows[CHOSEN], rows[REJECTED]])
        if getattr(self.reward_model, "is_gaussian", False):
            means, log_stds = self.reward_model.outputs(both).unbind(-1)
            return *means.chunk(2), (2 * log_stds).exp().reshape(2, -1).sum(0)
        return *self.reward_model.score(both).chunk(2), None
