"""PreferenceLoss: learning from which of two completions is better, or whether one is good."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from tensordict import TensorClass, TensorDictBase
from torchrl.objectives import LossModule

from torchrl_rloo.data import keys
from torchrl_rloo.data.preferences import CHOSEN, LABEL, REJECTED, mismatched_rows
from torchrl_rloo.data.rows import concatenate, gather_actions, ragged
from torchrl_rloo.functional import settings_of
from torchrl_rloo.functional.distributed import reduce_over_ranks
from torchrl_rloo.functional.preference import PREFERENCE_OBJECTIVES, kto_reference_point
from torchrl_rloo.modules.policies import TransformersWrapper
from torchrl_rloo.modules.recording import Scorer
from torchrl_rloo.objectives.choices import check_actor
from torchrl_rloo.objectives.counts import multiplicity, row_weights

RECORDED = "recorded"


class PreferenceLossOutput(TensorClass["nocast"]):
    """What :class:`PreferenceLoss` returns: the loss, and values of single completions (without gradient).

    For pairs ``C = R = P``; for labelled rows ``C`` are the desirable and ``R`` the undesirable ones. Log-probs are
    summed or averaged over a completion's tokens as the objective has it. Metrics: :func:`merge_preferences`.

    Attributes:
        loss_objective: scalar to minimise.
        chosen_rewards: ``[C]``, ``beta`` times the log-ratio to the reference, or times the log-prob without one; an
            objective without ``beta`` counts as 1.
        rejected_rewards: ``[R]``.
        chosen_log_probs: ``[C]``, in nats.
        rejected_log_probs: ``[R]``.
        correct: ``[P]``, 1 where the chosen reward is the higher one; for labelled rows where the reward lies on the
            label's side of the reference point.
        reference_point: scalar, KTO's ``z_0`` in nats; NaN for pairs.
    """

    loss_objective: torch.Tensor
    chosen_rewards: torch.Tensor
    rejected_rewards: torch.Tensor
    chosen_log_probs: torch.Tensor
    rejected_log_probs: torch.Tensor
    correct: torch.Tensor
    reference_point: torch.Tensor


@dataclass(frozen=True)
class PreferenceCounts:
    """What the micro-batches of an optimizer step share.

    Attributes:
        num_rows: pairs or labelled rows of the step, with multiplicity.
        reference_point: KTO's ``z_0`` of the step; None for pairs.
    """

    num_rows: float
    reference_point: torch.Tensor | None = None


class PreferenceLoss(LossModule):
    """Offline preference objectives: DPO, IPO, ORPO, SimPO on pairs, KTO on labelled completions.

    The loss is the mean of the objective's formula (``functional.preference``) over the rows. A pair has sub-rows
    ``"chosen"`` and ``"rejected"``, scored in one forward pass; a labelled row has ``"label"``. See
    :func:`~torchrl_rloo.data.preferences.encode_preferences`. A row's ``sample_weight`` and ``multiplicity``, where
    present, multiply its loss.

    Args:
        actor_network: scores rows; :meth:`TransformersWrapper.score`.
        objective: a name in ``PREFERENCE_OBJECTIVES``.
        reference: for the objectives that have one: a scorer (``frozen_reference(policy)``, ``AdapterReference``), or
            ``"recorded"`` for rows whose sub-rows hold ``keys.REF_LOG_PROBS``, as
            ``record_log_probs(reference, rows["chosen"], log_probs=keys.REF_LOG_PROBS)`` writes them. KTO needs a
            scorer, since its reference point is of completions that no row has.
        **coefficients: of the objective's formula (``beta``, ``label_smoothing``, ``gamma``, ...), numbers or objects
            with ``__float__`` that are read at each use; default those of the formula.

    ``forward(rows, counts=None)`` divides by ``counts``, by default those of the rows given. When a batch is split into
    micro-batches, pass ``loss.count(whole_batch)`` with each: the summed gradient is then that of the whole.

    Raises:
        ValueError: for an unknown objective, a coefficient out of range, a reference that is missing or has no use.
        TypeError: for a coefficient that the objective does not have.
        KeyError: at ``forward`` for rows without recorded log-probs of the reference.
    """

    actor_network: TransformersWrapper

    def __init__(
        self,
        actor_network: TransformersWrapper,
        objective: str = "dpo",
        *,
        reference: Scorer | Literal["recorded"] | None = None,
        **coefficients: Any,
    ):
        super().__init__()
        check_actor(actor_network)
        if objective not in PREFERENCE_OBJECTIVES:
            raise ValueError(f"objective={objective!r} must be one of {list(PREFERENCE_OBJECTIVES)}")
        self.objective = PREFERENCE_OBJECTIVES[objective]
        known = settings_of(self.objective.function)
        if unknown := sorted(set(coefficients) - set(known)):
            raise TypeError(f"objective={objective!r} has no coefficients {unknown}; it has {sorted(known)}")
        self.coefficients = known | coefficients
        for name, value in self.coefficients.items():
            low, high = _BOUNDS.get(name, (0.0, math.inf))
            if not (low <= float(value) < high) or (name == "beta" and float(value) == 0):
                raise ValueError(
                    f"{name}={value} must be {'above' if name == 'beta' else 'at least'} 0 and below {high}"
                )
        _check_reference(actor_network, objective, reference)
        self.actor_network = actor_network
        self.__dict__["reference"] = (
            reference  # not registered: its weights are neither trained nor saved with the loss
        )
        self.in_keys = [CHOSEN, REJECTED] if self.objective.paired else [keys.TOKENS, keys.ACTION_MASK, LABEL]
        self.out_keys = list(PreferenceLossOutput.__annotations__)

    def count(self, rows: TensorDictBase, process_group=None) -> PreferenceCounts:
        """What the micro-batches of an optimizer step share, from all its rows; for KTO these are at least 2.

        Args:
            rows: all rows of the step on this rank.
            process_group: the ranks whose gradients are averaged for this step; None counts this rank alone.
        """
        ranks = 1 if process_group is None else torch.distributed.get_world_size(process_group)
        num_rows = float(reduce_over_ranks(multiplicity(rows).sum(), process_group)) / ranks
        if self.objective.paired:
            return PreferenceCounts(num_rows)
        with torch.no_grad():
            _, mismatched = self._score(mismatched_rows(rows))
        total = torch.stack([mismatched.sum(), mismatched.new_tensor(float(len(mismatched)))])
        total, number = reduce_over_ranks(total, process_group)
        return PreferenceCounts(num_rows, kto_reference_point((total / number)[None]))

    def forward(self, tensordict: TensorDictBase, counts: PreferenceCounts | None = None) -> PreferenceLossOutput:
        """The loss of rows of batch size ``[P]``; see the class."""
        counts = self.count(tensordict) if counts is None else counts
        coefficients = {name: float(value) for name, value in self.coefficients.items()}
        if self.objective.paired:
            log_probs, scores = self._score(concatenate([tensordict[CHOSEN], tensordict[REJECTED]]))
            chosen, rejected = torch.arange(len(scores), device=scores.device).chunk(2)
            losses = self.objective.function(scores[chosen], scores[rejected], **coefficients)
            correct, point = scores[chosen] > scores[rejected], scores.new_tensor(math.nan)
        else:
            log_probs, scores = self._score(tensordict)
            desirable, point = tensordict[LABEL].reshape(-1).to(scores.device), counts.reference_point
            chosen, rejected = desirable.nonzero()[:, 0], (~desirable).nonzero()[:, 0]
            losses = self.objective.function(scores, desirable, point, **coefficients)
            correct = (scores > point) == desirable
        weights = row_weights(tensordict).to(losses.device)
        rewards, log_probs = coefficients.get("beta", 1.0) * scores.detach(), log_probs.detach()
        return PreferenceLossOutput(
            loss_objective=(losses * weights).sum() / counts.num_rows,
            chosen_rewards=rewards[chosen],
            rejected_rewards=rewards[rejected],
            chosen_log_probs=log_probs[chosen],
            rejected_log_probs=log_probs[rejected],
            correct=correct.float(),
            reference_point=point,
        )

    def _score(self, rows: TensorDictBase) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each completion the log-prob, and what the objective is a function of; both ``[B]``."""
        scored = self.actor_network.score(rows)
        log_probs, mask = scored.log_probs, scored.actions.mask
        lengths = mask.sum(-1).clamp(min=1) if self.objective.mean else 1

        def whole(values: torch.Tensor) -> torch.Tensor:
            return torch.where(mask, values, 0.0).sum(-1) / lengths

        if self.reference is None:
            return whole(log_probs), whole(log_probs)
        if self.reference != RECORDED:
            with torch.no_grad():
                ref = self.reference.score(rows).log_probs.to(log_probs.device)
        elif keys.REF_LOG_PROBS in rows.keys(True):
            ref = gather_actions(ragged(rows, keys.REF_LOG_PROBS), scored.actions)
        else:
            raise KeyError(
                f"reference='recorded' needs {keys.REF_LOG_PROBS} on chosen and rejected sub-rows: write them with "
                "record_log_probs(reference, rows['chosen'], log_probs=keys.REF_LOG_PROBS), or pass the reference"
            )
        return whole(log_probs), whole(log_probs - ref)


