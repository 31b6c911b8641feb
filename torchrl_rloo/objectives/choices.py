"""Reading the choices that make up a loss: names to functions, settings to parts, and what cannot go together."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torchrl_rloo.functional import SURROGATES, settings_of


def check_actor(actor_network) -> None:
    """Refuses what cannot score rows, or has nothing to learn from."""
    if not callable(getattr(actor_network, "score", None)):
        raise ValueError(f"actor_network must have a score(rows) method, {type(actor_network).__name__} has none")
    if getattr(actor_network, "generate", False):
        raise ValueError("actor_network generates; pass actor_network.get_new_version(generate=False)")
    if getattr(getattr(actor_network, "distribution", None), "temperature", 1) == 0:
        raise ValueError("temperature=0 samples the same completion of a prompt every time: nothing to compare")


def named(argument: str, value: str | Callable, table: Mapping[str, Callable]) -> Callable:
    """The function of a name, or the function itself."""
    if callable(value):
        return value
    if not isinstance(value, str) or value not in table:
        raise ValueError(f"{argument}={value!r} must be one of {sorted(table)} or a function")
    return table[value]


def bound(argument, value, table, settings: Mapping[str, Any] | None, more: Mapping[str, Any] = {}) -> Callable:
    """The function of a name with its settings; refuses those it does not have."""
    function, settings = named(argument, value, table), {**more, **(settings or {})}
    if isinstance(value, str) and (unknown := sorted(set(settings) - set(settings_of(function)))):
        raise TypeError(f"{argument}={value!r} has no settings {unknown}; it has {sorted(settings_of(function))}")
    if not isinstance(value, str) and more and not set(more) <= set(settings_of(function)):
        raise TypeError(f"{argument} is a function without the settings {sorted(more)}: leave clip_epsilon out")
    for name, setting in settings.items() if isinstance(value, str) else ():
        low, high = _RANGES.get(name, (-math.inf, math.inf))
        if setting is not None and not low <= setting <= high:
            raise ValueError(f"{argument}_kwargs: {name}={setting} must be from {low:g} to {high:g}")
    bounds = {k: v for k, v in {**settings_of(function), **settings}.items() if k in ("low", "high")}
    if len(bounds) == 2 and bounds["low"] > bounds["high"]:
        raise ValueError(f"{argument}_kwargs: low={bounds['low']} must not be above high={bounds['high']}")
    return partial(function, **settings) if settings else function


_TINY = 1e-6
_RANGES = {
    "epsilon_low": (_TINY, 1.0),
    "epsilon_high": (_TINY, math.inf),
    "dual_clip": (1 + _TINY, math.inf),
    "tau_positive": (_TINY, math.inf),
    "tau_negative": (_TINY, math.inf),
    "delta": (_TINY, 1.0),
    "low": (0.0, math.inf),
    "high": (_TINY, math.inf),
    "token_high": (_TINY, math.inf),
    **dict.fromkeys(("k_positive", "k_negative", "lambda_positive", "lambda_negative"), (0.0, math.inf)),
}


def is_on(coefficient) -> bool:
    """Whether a coefficient is other than 0, or may come to be."""
    return not isinstance(coefficient, int | float) or coefficient != 0


def epsilons(clip_epsilon, surrogate) -> dict[str, float]:
    """The bounds of the ratio as settings of the surrogate."""
    if isinstance(clip_epsilon, str) and clip_epsilon == "default":
        return {}
    bounds = (1.0, math.inf) if clip_epsilon is None else clip_epsilon
    bounds = tuple(bounds) if isinstance(bounds, Sequence) and not isinstance(bounds, str) else (bounds, bounds)
    numbers = all(isinstance(b, int | float) and not isinstance(b, bool) for b in bounds)
    if len(bounds) != 2 or not numbers or not (0 < bounds[0] <= 1 and bounds[1] > 0):
        raise ValueError(f"clip_epsilon={clip_epsilon} must be one or two positive numbers, the lower at most 1")
    if isinstance(surrogate, str) and "epsilon_low" not in settings_of(SURROGATES.get(surrogate, lambda: None)):
        raise ValueError(f"clip_epsilon={clip_epsilon} has no use with surrogate={surrogate!r}: leave it out")
    return {"epsilon_low": float(bounds[0]), "epsilon_high": float(bounds[1])}


def check_combination(
    loss, ratio, surrogate, surrogate_kwargs, clip_epsilon, aggregation, correction, correction_kwargs
) -> None:
    """Refuses choices of an RLOOLoss that cannot go together, and values out of range."""
    needs_constant = aggregation == "constant"
    checks = [
        (
            ratio == "none" and (surrogate != "clip" or clip_epsilon not in ("default", None) or surrogate_kwargs),
            f"ratio='none' is always 1, so surrogate={surrogate!r} with clip_epsilon={clip_epsilon} and "
            f"surrogate_kwargs={surrogate_kwargs} would do nothing: leave them out, or choose another ratio",
        ),
        (
            clip_epsilon != "default" and bool({"epsilon_low", "epsilon_high"} & set(surrogate_kwargs or ())),
            f"clip_epsilon={clip_epsilon} and surrogate_kwargs={surrogate_kwargs} both set the bounds",
        ),
        (
            surrogate == "dppo" and ratio != "token",
            f"surrogate='dppo' bounds the shift of each token's probability: it needs ratio='token', not {ratio!r}",
        ),
        (
            needs_constant and loss.aggregation_constant is None,
            "aggregation='constant' divides by a fixed length: set aggregation_constant, e.g. to max_new_tokens",
        ),
        (
            not needs_constant and isinstance(aggregation, str) and loss.aggregation_constant is not None,
            f"aggregation_constant={loss.aggregation_constant} has no use with aggregation={aggregation!r}",
        ),
        (
            loss.aggregation_constant is not None and not 0 < loss.aggregation_constant < math.inf,
            f"aggregation_constant={loss.aggregation_constant} must be a number above 0",
        ),
        (
            loss.old_log_probs not in ("sampler", "proximal"),
            f"old_log_probs={loss.old_log_probs!r} must be 'sampler' or 'proximal'",
        ),
        (
            loss.correction is not None and loss.old_log_probs == "sampler" and ratio != "none",
            "correction is for the difference between the sampler's and the training model's log-probs, but with "
            "old_log_probs='sampler' the ratio holds it already: set old_log_probs='proximal' or ratio='none'",
        ),
        (
            correction in ("tis", "icepop", "seq_mask_tis") and ratio == "sequence",
            f"correction={correction!r} weighs tokens, but ratio='sequence' has one objective for all of them: use "
            "'sequence_truncate' or 'sequence_mask', or another ratio",
        ),
        (
            loss.high_entropy_fraction is not None and ratio == "sequence",
            "high_entropy_fraction chooses tokens, but ratio='sequence' has one objective for all of them: use another",
        ),
        (
            loss.correction is None and bool(correction_kwargs),
            f"correction_kwargs={correction_kwargs} are given without a correction",
        ),
        (
            ratio == "none" and loss.old_log_probs == "proximal" and loss.correction is None,
            "old_log_probs='proximal' would not be read: ratio='none' has no ratio, and there is no correction",
        ),
        (
            loss.kl_importance_weighted and not is_on(loss.kl_to_ref_coeff) and not is_on(loss.kl_to_inference_coeff),
            "kl_importance_weighted=True has nothing to weight: both KL coefficients are 0",
        ),
        (
            loss.high_entropy_fraction is not None and not 0 < loss.high_entropy_fraction <= 1,
            f"high_entropy_fraction={loss.high_entropy_fraction} must be None or in (0, 1]",
        ),
        (
            loss.off_policy_mask_threshold is not None and not math.isfinite(loss.off_policy_mask_threshold),
            f"off_policy_mask_threshold={loss.off_policy_mask_threshold} must be None or a number",
        ),
    ]
    for failed, message in checks:
        if failed:
            raise ValueError(message)
    for name in ("kl_to_ref_coeff", "kl_to_inference_coeff", "router_loss_coeff", "entropy_coeff"):
        given = getattr(loss, name)
        value = float(given) if hasattr(given, "__float__") else math.nan
        if not math.isfinite(value) or (value < 0 and name != "entropy_coeff"):
            raise ValueError(f"{name}={given!r} must be a finite number of at least 0, or an object with __float__")
