"""Settings of RLOO training as a whole, and the checks of what cannot be combined; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from torchrl_rloo.cli import config as c
from torchrl_rloo.cli import rloo_sections as s
from torchrl_rloo.cli import sampling_sections as sampling
from torchrl_rloo.cli.fields import OneOf, non_null_fields

if TYPE_CHECKING:
    from torch import nn

    from torchrl_rloo.collectors import GroupSource, SharedSource
    from torchrl_rloo.envs.tasks import TaskBase
    from torchrl_rloo.envs.transforms import RewardTransform
    from torchrl_rloo.objectives import Preset
    from torchrl_rloo.runtime.ranks import Ranks
    from torchrl_rloo.weight_update import WeightUpdater

Algorithm = Annotated[
    str,
    OneOf(  # objectives.PRESETS without those that train a critic
        *("rloo", "rloo_trl", "rloo_openrlhf", "grpo", "dr_grpo", "dapo", "gspo", "luspo", "gmpo", "cispo", "sapo"),
        *("dppo", "vespo", "clip_cov", "kl_cov", "gpg", "gdpo", "maxrl", "opo", "remax", "dro", "pass_at_k"),
        *("reinforce_pp", "reinforce_pp_baseline"),
        ppo="it needs a critic, which this recipe does not train; use torchrl-rloo run ppo",
    ),
]


@dataclass
class LoopConfig(c.RunConfig):
    """Settings of every recipe that samples groups in conversations and trains on them."""

    loss: dict[str, Any] = field(default_factory=dict)  # arguments of RLOOLoss that replace the algorithm's
    lora: Any = None  # arguments of peft.LoraConfig, or {adapter: folder} of a saved one; null: train all weights
    task: c.TaskConfig = field(default_factory=c.TaskConfig)
    model: c.ModelConfig = field(default_factory=c.ModelConfig)
    data: c.DataConfig = field(default_factory=c.DataConfig)
    plan: s.PlanConfig = field(default_factory=s.PlanConfig)
    train: s.TrainConfig = field(default_factory=s.TrainConfig)
    generate: c.GenerateConfig = field(default_factory=c.GenerateConfig)
    environment: c.EnvironmentConfig = field(default_factory=c.EnvironmentConfig)
    reward: s.RewardConfig = field(default_factory=s.RewardConfig)
    optimizer: c.OptimizerConfig = field(default_factory=c.OptimizerConfig)
    schedule: c.ScheduleConfig = field(default_factory=c.ScheduleConfig)
    sampler: sampling.SamplerConfig = field(default_factory=sampling.SamplerConfig)
    collector: sampling.CollectorConfig = field(default_factory=sampling.CollectorConfig)
    inference: c.InferenceConfig = field(default_factory=c.InferenceConfig)
    eval: s.EvalConfig = field(default_factory=s.EvalConfig)

    common: ClassVar[tuple[str, ...]] = (  # what --help lists; --help-all lists the rest
        *("seed", "resume", "output_dir", "lora", "task.name", "model.name", "model.device", "data.source"),
        *("plan.steps", "plan.prompts_per_step", "plan.num_generations", "plan.minibatches", "plan.micro_batch_size"),
        *("train.parallel", "generate.max_new_tokens", "reward.functions", "optimizer.lr", "eval.every", "log.loggers"),
    )

    def __post_init__(self):
        c.check_lora(self.lora)
        check_model(self.model, self.train, self.lora)
        check_sampling(self)
        check_ranks(self)
        check_offload(self)

    @property
    def sampled_dtype(self) -> str | None:
        """Data type that the engine computes in: its own, or that of the weights that it gets."""
        engine = self.inference.arguments.get("dtype")
        return (self.sampler.dtype or self.model.dtype) if engine == "float32" else engine

    def check_before_loading(self) -> None:
        """Raise what a run would raise late: other settings than its checkpoint's, objects that cannot be built."""
        self.check_resumable()
        self.inference.check_transport()
        self.check_optimizer(self.plan.optimizer_steps)

    def make_task(self) -> TaskBase:
        """Return the task; the user's own prompts and rewards replace the default one."""
        from torchrl_rloo.envs.tasks.base import EMBEDDED
        from torchrl_rloo.envs.tasks.registry import CUSTOM

        own = self.data.source not in (None, EMBEDDED) and self.reward.functions is not None
        return CUSTOM if own and self.task.name == c.TaskConfig.name else self.task.make()

    def share(
        self,
        ranks: Ranks,
        source: GroupSource | None,
        updater: WeightUpdater,
        *,
        sampler: nn.Module | None,
        add_kl: Callable[..., Any] | None,
    ) -> SharedSource:
        """Share the rows of rank 0's source with all ranks, which score them with ``add_kl`` unless it is None."""
        from torchrl_rloo.collectors import SharedSource

        itself = sampler if self.inference.engine is None and self.sampler.share_weights else None
        offloaded = sampler if self.sampler.offload and ranks.is_main else None
        finish = add_kl and partial(add_kl, ranks=ranks)
        return SharedSource(ranks, source, updater, sampler=itself, offloaded=offloaded, finish=finish)


