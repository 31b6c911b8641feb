"""What RLOOLoss returns, and the metrics of a step from those of its micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorClass

from torchrl_rloo.functional import effective_sample_size


class RLOOLossOutput(TensorClass["nocast"]):
    """The terms of the loss (with gradient), and metrics over action tokens alone (without).

    Attributes:
        loss_objective: scalar, the policy-gradient term.
        loss_kl_to_ref: scalar, coefficient times KL to the reference; None if it is not in the loss.
        loss_kl_to_inference: scalar, coefficient times KL to the policy that sampled; None if it is not in the loss.
        loss_entropy: scalar, minus coefficient times entropy; None if it is not in the loss.
        loss_router: scalar, coefficient times the load-balancing loss of a mixture of experts; None if not in the loss.
        entropy: mean entropy of the sampled distribution per action token, in nats.
        kl_approx: mean k3 divergence of the sampler's weights from the current ones per action token, in nats; 0
            on-policy.
        kl_to_ref: mean of the chosen estimator of the KL to the reference per action token, in nats; NaN without one.
        ESS: effective sample size of the rows' importance ratios, as a share of the rows; 1 on-policy.
        clip_fraction: units whose gradient the surrogate removes, as a share of those of the whole step; the sum of the
            next two. Units are rows where the ratio is of whole sequences, else action tokens.
        clip_fraction_low: those of negative advantage.
        clip_fraction_high: those of positive advantage.
        correction: mean importance weight of the action tokens that corrects for the sampler; 1 without a correction.
        kept: share of the action tokens that have a policy gradient after correction and masks.
        log_ratio_max: largest absolute difference between a current and a sampler's token log-prob, in nats.
        log_ratio: ``[B]``, log importance ratio of each row to the sampler; a merged row's once for each it stands for.
        num_action_tokens: how many action tokens the means are over.
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
    correction: torch.Tensor
    kept: torch.Tensor
    log_ratio_max: torch.Tensor
    log_ratio: torch.Tensor
    num_action_tokens: torch.Tensor

    @property
    def loss(self) -> torch.Tensor:
        """The scalar to minimise: the sum of the terms."""
        return sum(term for name in LOSS_TERMS if (term := getattr(self, name)) is not None)


LOSS_TERMS = tuple(name for name in RLOOLossOutput.__annotations__ if name.startswith("loss_"))

_TOKEN_MEANS = ("entropy", "kl_approx", "kl_to_ref", "correction", "kept")
_CLIP_METRICS = {
    "clip_ratio/region_mean": "clip_fraction",
    "clip_ratio/low_mean": "clip_fraction_low",
    "clip_ratio/high_mean": "clip_fraction_high",
}


def merge_outputs(outputs: Sequence[RLOOLossOutput], *, num_updates: int = 1) -> dict[str, float]:
    """Metrics of a whole batch from the outputs of its micro-batches, the same as if it had been one.

    Args:
        outputs: one for each micro-batch, computed with the counts of its optimizer step.
        num_updates: optimizer steps that the micro-batches belong to; losses and clip ratios are their means.

    Returns:
        The scalars of :class:`RLOOLossOutput`, under the names of ``torchrl_rloo.diagnostics.DEFINITIONS``; those of
        parts that are not in use are left out. Empty for no rows.
    """
    outputs = [o for o in outputs if len(o.log_ratio)]
    if not outputs:
        return {}
    tokens = torch.stack([o.num_action_tokens for o in outputs]).double().cpu()

    def total(name: str) -> float:
        return sum(float(getattr(o, name)) for o in outputs) / num_updates

    def mean(name: str, weights: torch.Tensor) -> float:
        values = torch.stack([getattr(o, name) for o in outputs]).double().cpu()
        return float((values * weights).sum() / weights.sum().clamp(min=1))

    merged = {"loss": total("loss")}
    merged |= {name: total(name) for name in LOSS_TERMS[1:] if getattr(outputs[0], name) is not None}
    merged |= {name: value for name in _TOKEN_MEANS if (value := mean(name, tokens)) == value}
    merged["ESS"] = float(effective_sample_size(torch.cat([o.log_ratio for o in outputs])))
    merged |= {name: total(field) for name, field in _CLIP_METRICS.items()}
    return merged | {"log_ratio_max": max(float(o.log_ratio_max) for o in outputs)}
