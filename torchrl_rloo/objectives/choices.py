"""Checks of the arguments of losses and of their combinations."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, SupportsFloat

from torchrl_rloo.functional.policy_loss import DPPO, Clip, Unclipped
from torchrl_rloo.functional.ratios import no_ratio, sequence_log_ratio, token_log_ratio

if TYPE_CHECKING:
    from torchrl_rloo.objectives.rloo import RLOOLoss


def check_actor(actor_network: Any) -> None:
    """Raise if the network cannot score rows, is set to generate, or samples greedily."""
    if not callable(getattr(actor_network, "score", None)):
        raise ValueError(f"actor_network={type(actor_network).__name__} must have a score(rows) method")
    if getattr(actor_network, "generate", False):
        raise ValueError("actor_network generates text; pass actor_network.get_new_version(generate=False)")
    if getattr(getattr(actor_network, "distribution", None), "temperature", 1) == 0:
        raise ValueError("temperature=0 must be above 0: greedy sampling has no log-probs to train on")


def is_on(coefficient: SupportsFloat) -> bool:
    """Return whether a coefficient is not 0 or may change."""
    return not isinstance(coefficient, int | float) or coefficient != 0


def check_coefficient(name: str, value: Any, *, negative: bool = False) -> None:
    """Raise if a coefficient is neither a finite number (of at least 0) nor an object with ``__float__``."""
    number = float(value) if hasattr(value, "__float__") else math.nan
    if not math.isfinite(number) or (number < 0 and not negative):
        least = "" if negative else " of at least 0"
        raise ValueError(f"{name}={value!r} must be a finite number{least}, or an object with __float__")


def check_parts(loss: RLOOLoss) -> None:
    """Raise if settings of an RLOOLoss have no effect together or contradict each other."""
    without_ratio, of_sequences = loss.ratio is no_ratio, loss.ratio is sequence_log_ratio
    proximal, correction, fraction = loss.old_log_probs == "proximal", loss.correction, loss.high_entropy_fraction
    checks = [
        (
            without_ratio and loss.surrogate not in (Clip(), Unclipped()),
            f"surrogate={loss.surrogate} has no effect with ratio='none', which is always 1; remove it, or set "
            "another ratio",
        ),
        (
            isinstance(loss.surrogate, DPPO) and loss.ratio is not token_log_ratio,
            f"surrogate={loss.surrogate} bounds the probability of each token and requires ratio='token'",
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
