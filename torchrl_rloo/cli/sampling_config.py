"""Sections of the recipes' configurations about sampling: turns, conversations, collector and engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torchrl_rloo.cli.config import CurriculumConfig, TrainConfig
from torchrl_rloo.cli.schema import check_settings


@dataclass
class GenerateConfig:
    """Sampling of the policy's turns."""

    max_new_tokens: int = 32  # largest number of tokens per turn
    temperature: float = 1.0  # divisor of the logits
    top_p: float = 1.0  # probability mass of the most likely tokens to sample from; 1: all
    top_k: int | None = None  # number of most likely tokens to sample from; null: all
    min_p: float = 0.0  # smallest probability of a token, relative to the most likely one; 0: any
    repetition_penalty: float = 1.0  # penalty of tokens already in the row; 1: none; above 1: less likely
    stop_strings: list[str] | None = None  # texts that end a turn; null: none
    stop_token_ids: list[int] | None = None  # token ids that end a turn; null: none


@dataclass
class EnvironmentConfig:
    """Turns and limits of conversations."""

    transforms: list[Any] | None = None  # transforms that answer turns: [{_target_: ...}]; null: the task's
    max_turns: int | None = None  # turns of the policy per conversation; null: the task's
    max_turn_tokens: int | None = None  # sampled tokens per turn, if below generate.max_new_tokens; null: the task's
    max_tokens: int | None = None  # tokens per conversation; null: the task's, or the context if it has several turns
    max_seconds: float | None = None  # wall-clock seconds per conversation, checked between turns; null: the task's
    on_time_limit: str | None = None  # conversation that max_seconds ends: score, or abstain; null: score
    on_rewrite: str | None = None  # row whose past the template rewrites: keep as sampled, or split; null: keep


@dataclass
class CollectorConfig:
    """Scheduling of conversations."""

    max_staleness: int | None = None  # updates between sampling and training of a token; samples while training if > 0
    on_stale: str = "mask"  # tokens beyond max_staleness: mask them, baseline (mask their rows), requeue groups, wait
    ahead: int = 0  # groups to start for later steps while this one trains, without a bound on staleness
    min_members: int | None = None  # ended members with which a group may be trained on; null: all
    on_failure: str = "abstain"  # failed conversations: abstain, or replace by another of the prompt
    max_in_flight: Any = None  # conversations in flight; {minimum: 8, maximum: 512}: by engine load; null: all
    reward_threads: int = 1  # groups scored in parallel
    max_batch_size: int | None = None  # rows per batch of the Hugging Face model; null: all that wait
    max_consecutive_failures: int | None = 100  # consecutive failed turns that stop the run; null: never stop
    max_failed_pushes: int = 3  # consecutive failed weight updates that stop the run
    audit: bool = False  # record every change of a group's state in ledger.jsonl of output_dir

    def __post_init__(self):
        limits = self.max_in_flight
        bounds = (limits.get("minimum"), limits.get("maximum")) if isinstance(limits, dict) else (limits, limits)
        valid = limits is None or (all(type(b) is int for b in bounds) and 1 <= bounds[0] <= bounds[1])
        if not valid or (isinstance(limits, dict) and len(limits) != 2):
            raise ValueError(
                f"collector.max_in_flight={limits} must be a number of at least 1, or {{minimum: 8, maximum: 512}}, or "
                "null"
            )
        if self.ahead and self.max_staleness is not None:
            raise ValueError(
                f"collector.ahead={self.ahead} cannot be combined with "
                f"collector.max_staleness={self.max_staleness}; set only one"
            )


@dataclass
class SamplerConfig:
    """Weights that the sampler uses."""

    share_weights: bool = True  # sample with the training model; false: with a copy
    dtype: str | None = None  # data type of the copy, e.g. bfloat16; null: the training model's
    sync_every: int = 1  # steps between weight updates of the copy; 0: never
    offload: bool = False  # keep the copy in CPU memory while the model trains; requires a GPU

    def __post_init__(self):
        if self.share_weights and (self.dtype is not None or self.sync_every != 1):
            raise ValueError(
                f"sampler.dtype={self.dtype} and sampler.sync_every={self.sync_every} cannot be combined with "
                "sampler.share_weights=true; set it to false"
            )
        if self.share_weights and self.offload:
            raise ValueError("sampler.offload=true requires sampler.share_weights=false, a copy to move")


@dataclass
class InferenceConfig:
    """Engine that samples, and its weight updates."""

    engine: Any = None  # class (_target_) and arguments of the engine; null: the Hugging Face model samples
    updater: Any = None  # class (_target_) and arguments of the weight updater of the engine
    replicas: int = 1  # engines that share the requests; more than one requires a pool
    per_replica: dict[str, Any] = field(default_factory=dict)  # engine arguments with one value per replica
    pool: Any = None  # class (_target_) and arguments of the pool that supervises the engines; null: one engine alone
    self_test: bool = True  # check before training that the engine follows a change of the weights
    sleep: bool = False  # free the engine's GPU memory while training; requires engine.enable_sleep_mode=true
    parity_every: int = 0  # steps between parity/* metrics, which compare sampler and trainer; 0: never

    def __post_init__(self):
        for name in ("engine", "updater", "pool"):
            check_settings(f"inference.{name}", getattr(self, name))
        if self.replicas > 1 and self.pool is None:
            raise ValueError(f"inference.replicas={self.replicas} requires a pool, as in inference=vllm_process")
        for name, values in self.per_replica.items():
            if not isinstance(values, list) or len(values) != self.replicas:
                raise ValueError(
                    f"inference.per_replica.{name}={values} must be a list of inference.replicas={self.replicas} values"
                )
        if self.engine is not None and "_target_" not in self.engine:
            raise ValueError("inference.engine has no _target_: choose one as well, such as inference=vllm")
        unset_values = {"updater": None, "pool": None, "replicas": 1, "sleep": False, "self_test": True}
        for name, unset in unset_values.items():
            if self.engine is None and getattr(self, name) != unset:
                raise ValueError(
                    f"inference.{name} requires an engine, such as inference=vllm; without one the model itself samples"
                )


