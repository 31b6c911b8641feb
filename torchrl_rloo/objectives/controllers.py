"""Coefficients that follow what training measures. Whoever takes a coefficient reads it with ``float`` at each use."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

from torchrl_rloo.functional.kl import adapted_coefficient

_LOGGER = logging.getLogger(__name__)
_MAX_GAIN = 5.0  # from here on one step down, of 20 %, could make the coefficient negative


class AdaptiveKLCoefficient:
    """A KL coefficient that grows while the KL is above its target and shrinks while it is below.

    See :func:`~torchrl_rloo.functional.kl.adapted_coefficient` (Ziegler et al. 2019, arXiv 1909.08593).

    Args:
        initial: the coefficient to begin with, above 0.
        target: the KL to hold, in nats, per token or per sequence as :meth:`update` is given it.
        horizon: samples over which the coefficient can change by about 20 %.

    Example:
        >>> coefficient = AdaptiveKLCoefficient(0.1, target=6.0, horizon=1000)
        >>> coefficient.update(12.0, num_samples=100)
        >>> round(float(coefficient), 6)
        0.102
    """

    def __init__(self, initial: float, target: float, horizon: float = 10_000):
        for name, value in (("initial", initial), ("target", target), ("horizon", horizon)):
            if not 0 < value < math.inf:
                raise ValueError(f"{name}={value} must be a number above 0")
        self.target, self.horizon = float(target), float(horizon)
        self._value = float(initial)

    def __float__(self) -> float:
        return self._value

    def update(self, kl: float, num_samples: int) -> None:
        """Takes a measured KL into account; one that is not finite changes nothing, and is logged.

        Args:
            kl: in the unit of ``target``.
            num_samples: how many samples this step had.

        Raises:
            ValueError: if ``num_samples`` is negative, or so large for the horizon that the coefficient could change
                its sign.
        """
        if not 0 <= num_samples < _MAX_GAIN * self.horizon:
            raise ValueError(
                f"num_samples={num_samples} must be 0 to below {_MAX_GAIN:g} times horizon={self.horizon:g}"
            )
        if not math.isfinite(kl):
            _LOGGER.warning("the KL is %s; the coefficient stays at %g", kl, self._value)
            return
        self._value = adapted_coefficient(self._value, float(kl), self.target, num_samples / self.horizon)

    def state_dict(self) -> dict[str, float]:
        """The coefficient of now."""
        return {"value": self._value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restores :meth:`state_dict`."""
        self._value = float(state["value"])


class AdaptiveEntropyCoefficient:
    r"""An entropy bonus that grows while the entropy is below its target, and is off while it is above.

    .. math:: c_{k+1} = c_k + \Delta \, \mathrm{sign}(H^* - H_k), \qquad \alpha_k = c_k \, [H_k \le H^*]

    Skywork-OR1 (He et al. 2025, arXiv 2505.22312). ``float`` is :math:`\alpha` at the entropy last given to
    :meth:`update`, and ``initial`` before that.

    Args:
        target: :math:`H^*`, entropy to hold, in nats per action token.
        initial: :math:`c_0`.
        step: :math:`\Delta`.
        minimum: the least that :math:`c` can be.
        maximum: the most that :math:`c` can be.

    Example:
        >>> coefficient = AdaptiveEntropyCoefficient(target=0.2)
        >>> coefficient.update(0.1)
        >>> float(coefficient)
        0.005
        >>> coefficient.update(0.3)
        >>> float(coefficient)
        0.0
    """

    def __init__(
        self, target: float, *, initial: float = 0.0, step: float = 0.005, minimum: float = 0.0, maximum: float = 1.0
    ):
        if not 0 < target < math.inf:
            raise ValueError(f"target={target} must be an entropy above 0, in nats")
        if not 0 < step < math.inf:
            raise ValueError(f"step={step} must be a number above 0")
        if not 0 <= minimum <= initial <= maximum < math.inf:
            raise ValueError(
                f"minimum={minimum}, initial={initial} and maximum={maximum} must be finite, at least 0 and in order"
            )
        self.target, self.step, self.minimum, self.maximum = float(target), float(step), float(minimum), float(maximum)
        self._value, self._on = float(initial), True

    def __float__(self) -> float:
        return self._value if self._on else 0.0

    def update(self, entropy: float) -> None:
        """Takes a measured entropy into account, in nats; one that is not finite changes nothing, and is logged."""
        entropy = float(entropy)
        if not math.isfinite(entropy):
            _LOGGER.warning("the entropy is %s; the coefficient stays at %g", entropy, float(self))
            return
        direction = (entropy < self.target) - (entropy > self.target)
        self._value = min(max(self._value + direction * self.step, self.minimum), self.maximum)
        self._on = entropy <= self.target

    def state_dict(self) -> dict[str, float | bool]:
        """The coefficient of now, and whether it is on."""
        return {"value": self._value, "on": self._on}

    def load_state_dict(self, state: Mapping[str, float | bool]) -> None:
        """Restores :meth:`state_dict`."""
        self._value, self._on = float(state["value"]), bool(state["on"])
