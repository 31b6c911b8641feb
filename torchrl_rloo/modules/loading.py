"""Loading of a model with its tokenizer, LoRA adapters, and 4-bit base models (QLoRA, arXiv 2305.14314)."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torchrl_rloo.data.notices import notify_once
from torchrl_rloo.data.preferences import MARKUPS
from torchrl_rloo.engines.transformers_engine import TransformersEngine
from torchrl_rloo.images.encoder import ImageEncoder
from torchrl_rloo.images.families.table import is_family
from torchrl_rloo.images.store import ImageStore
from torchrl_rloo.images.towers import frozen_towers, language_model_name, vision_towers
from torchrl_rloo.modules.gguf import local_model
from torchrl_rloo.modules.policies import checkpointing_layers
from torchrl_rloo.runtime.lookup import HUB_KWARGS, check_path, did_you_mean, parse_dtype
from torchrl_rloo.weight_update.four_bit import four_bit_layers, omit_quantization_states, use_exact_products
from torchrl_rloo.weight_update.rotary import set_context_length

if TYPE_CHECKING:
    from transformers import BitsAndBytesConfig, PreTrainedModel, PreTrainedTokenizerBase


def load_model(
    name: str | os.PathLike,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    gradient_checkpointing: bool = False,
    chat_template: str | os.PathLike | None = None,
    quantization: str | None = None,
    quantization_kwargs: Mapping[str, Any] | None = None,
    meta: bool = False,
    context_length: int | None = None,
    images: str | os.PathLike | None = None,
    train_vision: bool = False,
    **kwargs: Any,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model, which may also see images, and its tokenizer.

    The model is in evaluation mode, also for training: without dropout, trainer and sampler agree.

    Args:
        name: hub id, local directory, or GGUF file, see :func:`~torchrl_rloo.modules.local_model`.
        dtype: ``"float32"``, ``"bfloat16"``, ...
        device: device of the model.
        gradient_checkpointing: recompute each layer in the backward pass, which saves memory and takes about a third
            more time. :class:`~torchrl_rloo.modules.TransformersWrapper`, ``ValueHead`` and ``RewardModel`` also
            recompute in evaluation mode.
        chat_template: template that replaces the tokenizer's, also when it is saved: a ``.jinja`` file, the directory
            of a tokenizer, the template itself, or a name: ``"chatml"``, ``"llama3"``, ``"zephyr"``, or one that
            TorchRL has, such as ``"qwen"`` or that of an ``add_chat_template``. None keeps the tokenizer's.
        quantization: ``"nf4"`` keeps the weights of linear layers in 4 bits, which only an adapter can train (QLoRA).
            Embeddings, norms and output head keep ``dtype``. None keeps all weights in ``dtype``.
        quantization_kwargs: arguments of ``transformers.BitsAndBytesConfig``: ``bnb_4bit_use_double_quant``, which
            also quantizes the scales, and ``bnb_4bit_compute_dtype``, the dtype of products (``dtype`` by default).
        meta: if True, leave the weights on the meta device, without memory. Shard the model, and then load its weights
            with :func:`~torchrl_rloo.modules.load_shards`; the ``device`` is not used.
        context_length: longest row of the run in tokens, which is saved with the model. None takes the saved one, or
            the model's. It decides rotary frequencies that depend on the length (``longrope``, ``dynamic``), so pass
            the same for policy, reference and engine.
        images: see :func:`load_tokenizer`.
        train_vision: whether to train the vision tower of a vision-language model. A frozen one is not sent to engines.
        **kwargs: arguments of ``AutoModelForCausalLM.from_pretrained`` (``attn_implementation=``, ...). Those that
            locate a model (``revision=``, ``trust_remote_code=``, ...) are also passed to :func:`load_tokenizer`.

    Returns:
        The model and its tokenizer.

    Raises:
        ValueError: if the dtype is unknown, the CUDA device is missing, the tokenizer has no end-of-sequence token, or
            the model does not support ``gradient_checkpointing``. Also if the quantization is unknown.
        FileNotFoundError: if the model or template does not exist.
        ImportError: if a quantization requires a package that is not installed.
    """
    check_quantization(quantization, quantization_kwargs)
    name = local_model(name, log=print)
    located = {key: kwargs[key] for key in HUB_KWARGS if key in kwargs}
    tokenizer = load_tokenizer(name, chat_template=chat_template, images=images, **located)
    # Check dtype and device before loading the weights, which takes longer
    torch_dtype = parse_dtype(dtype)
    if train_vision and tokenizer.images is None:
        raise ValueError(f"train_vision=True, but {name} has no vision tower of a known family; set it to False")
    if device.startswith("cuda") and not meta and not torch.cuda.is_available():
        raise ValueError(
            f"device={device!r} requires CUDA, but torch {torch.__version__} finds no device; set device='cpu'"
        )
    if quantization is not None:  # on the device itself, which then never holds the whole weights
        config = quantization_config(quantization, torch_dtype, quantization_kwargs)
        kwargs |= {"quantization_config": config, "device_map": {"": device}}
    if meta:
        model, device = _build_on_meta(name, torch_dtype, **kwargs), "meta"
    else:
        auto = model_class(tokenizer.images is not None)
        model = use_exact_products(auto.from_pretrained(name, dtype=torch_dtype, **kwargs))
        if quantization is not None:
            check_quantized(model, config)
    # Some models accept checkpointing although no layer supports it
    if gradient_checkpointing:
        model.gradient_checkpointing_enable()
        if not checkpointing_layers(model):
            raise ValueError(
                f"gradient_checkpointing=True, but {type(model).__name__} has no layers that support it; "
                "set it to False"
            )
    if context_length is not None:
        set_context_length(model, context_length)
    if not train_vision:
        for tower in vision_towers(model):
            tower.requires_grad_(False)
    return model.to(device).eval(), tokenizer


