"""Registry of reward functions: names in a configuration and the functions that they load."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from functools import partial
from typing import Any

from torchrl_rloo.rewards.protocol import RewardFunction, reward_name
from torchrl_rloo.runtime.lookup import check_path, did_you_mean, import_object

# Name -> dotted path; a module is imported only when its reward is loaded
REWARDS: dict[str, str] = {
    "accuracy": "torchrl_rloo.rewards.accuracy.MathAccuracy",
    "boxed_accuracy": "torchrl_rloo.rewards.matching.boxed_accuracy",
    "code_tests": "torchrl_rloo.rewards.code.CodeTests",
    "cosine_scaled": "torchrl_rloo.rewards.accuracy.CosineScaled",
    "countdown": "torchrl_rloo.rewards.countdown.Countdown",
    "ensemble": "torchrl_rloo.rewards.ensembles.Ensemble",
    "exact_match": "torchrl_rloo.rewards.matching.ExactMatch",
    "for_task": "torchrl_rloo.rewards.wrapping.ForTask",
    "instruction_following": "torchrl_rloo.rewards.instructions.InstructionFollowing",
    "json_schema": "torchrl_rloo.rewards.formats.JSONSchema",
    "length": "torchrl_rloo.rewards.lengths.Length",
    "length_budget": "torchrl_rloo.rewards.lengths.LengthBudget",
    "llm_judge": "torchrl_rloo.rewards.judge.LLMJudge",
    "multiple_choice": "torchrl_rloo.rewards.choices.MultipleChoice",
    "numeric_match": "torchrl_rloo.rewards.matching.NumericMatch",
    "reasoning_accuracy": "torchrl_rloo.rewards.accuracy.ReasoningAccuracy",
    "regex_format": "torchrl_rloo.rewards.formats.RegexFormat",
    "remote_scorer": "torchrl_rloo.rewards.remote.RemoteScorer",
    "repetition_penalty": "torchrl_rloo.rewards.lengths.RepetitionPenalty",
    "sequence_classifier": "torchrl_rloo.rewards.classifier.SequenceClassifier",
    "shuffled": "torchrl_rloo.rewards.wrapping.Shuffled",
    "soft_overlong": "torchrl_rloo.rewards.lengths.SoftOverlong",
    "stop_properly": "torchrl_rloo.rewards.lengths.StopProperly",
    "think_format": "torchrl_rloo.rewards.formats.think_format",
}

TRL_NAMES: dict[str, str] = {
    "accuracy_reward": REWARDS["accuracy"],
    "get_cosine_scaled_reward": REWARDS["cosine_scaled"],
    "get_repetition_penalty_reward": REWARDS["repetition_penalty"],
    "get_soft_overlong_punishment": REWARDS["soft_overlong"],
    "reasoning_accuracy_reward": REWARDS["reasoning_accuracy"],
    "think_format_reward": REWARDS["think_format"],
}
_REWARD_ARGUMENTS = {"prompts", "completions", "completion_ids"}
RewardSpec = RewardFunction | str | Mapping[str, Any]


def load_reward(spec: RewardSpec) -> RewardFunction:
    """Load a reward function from its specification.

    Args:
        spec: one of

            - a callable, which is returned unchanged;
            - a reward model: a loaded module of transformers, a hub id with a slash, or a directory. It becomes a
              :class:`~torchrl_rloo.rewards.SequenceClassifier` with its own tokenizer;
            - a name in :data:`REWARDS`, TRL's name of one of these, or the dotted path of a function or class. A class
              is instantiated;
            - a mapping ``{"_target_": name or dotted path, setting: value, ...}``. A class or a factory is called with
              the settings. A function that is itself a reward (it accepts ``prompts``, ``completions``,
              ``completion_ids`` or any keyword) gets them bound. The setting ``name`` is the name in logs, so one
              class can be used twice.

            A wrapper accepts any of these as its function.

    Raises:
        TypeError: if ``spec`` has another type, or its target is not callable.
        ValueError: if the name or path is not found, or settings are missing or unknown.
        FileNotFoundError: if a path has no directory.
        Exception: any exception of the import or of the class.

    Example:
        >>> load_reward("think_format").__name__
        'think_format'
        >>> reward = load_reward({"_target_": "soft_overlong", "max_completion_len": 8, "soft_punish_cache": 4})
        >>> reward(["?"], ["..."], [[1] * 6])
        [-0.5]
        >>> load_reward({"_target_": "stop_properly", "function": "think_format", "name": "format"}).__name__
        'format'
    """
    if _is_model(spec):
        return _build(_find("sequence_classifier"), {"model": spec})
    if isinstance(spec, str):
        target = _find(spec)
        return _build(target, {}) if inspect.isclass(target) else target
    if isinstance(spec, Mapping):
        settings = {str(key): value for key, value in spec.items()}
        path = settings.pop("_target_", None)
        if not isinstance(path, str):
            raise TypeError(f"reward {dict(spec)} has _target_={path!r}; it must be a name or dotted path")
        return _build(_find(path), settings)
    if callable(spec):
        return spec
    raise TypeError(f"reward={spec!r} must be a callable, a name, a dotted path or a mapping with '_target_'")


def _is_model(spec: Any) -> bool:
    """Return whether a specification is a model of transformers, a hub id or a directory."""
    if isinstance(spec, str):
        if "/" in spec:
            check_path("reward", spec)
        return "/" in spec or spec not in {**REWARDS, **TRL_NAMES} and os.path.isdir(spec)
    return hasattr(spec, "config") and hasattr(spec, "parameters")  # by attributes: workers do not import torch


def _find(path: str) -> Any:
    """Return the object at a name or dotted path."""
    full = REWARDS.get(path) or TRL_NAMES.get(path, path)
    if "." not in full:
        raise ValueError(
            f"unknown reward {path!r}{did_you_mean(path, [*REWARDS, *TRL_NAMES])}; valid: {', '.join(REWARDS)}, "
            "or the dotted path module.function of a custom reward, or the hub id or directory of a reward model"
        )
    found = import_object(full, "reward")
    if not callable(found):
        raise TypeError(f"reward {path!r} is {found!r:.100}; it must be callable")
    return found


def _build(target: Any, settings: dict[str, Any]) -> RewardFunction:
    """Build a reward function from a class, a factory or a reward function, and its settings."""
    parameters = inspect.signature(target).parameters
    log_name = None if "name" in parameters else settings.pop("name", None)
    any_keyword = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    is_reward = not inspect.isclass(target) and (any_keyword or bool(_REWARD_ARGUMENTS & parameters.keys()))
    # Check the settings against the signature: an unknown one would fail later with a less helpful error
    names = [name for name, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    known = f"valid settings: {', '.join(names) or 'none'}"
    if unknown := [] if any_keyword else [setting for setting in settings if setting not in names]:
        raise ValueError(
            f"unknown setting {unknown[0]!r} of {reward_name(target)}{did_you_mean(unknown[0], names)}; {known}"
        )
    if is_reward:
        function = _bind(target, settings) if settings else target
    else:
        missing = [name for name in names if parameters[name].default is inspect.Parameter.empty]
        if missing := [name for name in missing if name not in settings]:
            raise ValueError(f"{reward_name(target)} requires the settings {', '.join(missing)}; {known}")
        function = target(**settings)
        if not callable(function):
            raise TypeError(f"{reward_name(target)} returned {function!r:.100}; it must return a callable")
    if log_name is not None:
        # Rename a copy: the function itself may be used elsewhere
        function = function if inspect.isclass(target) else _bind(function, {})
        function.__name__ = str(log_name)
    return function


def _bind(function: RewardFunction, settings: dict[str, Any]) -> RewardFunction:
    bound = partial(function, **settings)
    for attribute in ("whole_batch", "concurrency"):
        if hasattr(function, attribute):
            setattr(bound, attribute, getattr(function, attribute))
    return bound
