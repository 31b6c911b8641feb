"""KL to the reference: place, coefficient and estimator in one object."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, SupportsFloat

import torch

from torchrl_rloo.functional.kl import KL_ESTIMATORS
from torchrl_rloo.objectives.choices import check_coefficient
from torchrl_rloo.objectives.controllers import AdaptiveKLCoefficient
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
        target: KL to hold, in nats per action token. ``coeff`` becomes an
            :class:`~torchrl_rloo.objectives.AdaptiveKLCoefficient` that starts at the given number. None keeps
            ``coeff`` constant.

    Raises:
        ValueError: if a value is out of range or a field has no effect at this place.

    Example:
        >>> KL("loss", 0.04)
        KL(where='loss', coeff=0.04, estimator='k3', clip=None, target=None)
    """

    where: Literal["reward", "token", "loss"] | None = "reward"
    coeff: SupportsFloat = 0.0
    estimator: str | None = None
    clip: float | None = None
    target: float | None = None

    def __post_init__(self) -> None:
        if self.where is not None and self.where not in PLACES:
            hint = did_you_mean(str(self.where), PLACES)
            raise ValueError(f"kl.where={self.where!r} is unknown{hint}; valid: {[*PLACES, None]}")
        check_coefficient("kl.coeff", self.coeff)
        if self.where is None:
            for name, unset in (("coeff", 0.0), ("estimator", None), ("clip", None), ("target", None)):
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
        if self.clip is not None and self.where != "token":
            raise ValueError(f"kl.clip={self.clip} has no effect with kl.where={self.where!r}; set kl.where='token'")
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