def load_engine(
    model: str | os.PathLike, *, dtype: str = "float32", device: str = "cpu", context_length: int | None = None
) -> TransformersEngine:
    """Load a causal language model, and return an engine that samples with it, e.g. in the actor of a ``RayEngine``.

    Args:
        model: hub id or local directory.
        dtype: ``"float32"``, ``"bfloat16"``, ...
        device: device of the model.
        context_length: see :func:`load_model`.

    Raises:
        ValueError: if the dtype is unknown, or the CUDA device is missing.
        FileNotFoundError: if the model does not exist.
    """
    return TransformersEngine(*load_model(model, dtype=dtype, device=device, context_length=context_length))


def model_class(images: bool) -> type:
    """Return the class of Transformers that loads language models, or vision-language models."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText  # takes 2 s

    return AutoModelForImageTextToText if images else AutoModelForCausalLM


def _build_on_meta(name: str | os.PathLike, dtype: torch.dtype, **kwargs: Any) -> PreTrainedModel:
    """Build a model without weights, with the generation settings of its directory."""
    from transformers import AutoConfig, GenerationConfig

    if "quantization_config" in kwargs:
        raise ValueError("a quantized model cannot be built on the meta device; set meta=False")
    config, rest = AutoConfig.from_pretrained(name, return_unused_kwargs=True, **kwargs)
    rest = {key: value for key, value in rest.items() if key not in HUB_KWARGS}
    with torch.device("meta"):
        model = model_class(is_family(config)).from_config(config, dtype=dtype, **rest)
    try:
        located = {key: value for key, value in kwargs.items() if key in HUB_KWARGS and key != "trust_remote_code"}
        model.generation_config = GenerationConfig.from_pretrained(name, **located)
    except OSError:  # it has none; the model's own remains
        return model
    return model


def load_tokenizer(
    name: str | os.PathLike,
    *,
    chat_template: str | os.PathLike | None = None,
    images: str | os.PathLike | None = None,
    **kwargs: Any,
) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer; without a pad token, it pads with the end-of-sequence token.

    That of a vision-language model has its ``ImageEncoder`` as the attribute ``images``.

    Args:
        name: hub id, local directory or GGUF file.
        chat_template: template that replaces the tokenizer's, see :func:`load_model`; None keeps it.
        images: folder of the images of conversations; None is one in the user's cache.
        **kwargs: arguments of ``AutoTokenizer.from_pretrained``.

    Raises:
        ValueError: if the tokenizer has no end-of-sequence token.
        FileNotFoundError: if the model or template does not exist.
    """
    # Check the paths before the slow import
    name = local_model(name, log=print)
    _check_path(name, kwargs.get("subfolder", ""))
    template = None if chat_template is None else read_chat_template(chat_template)
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **kwargs)
    except OSError as error:
        reason = str(error).strip().partition("\n")[0]
        raise FileNotFoundError(
            f"name={str(name)!r} is neither a local directory nor a model that the hub can give: {reason}"
        ) from error
    if template is not None:
        tokenizer.chat_template = template
    # Require a token that ends turns; pad with it if there is no pad token
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"the tokenizer of {name} has no eos_token, so a turn could never end; set tokenizer.eos_token"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # safe, since padding is masked by length
    tokenizer.images = _load_images(name, tokenizer, images, **kwargs)
    return tokenizer


