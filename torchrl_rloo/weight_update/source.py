"""What is sent: a training model's tensors as its checkpoint has them, whole and merged, however it is wrapped."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from torchrl_rloo.weight_update.protocol import TensorInfo

Convert = Callable[[str, torch.Tensor], Iterable[tuple[str, torch.Tensor]]]

# Children that stand for their parent, a compiled or an activation-checkpointed module.
_TRANSPARENT = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})


class WeightSource:
    """A training model's weights under the names of its Hugging Face checkpoint, which is what an engine loads.

    Parameters and persistent buffers are sent. Wrappers (``torch.compile``, ``DistributedDataParallel``, activation
    checkpointing, peft) leave no trace in the names, tied parameters are sent once, under their first name, and a LoRA
    adapter's deltas are added to copies of the weights that they are of. Nothing of the model changes, nor is more
    than one tensor at a time gathered or merged beyond those asked for; a tensor that needs neither, nor a cast, is
    the model's own memory.

    Args:
        model: any module. One sharded with ``fully_shard`` is gathered tensor by tensor: then every rank makes the same
            calls, and frees what a forward pass left gathered.
        dtype: what floating-point parameters are cast to; None keeps theirs. Buffers always keep theirs: they are
            small, and engines hold some in float32 whatever the model's dtype.
        rank: of this process among those that train; None asks ``torch.distributed``, where it is initialised.
        convert: from a name and tensor of the model to names and tensors of the checkpoint: one other name, several
            tensors that the model keeps as one, or none at all to leave it out. Also called with tensors on the meta
            device, so names and shapes may depend on the name and shape alone. Default: the tensor under its name.

    Raises:
        ValueError: for what merged weights cannot express: an adapter that is not plain LoRA (DoRA, IA3, prompts, ...),
            a quantized layer under one, or one of two tied weights adapted without the other; if ``convert`` gives a
            name twice; or if the model is sharded with ``FullyShardedDataParallel``.

    Attributes:
        sends: whether this process is the one that sends, rank 0.

    Example:
        >>> from torchrl_rloo.embedded import build_model, build_tokenizer
        >>> source = WeightSource(build_model(build_tokenizer(), seed=0), dtype=torch.bfloat16)
        >>> source.manifest()[0]
        TensorInfo(name='model.embed_tokens.weight', dtype='bfloat16', shape=(320, 64))
        >>> [tuple(t.shape) for t in source.tensors(1, 3)]
        [(64, 64), (64,)]
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        dtype: torch.dtype | None = None,
        rank: int | None = None,
        convert: Convert | None = None,
    ):
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"dtype={dtype} must be a floating-point dtype, or None")
        self.model, self.dtype, self.convert = model, dtype, convert
        self.sends = is_sender(rank)
        self._parts = _parts(model)
        self._layout = [[TensorInfo.of(*out) for out in self._convert(p, self._meta(p))] for p in self._parts]
        names = [info.name for info in self.manifest()]
        if twice := sorted(name for name, times in Counter(names).items() if times > 1):
            raise ValueError(f"tensor {twice[0]} would be sent twice: convert must give each name once")

    def manifest(self) -> list[TensorInfo]:
        """What will be sent, in order."""
        return [info for infos in self._layout for info in infos]

    @torch.no_grad()
    def tensors(self, first: int, last: int) -> list[torch.Tensor]:
        """The tensors ``first`` to before ``last`` of the manifest, as they are now; a collective if they are sharded.

        Raises:
            ValueError: if the model's tensors are no longer those of the manifest.
        """
        reshard(self.model)
        out, start = [], 0
        for infos, part in zip(self._layout, self._parts, strict=True):
            end = start + len(infos)
            if infos and start < last and first < end:
                made = list(self._convert(part, self._value(part)))
                if (found := [TensorInfo.of(*pair) for pair in made]) != infos:
                    raise ValueError(
                        f"{part.name} gave {found} where the manifest has {infos}: make a new WeightSource"
                    )
                out += [tensor for _, tensor in made[max(first - start, 0) : last - start]]
            start = end
        return out

    def _convert(self, part: _Part, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
        return [(part.name, tensor)] if self.convert is None else self.convert(part.name, tensor)

    def _dtype_of(self, part: _Part) -> torch.dtype:
        cast = self.dtype is not None and not part.is_buffer and part.tensor.is_floating_point()
        return self.dtype if cast else part.tensor.dtype

    def _meta(self, part: _Part) -> torch.Tensor:
        return torch.empty(part.tensor.shape, dtype=self._dtype_of(part), device="meta")

    def _value(self, part: _Part) -> torch.Tensor:
        value = part.tensor.detach()
        for layer in part.layers:
            for adapter in _active(layer):
                value = value + _delta(layer, adapter, part)  # sharded ones stay so, and are gathered once
        return gather(value.to(self._dtype_of(part)))


def is_sender(rank: int | None = None) -> bool:
    """Whether this process sends for all that train; ``rank`` None asks ``torch.distributed``."""
    distributed = torch.distributed
    if rank is None and distributed.is_available() and distributed.is_initialized():
        rank = distributed.get_rank()
    return not rank


def is_sharded(model: nn.Module) -> bool:
    """Whether a model's parameters are spread over ranks."""
    return any(hasattr(parameter, "full_tensor") for parameter in model.parameters())


def gather(tensor: torch.Tensor) -> torch.Tensor:
    """A whole tensor, from all ranks if it is sharded. On return the collective is over, and others may begin."""
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
        if tensor.device.type != "cpu":
            torch.accelerator.synchronize(tensor.device)
    return tensor


def reshard(model: nn.Module) -> None:
    """Lets go of what a forward pass of a model under ``fully_shard`` left gathered: the shards are what is trained.

    Raises:
        ValueError: if the model is sharded with ``FullyShardedDataParallel``.
    """
    if not torch.distributed.is_available():
        return
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            raise ValueError(f"{name or 'the model'} is in FullyShardedDataParallel: shard it with fully_shard instead")
        if isinstance(module, FSDPModule):
            module.reshard()


class _Part(NamedTuple):
    """A tensor of the model: its name in the checkpoint, where it is, and the LoRA layers that change it."""

    name: str
    module: nn.Module
    attribute: str
    is_buffer: bool
    layers: tuple[Any, ...]

    @property
    def tensor(self) -> torch.Tensor:
        """The parameter or buffer that is there now."""
        return getattr(self.module, self.attribute)


def _parts(model: nn.Module) -> list[_Part]:
    """All that is to be sent, tied tensors once."""
    reshard(model)
    replaced: dict[int, _Part] = {}
    parts: dict[int, _Part] = {}
    for part in _walk(model, "", (), replaced):
        first = parts.setdefault(id(part.tensor), part)
        if first.layers != part.layers:
            raise _broken_tie(first, part)
    for number, copy in replaced.items():
        if number in parts:
            raise _broken_tie(parts[number], copy)
    return list(parts.values())


def _walk(module: nn.Module, prefix: str, layers: tuple[Any, ...], replaced: dict[int, _Part]) -> Iterator[_Part]:
    """The tensors that the module computes with, adapters aside. ``replaced``: trained copies by what they replace."""
    kind = _peft_kind(module)
    if kind == "lora":
        _check_layer(module, prefix)
        yield from _walk(module.base_layer, prefix, (*layers, module), replaced)
    elif kind == "modules_to_save":
        yield from _walk(_trained_copy(module, prefix, replaced), prefix, (), replaced)
    else:
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield _Part(prefix + name, module, name, False, tuple(x for x in layers if _adapts(x, name)))
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield _Part(prefix + name, module, name, True, ())
        is_wrapper = kind == "wrapper" or isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel))
        for name, child in module._modules.items():
            if child is not None:
                inner = prefix if is_wrapper or name in _TRANSPARENT else f"{prefix}{name}."
                yield from _walk(child, inner, (), replaced)


