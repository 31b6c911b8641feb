"""Errors of Python code in the words of the command line: ``device='cpu'`` becomes ``model.device=cpu``."""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence

from torchrl_rloo.cli.schema import known_settings

# Sections of the arguments that code names, by the longest matching start of its file. "" is the top level
SECTIONS: dict[str, tuple[str, ...]] = {
    "collectors": ("collector", "plan"),
    "data/preferences": ("data",),
    "data/prompts": ("data",),
    "data/sources": ("data",),
    "data/templates": ("model",),
    "diagnostics/checks": ("check",),
    "diagnostics/plan": ("plan", "generate", "environment", "data"),
    "engines": ("inference.engine",),
    "engines/generation": ("generate",),
    "engines/head": ("generate",),
    "engines/transformers_engine": ("generate",),
    "engines/vllm_api": ("generate",),
    "agents/session": ("environment",),
    "envs/tasks": ("data",),
    "envs/transforms/kl": ("kl",),
    "envs/transforms/reward": ("reward",),
    "evaluation/comparison": ("",),
    "evaluation/evaluation": ("eval", "generate"),
    "evaluation/result": ("",),
    "functional/log_probs": ("generate",),
    "functional/preference": ("loss",),
    "modules": ("train", "model", "generate"),
    "modules/loading": ("model", ""),
    "objectives": ("loss", "generate", "plan"),
    "objectives/presets": ("", "loss", "advantage"),
    "runtime/ranks": ("train",),
    "ray": ("ray", "collector", "plan"),
    "ray/engine": ("inference.engine",),
    "ray/object_store": ("sampler",),
    "replay/advantage": ("advantage", "plan"),
    "replay/credit": ("advantage", "reward"),
    "rewards/executors": ("reward.executor",),
    "rewards/runner": ("reward",),
    "run": ("", "log", "checkpoint"),
    "training": ("train", "optimizer", "schedule"),
    "training/optimizers": ("optimizer",),
    "training/schedules": ("schedule",),
    "weight_update": ("sampler",),
}
# Keys of sections that are mappings with any keys: such as arguments of RLOOLoss and MCAdvantage
FREE = {
    "loss": (
        "ratio",
        "surrogate",
        "aggregation",
        "old_log_probs",
        "correction",
        "off_policy_mask_threshold",
        "kl_importance_weighted",
        "entropy_coeff",
        "high_entropy_fraction",
        "router_loss_coeff",
        "mask_truncated_completions",
    ),
    "advantage": ("estimator", "credit", "normalize"),
    "inference.engine": ("request_timeout", "start_timeout"),
}
# Arguments with another name than their setting; the first that the recipe has
RENAMED = {
    "scorers": ("eval.scorers", "eval.scorer"),
    "tokenizer.chat_template": ("model.chat_template",),
    "total_steps": ("plan.steps", "train.steps"),
}
_TOKEN = re.compile(
    r"(?<![\w.'\"\[/={-])(?P<name>tokenizer\.chat_template|[a-z]\w*)"
    r"(?:=(?:'(?P<text>[\w./:+-]+)'|(?P<word>None|True|False)\b)?|(?![\w.(=]))"
)
_VERBS = ("set ", "raise ", "lower ", "increase ", "limit ", "remove ")  # before the name of an argument in a remedy
_WORDS = {"None": "null", "True": "true", "False": "false"}


def in_settings(message: str, module: str, config: type) -> str:
    """Replace the names of arguments in an error by those of settings.

    Only a name with a value, an underscore or a verb of a remedy counts as that of an argument. One without a setting
    stays.

    Args:
        message: message of the error.
        module: module that raised it.
        config: settings of the recipe.

    Example:
        >>> from torchrl_rloo.cli.config import RunConfig
        >>> in_settings("keep=0 must be at least 1; set keep=1", "torchrl_rloo.run.checkpoint", RunConfig)
        'checkpoint.keep=0 must be at least 1; set checkpoint.keep=1'
    """
    sections, known = find_sections(module), known_settings(config)
    if sections is None:
        return message

    def replace(match: re.Match[str]) -> str:
        name, shown = match["name"], match[0]
        named = "=" in shown or "_" in name or message[: match.start()].lower().endswith(_VERBS)
        setting = find_setting(name, sections, known) if named else None
        if setting is None:
            return shown
        value = match["text"] or _WORDS.get(match["word"] or "", "")
        return setting + ("=" if "=" in shown else "") + value

    text = _TOKEN.sub(replace, message)
    return re.sub(r"\b(use|to|or|which) (None|True|False)\b(?!=)", lambda m: f"{m[1]} {_WORDS[m[2]]}", text)


def find_sections(module: str) -> tuple[str, ...] | None:
    """Return the sections of the arguments that a module names, or None if it names none."""
    parts = module.split(".")[1:]
    starts = ("/".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((SECTIONS[start] for start in starts if start in SECTIONS), None)


def find_setting(name: str, sections: Sequence[str], known: Sequence[str]) -> str | None:
    """Return the setting of an argument that code of some sections names, or None."""
    free = [f"{section}.{key}" for section, keys in FREE.items() if section in known for key in keys]
    own = [f"{section}.{name}".lstrip(".") for section in sections]
    return next((s for s in (*own, *RENAMED.get(name, ())) if s in known or s in free), None)


def raising_module(error: BaseException) -> str:
    """Return the innermost module of this package that an error passed; one of settings only passes on its cause."""
    frames = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    module = next((name for name in reversed(frames) if name.startswith("torchrl_rloo.")), "")
    passed_on = module.startswith("torchrl_rloo.cli.") and error.__cause__ is not None
    return raising_module(error.__cause__) if passed_on else module
