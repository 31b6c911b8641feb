"""Memory of a training step on one rank: sizes of the weights, and a formula for activations of a gated decoder.

``benchmarks/bench_memory.py`` measures the error of the sum on processes that train.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from torchrl_rloo.functional.log_probs import tile_limits
from torchrl_rloo.images.families.table import is_family
from torchrl_rloo.images.towers import vision_towers
from torchrl_rloo.modules.loading import add_adapter, model_class
from torchrl_rloo.runtime.lookup import did_you_mean, parse_dtype
from torchrl_rloo.training.optimizer_classes import CHUNK_BYTES
from torchrl_rloo.training.optimizers import FUSED, TORCH_OPTIMIZERS

MIB = 2**20
# Bytes of a process before it holds a tensor: CUDA context, cuBLAS workspaces and kernels; on CPUs the imported code
BASE_BYTES = {"cpu": 600 * MIB, "cuda": 1024 * MIB}
NCCL_BYTES = 512 * MIB  # channels of NCCL among several ranks
FRAGMENTATION = {"cpu": 0.0, "cuda": 0.05}  # share that the caching allocator of CUDA leaves unused
NF4_BYTES = 0.5 + 4 / 64  # of a 4-bit weight: one float32 scale for 64 of them (Dettmers et al. 2023, arXiv 2305.14314)
ADAMW_8BIT_SHARE = 2 * (1 + 4 / 256) / 4  # state of a float32 weight: two bytes, and two scales for 256 elements


@dataclass(frozen=True)
class MemorySettings:
    """Settings of a run that decide its memory."""

    rows: int  # of a minibatch, over all ranks
    row_tokens: int  # of the longest row
    prompt_tokens: int  # of its prompt
    group: int = 1  # rows that share a prompt
    packing: str = "none"  # or "packed", "shared_prefix"
    micro_batch_size: int | None = None  # rows of a pass; None takes all of a rank
    micro_batch_tokens: int | None = None  # tokens of a pass; None sets no limit
    parallel: str = "none"  # or "ddp", "fsdp"
    ranks: int = 1
    shard_size: int | None = None  # with FSDP, ranks that share one copy of the model; None shares it among all
    load_shards: bool = False  # with FSDP, whether each rank reads only its shards of the model's files
    dtype: str = "float32"  # of the trained weights
    precision: str = "float32"  # of a pass
    gradient_checkpointing: bool = False
    quantization: str | None = None  # "nf4": 4-bit frozen weights under an adapter
    optimizer: str = "adamw"  # or "adamw_8bit", "muon", a class of torch.optim in lower case
    optimizer_kwargs: Mapping[str, Any] = field(default_factory=dict)  # those that decide its states
    offload: tuple[str, ...] = ()  # parts in host memory: "activations", "optimizer", "parameters"
    reference: bool = False  # whether a frozen copy of the model scores the KL
    copy_dtype: str | None = None  # of the sampler's copy of the weights; None shares the trained weights
    sampled_lines: int = 0  # completions that Transformers samples at the same time; 0 if an engine samples
    cache_dtype: str = "float32"  # of its key-value cache
    engine_bytes: int = 0  # of this device that an engine takes; 0 if it runs elsewhere
    engine_sleeps: bool = False  # whether the engine frees its memory while the model trains
    device: str = "cpu"  # or "cuda"
    device_bytes: int | None = None  # memory of the device; None sets no limit

    @property
    def pass_rows(self) -> int:
        """Rows of the largest pass of a rank."""
        rank_rows = math.ceil(self.rows / self.ranks)
        rows = min(rank_rows, self.micro_batch_size or rank_rows)
        while rows > 1 and self.micro_batch_tokens is not None and self._counted(rows) > self.micro_batch_tokens:
            rows -= 1
        return rows

    @property
    def pass_tokens(self) -> int:
        """Positions of the largest pass; a pack leaves out the last token of each row."""
        return self._counted(self.pass_rows) - (0 if self.packing == "none" else self.pass_rows)

    @property
    def passes(self) -> int:
        """Passes of an optimizer step on one rank."""
        return math.ceil(math.ceil(self.rows / self.ranks) / self.pass_rows)

    @property
    def shards(self) -> int:
        """Ranks that share one copy of the model."""
        return (self.shard_size or self.ranks) if self.parallel == "fsdp" else 1

    def _counted(self, rows: int) -> int:
        """Return the tokens of rows as :func:`~torchrl_rloo.data.rows.micro_batches` counts them."""
        if self.packing != "shared_prefix":
            return rows * self.row_tokens
        return math.ceil(rows / self.group) * self.prompt_tokens + rows * (self.row_tokens - self.prompt_tokens)


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on the rank with the most memory, by phase of a training step.

    ``phases`` has the pieces of ``"load"`` (of a model that is sharded afterwards), ``"collect"``, ``"train"`` and
    ``"optimize"``.
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


class ModelShape(NamedTuple):
    """Elements of a model's weights, and sizes of its layers."""

    layers: int
    layer: float  # elements of the weights of one layer, on average
    outside: int  # and of those outside the layers
    trained: int
    largest: int  # of the largest trained weight
    quantizable: int  # of the matrices that 4-bit quantization replaces
    hidden: int
    query: int  # heads * head_dim
    key: int  # key-value heads * head_dim
    norms: float  # norms of the hidden states in a layer
    normed: int  # elements of a token that norms of queries and keys keep
    mlp: int  # features between the two maps of the MLP, of all experts that a token takes
    routed: int  # features of the copies of a token that experts take
    adapted: float  # features of the inputs of a layer's adapters; 0 without an adapter
    vocab: int
    tied: bool
    trains_head: bool

    @property
    def numel(self) -> int:
        """Elements of all weights."""
        return round(self.layers * self.layer) + self.outside


