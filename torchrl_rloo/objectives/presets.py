"""Published methods as settings of losses and advantages."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from torchrl_rloo.objectives.kl import KL, AdaptiveEntropyCoefficient, AdaptiveKLCoefficient
from torchrl_rloo.objectives.rloo import RLOOLoss
from torchrl_rloo.runtime.lookup import did_you_mean


@dataclass(frozen=True)
class Preset:
    """Settings of the advantage, the KL and the loss of a method.

    Attributes:
        paper: source of the method.
        advantage: arguments of :class:`~torchrl_rloo.replay.MCAdvantage` without the KL, or of
            :class:`~torchrl_rloo.replay.TokenGAE` for a method with a critic.
        loss: arguments of :class:`~torchrl_rloo.objectives.RLOOLoss` without the KL.
        kl: KL to the reference. None disables it.
        critic: True if the method learns a value function.

    Example:
        >>> method = make_method("grpo", num_generations=8, kl="default")
        >>> method.loss_arguments["ratio"], method.loss_arguments["kl_to_ref_coeff"]
        ('token', 0.04)
    """

    paper: str
    advantage: Mapping[str, Any]
    loss: Mapping[str, Any]
    kl: KL | None = None
    critic: bool = False

    @property
    def adaptive_kl(self) -> AdaptiveKLCoefficient | None:
        """Coefficient of the KL if it follows a target; None if it is constant."""
        coeff = None if self.kl is None else self.kl.coeff
        return coeff if isinstance(coeff, AdaptiveKLCoefficient) else None

    @property
    def adaptive_entropy(self) -> AdaptiveEntropyCoefficient | None:
        """Coefficient of the entropy bonus if it follows a target; None if it is constant."""
        coeff = self.loss.get("entropy_coeff")
        return coeff if isinstance(coeff, AdaptiveEntropyCoefficient) else None

    @property
    def loss_arguments(self) -> dict[str, Any]:
        """Arguments of ``RLOOLoss``, including a KL in the loss."""
        if self.kl is None or self.kl.where != "loss":
            return dict(self.loss)
        return {**self.loss, "kl_to_ref_coeff": self.kl.coeff, "kl_estimator": self.kl.estimator}

    @property
    def advantage_arguments(self) -> dict[str, Any]:
        """Arguments of ``MCAdvantage`` (or ``TokenGAE``), including a KL per token."""
        token_kl = {"kl": self.kl} if self.kl is not None and self.kl.where == "token" else {}
        return {**self.advantage, **token_kl}

    @property
    def reward_kl_arguments(self) -> dict[str, Any]:
        """Arguments of ``KLRewardTransform``. For a KL elsewhere the coefficient is 0: it only records log-probs."""
        if self.kl is None or self.kl.where != "reward":
            return {"kl_to_ref_coeff": 0.0}
        return {"kl_to_ref_coeff": self.kl.coeff, "estimator": self.kl.estimator}


def _method(
    paper: str, estimator: str, ratio: str, surrogate: Any, aggregation: str, kl: KL | None = None, **others: Any
) -> Preset:
    """Return a method without a critic; ``others`` are arguments of the advantage, and ``covariance`` of the loss."""
    loss = {"ratio": ratio, "surrogate": surrogate, "aggregation": aggregation}
    loss["covariance"] = others.pop("covariance", None)
    return Preset(paper, {"estimator": estimator} | others, {k: v for k, v in loss.items() if v is not None}, kl)


_CLIP = {"name": "clip", "low": 0.2}
_COVARIANCE = "Cui et al. 2025, arXiv 2505.22617"
_HU = "Hu et al. 2025, arXiv 2501.03262"
_OPENRLHF = "OpenRLHF, --advantage_estimator rloo (arXiv 2405.11143)"

PRESETS: dict[str, Preset] = {  # paper, estimator, ratio, surrogate, aggregation, KL
    "rloo": _method("Ahmadian et al. 2024, arXiv 2402.14740", "rloo", "none", None, "sequence_sum", KL("reward", 0.03)),
    "rloo_trl": _method("TRL 1.16, RLOOTrainer", "rloo", "sequence", _CLIP, "sequence_sum", KL("reward", 0.05)),
    "rloo_openrlhf": _method(_OPENRLHF, "rloo", "token", _CLIP, "token_mean", KL("token", 0.01, clip=10.0)),
    "grpo": _method(
        "Shao et al. 2024, arXiv 2402.03300", "grpo", "token", _CLIP, "sequence_mean", KL("loss", 0.04, "k3")
    ),
    "dr_grpo": _method("Liu et al. 2025, arXiv 2503.20783", "dr_grpo", "token", _CLIP, "constant"),
    "dapo": _method("Yu et al. 2025, arXiv 2503.14476", "grpo", "token", _CLIP | {"high": 0.28}, "token_mean"),
    "gspo": _method(
        "Zheng et al. 2025, arXiv 2507.18071",
        "grpo",
        "sequence_mean",
        _CLIP | {"low": 3e-4, "high": 4e-4},
        "sequence_mean",
    ),
    "luspo": _method(
        "Liu et al. 2026, arXiv 2602.05261",
        "grpo",
        "sequence_mean",
        _CLIP | {"low": 2e-3, "high": 2.5e-3},
        "sequence_sum",
    ),
    "gmpo": _method("Zhao et al. 2025, arXiv 2507.20673", "grpo", "token", "gmpo", "sequence_mean"),
    "cispo": _method("MiniMax 2025, arXiv 2506.13585", "grpo", "token", "cispo", "token_mean"),
    "sapo": _method("Gao et al. 2025, arXiv 2511.20347", "grpo", "token", "sapo", "sequence_mean"),
    "dppo": _method("arXiv 2602.04879", "grpo", "token", "dppo", "token_mean"),
    "vespo": _method("arXiv 2602.10693", "grpo", "sequence", "vespo", "token_mean"),
    "clip_cov": _method(_COVARIANCE, "grpo", "token", _CLIP, "token_mean", covariance="clip"),
    "kl_cov": _method(_COVARIANCE, "grpo", "token", "unclipped", "token_mean", covariance="kl"),
    "gpg": _method(
        "Chu et al. 2025, arXiv 2504.02546", "dr_grpo", "none", None, "token_mean", normalize="signal_share"
    ),
    "gdpo": _method(
        "arXiv 2601.05242", "grpo", "token", _CLIP, "sequence_mean", credit="normalize_then_sum", normalize="whiten"
    ),
    "maxrl": _method("Tajwar et al. 2026, arXiv 2602.02710", "maxrl", "none", None, "sequence_sum"),
    "opo": _method("Hao et al. 2025, arXiv 2505.23585", "opo", "none", None, "sequence_sum"),
    "remax": _method("Li et al. 2023, arXiv 2310.10505", "remax", "none", None, "sequence_sum"),
    "dro": _method("Richemond et al. 2024, arXiv 2405.19107", "rloo", "sequence", "dro", "sequence_sum"),
    "pass_at_k": _method("Chen et al. 2025, arXiv 2508.10751", "pass_at_k", "token", _CLIP, "token_mean"),
    "reinforce_pp": _method(_HU, "reinforce", "token", _CLIP, "token_mean", KL("token", 0.01), normalize="whiten"),
    "reinforce_pp_baseline": _method(
        _HU, "dr_grpo", "token", _CLIP, "token_mean", KL("loss", 0.01, "k2"), normalize="whiten"
    ),
    "ppo": Preset(
        paper="Schulman et al. 2017, arXiv 1707.06347; per-token KL: Ouyang et al. 2022, arXiv 2203.02155",
        advantage={"discount": 1.0, "lam": 0.95, "whiten": True},
        kl=KL("token", 0.02),
        loss={"ratio": "token", "surrogate": _CLIP, "aggregation": "token_mean"},
        critic=True,
    ),
}

_KL_KEYS = {
    "kl": "kl",
    "kl_to_ref_coeff": "kl.coeff",
    "token_kl_coeff": "kl.coeff",
    "kl_coeff": "kl.coeff",
    "kl_estimator": "kl.estimator",
    "kl_clip": "kl.clip",
    "kl_discount": "kl.discount",
    "kl_target": "kl.target",
}
LOSS_KEYS = tuple(inspect.signature(RLOOLoss.__init__).parameters)[2:]
ADVANTAGE_KEYS = ("estimator", "credit", "normalize", "process_group", "max_pending_groups")
GAE_KEYS = ("discount", "lam", "whiten", "process_group")


def make_method(
    name: str,
    *,
    loss: Mapping[str, Any] = {},
    advantage: Mapping[str, Any] = {},
    kl: KL | Mapping[str, Any] | Literal["default"] | None = None,
    max_new_tokens: int | None = None,
    prompts_per_step: int | None = None,
    num_generations: int | None = None,
    reward_weights: Sequence[float] | None = None,
    critic: bool = False,
) -> Preset:
    """Build a published method with changed settings.

    Args:
        name: name in :data:`PRESETS`.
        loss: arguments of :class:`~torchrl_rloo.objectives.RLOOLoss` that replace the method's. A mapping without a
            name, e.g. ``{"surrogate": {"low": 0.1}}``, changes fields of the method's own choice.
            ``{"entropy_coeff": {"target": 0.2}}`` holds the arguments of an
            :class:`~torchrl_rloo.objectives.AdaptiveEntropyCoefficient`.
        advantage: arguments of :class:`~torchrl_rloo.replay.MCAdvantage` that replace the method's, likewise.
        kl: KL to the reference. None disables it. ``"default"`` keeps the method's. A mapping changes fields of the
            method's KL: one moved to another place keeps only its coefficient, and a method without a KL gets one in
            the reward. A :class:`~torchrl_rloo.objectives.KL` replaces it.
        max_new_tokens: default length of ``aggregation="constant"``, in tokens.
        prompts_per_step: default number of groups over which advantages are normalized.
        num_generations: members of a group. None reads each row's ``"group_size"``.
        reward_weights: default weights of ``credit="normalize_then_sum"``.
        critic: True if the loop trains a critic; ``advantage`` then has arguments of
            :class:`~torchrl_rloo.replay.TokenGAE`.

    Returns:
        The method with its ``loss_arguments``, ``advantage_arguments`` and ``reward_kl_arguments``.

    Raises:
        ValueError: if a name or key is unknown, a KL is set outside ``kl``, or a required number is missing. Also if
            the method needs a critic that the loop does not train, or has none.

    Example:
        >>> method = make_method("rloo", kl={"coeff": 0.1}, loss={"entropy_coeff": 0.01})
        >>> method.kl.where, method.reward_kl_arguments, method.loss["entropy_coeff"]
        ('reward', {'kl_to_ref_coeff': 0.1, 'estimator': 'k1'}, 0.01)
    """
    if name not in PRESETS:
        known = [k for k, preset in PRESETS.items() if preset.critic == critic]
        raise ValueError(f"algorithm={name!r} is unknown{did_you_mean(name, known)}; valid: {known}")
    preset = PRESETS[name]
    if preset.critic != critic:
        needs, use = (
            ("needs a critic, which is not trained here", "ppo") if preset.critic else ("has no critic", "rloo")
        )
        raise ValueError(f"algorithm={name!r} {needs}; use torchrl-rloo run {use}")
    # Merge the given settings into those of the method
    _check_keys("loss", loss, LOSS_KEYS, "loss")
    _check_keys("advantage", advantage, GAE_KEYS if critic else ADVANTAGE_KEYS, "token")
    loss, advantage = _merge_settings(preset.loss, loss), _merge_settings(preset.advantage, advantage)

    if isinstance(entropy := loss.get("entropy_coeff"), Mapping):
        known = tuple(inspect.signature(AdaptiveEntropyCoefficient).parameters)
        if unknown := [key for key in entropy if key not in known]:
            hint = did_you_mean(unknown[0], known)
            raise ValueError(f"loss.entropy_coeff.{unknown[0]} is unknown{hint}; valid: {list(known)}")
        loss["entropy_coeff"] = AdaptiveEntropyCoefficient(**entropy)

    # Fill in the numbers that depend on the run
    if _get_name(loss["aggregation"]) == "constant":
        loss["aggregation"] = _fill_field("loss.aggregation", loss["aggregation"], length=max_new_tokens)
    if _get_name(advantage.get("credit")) == "normalize_then_sum":
        advantage["credit"] = _fill_field("advantage.credit", advantage["credit"], weights=reward_weights)
        advantage.setdefault("normalize", "whiten")  # the last step of GDPO
    if advantage.get("normalize") is not None:
        advantage["normalize"] = _fill_field("advantage.normalize", advantage["normalize"], groups=prompts_per_step)
        groups = _get_field(advantage["normalize"], "groups")
        if prompts_per_step is not None and groups > prompts_per_step:
            raise ValueError(
                f"advantage.normalize.groups={groups} must be at most prompts_per_step={prompts_per_step}, or no batch "
                "would be complete"
            )
    if num_generations is not None and not critic:
        advantage["num_generations"] = num_generations
    merged = replace(preset, loss=loss, advantage=advantage, kl=_merge_kl(preset.kl, kl))
    _check_kl(merged)
    return merged


def _check_kl(method: Preset) -> None:
    """Raise if the advantages or the loss of a method cannot use its KL."""
    where, ratio = method.kl and method.kl.where, method.loss["ratio"]
    credit = _get_name(method.advantage.get("credit"))
    if where == "reward" and credit not in (None, "trajectory", "optimal_token"):
        raise ValueError(
            f"kl.where='reward' has no effect with advantage.credit={credit!r}, which does not read the summed reward; "
            "set kl.where='token' or 'loss'"
        )
    if where == "token" and _get_name(ratio) == "sequence":
        raise ValueError(
            "kl.where='token' gives each token an advantage and cannot be combined with loss.ratio='sequence'; set "
            "kl.where='reward' or 'loss', or loss.ratio='token'"
        )


def _check_keys(argument: str, given: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    """Raise on unknown keys and on keys of the KL, which is set in one place."""
    for key in given:
        if key in _KL_KEYS:
            raise ValueError(f"{argument}.{key} belongs to kl; set {_KL_KEYS[key]}=... (with kl.where={where})")
        if key not in known:
            valid = [k for k in known if k not in _KL_KEYS]
            raise ValueError(f"{argument}.{key} is unknown{did_you_mean(key, valid)}; valid: {valid}")


def _merge_settings(own: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings updated with ``given``; a mapping without a name changes fields of the choice."""
    result = {**own, **given}
    for key, value in given.items():
        if isinstance(value, Mapping) and "name" not in value and key in own:
            result[key] = {**_as_mapping(own[key]), **value}
    return result


