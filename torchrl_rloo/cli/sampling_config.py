"""Sections of the recipes' configurations about sampling: turns, conversations, collector and engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

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

    def __post_init__(self):
        if self.share_weights and (self.dtype is not None or self.sync_every != 1):
            raise ValueError(
                f"sampler.dtype={self.dtype} and sampler.sync_every={self.sync_every} cannot be combined with "
                "sampler.share_weights=true; set it to false"
            )


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


def check_ahead(collector: CollectorConfig, sampler: SamplerConfig) -> None:
    """Raise ``ValueError`` if the collector would sample ahead with the weights that are being trained."""
    for name in ("ahead", "max_staleness"):
        if (value := getattr(collector, name)) and sampler.share_weights:
            raise ValueError(
                f"collector.{name}={value} samples while the model trains and cannot be combined with "
                "sampler.share_weights=true; set it to false"
            )
