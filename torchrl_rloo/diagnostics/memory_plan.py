"""Memory of a training step on one rank, computed before anything is loaded.

Each function is one formula of shapes. ``benchmarks/bench_memory.py`` measures their sum on processes that train.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from torchrl_rloo.diagnostics.fake_model import FakeModel
from torchrl_rloo.diagnostics.memory_settings import MemorySettings
from torchrl_rloo.diagnostics.memory_shapes import PassBytes, Weight
from torchrl_rloo.functional.log_probs import tile_limits
from torchrl_rloo.runtime.lookup import did_you_mean, parse_dtype
from torchrl_rloo.training.joint import CHUNK_BYTES
from torchrl_rloo.training.optimizers import TORCH_OPTIMIZERS

GIB = 2**30
MIB = 2**20
# Bytes of a process before it holds a tensor: CUDA context, cuBLAS workspaces and kernels; on CPUs the imported code
BASE_BYTES = {"cpu": 600 * MIB, "cuda": 1024 * MIB}
NCCL_BYTES = 512 * MIB  # channels of NCCL among several ranks
FRAGMENTATION = {"cpu": 0.0, "cuda": 0.05}  # share that the caching allocator of CUDA leaves unused
NF4_BYTES = 0.5 + 4 / 64  # of a 4-bit weight: one float32 scale for 64 of them (Dettmers et al. 2023, arXiv 2305.14314)
ADAMW_8BIT_SHARE = 2 * (1 + 4 / 256) / 4  # state of a float32 weight: two bytes, and two scales for 256 elements


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on the rank with the most memory, by phase of a training step.

    Attributes:
        phases: pieces of each phase, ``"load"`` (of a model that is sharded afterwards), ``"collect"``, ``"train"`` and
            ``"optimize"``.
        settings: settings of the plan.
    """

    phases: dict[str, dict[str, int]]
    settings: MemorySettings = field(repr=False)

    @property
    def peak_phase(self) -> str:
        """Phase with the largest sum."""
        return max(self.phases, key=lambda phase: sum(self.phases[phase].values()))

    @property
    def peak(self) -> int:
        """Largest sum of a phase."""
        return sum(self.phases[self.peak_phase].values())

    @property
    def fits(self) -> bool:
        """True if the peak fits the device, or if its memory is unknown."""
        return self.settings.device_bytes is None or self.peak <= self.settings.device_bytes


def plan_memory(model: FakeModel, settings: MemorySettings) -> MemoryPlan:
    """Compute the memory of each phase of a training step, from the second step on, when optimizer states exist.

    Args:
        model: model in the data type of its weights, see :meth:`FakeModel.with_dtype`.
        settings: settings of the run.

    Example:
        >>> from torchrl_rloo.embedded import build_model, build_tokenizer
        >>> model = FakeModel(build_model(build_tokenizer(), seed=0).config)
        >>> plan = plan_memory(model, MemorySettings(rows=8, row_tokens=32, prompt_tokens=16))
        >>> plan.phases["optimize"]["weights"], plan.phases["optimize"]["gradients"]  # 152,256 of four bytes
        (609024, 609024)
    """
    # Parts of all phases
    held = {
        "weights": weight_bytes(model.weights, settings),
        "optimizer states": optimizer_bytes(model.weights, settings),
        "reference model": reference_bytes(model.weights, settings),
        "sampler copy": copy_bytes(model.weights, settings),
        "process": BASE_BYTES[settings.device]
        + (NCCL_BYTES if settings.device == "cuda" and settings.ranks > 1 else 0),
    }
    gradients = gradient_bytes(model.weights, settings)
    engine, asleep = settings.engine_bytes, 0 if settings.engine_sleeps else settings.engine_bytes
    # Parts of each phase
    phases = {
        "collect": held
        | {
            "gathered weights": sampling_gather_bytes(model.weights, settings),
            "key-value cache": cache_bytes(model.kv_elements, settings),
            "decoding": decoding_bytes(model.head[0], settings),
            "engine": engine,
        },
        "train": held | training_parts(model, settings) | {"engine": asleep},
        "optimize": held
        | {"gradients": gradients, "optimizer temporaries": step_bytes(model.weights, settings), "engine": asleep},
    }
    if settings.parallel == "fsdp" and not settings.load_shards:  # each rank shards a model that it has loaded
        whole = replace(settings, parallel="none", offload=())
        loaded = {
            "weights": weight_bytes(model.weights, whole),
            "reference model": reference_bytes(model.weights, whole),
        }
        phases = {"load": loaded | {name: held[name] for name in ("sampler copy", "process")} | {"engine": 0}} | phases
    # What the allocator loses
    for parts in phases.values():
        own = sum(parts.values()) - parts["process"] - parts["engine"]
        parts["allocator"] = round(FRAGMENTATION[settings.device] * own)
    return MemoryPlan({phase: {k: v for k, v in parts.items() if v} for phase, parts in phases.items()}, settings)


