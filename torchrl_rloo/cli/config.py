"""Sections of the recipes' configurations: typed fields with a one-line comment each; imports nothing heavy.

The sections about sampling are in :mod:`torchrl_rloo.cli.sampling_config`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar

from torchrl_rloo.cli.health_config import HealthConfig
from torchrl_rloo.cli.schema import check_settings, non_null_fields, parse_section
from torchrl_rloo.runtime.lookup import check_path


@dataclass
class ModelConfig:
    """Model to train and how to load it."""

    name: str = "embedded"  # hub id or local directory; embedded: the built-in model
    dtype: str = "float32"  # data type of the weights; bfloat16 is for lora, whose adapter is trained in float32
    device: str = "cpu"  # device of the trained model: cpu or cuda
    chat_template: str | None = None  # .jinja file, tokenizer directory or template; null: the tokenizer's own
    gradient_checkpointing: bool = False  # recompute activations in the backward pass: less memory, more time
    quantization: str | None = None  # storage of the frozen weights under lora: nf4 (4 bits, QLoRA); null: dtype
    quantization_kwargs: dict[str, Any] = field(
        default_factory=dict
    )  # {bnb_4bit_use_double_quant: true, bnb_4bit_compute_dtype: bfloat16}
    kwargs: dict[str, Any] = field(default_factory=dict)  # arguments of from_pretrained: {attn_implementation: sdpa}

    def __post_init__(self):
        check_path("model.name", self.name)


@dataclass
class DataConfig:
    """Training and held-out prompts."""

    source: str | None = None  # hub id, .jsonl/.json/.parquet/.csv file, saved dataset or embedded; null: the task's
    split: str | None = None  # split of source; null: train, or the task's
    name: str | None = None  # configuration of a hub dataset; null: its default
    eval_source: str | None = None  # held-out prompts; null: split off source, or the published test split
    eval_split: str | None = None  # split of eval_source; null: the same as of source
    eval_size: int = 256  # largest number of held-out prompts
    prompt_column: str | None = None  # column with the prompt, text or messages; null: prompt, query or messages
    columns: list[str] | None = None  # other columns to keep, for rewards; null: all
    column_map: dict[str, str] = field(default_factory=dict)  # columns to rename: {target: answer} gives answer
    row_map: str | None = None  # dotted path of a function from a row to a row with a prompt; null: the task's
    system_prompt: str | None = None  # system message for prompts without one; null: the task's
    chat: bool | None = None  # turn text prompts into chat messages; null: if the tokenizer has a chat template
    template_kwargs: dict[str, Any] = field(default_factory=dict)  # arguments of the template: {enable_thinking: false}
    max_prompt_length: int | None = None  # drop prompts longer than this, in tokens; null: keep all
    limit: int | None = None  # number of rows of source to read; null: all

    def __post_init__(self):
        check_path("data.source", self.source or "")
        check_path("data.eval_source", self.eval_source or "")


@dataclass
class PlanConfig:
    """Sizes of a run."""

    steps: int = 120  # number of training steps; each samples one rollout batch
    prompts_per_step: int = 16  # prompts of a rollout batch
    num_generations: int = 8  # completions of each prompt, which form a group
    minibatches: int = 1  # optimizer steps in each epoch over a rollout batch
    epochs_per_batch: int = 1  # epochs over each rollout batch
    micro_batch_size: int | None = None  # rows per forward and backward pass; null: a whole minibatch


@dataclass
class TrainConfig:
    """Settings of a training step."""

    packing: str = "none"  # layout of rows: none (padded), packed (end to end), shared_prefix (common beginnings once)
    micro_batch_tokens: int | None = None  # tokens per pass, also of the reference model; null: no limit
    merge_identical: bool = False  # run completions with the same tokens only once
    max_grad_norm: float | None = 1.0  # largest norm of the gradient; null: no clipping
    precision: str = "float32"  # precision of training passes: float32, or bfloat16 with the model's float32 weights
    float32_head: bool = False  # with precision=bfloat16, compute logits from float32 states and weights
    parallel: str = "none"  # use of several ranks: none (one process), ddp (whole model on each), fsdp (sharded)
    shard_size: int | None = None  # with parallel=fsdp, ranks that share a copy of the model; null: all ranks
    load_shards: bool = False  # with parallel=fsdp, each rank reads only its shards of the model's files
    tensor_parallel: int = 1  # neighboring ranks that split the matrices of each layer
    context_parallel: int = 1  # ranks that split the tokens of each pass, for long rows; requires packing
    reduce: str = "last_pass"  # reduction of gradients over ranks: last_pass, or every_pass (less memory with fsdp)
    rank_timeout: float = 7200.0  # seconds that a rank waits for the others, also for rank 0 to sample or evaluate
    offload: list[str] = field(default_factory=list)  # what waits in CPU memory: activations, optimizer, parameters

    def __post_init__(self):
        if self.float32_head and self.precision == "float32":
            raise ValueError("train.float32_head=true has no effect with train.precision=float32; set it to false")
        if self.shard_size is not None and self.parallel != "fsdp":
            raise ValueError(f"train.shard_size={self.shard_size} requires train.parallel=fsdp; set it to null")
        if self.load_shards and self.parallel != "fsdp":
            raise ValueError("train.load_shards=true requires train.parallel=fsdp; set it to false")
        if self.reduce != "last_pass" and self.parallel == "none":
            raise ValueError(f"train.reduce={self.reduce} requires train.parallel=ddp or fsdp; set it to last_pass")
        if self.context_parallel > 1:
            requires = f"train.context_parallel={self.context_parallel} requires"
            if self.packing == "none":
                raise ValueError(f"{requires} train.packing=packed or shared_prefix; set it to 1")
            if self.parallel == "none":
                raise ValueError(f"{requires} train.parallel=ddp or fsdp; set it to 1")
        if not self.rank_timeout > 0:
            raise ValueError(f"train.rank_timeout={self.rank_timeout} must be above 0 seconds")
        if "parameters" in self.offload and self.parallel != "fsdp":
            raise ValueError("train.offload=[parameters] requires train.parallel=fsdp; set it, or remove parameters")
        if {"parameters", "optimizer"} <= set(self.offload):
            raise ValueError("train.offload: parameters also keeps the optimizer's states on the CPU; remove optimizer")


@dataclass
class ExecutorConfig:
    """Execution of reward functions."""

    mode: str = "inline"  # executor: inline, thread (waiting functions), or process (survives hangs and crashes)
    workers: int | None = None  # number of threads or processes; null: the default of the mode
    timeout: float | None = None  # seconds per sample; null: the default of the mode
    rows_per_call: int | None = None  # samples per call of a function; null: the default of the mode
    environment: list[str] | None = None  # variables that processes get, such as [OPENAI_API_KEY]; null: no keys


@dataclass
class RewardConfig:
    """Reward functions and their combination."""

    functions: list[Any] | None = None  # names, dotted paths or {_target_: name, key: value}; null: the task's
    weights: list[float] | None = None  # weight of each function; null: 1 each, or the task's
    clip_range: list[float] | None = None  # bounds [low, high] of the weighted sum; null: no clipping
    max_consecutive_failures: int | None = 100  # consecutive failed samples that stop the run; null: never stop
    deduplicate: bool = True  # score identical completions of a prompt once; set false for random rewards
    shaping: list[Any] = field(
        default_factory=list
    )  # transforms of scores, in order: [{_target_: ...NormalizeRewards}]
    executor: ExecutorConfig = field(
        default_factory=ExecutorConfig
    )  # executor of the functions; failed samples abstain

    def __post_init__(self):
        if self.clip_range is not None and (len(self.clip_range) != 2 or not self.clip_range[0] < self.clip_range[1]):
            raise ValueError(f"reward.clip_range={self.clip_range} must be [low, high] with low < high")


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
    max_tries: int | None = None  # re-rolls per prompt
    threshold: float | None = None  # largest return of an unsolved prompt


@dataclass
class RefillConfig:
    """Arguments of RefillingCollector and ZeroSignalFilter; null takes their defaults."""

    max_batches: int | None = None  # rollout batches to collect for one step, at most
    max_age: int | None = None  # policy versions that a surplus group may be stale
    tolerance: float | None = None  # largest difference of returns in a group without signal


@dataclass
class CacheConfig:
    """Arguments of GroupCache; null takes its default."""

    capacity: int = 64  # groups to keep
    max_uses: int | None = None  # uses of each group
    max_age: int | None = None  # policy versions that a group may be stale


@dataclass
class CurriculumConfig:
    """Choice of prompts and groups to train on; all off by default."""

    pass_rate: Any = None  # prefer prompts solved sometimes: {target: [0.1, 0.9], floor, window, retire, success}
    rerolls: Any = None  # draw unsolved prompts again later: {delay, growth, max_share: 0.25, max_tries, threshold}
    refill: Any = None  # sample until the batch is full of groups with signal: {max_batches: 4, max_age, tolerance}
    cache: Any = None  # fill the rest of a refilled batch with earlier groups: {capacity: 64, max_uses, max_age}

    def __post_init__(self):
        self.pass_rate = parse_section(PassRateConfig, self.pass_rate, "curriculum.pass_rate")
        self.rerolls = parse_section(RerollsConfig, self.rerolls, "curriculum.rerolls")
        self.refill = parse_section(RefillConfig, self.refill, "curriculum.refill")
        self.cache = parse_section(CacheConfig, self.cache, "curriculum.cache")
        if self.cache is not None and self.refill is None:
            raise ValueError("curriculum.cache requires curriculum.refill; set curriculum.refill={}")


@dataclass
class KLConfig:
    """KL to the initial model."""

    where: str | None = None  # place of the KL: reward (return), token (advantages), loss (term); null: the method's
    coeff: float | None = 0.0  # coefficient of the KL; 0: no KL and no reference model; null: the method's
    estimator: str | None = None  # estimator of the KL: k1, k2 or k3; null: the method's
    clip: float | None = None  # bound of the KL of a token, in nats, for where=token; null: the method's
    target: float | None = None  # KL to hold by adapting the coefficient, in nats per action token; null: constant

    def __post_init__(self):
        for name in ("where", "estimator", "clip", "target"):
            if self.coeff == 0 and getattr(self, name) is not None:
                value = getattr(self, name)
                raise ValueError(f"kl.{name}={value} has no effect with kl.coeff=0; set kl.coeff (null: the method's)")


@dataclass
class ReferenceConfig:
    """Reference model of the KL."""

    sync_every: int = 0  # steps between moves of the reference towards the model; 0: it stays the initial model
    share: float = 0.6  # share of the model's weights in a move; 1: replace the reference

    def __post_init__(self):
        if not self.sync_every and self.share != ReferenceConfig.share:
            raise ValueError(f"reference.share={self.share} has no effect with reference.sync_every=0; set sync_every")


@dataclass
class OptimizerConfig:
    """Optimizer of the trained weights, which are float32."""

    name: str = "adamw"  # optimizer: adamw, adamw_8bit, muon (hidden matrices; AdamW for the rest), sgd, adafactor, ...
    lr: float = 3.0e-4  # peak learning rate; models of billions of weights need about 1e-6
    betas: list[float] | None = None  # decay rates of the mean gradient and square; null: [0.9, 0.99] if it has them
    weight_decay: float | None = None  # weight decay, multiplied by lr for adamw, adamw_8bit and muon; null: 0
    kwargs: dict[str, Any] = field(default_factory=dict)  # further arguments of the optimizer: {momentum: 0.9}

    def __post_init__(self):
        if self.betas is not None and (len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas)):
            raise ValueError(f"optimizer.betas={self.betas} must be two numbers of at least 0 and below 1")
        check_kwargs("optimizer", self)


@dataclass
class ScheduleConfig:
    """Learning rate of each optimizer step."""

    name: str = "linear"  # schedule: linear, cosine, constant, or a class of torch.optim.lr_scheduler: StepLR
    warmup_steps: int | None = None  # optimizer steps of the warmup; null: 5, or a tenth of a run shorter than 50
    final_fraction: float | None = None  # share of the peak at the last step; null: 0.1 for linear and cosine
    kwargs: dict[str, Any] = field(default_factory=dict)  # arguments of the class: {step_size: 30}

    def __post_init__(self):
        check_kwargs("schedule", self)


@dataclass
class CheckpointConfig:
    """Checkpoints of a run."""

    every: int = 10  # steps between checkpoints; 0: only at the end or when stopped
    keep: int = 2  # number of newest checkpoints to keep
    asynchronous: bool = False  # write a copy in CPU memory while training continues; needs memory for one more state


@dataclass
class LoggerConfig:
    """Metrics and tables of a run."""

    samples: int = 8  # rows per table of samples; 0: no tables
    loggers: list[str] = field(default_factory=lambda: ["tensorboard"])  # of tensorboard, wandb, mlflow, trackio
    logger_kwargs: dict[str, Any] = field(default_factory=dict)  # arguments by logger: {wandb: {project: rloo}}


@dataclass
class LogConfig(LoggerConfig):
    """Metrics, tables and transcripts of a run."""

    samples_every: int = 20  # steps between tables of training completions; 0: none
    transcripts: bool = False  # write a page of each evaluation's conversations to output_dir/transcripts


@dataclass
class TaskConfig:
    """Task to learn."""

    name: str = "addition"  # name of a task, or dotted path of your own
    mixture: Any = None  # weight and data settings by task, for task=mixture: {addition: {weight: 2}, countdown: 1}

    def __post_init__(self):
        check_settings("task.mixture", self.mixture)


@dataclass
class RunConfig:
    """Settings of every run, at the top level of a recipe's configuration."""

    seed: int = 0  # seed of prompts, samples, minibatches and the built-in model's warm start
    threads: int | None = 1  # CPU threads; null: torch's choice; the same number repeats a run bit for bit
    resume: str | int = "auto"  # auto (same settings), extend (also other steps, ranks or engine), never, or a step
    stop_after: int | None = None  # stop after this step, with a checkpoint, as a stop signal does; null: never
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
    on_cluster: ClassVar[bool] = False  # whether engines and workers are actors of a Ray cluster