@dataclass
class RLOOConfig(LoopConfig):
    """Settings of RLOO training."""

    algorithm: Algorithm = "rloo_trl"  # method: rloo, rloo_trl, grpo, dr_grpo, dapo, gspo, cispo, ...
    advantage: dict[str, Any] = field(default_factory=dict)  # arguments of MCAdvantage that replace the algorithm's
    kl: s.KLConfig = field(default_factory=s.KLConfig)
    reference: s.ReferenceConfig = field(default_factory=s.ReferenceConfig)
    ray: sampling.RayConfig = field(default_factory=sampling.RayConfig)
    curriculum: sampling.CurriculumConfig = field(default_factory=sampling.CurriculumConfig)
    rollouts: sampling.RolloutsConfig = field(default_factory=sampling.RolloutsConfig)
    check: s.CheckConfig = field(default_factory=s.CheckConfig)

    common: ClassVar[tuple[str, ...]] = (  # what --help lists; --help-all lists the rest
        *("seed", "resume", "output_dir", "algorithm", "lora", "task.name", "model.name", "model.dtype"),
        *("model.device", "model.chat_template", "data.source", "data.eval_source", "data.system_prompt"),
        *("plan.steps", "plan.prompts_per_step", "plan.num_generations", "plan.minibatches", "plan.micro_batch_size"),
        *("train.packing", "train.precision", "train.parallel", "generate.max_new_tokens", "generate.temperature"),
        *("environment.max_turns", "environment.max_tokens", "reward.functions", "reward.weights"),
        *("reward.executor.mode", "kl.coeff", "optimizer.lr", "schedule.name", "sampler.share_weights"),
        *("collector.max_staleness", "inference.replicas", "rollouts.path", "eval.every", "checkpoint.every"),
        *("log.loggers", "log.transcripts"),
    )

    def __post_init__(self):
        super().__post_init__()
        check_cache(self)
        check_ray(self)
        check_stored(self)
        check_reference(self)
        check_order(self)

    @property
    def unused(self) -> tuple[str, ...]:
        """Settings without effect."""
        return () if self.plan.epochs is None else ("plan.steps",)

    def connect(self, ranks: Ranks) -> AbstractContextManager:
        """Connect all ranks to one Ray cluster if the engines are its actors; rank 0 starts a local one if need be."""
        if not self.inference.on_ray:
            return nullcontext()
        from torchrl_rloo.ray import ray_session

        return ray_session(self.ray.address, ranks=ranks, **self.ray.local(self.inference.replicas))

    def check_before_loading(self) -> None:
        """Refuse what a run would refuse late, the user's own checks included; see the base class."""
        self.check.load_own()
        super().check_before_loading()

    def make_method(self, reward_weights: list[float]) -> Preset:
        """Return the arguments of loss, advantages and KL: the algorithm's, with those of the settings."""
        from torchrl_rloo.objectives import make_method

        method = make_method(
            self.algorithm,
            loss=self.corrected_loss(),
            advantage=self.advantage,
            kl=non_null_fields(self.kl),
            max_new_tokens=self.generate.max_new_tokens,
            prompts_per_step=self.plan.prompts_per_step,
            num_generations=None if self.curriculum.adaptive_prompts else self.plan.num_generations,
            reward_weights=reward_weights,
        )
        shown, surrogate = self.curriculum.demonstrations, method.loss.get("demonstration_surrogate")
        if shown is None and surrogate is not None and self.rollouts.source is None:
            raise ValueError(f"loss.demonstration_surrogate={surrogate} requires curriculum.demonstrations, a column")
        if shown is not None and method.kl is not None and method.kl.where != "loss":
            raise ValueError(f"curriculum.demonstrations={shown} requires kl.where=loss, not {method.kl.where}")
        if self.reference.sync_every and method.kl is None:
            raise ValueError(
                f"reference.sync_every={self.reference.sync_every} has no effect: {self.algorithm} has no KL; set "
                "kl.coeff"
            )
        return method

    def corrected_loss(self) -> dict[str, Any]:
        """Return the arguments of the loss; on a cluster, older tokens are weighted if there is no ratio for it."""
        from torchrl_rloo.objectives import PRESETS

        ratio = self.loss.get("ratio", PRESETS[self.algorithm].loss.get("ratio"))
        stale = self.inference.on_ray and self.collector.max_staleness
        return {"correction": "tis", **self.loss} if stale and ratio == "none" else self.loss

    def note_rewards(self, rewards: RewardTransform) -> dict[str, Any]:
        """Return what describes stored rows: their rewards, and the distribution of their log-probs."""
        notes = {"rewards": rewards.names, "functions": self.reward.functions, "weights": rewards.weights}
        return notes | {"clip_range": rewards.clip_range, "generate": non_null_fields(self.generate)}

    def share(self, ranks: Ranks, source: GroupSource | None, updater: WeightUpdater, **parts: Any) -> SharedSource:
        """Share rank 0's rows with all ranks or, on Ray, references of which each rank fetches its own."""
        if not self.inference.on_ray:
            return super().share(ranks, source, updater, **parts)
        from torchrl_rloo.ray import ReferencedSource

        finish = parts["add_kl"] and partial(parts["add_kl"], ranks=ranks, split=False)
        return ReferencedSource(ranks, source, updater, finish=finish)


