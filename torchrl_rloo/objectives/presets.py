"""Published methods as settings of the parts they are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Preset:
    """Settings of the advantage, the KL and the loss of a published method.

    Attributes:
        paper: where it stands.
        advantage: arguments of :class:`~torchrl_rloo.replay.MCAdvantage`, or of :class:`~torchrl_rloo.replay.GAE` for a
            method with a critic.
        loss: arguments of :class:`~torchrl_rloo.objectives.RLOOLoss`.
        kl_in_reward: coefficient of :class:`~torchrl_rloo.envs.transforms.KLRewardTransform`, before the baseline.
        critic: whether the method learns a value function.
        to_set: arguments without a value of their own, each with what it is to be.

    Example:
        >>> preset = PRESETS["grpo"]
        >>> preset.advantage["estimator"], preset.loss["ratio"], preset.loss["kl_to_ref_coeff"]
        ('grpo', 'token', 0.04)
        >>> preset.with_kl(0.0).loss["kl_to_ref_coeff"]
        0.0
    """

    paper: str
    advantage: Mapping[str, Any]
    loss: Mapping[str, Any]
    kl_in_reward: float = 0.0
    critic: bool = False
    to_set: Mapping[str, str] = field(default_factory=dict)

    @property
    def kl_placement(self) -> str | None:
        """Where the KL to the reference enters: an attribute's name and, if it is a mapping, the key; None without."""
        for part in ("advantage", "loss"):
            for name in ("token_kl_coeff", "kl_coeff", "kl_to_ref_coeff"):
                if name in getattr(self, part):
                    return f"{part}.{name}"
        return "kl_in_reward" if self.kl_in_reward else None

    @property
    def kl_coeff(self) -> float:
        """The method's own KL coefficient; 0 if it has no KL."""
        part, _, name = (self.kl_placement or "kl_in_reward").partition(".")
        return getattr(self, part)[name] if name else getattr(self, part)

    def with_kl(self, coeff: Any) -> Preset:
        """The same method with another KL coefficient, where the method has its KL; before the baseline if it has none.

        Args:
            coeff: a number, or an object with ``__float__`` such as an adaptive coefficient.
        """
        part, _, name = (self.kl_placement or "kl_in_reward").partition(".")
        if not name:
            return replace(self, kl_in_reward=coeff)
        settings = {**getattr(self, part), name: coeff}
        if coeff == 0:
            settings.pop("kl_clip", None)  # bounds what is not there, which MCAdvantage refuses
        return replace(self, **{part: settings})


_WHITEN_GROUPS = {"whiten_groups": "MCAdvantage: groups of one whole batch, e.g. prompts per step"}

PRESETS: dict[str, Preset] = {
    "rloo": Preset(
        paper="Ahmadian et al. 2024, arXiv 2402.14740",
        advantage={"estimator": "rloo"},
        kl_in_reward=0.03,
        loss={"ratio": "none", "aggregation": "sequence_sum"},
    ),
    "rloo_trl": Preset(
        paper="TRL 1.16, RLOOTrainer",
        advantage={"estimator": "rloo"},
        kl_in_reward=0.05,
        loss={"ratio": "sequence", "clip_epsilon": 0.2, "aggregation": "sequence_sum"},
    ),
    "rloo_openrlhf": Preset(
        paper="OpenRLHF, --advantage_estimator rloo (arXiv 2405.11143)",
        advantage={"estimator": "rloo", "token_kl_coeff": 0.01, "kl_estimator": "k1", "kl_clip": 10.0},
        loss={"ratio": "token", "clip_epsilon": 0.2, "aggregation": "token_mean"},
    ),
    "grpo": Preset(
        paper="Shao et al. 2024, arXiv 2402.03300",
        advantage={"estimator": "grpo"},
        loss={
            "ratio": "token",
            "clip_epsilon": 0.2,
            "aggregation": "sequence_mean",
            "kl_to_ref_coeff": 0.04,
            "kl_estimator": "k3",
        },
    ),
    "dr_grpo": Preset(
        paper="Liu et al. 2025, arXiv 2503.20783",
        advantage={"estimator": "dr_grpo"},
        loss={"ratio": "token", "clip_epsilon": 0.2, "aggregation": "constant"},
        to_set={"aggregation_constant": "RLOOLoss: a fixed length in tokens, e.g. max_new_tokens"},
    ),
    "dapo": Preset(
        paper="Yu et al. 2025, arXiv 2503.14476",
        advantage={"estimator": "grpo"},
        loss={"ratio": "token", "clip_epsilon": (0.2, 0.28), "aggregation": "token_mean"},
    ),
    "gspo": Preset(
        paper="Zheng et al. 2025, arXiv 2507.18071",
        advantage={"estimator": "grpo"},
        loss={"ratio": "sequence_mean", "clip_epsilon": (3e-4, 4e-4), "aggregation": "sequence_mean"},
    ),
    "cispo": Preset(
        paper="MiniMax 2025, arXiv 2506.13585",
        advantage={"estimator": "grpo"},
        loss={"ratio": "token", "surrogate": "cispo", "aggregation": "token_mean"},
    ),
    "reinforce_pp": Preset(
        paper="Hu et al. 2025, arXiv 2501.03262",
        advantage={"estimator": "reinforce_pp", "token_kl_coeff": 0.01, "kl_estimator": "k1"},
        loss={"ratio": "token", "clip_epsilon": 0.2, "aggregation": "token_mean"},
        to_set=_WHITEN_GROUPS,
    ),
    "reinforce_pp_baseline": Preset(
        paper="Hu et al. 2025, arXiv 2501.03262",
        advantage={"estimator": "reinforce_pp_baseline"},
        loss={
            "ratio": "token",
            "clip_epsilon": 0.2,
            "aggregation": "token_mean",
            "kl_to_ref_coeff": 0.01,
            "kl_estimator": "k2",
        },
        to_set=_WHITEN_GROUPS,
    ),
    "ppo": Preset(
        paper="Schulman et al. 2017, arXiv 1707.06347; per-token KL: Ouyang et al. 2022, arXiv 2203.02155",
        advantage={"discount": 1.0, "lam": 0.95, "kl_coeff": 0.02, "kl_estimator": "k1", "whiten": True},
        loss={"ratio": "token", "clip_epsilon": 0.2, "aggregation": "token_mean"},
        critic=True,
        to_set={"value_head": "GAE and ValueLoss: a ValueHead, trained beside the policy"},
    ),
}