def _peft_kind(module: nn.Module) -> str | None:
    """What peft made of a module; peft is not imported for it."""
    if "peft" not in sys.modules:
        return None
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer
    from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

    if isinstance(module, LoraLayer):
        return "lora"
    if isinstance(module, ModulesToSaveWrapper):
        return "modules_to_save"
    if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
        raise ValueError(f"{type(module).__name__} of peft cannot be merged exactly: train plain LoRA or all weights")
    if isinstance(module, PeftModel):
        kinds = {config.peft_type.value for config in module.peft_config.values()}
        if kinds != {"LORA"}:
            raise ValueError(f"the model has adapters of kinds {sorted(kinds)}; only LORA can be merged exactly")
    return "wrapper" if isinstance(module, (PeftModel, BaseTuner)) else None


def _active(layer: Any) -> list[str]:
    """Adapters that a LoRA layer computes with beside its base weight."""
    if layer.disable_adapters or layer.merged:
        return []
    return [name for name in layer.active_adapters if name in layer.scaling]


def _adapts(layer: Any, attribute: str) -> bool:
    """Whether a LoRA layer changes this tensor of its base layer."""
    if attribute == getattr(layer, "parameter_name", "weight"):
        return True
    return attribute == "bias" and any(layer.lora_bias.values())


