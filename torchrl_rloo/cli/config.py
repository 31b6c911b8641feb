"""Sections of the recipes' configurations: typed fields with a one-line comment each; imports nothing heavy.

The sections about sampling are in :mod:`torchrl_rloo.cli.sampling_config`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from torchrl_rloo.cli.schema import check_settings, parse_section
from torchrl_rloo.lookup import check_path


@dataclass
class ModelConfig:
    """Model to train and how to load it."""

    name: str = "embedded"  # hub id or local directory; embedded: the built-in model
    dtype: str = "float32"  # data type of the trained weights; bfloat16 loses most steps of a small learning rate
    device: str = "cpu"  # device of the trained model: cpu or cuda
    chat_template: str | None = None  # .jinja file, tokenizer directory or template; null: the tokenizer's own
    gradient_checkpointing: bool = False  # recompute activations in the backward pass: less memory, more time
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

    packing: str = "none"  # layout of rows: none (padded), packed (end to end), shared_prefix (a group's prompt once)
    micro_batch_tokens: int | None = None  # tokens per pass, also of the reference model; null: no limit
    merge_identical: bool = False  # run completions with the same tokens only once
    max_grad_norm: float | None = 1.0  # largest norm of the gradient; null: no clipping


@dataclass
class ExecutorConfig:
    """Execution of reward functions."""

    mode: str = "inline"  # executor: inline, thread (for waiting functions), process (a hang or crash costs one sample)
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
class OptimizerConfig:
    """AdamW."""

    lr: float = 3.0e-4  # peak learning rate; models of billions of weights need about 1e-6
    betas: list[float] = field(default_factory=lambda: [0.9, 0.99])  # decay rates of the mean gradient and square
    weight_decay: float = 0.0  # weight decay of AdamW, multiplied by lr; 0: none

    def __post_init__(self):
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer.betas={self.betas} must be two numbers of at least 0 and below 1")


@dataclass
class ScheduleConfig:
    """Linear warmup and decay of the learning rate."""

    warmup_steps: int | None = None  # optimizer steps of the warmup; null: 5, or a tenth of a run shorter than 50
    final_fraction: float = 0.1  # share of the peak learning rate at the last step


@dataclass
class EvalConfig:
    """Evaluation on held-out prompts."""

    scorer: Any = None  # scorer of held-out completions, given like a reward; null: the task's, or your rewards
    every: int = 20  # steps between evaluations; 0: only before the first and after the last step
    batch_size: int = 256  # conversations per batch
    num_samples: int = 1  # sampled completions of each prompt, for eval/sampled
    ks: list[int] = field(default_factory=list)  # values of k for pass@k and maj@k, at most num_samples

    def __post_init__(self):
        check_ks(self.ks, self.num_samples)


@dataclass
class CheckpointConfig:
    """Checkpoints of a run."""

    every: int = 10  # steps between checkpoints; 0: only at the end or when stopped
    keep: int = 2  # number of newest checkpoints to keep


@dataclass
class LoggerConfig:
    """Metrics and tables of a run."""

    samples: int = 8  # rows per table of samples; 0: no tables
    loggers: list[str] = field(
        default_factory=lambda: ["tensorboard"]
    )  # loggers to use: tensorboard, csv, wandb, mlflow
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
    resume: str = "auto"  # resumption: auto (same settings), extend (also more steps, other engine or eval), never
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)


def run_settings(cfg: RunConfig) -> dict[str, Any]:
    """Return the arguments of :class:`~torchrl_rloo.run.Run` that a recipe's configuration holds."""
    return {
        "settings": asdict(cfg),
        "defaults": asdict(type(cfg)()),
        "resume": cfg.resume,
        "checkpoint_every": cfg.checkpoint.every,
        "keep": cfg.checkpoint.keep,
        "loggers": cfg.log.loggers,
        "logger_kwargs": cfg.log.logger_kwargs,
    }


def check_ks(ks: list[int], num_samples: int) -> None:
    """Raise if pass@k cannot be estimated for one of the numbers.

    Raises:
        ValueError: if a number is below 1 or above ``num_samples``.
    """
    if wrong := [k for k in ks if not 1 <= k <= num_samples]:
        raise ValueError(f"eval.ks={ks}: {wrong} are not between 1 and num_samples={num_samples}; raise num_samples")


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
