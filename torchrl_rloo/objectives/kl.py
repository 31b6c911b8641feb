"""KL to the reference: place, coefficient and estimator in one object; and coefficients that follow a measured value.

Modules read a coefficient with ``float`` at each use.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Literal, SupportsFloat

import torch

from torchrl_rloo.functional.kl import KL_ESTIMATORS, adapt_coefficient
from torchrl_rloo.objectives.step import check_coefficient
from torchrl_rloo.runtime.lookup import did_you_mean

PLACES = ("reward", "token", "loss")


@dataclass(frozen=True)
class KL:
    """KL of the policy to the reference.

    Args:
        where: place of the KL. ``"reward"`` subtracts that of the whole trajectory from its reward before the baseline
            (:class:`~torchrl_rloo.envs.transforms.KLRewardTransform`). ``"token"`` rewards each action token with
            its negative KL, after the baseline (:class:`~torchrl_rloo.replay.MCAdvantage`). ``"loss"`` adds that of
            each action token to :class:`~torchrl_rloo.objectives.RLOOLoss`. None disables the KL.
        coeff: coefficient of at least 0, or an object with ``__float__`` that is read at each use.
        estimator: name in :data:`~torchrl_rloo.functional.kl.KL_ESTIMATORS`. None takes ``"k3"`` in the loss, where the
            gradient of k1 is 0 on average, and ``"k1"`` elsewhere.
        clip: bound of each token's KL, to ``[-clip, clip]``, for ``where="token"``. None disables it.
        discount: discount of the KL of later tokens, for ``where="token"`` in ``MCAdvantage``. 0 rewards each token
            with its own KL only, as on-policy distillation does. None takes the credit's, which is 1 by default.
        target: KL to hold, in nats per action token, or a window ``(low, high)``. ``coeff`` becomes an
            :class:`~torchrl_rloo.objectives.AdaptiveKLCoefficient` that starts at the given number. None keeps
            ``coeff`` constant.

    Raises:
        ValueError: if a value is out of range or a field has no effect at this place.

    Example:
        >>> KL("loss", 0.04)
        KL(where='loss', coeff=0.04, estimator='k3', clip=None, discount=None, target=None)
    """

    where: Literal["reward", "token", "loss"] | None = "reward"
    coeff: SupportsFloat = 0.0
    estimator: str | None = None
    clip: float | None = None
    discount: float | None = None
    target: float | Sequence[float] | None = None

    def __post_init__(self) -> None:
        if self.where is not None and self.where not in PLACES:
            hint = did_you_mean(str(self.where), PLACES)
            raise ValueError(f"kl.where={self.where!r} is unknown{hint}; valid: {[*PLACES, None]}")
        check_coefficient("kl.coeff", self.coeff)
        if self.where is None:
            for name, unset in (
                ("coeff", 0.0),
                ("estimator", None),
                ("clip", None),
                ("discount", None),
                ("target", None),
            ):
                if getattr(self, name) != unset:
                    raise ValueError(f"kl.{name}={getattr(self, name)} has no effect with kl.where=None; set kl.where")
            return
        # Take the default estimator of the place; reject an unknown one, and a clip without effect
        if self.estimator is None:
            object.__setattr__(self, "estimator", "k3" if self.where == "loss" else "k1")
        if self.estimator not in KL_ESTIMATORS:
            hint = did_you_mean(self.estimator, KL_ESTIMATORS)
            raise ValueError(f"kl.estimator={self.estimator!r} is unknown{hint}; valid: {sorted(KL_ESTIMATORS)}")
        if self.clip is not None and not 0 < self.clip < math.inf:
            raise ValueError(f"kl.clip={self.clip} must be None or a number above 0")
        if self.discount is not None and not 0 <= self.discount <= 1:
            raise ValueError(f"kl.discount={self.discount} must be None or in [0, 1]")
        for name in ("clip", "discount"):
            if (value := getattr(self, name)) is not None and self.where != "token":
                raise ValueError(f"kl.{name}={value} has no effect with kl.where={self.where!r}; set kl.where='token'")
        # Let the coefficient follow the target
        if self.target is not None and not hasattr(self.coeff, "update"):
            if not float(self.coeff):
                raise ValueError(f"kl.target={self.target} requires a coefficient to adapt; set kl.coeff above 0")
            object.__setattr__(self, "coeff", AdaptiveKLCoefficient(float(self.coeff), self.target))

    @property
    def is_on(self) -> bool:
        """True if the KL has an effect, now or later."""
        return self.where is not None and not (isinstance(self.coeff, int | float) and self.coeff == 0)

    def estimate(self, log_probs: torch.Tensor, ref_log_probs: torch.Tensor) -> torch.Tensor:
        """Estimate the KL of each token and clip it; same shape as the log-probs."""
        kl = KL_ESTIMATORS[self.estimator](log_probs, ref_log_probs)
        return kl if self.clip is None else kl.clamp(-self.clip, self.clip)


_LOGGER = logging.getLogger(__name__)
_MAX_GAIN = 5.0  # from here on, an error of -20 % could bring the coefficient to 0 or below


class AdaptiveKLCoefficient:
    """KL coefficient that grows while the KL is above its target and shrinks while it is below.

    See :func:`~torchrl_rloo.functional.kl.adapt_coefficient` (Ziegler et al. 2019, arXiv 1909.08593).

    Args:
        initial: initial coefficient, above 0.
        target: KL to hold, in nats, per token or per sequence like the measurements given to :meth:`update`; or a
            window ``(low, high)``, in which the coefficient stays as it is.
        horizon: number of samples over which the coefficient can change by about 20 %.

    Raises:
        ValueError: if a value is not a finite number above 0.

    Example:
        >>> coefficient = AdaptiveKLCoefficient(0.1, target=6.0, horizon=1000)
        >>> coefficient.update(12.0, num_samples=100)
        >>> round(float(coefficient), 6)
        0.102
    """

    def __init__(self, initial: float, target: float | Sequence[float], horizon: float = 10_000):
        window = (target, target) if isinstance(target, Real) or target is None else tuple(target)
        for name, value in (("initial", initial), *(("target", bound) for bound in window), ("horizon", horizon)):
            if not isinstance(value, Real) or not 0 < value < math.inf:
                raise ValueError(f"{name}={value} must be a number above 0")
        if len(window) != 2 or window[0] > window[1]:
            raise ValueError(f"target={target} must be a number, or a window (low, high) with low <= high")
        self.target, self.horizon = target, float(horizon)
        self._window = tuple(map(float, window))
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
        self._value = adapt_coefficient(self._value, float(kl), self._window, num_samples / self.horizon)

    def state_dict(self) -> dict[str, float]:
        """Return the current coefficient."""
        return {"value": self._value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore the coefficient from :meth:`state_dict`."""
        self._value = float(state["value"])


