"""Vision towers: the modules of vision-language models that see pixels, frozen unless they are trained."""

from __future__ import annotations

import sys

from torch import nn

from torchrl_rloo.images.families.table import FAMILIES, is_family


def vision_language_model(model: nn.Module) -> nn.Module | None:
    """Return the vision-language model of a known family inside wrappers, such as those of peft; None for others."""
    modeling = sys.modules.get("transformers.modeling_utils")  # the import is slow, and without it there is no model
    kind = getattr(modeling, "PreTrainedModel", ())
    base = next((module for module in model.modules() if isinstance(module, kind)), None)
    return base if base is not None and is_family(base.config) else None


def vision_towers(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model that see pixels; text-only models have none."""
    if (base := vision_language_model(model)) is None:
        return []
    names = FAMILIES[base.config.model_type].towers
    return [module for name, module in model.named_modules() if name.rpartition(".")[2] in names]


def frozen_towers(model: nn.Module) -> list[nn.Module]:
    """Return those of :func:`vision_towers` that are not trained, as ``load_model`` leaves them."""
    return [tower for tower in vision_towers(model) if not any(p.requires_grad for p in tower.parameters())]


def language_model_name(model: nn.Module) -> str | None:
    """Return the name, within its parent, of the language model of a vision-language model; None for other models."""
    if (base := vision_language_model(model)) is None:
        return None
    decoder = base.get_decoder()
    return next(name for name, module in base.named_modules() if module is decoder).rpartition(".")[2]
