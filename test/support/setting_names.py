"""Settings of all recipes, with the keys of their free mappings."""

from __future__ import annotations

import ast
import inspect
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from support.recipes import load_recipe
from torchrl_rloo.cli.fields import free_sections, known_settings
from torchrl_rloo.cli.sampling_sections import CacheConfig, PassRateConfig, RefillConfig, RerollsConfig
from torchrl_rloo.engines import AsyncVLLMEngine, VLLMEngine, VLLMServer
from torchrl_rloo.functional import SURROGATES
from torchrl_rloo.functional.advantages import NORMALIZATIONS
from torchrl_rloo.objectives import RLOOLoss
from torchrl_rloo.ray import RayEngine
from torchrl_rloo.replay import MCAdvantage
from torchrl_rloo.weight_update import LoRAPublisher, WeightPublisher

NAMES = ("rloo", "simple", "ppo", "distill", "sft", "preference", "evaluate", "reward_model")
CONFIGS = {name: load_recipe(name).Config for name in NAMES}
SETTINGS = {name for config in CONFIGS.values() for name in known_settings(config)}
ENGINES = (VLLMEngine, AsyncVLLMEngine, VLLMServer, RayEngine)
ARGUMENTS = {  # of what takes the keys of a free mapping
    "loss": (RLOOLoss,),
    "advantage": (MCAdvantage,),
    "loss.surrogate": tuple(SURROGATES.values()),
    "advantage.normalize": tuple(NORMALIZATIONS.values()),
    "inference.engine": ENGINES,
    "inference.updater": (WeightPublisher, LoRAPublisher),
    "curriculum.pass_rate": (PassRateConfig,),
    "curriculum.rerolls": (RerollsConfig,),
    "curriculum.refill": (RefillConfig,),
    "curriculum.cache": (CacheConfig,),
}

ANY_KEYS = {free for config in CONFIGS.values() for free in free_sections(config)} - ARGUMENTS.keys()


@cache
def vllm_arguments() -> set[str] | None:
    """Return the arguments of vLLM that engines pass on, from its source, which is slow to import; None without it."""
    if (spec := find_spec("vllm")) is None:
        return None
    source = Path(spec.submodule_search_locations[0], "engine", "arg_utils.py").read_text()
    classes = [
        node for node in ast.parse(source).body if getattr(node, "name", "") in ("EngineArgs", "AsyncEngineArgs")
    ]
    return {node.target.id for cls in classes for node in cls.body if isinstance(node, ast.AnnAssign)}


def exists(name: str) -> bool:
    """Return whether a recipe has a setting, or the callable that takes a free mapping has such an argument."""
    section, _, key = name.rpartition(".")
    if section in ARGUMENTS and name not in SETTINGS:
        keys = {key for target in ARGUMENTS[section] for key in inspect.signature(target).parameters}
        passed_on = vllm_arguments() if section == "inference.engine" else set()
        return passed_on is None or key in keys | passed_on
    return name in SETTINGS or any(f"{section}.".startswith(f"{free}.") for free in ANY_KEYS)