def shard_numel(weight: Weight, shards: int) -> int:
    """Return the elements of a parameter on the first rank: FSDP2 splits its first dimension into equal chunks."""
    if not weight.shape or shards == 1:
        return weight.numel
    return math.ceil(weight.shape[0] / shards) * math.prod(weight.shape[1:])


def weight_bytes(weights: Sequence[Weight], settings: MemorySettings) -> int:
    """Return the bytes of a rank's weights: its shards with FSDP, 4-bit matrices with quantization."""
    if "parameters" in settings.offload:
        return 0
    return round(sum(shard_numel(w, settings.shards) * _stored(w, settings) for w in weights))


def gradient_bytes(weights: Sequence[Weight], settings: MemorySettings) -> int:
    """Return the bytes of the gradients at the end of a step: of the shards with FSDP.

    DDP holds them twice, as gradients and in the buckets that it reduces (Li et al. 2020, arXiv 2006.15704).
    """
    if "parameters" in settings.offload:
        return 0
    copies = 2 if settings.parallel == "ddp" else 1
    return copies * sum(shard_numel(w, settings.shards) * w.itemsize for w in weights if w.trained)


def optimizer_bytes(weights: Sequence[Weight], settings: MemorySettings) -> int:
    """Return the bytes of the optimizer's states, which have the sizes of the gradients' shards.

    AdamW has two moments (Loshchilov and Hutter 2019, arXiv 1711.05101), its 8-bit variant two of a byte an element
    (Dettmers et al. 2022, arXiv 2110.02861). Muon has one momentum for matrices in layers and AdamW for the rest.
    """
    if {"optimizer", "parameters"} & set(settings.offload):
        return 0

    def share(weight: Weight) -> float:
        matrix = weight.layer is not None and len(weight.shape) == 2
        name = "adamw" if settings.optimizer == "muon" and not matrix else settings.optimizer
        return state_share(name, {} if name != settings.optimizer else settings.optimizer_kwargs)

    return round(sum(shard_numel(w, settings.shards) * w.itemsize * share(w) for w in weights if w.trained))


def state_share(name: str, kwargs: Mapping[str, Any]) -> float:
    """Return the bytes of an optimizer's states for each byte of a weight, from one step of a small matrix.

    Raises:
        ValueError: if torch has no optimizer of this name.

    Example:
        >>> state_share("adamw", {}), state_share("sgd", {}), state_share("sgd", {"momentum": 0.9})
        (2.0, 0.0, 1.0)
    """
    if name in ("adamw_8bit", "muon"):
        return {"adamw_8bit": ADAMW_8BIT_SHARE, "muon": 1.0}[name]
    if name not in TORCH_OPTIMIZERS:
        raise ValueError(
            f"optimizer.name={name} is unknown{did_you_mean(name, TORCH_OPTIMIZERS)}; use one of torch.optim"
        )
    weight = torch.nn.Parameter(torch.zeros(256, 256))
    weight.grad = torch.zeros_like(weight)
    optimizer = TORCH_OPTIMIZERS[name]([weight], lr=1e-3, **kwargs)
    optimizer.step()
    states = [t for t in optimizer.state[weight].values() if isinstance(t, torch.Tensor) and t.numel() > 1]
    return sum(t.nbytes for t in states) / weight.nbytes