def _load_images(
    name: str | os.PathLike, tokenizer: PreTrainedTokenizerBase, folder: str | os.PathLike | None, **kwargs: Any
) -> ImageEncoder | None:
    """Return the image encoder of a vision-language model of a known family, and None for all other models."""
    from transformers import AutoConfig, AutoImageProcessor
    from transformers.utils import cached_file, find_adapter_config_file

    adapter = find_adapter_config_file(name, **kwargs)
    if adapter is not None:  # an adapter's folder has no configuration of the model
        name = json.loads(Path(adapter).read_text(encoding="utf-8"))["base_model_name_or_path"]
    config = AutoConfig.from_pretrained(name, **kwargs)
    if not is_family(config):
        return None
    if not tokenizer.chat_template:  # older folders keep it with the image processor
        kept = cached_file(name, "chat_template.json", _raise_exceptions_for_missing_entries=False, **kwargs)
        tokenizer.chat_template = None if kept is None else json.loads(Path(kept).read_text())["chat_template"]
    try:
        processor = AutoImageProcessor.from_pretrained(name, backend="pil", **kwargs)
    except ImportError:  # transformers 5.17 requires torchvision
        notify_once(f"{name} reads text only: images require transformers 5.18; run pip install -U transformers")
        return None
    return ImageEncoder(config, processor, tokenizer, ImageStore(folder))


def read_chat_template(source: str | os.PathLike) -> str:
    """Return a chat template from a file, a tokenizer, text or the name of one."""
    # Recognize the text of a template by its tags
    if "{{" in str(source) or "{%" in str(source):
        return str(source)
    # Otherwise read it from a file, or from a saved tokenizer
    path = Path(source).expanduser()
    if path.is_file():
        return path.read_text(encoding="utf-8")
    if not path.is_dir():
        from torchrl.data.llm.history import _CHAT_TEMPLATES  # extended by add_chat_template; it has no public reader

        named = {name: markup.template for name, markup in MARKUPS.items()} | _CHAT_TEMPLATES
        if str(source) in named:
            return named[str(source)]
        raise FileNotFoundError(
            f"chat_template={str(source)!r} is neither a file (no {str(path.absolute())!r}), nor a directory of a "
            f"tokenizer, nor a template with {{{{ }}}}, nor one of {sorted(named)}; correct the path"
        )
    from transformers import AutoTokenizer

    template = AutoTokenizer.from_pretrained(path).chat_template
    if not template:
        raise ValueError(f"chat_template={str(source)!r} has no chat template in its tokenizer; name a file with one")
    return template


def _check_path(name: str | os.PathLike, subfolder: str) -> None:
    """Raise if a local path has no model, before slow imports."""
    check_path("name", name)
    path, files = Path(name).expanduser(), ("config.json", "adapter_config.json")
    if path.is_dir() and not any((path / subfolder / file).is_file() for file in files):
        raise FileNotFoundError(
            f"name={os.fspath(name)!r} is a directory without config.json; name one with a saved model"
        )