# -------------------------------------------------------------------------------------------- what cannot be combined
def check_model(model: c.ModelConfig, train: s.TrainConfig, lora: Mapping[str, Any] | None) -> None:
    """Raise ``ValueError`` if a model cannot be trained in its data type, or the offload has no effect."""
    if lora is None and model.dtype in ("bfloat16", "float16"):
        raise ValueError(
            f"model.dtype={model.dtype} loses most steps of a small learning rate; set model.dtype=float32 and "
            "train.precision=bfloat16, which computes in bfloat16 and steps in float32"
        )
    if model.quantization is not None and lora is None:
        raise ValueError(
            f"model.quantization={model.quantization} requires an adapter, since quantized weights cannot be trained; "
            "set lora={r: 16, target_modules: all-linear}"
        )
    if train.offload and not model.device.startswith("cuda"):
        raise ValueError(f"train.offload={train.offload} has no effect with model.device={model.device}; set it to []")


def check_sampling(cfg: LoopConfig) -> None:
    """Raise ``ValueError`` if the collector would sample ahead with the weights that are being trained."""
    ahead = cfg.collector.max_staleness
    rollouts = getattr(cfg, "rollouts", None)  # of rloo only
    has_own_weights = cfg.inference.on_ray or (rollouts is not None and rollouts.source is not None)
    if ahead and cfg.sampler.share_weights and not has_own_weights:
        raise ValueError(
            f"collector.max_staleness={ahead} samples while the model trains and cannot be combined with "
            "sampler.share_weights=true; set it to false"
        )