def read_shape(config: Any, lora: Mapping[str, Any] | None = None, *, train_vision: bool = False) -> ModelShape:
    """Return the shape of a model, by its configuration and the arguments of its adapter; it takes no memory."""
    with torch.device("meta"):
        model = model_class(is_family(config)).from_config(config)
        for tower in () if train_vision else vision_towers(model):  # as load_model does
            tower.requires_grad_(False)
        model = model if lora is None else add_adapter(model, lora)
    config, layers = model.config.get_text_config(), model.get_decoder().layers
    trained = [p.numel() for p in model.parameters() if p.requires_grad]
    inside = sum(p.numel() for p in layers.parameters())
    linear = [m.weight for m in layers.modules() if isinstance(m, nn.Linear) and not m.weight.requires_grad]
    adapters = [p.shape[1] for name, p in layers.named_parameters() if "lora_A" in name]
    head, heads = model.get_output_embeddings().weight, config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    query, key = heads * width, (getattr(config, "num_key_value_heads", None) or heads) * width
    experts = getattr(config, "num_experts_per_tok", None) or 0
    size = getattr(config, "intermediate_size", 4 * config.hidden_size)
    norms = [name for name, p in layers.named_parameters() if p.shape == (config.hidden_size,) and "norm" in name]
    has_norms = any(name.endswith("q_norm") for name, _ in layers.named_modules())
    return ModelShape(
        layers=len(layers),
        layer=inside / len(layers),
        outside=sum(p.numel() for p in model.parameters()) - inside,
        trained=sum(trained),
        largest=max(trained),
        quantizable=sum(w.numel() for w in linear),
        hidden=config.hidden_size,
        query=query,
        key=key,
        norms=len(norms) / len(layers),
        normed=2 * (query + key) if has_norms else 0,
        mlp=experts * getattr(config, "moe_intermediate_size", size) if experts else size,
        routed=experts * config.hidden_size,
        adapted=sum(adapters) / len(layers),
        vocab=head.shape[0],
        tied=head is model.get_input_embeddings().weight,
        trains_head=head.requires_grad,
    )