def count_trained(model: torch.nn.Module) -> int:
    """Return the number of trained parameters.

    Raises:
        ValueError: if there are none, as in a saved adapter that was loaded for inference, or if weights in 4 bits have
            no adapter.
    """
    if four_bit_layers(model) and not hasattr(model, "peft_config"):
        raise ValueError("weights in 4 bits cannot be trained; set lora={r: 16, target_modules: all-linear}")
    number = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if not number:
        raise ValueError("the model has no trained parameters; merge a saved adapter into its base model")
    return number


def add_adapter(model: PreTrainedModel, config: Mapping[str, Any], name: str = "default") -> torch.nn.Module:
    """Add a LoRA adapter (Hu et al. 2021, arXiv 2106.09685) to a model; only the adapter is trained.

    Args:
        model: base model; its weights are frozen, and may be quantized. A ``PeftModel`` of this function gets one more
            adapter, which is trained but not active; see :class:`~torchrl_rloo.modules.RoleAdapters`.
        config: arguments of ``peft.LoraConfig``, such as ``r`` and ``target_modules``. With a frozen vision tower, only
            the language model gets an adapter. ``{"adapter": folder}`` continues a saved adapter, with its settings.
        name: name of the adapter.

    Returns:
        The ``PeftModel``, in evaluation mode.

    Raises:
        ImportError: if peft is not installed.
        ValueError: if the model already has an adapter, or one of this name, a name is unknown, or ``lora_dropout`` is
            not 0. A policy trains in evaluation mode, without dropout, so that its log-probs equal the sampler's.
    """
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError(
            "the model already has an adapter, which a new one would replace; merge it first "
            "(peft: AutoPeftModelForCausalLM.from_pretrained(folder).merge_and_unload().save_pretrained(...))"
        )
    if config.get("lora_dropout"):
        raise ValueError(
            f"lora_dropout={config['lora_dropout']} would have no effect, since the model trains in evaluation mode so "
            "that trainer and sampler agree. Set it to 0, or regularize with weight decay or a KL term"
        )
    try:
        from peft import LoraConfig, PeftModel, get_peft_model, load_peft_weights, set_peft_model_state_dict
    except ImportError as error:
        raise ImportError("an adapter requires peft: pip install 'torchrl_rloo[peft]'") from error
    known = [field.name for field in dataclasses.fields(LoraConfig) if field.init and field.name != "task_type"]
    saved = config.get("adapter")
    known = known if saved is None else ["adapter"]  # a saved one has all settings
    if unknown := [name for name in config if name not in known]:
        hint = did_you_mean(str(unknown[0]), known)
        raise ValueError(
            f"unknown names {unknown} in lora={dict(config)}{hint}; use r, lora_alpha, target_modules, ..."
        )
    if saved is None:
        settings = LoraConfig(task_type="CAUSAL_LM", **_of_language_model(model, config))
    else:
        settings = LoraConfig.from_pretrained(saved)
        settings.inference_mode, settings.lora_dropout = False, 0.0
    with _adapters_off_meta():
        if not isinstance(model, PeftModel):
            adapted = get_peft_model(use_exact_products(model), settings, adapter_name=name).eval()
        elif name in model.peft_config:
            raise ValueError(
                f"name={name!r} must differ from the adapters that the model has, {list(model.peft_config)}"
            )
        else:
            frozen = {parameter for parameter in model.parameters() if not parameter.requires_grad}
            model.add_adapter(name, settings)
            for parameter in set(model.parameters()) - frozen:  # peft trains the active adapter only
                parameter.requires_grad_(True)
            adapted = model.eval()
    if saved is not None:
        found = set_peft_model_state_dict(adapted, load_peft_weights(saved, device="cpu"), adapter_name=name)
        if found.unexpected_keys:
            raise ValueError(f"adapter={str(saved)!r} is of another model, without {found.unexpected_keys[:2]}")
    return omit_quantization_states(adapted) if four_bit_layers(adapted) else adapted