def check_offload(sampler: SamplerConfig, collector: CollectorConfig, inference: InferenceConfig, device: str) -> None:
    """Raise ``ValueError`` if an offloaded sampler would stay on the CPU, or would sample while it is there."""
    if not sampler.offload:
        return
    if not device.startswith("cuda"):
        raise ValueError(f"sampler.offload=true has no effect with model.device={device}; set it to false")
    for name, value in (("ahead", collector.ahead), ("max_staleness", collector.max_staleness)):
        if value:
            raise ValueError(
                f"sampler.offload=true cannot be combined with collector.{name}={value}; set it to 0 or null"
            )
    if inference.engine is not None:
        raise ValueError("sampler.offload=true cannot be combined with an engine; set inference.sleep=true instead")


def check_ranks(
    train: TrainConfig, curriculum: CurriculumConfig, inference: InferenceConfig, sampler: SamplerConfig
) -> None:
    """Raise ``ValueError`` if rank 0 cannot sample or score while the other ranks wait."""
    target = str((inference.engine or {}).get("_target_", ""))
    if train.parallel != "none" and target.endswith(".VLLMEngine"):
        raise ValueError(
            f"inference.engine={target} runs vLLM in the process of rank 0, whose process group it would replace, and "
            f"cannot be combined with train.parallel={train.parallel}; use inference=vllm_process or vllm_server"
        )
    if train.load_shards and not sampler.share_weights:
        raise ValueError(
            "train.load_shards=true cannot be combined with sampler.share_weights=false, a whole copy on rank 0; set "
            "train.load_shards=false"
        )
    if train.parallel == "fsdp" and curriculum.cache is not None and inference.engine is not None:
        raise ValueError(
            "curriculum.cache scores groups again on rank 0 and cannot be combined with train.parallel=fsdp and an "
            "engine; set curriculum.cache=null, or train.parallel=ddp"
        )


def check_split(
    train: TrainConfig, sampler: SamplerConfig, inference: InferenceConfig, curriculum: CurriculumConfig, lora: Any
) -> None:
    """Raise ``ValueError`` if a setting cannot be combined with ranks that split the model or its passes."""
    for name in ("tensor_parallel", "context_parallel"):
        if (value := getattr(train, name)) > 1 and curriculum.cache is not None:
            raise ValueError(
                f"curriculum.cache scores groups again on rank 0 and cannot be combined with train.{name}={value}; set "
                "curriculum.cache=null"
            )
    split = f"train.tensor_parallel={train.tensor_parallel}"
    if train.tensor_parallel > 1 and sampler.share_weights and inference.engine is None:
        raise ValueError(f"rank 0 cannot sample alone with {split}; set sampler.share_weights=false, or an engine")
    if train.tensor_parallel > 1 and lora is not None:
        raise ValueError(f"lora cannot be combined with {split}; set it to 1, and train.parallel=fsdp")


def check_transport(inference: InferenceConfig) -> None:
    """Raise ``ValueError`` if this machine cannot have the transport of weights, before a model is loaded."""
    transport = (inference.updater or {}).get("transport")
    if isinstance(transport, dict):
        from hydra.errors import InstantiationException
        from hydra.utils import instantiate

        try:
            instantiate(transport)
        except InstantiationException as error:
            raise error.__cause__ or error from None


def check_ahead(collector: CollectorConfig, sampler: SamplerConfig) -> None:
    """Raise ``ValueError`` if the collector would sample ahead with the weights that are being trained."""
    for name in ("ahead", "max_staleness"):
        if (value := getattr(collector, name)) and sampler.share_weights:
            raise ValueError(
                f"collector.{name}={value} samples while the model trains and cannot be combined with "
                "sampler.share_weights=true; set it to false"
            )


def is_on_ray(inference: InferenceConfig) -> bool:
    """Return whether the engines are actors of a Ray cluster."""
    return str((inference.engine or {}).get("_target_")).endswith(".RayEngine")


def engine_arguments(inference: InferenceConfig) -> dict[str, Any]:
    """Return the arguments of the engine that samples; those of an actor's engine are one level deeper."""
    return inference.engine.get("make_engine", inference.engine) if inference.engine is not None else {}


def check_quantization(quantization: str | None, lora: Any) -> None:
    """Raise if weights are quantized but no adapter is trained.

    Raises:
        ValueError: if there is no adapter.
    """
    if quantization is not None and lora is None:
        raise ValueError(
            f"model.quantization={quantization} requires an adapter, since quantized weights cannot be trained; "
            "set lora={r: 16, target_modules: all-linear}"
        )