def plan_memory(model: ModelShape, settings: MemorySettings) -> MemoryPlan:
    """Compute the memory of each phase of a training step, from the second step on, when optimizer states exist.

    Example:
        >>> from torchrl_rloo.embedded import build_model, build_tokenizer
        >>> model = read_shape(build_model(build_tokenizer(), seed=0).config)
        >>> plan = plan_memory(model, MemorySettings(rows=8, row_tokens=32, prompt_tokens=16))
        >>> plan.phases["optimize"]["weights"], plan.phases["optimize"]["gradients"]  # 152,256 of four bytes
        (609024, 609024)
    """
    s, item, offload = settings, parse_dtype(settings.dtype).itemsize, set(settings.offload)
    cuda, fsdp = s.device == "cuda", s.parallel == "fsdp"
    narrow = min(item, parse_dtype(s.precision).itemsize)
    whole = model.numel * item
    stored = whole - round((item - NF4_BYTES) * model.quantizable) if s.quantization else whole
    size = 4 if model.adapted else item  # an adapter stays in float32; with "parameters", the host holds all
    trained = 0 if "parameters" in offload else math.ceil(model.trained * size / s.shards)
    share = state_share(s.optimizer, s.optimizer_kwargs)
    held = {
        "weights": 0 if "parameters" in offload else math.ceil(stored / s.shards),
        "optimizer states": 0 if "optimizer" in offload else round(trained * share),
        "reference model": math.ceil(whole / s.shards) if s.reference else 0,
        "sampler copy": 0 if s.copy_dtype is None else model.numel * parse_dtype(s.copy_dtype).itemsize,
        "process": BASE_BYTES[s.device] + (NCCL_BYTES if cuda and s.ranks > 1 else 0),
    }
    gradients = (2 if s.parallel == "ddp" else 1) * trained  # DDP: also in buckets (Li et al. 2020, arXiv 2006.15704)
    asleep = 0 if s.engine_sleeps else s.engine_bytes
    # Adam needs none. Others hold one for every weight on CUDA; on CPUs they take two of one parameter's size
    temporaries = trained if cuda else 2 * min(trained, math.ceil(model.largest * size / s.shards))
    temporaries = 0 if s.optimizer in FUSED else temporaries
    if "optimizer" in offload:
        temporaries = round(min(CHUNK_BYTES, trained) * (1 + share))
    logits = 3 * 4 * s.sampled_lines * model.vocab  # float32, with two copies of their size
    gathers = fsdp and s.sampled_lines and s.copy_dtype is None
    phases = {}
    if fsdp and not s.load_shards:  # each rank shards a model that it has loaded
        loaded = {"weights": stored, "reference model": whole if s.reference else 0}
        phases["load"] = loaded | {name: held[name] for name in ("sampler copy", "process")}
    sampling = {"key-value cache": cache_bytes(model, s), "decoding": logits, "engine": s.engine_bytes}
    phases["collect"] = held | {"gathered weights": model.numel * narrow if gathers else 0} | sampling
    phases["train"] = held | training_parts(model, s, gradients) | {"engine": asleep}
    phases["optimize"] = held | {"gradients": gradients, "optimizer temporaries": temporaries, "engine": asleep}
    for parts in phases.values():
        own = sum(parts.values()) - parts["process"] - parts.get("engine", 0)
        parts["allocator"] = round(FRAGMENTATION[s.device] * own)
    return MemoryPlan({name: {k: v for k, v in parts.items() if v} for name, parts in phases.items()}, s)


def state_share(name: str, kwargs: Mapping[str, Any]) -> float:
    """Return the bytes of an optimizer's states for each byte of a weight; raise ``ValueError`` if it is unknown."""
    if name in ("adamw_8bit", "muon"):  # Muon has one momentum for the matrices in layers, which are nearly all
        return {"adamw_8bit": ADAMW_8BIT_SHARE, "muon": 1.0}[name]
    if name not in TORCH_OPTIMIZERS:
        near = did_you_mean(name, TORCH_OPTIMIZERS)
        raise ValueError(f"optimizer.name={name} is unknown{near}; use one of torch.optim")
    weight = nn.Parameter(torch.zeros(256, 256))
    weight.grad = torch.zeros_like(weight)
    optimizer = TORCH_OPTIMIZERS[name]([weight], lr=1e-3, **kwargs)
    optimizer.step()
    states = [t for t in optimizer.state[weight].values() if isinstance(t, torch.Tensor) and t.numel() > 1]
    return sum(t.nbytes for t in states) / weight.nbytes


