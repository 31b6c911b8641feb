"""Sections of RLOO training alone: sizes, passes, rewards, KL, evaluation, checks."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from torchrl_rloo.cli.config import check_ks
from torchrl_rloo.cli.fields import (
    Count,
    NonNegative,
    OneOf,
    Positive,
    Range,
    Share,
    Whole,
    parse_section,
)
from torchrl_rloo.runtime.lookup import check_path, import_object

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from torchrl_rloo.diagnostics import TrainingPlan
    from torchrl_rloo.envs.tasks import TaskBase
    from torchrl_rloo.envs.transforms import RewardTransform
    from torchrl_rloo.modules import TransformersWrapper
    from torchrl_rloo.runtime.ranks import Ranks

Offload = Annotated[str, OneOf("activations", "optimizer", "parameters")]
Packing = Annotated[str, OneOf("none", "packed", "shared_prefix")]
Parallel = Annotated[str, OneOf("none", "ddp", "fsdp")]
ExecutorMode = Annotated[str, OneOf("inline", "thread", "process")]
KLPlace = Annotated[str, OneOf("reward", "token", "loss")]
OnStale = Annotated[str, OneOf("mask", "baseline", "requeue", "wait")]
OnFailure = Annotated[str, OneOf("abstain", "replace")]
CheckMode = Annotated[str, OneOf("warn", "stop", "off")]

RESERVED_SETS = ("tasks", "greedy", "sampled", "failed", "abstained")  # words of metrics eval/<word> that are not sets
_SET_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,39}", re.ASCII)


@dataclass
class PlanConfig:
    """Sizes of a run."""

    steps: Count = 120  # number of training steps; each samples one rollout batch
    prompts_per_step: Count = 16  # prompts of a rollout batch
    num_generations: Count = 8  # completions of each prompt, which form a group
    minibatches: Count = 1  # optimizer steps in each epoch over a rollout batch
    epochs_per_batch: Count = 1  # epochs over each rollout batch
    micro_batch_size: Count | None = None  # rows per forward and backward pass; null: a whole minibatch
    epochs: Positive | None = None  # passes over the training prompts, in place of steps; null: steps

    @property
    def optimizer_steps(self) -> int:
        """Number of optimizer steps of the run; with epochs a bound, until the prompts are counted."""
        return 10**9 if self.epochs else self.steps * self.minibatches * self.epochs_per_batch

    def make(self, *, train_prompts: int, **sizes: Any) -> TrainingPlan:
        """Return the plan with the sizes of prompts, turns and model; raise ``ValueError`` if they do not fit."""
        from torchrl_rloo.diagnostics import TrainingPlan

        settings = asdict(self)
        if (epochs := settings.pop("epochs")) is not None:  # rounded up to whole steps
            settings["steps"] = math.ceil(round(epochs * train_prompts / self.prompts_per_step, 6))
        return TrainingPlan(train_prompts=train_prompts, **settings, **sizes)


@dataclass
class TrainConfig:
    """Settings of a training step."""

    packing: Packing = "none"  # rows: none (padded), packed (end to end), shared_prefix (common beginnings once)
    micro_batch_tokens: Count | None = None  # tokens per pass, also of the reference model; null: no limit
    max_grad_norm: Positive | None = 1.0  # largest norm of the gradient; null: no clipping
    precision: Annotated[str, OneOf("float32", "bfloat16")] = "float32"  # of passes; the model's weights stay float32
    float32_head: bool = False  # with precision=bfloat16, compute logits from float32 states and weights
    parallel: Parallel = "none"  # use of several ranks: none (one process), ddp (whole model on each), fsdp (sharded)
    shard_size: Count | None = None  # with parallel=fsdp, ranks that share a copy of the model; null: all ranks
    load_shards: bool = False  # with parallel=fsdp, each rank reads only its shards of the model's files
    tensor_parallel: Count = 1  # neighboring ranks that split the matrices of each layer
    context_parallel: Count = 1  # ranks that split the tokens of each pass, for long rows; requires packing
    rank_timeout: Positive = 7200.0  # seconds that a rank waits for the others, also for rank 0 to sample or evaluate
    offload: list[Offload] = field(default_factory=list)  # what waits in CPU memory: activations, optimizer, parameters

    def __post_init__(self):
        if self.float32_head and self.precision == "float32":
            raise ValueError("train.float32_head=true has no effect with train.precision=float32; set it to false")
        if self.shard_size is not None and self.parallel != "fsdp":
            raise ValueError(f"train.shard_size={self.shard_size} requires train.parallel=fsdp; set it to null")
        if self.load_shards and self.parallel != "fsdp":
            raise ValueError("train.load_shards=true requires train.parallel=fsdp; set it to false")
        if self.context_parallel > 1:
            requires = f"train.context_parallel={self.context_parallel} requires"
            if self.packing == "none":
                raise ValueError(f"{requires} train.packing=packed or shared_prefix; set it to 1")
            if self.parallel == "none":
                raise ValueError(f"{requires} train.parallel=ddp or fsdp; set it to 1")
        if "parameters" in self.offload and self.parallel != "fsdp":
            raise ValueError("train.offload=[parameters] requires train.parallel=fsdp; set it, or remove parameters")
        if {"parameters", "optimizer"} <= set(self.offload):
            raise ValueError("train.offload: parameters also keeps the optimizer's states on the CPU; remove optimizer")

    def join_ranks(self, device: str) -> Ranks:
        """Join the ranks that train together; a single one if there are no others."""
        from torchrl_rloo.runtime.ranks import Ranks

        split = {"tensor_parallel": self.tensor_parallel, "context_parallel": self.context_parallel}
        return Ranks.from_environment(device, timeout=self.rank_timeout, group=self.parallel != "none", **split)

    @property
    def scoring(self) -> dict[str, Any]:
        """Arguments of policies about precision; FSDP itself casts the weights that it gathers."""
        return {} if self.parallel == "fsdp" else {"precision": self.precision, "float32_head": self.float32_head}

    def distribute(self, model: PreTrainedModel, ranks: Ranks, source: str, **kwargs: Any) -> None:
        """Distribute a model over the ranks in place; if they read only their shards, load these from ``source``."""
        from torchrl_rloo.modules import load_shards
        from torchrl_rloo.training import shard_model

        options = {}
        if self.parallel == "fsdp":
            options = {"precision": self.precision, "float32_head": self.float32_head, "shard_size": self.shard_size}
            options |= {"offload_parameters": "parameters" in self.offload}
        shard_model(model, ranks, self.parallel, **options)
        if self.load_shards:
            load_shards(model, source, device=ranks.device, **kwargs)


@dataclass
class ExecutorConfig:
    """Execution of reward functions."""

    mode: ExecutorMode = "inline"  # inline, thread (waiting functions), or process (survives hangs and crashes)
    workers: Count | None = None  # number of threads or processes; null: the default of the mode
    timeout: Positive | None = None  # seconds per sample; null: the default of the mode
    rows_per_call: Count | None = None  # samples per call of a function; null: the default of the mode
    environment: list[str] | None = None  # variables that processes get, such as [OPENAI_API_KEY]; null: no keys


@dataclass
class RewardConfig:
    """Reward functions and their combination."""

    functions: list[Any] | None = None  # names, dotted paths or {_target_: name, key: value}; null: the task's
    weights: list[float] | None = None  # weight of each function; null: 1 each, or the task's
    clip_range: list[float] | None = None  # bounds [low, high] of the weighted sum; null: no clipping
    max_consecutive_failures: Count | None = 100  # consecutive failed samples that stop the run; null: never stop
    deduplicate: bool = True  # score identical completions of a prompt once; set false for random rewards
    shaping: list[Any] = field(default_factory=list)  # transforms of scores: [{_target_: ...NormalizeRewards}]
    turns: list[Any] = field(default_factory=list)  # functions (conversation, row) that reward each turn: dotted paths
    executor: ExecutorConfig = field(default_factory=ExecutorConfig)  # of the functions; failed samples abstain

    def __post_init__(self):
        if self.clip_range is not None and (len(self.clip_range) != 2 or not self.clip_range[0] < self.clip_range[1]):
            raise ValueError(f"reward.clip_range={self.clip_range} must be [low, high] with low < high")

    def make(self, task: TaskBase, quarantine: Path | None) -> RewardTransform:
        """Build the reward functions: the user's, or the task's; ``quarantine`` is the file of failed samples."""
        from torchrl_rloo.envs.tasks.registry import CUSTOM
        from torchrl_rloo.envs.transforms import RewardTransform
        from torchrl_rloo.rewards import load_reward, make_executor

        own = self.functions is not None
        if self.functions == [] and (task is CUSTOM or task.make_rewards()):
            raise ValueError("reward.functions=[] leaves nothing to learn from; name one, or use null for the task's")
        return RewardTransform(
            [load_reward(spec) for spec in self.functions] if own else task.make_rewards(),
            weights=self.weights if own or self.weights else task.reward_weights,
            clip_range=self.clip_range,
            executor=make_executor(**asdict(self.executor)),
            max_consecutive_failures=self.max_consecutive_failures,
            deduplicate=self.deduplicate,
            quarantine=quarantine,
        )

    def make_after(self, rewards: RewardTransform, *, per_token: bool = False) -> list:
        """Build what follows the rewards: transforms of scores, then rewards of turns, or of tokens if credited."""
        from hydra.utils import instantiate

        from torchrl_rloo.envs.transforms import TurnRewardTransform

        turns = [import_object(f, "reward.turns") if isinstance(f, str) else instantiate(f) for f in self.turns]
        turns = turns or [None] * per_token
        return [instantiate(spec, rewards) for spec in self.shaping] + [TurnRewardTransform(f) for f in turns]


@dataclass
class KLConfig:
    """KL to the initial model."""

    where: KLPlace | None = None  # reward (return), token (advantages), loss (term); null: the method's
    coeff: NonNegative | None = 0.0  # coefficient of the KL; 0: no KL and no reference model; null: the method's
    estimator: Annotated[str, OneOf("k1", "k2", "k3")] | None = None  # k1, k2 or k3; null: the method's
    clip: Positive | None = None  # bound of the KL of a token, in nats, for where=token; null: the method's
    discount: Share | None = None  # of the KL of later tokens, for where=token; 0: only its own; null: the credit's
    target: Any = None  # KL to hold by adapting the coefficient, nats per action token, or [low, high]; null: constant

    def __post_init__(self):
        for name in ("where", "estimator", "clip", "discount", "target"):
            if self.coeff == 0 and getattr(self, name) is not None:
                value = getattr(self, name)
                raise ValueError(f"kl.{name}={value} has no effect with kl.coeff=0; set kl.coeff (null: the method's)")


@dataclass
class ReferenceConfig:
    """Reference model of the KL."""

    sync_every: Whole = 0  # steps between moves of the reference towards the model; 0: it stays the initial model
    share: Annotated[float, Range(0, 1, above=True)] = 0.6  # share of the model's weights in a move; 1: replace it

    def __post_init__(self):
        if not self.sync_every and self.share != ReferenceConfig.share:
            raise ValueError(f"reference.share={self.share} has no effect with reference.sync_every=0; set sync_every")

    def make(self, trainer: TransformersWrapper, copy: PreTrainedModel | None) -> Any:
        """Build the scorer of the initial model: of its copy, which may move, or of the model without its adapter."""
        from torchrl_rloo import modules

        if copy is None:
            return modules.AdapterReference(trainer)
        scorer = trainer.get_new_version(model=copy)
        return modules.MovingReference(scorer, trainer.model, self.share) if self.sync_every else scorer


@dataclass
class EvalSetConfig:
    """Further set of held-out prompts; null takes the setting of the run's own."""

    task: str | None = None  # task of the prompts, with its rewards and turns; null: the run's
    source: str | None = None  # hub id, file or embedded; null: the held-out prompts of task
    split: str | None = None  # split of source; null: train, or the task's
    name: str | None = None  # configuration of a hub dataset; null: its default
    size: Count = 256  # largest number of prompts
    prompt_column: str | None = None  # column with the prompt, text or messages; null: prompt, query or messages
    column_map: dict[str, str] = field(default_factory=dict)  # columns to rename: {target: answer} gives answer
    row_map: str | None = None  # dotted path of a function from a row to a row with a prompt; null: the task's
    system_prompt: str | None = None  # system message for prompts without one; null: the task's
    scorer: Any = None  # scorer, given like a reward; null: eval.scorer with the run's task, else the task's
    num_samples: Whole | None = None  # sampled completions of each prompt; null: eval.num_samples
    ks: list[int] | None = None  # values of k for pass@k and maj@k; null: eval.ks


