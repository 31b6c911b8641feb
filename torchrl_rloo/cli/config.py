"""Sections of the recipes' configurations: one typed, documented line a field. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from torchrl_rloo.cli.schema import section
from torchrl_rloo.lookup import check_path


@dataclass
class ModelConfig:
    name: str = "embedded"  # a hub id, a local directory, or "embedded": the built-in model
    dtype: str = "float32"  # of the trained weights; bfloat16 rounds most steps of a small learning rate away
    device: str = "cpu"  # or cuda
    chat_template: str | None = None  # .jinja file, tokenizer directory or template; null: the tokenizer's own
    gradient_checkpointing: bool = False  # true: recompute activations in the backward pass; less memory, more time
    kwargs: dict[str, Any] = field(default_factory=dict)  # for from_pretrained: model.kwargs.attn_implementation=sdpa

    def __post_init__(self):
        check_path("model.name", self.name)


@dataclass
class DataConfig:
    source: str | None = None  # hub id, .jsonl/.json/.parquet/.csv file, saved dataset, "embedded"; null: the task's
    split: str | None = None  # of source; null: train, or as the task has it
    name: str | None = None  # configuration of a hub dataset
    eval_source: str | None = None  # held-out prompts; null: split off source, or the published test split
    eval_split: str | None = None  # of eval_source; null: the same as of source
    eval_size: int = 256  # held-out prompts, at most
    prompt_column: str | None = None  # column with the prompt, text or chat messages; null: prompt, query or messages
    columns: list[str] | None = None  # other columns to keep, for rewards; null: all
    column_map: dict[str, str] = field(default_factory=dict)  # renames columns: {target: answer} makes answer of target
    row_map: str | None = None  # dotted path of a function from a row to a row with a prompt; null: the task's
    system_prompt: str | None = None  # put before prompts without a system message; null: the task's
    chat: bool | None = None  # true/false: do/don't turn text prompts into chat; null: if the tokenizer has a template
    template_kwargs: dict[str, Any] = field(default_factory=dict)  # for the chat template: {enable_thinking: false}
    max_prompt_length: int | None = None  # drop longer prompts, in tokens
    limit: int | None = None  # rows of source to read; null: all

    def __post_init__(self):
        check_path("data.source", self.source or "")
        check_path("data.eval_source", self.eval_source or "")


@dataclass
class PlanConfig:
    steps: int = 120  # rollout batches
    prompts_per_step: int = 16  # prompts drawn for each
    num_generations: int = 8  # completions of each prompt
    minibatches: int = 1  # optimizer steps that a rollout batch is split into
    epochs_per_batch: int = 1  # epochs over each rollout batch
    micro_batch_size: int | None = None  # rows in one forward and backward pass; null: a whole minibatch


@dataclass
class TrainConfig:
    """Settings that change time and memory, not the gradient."""

    packing: str = "none"  # packed: rows end to end, not padded; shared_prefix: a group's prompt only once
    micro_batch_tokens: int | None = None  # tokens in one pass, of the reference too; null: any number
    merge_identical: bool = False  # true: one pass for completions that are the same token by token
    max_grad_norm: float | None = 1.0  # null: no clipping


@dataclass
class GenerateConfig:
    max_new_tokens: int = 32  # in one turn
    temperature: float = 1.0  # divides the logits
    top_p: float = 1.0  # sample from the most likely tokens that make up this probability
    top_k: int | None = None  # sample from this many most likely tokens; null: all
    min_p: float = 0.0  # drop tokens less likely than this share of the most likely one
    repetition_penalty: float = 1.0  # above 1: makes tokens of the row less likely to come again
    stop_strings: list[str] | None = None  # end a turn after any of these texts
    stop_token_ids: list[int] | None = None  # end a turn after any of these tokens


@dataclass
class EnvironmentConfig:
    transforms: list[Any] | None = None  # answer the policy's turns: [{_target_: ...ToolTransform, tools: [...]}]
    max_turns: int | None = None  # of the policy; null: as the task has it, here and below
    max_turn_tokens: int | None = None  # sampled in one turn, in addition to generate.max_new_tokens
    max_tokens: int | None = None  # of a conversation; null: the model's context, where there are several turns
    max_seconds: float | None = None  # of wall-clock time, checked between turns
    on_rewrite: str | None = None  # a template that rewrites the past: keep what the policy saw (null), or split


@dataclass
class CollectorConfig:
    asynchronous: bool = False  # true: each conversation at its own pace; false: turn by turn together
    max_in_flight: int | None = None  # conversations at a time, if asynchronous; null: all that have begun
    ahead: int = 0  # groups begun for later steps while this one trains; requires sampler.share_weights=false
    reward_threads: int = 1  # groups judged at a time
    max_batch_size: int | None = None  # rows sampled at once by the Hugging Face model; null: all that wait
    max_consecutive_failures: int | None = 100  # turns in a row that may fail; null: any number

    def __post_init__(self):
        changed = [name for name, value in asdict(self).items() if value != getattr(CollectorConfig, name)]
        if changed and not self.asynchronous:
            raise ValueError(f"collector.{changed[0]} requires collector.asynchronous=true")


@dataclass
class SamplerConfig:
    share_weights: bool = True  # sample with the training model itself; false: with a copy
    dtype: str | None = None  # of the copy, e.g. bfloat16; null: the training model's
    sync_every: int = 1  # steps between weight updates; 0: never

    def __post_init__(self):
        if self.share_weights and (self.dtype is not None or self.sync_every != 1):
            raise ValueError(
                f"sampler.dtype={self.dtype} and sampler.sync_every={self.sync_every} cannot be combined with "
                "sampler.share_weights=true; set it to false"
            )


@dataclass
class ExecutorConfig:
    mode: str = "inline"  # thread: for functions that wait; process: a hang or a crash costs one sample
    workers: int | None = None  # null: as the mode's class has it, here and below
    timeout: float | None = None  # seconds for a sample
    rows_per_call: int | None = None  # samples in one call of a function


@dataclass
class RewardConfig:
    functions: list[Any] | None = None  # names, dotted paths, or {_target_: name, argument: value}; null: the task's
    weights: list[float] | None = None  # one for each function; null: 1 each, or the task's
    clip_range: list[float] | None = None  # [low, high] of the weighted sum
    max_consecutive_failures: int | None = 100  # samples in a row that may fail; null: any number
    deduplicate: bool = True  # score identical completions of a prompt once; false for random rewards
    shaping: list[Any] = field(default_factory=list)  # of scores, in order: [{_target_: ...NormalizeRewards}]
    executor: ExecutorConfig = field(default_factory=ExecutorConfig)  # calls the functions; a failed sample abstains

    def __post_init__(self):
        if self.clip_range is not None and (len(self.clip_range) != 2 or not self.clip_range[0] < self.clip_range[1]):
            raise ValueError(f"reward.clip_range={self.clip_range} must be [low, high] with low < high")


@dataclass
class PassRateConfig:
    """Arguments of PassRatePool; null: its own."""

    target: list[float] | None = None  # lowest and highest pass rate preferred
    floor: float | None = None  # share of the draws that goes to all prompts
    window: int | None = None  # groups of an estimate
    retire: float | None = None  # pass rate from which a prompt is drawn no more
    success: float | None = None  # return that counts as passed


@dataclass
class RerollsConfig:
    """Arguments of DeferredRerolls; null: its own."""

    delay: int | None = None  # draws until the first re-roll; null: those of ten steps
    growth: float | None = None  # of the delay from one re-roll to the next
    max_share: float | None = None  # of the draws
    max_tries: int | None = None  # re-rolls of one prompt
    threshold: float | None = None  # largest return of an unsolved prompt


@dataclass
class RefillConfig:
    """Arguments of RefillingCollector and its ZeroSignalFilter; null: their own."""

    max_batches: int | None = None  # collected for one step
    max_age: int | None = None  # policy versions that a surplus group may be behind
    tolerance: float | None = None  # returns of a group that differ by no more have no signal


@dataclass
class CacheConfig:
    """Arguments of GroupCache; null: its own."""

    capacity: int = 64  # groups kept
    max_uses: int | None = None  # of each group
    max_age: int | None = None  # policy versions that a group may be behind


@dataclass
class CurriculumConfig:
    pass_rate: Any = None  # {target: [0.1, 0.9], floor, window, retire, success}: prefer prompts solved sometimes
    rerolls: Any = None  # {delay, growth, max_share: 0.25, max_tries, threshold}: draw unsolved prompts again later
    refill: Any = None  # {max_batches: 4, max_age, tolerance}: train only on groups with signal, sample until full
    cache: Any = None  # {capacity: 64, max_uses, max_age}: fill what refill leaves empty with earlier groups

    def __post_init__(self):
        self.pass_rate = section(PassRateConfig, self.pass_rate, "curriculum.pass_rate")
        self.rerolls = section(RerollsConfig, self.rerolls, "curriculum.rerolls")
        self.refill = section(RefillConfig, self.refill, "curriculum.refill")
        self.cache = section(CacheConfig, self.cache, "curriculum.cache")
        if self.cache is not None and self.refill is None:
            raise ValueError("curriculum.cache requires curriculum.refill; set curriculum.refill={}")


@dataclass
class KLConfig:
    where: str | None = None  # reward (return), token (advantages) or loss (a term); null: the method's
    coeff: float | None = 0.0  # 0: no KL and no reference model; null: the method's own
    estimator: str | None = None  # k1, k2 or k3; null: the method's
    clip: float | None = None  # limit of a token's estimate, where=token; null: none
    target: float | None = None  # nats per action token: adapt the coefficient to hold this KL; null: constant

    def __post_init__(self):
        for name in ("where", "estimator", "clip", "target"):
            if self.coeff == 0 and getattr(self, name) is not None:
                value = getattr(self, name)
                raise ValueError(f"kl.{name}={value} has no effect with kl.coeff=0; set kl.coeff (null: the method's)")


@dataclass
class OptimizerConfig:
    lr: float = 3.0e-4  # peak learning rate of AdamW; models of billions of weights take about 1e-6
    betas: list[float] = field(default_factory=lambda: [0.9, 0.99])  # of AdamW's means of gradient and square
    weight_decay: float = 0.0  # of AdamW

    def __post_init__(self):
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer.betas={self.betas} must be two numbers from 0 to below 1")


@dataclass
class ScheduleConfig:
    warmup_steps: int | None = None  # in optimizer steps; null: 5, or a tenth of a run of fewer than 50
    final_fraction: float = 0.1  # of the peak learning rate, at the last step


@dataclass
class EvalConfig:
    scorer: Any = None  # judges held-out completions, given like a reward; null: the task's, or your rewards
    every: int = 20  # steps between evaluations; 0: only before the first step and after the last
    batch_size: int = 256  # conversations at once
    num_samples: int = 1  # sampled completions of each prompt, for eval/sampled
    ks: list[int] = field(default_factory=list)  # of pass@k and maj@k, at most num_samples

    def __post_init__(self):
        check_ks(self.ks, self.num_samples)


@dataclass
class CheckpointConfig:
    every: int = 10  # steps; 0: only at the end or when stopped
    keep: int = 2  # newest checkpoints kept


@dataclass
class LoggerConfig:
    samples: int = 8  # rows of a table of samples
    loggers: list[str] = field(default_factory=lambda: ["tensorboard"])  # tensorboard, csv, wandb, mlflow
    logger_kwargs: dict[str, Any] = field(default_factory=dict)  # by logger: {wandb: {project: rloo}}


@dataclass
class LogConfig(LoggerConfig):
    samples_every: int = 20  # steps between tables of training completions; 0: none
    transcripts: bool = False  # true: a page of every evaluation's conversations in output_dir/transcripts


@dataclass
class TaskConfig:
    name: str = "addition"  # a task's name or the dotted path of one of yours
    mixture: Any = None  # for task=mixture: {addition: {weight: 2}, countdown: 1}

    def __post_init__(self):
        check_settings("task.mixture", self.mixture)


@dataclass
class InferenceConfig:
    engine: Any = None  # class and arguments of the engine; null: the Hugging Face model samples
    updater: Any = None  # class and arguments of what sends weights to the engine
    self_test: bool = True  # before training, change the weights, see the engine follow, and change them back
    sleep: bool = False  # free the engine's GPU memory while training; needs engine.enable_sleep_mode=true
    parity_every: int = 0  # steps between parity/* metrics, sampler against trainer; 0: never

    def __post_init__(self):
        for name in ("engine", "updater"):
            check_settings(f"inference.{name}", getattr(self, name))
        if self.engine is not None and "_target_" not in self.engine:
            raise ValueError("inference.engine is a part of an engine: choose one as well, such as inference=vllm")
        for name, unset in (("updater", None), ("sleep", False), ("self_test", True)):
            if self.engine is None and getattr(self, name) != unset:
                raise ValueError(
                    f"inference.{name} requires an engine, such as inference=vllm: the model itself samples"
                )


@dataclass
class RunConfig:
    """Settings of any run, at the top level of a recipe's configuration."""

    seed: int = 0  # of prompts, samples, minibatches and the built-in model's warm start
    threads: int | None = 1  # CPU threads; null: torch's choice. The same number repeats a run bit for bit
    resume: str = "auto"  # extend: also with more steps, another engine or evaluation; never: start over
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)