def step_bytes(weights: Sequence[Weight], settings: MemorySettings) -> int:
    """Return the temporary bytes of an optimizer step.

    On CUDA torch steps all parameters together, and AdamW holds the root of every second moment. On CPUs it steps one
    parameter after the other, with two temporaries of its size. Offloaded states come to the device in chunks.
    """
    if "parameters" in settings.offload:
        return 0
    sizes = [shard_numel(w, settings.shards) * w.itemsize for w in weights if w.trained]
    if "optimizer" in settings.offload:
        return round(min(max(CHUNK_BYTES, *sizes), sum(sizes)) * (1 + state_share("adamw", {})))
    return sum(sizes) if settings.device == "cuda" else 2 * max(sizes, default=0)


def reference_bytes(weights: Sequence[Weight], settings: MemorySettings) -> int:
    """Return the bytes of the reference model, a frozen copy that is sharded like the trained model."""
    return round(sum(shard_numel(w, settings.shards) * w.itemsize for w in weights)) if settings.reference else 0


def copy_bytes(weights: Sequence[Weight], settings: MemorySettings) -> int:
    """Return the bytes of the sampler's own copy of the weights, whole on the rank that samples."""
    if settings.copy_dtype is None:
        return 0
    return sum(w.numel for w in weights) * parse_dtype(settings.copy_dtype).itemsize


def sampling_gather_bytes(weights: Sequence[Weight], settings: MemorySettings) -> int:
    """Return the bytes of the whole weights that FSDP gathers on every rank while the model itself samples."""
    if settings.parallel != "fsdp" or settings.sampling is None or settings.copy_dtype is not None:
        return 0
    return sum(w.numel * _computed(w, settings) for w in weights)


def cache_bytes(kv_elements: int, settings: MemorySettings) -> int:
    """Return the bytes of the key-value cache of the Transformers sampler, whose buffers grow by half.

    Args:
        kv_elements: elements of one token in all layers: keys and values of ``layers * kv_heads * head_dim``.
        settings: settings of the run.
    """
    if settings.sampling is None:
        return 0
    from torchrl_rloo.engines.decoder import buffer_length  # imports transformers, which takes 2 s

    length = buffer_length(settings.prompt_tokens)
    while length < settings.row_tokens:
        length = buffer_length(length + 1)
    return settings.sampling.lines * length * kv_elements * settings.sampling.itemsize


def decoding_bytes(vocab_size: int, settings: MemorySettings) -> int:
    """Return the bytes of the next token's logits of all lines: float32, with two copies of their size."""
    return 0 if settings.sampling is None else 3 * 4 * settings.sampling.lines * vocab_size


def training_parts(model: FakeModel, settings: MemorySettings) -> dict[str, int]:
    """Return gradients, activations, head and gathered weights at the moment of a pass when their sum is largest."""
    # Trace a pass in its precision: autocast keeps the weights, FSDP gathers them in the narrow type
    narrow = settings.precision != settings.dtype
    autocast = parse_dtype(settings.precision) if narrow and settings.parallel != "fsdp" else None
    traced = model.with_dtype(parse_dtype(settings.precision)) if narrow and autocast is None else model
    accumulated = settings.passes > 1
    work = traced.trace(settings.work, autocast=autocast, accumulated=accumulated)
    # Add the head's part, and what gradients take in each layer
    head = head_bytes(model.head, settings, trained=model.trains_head)
    parts = backward_parts(work, model, settings, head)
    fsdp = gather_parts(model.weights, settings)
    return parts | fsdp


