"""LoadPlan: copies new weights straight into the layers of a vLLM model on CPU.

vLLM's kernels keep CPU weights in another layout, so each update packs them again. vLLM's reload writes a layer
into fresh memory, packs it, copies it back, and packs a tied table twice.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from inspect import BoundArguments
from typing import Any, NamedTuple

import torch
from torch import nn
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor

from torchrl_rloo.engines.vllm_api import KEPT_MEMORY

_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # options of glibc's mallopt
_KNOWN_METHODS = (type(None), UnquantizedLinearMethod, UnquantizedEmbeddingMethod)


@contextmanager
def _keeping_freed_memory() -> Iterator[None]:
    """Let each packed copy take the memory of the old one, since first touches of fresh memory outlast the packing."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)  # only glibc has it
    if set_option is None or KEPT_MEMORY.keys() & os.environ.keys():  # the process was started to keep all freed memory
        yield
        return
    for option in (_MMAP_THRESHOLD, _TRIM_THRESHOLD):
        set_option(option, 2**31 - 1)
    try:
        yield
    finally:  # what glibc would adapt to in a process that frees large tensors
        set_option(_MMAP_THRESHOLD, 32 << 20)
        set_option(_TRIM_THRESHOLD, 64 << 20)


class _Call(NamedTuple):
    """Call of a weight loader that writes one tensor of the manifest into its part of a parameter."""

    tensor: str
    loader: Callable[..., Any]
    arguments: BoundArguments
    place: str  # name of the loader's argument that takes the tensor

    def fill(self, parameter: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
        bound = self.arguments
        bound.arguments |= {"param": parameter, self.place: tensors[self.tensor]}
        self.loader(*bound.args, **bound.kwargs)
        bound.arguments |= {"param": None, self.place: None}  # otherwise it would keep their memory


class _Parameter(NamedTuple):
    """Parameter of a layer with all calls that fill it; ``packed`` is its description if only a packed copy remains."""

    layer: nn.Module
    name: str
    packed: torch.Tensor | None
    calls: list[_Call]


class LoadPlan:
    """Calls that load a whole manifest, as recorded in a dry run of the model's loaders.

    Parameters that the kernels read as they are get their values in place. The others are packed from a temporary one.
    Tied tables share one packed copy.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, parameters: list[_Parameter]):
        self.model, self.dtype, self.parameters = model, dtype, parameters

    @classmethod
    def record(
        cls, model: nn.Module, dtype: torch.dtype, sent: Mapping[str, torch.Tensor], kept: Collection[str] = ()
    ) -> LoadPlan | None:
        """Return the plan of a dry run that loaded ``sent`` into layers on the meta device; None if vLLM must reload.

        Only layers whose loaders get the tensors as they were sent, and whose weights are not quantized, are planned.
        Layers that got tensors of ``kept`` only are left as they are.
        """
        names, parameters = {id(tensor): name for name, tensor in sent.items()}, {}
        for layer in model.modules():
            info = layerwise.get_layerwise_info(layer)
            values = [value for _, bound in info.loaded_weights for value in bound.arguments.values()]
            loaded = {names[id(value)] for value in values if id(value) in names}
            if loaded and loaded <= set(kept):
                continue
            for name, bound in info.loaded_weights:
                place = next((key for key, value in bound.arguments.items() if id(value) in names), None)
                kernel = info.kernel_tensors[0].get(name)
                method, meta = getattr(layer, "quant_method", None), getattr(layer, name)
                if place is None or kernel is None or type(method) not in _KNOWN_METHODS:
                    return None
                is_packed = isinstance(method, UnquantizedLinearMethod) and name == "weight" and not kernel.numel()
                if not is_packed and kernel.shape != meta.shape:
                    return None
                call = _Call(names[id(bound.arguments[place])], layerwise._get_original_loader(meta), bound, place)
                new = _Parameter(layer, name, meta if is_packed else None, [])
                parameters.setdefault((layer, name), new).calls.append(call)
        planned = list(parameters.values())
        filled = {call.tensor for parameter in planned for call in parameter.calls}
        return cls(model, dtype, planned) if filled == set(sent) - set(kept) else None

    @torch.no_grad()
    @_keeping_freed_memory()
    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load new tensors by name. An error leaves layers with different weights, until a later call succeeds."""
        for layer, name, packed, calls in self.parameters:
            if packed is not None:
                layer.weight = materialize_meta_tensor(packed)
            for call in calls:
                call.fill(getattr(layer, name), tensors)
            if packed is not None:
                layer.cpu_linear = None  # the new packed copy takes the memory of the old one
                layer.quant_method.process_weights_after_loading(layer)
        self._pack_tables()
        for layer in self.model.modules():
            if is_deferred_attention_layer(layer):
                layer.process_weights_after_loading(self.dtype)

    def _pack_tables(self) -> None:
        """Pack embeddings and heads, tied ones once."""
        tied: dict[int, list[nn.Module]] = {}
        for layer in self.model.modules():
            if isinstance(getattr(layer, "quant_method", None), UnquantizedEmbeddingMethod) and layer.weight.numel():
                tied.setdefault(layer.weight.data_ptr(), []).append(layer)
        for layers in tied.values():
            for layer in layers:
                layer.cpu_linear = None
            dispatch_cpu_unquantized_gemm(layers[0], remove_weight=False)
            for layer in layers:
                layer.cpu_linear = layers[0].cpu_linear
