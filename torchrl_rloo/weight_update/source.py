"""WeightSource: whole, merged tensors of a training model under the names of its checkpoint, from all its ranks."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from torchrl_rloo.images.towers import frozen_towers, vision_language_model
from torchrl_rloo.runtime.ranks import Ranks
from torchrl_rloo.weight_update.four_bit import compute_dtype, dequantize, is_four_bit
from torchrl_rloo.weight_update.protocol import TensorInfo, unpack, xxh3
from torchrl_rloo.weight_update.shards import (
    SENDER,
    Piece,
    collective,
    gather,
    is_sender,
    list_pieces,
    reshard,
    simplify,
)
from torchrl_rloo.weight_update.transport import PackedStorage, Storage

Convert = Callable[[str, torch.Tensor], Iterable[tuple[str, torch.Tensor]]]

# Children that add nothing to names: those of compiled and of activation-checkpointed modules.
_WRAPPED_CHILDREN = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})


class WeightSource:
    """Weights of a training model under the names of its Hugging Face checkpoint, as an engine loads them.

    The source contains parameters and persistent buffers. Names have no trace of wrappers (``torch.compile``,
    ``DistributedDataParallel``, activation checkpointing, peft). Tied parameters appear once, under their first name.
    The deltas of LoRA adapters are added to copies of their base weights. Weights in 4 bits are dequantized to the
    dtype of their products, so engines hold the numbers that the model computes with.

    The frozen vision tower of a vision-language model is not sent. Engines have it from the checkpoint, and compare its
    checksums with ``frozen`` when they connect.

    The model does not change. A tensor that is not gathered, merged or cast shares the model's memory.

    Args:
        model: any module. If it is sharded with ``fully_shard``, every rank must make the same calls. They also free
            the parameters that a forward pass left gathered.
        dtype: dtype of floating-point parameters. None keeps theirs. Buffers always keep theirs: they are small, and
            engines hold some in float32 for any dtype of the model.
        rank: rank of this process among the training processes. None asks ``torch.distributed`` if it is initialized.
        convert: function from a name and tensor of the model to pairs of names and tensors of the checkpoint. It may
            rename or split a tensor, or return no pairs to leave it out. It is also called with tensors on the meta
            device, so names and shapes must depend only on the name and shape. None keeps names and tensors.
        for_engines: False includes frozen vision towers, and uses the names of the model's ``state_dict``.

    Raises:
        ValueError: if merged weights cannot represent an adapter: it is neither LoRA nor one DoRA (IA3, prompts,
            ...), or it adapts only one of two tied weights. The base layer of LoRA may have 4 bits, but no other
            quantization.
            Also if ``dtype`` is not floating-point, ``convert`` returns a name twice, or the model is sharded with
            ``FullyShardedDataParallel``.

    Attributes:
        sends: True if this process sends, which is rank 0.
        frozen: name, dtype, shape and checksum of all tensors that are not sent; empty on other ranks.

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
        for_engines: bool = True,
    ):
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"dtype={dtype} must be a floating-point dtype or None")
        self.model, self.dtype, self.convert = model, dtype, convert
        self.sends = is_sender(rank)
        towers = frozen_towers(model) if for_engines else []
        frozen = {id(module) for tower in towers for module in tower.modules()}
        parts = _list_parts(model)
        self._kept = [part for part in parts if id(part.module) in frozen]
        self._parts = [part for part in parts if id(part.module) not in frozen]
        if for_engines:
            names = checkpoint_names(model, {part.name: part.tensor for part in parts})
            self._kept, self._parts = (
                [part._replace(name=names.get(part.name, part.name)) for part in some]
                for some in (self._kept, self._parts)
            )
        self._layout = [[TensorInfo.of(*out) for out in self._convert(p, self._meta(p))] for p in self._parts]
        names = [info.name for info in self.manifest()]
        if twice := sorted(name for name, times in Counter(names).items() if times > 1):
            raise ValueError(f"tensor {twice[0]} would be sent twice; convert must return each name once")
        self.frozen: list[tuple[TensorInfo, str]] = []
        for part in self._kept:
            for value in gather([self._value(part).detach()], SENDER):
                self.frozen += [(TensorInfo.of(*pair), xxh3([pair[1]])) for pair in self._convert(part, value)]

    def manifest(self) -> list[TensorInfo]:
        """Return name, dtype and shape of all tensors in the order of :meth:`tensors`."""
        return [info for infos in self._layout for info in infos]

    def tensors(self, first: int, last: int, to: int | None = None) -> list[torch.Tensor]:
        """Return the current tensors ``first`` to ``last - 1`` of the manifest; a collective call if they are sharded.

        Args:
            first: index of the first tensor.
            last: index behind the last tensor.
            to: rank that gets the tensors, while the others get an empty list. None: all ranks.

        Raises:
            ValueError: if the model's tensors no longer match the manifest.
        """
        return self.collect(first, last, to)()

    @torch.no_grad()
    def collect(self, first: int, last: int, to: int | None = SENDER) -> Callable[[], list[torch.Tensor]]:
        """Make the collective part of :meth:`tensors`, and return the rest, which concerns this rank only."""
        chosen, start = [], 0
        for infos, part in zip(self._layout, self._parts, strict=True):
            end = start + len(infos)
            if infos and start < last and first < end:
                chosen.append((infos, part, slice(max(first - start, 0), last - start)))
            start = end
        if thawed := [part.name for part in self._kept if part.tensor.requires_grad]:
            raise ValueError(f"{thawed[0]} was frozen, but is trained by now; make a new WeightSource")
        reshard(self.model)
        values = gather([self._value(part) for _, part, _ in chosen], to)

        def convert() -> list[torch.Tensor]:
            out = []
            for (infos, part, kept), value in zip(chosen[: len(values)], values, strict=True):
                pairs = list(self._convert(part, value))
                if (now := [TensorInfo.of(*pair) for pair in pairs]) != infos:
                    raise ValueError(
                        f"{part.name} must match {infos} of the manifest, got {now}; make a new WeightSource"
                    )
                out += [tensor for _, tensor in pairs[kept]]
            return out

        return convert

    @torch.no_grad()
    def pieces(self, first: int, last: int, rank: int) -> list[tuple[int, Piece, torch.Tensor]]:
        """Return a rank's blocks of the tensors ``first`` to ``last - 1``, without ``convert``.

        Each has the index of its tensor from ``first``, its place, and its values.
        """
        reshard(self.model)
        out = []
        for number, part in enumerate(self._parts[first:last]):
            value = simplify(self._value(part))
            local = value.to_local() if hasattr(value, "full_tensor") else value
            out += [(number, piece, local) for piece in list_pieces(value) if piece.rank == rank]
        return out

    def _convert(self, part: _Part, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
        return [(part.name, tensor)] if self.convert is None else self.convert(part.name, tensor)

    def _dtype_of(self, part: _Part) -> torch.dtype:
        dtype = compute_dtype(part.module) if part.is_four_bit else part.tensor.dtype
        cast = self.dtype is not None and not part.is_buffer and dtype.is_floating_point
        return self.dtype if cast else dtype

    def _meta(self, part: _Part) -> torch.Tensor:
        shape = part.module.quant_state.shape if part.is_four_bit else part.tensor.shape
        return torch.empty(shape, dtype=self._dtype_of(part), device="meta")

    def _value(self, part: _Part) -> torch.Tensor:
        if len(part.layers) == 1 and part.attribute == "weight" and (found := _dora_weight(part.layers[0])) is not None:
            return found.to(self._dtype_of(part))
        value = part.tensor.detach()
        value = dequantize(part.module, *gather([value], None)) if part.is_four_bit else value
        for layer in part.layers:
            for adapter in _active_adapters(layer):
                delta = _adapter_delta(layer, adapter, part)
                value = value + (gather([delta], None)[0] if part.is_four_bit else delta)
        return value.to(self._dtype_of(part))  # still sharded, so that it is gathered only once


def checkpoint_names(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the names in the checkpoint of tensors of a vision-language model, by those in its ``state_dict``.

    For other models, names are equal.
    """
    if (base := vision_language_model(model)) is None:
        return {}
    from transformers.core_model_loading import revert_weight_conversion

    names = {}
    for name, tensor in tensors.items():
        saved = revert_weight_conversion(base, {name: torch.empty(tensor.shape, device="meta")})
        if len(saved) == 1 and next(iter(saved.values())).shape == tensor.shape:
            (names[name],) = saved
    return names


class GatherError(RuntimeError):
    """Failure of a rank that all ranks know of, so that they stay in step and may try again."""


class GatherOrder(NamedTuple):
    """Order of rank 0 to the other ranks to gather buckets ``(first, last)`` of the manifest."""

    buckets: list[tuple[int, int]]
    open_storage: Callable[[], PackedStorage] | None  # None if only rank 0 can write the storage


def store_buckets(
    source: WeightSource,
    storage: Storage | None,
    order: GatherOrder,
    ranks: Ranks,
    before: Callable[[int], None] = lambda number: None,
    after: Callable[[int, list[torch.Tensor]], None] = lambda number, tensors: None,
) -> None:
    """Move all buckets from all ranks into rank 0's storage, one after the other; a collective call of all ranks.

    If all ranks can write the storage, each writes its own blocks. Otherwise rank 0 gathers each bucket and writes it.
    Rank 0 calls ``before`` with a bucket's number before it is stored, and ``after`` with its number and tensors.

    Raises RankError if the ranks no longer make the same calls, and GatherError on all ranks if another one failed.
    """
    manifest, shared = source.manifest(), False
    if order.open_storage is not None and ranks.size > 1 and source.convert is None:
        try:
            storage = order.open_storage() if storage is None else storage
        except OSError:  # on another machine
            storage = None
        shared = all(ranks.all_gather(storage is not None))
    failure: Exception | None = None
    for number, (first, last) in enumerate(order.buckets):
        infos = manifest[first:last]
        # Move the tensors; an error here may leave the other ranks waiting, so it ends all
        with collective("gathered weights") if ranks.size > 1 else nullcontext():
            moved = source.pieces(first, last, ranks.rank) if shared else source.collect(first, last)
        # Write them; an error here, or in the last `after`, is reported to all ranks
        tensors: list[torch.Tensor] = []
        try:
            if failure is not None:
                raise failure
            before(number)
            if shared:
                storage.put_pieces(number, infos, moved)
                tensors = unpack(storage.view(number), infos)
            elif ranks.is_main:
                tensors = moved()
                storage.put(number, infos, tensors)
        except Exception as error:
            failure = error
        _agree(failure, ranks)
        try:
            after(number, tensors)
        except Exception as error:
            failure = error
    if failure is not None:
        raise failure


def _agree(failure: Exception | None, ranks: Ranks) -> None:
    """Raise on all ranks if one of them failed."""
    message = None if failure is None else f"{type(failure).__name__}: {failure}"
    messages = ranks.all_gather(message) if ranks.size > 1 else []
    if failure is not None and ranks.is_main:
        raise failure
    for rank, message in enumerate(messages):
        if message is not None:
            raise GatherError(f"rank {rank} failed: {message}")


class _Part(NamedTuple):
    """Tensor of the model: its name in the checkpoint, its module, and the LoRA layers that change it."""

    name: str
    module: nn.Module
    attribute: str
    is_buffer: bool
    layers: tuple[Any, ...]

    @property
    def tensor(self) -> torch.Tensor:
        """Current parameter or buffer."""
        return getattr(self.module, self.attribute)

    @property
    def is_four_bit(self) -> bool:
        """True if the tensor holds two numbers per byte."""
        return self.attribute == "weight" and is_four_bit(self.module)


def _list_parts(model: nn.Module) -> list[_Part]:
    """Return all tensors to send, tied ones once."""
    reshard(model)
    replaced: dict[int, _Part] = {}
    parts: dict[int, _Part] = {}
    # Tied tensors must have the same adapters, and must not have a trained copy
    for part in _walk_tensors(model, "", (), replaced):
        first = parts.setdefault(id(part.tensor), part)
        if first.layers != part.layers:
            raise _broken_tie_error(first, part)
    for number, copy in replaced.items():
        if number in parts:
            raise _broken_tie_error(parts[number], copy)
    return list(parts.values())


def _walk_tensors(
    module: nn.Module, prefix: str, layers: tuple[Any, ...], replaced: dict[int, _Part]
) -> Iterator[_Part]:
    """Yield the tensors that the module computes with, and note trained copies in ``replaced`` by the replaced ids."""
    # Modules of peft: use the base layer with its deltas, or the trained copy
    kind = _peft_kind(module)
    if kind == "lora":
        _check_layer(module, prefix)
        yield from _walk_tensors(module.base_layer, prefix, (*layers, module), replaced)
    elif kind == "modules_to_save":
        yield from _walk_tensors(_trained_copy(module, prefix, replaced), prefix, (), replaced)
    else:
        # Other modules: their persistent tensors, each with the deltas that change it
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield _Part(prefix + name, module, name, False, tuple(x for x in layers if _is_adapted(x, name)))
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield _Part(prefix + name, module, name, True, ())
        # Names must not contain wrappers, which engines do not have
        is_wrapper = kind == "wrapper" or isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel))
        for name, child in module._modules.items():
            if child is not None:
                inner = prefix if is_wrapper or name in _WRAPPED_CHILDREN else f"{prefix}{name}."
                yield from _walk_tensors(child, inner, (), replaced)


def _peft_kind(module: nn.Module) -> str | None:
    """Return the role of a module in peft, or None."""
    if "peft" not in sys.modules:  # nothing can be peft's, and the import is slow
        return None
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer
    from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

    # Test special classes first: they inherit from the general ones, which are refused
    if isinstance(module, LoraLayer):
        return "lora"
    if isinstance(module, ModulesToSaveWrapper):
        return "modules_to_save"
    if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
        raise ValueError(f"peft's {type(module).__name__} cannot be merged exactly; train plain LoRA or all weights")
    if isinstance(module, PeftModel):
        kinds = {config.peft_type.value for config in module.peft_config.values()}
        if kinds != {"LORA"}:
            raise ValueError(
                f"adapters have types {sorted(kinds)}, but only LORA can be merged exactly; train plain LoRA"
            )
    return "wrapper" if isinstance(module, (PeftModel, BaseTuner)) else None


def _active_adapters(layer: Any) -> list[str]:
    """Return the adapters that a LoRA layer adds to its base weight."""
    if layer.disable_adapters or layer.merged:
        return []
    return [name for name in layer.active_adapters if name in layer.scaling]


def _dora_adapter(layer: Any) -> str | None:
    """Return the adapter of a linear layer that trains magnitude and direction (Liu et al. 2024, arXiv 2402.09353)."""
    active = _active_adapters(layer)
    is_dora = len(active) == 1 and type(layer.lora_variant.get(active[0])).__name__ == "DoraLinearVariant"
    return active[0] if is_dora and not is_four_bit(layer.base_layer) else None


def _dora_weight(layer: Any) -> torch.Tensor | None:
    """Return the merged weight ``m * (W + BA) / ||W + BA||`` of a DoRA layer; None for others."""
    if (adapter := _dora_adapter(layer)) is None:
        return None
    direction = layer.get_base_layer().weight + layer.get_delta_weight(adapter)
    dim = 0 if layer.fan_in_fan_out else 1
    scale = layer.lora_magnitude_vector[adapter].weight / torch.linalg.norm(direction, dim=dim)
    return direction * scale.unsqueeze(dim)


def _is_adapted(layer: Any, attribute: str) -> bool:
    """Return whether a LoRA layer changes this tensor of its base layer."""
    if attribute == getattr(layer, "parameter_name", "weight"):
        return True
    return attribute == "bias" and any(layer.lora_bias.values())


def _adapter_delta(layer: Any, adapter: str, part: _Part) -> torch.Tensor:
    if part.attribute != "bias":
        return layer.get_delta_weight(adapter)
    bias = layer.lora_B[adapter].bias if layer.lora_bias[adapter] else torch.zeros_like(part.tensor)
    return bias * layer.scaling[adapter]


def _check_layer(layer: Any, prefix: str) -> None:
    """Raise ValueError unless adding the layer's deltas to its base weights gives the same outputs."""
    from peft.tuners.lora import Embedding, Linear, ParamWrapper

    name = prefix.removesuffix(".")
    if type(layer) not in (Linear, Embedding, ParamWrapper) and not is_four_bit(layer.base_layer):
        raise ValueError(
            f"the LoRA layer of {name} is a {type(layer).__module__}.{type(layer).__name__}, whose weights cannot be "
            "merged exactly; use LoRAPublisher to send only the adapter"
        )
    # Refuse adapters whose effect is not a change of existing tensors
    for adapter in _active_adapters(layer):
        if adapter in layer.lora_variant and _dora_adapter(layer) is None:
            kind = type(layer.lora_variant[adapter]).__name__
            raise ValueError(
                f"adapter {adapter!r} of {name} is a {kind} and cannot be merged exactly; train plain LoRA"
            )
        if layer.lora_bias[adapter] and getattr(layer.get_base_layer(), "bias", None) is None:
            raise ValueError(
                f"adapter {adapter!r} of {name} has lora_bias=True, which requires a base layer with a bias; set "
                "lora_bias=False"
            )


def _trained_copy(wrapper: Any, prefix: str, replaced: dict[int, _Part]) -> nn.Module:
    """Return the module that a ``modules_to_save`` wrapper of peft computes with."""
    active = [] if wrapper.disable_adapters else [n for n in wrapper.active_adapters if n in wrapper.modules_to_save]
    if not active:
        return wrapper.original_module
    copy = wrapper.modules_to_save[active[0]]
    for name, original in wrapper.original_module.named_parameters():
        owner, _, attribute = name.rpartition(".")
        part = _Part(prefix + name, copy.get_submodule(owner), attribute, False, ())
        if replaced.setdefault(id(original), part).tensor is not part.tensor:
            raise _broken_tie_error(replaced[id(original)], part)
    return copy


def _broken_tie_error(a: _Part, b: _Part) -> ValueError:
    return ValueError(
        f"{a.name} and {b.name} are one weight in the base model, but peft trains one of them or both separately, "
        "which an engine that ties them cannot load; remove them from target_modules and modules_to_save, or untie the "
        "base model and its checkpoint (config.tie_word_embeddings=False)"
    )