def backward_parts(work: PassBytes, model: FakeModel, settings: MemorySettings, head: int) -> dict[str, int]:
    """Return gradients, activations and head at the largest moment of a pass: in the head, or in one of the layers.

    At layer ``l`` there are what the layers before ``l`` saved, all that ``l`` needs, and the gradients of the layers
    after ``l``. After an earlier pass there are the gradients of all layers. A tied projection's gradient waits for
    that of the embedding.
    """
    # Sum up the gradients by layer
    first = settings.passes == 1
    held = gradient_bytes(model.weights, settings)
    by_layer = [0] * len(work.layers)
    for w in model.weights:
        if w.trained and w.layer is not None and "parameters" not in settings.offload:
            by_layer[w.layer] += shard_numel(w, settings.shards) * w.itemsize
    projection = math.prod(model.head) * 4 if model.trains_head else 0
    pending = projection if first or model.tied else 0
    buckets = held // 2 if settings.parallel == "ddp" else 0
    # Compare the moments
    kept = [layer.inputs if settings.gradient_checkpointing else layer.saved for layer in work.layers]
    if "activations" in settings.offload:
        kept = [0] * len(kept)
    made = buckets if first else held
    moments = [{"gradients": made, "activations": work.outside + sum(kept), "head": head}]
    for i, layer in enumerate(work.layers):
        made = held if not first else buckets + sum(by_layer[i + 1 :])
        activations = work.outside + sum(kept[:i]) + layer.peak
        moments.append({"gradients": made, "activations": activations, "head": pending})
    end = held if not first else buckets + sum(by_layer)
    moments.append({"gradients": end, "activations": work.outside, "head": pending + projection * model.tied})
    return max(moments, key=lambda parts: sum(parts.values()))


def head_bytes(head: tuple[int, int], settings: MemorySettings, *, trained: bool) -> int:
    """Return the bytes of the head's backward pass: states, their gradient, one tile, and the weight's gradient.

    Args:
        head: shape ``[V, H]`` of the projection.
        settings: settings of the run.
        trained: whether the projection is trained.
    """
    vocab, hidden = head
    states = settings.work.actions
    item = parse_dtype(settings.precision).itemsize
    elements, rows, _ = tile_limits(settings.device)
    tile = max(elements, min(rows, states)) * 4
    widened = 4 * states * hidden if item < 4 and settings.device == "cpu" else 0
    return states * hidden * (item + 4) + widened + tile + (4 * vocab * hidden if trained else 0)


def gather_parts(weights: Sequence[Weight], settings: MemorySettings) -> dict[str, int]:
    """Return what FSDP gathers during a pass, and the gradients that it has not reduced yet.

    The weights outside the layers stay gathered for the pass. Of the layers there are two, of which one is gathered
    ahead, and the buffer of a gather or of a reduction (Zhao et al. 2023, arXiv 2304.11277).
    """
    if settings.parallel != "fsdp":
        return {}
    layers = [sum(w.numel * _computed(w, settings) for w in weights if w.layer == i) for i in _layers(weights)]
    root = sum(w.numel * _computed(w, settings) for w in weights if w.layer is None)
    parts = {"gathered weights": root + 3 * max(layers, default=0)}
    trained = [w for w in weights if w.trained]
    if settings.reduce == "last_pass" and settings.passes > 1:
        parts["unreduced gradients"] = 4 * sum(w.numel for w in trained)
    return parts


def _layers(weights: Sequence[Weight]) -> list[int]:
    return sorted({w.layer for w in weights if w.layer is not None})


def _stored(weight: Weight, settings: MemorySettings) -> float:
    """Return the bytes of an element of a weight at rest."""
    quantized = settings.quantization is not None and weight.quantizable and not weight.trained
    return NF4_BYTES if quantized else weight.itemsize


def _computed(weight: Weight, settings: MemorySettings) -> int:
    """Return the bytes of an element of a weight that FSDP has gathered."""
    if settings.float32_head and weight.layer is None:
        return weight.itemsize
    return min(weight.itemsize, parse_dtype(settings.precision).itemsize)