class AdaptiveEntropyCoefficient:
    """Entropy coefficient that grows while the entropy is at most its target, and is off while it is above.

    Each update adds ``step`` at or below the target and subtracts it above. ``float`` is 0 after an entropy above the
    target, and before the first update.

    Source: He et al. 2025, arXiv 2505.22312; defaults and ties of TRL.

    Args:
        target: entropy to hold, in nats per action token.
        initial: initial coefficient.
        step: change of the coefficient in an update.
        minimum: lower bound of the coefficient.
        maximum: upper bound of the coefficient.

    Raises:
        ValueError: if ``target`` or ``step`` is not above 0, or the others are not finite, at least 0 and in order.

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
        self,
        target: float = 0.2,
        initial: float = 0.0,
        step: float = 0.005,
        minimum: float = 0.0,
        maximum: float = 1.0,
    ):
        for name, value in (("target", target), ("step", step)):
            if not 0 < value < math.inf:
                raise ValueError(f"{name}={value} must be a number above 0")
        if not 0 <= minimum <= initial <= maximum < math.inf:
            raise ValueError(
                f"minimum={minimum}, initial={initial}, maximum={maximum} must be finite, at least 0 and in order"
            )
        self.target, self.step, self.minimum, self.maximum = float(target), float(step), float(minimum), float(maximum)
        self._value, self._on = float(initial), False

    def __float__(self) -> float:
        return self._value if self._on else 0.0

    def update(self, entropy: float) -> None:
        """Adapt the coefficient to a measured entropy, in nats. One that is not finite is logged and changes nothing.

        Args:
            entropy: measured entropy.
        """
        if not math.isfinite(entropy):
            _LOGGER.warning("entropy=%s is not finite; the coefficient stays at %g", entropy, float(self))
            return
        self._on = entropy <= self.target
        moved = self._value + (self.step if self._on else -self.step)
        self._value = min(max(moved, self.minimum), self.maximum)

    def state_dict(self) -> dict[str, float | bool]:
        """Return the current coefficient, and whether it is on."""
        return {"value": self._value, "on": self._on}

    def load_state_dict(self, state: Mapping[str, float | bool]) -> None:
        """Restore the coefficient from :meth:`state_dict`."""
        self._value, self._on = float(state["value"]), bool(state["on"])


def token_kl(kl: KL | None, owner: str) -> KL | None:
    """Return the KL per token that a transform applies, or None if it is off; refuse one of another place."""
    if kl is not None and not isinstance(kl, KL):
        raise TypeError(f"kl={kl!r} must be a KL, such as KL('token', 0.01)")
    if kl is not None and kl.where != "token":
        raise ValueError(f"kl={kl}: {owner} requires a KL with where='token'; set it, or leave kl out")
    return kl if kl is not None and kl.is_on else None
