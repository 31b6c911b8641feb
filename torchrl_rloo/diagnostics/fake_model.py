"""A model without memory: shapes of its weights, and the bytes that a pass of its layers keeps, from its configuration.

The model consists of fake tensors, which have shapes and data types but no values. Its own code runs on them, so the
figures hold for any architecture that transformers runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from torchrl_rloo.diagnostics.memory_shapes import LayerBytes, Pass, PassBytes, Weight
from torchrl_rloo.engines.attention import attention_implementation
from torchrl_rloo.modules.loading import add_adapter
from torchrl_rloo.modules.packing import AttentionPlan, forward_pack

_ATTENTION = _EXPERTS = "torchrl_rloo_planned"


class FakeModel:
    """Causal language model of fake tensors.

    Args:
        config: configuration of the model.
        dtype: data type of its weights.
        lora: arguments of ``peft.LoraConfig``, whose adapter alone is trained. None trains all weights.
        **kwargs: arguments of ``AutoModelForCausalLM.from_config``.

    Example:
        >>> from torchrl_rloo.embedded import build_model, build_tokenizer
        >>> model = FakeModel(build_model(build_tokenizer(), seed=0).config)
        >>> sum(weight.numel for weight in model.weights)
        152256
    """

    def __init__(
        self, config, dtype: torch.dtype = torch.float32, *, lora: Mapping[str, Any] | None = None, **kwargs: Any
    ):
        from transformers import AutoModelForCausalLM
        from transformers.initialization import no_init_weights

        # Build the model and its adapter without memory
        with torch.device("meta"), no_init_weights():
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, **kwargs).eval()
            model.tie_weights()  # which comes with the initialization
            model = model if lora is None else add_adapter(model, lora)
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        with self._mode:
            _make_fake(model)
        self.config, self.decoder = model.config.get_text_config(), model.get_decoder()
        _set_experts(self.config)
        # List the weights by layer
        layers = list(self.decoder.layers)
        places = {id(p): i for i, layer in enumerate(layers) for p in layer.parameters()}
        linear = {id(m.weight) for layer in layers for m in layer.modules() if isinstance(m, nn.Linear)}
        self.weights = tuple(
            Weight(places.get(id(p)), tuple(p.shape), p.itemsize, p.requires_grad, id(p) in linear and "lora_" not in n)
            for n, p in model.named_parameters()
        )
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        self.head = tuple(head.weight.shape)
        self.tied = head.weight is embedding.weight
        self.trains_head = head.weight.requires_grad
        # Keep one layer of each kind, that is of each set of shapes
        kinds = [(type(x), *((tuple(p.shape), p.requires_grad) for p in x.parameters())) for x in layers]
        self._kinds = [kinds.index(kind) for kind in kinds]
        self.decoder.layers = nn.ModuleList(layers[i] for i in sorted(set(self._kinds)))
        self._model, self._traces = model, {}
        self._arguments, self._others = (config, lora, kwargs), {dtype: self}

    def with_dtype(self, dtype: torch.dtype) -> FakeModel:
        """Return the same model with weights of another data type."""
        if dtype not in self._others:
            config, lora, kwargs = self._arguments
            self._others[dtype] = FakeModel(config, dtype, lora=lora, **kwargs)
        return self._others[dtype]

    @property
    def kv_elements(self) -> int:
        """Elements of the key-value cache that one token takes in all layers."""
        config = self.config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return 2 * len(self._kinds) * heads * size

    def trace(self, work: Pass, *, autocast: torch.dtype | None = None, accumulated: bool = True) -> PassBytes:
        """Run a pass of the decoder on fake tensors, and count what it keeps.

        Args:
            work: rows of the pass.
            autocast: data type of ``torch.autocast``. None disables it.
            accumulated: True if gradients exist already, as in all passes of a step but the first.

        Returns:
            Bytes of each layer and of the rest. Attention is that of a kernel that stores no scores.
        """
        key = (work, autocast, accumulated)
        if key not in self._traces:
            self._traces[key] = self._trace(work, autocast, accumulated)
        return self._traces[key]

    def _trace(self, work: Pass, autocast: torch.dtype | None, accumulated: bool) -> PassBytes:
        # Run the decoder once to record what it saves outside its layers, and the inputs of the layers
        saved = _SavedBytes(self._model)
        calls: list[tuple[nn.Module, tuple, dict]] = []

        def enter(layer: nn.Module, args: tuple, kwargs: dict) -> None:
            calls.append((layer, args, kwargs))
            saved.active = False

        def leave(*_: Any) -> None:
            saved.active = True

        handles = [
            handle
            for layer in self.decoder.layers
            for handle in (
                layer.register_forward_pre_hook(enter, with_kwargs=True),
                layer.register_forward_hook(leave),
            )
        ]
        cast = torch.autocast("cpu", dtype=autocast) if autocast else nullcontext()
        try:
            self._forward(work, saved, cast)
        finally:
            for handle in handles:
                handle.remove()
        # Run each kind of layer by itself, forward and backward
        kinds = {}
        for kind, (layer, args, kwargs) in zip(sorted(set(self._kinds)), calls, strict=True):
            kinds[kind] = self._trace_layer(work, layer, args, kwargs, autocast, accumulated)
        # All layers share their other inputs, such as the sines and cosines of positions
        shared = {id(t): t for _, args, kwargs in calls for t in _other_inputs(args, kwargs)}
        outside = saved.total + sum(t.numel() * t.itemsize for t in shared.values())
        return PassBytes([kinds[kind] for kind in self._kinds], outside)

    def _forward(self, work: Pass, saved: _SavedBytes, cast) -> None:
        plan = _plan(work)
        with self._mode, cast, torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
            if plan is not None:
                ids = torch.zeros(work.tokens, dtype=torch.long)
                forward_pack(self.decoder, ids, ids, plan)
                return
            ids = torch.zeros(work.rows, work.row_tokens, dtype=torch.long)
            with self._unmasked():
                self.decoder(input_ids=ids, use_cache=False)

    def _trace_layer(
        self,
        work: Pass,
        layer: nn.Module,
        args: tuple,
        kwargs: dict,
        autocast: torch.dtype | None,
        accumulated: bool,
    ) -> LayerBytes:
        """Return the memory of one call of a layer and of its backward pass."""
        plan = _plan(work)
        # Give the layer its own inputs, and the gradients of earlier passes
        hidden = args[0] if args else kwargs["hidden_states"]
        trained = [p for p in layer.parameters() if p.requires_grad]
        with self._mode:
            states = torch.empty_like(hidden).requires_grad_()
            rest = {name: value for name, value in kwargs.items() if name != "hidden_states"}
            for p in trained:
                p.grad = torch.empty_like(p) if accumulated else None
        saved = _SavedBytes(layer, _other_inputs(args, kwargs))
        live = _LiveBytes([states, *layer.parameters(), *(p.grad for p in trained)])
        cast = torch.autocast("cpu", dtype=autocast) if autocast else nullcontext()
        # Count what is saved in one run and what is alive in another: hooks would keep saved tensors alive
        with self._mode:
            with cast, torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
                self._call(layer, states, args[1:], rest, plan)
            with live:
                with cast:
                    out = self._call(layer, states, args[1:], rest, plan)
                out.backward(torch.empty_like(out))
        for p in trained:
            p.grad = None
        return LayerBytes(saved.total, live.peak, hidden.numel() * hidden.itemsize)

    def _call(self, layer: nn.Module, states: torch.Tensor, args: tuple, kwargs: dict, plan) -> torch.Tensor:
        from torchrl_rloo.modules.packing import _call_with_plan

        if plan is not None:
            out = _call_with_plan(self.config, plan, lambda: layer(states, *args, **kwargs))
        else:
            with self._unmasked():
                out = layer(states, *args, **kwargs)
        return out[0] if isinstance(out, tuple) else out

    def _unmasked(self):
        """Return a context in which "sdpa" attention builds no mask; traced models build one that real ones skip."""
        from transformers import AttentionInterface

        AttentionInterface.register(_ATTENTION, _causal_attention)
        if self.config._attn_implementation != "sdpa":
            return nullcontext()
        return attention_implementation(self.config, _ATTENTION)


def _make_fake(model: nn.Module) -> None:
    """Replace the weights and buffers of a model on the meta device by fake tensors of the CPU, tied ones once."""
    made: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            is_weight = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_weight else empty
        return made[id(tensor)]

    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            tensors |= {name: fake(tensor) for name, tensor in tensors.items() if tensor is not None}


def _set_experts(config) -> None:
    """Replace the product of a mixture of experts by one without a choice of experts, which needs no values."""
    if getattr(config, "_experts_implementation", None) is not None:
        from transformers.integrations.moe import ExpertsInterface

        ExpertsInterface.register(_EXPERTS, _first_expert)
        config._experts_implementation = _EXPERTS


def _first_expert(experts, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Apply the first expert to all copies of the tokens; sizes are those of a grouped product."""

    def project(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x @ (weight[0] if experts.is_transposed else weight[0].T)

    chosen = hidden.index_select(0, index.flatten() // index.shape[1])
    up = project(chosen, experts.gate_up_proj if experts.has_gate else experts.up_proj)
    up = experts._apply_gate(up) if experts.has_gate else experts.act_fn(up)
    down = project(up, experts.down_proj) * weights.reshape(-1, 1)
    return down.index_select(0, index.flatten()).view(*index.shape, -1).sum(1).to(hidden.dtype)


def _other_inputs(args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """Return the tensors that a layer gets besides its hidden states."""
    hidden = args[0] if args else kwargs["hidden_states"]
    return [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t is not hidden]


def _plan(work: Pass) -> AttentionPlan | None:
    """Return the attention plan of a packed pass, with its indices; None for padded rows."""
    if work.packing == "none":
        return None
    plan = AttentionPlan(work.segments, torch.device("cpu"))
    _ = plan.blocks  # computed here, since fake tensors have no values to compute it from
    return plan


def _causal_attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
    """Attend as transformers' "sdpa" does to rows without padding."""
    out = nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    return out.transpose(1, 2).contiguous(), None


class _SavedBytes:
    """Counter of the storages that autograd saves, except those of a module's weights and buffers and of others."""

    def __init__(self, module: nn.Module, others: Sequence[torch.Tensor] = ()):
        self.active, self.total = True, 0
        tensors = [*module.parameters(), *module.buffers(), *others]
        self._seen: dict[int, Any] = {t.untyped_storage()._cdata: t for t in tensors}

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if self.active and storage._cdata not in self._seen:
            self._seen[storage._cdata] = tensor  # keeps the storage, so that its address stays unique
            self.total += storage.nbytes()
        return tensor

    @staticmethod
    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor


class _LiveBytes(TorchDispatchMode):
    """Counter of the bytes of storages that operations make, and of their largest sum."""

    def __init__(self, known: list[torch.Tensor | None]):
        super().__init__()
        self.live = self.peak = 0
        self._known = {t.untyped_storage()._cdata for t in known if t is not None}

    def __torch_dispatch__(self, func: Callable, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tree_map_only(torch.Tensor, self._add, out)
        return out

    def _add(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if (address := storage._cdata) not in self._known:
            self._known.add(address)
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._free, address, storage.nbytes())
        return tensor

    def _free(self, address: int, size: int) -> None:
        self._known.discard(address)
        self.live -= size
