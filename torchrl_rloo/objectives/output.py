"""Outputs of losses, and metrics of a step merged from its micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from tensordict import TensorClass

from torchrl_rloo.functional import effective_sample_size


class LossOutput:
    """Base of the outputs of all losses: terms of the loss (``loss_*``, with gradient), and metrics (without)."""

    @classmethod
    def loss_terms(cls) -> list[str]:
        """Return the names of the terms."""
        return [name for name in cls.__annotations__ if name.startswith("loss_")]

    @property
    def loss(self) -> torch.Tensor:
        """Scalar to minimize: the sum of the terms."""
        return sum(term for name in self.loss_terms() if (term := getattr(self, name)) is not None)

    def mean(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse a mean over the loss and its metrics."""
        raise TypeError(f"{type(self).__name__}.mean would average the loss with its metrics: use .loss")

    def __str__(self) -> str:
        """Show the loss and all scalars."""
        fields = {"loss": self.loss} | {name: getattr(self, name) for name in self.__annotations__}
        shown = (f"{k}={float(v.detach()):.6g}" for k, v in fields.items() if v is not None and v.numel() == 1)
        return f"{type(self).__name__}({', '.join(shown)})"

    def is_empty(self) -> bool:
        """Return whether the output is of no rows."""
        raise NotImplementedError

    @classmethod
    def merge(cls, outputs: Sequence[Any], num_updates: int) -> dict[str, float]:
        """Return the metrics of several micro-batches, all with rows, other than losses."""
        raise NotImplementedError


def merge_outputs(outputs: Sequence[LossOutput], *, num_updates: int = 1) -> dict[str, float]:
    """Merge the outputs of micro-batches into the metrics of the whole batch, as if it had been one.

    Args:
        outputs: of one loss, one for each micro-batch, computed with the normalizers of its optimizer step.
        num_updates: optimizer steps that the micro-batches belong to; losses and clip fractions are their means.

    Returns:
        ``loss``, its other terms where in use, and the metrics of the class of the outputs, under the names of
        ``torchrl_rloo.diagnostics.DEFINITIONS``. Empty for no rows.

    Raises:
        TypeError: for outputs of different losses.
    """
    outputs = [o.detach() for o in outputs if not o.is_empty()]
    if not outputs:
        return {}
    kind = type(outputs[0])
    if others := {type(o).__name__ for o in outputs} - {kind.__name__}:
        raise TypeError(f"outputs are of {kind.__name__} and of {sorted(others)}: merge those of each loss apart")
    merged = {"loss": total(outputs, "loss") / num_updates}
    for name in kind.loss_terms()[1:]:
        if any(getattr(o, name) is not None for o in outputs):
            merged[name] = total(outputs, name) / num_updates
    return merged | kind.merge(outputs, num_updates)


def total(outputs: Sequence[LossOutput], name: str) -> float:
    """Return the sum of a scalar over the outputs; None counts as 0."""
    return sum(float(value) for o in outputs if (value := getattr(o, name)) is not None)


def token_mean_of(outputs: Sequence[LossOutput], name: str) -> float:
    """Return the mean of a metric over all action tokens."""
    tokens = torch.stack([o.num_action_tokens for o in outputs]).double().cpu()
    values = torch.stack([getattr(o, name) for o in outputs]).double().cpu()
    return float((values * tokens).sum() / tokens.sum().clamp(min=1))


def concatenated(outputs: Sequence[LossOutput], name: str) -> torch.Tensor:
    """Return the entries ``[n]`` of all outputs, in float64."""
    return torch.cat([getattr(o, name) for o in outputs]).double()


class RLOOLossOutput(LossOutput, TensorClass["nocast"]):
    """Terms of the loss (with gradient), and metrics over the action tokens of the rows given (without).

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
            next two. Units are rows where the ratio is of whole sequences, else action tokens. NaN for a surrogate
            without ``clipped``.
        clip_fraction_low: those of negative advantage.
        clip_fraction_high: those of positive advantage.
        correction: mean importance weight of the action tokens that corrects for the sampler; 1 without a correction.
        kept: share of the action tokens that have a policy gradient after correction and masks.
        log_ratio_max: largest absolute difference between a current and a sampler's token log-prob, in nats.
        log_ratio: ``[B]``, log importance ratio of each row to the sampler; a merged row's once for each it stands for.
        num_action_tokens: number of action tokens that the means are over.
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

    def is_empty(self) -> bool:
        """Return whether the output is of no rows."""
        return not len(self.log_ratio)

    @classmethod
    def merge(cls, outputs: Sequence[RLOOLossOutput], num_updates: int) -> dict[str, float]:
        """Return means over action tokens, clip fractions, ``ESS`` over rows and ``log_ratio_max``, where in use."""
        merged = {metric: token_mean_of(outputs, field) for metric, field in _TOKEN_MEANS.items()}
        merged |= {metric: total(outputs, field) / num_updates for metric, field in _CLIP_METRICS.items()}
        merged["ESS"] = float(effective_sample_size(torch.cat([o.log_ratio for o in outputs])))
        merged["log_ratio_max"] = max(float(o.log_ratio_max) for o in outputs)
        return {name: value for name, value in merged.items() if value == value}


# Rows without a signal may be dropped before the loss: these two would read as properties of the policy.
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
