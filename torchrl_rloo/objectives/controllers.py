"""Coefficients that follow a measured value. Modules read a coefficient with ``float`` at each use."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from numbers import Real

from torchrl_rloo.functional.kl import adapt_coefficient

_LOGGER = logging.getLogger(__name__)
_MAX_GAIN = 5.0  # from here on, an error of -20 % could bring the coefficient to 0 or below


class AdaptiveKLCoefficient:
    """KL coefficient that grows while the KL is above its target and shrinks while it is below.

    See :func:`~torchrl_rloo.functional.kl.adapt_coefficient` (Ziegler et al. 2019, arXiv 1909.08593).

    Args:
        initial: initial coefficient, above 0.
        target: KL to hold, in nats, per token or per sequence like the measurements given to :meth:`update`.
        horizon: number of samples over which the coefficient can change by about 20 %.

    Raises:
        ValueError: if a value is not a finite number above 0.

    Example:
        >>> coefficient = AdaptiveKLCoefficient(0.1, target=6.0, horizon=1000)
        >>> coefficient.update(12.0, num_samples=100)
        >>> round(float(coefficient), 6)
        0.102
    """

    def __init__(self, initial: float, target: float, horizon: float = 10_000):
        for name, value in (("initial", initial), ("target", target), ("horizon", horizon)):
            if not isinstance(value, Real) or not 0 < value < math.inf:
                raise ValueError(f"{name}={value} must be a number above 0")
        self.target, self.horizon = float(target), float(horizon)
        self._value = float(initial)

    def __float__(self) -> float:
        return self._value

    def update(self, kl: float, num_samples: int) -> None:
        """Adapt the coefficient to a measured KL. A KL that is not finite is logged and changes nothing.

        Args:
            kl: measured KL, in the unit of ``target``.
            num_samples: number of samples of this step.

        Raises:
            ValueError: if ``num_samples`` is negative, or so large that the coefficient could reach 0.
        """
        if not 0 <= num_samples < _MAX_GAIN * self.horizon:
            raise ValueError(
                f"num_samples={num_samples} must be at least 0 and below {_MAX_GAIN:g} times horizon={self.horizon:g}"
            )
        if not math.isfinite(kl):
            _LOGGER.warning("kl=%s is not finite; the coefficient stays at %g", kl, self._value)
            return
        self._value = adapt_coefficient(self._value, float(kl), self.target, num_samples / self.horizon)

    def state_dict(self) -> dict[str, float]:
        """Return the current coefficient."""
        return {"value": self._value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore the coefficient from :meth:`state_dict`."""
        self._value = float(state["value"])