def check_ranks(cfg: LoopConfig) -> None:
    """Raise ``ValueError`` if rank 0 cannot sample or score while the other ranks wait."""
    train = cfg.train
    target = str((cfg.inference.engine or {}).get("_target_", ""))
    if train.parallel != "none" and target.endswith(".VLLMEngine"):
        raise ValueError(
            f"inference.engine={target} runs vLLM in the process of rank 0, whose process group it would replace, and "
            f"cannot be combined with train.parallel={train.parallel}; use inference=vllm_process or vllm_server"
        )
    if train.load_shards and not cfg.sampler.share_weights:
        raise ValueError(
            "train.load_shards=true cannot be combined with sampler.share_weights=false, a whole copy on rank 0; set "
            "train.load_shards=false"
        )
    split = f"train.tensor_parallel={train.tensor_parallel}"
    if train.tensor_parallel > 1 and cfg.sampler.share_weights and cfg.inference.engine is None:
        raise ValueError(f"rank 0 cannot sample alone with {split}; set sampler.share_weights=false, or an engine")
    if train.tensor_parallel > 1 and cfg.lora is not None:
        raise ValueError(f"lora cannot be combined with {split}; set it to 1, and train.parallel=fsdp")


def check_cache(cfg: RLOOConfig) -> None:
    """Raise ``ValueError`` if rank 0 cannot score cached groups alone."""
    train, cached = cfg.train, cfg.curriculum.cache is not None
    scores = "curriculum.cache scores groups again on rank 0 and cannot be combined with"
    if train.parallel == "fsdp" and cached and cfg.inference.engine is not None:
        raise ValueError(
            f"{scores} train.parallel=fsdp and an engine; set curriculum.cache=null, or train.parallel=ddp"
        )
    for name in ("tensor_parallel", "context_parallel"):
        if (value := getattr(train, name)) > 1 and cached:
            raise ValueError(f"{scores} train.{name}={value}; set curriculum.cache=null")


def check_offload(cfg: LoopConfig) -> None:
    """Raise ``ValueError`` if an offloaded sampler would stay on the CPU, or would sample while it is there."""
    if not cfg.sampler.offload:
        return
    if not cfg.model.device.startswith("cuda"):
        raise ValueError(f"sampler.offload=true has no effect with model.device={cfg.model.device}; set it to false")
    if ahead := cfg.collector.max_staleness:
        raise ValueError(
            f"sampler.offload=true cannot be combined with collector.max_staleness={ahead}; set it to 0 or null"
        )
    if cfg.inference.engine is not None:
        raise ValueError("sampler.offload=true cannot be combined with an engine; set inference.sleep=true instead")


def check_ray(cfg: RLOOConfig) -> None:
    """Raise ``ValueError`` if a setting has no effect on a cluster, or is one of a cluster that is not used."""
    if not cfg.inference.on_ray:
        for f in fields(sampling.RayConfig):
            value = getattr(cfg.ray, f.name)
            if value != getattr(sampling.RayConfig(), f.name):
                raise ValueError(
                    f"ray.{f.name}={value} has no effect without engines on a cluster; use inference=ray_transformers "
                    "or ray_vllm"
                )
        return
    for f in fields(sampling.RolloutsConfig):
        value = getattr(cfg.rollouts, f.name)
        if value != getattr(sampling.RolloutsConfig(), f.name):
            raise ValueError(
                f"rollouts.{f.name}={value} needs the rows on rank 0 and cannot be combined with engines on a cluster; "
                "remove it, or use an engine of one machine"
            )
    for name in ("refill", "cache", "adaptive_prompts"):
        if getattr(cfg.curriculum, name) is not None:
            raise ValueError(
                f"curriculum.{name} needs all rows on rank 0 and cannot be combined with engines on a cluster; set it "
                "to null, or use an engine of one machine"
            )
    refused = {
        "inference.sleep": cfg.inference.sleep,
        "train.offload": "activations" in cfg.train.offload and ["activations"],
        "sampler.offload": cfg.sampler.offload,
        "collector.max_batch_size": cfg.collector.max_batch_size,
    }
    for name, value in refused.items():
        if value:
            raise ValueError(f"{name}={value} has no effect on a cluster; remove it")
    for name in ("tensor_parallel", "context_parallel"):
        if (value := getattr(cfg.train, name)) > 1:
            raise ValueError(f"train.{name}={value} cannot be combined with rows that each rank fetches; set it to 1")