@dataclass
class EvalConfig:
    """Evaluation on held-out prompts."""

    scorer: Any = None  # scorer of held-out completions, given like a reward; null: the task's, or your rewards
    every: Whole = 20  # steps between evaluations; 0: only before the first and after the last step
    batch_size: Count = 256  # conversations per batch
    num_samples: Whole = 1  # sampled completions of each prompt, for eval/sampled
    ks: list[int] = field(default_factory=list)  # values of k for pass@k and maj@k, at most num_samples
    rewards: bool = False  # also score with each reward function of training, as eval/<function>/*
    sets: dict[str, Any] = field(default_factory=dict)  # further sets: {hard: {source: hard.jsonl, size: 100}}

    def __post_init__(self):
        check_ks(self.ks, self.num_samples)
        self.sets = {name: self._parse_set(name, values) for name, values in self.sets.items()}

    def _parse_set(self, name: str, values: Any) -> EvalSetConfig:
        """Return a set with its own number of samples and values of k."""
        where = f"eval.sets.{name}"
        if not _SET_NAME.fullmatch(str(name)) or name in RESERVED_SETS or name.endswith(("_low", "_high")):
            raise ValueError(
                f"{where}: the name must have letters, digits, '_', '-' and '.', at most 40, and cannot be one of "
                f"{', '.join(RESERVED_SETS)} or end in _low or _high; rename the set"
            )
        parsed = parse_section(EvalSetConfig, values or {}, where)
        if parsed.task is None and parsed.source is None:
            raise ValueError(f"{where} has the run's own held-out prompts; set {where}.source or {where}.task")
        parsed.num_samples = self.num_samples if parsed.num_samples is None else parsed.num_samples
        parsed.ks = [k for k in self.ks if k <= parsed.num_samples] if parsed.ks is None else parsed.ks
        check_path(f"{where}.source", parsed.source or "")
        check_ks(parsed.ks, parsed.num_samples, where)
        return parsed

    def make_scorers(self, task: TaskBase, rewards: RewardTransform, own_rewards: bool) -> dict[str, Any]:
        """Return the scorers of the run's held-out prompts by name; raise if a further set has the name of one."""
        from torchrl_rloo.evaluation.evaluation import name_scorers
        from torchrl_rloo.rewards import load_reward
        from torchrl_rloo.rewards.protocol import reward_name

        own = rewards.functions if own_rewards else None
        named = name_scorers(task.make_scorer(own) if self.scorer is None else load_reward(self.scorer))
        if self.rewards:
            named |= {reward_name(f): f for f in rewards.functions if reward_name(f) not in named}
        if both := next((name for name in self.sets if name in named), None):
            raise ValueError(
                f"eval.sets.{both} has the name of a scorer, so eval/{both}/greedy is both; rename the set"
            )
        return named


@dataclass
class CheckConfig:
    """Checks before the first step."""

    mode: CheckMode = "warn"  # warn prints what is wrong before the first step, stop also refuses errors, off
    own: list[str] = field(default_factory=list)  # dotted paths of your checks, functions of the facts of a run

    def load_own(self) -> dict[str, Callable]:
        """Import the checks that settings add, and return them by path; raise ``ValueError`` if one is missing."""
        if self.own and self.mode == "off":
            raise ValueError(f"check.own={self.own} has no effect with check.mode=off; set it to []")
        return {path: import_object(path, "check.own") for path in self.own}
