"""RLOOLoss: policy-gradient objectives over rows with advantages, as a choice of independent parts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from tensordict import TensorDictBase
from torchrl.objectives import LossModule

from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import ActionTokens, gather_actions, ragged
from torchrl_rloo.functional import (
    AGGREGATIONS,
    CORRECTIONS,
    KL_ESTIMATORS,
    RATIOS,
    SURROGATES,
    Aggregation,
    Correction,
    Ratio,
    Surrogate,
    aggregate,
    effective_sample_size,
    k3,
    kl_loss_terms,
    masked_mean,
    off_policy_mask,
    share_out,
)
from torchrl_rloo.modules.policies import ScoredActions, TransformersWrapper
from torchrl_rloo.objectives.choices import bound, check_actor, check_combination, epsilons, is_on, named
from torchrl_rloo.objectives.counts import (
    LossCounts,
    count_rows,
    entropy_threshold,
    multiplicity,
    row_weights,
    zero_loss,
)
from torchrl_rloo.objectives.output import LOSS_TERMS, RLOOLossOutput

Coefficient = float | Any  # a number, or an object with __float__ such as an adaptive coefficient


class RLOOLoss(LossModule):
    r"""REINFORCE leave-one-out and its family: a ratio, a surrogate, a correction, an aggregation, and further terms.

    .. math:: L = \mathrm{aggregate}_{it}\big[ w_{it} \, f(\rho_{it}, A_{it}) + \beta \, \mathrm{KL}_{it}
        - \eta \, H_{it} \big]

    over the rows ``i`` and their action tokens ``t``. The defaults are RLOO as one action per sequence (Ahmadian et al.
    2024, arXiv 2402.14740) with PPO's clip for batches that are used more than once:
    :math:`\frac{1}{N} \sum_i -\min(\rho_i A_i, \mathrm{clip}(\rho_i, 1 - \epsilon_l, 1 + \epsilon_h) A_i)` with
    :math:`\rho_i = \exp \sum_t (\log \pi_\theta(a_{it}) - \log \mu(a_{it}))`. Published methods are combinations of
    these parts: :data:`~torchrl_rloo.objectives.PRESETS`.

    Args:
        actor_network: scores rows; :meth:`TransformersWrapper.score`.
        ratio: a name in :data:`~torchrl_rloo.functional.RATIOS` (``"sequence"``, ``"sequence_mean"``, ``"token"``,
            ``"none"``: plain REINFORCE), or a function of the same signature.
        surrogate: a name in :data:`~torchrl_rloo.functional.SURROGATES` (``"clip"``, ``"cispo"``, ``"sapo"``,
            ``"dppo"``, ``"vespo"``), or a function of the same signature.
        surrogate_kwargs: its further settings, e.g. ``{"dual_clip": 3.0}``.
        clip_epsilon: how far the ratio may leave 1: one number or ``(low, high)``; None for no clip; ``"default"`` for
            the surrogate's own.
        aggregation: a name in :data:`~torchrl_rloo.functional.AGGREGATIONS` (``"sequence_sum"``, ``"sequence_mean"``,
            ``"token_mean"``, ``"constant"``), or a function of the same signature.
        aggregation_constant: the length that ``"constant"`` divides by, in tokens.
        old_log_probs: what the ratio starts from: the ``"sampler"``'s log-probs, or the ``"proximal"`` ones of the
            training model before its first update on the batch (see
            :func:`~torchrl_rloo.modules.record_log_probs`).
        correction: weight that corrects for the difference between sampler and proximal (with ``ratio="none"``:
            present) policy: a name in :data:`~torchrl_rloo.functional.CORRECTIONS` (``"tis"``, ``"icepop"``,
            ``"sequence_truncate"``, ``"sequence_mask"``, ``"seq_mask_tis"``), a function of that signature, or None.
        correction_kwargs: its settings, e.g. ``{"high": 2.0}``.
        off_policy_mask_threshold: leave out rows of negative advantage that are this far off the sampler, in nats per
            token; None keeps them.
        kl_to_ref_coeff: coefficient of the KL to the reference, whose log-probs the rows then carry.
        kl_to_inference_coeff: coefficient of the KL to the policy that sampled.
        kl_estimator: ``"k1"``, ``"k2"`` or ``"k3"``, of both.
        kl_importance_weighted: multiply the KL by the importance ratio to the sampler, which makes its gradient that of
            the true KL.
        entropy_coeff: coefficient of the entropy bonus.
        high_entropy_fraction: let only this share of the action tokens, those of highest entropy, carry the policy
            gradient (arXiv 2506.01939); needs recorded entropies, see ``record_log_probs(entropy=...)``.
        router_loss_coeff: coefficient of the load-balancing loss of a mixture of experts. Unlike the other terms it is
            of each forward pass's own tokens, so it does depend on the micro-batches.
        mask_truncated_completions: leave out the tokens of truncated rows. Such a row has no gradient; it still counts
            as a row, and its reward in its siblings' baseline.

    Coefficients are numbers or objects with ``__float__``, read at each use. A row's ``sample_weight`` and
    ``multiplicity``, where present, multiply its loss.

    ``forward(rows, counts=None)`` divides by ``counts``, by default those of the rows given. When a batch is split into
    micro-batches or over ranks, pass ``loss.count(whole_batch)`` with each: the summed gradient is that of the whole.

    Raises:
        ValueError: for an unknown name, a value out of range, or parts that do not go together.
        TypeError: for settings that a part does not have.
        KeyError: at ``forward`` for rows that lack an entry.
    """

    actor_network: TransformersWrapper

    def __init__(
        self,
        actor_network: TransformersWrapper,
        *,
        ratio: str | Ratio = "sequence",
        surrogate: str | Surrogate = "clip",
        surrogate_kwargs: Mapping[str, Any] | None = None,
        clip_epsilon: float | tuple[float, float] | None | Literal["default"] = "default",
        aggregation: str | Aggregation = "sequence_sum",
        aggregation_constant: float | None = None,
        old_log_probs: Literal["sampler", "proximal"] = "sampler",
        correction: str | Correction | None = None,
        correction_kwargs: Mapping[str, Any] | None = None,
        off_policy_mask_threshold: float | None = None,
        kl_to_ref_coeff: Coefficient = 0.0,
        kl_to_inference_coeff: Coefficient = 0.0,
        kl_estimator: Literal["k1", "k2", "k3"] = "k3",
        kl_importance_weighted: bool = False,
        entropy_coeff: Coefficient = 0.0,
        high_entropy_fraction: float | None = None,
        router_loss_coeff: Coefficient = 0.0,
        mask_truncated_completions: bool = False,
    ):
        super().__init__()
        check_actor(actor_network)
        self.actor_network = actor_network
        self.ratio = named("ratio", ratio, RATIOS)
        self.surrogate = bound("surrogate", surrogate, SURROGATES, surrogate_kwargs, epsilons(clip_epsilon, surrogate))
        self._own_surrogate = not isinstance(surrogate, str)
        self.aggregation = named("aggregation", aggregation, AGGREGATIONS)
        self.correction = correction and bound("correction", correction, CORRECTIONS, correction_kwargs)
        self.kl_estimator = named("kl_estimator", kl_estimator, KL_ESTIMATORS)
        self.aggregation_constant, self.old_log_probs = aggregation_constant, old_log_probs
        self.off_policy_mask_threshold = off_policy_mask_threshold
        self.kl_to_ref_coeff, self.kl_to_inference_coeff = kl_to_ref_coeff, kl_to_inference_coeff
        self.kl_importance_weighted, self.entropy_coeff = kl_importance_weighted, entropy_coeff
        self.high_entropy_fraction, self.router_loss_coeff = high_entropy_fraction, router_loss_coeff
        self.mask_truncated_completions = mask_truncated_completions
        check_combination(
            self, ratio, surrogate, surrogate_kwargs, clip_epsilon, aggregation, correction, correction_kwargs
        )
        self.in_keys = [keys.TOKENS, keys.ACTION_MASK, keys.LOG_PROBS, keys.ADVANTAGE]
        self.in_keys += [keys.TRUNCATED] if mask_truncated_completions else []
        self.in_keys += [keys.PROXIMAL_LOG_PROBS] if old_log_probs == "proximal" else []
        self.in_keys += [keys.PROXIMAL_ENTROPY] if high_entropy_fraction is not None else []
        self.in_keys += [keys.REF_LOG_PROBS] if is_on(kl_to_ref_coeff) else []
        self.out_keys = list(RLOOLossOutput.__annotations__)

    @property
    def needs_zero_advantage(self) -> bool:
        """Whether rows of advantage 0 may have a gradient: through another term, or a surrogate of your own."""
        others = (self.kl_to_ref_coeff, self.kl_to_inference_coeff, self.entropy_coeff, self.router_loss_coeff)
        return self._own_surrogate or any(map(is_on, others))

    def count(self, rows: TensorDictBase, process_group=None) -> LossCounts:
        """Normalisers of an optimizer step, from all its rows.

        Args:
            rows: all rows of the step on this rank, rows of advantage 0 included.
            process_group: the ranks whose gradients are averaged for this step; None counts this rank alone.
        """
        masked = {"mask_truncated_completions": self.mask_truncated_completions, "process_group": process_group}
        counts = count_rows(rows, **masked)
        if self.high_entropy_fraction is None:
            return counts
        return replace(counts, entropy_threshold=entropy_threshold(rows, self.high_entropy_fraction, **masked))

    def forward(self, tensordict: TensorDictBase, counts: LossCounts | None = None) -> RLOOLossOutput:
        """The loss of some rows as their part of a step.

        Args:
            tensordict: rows, batch size ``[B]``.
            counts: of the whole step, see :meth:`count`; None: the rows are the whole step.
        """
        if not len(tensordict):
            return self._no_rows()
        counts = self.count(tensordict) if counts is None else counts
        router_coeff = float(self.router_loss_coeff)
        scored = self.actor_network.score(tensordict, **({"router_loss": True} if router_coeff else {}))
        batch = self._tensors(tensordict, scored, counts)
        log_ratio = self.ratio(batch.log_probs, batch.old, batch.mask)
        if not self._is_per_token(batch, log_ratio) and batch.advantages.shape[1] > 1:
            raise ValueError(
                "the ratio takes a whole sequence as one action, but rows carry an advantage for each token: use "
                "ratio='sequence_mean', 'token' or 'none', or MCAdvantage(credit='trajectory')"
            )
        weight = self._weight(batch)
        loss = self.surrogate(log_ratio, batch.advantages, batch.log_probs, batch.old)
        terms = {"loss_objective": share_out(loss, batch.mask) * weight}
        terms |= self._further_terms(batch, scored)
        normalisers = dict(num_rows=counts.num_rows, num_tokens=counts.num_tokens, constant=self.aggregation_constant)
        losses = {
            k: aggregate(v * batch.weights, batch.mask, self.aggregation, **normalisers) for k, v in terms.items()
        }
        if router_coeff:
            share = float((batch.mask * batch.multiplicity).sum()) / max(counts.num_tokens, 1)
            losses["loss_router"] = router_coeff * share * scored.router_loss
        return self._output(batch, losses, weight, self._is_per_token(batch, log_ratio), counts)

    def _is_per_token(self, batch: _Batch, log_ratio: torch.Tensor) -> bool:
        """Whether the ratio has a value for each token; where rows have one token at most, its name says so."""
        if batch.mask.shape[1] > 1:
            return log_ratio.shape == batch.mask.shape
        return self.ratio is not RATIOS["sequence"]

    def _tensors(self, rows: TensorDictBase, scored: ScoredActions, counts: LossCounts) -> _Batch:
        actions, mask = scored.actions, scored.actions.mask
        if self.mask_truncated_completions:
            mask = mask & ~rows[keys.TRUNCATED].reshape(-1, 1).to(mask.device)

        def gathered(key):
            return gather_actions(ragged(rows, key), actions).detach()  # rows may have been scored with gradient

        behaviour = gathered(keys.LOG_PROBS)
        proximal = self.old_log_probs == "proximal"
        has_ref = keys.REF_LOG_PROBS in rows.keys(True)
        if is_on(self.kl_to_ref_coeff) and not has_ref:
            raise KeyError(
                f"kl_to_ref_coeff={float(self.kl_to_ref_coeff)} needs rows with {keys.REF_LOG_PROBS}: add a "
                "KLRewardTransform to the environment (with coefficient 0 it only records), or use record_log_probs"
            )
        chosen = mask
        if self.high_entropy_fraction is not None:
            chosen = mask & (gathered(keys.PROXIMAL_ENTROPY) >= _threshold(counts))
        return _Batch(
            log_probs=scored.log_probs,
            entropy=scored.entropy,
            mask=mask,
            chosen=chosen,
            behaviour=behaviour,
            old=gathered(keys.PROXIMAL_LOG_PROBS) if proximal else behaviour,
            ref=gathered(keys.REF_LOG_PROBS) if has_ref else None,
            advantages=_advantages(rows, actions),
            weights=row_weights(rows)[:, None].to(mask.device),
            multiplicity=multiplicity(rows)[:, None].to(mask.device),
        )

    def _weight(self, batch: _Batch) -> torch.Tensor:
        """``[B, A]``, without gradient: the correction for the sampler, 0 on tokens that are left out."""
        weight = batch.chosen.float()
        if self.correction is not None:
            numerator = batch.old if self.old_log_probs == "proximal" else batch.log_probs.detach()
            weight = weight * self.correction(torch.where(batch.mask, numerator - batch.behaviour, 0.0), batch.mask)
        if self.off_policy_mask_threshold is not None:
            stays = (batch.log_probs, batch.behaviour, batch.advantages, batch.mask, self.off_policy_mask_threshold)
            weight = weight * off_policy_mask(*stays)
        return weight

    def _further_terms(self, batch: _Batch, scored: ScoredActions) -> dict[str, torch.Tensor]:
        """Per-token KL and entropy terms that have a coefficient, ``[B, A]`` each."""
        log_ratio = None
        if self.kl_importance_weighted:
            log_ratio = torch.where(batch.mask, batch.log_probs - batch.behaviour, 0.0)
        terms = {}
        pairs = {"loss_kl_to_ref": (self.kl_to_ref_coeff, batch.ref)}
        pairs["loss_kl_to_inference"] = (self.kl_to_inference_coeff, batch.behaviour)
        for name, (coeff, other) in pairs.items():
            if (beta := float(coeff)) != 0:
                kl = kl_loss_terms(batch.log_probs, other, self.kl_estimator, log_ratio)
                terms[name] = beta * torch.where(batch.mask, kl, 0.0)
        if (eta := float(self.entropy_coeff)) != 0:
            terms["loss_entropy"] = -eta * scored.entropy
        return terms

    def _output(self, batch: _Batch, losses: dict[str, torch.Tensor], weight, per_token: bool, counts: LossCounts):
        zero = batch.log_probs.new_zeros(())
        low, high = self._removed(batch, per_token)
        with torch.no_grad():
            tokens = batch.mask * batch.multiplicity
            units, of_all = (tokens, counts.num_tokens) if per_token else (batch.multiplicity, counts.num_rows)
            low, high = ((removed * units).sum() / max(of_all, 1e-12) for removed in (low, high))
            difference = torch.where(batch.mask, batch.log_probs - batch.behaviour, 0.0)
            log_ratio = difference.sum(-1).repeat_interleave(batch.multiplicity[:, 0].long())
            kl_to_ref = zero + math.nan
            if batch.ref is not None:
                kl_to_ref = masked_mean(self.kl_estimator(batch.log_probs, batch.ref), tokens)
            return RLOOLossOutput(
                **dict.fromkeys(LOSS_TERMS) | losses,
                entropy=masked_mean(batch.entropy, tokens),
                kl_approx=masked_mean(k3(batch.behaviour, batch.log_probs), tokens),
                kl_to_ref=kl_to_ref,
                ESS=effective_sample_size(log_ratio),
                clip_fraction=low + high,
                clip_fraction_low=low,
                clip_fraction_high=high,
                correction=masked_mean(weight, tokens) if self.correction is not None else zero + 1,
                kept=masked_mean((weight != 0).to(weight), tokens),
                log_ratio_max=difference.abs().max() if difference.numel() else zero,
                log_ratio=log_ratio,
                num_action_tokens=tokens.sum(),
            )

    def _removed(self, batch: _Batch, per_token: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens or rows whose gradient the surrogate takes away, of negative and positive advantage; bool."""
        with torch.enable_grad():
            leaf = batch.log_probs.detach().requires_grad_()
            loss = self.surrogate(self.ratio(leaf, batch.old, batch.mask), batch.advantages, leaf, batch.old)
            (gradient,) = torch.autograd.grad(share_out(loss, batch.mask).sum(), leaf)
        removed = batch.mask & (gradient == 0)
        sides = removed & (batch.advantages < 0), removed & (batch.advantages > 0)
        return sides if per_token else tuple(side.any(-1, keepdim=True) for side in sides)

    def _no_rows(self) -> RLOOLossOutput:
        """The output for a batch of no rows: nothing to learn, and nothing to measure."""
        zero = zero_loss(self.actor_network)
        fields = dict.fromkeys(RLOOLossOutput.__annotations__, zero.detach().new_tensor(math.nan))
        fields |= dict.fromkeys(LOSS_TERMS) | {
            "loss_objective": zero,
            "log_ratio": zero.new_zeros(0),
            "num_action_tokens": zero.new_zeros(()),
        }
        return RLOOLossOutput(**fields)


class _Batch(NamedTuple):
    """Rows as rectangles: ``[B, A]``, but ``[B, 1]`` for weights, multiplicity and advantages of whole rows."""

    log_probs: torch.Tensor
    entropy: torch.Tensor
    mask: torch.Tensor
    chosen: torch.Tensor
    behaviour: torch.Tensor
    old: torch.Tensor
    ref: torch.Tensor | None
    advantages: torch.Tensor
    weights: torch.Tensor
    multiplicity: torch.Tensor


def _advantages(rows: TensorDictBase, actions: ActionTokens) -> torch.Tensor:
    """``[B, 1]``, or ``[B, A]`` where a row has one for each of its tokens."""
    values = ragged(rows, keys.ADVANTAGE)
    if all(v.numel() == 1 for v in values):
        return torch.stack([v.reshape(1) for v in values]).to(actions.mask.device)
    tokens = ragged(rows, keys.TOKENS)
    return gather_actions([v.reshape(-1).expand(len(t)) for v, t in zip(values, tokens, strict=True)], actions)


def _threshold(counts: LossCounts) -> float:
    if counts.entropy_threshold is None:
        raise ValueError("high_entropy_fraction needs the step's threshold: make the counts with loss.count(rows)")
    return counts.entropy_threshold