def cache_bytes(model: ModelShape, settings: MemorySettings) -> int:
    """Return the bytes of the Transformers sampler's key-value cache, whose buffers grow by half."""
    if not settings.sampled_lines:
        return 0
    from torchrl_rloo.engines.decoder import buffer_length  # imports transformers, which takes 2 s

    length = buffer_length(settings.prompt_tokens)
    while length < settings.row_tokens:
        length = buffer_length(length + 1)
    elements = settings.sampled_lines * length * 2 * model.layers * model.key
    return elements * parse_dtype(settings.cache_dtype).itemsize


def training_parts(model: ModelShape, settings: MemorySettings, gradients: int) -> dict[str, int]:
    """Return gradients, activations, head and gathered weights at the largest moment of a pass."""
    s, tokens, item = settings, settings.pass_tokens, parse_dtype(settings.dtype).itemsize
    narrow = parse_dtype(s.precision).itemsize
    autocast = narrow < item and s.parallel != "fsdp"  # FSDP itself casts the weights
    # Elements of a token that a layer keeps: two norms, queries, keys, values, their attention, and a gated MLP
    inner = 2 * model.query + 2 * model.key + model.normed + 4 * model.mlp + 2 * model.routed
    inner += model.query if s.packing != "none" else 0
    norms = model.norms * ((13 if autocast else 12 if narrow == 4 else 8) - (narrow if model.adapted else 0))  # bytes
    copies = 4 * model.adapted if narrow < 4 and not autocast else 0  # float32 of an adapter
    layer = tokens * (norms * model.hidden + narrow * inner + copies) + (narrow * model.layer if autocast else 0)
    temporary = tokens * narrow * (2 * model.mlp + 2 * model.routed + model.hidden)
    outside = tokens * 4 * ((1 if model.adapted else 2) * model.hidden + (0 if s.packing == "none" else 128))
    inputs = tokens * model.hidden * (item if autocast else narrow)
    kept = 0 if "activations" in s.offload else inputs if s.gradient_checkpointing else layer
    # The head's backward pass: states, their gradient, one tile or the logits, and the weight's gradient
    states, (elements, rows, _) = s.pass_rows * (s.row_tokens - s.prompt_tokens), tile_limits(s.device)
    projection = 4 * model.vocab * model.hidden if model.trains_head else 0
    widened = 4 * states * model.hidden if narrow < 4 and s.device == "cpu" else 0
    if projection and s.device == "cpu" and states <= model.hidden:
        elements = states * model.vocab  # which the forward pass keeps
    head = states * model.hidden * (narrow + 4) + widened + 4 * max(elements, min(rows, states)) + projection
    # Compare three moments. In the first pass gradients come layer by layer, and a tied projection waits for its own
    first, pending = s.passes == 1, projection if s.passes == 1 or model.tied else 0
    made = gradients // 2 if s.parallel == "ddp" else 0
    layers = made + (gradients - made) * (1 if model.adapted else model.layers * model.layer / model.numel)
    moments = [
        {"gradients": made if first else gradients, "activations": outside + model.layers * kept, "head": head},
        {"gradients": made if first else gradients, "head": pending}
        | {"activations": outside + (model.layers - 1) * kept + layer + temporary},
        {"gradients": layers if first else gradients, "activations": outside + layer + temporary, "head": pending},
    ]
    parts = {name: round(size) for name, size in max(moments, key=lambda m: sum(m.values())).items()}
    # FSDP keeps the weights outside the layers, two layers, and the buffer of a gather (Zhao et al. 2023, 2304.11277)
    if s.parallel == "fsdp":
        parts["gathered weights"] = round((model.outside + 3 * model.layer) * min(item, narrow))
        if not first:
            parts["unreduced gradients"] = 4 * model.trained
    return parts
