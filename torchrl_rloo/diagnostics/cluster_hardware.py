"""Speed of engines and trainers on paper, from a model's shapes and the data sheets of GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchrl_rloo.diagnostics.cluster_engine import EngineSpeed

GIB = 2**30
_STEP_SECONDS = 3e-3  # time of a decoding step outside the GPU's kernels: scheduling, sampling, launches
_MAX_RUNNING = 1024  # vLLM's default of max_num_seqs on large GPUs


@dataclass(frozen=True)
class GPU:
    """Figures of a GPU's data sheet.

    Attributes:
        memory: bytes of memory.
        bandwidth: bytes per second that it reads from memory.
        flops: dense bfloat16 operations per second.
    """

    memory: float
    bandwidth: float
    flops: float


# Data sheets of NVIDIA (A100 80GB SXM, H100 SXM, H200 SXM, HGX B200 per GPU, L40S, L4) and AMD (Instinct MI300X).
# Operations are without sparsity
GPUS = {
    "A100": GPU(80e9, 2.039e12, 312e12),
    "H100": GPU(80e9, 3.35e12, 989e12),
    "H200": GPU(141e9, 4.8e12, 989e12),
    "B200": GPU(180e9, 7.7e12, 2250e12),
    "L40S": GPU(48e9, 0.864e12, 362e12),
    "L4": GPU(24e9, 0.3e12, 121e12),
    "MI300X": GPU(192e9, 5.3e12, 1307e12),
}


@dataclass(frozen=True)
class ModelCost:
    """Sizes of a model that decide its speed.

    Args:
        parameters: number of parameters.
        active: parameters that one token uses; fewer than all in a mixture of experts.
        kv_elements: elements of the key-value cache that one token takes.
        layers: number of layers.
        width: width of attention, the number of heads times their size.
        itemsize: bytes of an element, of weights and cache.
    """

    parameters: float
    active: float
    kv_elements: float
    layers: int
    width: int
    itemsize: int = 2

    @classmethod
    def of(cls, model: Any, active: float | None = None) -> ModelCost:
        """Return the sizes of a :class:`FakeModel`.

        Args:
            model: shapes of the model.
            active: parameters that one token uses; None takes all, which a mixture of experts refuses.

        Raises:
            ValueError: if the model is a mixture of experts and ``active`` is None.
        """
        config, parameters = model.config, sum(weight.numel for weight in model.weights)
        if active is None and getattr(config, "num_experts_per_tok", None):
            raise ValueError(
                "a mixture of experts uses part of its parameters for a token; set cluster.active_parameters to it, in "
                "billions"
            )
        heads = config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        return cls(parameters, active or parameters, model.kv_elements, config.num_hidden_layers, heads * size)

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights."""
        return self.parameters * self.itemsize

    @property
    def kv_bytes(self) -> float:
        """Bytes of the cache that one token takes."""
        return self.kv_elements * self.itemsize


@dataclass(frozen=True)
class Efficiency:
    """Shares of a data sheet's figures that programs reach.

    Args:
        bandwidth: share of the memory bandwidth in a decoding step.
        flops: share of the operations of an engine that reads prompts or decodes large batches.
        mfu: share of the operations in training, without those of recomputation.
        memory: share of a GPU's memory that an engine takes.
    """

    bandwidth: float = 0.7
    flops: float = 0.5
    mfu: float = 0.35
    memory: float = 0.9


def engine_speed(
    model: ModelCost, gpu: GPU, gpus: int, context: float, efficiency: Efficiency = Efficiency()
) -> EngineSpeed:
    """Return the speed of an engine.

    A decoding step of ``n`` requests reads all weights and the caches of their ``context`` tokens, and computes two
    operations per active parameter and request. The slower of both decides. Communication between GPUs is left out.

    Args:
        model: sizes of the model.
        gpu: kind of its GPUs.
        gpus: number of its GPUs, which split weights and cache.
        context: mean tokens in the cache of a running request.
        efficiency: shares of the data sheet's figures.

    Raises:
        ValueError: if the weights leave no room for a cache.

    Example:
        >>> model = ModelCost(7.6e9, 7.6e9, kv_elements=28_672, layers=28, width=3584)
        >>> speed = engine_speed(model, GPUS["H100"], 1, context=2000.0)
        >>> round(speed.rate(1)), round(speed.rate(256)), round(speed.cache_tokens)
        (105, 11635, 990513)
    """
    cache = efficiency.memory * gpu.memory * gpus - model.weight_bytes
    if cache <= 0:
        raise ValueError(
            f"engine_gpus={gpus} have {efficiency.memory * gpu.memory * gpus / GIB:.0f} GiB for an engine, but the "
            f"weights take {model.weight_bytes / GIB:.0f} GiB; raise it"
        )
    bandwidth, flops = efficiency.bandwidth * gpu.bandwidth * gpus, efficiency.flops * gpu.flops * gpus

    def rate(running: int) -> float:
        read = (model.weight_bytes + running * context * model.kv_bytes) / bandwidth
        compute = 2 * model.active * running / flops
        return running / (max(read, compute) + _STEP_SECONDS)

    return EngineSpeed(rate, flops / (2 * model.active), cache / model.kv_bytes, _MAX_RUNNING)


def smallest_engine(model: ModelCost, gpu: GPU, row_tokens: float, efficiency: Efficiency = Efficiency()) -> int:
    """Return the smallest power of two of GPUs that hold the weights and a cache of 16 rows.

    Args:
        model: sizes of the model.
        gpu: kind of the GPUs.
        row_tokens: tokens of a row.
        efficiency: shares of the data sheet's figures.
    """
    gpus, needed = 1, model.weight_bytes + 16 * row_tokens * model.kv_bytes
    while gpus * efficiency.memory * gpu.memory < needed:
        gpus *= 2
    return gpus


def train_rate(
    model: ModelCost,
    gpu: GPU,
    row_tokens: float,
    efficiency: Efficiency = Efficiency(),
    *,
    forward_passes: int = 0,
    epochs: int = 1,
) -> float:
    """Return the tokens of rows per second that one trainer GPU takes.

    A token costs ``6 * active`` operations for forward and backward pass, and ``6 * layers * width * row_tokens`` for
    causal attention (half of ``12 * layers * width * row_tokens``, Chowdhery et al. 2022, arXiv 2204.02311, appendix
    B). A forward pass alone costs a third.

    Args:
        model: sizes of the model.
        gpu: kind of the GPU.
        row_tokens: mean tokens of a row.
        efficiency: shares of the data sheet's figures.
        forward_passes: further forward passes over each row, such as those of a reference or of old log-probs.
        epochs: passes of training over each row.

    Example:
        >>> model = ModelCost(7.6e9, 7.6e9, kv_elements=28_672, layers=28, width=3584)
        >>> round(train_rate(model, GPUS["H100"], 2000.0))
        7396
    """
    token = 6 * model.active + 6 * model.layers * model.width * row_tokens
    return efficiency.mfu * gpu.flops / (token * (epochs + forward_passes / 3))


def push_seconds(model: ModelCost, gpus: int, network: float, load: float) -> tuple[float, float]:
    """Return the seconds of sending the weights, and those in which an engine stands still to load them.

    Args:
        model: sizes of the model.
        gpus: GPUs of an engine, which load their shares at the same time.
        network: bytes per second from the trainer to each engine.
        load: bytes per second from a host's memory to one GPU.
    """
    return model.weight_bytes / network, model.weight_bytes / gpus / load