def check_stored(cfg: RLOOConfig) -> None:
    """Raise ``ValueError`` if a setting of sampling has no effect on stored rows."""
    if cfg.rollouts.source is None:
        return
    given = f"with rollouts.source={cfg.rollouts.source}"
    for f in fields(sampling.CollectorConfig):
        value, default = getattr(cfg.collector, f.name), getattr(sampling.CollectorConfig(), f.name)
        if value != default and f.name not in ("max_staleness", "on_stale"):
            raise ValueError(f"collector.{f.name}={value} has no effect {given}; remove it")
    if cfg.collector.on_stale not in ("mask", "baseline"):
        raise ValueError(f"collector.on_stale={cfg.collector.on_stale} samples again; {given} set mask or baseline")
    for name in ("pass_rate", "adaptive_prompts", "rerolls", "demonstrations"):
        if getattr(cfg.curriculum, name) is not None:
            raise ValueError(f"curriculum.{name} guides sampling and has no effect {given}; set it to null")
    for name in ("shaping", "turns"):
        if getattr(cfg.reward, name):
            raise ValueError(f"reward.{name} has no effect {given}, whose returns are complete; set it to []")


def check_moves(cfg: Any) -> None:
    """Raise ``ValueError`` if the reference is to move but cannot."""
    moves = f"reference.sync_every={cfg.reference.sync_every}"
    if cfg.reference.sync_every and cfg.kl.coeff == 0:
        raise ValueError(f"{moves} has no effect with kl.coeff=0; set kl.coeff (null: the method's)")
    if cfg.reference.sync_every and cfg.lora is not None:
        raise ValueError(f"{moves} cannot be combined with lora, which compares with the initial model; set it to 0")


def check_reference(cfg: RLOOConfig) -> None:
    """Raise ``ValueError`` if the reference is to move but cannot, or advantages do not read what is clipped."""
    check_moves(cfg)
    credit = cfg.advantage.get("credit")
    credit = credit.get("name") if isinstance(credit, dict) else credit
    if cfg.reward.clip_range is not None and credit not in (None, "trajectory", "optimal_token"):
        raise ValueError(
            f"reward.clip_range={cfg.reward.clip_range} has no effect with advantage.credit={credit}, which does not "
            "read the sum of the rewards; set it to null"
        )


def check_order(cfg: RLOOConfig) -> None:
    """Raise ``ValueError`` if a setting cannot keep the order of the prompts, or needs the number of a stream's."""
    chosen = {f"curriculum.{name}": getattr(cfg.curriculum, name) for name in ("pass_rate", "rerolls")}
    chosen["task.mixture"] = cfg.task.mixture
    counted = chosen | {"plan.epochs": cfg.plan.epochs, "a Ray cluster": cfg.inference.on_ray or None}
    stream, shuffle = cfg.data.streaming, cfg.data.shuffle
    found = [f"{name} chooses prompts at random" for name, value in chosen.items() if not shuffle and value is not None]
    found += [f"{name} needs all prompts" for name, value in counted.items() if stream and value is not None]
    if found:
        other = "data.shuffle=false" if not shuffle else f"data.streaming={stream}"
        raise ValueError(f"{found[0]} and cannot be combined with {other}; remove one of them")