def run_settings(cfg: RunConfig) -> dict[str, Any]:
    """Return the arguments of :class:`~torchrl_rloo.run.Run` that stand in a recipe's configuration."""
    return {
        "settings": asdict(cfg),
        "defaults": asdict(type(cfg)()),
        "resume": cfg.resume,
        "checkpoint_every": cfg.checkpoint.every,
        "keep": cfg.checkpoint.keep,
        "loggers": cfg.log.loggers,
        "logger_kwargs": cfg.log.logger_kwargs,
    }


def check_settings(name: str, values: Any) -> None:
    """Refuse what is neither null nor settings by name.

    Raises:
        ValueError: for a value of another kind.
    """
    if values is not None and not isinstance(values, dict):
        raise ValueError(f"{name}={values} must be null or settings by name, such as {{key: value}}")


def check_ks(ks: list[int], num_samples: int) -> None:
    """Refuse numbers that pass@k cannot be estimated for.

    Raises:
        ValueError: for a number below 1 or above ``num_samples``.
    """
    if wrong := [k for k in ks if not 1 <= k <= num_samples]:
        raise ValueError(f"eval.ks={ks}: {wrong} are not between 1 and num_samples={num_samples}; raise num_samples")


def check_clip_range(reward: RewardConfig, advantage: dict[str, Any]) -> None:
    """Refuse to clip the sum of rewards where advantages do not read it.

    Raises:
        ValueError: if both are asked for.
    """
    credit = advantage.get("credit")
    credit = credit.get("name") if isinstance(credit, dict) else credit
    if reward.clip_range is not None and credit not in (None, "trajectory"):
        raise ValueError(
            f"reward.clip_range={reward.clip_range} has no effect with advantage.credit={credit}, which does not read "
            "the sum of the rewards; set it to null"
        )


def check_ahead(collector: CollectorConfig, sampler: SamplerConfig) -> None:
    """Refuse to sample ahead with the weights that train.

    Raises:
        ValueError: if both are asked for.
    """
    if collector.ahead and sampler.share_weights:
        raise ValueError(
            f"collector.ahead={collector.ahead} samples while the model trains, so it cannot be combined with "
            "sampler.share_weights=true; set it to false"
        )