def run_settings(cfg: RunConfig) -> dict[str, Any]:
    """Return the arguments of :class:`~torchrl_rloo.run.Run` that a recipe's configuration holds."""
    return {
        "settings": asdict(cfg),
        "defaults": asdict(type(cfg)()),
        "resume": cfg.resume,
        "checkpoint_every": cfg.checkpoint.every,
        "keep": cfg.checkpoint.keep,
        "asynchronous": cfg.checkpoint.asynchronous,
        "stop_after": cfg.stop_after,
        "loggers": cfg.log.loggers,
        "logger_kwargs": cfg.log.logger_kwargs,
    }


def optimizer_steps(plan: PlanConfig) -> int:
    """Return the optimizer steps of a run."""
    return plan.steps * plan.minibatches * plan.epochs_per_batch


def check_kwargs(name: str, section: Any) -> None:
    """Raise if the further arguments of a section repeat one of its settings.

    Raises:
        ValueError: if they do.
    """
    if repeated := [f.name for f in fields(section) if f.name in section.kwargs]:
        raise ValueError(f"{name}.kwargs has {repeated[0]}; set {name}.{repeated[0]}")


def named_arguments(section: OptimizerConfig | ScheduleConfig) -> dict[str, Any]:
    """Return the arguments of ``make_optimizer`` or ``make_schedule``: settings that are not null, and kwargs."""
    return non_null_fields(section, "kwargs") | section.kwargs


