"""Outputs of losses, and merged metrics of the micro-batches of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from tensordict import TensorClass

from torchrl_rloo.functional import effective_sample_size


class LossOutput:
    """Base class of loss outputs: terms of the loss (``loss_*``, with gradient) and metrics (without)."""

    @classmethod
    def loss_terms(cls) -> list[str]:
        """Return the names of the terms of the loss."""
        return [name for name in cls.__annotations__ if name.startswith("loss_")]

    @property
    def loss(self) -> torch.Tensor:
        """Scalar to minimize: sum of the terms."""
        return sum(term for name in self.loss_terms() if (term := getattr(self, name)) is not None)

    def mean(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise: a mean would mix the loss with its metrics."""
        raise TypeError(f"{type(self).__name__}.mean would average the loss with its metrics; use .loss")

    def __str__(self) -> str:
        """Return the loss and all scalars as text."""
        fields = {"loss": self.loss} | {name: getattr(self, name) for name in self.__annotations__}
        shown = (f"{k}={float(v.detach()):.6g}" for k, v in fields.items() if v is not None and v.numel() == 1)
        return f"{type(self).__name__}({', '.join(shown)})"

    def is_empty(self) -> bool:
        """Return whether the output is of no rows."""
        raise NotImplementedError

    @classmethod
    def merge(cls, outputs: Sequence[Any], num_updates: int) -> dict[str, float]:
        """Return the metrics of several non-empty micro-batches, without the losses."""
        raise NotImplementedError


def merge_outputs(outputs: Sequence[LossOutput], *, num_updates: int = 1) -> dict[str, float]:
    """Merge the outputs of micro-batches into the metrics of the whole batch.

    Args:
        outputs: outputs of one loss, one per micro-batch, computed with the normalizers of its optimizer step.
        num_updates: optimizer steps that the micro-batches belong to. Losses and clip fractions are means over them.

    Returns:
        ``loss``, its other terms in use, and the metrics of the output class, named as in
        ``torchrl_rloo.diagnostics.DEFINITIONS``. Empty without rows.

    Raises:
        TypeError: if the outputs are of different losses.
    """
    outputs = [o.detach() for o in outputs if not o.is_empty()]
    if not outputs:
        return {}
    kind = type(outputs[0])
    if others := {type(o).__name__ for o in outputs} - {kind.__name__}:
        raise TypeError(f"outputs are of {kind.__name__} and of {sorted(others)}; merge each loss separately")
    merged = {"loss": sum_field(outputs, "loss") / num_updates}
    for name in kind.loss_terms()[1:]:
        if any(getattr(o, name) is not None for o in outputs):
            merged[name] = sum_field(outputs, name) / num_updates
    return merged | kind.merge(outputs, num_updates)


def sum_field(outputs: Sequence[LossOutput], name: str) -> float:
    """Return the sum of a scalar over the outputs; None counts as 0."""
    return sum(float(value) for o in outputs if (value := getattr(o, name)) is not None)


def mean_over_tokens(outputs: Sequence[LossOutput], name: str) -> float:
    """Return the mean of a metric over all action tokens."""
    tokens = torch.stack([o.num_action_tokens for o in outputs]).double().cpu()
    values = torch.stack([getattr(o, name) for o in outputs]).double().cpu()
    return float((values * tokens).sum() / tokens.sum().clamp(min=1))


def concatenate_field(outputs: Sequence[LossOutput], name: str) -> torch.Tensor:
    """Return the values of a metric ``[n]`` over all outputs, in float64."""
    return torch.cat([getattr(o, name) for o in outputs]).double()


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
        correction: mean weight of the action tokens that corrects for the sampler. 1 without a correction.
        kept: share of the action tokens that have a policy gradient after correction and masks.
        log_ratio_max: largest absolute difference between the current and the sampler's log-prob of a token, in nats.
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
        """Return means over action tokens, clip fractions, ``ESS`` over rows and ``log_ratio_max``, without NaN."""
        merged = {metric: mean_over_tokens(outputs, field) for metric, field in _TOKEN_MEANS.items()}
        merged |= {metric: sum_field(outputs, field) / num_updates for metric, field in _CLIP_METRICS.items()}
        merged["ESS"] = float(effective_sample_size(torch.cat([o.log_ratio for o in outputs])))
        merged["log_ratio_max"] = max(float(o.log_ratio_max) for o in outputs)
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