def _as_mapping(spec: str | Mapping[str, Any]) -> dict[str, Any]:
    return {"name": spec} if isinstance(spec, str) else dict(spec)


def _get_name(spec: Any) -> str | None:
    return _as_mapping(spec).get("name") if isinstance(spec, str | Mapping) else None


def _get_field(spec: Any, name: str) -> Any:
    return spec[name] if isinstance(spec, Mapping) else getattr(spec, name)


def _fill_field(argument: str, spec: Any, **field: Any) -> Any:
    """Return a choice with a field of the run, unless the field is set."""
    (name, value), *_ = field.items()
    if not isinstance(spec, str | Mapping) or name in _as_mapping(spec):
        return spec
    if value is None:
        raise ValueError(f"{argument}={_get_name(spec)!r} requires {name}; set {argument}.{name}")
    return _as_mapping(spec) | {name: value}


def _merge_kl(method_kl: KL | None, chosen: KL | Mapping[str, Any] | str | None) -> KL | None:
    """Return the KL of a method updated with ``chosen``; None if it is off."""
    if isinstance(chosen, str) and chosen != "default":
        raise ValueError(f"kl={chosen!r} must be None, 'default', a mapping or a KL")
    # None turns the KL off, and 'default' keeps that of the method
    if chosen is None or isinstance(chosen, str):
        return method_kl if chosen else None
    if not isinstance(chosen, KL | Mapping):
        raise TypeError(f"kl={chosen!r} must be None, 'default', a KL such as KL('reward', 0.05), or a mapping")
    if isinstance(chosen, Mapping):
        # Reject unknown fields, and a place without a coefficient
        known = [f.name for f in fields(KL)]
        for key in chosen:
            if key not in known:
                raise ValueError(f"kl.{key} is unknown{did_you_mean(key, known)}; valid: {known}")
        if method_kl is None and chosen.get("where") is not None and chosen.get("coeff") is None:
            raise ValueError(
                f"kl.where={chosen['where']!r} requires kl.coeff, because the method has no default KL; set kl.coeff"
            )
        # Fill in the method's values, of which only the coefficient applies in another place
        base = asdict(method_kl or KL())
        if chosen.get("where", base["where"]) != base["where"]:
            base = {"coeff": base["coeff"]} if chosen["where"] is not None else {}
        chosen = KL(**base | chosen)
    return chosen if chosen.is_on else None