def _of_language_model(model: torch.nn.Module, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of ``LoraConfig``, which leave out all but the language model if the vision tower is frozen."""
    if not frozen_towers(model):
        return dict(config)
    if "exclude_modules" in config:
        raise ValueError(
            f"exclude_modules={config['exclude_modules']!r} cannot be combined with a frozen vision tower, which gets "
            "no adapter; choose with target_modules"
        )
    return {**config, "exclude_modules": rf"(?!(?:.*\.)?(?:{language_model_name(model)}|lm_head)(?:\.|$)).*"}


@contextmanager
def _adapters_off_meta() -> Iterator[None]:
    """Keep the values of new adapters if their base is on the meta device, where peft would lose them."""
    from peft.tuners.lora import LoraLayer

    move = LoraLayer._move_adapter_to_device_of_base_layer
    kept: list[tuple[torch.nn.ModuleDict, str, torch.nn.Module]] = []

    def keep(layer: Any, adapter: str, device: torch.device | None = None) -> None:
        if any(parameter.is_meta for parameter in layer.get_base_layer().parameters()):
            move(layer, adapter, torch.device("cpu"))
            tables = [getattr(layer, name) for name in layer.adapter_layer_names]
            kept.extend((table, adapter, copy.deepcopy(table[adapter])) for table in tables if adapter in table)
        move(layer, adapter, device)

    LoraLayer._move_adapter_to_device_of_base_layer = keep
    try:
        yield
    finally:
        LoraLayer._move_adapter_to_device_of_base_layer = move
    for table, adapter, values in kept:
        layout = table[adapter].state_dict(keep_vars=True)
        state = {name: value.to(layout[name].dtype) for name, value in values.state_dict().items()}
        table[adapter].load_state_dict(state, assign=True)


QUANTIZATIONS = ("nf4",)
_ARGUMENTS = ("bnb_4bit_use_double_quant", "bnb_4bit_compute_dtype")


def check_quantization(name: str | None, arguments: Mapping[str, Any] | None) -> None:
    """Raise if settings of a quantization are wrong, before anything is loaded."""
    arguments = arguments or {}
    if name is None:
        if arguments:
            raise ValueError(f"quantization_kwargs={dict(arguments)} requires a quantization; set quantization='nf4'")
        return
    if name not in QUANTIZATIONS:
        raise ValueError(
            f"unknown quantization={name!r}{did_you_mean(str(name), QUANTIZATIONS)}; use 'nf4', or None for none"
        )
    if "bnb_4bit_quant_storage" in arguments:
        raise ValueError(
            "quantization_kwargs.bnb_4bit_quant_storage must be uint8, since casts would change weights stored as "
            "floats; remove it"
        )
    if unknown := [key for key in arguments if key not in _ARGUMENTS]:
        hint = did_you_mean(str(unknown[0]), _ARGUMENTS)
        raise ValueError(f"unknown names {unknown} in quantization_kwargs{hint}; use {' or '.join(_ARGUMENTS)}")
    if find_spec("bitsandbytes") is None:
        raise ImportError(f"quantization={name!r} requires bitsandbytes: pip install 'torchrl_rloo[qlora]'")


def quantization_config(name: str, dtype: torch.dtype, arguments: Mapping[str, Any] | None) -> BitsAndBytesConfig:
    """Return the configuration with which Transformers quantizes linear layers as it loads them."""
    from transformers import BitsAndBytesConfig

    settings = {"bnb_4bit_compute_dtype": dtype} | dict(arguments or {})
    if isinstance(settings["bnb_4bit_compute_dtype"], str):
        settings["bnb_4bit_compute_dtype"] = parse_dtype(settings["bnb_4bit_compute_dtype"])
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=name, **settings)


def check_quantized(model: PreTrainedModel, config: BitsAndBytesConfig) -> None:
    """Raise unless a model was quantized as asked."""
    actual = model.config.quantization_config
    if actual.to_dict() != config.to_dict():
        raise ValueError(
            f"quantization={config.bnb_4bit_quant_type!r} has no effect, since the checkpoint is quantized already "
            f"({actual.quant_method}); set it to null, or name the original checkpoint"
        )
    if not four_bit_layers(model):
        raise ValueError(f"{type(model).__name__} has no linear layers to quantize; set quantization to null")