def _delta(layer: Any, adapter: str, part: _Part) -> torch.Tensor:
    if part.attribute != "bias":
        return layer.get_delta_weight(adapter)
    bias = layer.lora_B[adapter].bias if layer.lora_bias[adapter] else torch.zeros_like(part.tensor)
    return bias * layer.scaling[adapter]


def _check_layer(layer: Any, prefix: str) -> None:
    """Raises a ValueError unless the layer computes what its base does with the deltas added to its weights."""
    from peft.tuners.lora import Embedding, Linear, ParamWrapper

    name = prefix.removesuffix(".")
    if type(layer) not in (Linear, Embedding, ParamWrapper):
        raise ValueError(
            f"the LoRA layer of {name} is a {type(layer).__module__}.{type(layer).__name__}, whose weights cannot be "
            "merged exactly: send the adapter alone with LoRAUpdater"
        )
    for adapter in _active(layer):
        if adapter in layer.lora_variant:
            kind = type(layer.lora_variant[adapter]).__name__
            raise ValueError(f"adapter {adapter!r} of {name} is a {kind}, not plain LoRA, and cannot be merged exactly")
        if layer.lora_bias[adapter] and getattr(layer.get_base_layer(), "bias", None) is None:
            raise ValueError(f"adapter {adapter!r} of {name} has a bias (lora_bias=True), its base layer has none")


def _trained_copy(wrapper: Any, prefix: str, replaced: dict[int, _Part]) -> nn.Module:
    """The module that a ``modules_to_save`` of peft computes with."""
    active = [] if wrapper.disable_adapters else [n for n in wrapper.active_adapters if n in wrapper.modules_to_save]
    if not active:
        return wrapper.original_module
    copy = wrapper.modules_to_save[active[0]]
    for name, original in wrapper.original_module.named_parameters():
        owner, _, attribute = name.rpartition(".")
        part = _Part(prefix + name, copy.get_submodule(owner), attribute, False, ())
        if replaced.setdefault(id(original), part).tensor is not part.tensor:
            raise _broken_tie(replaced[id(original)], part)
    return copy


def _broken_tie(a: _Part, b: _Part) -> ValueError:
    return ValueError(
        f"{a.name} and {b.name} are one weight in the base model, and peft trains one of them or each by itself, so an "
        "engine that ties them cannot have both: leave them out of target_modules and modules_to_save, or untie the "
        "base model and its checkpoint (config.tie_word_embeddings=False)"
    )