def check_trained_weights(model: ModelConfig, train: TrainConfig, lora: Any) -> None:
    """Raise if a model cannot be trained in its data type, or the offload has no effect.

    Raises:
        ValueError: if all weights are trained in 16 bits, or ``train.offload`` does not fit device and ranks.
    """
    if lora is None and model.dtype in ("bfloat16", "float16"):
        raise ValueError(
            f"model.dtype={model.dtype} loses most steps of a small learning rate; set model.dtype=float32 and "
            "train.precision=bfloat16, which computes in bfloat16 and steps in float32"
        )
    if train.offload and not model.device.startswith("cuda"):
        raise ValueError(f"train.offload={train.offload} has no effect with model.device={model.device}; set it to []")


def check_ks(ks: list[int], num_samples: int, section: str = "eval") -> None:
    """Raise if pass@k cannot be estimated for one of the numbers.

    Raises:
        ValueError: if a number is below 1 or above ``num_samples``.
    """
    if wrong := [k for k in ks if not 1 <= k <= num_samples]:
        raise ValueError(
            f"{section}.ks={ks}: {wrong} are not between 1 and num_samples={num_samples}; raise num_samples"
        )


def check_reference(reference: ReferenceConfig, kl: KLConfig, **initial: Any) -> None:
    """Raise if the reference is to move, but there is none, or a setting takes the initial model for it.

    Args:
        reference: settings of the reference.
        kl: settings of the KL.
        **initial: settings that require the initial model as the reference, None if they are off.

    Raises:
        ValueError: if they cannot be combined.
    """
    moves = f"reference.sync_every={reference.sync_every}"
    if reference.sync_every and kl.coeff == 0:
        raise ValueError(f"{moves} has no effect with kl.coeff=0; set kl.coeff (null: the method's)")
    for name in (name for name, value in initial.items() if reference.sync_every and value is not None):
        raise ValueError(f"{moves} cannot be combined with {name}, which compares with the initial model; set it to 0")


def check_clip_range(reward: RewardConfig, advantage: dict[str, Any]) -> None:
    """Raise if the sum of rewards is clipped but the advantages do not read it.

    Raises:
        ValueError: if both are set.
    """
    credit = advantage.get("credit")
    credit = credit.get("name") if isinstance(credit, dict) else credit
    if reward.clip_range is not None and credit not in (None, "trajectory"):
        raise ValueError(
            f"reward.clip_range={reward.clip_range} has no effect with advantage.credit={credit}, which does not read "
            "the sum of the rewards; set it to null"
        )
