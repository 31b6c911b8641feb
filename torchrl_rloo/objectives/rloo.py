"""Policy-gradient loss over rows with advantages, composed of independent choices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, SupportsFloat

import torch
from tensordict import NestedKey, TensorClass, TensorDictBase
from torchrl.objectives import LossModule

from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import ActionTokens, entry_of, gather_actions, ragged
from torchrl_rloo.functional import (
    AGGREGATIONS,
    CORRECTIONS,
    KL_ESTIMATORS,
    RATIOS,
    SURROGATES,
    Ratio,
    effective_sample_size,
    exp_log_ratio,
    k3,
)
from torchrl_rloo.functional.covariance import COVARIANCES, ClipCov, KLCov
from torchrl_rloo.functional.kl import kl_loss_terms
from torchrl_rloo.functional.policy_loss import DPPO, DRO, GMPO, Aggregation, Clip, Surrogate, Unclipped, aggregate
from torchrl_rloo.functional.ratios import Correction, off_policy_mask, ratio_spec, split_among_tokens
from torchrl_rloo.functional.statistics import masked_mean
from torchrl_rloo.modules.policies import ScoredActions, TransformersWrapper
from torchrl_rloo.objectives.step import (
    LossOutput,
    Normalizers,
    check_actor,
    check_coefficient,
    entropy_threshold,
    is_on,
    mean_over_tokens,
    multiplicity,
    notify_without_advantage,
    row_normalizers,
    row_weights,
    step_tokens,
    sum_field,
    zero_loss,
)
from torchrl_rloo.runtime.lookup import resolve
from torchrl_rloo.runtime.torchrl_arguments import with_torchrl_arguments

Spec = str | Mapping[str, Any]


class RLOOLossOutput(LossOutput, TensorClass["nocast"]):
    """Terms of :class:`RLOOLoss` (with gradient), and metrics over the action tokens of its rows (without).

    Attributes:
        loss_objective: scalar, policy-gradient term.
        loss_kl_to_ref: scalar, coefficient times KL to the reference. None if the loss has no such term.
        loss_kl_to_inference: scalar, coefficient times KL to the policy that sampled. None if the loss has no such
            term.
        loss_entropy: scalar, minus coefficient times entropy. None if the loss has no such term.
        loss_router: scalar, coefficient times the load-balancing loss of a mixture of experts. None if the loss has no
            such term.
        entropy: mean entropy of the sampled distribution per action token, in nats.
        kl_approx: mean k3 divergence of the sampler's weights from the current weights per action token, in nats. 0 on
            policy.
        kl_to_ref: mean estimate of the KL to the reference per action token, in nats. NaN without a reference.
        ESS: effective sample size of the rows' importance ratios, as a share of the rows. 1 on policy.
        clip_fraction: units whose gradient the surrogate removes, as a share of the units of the whole step. Units are
            rows if the ratio is of whole sequences, else action tokens. NaN for a surrogate without ``clipped``.
        clip_fraction_low: part of ``clip_fraction`` with negative advantage.
        clip_fraction_high: part of ``clip_fraction`` with positive advantage.
        clip_low_min: smallest share of a row's units that ``clip_fraction_low`` counts.
        clip_high_max: largest share of a row's units that ``clip_fraction_high`` counts.
        correction: mean weight of the action tokens that corrects for the sampler. 1 without a correction.
        kept: share of the action tokens that have a policy gradient after correction and masks.
        log_ratio_max: largest absolute difference between the current and the sampler's log-prob of a token, in nats.
        ratio_min: smallest ratio of the current to the sampler's probability of a token.
        ratio_max: largest such ratio.
        log_ratio: ``[B]``, log importance ratio of each row to the sampler; repeated for each row that a merged row
            stands for.
        num_action_tokens: number of action tokens that the means cover.
    """

    loss_objective: torch.Tensor
    loss_kl_to_ref: torch.Tensor | None
    loss_kl_to_inference: torch.Tensor | None
    loss_entropy: torch.Tensor | None
    loss_router: torch.Tensor | None
    entropy: torch.Tensor
    kl_approx: torch.Tensor
    kl_to_ref: torch.Tensor
    ESS: torch.Tensor
    clip_fraction: torch.Tensor
    clip_fraction_low: torch.Tensor
    clip_fraction_high: torch.Tensor
    clip_low_min: torch.Tensor
    clip_high_max: torch.Tensor
    correction: torch.Tensor
    kept: torch.Tensor
    log_ratio_max: torch.Tensor
    ratio_min: torch.Tensor
    ratio_max: torch.Tensor
    log_ratio: torch.Tensor
    num_action_tokens: torch.Tensor

    def is_empty(self) -> bool:
        """Return whether the output is of no rows."""
        return not len(self.log_ratio)

    @classmethod
    def merge(cls, outputs: Sequence[RLOOLossOutput], num_updates: int) -> dict[str, float]:
        """Return means over action tokens, clip fractions, ``ESS`` over rows and extremes, without NaN."""
        merged = {metric: mean_over_tokens(outputs, field) for metric, field in _TOKEN_MEANS.items()}
        merged |= {metric: sum_field(outputs, field) / num_updates for metric, field in _CLIP_METRICS.items()}
        merged["ESS"] = float(effective_sample_size(torch.cat([o.log_ratio for o in outputs])))
        for name, (field, extreme) in _EXTREMES.items():
            values = [float(getattr(o, field)) for o in outputs]
            merged[name] = extreme((v for v in values if v == v), default=math.nan)
        return {name: value for name, value in merged.items() if value == value}


# Rows without a signal may be dropped before the loss, so the names of these two say that they cover the others only.
_TOKEN_MEANS = {
    "entropy/with_signal": "entropy",
    "kl_to_ref/with_signal": "kl_to_ref",
    "kl_approx": "kl_approx",
    "correction": "correction",
    "kept": "kept",
}
_CLIP_METRICS = {
    "clip_ratio/region_mean": "clip_fraction",
    "clip_ratio/low_mean": "clip_fraction_low",
    "clip_ratio/high_mean": "clip_fraction_high",
}
_EXTREMES = {
    "clip_ratio/low_min": ("clip_low_min", min),
    "clip_ratio/high_max": ("clip_high_max", max),
    "log_ratio_max": ("log_ratio_max", max),
    "importance_ratio/min": ("ratio_min", min),
    "importance_ratio/max": ("ratio_max", max),
}


class RLOOLoss(LossModule):
    """Policy-gradient loss of REINFORCE leave-one-out and related methods.

    Over the rows ``i`` of a step and their action tokens ``t``::

        L = aggregate_it [w_it * surrogate(rho_it, A_it) + kl_coeff * KL_it - entropy_coeff * H_it]

    The defaults are RLOO with one action per sequence (Ahmadian et al. 2024, arXiv 2402.14740), and PPO's clip for
    batches that are used more than once::

        L = 1/N sum_i -min(rho_i * A_i, clip(rho_i, 0.8, 1.2) * A_i)
        rho_i = exp(sum_t (log pi(a_it) - log mu(a_it)))

    Published methods combine these choices: :data:`~torchrl_rloo.objectives.PRESETS`.

    The loss reads ``TOKENS``, ``ACTION_MASK``, ``LOG_PROBS`` and ``ADVANTAGE`` of each row. ``sample_weight`` and
    ``multiplicity``, if present, multiply the loss of a row. Some settings read ``TRUNCATED``, ``PROXIMAL_LOG_PROBS``,
    ``PROXIMAL_ENTROPY`` or ``REF_LOG_PROBS``; see ``in_keys``. Returns an
    :class:`~torchrl_rloo.objectives.RLOOLossOutput` whose ``loss`` is to be minimized.

    Coefficients are numbers or objects with ``__float__``, which are read at each use.

    This class replaces TorchRL's ``GRPOLoss``. ``clip_epsilon=0.2`` there is ``surrogate=Clip(0.2)`` here,
    ``clip_epsilon=(0.2, 0.28)`` is ``Clip(0.2, 0.28)``. The KL and entropy coefficients have the same names. Its
    token ratio (``ratio="token"``), its default ``aggregation="token_mean"`` and its entropy bonus must be set here.
    ``set_keys`` accepts ``advantage=``; :mod:`torchrl_rloo.data.keys` fixes the other keys.

    Args:
        actor_network: policy that scores rows with :meth:`TransformersWrapper.score`.
        ratio: name in :data:`~torchrl_rloo.functional.RATIOS` (``"sequence"``, ``"sequence_mean"``, ``"token"``, or
            ``"none"`` for plain REINFORCE), or a function of the same signature; one that returns one value for the
            whole sequence as ``RatioSpec(function, per_token=False)``.
        surrogate: choice from :data:`~torchrl_rloo.functional.SURROGATES`: a name, a mapping such as ``{"name": "clip",
            "low": 0.1}``, an object such as ``Clip(0.1)``, or a function of the same signature.
        aggregation: choice from :data:`~torchrl_rloo.functional.AGGREGATIONS` (``"sequence_sum"``,
            ``"sequence_mean"``, ``"token_mean"``, ``ConstantLength(64)``), or a function of the same signature.
        old_log_probs: denominator of the ratio: log-probs of the ``"sampler"``, or the ``"proximal"`` ones of the
            training model before its first update on the batch (:func:`~torchrl_rloo.modules.record_log_probs`).
        correction: importance weight between the sampler and the proximal policy (the current policy with
            ``ratio="none"``): choice from :data:`~torchrl_rloo.functional.CORRECTIONS`, or a function of the same
            signature. None disables it.
        off_policy_mask_threshold: drift from the sampler beyond which rows of negative advantage are masked, in nats
            per token. None keeps all rows.
        kl_to_ref_coeff: coefficient of the KL to the reference, whose log-probs the rows must carry. 0 disables it.
        kl_to_inference_coeff: coefficient of the KL to the policy that sampled. 0 disables it.
        kl_estimator: estimator of both KLs: ``"k1"``, ``"k2"`` or ``"k3"``.
        kl_importance_weighted: True multiplies the KL by the importance ratio to the sampler, so its gradient is that
            of the reverse KL.
        entropy_coeff: coefficient of the entropy bonus. 0 disables it.
        high_entropy_fraction: share of the action tokens, those of highest entropy, that get a policy gradient
            (arXiv 2506.01939). It requires entropies of ``record_log_probs(entropy=...)``. None uses all tokens.
        covariance: treatment of the tokens whose log-prob and advantage vary together, which keeps up the entropy:
            choice from :data:`~torchrl_rloo.functional.covariance.COVARIANCES` (``"clip"``, ``"kl"``). None disables
            it.
        router_loss_coeff: coefficient of the load-balancing loss of a mixture of experts. The loss averages over the
            tokens of a forward pass, so this term depends on the micro-batches. 0 disables it.
        mask_truncated_completions: True excludes the tokens of truncated rows. Such a row has no gradient, but it
            still counts as a row, and its reward still enters the baseline of its group.
        demonstration_surrogate: surrogate of the tokens of demonstrations (``DatasetChatEnv(demonstrations=)``), whose
            ratio per token is that to the old log-probs: ``"shaping"`` for LUFFY, ``"unclipped"`` for plain importance
            weights. None treats them like samples.

    Raises:
        ValueError: if a name or field is unknown, a value is out of range, or settings cannot be combined.
        KeyError: at ``forward``, if rows lack an entry.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl_rloo.data import stack_rows
        >>> from torchrl_rloo.embedded import build_model, build_tokenizer
        >>> from torchrl_rloo.functional import Clip
        >>> tokenizer = build_tokenizer()
        >>> model = build_model(tokenizer, seed=0).eval()
        >>> loss_fn = RLOOLoss(TransformersWrapper(model, tokenizer=tokenizer, generate=False), surrogate=Clip(0.1))
        >>> rows = stack_rows([TensorDict({
        ...     keys.TOKENS: torch.tensor([5, 6, 7]),
        ...     keys.ACTION_MASK: torch.tensor([False, True, True]),
        ...     keys.LOG_PROBS: torch.tensor([0.0, -2.0, -20.0]),
        ...     keys.ADVANTAGE: torch.tensor([[1.0]]),
        ... })])
        >>> out = loss_fn(rows)
        >>> round(out.loss.item(), 3), out.clip_fraction.item()
        (-1.1, 1.0)
    """

    @dataclass
    class _AcceptedKeys(LossModule._AcceptedKeys):
        """Keys that ``set_keys`` may rename."""

        advantage: NestedKey = keys.ADVANTAGE

    default_keys = _AcceptedKeys
    actor_network: TransformersWrapper

    @with_torchrl_arguments
    def __init__(
        self,
        actor_network: TransformersWrapper,
        *,
        ratio: str | Ratio = "sequence",
        surrogate: Spec | Surrogate = "clip",
        aggregation: Spec | Aggregation = "sequence_sum",
        old_log_probs: Literal["sampler", "proximal"] = "sampler",
        correction: Spec | Correction | None = None,
        off_policy_mask_threshold: float | None = None,
        kl_to_ref_coeff: SupportsFloat = 0.0,
        kl_to_inference_coeff: SupportsFloat = 0.0,
        kl_estimator: Literal["k1", "k2", "k3"] = "k3",
        kl_importance_weighted: bool = False,
        entropy_coeff: SupportsFloat = 0.0,
        high_entropy_fraction: float | None = None,
        covariance: Spec | ClipCov | KLCov | None = None,
        router_loss_coeff: SupportsFloat = 0.0,
        mask_truncated_completions: bool = False,
        demonstration_surrogate: Spec | Surrogate | None = None,
    ):
        super().__init__()
        check_actor(actor_network)
        self.actor_network = actor_network
        # Resolve the parts that names may stand for
        self.ratio = ratio_spec(resolve("ratio", ratio, RATIOS))
        self.surrogate = resolve("surrogate", surrogate, SURROGATES)
        self.aggregation = resolve("aggregation", aggregation, AGGREGATIONS)
        self.correction = None if correction is None else resolve("correction", correction, CORRECTIONS)
        self.kl_estimator = resolve("kl_estimator", kl_estimator, KL_ESTIMATORS)
        self.old_log_probs, self.off_policy_mask_threshold = old_log_probs, off_policy_mask_threshold
        self.kl_to_ref_coeff, self.kl_to_inference_coeff = kl_to_ref_coeff, kl_to_inference_coeff
        self.kl_importance_weighted, self.entropy_coeff = kl_importance_weighted, entropy_coeff
        self.high_entropy_fraction, self.router_loss_coeff = high_entropy_fraction, router_loss_coeff
        self.covariance = None if covariance is None else resolve("covariance", covariance, COVARIANCES)
        self.mask_truncated_completions = mask_truncated_completions
        own = demonstration_surrogate
        self.demonstration_surrogate = None if own is None else resolve("demonstration_surrogate", own, SURROGATES)
        self._old_key = keys.PROXIMAL_LOG_PROBS if old_log_probs == "proximal" else keys.LOG_PROBS
        # Reject values out of range, and settings that cannot be combined
        _check_parts(self)
        self._forward_value_estimator_keys()
        self.out_keys = list(RLOOLossOutput.__annotations__)

    def _forward_value_estimator_keys(self, **kwargs) -> None:
        """Set ``in_keys``; :meth:`set_keys` calls this after a change."""
        self.in_keys = [keys.TOKENS, keys.ACTION_MASK, keys.LOG_PROBS, self.tensor_keys.advantage]
        self.in_keys += [keys.TRUNCATED] if self.mask_truncated_completions else []
        self.in_keys += [keys.PROXIMAL_LOG_PROBS] if self.old_log_probs == "proximal" else []
        self.in_keys += [keys.PROXIMAL_ENTROPY] if self.high_entropy_fraction is not None else []
        self.in_keys += [keys.REF_LOG_PROBS] if is_on(self.kl_to_ref_coeff) else []

    @property
    def needs_zero_advantage(self) -> bool:
        """True if rows of advantage 0 may have a gradient, from another term, DRO or a user-defined surrogate."""
        others = (self.kl_to_ref_coeff, self.kl_to_inference_coeff, self.entropy_coeff, self.router_loss_coeff)
        known = isinstance(self.surrogate, tuple(SURROGATES.values())) and not isinstance(self.surrogate, DRO)
        return not known or self.covariance is not None or any(map(is_on, others))

    def normalizers(self, rows: TensorDictBase, process_group=None) -> Normalizers:
        """Compute the normalizers of an optimizer step from all its rows.

        Args:
            rows: all rows of the step on this rank, including rows of advantage 0.
            process_group: group of ranks whose gradients are averaged for this step, each with the same number of
                micro-batches. None for this rank only.
        """
        masked = {"mask_truncated_completions": self.mask_truncated_completions, "process_group": process_group}
        normalizers = row_normalizers(rows, **masked)
        if process_group is None:  # otherwise the rows with an advantage may be those of other ranks
            notify_without_advantage(rows, self.tensor_keys.advantage, other_terms=self.needs_zero_advantage)
        if self.high_entropy_fraction is not None:
            threshold = entropy_threshold(rows, self.high_entropy_fraction, **masked)
            normalizers = replace(normalizers, entropy_threshold=threshold)
        if self.covariance is not None:
            tokens = step_tokens(rows, self._log_probs_and_advantages, **masked)
            limits = self.covariance.limits(*tokens.T) if len(tokens) else None
            normalizers = replace(normalizers, covariance=limits)
        return normalizers

    def _log_probs_and_advantages(self, row: TensorDictBase) -> torch.Tensor:
        """Return what the covariances of a row need, ``[A, 2]``."""
        action, old = row[keys.ACTION_MASK], entry_of(row, self._old_key)
        advantages = entry_of(row, self.tensor_keys.advantage).reshape(-1).expand(len(action))
        return torch.stack([old[action].double(), advantages[action].double()], -1)

    def forward(self, tensordict: TensorDictBase, normalizers: Normalizers | None = None) -> RLOOLossOutput:
        """Compute the loss of rows as their part of a step.

        Args:
            tensordict: rows of batch size ``[B]``.
            normalizers: :meth:`normalizers` of the whole step. If all its micro-batches share them, their gradients sum
                to that of the step. None takes the rows as the whole step.
        """
        if not len(tensordict):
            return self._empty_output()
        normalizers = self.normalizers(tensordict) if normalizers is None else normalizers

        # Score the rows under the current weights
        router_coeff = float(self.router_loss_coeff)
        scored = self.actor_network.score(tensordict, **({"router_loss": True} if router_coeff else {}))
        batch = self._gather(tensordict, scored, normalizers)
        log_probs, mask = batch.log_probs, batch.mask

        # Compute the policy gradient, weighted by the correction for the sampler
        log_ratio = self.ratio(log_probs, batch.old, mask)
        if not self.ratio.per_token and batch.advantages.shape[1] > 1:
            raise ValueError(
                "a ratio of whole sequences cannot be combined with rows that carry an advantage for each token; use "
                "ratio='sequence_mean', 'token' or 'none', or MCAdvantage(credit='trajectory')"
            )
        token_weights = self._compute_token_weights(batch)
        masked = {"mask": mask} if getattr(self.surrogate, "wants_mask", False) else {}
        policy = self.surrogate(log_ratio, batch.advantages, log_probs, batch.old, **masked)
        policy = split_among_tokens(policy, mask)
        if self.demonstration_surrogate is not None:
            own = torch.where(mask, log_probs - batch.old, 0.0)
            shown = self.demonstration_surrogate(own, batch.advantages, log_probs, batch.old)
            policy = torch.where(batch.demonstrated, shown, policy)
        if self.covariance is not None and normalizers.covariance is not None:
            chosen = self.covariance.chosen(batch.old, batch.advantages, normalizers.covariance)
            policy = self.covariance(policy, log_probs - batch.old, chosen & mask)
        terms = {"loss_objective": token_weights * policy}

        # Add KL and entropy
        sampler_log_ratio = torch.where(mask, log_probs - batch.sampler, 0.0) if self.kl_importance_weighted else None
        if beta := float(self.kl_to_ref_coeff):
            terms["loss_kl_to_ref"] = beta * kl_loss_terms(log_probs, batch.ref, self.kl_estimator, sampler_log_ratio)
        if beta := float(self.kl_to_inference_coeff):
            kl = kl_loss_terms(log_probs, batch.sampler, self.kl_estimator, sampler_log_ratio)
            terms["loss_kl_to_inference"] = beta * kl
        if eta := float(self.entropy_coeff):
            terms["loss_entropy"] = -eta * scored.entropy

        # Reduce each term to a scalar, normalized over the whole step
        totals = {"num_rows": normalizers.num_rows, "num_tokens": normalizers.num_tokens}
        losses = {k: aggregate(v * batch.row_weights, mask, self.aggregation, **totals) for k, v in terms.items()}
        if router_coeff:
            share = float((mask * batch.multiplicity).sum()) / max(normalizers.num_tokens, 1)
            losses["loss_router"] = router_coeff * share * scored.router_loss
        with torch.no_grad():
            metrics = self._compute_metrics(batch, token_weights)
            metrics |= self._compute_clip_fractions(batch, log_ratio, normalizers)
        return RLOOLossOutput(**dict.fromkeys(RLOOLossOutput.loss_terms()) | losses | metrics)

    def _gather(self, rows: TensorDictBase, scored: ScoredActions, normalizers: Normalizers) -> _Batch:
        """Gather what the terms need into rectangles of action tokens."""
        actions, mask = scored.actions, scored.actions.mask
        if self.mask_truncated_completions:
            mask = mask & ~rows[keys.TRUNCATED].reshape(-1, 1).to(mask.device)

        def gather(key):
            return gather_actions(ragged(rows, key), actions).detach()  # rows may have been scored with gradient

        sampler = gather(keys.LOG_PROBS)
        has_ref = keys.REF_LOG_PROBS in rows.keys(True)
        if is_on(self.kl_to_ref_coeff) and not has_ref:
            raise KeyError(
                f"kl_to_ref_coeff={float(self.kl_to_ref_coeff)} requires rows with {keys.REF_LOG_PROBS}; add a "
                "KLRewardTransform to the environment (coefficient 0 only records), or use record_log_probs"
            )
        # Select the tokens with a policy gradient: all, or those of high entropy
        chosen = mask
        if self.high_entropy_fraction is not None:
            if normalizers.entropy_threshold is None:
                raise ValueError("high_entropy_fraction requires an entropy_threshold; pass loss.normalizers(rows)")
            chosen = mask & (gather(keys.PROXIMAL_ENTROPY) >= normalizers.entropy_threshold)
        origins = rows.get(keys.ORIGIN, torch.zeros(len(rows)))
        demonstrated = origins.reshape(-1, 1) == keys.DEMONSTRATION
        return _Batch(
            log_probs=scored.log_probs,
            entropy=scored.entropy,
            mask=mask,
            chosen=chosen,
            sampler=sampler,
            old=gather(self._old_key),
            ref=gather(keys.REF_LOG_PROBS) if has_ref else None,
            advantages=_gather_advantages(rows, self.tensor_keys.advantage, actions),
            row_weights=row_weights(rows)[:, None].to(mask.device),
            multiplicity=multiplicity(rows)[:, None].to(mask.device),
            demonstrated=demonstrated.to(mask.device),
        )

    def _compute_token_weights(self, batch: _Batch) -> torch.Tensor:
        """Return ``[B, A]``, without gradient: the correction for the sampler, 0 on masked tokens."""
        weight = batch.chosen.float()
        if self.correction is not None:
            numerator = batch.old if self.old_log_probs == "proximal" else batch.log_probs.detach()
            weight = weight * self.correction(torch.where(batch.mask, numerator - batch.sampler, 0.0), batch.mask)
        if self.off_policy_mask_threshold is not None:
            weight = weight * off_policy_mask(
                batch.log_probs, batch.sampler, batch.advantages, batch.mask, self.off_policy_mask_threshold
            )
        return weight

    def _compute_metrics(self, batch: _Batch, token_weights: torch.Tensor) -> dict[str, torch.Tensor]:
        # Count a merged row once for each row that it stands for
        zero, tokens = batch.log_probs.new_zeros(()), batch.mask * batch.multiplicity
        sampled = batch.mask & ~batch.demonstrated  # the sampler did not choose demonstrations
        difference = torch.where(sampled, batch.log_probs - batch.sampler, 0.0)
        log_ratio = difference.sum(-1).repeat_interleave(batch.multiplicity[:, 0].long())
        kl_to_ref = zero + math.nan
        if batch.ref is not None:
            kl_to_ref = masked_mean(self.kl_estimator(batch.log_probs, batch.ref), tokens)
        return {
            "entropy": masked_mean(batch.entropy, tokens),
            "kl_approx": masked_mean(k3(batch.sampler, batch.log_probs), sampled * batch.multiplicity),
            "kl_to_ref": kl_to_ref,
            "ESS": effective_sample_size(log_ratio),
            "correction": zero + 1 if self.correction is None else masked_mean(token_weights, tokens),
            "kept": masked_mean((token_weights != 0).to(token_weights), tokens),
            "log_ratio_max": difference.abs().max() if difference.numel() else zero,
            "ratio_min": exp_log_ratio(difference[sampled].min() if sampled.any() else zero),
            "ratio_max": exp_log_ratio(difference[sampled].max() if sampled.any() else zero),
            "log_ratio": log_ratio,
            "num_action_tokens": tokens.sum(),
        }

    def _compute_clip_fractions(
        self, batch: _Batch, log_ratio: torch.Tensor, normalizers: Normalizers
    ) -> dict[str, torch.Tensor]:
        """Return the share of clipped tokens or rows, by the sign of the advantage, and extremes over rows."""
        low = high = low_min = high_max = batch.log_probs.new_tensor(math.nan)
        if hasattr(self.surrogate, "clipped"):
            clipped = self.surrogate.clipped(log_ratio, batch.advantages, batch.log_probs, batch.old)
            units, of_all = torch.ones_like(batch.multiplicity), normalizers.num_rows
            if self.ratio.per_token:
                units, of_all = batch.mask.float(), normalizers.num_tokens
            sides = [(clipped & side) * units for side in (batch.advantages < 0, batch.advantages > 0)]
            low, high = ((side * batch.multiplicity).sum().to(batch.log_probs) / max(of_all, 1e-12) for side in sides)
            counted = units.sum(-1) > 0
            if counted.any():
                shares = [(side.sum(-1) / units.sum(-1))[counted] for side in sides]
                low_min, high_max = shares[0].min(), shares[1].max()
        named = {"clip_fraction": low + high, "clip_fraction_low": low, "clip_fraction_high": high}
        return named | {"clip_low_min": low_min, "clip_high_max": high_max}

    def _empty_output(self) -> RLOOLossOutput:
        """Return the output for no rows: a loss of 0 and metrics of NaN."""
        zero = zero_loss(lambda rows: self.actor_network.score(rows).log_probs)
        fields = dict.fromkeys(RLOOLossOutput.__annotations__, zero.detach().new_tensor(math.nan))
        fields |= dict.fromkeys(RLOOLossOutput.loss_terms()) | {"loss_objective": zero, "log_ratio": zero.new_zeros(0)}
        return RLOOLossOutput(**fields | {"num_action_tokens": zero.new_zeros(())})


class _Batch(NamedTuple):
    """Rectangles of rows: ``[B, A]``, but ``[B, 1]`` for the last three and for advantages of whole rows."""

    log_probs: torch.Tensor
    entropy: torch.Tensor
    mask: torch.Tensor
    chosen: torch.Tensor
    sampler: torch.Tensor
    old: torch.Tensor
    ref: torch.Tensor | None
    advantages: torch.Tensor
    row_weights: torch.Tensor
    multiplicity: torch.Tensor
    demonstrated: torch.Tensor


def _gather_advantages(rows: TensorDictBase, key: NestedKey, actions: ActionTokens) -> torch.Tensor:
    """Return ``[B, 1]``, or ``[B, A]`` if rows have an advantage per token."""
    try:
        values = ragged(rows, key)
    except KeyError:
        remedy = "compute it with MCAdvantage, the transform of the replay buffer, before the loss"
        raise KeyError(f"advantage={key!r} is missing in the rows; {remedy}") from None
    if all(v.numel() == 1 for v in values):
        return torch.stack([v.reshape(1) for v in values]).to(actions.mask.device)
    tokens = ragged(rows, keys.TOKENS)
    return gather_actions([v.reshape(-1).expand(len(t)) for v, t in zip(values, tokens, strict=True)], actions)


def _check_parts(loss: RLOOLoss) -> None:
    """Raise if settings of an RLOOLoss have no effect together or contradict each other."""
    without_ratio, of_sequences = loss.ratio == RATIOS["none"], not loss.ratio.per_token
    proximal, correction, fraction = loss.old_log_probs == "proximal", loss.correction, loss.high_entropy_fraction
    checks = [
        (
            without_ratio and loss.surrogate not in (Clip(), Unclipped()),
            f"surrogate={loss.surrogate} has no effect with ratio='none', which is always 1; remove it, or set "
            "another ratio",
        ),
        (
            isinstance(loss.surrogate, DPPO | GMPO) and loss.ratio != RATIOS["token"],
            f"surrogate={loss.surrogate} bounds each token and requires ratio='token'",
        ),
        (
            loss.covariance is not None and of_sequences,
            f"covariance={loss.covariance} chooses tokens and cannot be combined with ratio='sequence'; use another",
        ),
        (
            loss.old_log_probs not in ("sampler", "proximal"),
            f"old_log_probs={loss.old_log_probs!r} must be 'sampler' or 'proximal'",
        ),
        (
            correction is not None and not proximal and not without_ratio,
            f"correction={correction} cannot be combined with old_log_probs='sampler', whose ratio already corrects "
            "for the sampler; set old_log_probs='proximal' or ratio='none'",
        ),
        (
            of_sequences and getattr(correction, "per_token", False),
            f"correction={correction} weighs tokens and cannot be combined with ratio='sequence'; use "
            "'sequence_truncate' or 'sequence_mask', or another ratio",
        ),
        (
            of_sequences and fraction is not None,
            f"high_entropy_fraction={fraction} selects tokens and cannot be combined with ratio='sequence'; use "
            "another ratio",
        ),
        (
            without_ratio and proximal and correction is None,
            "old_log_probs='proximal' has no effect with ratio='none' and no correction; remove it",
        ),
        (
            loss.kl_importance_weighted and not is_on(loss.kl_to_ref_coeff) and not is_on(loss.kl_to_inference_coeff),
            "kl_importance_weighted=True has no effect while both KL coefficients are 0; remove it",
        ),
        (
            fraction is not None and not 0 < fraction <= 1,
            f"high_entropy_fraction={fraction} must be None or in (0, 1]",
        ),
        (
            loss.off_policy_mask_threshold is not None and not math.isfinite(loss.off_policy_mask_threshold),
            f"off_policy_mask_threshold={loss.off_policy_mask_threshold} must be None or a finite number",
        ),
    ]
    for failed, message in checks:
        if failed:
            raise ValueError(message)
    # Checks of single coefficients and flags
    for name in ("kl_to_ref_coeff", "kl_to_inference_coeff", "router_loss_coeff", "entropy_coeff"):
        check_coefficient(name, getattr(loss, name), negative=name == "entropy_coeff")
    for name in ("mask_truncated_completions", "kl_importance_weighted"):
        if not isinstance(value := getattr(loss, name), bool):
            raise TypeError(f"{name}={value!r} must be True or False")
