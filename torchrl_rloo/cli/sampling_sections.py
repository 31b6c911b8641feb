"""Sections of RLOO training about sampling: weights, collector, cluster, choice of prompts and groups, stored rows."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field, fields
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from torchrl_rloo.cli.fields import (
    Count,
    DType,
    OneOf,
    Positive,
    Range,
    Share,
    Whole,
    non_null_fields,
    parse_section,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from torchrl_rloo.collectors import GroupSource, LLMCollector, StoredRollouts
    from torchrl_rloo.data import PromptDataset, PromptSampler
    from torchrl_rloo.diagnostics import TrainingPlan
    from torchrl_rloo.envs import DatasetChatEnv
    from torchrl_rloo.envs.tasks import TaskBase
    from torchrl_rloo.envs.transforms import RewardTransform
    from torchrl_rloo.modules import TransformersWrapper, TurnPolicy
    from torchrl_rloo.replay import MCAdvantage, RolloutWriter
    from torchrl_rloo.runtime.ranks import Ranks
    from torchrl_rloo.weight_update import WeightUpdater

Offload = Annotated[str, OneOf("activations", "optimizer", "parameters")]
Packing = Annotated[str, OneOf("none", "packed", "shared_prefix")]
Parallel = Annotated[str, OneOf("none", "ddp", "fsdp")]
ExecutorMode = Annotated[str, OneOf("inline", "thread", "process")]
KLPlace = Annotated[str, OneOf("reward", "token", "loss")]
OnStale = Annotated[str, OneOf("mask", "baseline", "requeue", "wait")]
OnFailure = Annotated[str, OneOf("abstain", "replace")]
CheckMode = Annotated[str, OneOf("warn", "stop", "off")]


@dataclass
class SamplerConfig:
    """Weights that the sampler uses."""

    share_weights: bool = True  # sample with the training model; false: with a copy
    dtype: DType | None = None  # data type of the copy, e.g. bfloat16; null: the training model's
    sync_every: Whole = 1  # steps between weight updates of the copy; 0: never
    offload: bool = False  # keep the copy in CPU memory while the model trains; requires a GPU

    def __post_init__(self):
        if self.share_weights and (self.dtype is not None or self.sync_every != 1):
            raise ValueError(
                f"sampler.dtype={self.dtype} and sampler.sync_every={self.sync_every} cannot be combined with "
                "sampler.share_weights=true; set it to false"
            )
        if self.share_weights and self.offload:
            raise ValueError("sampler.offload=true requires sampler.share_weights=false, a copy to move")

    def make(self, model: PreTrainedModel, ranks: Ranks) -> PreTrainedModel | None:
        """Return the model itself, or a copy on rank 0, where the others have None."""
        from torchrl_rloo.modules import frozen_copy
        from torchrl_rloo.runtime.lookup import parse_dtype

        if self.share_weights:
            return model
        return frozen_copy(model, self.dtype and parse_dtype(self.dtype)) if ranks.is_main else None


@dataclass
class CollectorConfig:
    """Scheduling of conversations."""

    max_staleness: Whole | None = None  # updates between sampling and training of a token; samples ahead if > 0
    on_stale: OnStale = "mask"  # older tokens: mask them, baseline (mask their rows), requeue groups, or wait
    min_members: Count | None = None  # ended members with which a group may be trained on; null: all
    on_failure: OnFailure = "abstain"  # failed conversations: abstain, or replace by another of the prompt
    max_in_flight: Any = None  # conversations in flight; {minimum: 8, maximum: 512}: by engine load; null: all
    reward_threads: Count = 1  # groups scored in parallel
    max_batch_size: Count | None = None  # rows per batch of the Hugging Face model; null: all that wait
    max_consecutive_failures: Count | None = 100  # consecutive failed turns that stop the run; null: never stop
    max_failed_pushes: Count = 3  # consecutive failed weight updates that stop the run
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

    def make(
        self,
        env: DatasetChatEnv,
        policy: TurnPolicy,
        updater: WeightUpdater,
        *,
        seed: int,
        output_dir: str,
        writer: RolloutWriter | None = None,
        workers: RayConfig | None = None,
    ) -> LLMCollector:
        """Build the collector: in this process, or with the workers of a cluster.

        Args:
            env: environment with its prompts.
            policy: policy.
            updater: updater of the policy's weights.
            seed: seed of the samples.
            output_dir: directory of the run.
            writer: writer of all rows. None writes none.
            workers: settings of the workers. None samples in this process.
        """
        from torchrl_rloo.collectors import AdaptiveConcurrency, LLMCollector

        settings = asdict(self) | {"audit": Path(output_dir) / "ledger.jsonl" if self.audit else None}
        if isinstance(limits := self.max_in_flight, dict):
            settings["max_in_flight"] = AdaptiveConcurrency(**limits)
        settings |= {"weight_updater": updater, "seed": seed, "postproc": writer}
        if workers is None:
            return LLMCollector(env, policy, **settings)
        from torchrl_rloo.ray import RayLLMCollector

        return RayLLMCollector(env, policy, **settings, **workers.arguments)


@dataclass
class RayConfig:
    """Cluster and rollout workers, for engines that are actors, such as inference=ray_vllm."""

    address: str | None = None  # cluster to join: auto, or host:port of its head; null: start a local one
    num_cpus: Count | None = None  # CPUs that a local cluster lends; null: one for each engine and worker, at least
    num_workers: Count = 2  # rollout workers: environment, tools and rewards of their conversations
    worker_options: dict[str, Any] = field(default_factory=dict)  # options of their actors: {num_cpus: 2}
    worker_conversations: Count | None = None  # conversations that a worker is given at a time; null: no limit
    beat_timeout: Positive = 60.0  # seconds in which a worker must answer a heartbeat; then it is replaced
    start_timeout: Positive = 600.0  # seconds in which a worker must start, with its wait for a place

    def __post_init__(self):
        if self.address is not None and self.num_cpus is not None:
            raise ValueError(
                f"ray.num_cpus={self.num_cpus} is of a local cluster and cannot be combined with "
                f"ray.address={self.address}"
            )

    def prepare(self) -> None:
        """Set what Ray reads when it is imported: all ranks authenticate to the local cluster that rank 0 starts."""
        if self.address is None and "RAY_ADDRESS" not in os.environ:
            os.environ.setdefault("RAY_AUTH_MODE", "token")

    def local(self, engines: int) -> dict[str, Any]:
        """Return the arguments of ``ray.init`` for a local cluster with a number of engines; none for a running one."""
        if self.address is not None or (os.environ.get("RAY_ADDRESS") and self.num_cpus is None):
            return {}
        return {"num_cpus": self.num_cpus or engines + self.num_workers}

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of :class:`~torchrl_rloo.ray.RayLLMCollector` about workers."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("address", "num_cpus")}


@dataclass
class PassRateConfig:
    """Arguments of PassRatePool; null takes its default."""

    target: list[float] | None = None  # lowest and highest preferred pass rate
    floor: float | None = None  # share of the draws that is uniform over all prompts
    window: int | None = None  # latest groups of a prompt that its pass rate covers
    retire: float | None = None  # pass rate at which a prompt is no longer drawn
    success: float | None = None  # smallest return that counts as passed


@dataclass
class RerollsConfig:
    """Arguments of DeferredRerolls; null takes its default."""

    delay: int | None = None  # draws until the first re-roll; null: those of ten steps
    growth: float | None = None  # factor of the delay from one re-roll to the next
    max_share: float | None = None  # largest share of the draws
    max_groups: Count | None = None  # largest number in a rollout batch, at most half of it; null: max_share
    start_fraction: Share | None = None  # share of plan.steps before the first re-roll; null: 0
    max_tries: int | None = None  # re-rolls per prompt
    threshold: float | None = None  # largest return of an unsolved prompt


@dataclass
class RefillConfig:
    """Arguments of RefillingCollector and ZeroSignalFilter; null takes their defaults."""

    max_batches: Count | None = None  # rollout batches to collect for one step, at most
    max_age: Whole | None = None  # policy versions that a surplus group may be stale
    tolerance: float | None = None  # largest difference of returns in a group without signal
    mean_range: list[float] | None = None  # [low, high] that the mean return of a group must be between
    oversample: Annotated[float, Range(1)] | None = None  # groups of a rollout batch, as a multiple of those of a step


@dataclass
class CacheConfig:
    """Arguments of GroupCache; null takes its default."""

    capacity: Count = 64  # groups to keep
    max_uses: int | None = None  # uses of each group
    max_age: int | None = None  # policy versions that a group may be stale


@dataclass
class CurriculumConfig:
    """Choice of prompts and groups to train on; all off by default."""

    pass_rate: Any = None  # prefer prompts solved sometimes: {target: [0.1, 0.9], floor, window, retire, success}
    adaptive_prompts: Count | None = None  # prompts of a step that share its groups by pass rate; null: one group each
    rerolls: Any = None  # draw unsolved prompts again later: {delay, growth, max_share: 0.25, max_tries, threshold}
    refill: Any = None  # sample until the batch is full of groups with signal: {max_batches: 4, max_age, tolerance}
    demonstrations: str | None = None  # column with completions that members of the group take as theirs; null: none
    cache: Any = None  # fill the rest of a refilled batch with earlier groups: {capacity: 64, max_uses, max_age}

    def __post_init__(self):
        self.pass_rate = parse_section(PassRateConfig, self.pass_rate, "curriculum.pass_rate")
        self.rerolls = parse_section(RerollsConfig, self.rerolls, "curriculum.rerolls")
        self.refill = parse_section(RefillConfig, self.refill, "curriculum.refill")
        self.cache = parse_section(CacheConfig, self.cache, "curriculum.cache")
        if self.adaptive_prompts is not None and (self.pass_rate is None or self.rerolls is not None):
            raise ValueError(
                f"curriculum.adaptive_prompts={self.adaptive_prompts} requires curriculum.pass_rate and cannot be "
                "combined with curriculum.rerolls; set curriculum.pass_rate={} and curriculum.rerolls=null"
            )
        rerolls = self.rerolls
        if rerolls is not None and None not in (rerolls.max_groups, rerolls.max_share):
            raise ValueError("curriculum.rerolls.max_groups cannot be combined with max_share; set one of them")
        if self.cache is not None and self.refill is None:
            raise ValueError("curriculum.cache requires curriculum.refill; set curriculum.refill={}")

    def groups_per_batch(self, prompts_per_step: int) -> int:
        """Return the number of groups of a rollout batch."""
        return ceil(prompts_per_step * ((self.refill and self.refill.oversample) or 1))

    def make_sampler(
        self, task: TaskBase, prompts: PromptDataset, rewards: RewardTransform, plan: TrainingPlan
    ) -> PromptSampler | None:
        """Build the prompt sampler: shuffled epochs (None), shares of a mixture, or by pass rate."""
        from torchrl_rloo.data.sampling import AdaptiveGroups, DeferredRerolls, MixtureSampler, PassRatePool

        sampler, size = task.make_sampler(prompts), len(prompts)
        returns = rewards.returns(raw=True)  # shaping does not change whether a prompt is solved
        if self.pass_rate is not None:
            if sampler is not None:
                raise ValueError("curriculum.pass_rate cannot be combined with a mixture's weights; set it to null")
            sampler = PassRatePool(size, returns=returns, **non_null_fields(self.pass_rate))
        if self.adaptive_prompts is not None:
            draws = self.groups_per_batch(plan.prompts_per_step)
            sampler = AdaptiveGroups(sampler, prompts=self.adaptive_prompts, draws=draws, members=plan.num_generations)
        if self.rerolls is not None:
            settings = {"delay": 10 * plan.prompts_per_step} | non_null_fields(
                self.rerolls, "max_groups", "start_fraction"
            )
            if self.rerolls.max_groups is not None:
                settings["max_share"] = self.rerolls.max_groups / plan.prompts_per_step
            if self.rerolls.start_fraction is not None:
                settings["start"] = round(self.rerolls.start_fraction * plan.steps * plan.prompts_per_step)
            sampler = DeferredRerolls(sampler or MixtureSampler([size]), returns=returns, **settings)
        return sampler

    def make_source(
        self,
        collector: LLMCollector | StoredRollouts,
        advantage: MCAdvantage,
        rewards: RewardTransform,
        prompts_per_step: int,
        *,
        scorer: TransformersWrapper,
        **limits: Any,
    ) -> GroupSource:
        """Build the source of groups: all that the collector samples, or only those with a signal.

        Args:
            collector: collector of whole groups.
            advantage: transform that will read the groups.
            rewards: rewards of the run.
            prompts_per_step: groups of a step.
            scorer: scorer of cached groups.
            **limits: limits of its passes.
        """
        from torchrl_rloo import replay
        from torchrl_rloo.collectors import GroupSource, RefillingCollector

        prompts, refill, cache = None if collector.env is None else collector.env.primer.sampler, None, None
        observe = getattr(prompts, "update", None)  # a prompt sampler that learns from every batch
        if self.refill is not None:
            if advantage.depends_on_other_groups:
                raise ValueError(
                    "curriculum.refill drops groups without signal and cannot be combined with advantages that compare "
                    "groups; set curriculum.refill=null, or use an algorithm that compares rows of a group (rloo, grpo)"
                )
            settings = {"observers": [observe] if observe else []} | non_null_fields(self.refill)
            settings.pop("oversample", None)
            returns = rewards.returns(per_function=isinstance(advantage.credit, replay.NormalizeThenSum))
            kept = {name: settings.pop(name) for name in ("tolerance", "mean_range") if name in settings}
            signal = replay.ZeroSignalFilter(returns=returns, **kept)
            refill = RefillingCollector(collector, signal, prompts_per_step, **settings)
        if self.cache is not None:
            cache = replay.GroupCache(scorer=scorer, **limits, **non_null_fields(self.cache))
        return GroupSource(collector, refill, cache, observe)


@dataclass
class RolloutsConfig:
    """Rows as files: keep all of a run, only collect them, or train on stored ones."""

    path: str | None = None  # folder that keeps the rows of every step; null: none are kept
    max_gb: Positive | None = None  # disk space of kept rows in GB, beyond which the oldest go; null: no limit
    train: bool = True  # false: only collect and keep rows
    source: str | None = None  # folder of stored rows to train on, without sampling; null: sample

    def __post_init__(self):
        if self.max_gb is not None and self.path is None:
            raise ValueError(f"rollouts.max_gb={self.max_gb} has no effect without rollouts.path; set that")
        if not self.train and self.path is None:
            raise ValueError("rollouts.train=false requires rollouts.path, a folder for the rows; set that")
        if self.source is not None and self.path is not None:
            raise ValueError(
                f"rollouts.path={self.path} would store rows of rollouts.source={self.source} again; set one of them"
            )

    def make_writer(
        self, tokenizer: PreTrainedTokenizerBase, output_dir: str, model: str, **notes: Any
    ) -> RolloutWriter | None:
        """Build the writer of all sampled rows; None if no folder is named. ``notes`` describe the rows."""
        if self.path is None:
            return None
        from torchrl_rloo.replay import RolloutWriter
        from torchrl_rloo.replay.rollouts import run_id

        limit = None if self.max_gb is None else max(1, int(self.max_gb * 1e9))
        options = {"max_bytes": limit, "writer": run_id(output_dir)}
        return RolloutWriter(self.path, model=model, tokenizer=tokenizer, notes=notes, **options)

    def make_stored(
        self, tokenizer: PreTrainedTokenizerBase, rewards: RewardTransform, collector: CollectorConfig, **plan: Any
    ) -> StoredRollouts:
        """Build the source of stored rows, in place of environment and collector.

        Args:
            tokenizer: tokenizer of the model.
            rewards: rewards that the rows must have.
            collector: bound on staleness.
            **plan: further arguments of ``check_stored_groups``, and ``weight_updater``.
        """
        from torchrl_rloo.collectors import StoredRollouts
        from torchrl_rloo.collectors.stored import check_stored_groups
        from torchrl_rloo.replay import RolloutFiles

        updater, files = plan.pop("weight_updater"), RolloutFiles(self.source, tokenizer=tokenizer)
        check_stored_groups(files, rewards=rewards.names, **plan)
        return StoredRollouts(
            files,
            groups_per_batch=plan["prompts_per_step"],
            max_staleness=collector.max_staleness,
            on_stale=collector.on_stale,
            weight_updater=updater,
        )