_BOUNDS = {"label_smoothing": (0.0, 0.5)}


def _check_reference(actor_network, objective: str, reference) -> None:
    has_one, paired = PREFERENCE_OBJECTIVES[objective].reference, PREFERENCE_OBJECTIVES[objective].paired
    if reference is None:
        if has_one:
            raise ValueError(
                f"objective={objective!r} measures the policy against a reference: set reference to a scorer such as "
                "frozen_reference(policy)" + (" or to 'recorded'" if paired else "")
            )
        return
    if not has_one:
        raise ValueError(
            f"objective={objective!r} has no reference, so reference={reference!r:.80} has no use: leave it out"
        )
    if isinstance(reference, str):
        if reference != RECORDED or not paired:
            needed = (
                "a scorer or 'recorded'" if paired else "a scorer: its reference point is of completions no row has"
            )
            raise ValueError(f"reference={reference!r} with objective={objective!r} must be {needed}")
        return
    if not callable(getattr(reference, "score", None)) or getattr(reference, "generate", False):
        raise ValueError(f"reference must have score(rows) and not generate, got {type(reference).__name__}")
    if isinstance(reference, TransformersWrapper) and reference.model is getattr(actor_network, "model", None):
        raise ValueError(
            "reference scores with the model that is trained, so all log-ratios stay 0: pass a frozen copy"
        )
    ours, theirs = (getattr(scorer, "distribution", None) for scorer in (actor_network, reference))
    if ours is not None and theirs is not None and ours != theirs:
        raise ValueError(f"reference scores under {theirs}, actor_network under {ours}: give both the same")


def merge_preferences(outputs: Sequence[PreferenceLossOutput]) -> dict[str, float]:
    """Metrics of an optimizer step from the outputs of its micro-batches, the same as if it had been one.

    Returns:
        ``loss``, and means over the completions: ``rewards/chosen``, ``rewards/rejected``, ``rewards/margin`` (their
        difference), ``rewards/accuracy``, ``log_probs/chosen``, ``log_probs/rejected``; for KTO ``kl/reference_point``.
        NaN where there is no such completion.
    """

    def mean(field: str) -> float:
        return float(torch.cat([getattr(o, field) for o in outputs]).double().mean())

    metrics = {"loss": float(sum(o.loss_objective.detach() for o in outputs))}
    metrics |= {"rewards/chosen": mean("chosen_rewards"), "rewards/rejected": mean("rejected_rewards")}
    metrics["rewards/margin"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
    metrics["rewards/accuracy"] = mean("correct")
    metrics |= {"log_probs/chosen": mean("chosen_log_probs"), "log_probs/rejected": mean("rejected_log_probs")}
    if not math.isnan(point := float(outputs[0].reference_point)):
        metrics["kl/reference_point"] = point
    return metrics
