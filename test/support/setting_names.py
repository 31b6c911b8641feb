"""Settings of all recipes, with the keys of their free mappings."""

from __future__ import annotations

import inspect

from support.recipes import load_recipe
from torchrl_rloo.cli.config import CacheConfig, PassRateConfig, RefillConfig, RerollsConfig
from torchrl_rloo.cli.eval_config import BackgroundConfig
from torchrl_rloo.cli.schema import known_settings
from torchrl_rloo.engines import AsyncVLLMEngine, RayEngine, VLLMEngine, VLLMServer
from torchrl_rloo.functional import NORMALIZATIONS, SURROGATES
from torchrl_rloo.objectives import RLOOLoss
from torchrl_rloo.replay import MCAdvantage
from torchrl_rloo.weight_update import LoRAPublisher, WeightPublisher

CONFIGS = {name: load_recipe(name).Config for name in ("rloo", "rloo_async", "evaluate", "reward_model")}
SETTINGS = {name for config in CONFIGS.values() for name in known_settings(config)}
ENGINES = (VLLMEngine, AsyncVLLMEngine, VLLMServer, RayEngine)
ARGUMENTS = {  # of what takes the keys of a free mapping
    "loss": (RLOOLoss,),
    "advantage": (MCAdvantage,),
    "loss.surrogate": tuple(SURROGATES.values()),
    "advantage.normalize": tuple(NORMALIZATIONS.values()),
    "inference.engine": ENGINES,
    "inference.updater": (WeightPublisher, LoRAPublisher),
    "eval.background": (BackgroundConfig,),
    "curriculum.pass_rate": (PassRateConfig,),
    "curriculum.rerolls": (RerollsConfig,),
    "curriculum.refill": (RefillConfig,),
    "curriculum.cache": (CacheConfig,),
}
VLLM_ARGUMENTS = {"dtype", "enable_lora", "max_lora_rank", "max_model_len", "model"}  # which the engines pass on


def exists(name: str) -> bool:
    """Return whether a recipe has a setting, or the callable that takes a free mapping has such an argument."""
    section, _, key = name.rpartition(".")
    if section in ARGUMENTS:
        keys = {key for target in ARGUMENTS[section] for key in inspect.signature(target).parameters}
        return key in keys | (VLLM_ARGUMENTS if section == "inference.engine" else set())
    return name in SETTINGS
