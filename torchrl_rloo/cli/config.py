"""Sections of the recipes' configurations, each with the function that builds its part; imports nothing heavy.

A range or choice stands in the annotation of a field and its documentation in the comment behind it, see
:mod:`torchrl_rloo.cli.fields`. What only RLOO training has is in
:mod:`torchrl_rloo.cli.rloo_sections` and :mod:`torchrl_rloo.cli.sampling_sections`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from torchrl_rloo.cli.fields import (
    Count,
    DType,
    NonNegative,
    OneOf,
    Positive,
    Range,
    Share,
    Whole,
    check_settings,
    non_null_fields,
    parse_section,
)
from torchrl_rloo.runtime.lookup import check_path

if TYPE_CHECKING:
    from tensordict import TensorDictBase
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from torchrl_rloo.data import PromptDataset
    from torchrl_rloo.engines import Engine
    from torchrl_rloo.envs.tasks import TaskBase
    from torchrl_rloo.runtime.ranks import Ranks
    from torchrl_rloo.weight_update import WeightUpdater

OPTIMIZERS = (  # training.OPTIMIZERS
    *("adamw", "adamw_8bit", "muon", "adadelta", "adafactor", "adagrad", "adam", "adamax", "asgd", "nadam", "radam"),
    *("rmsprop", "rprop", "sgd"),
)
SCHEDULES = (  # training.SCHEDULES
    *("linear", "cosine", "constant", "ConstantLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "CyclicLR"),
    *("ExponentialLR", "LinearLR", "MultiStepLR", "OneCycleLR", "PolynomialLR", "StepLR"),
)
TopP = Annotated[float, Range(0, 1, above=True)]
Logger = Annotated[str, OneOf("tensorboard", "wandb", "mlflow", "trackio")]  # run.loggers
Resume = Annotated[str | int, OneOf("auto", "extend", "never", numbers=True)]  # run.settings.RESUME


@dataclass
class TaskConfig:
    """Task to learn."""

    name: str = "addition"  # name of a task, or dotted path of your own
    mixture: Any = None  # weight and data settings by task, for task=mixture: {addition: {weight: 2}, countdown: 1}

    def __post_init__(self):
        check_settings("task.mixture", self.mixture)

    def make(self) -> TaskBase:
        """Return the task."""
        from torchrl_rloo.embedded import resolve_task

        return resolve_task(**non_null_fields(self))


@dataclass
class ModelConfig:
    """Model to train and how to load it."""

    name: str = "embedded"  # hub id, directory, GGUF file or gemma-3-270m; embedded: the built-in model
    dtype: DType = "float32"  # data type of the weights; bfloat16 is for lora, whose adapter is trained in float32
    device: str = "cpu"  # device of the trained model: cpu or cuda
    chat_template: str | None = None  # .jinja file, directory, text or name (chatml, qwen); null: the tokenizer's own
    gradient_checkpointing: bool = False  # recompute activations in the backward pass: less memory, more time
    train_vision: bool = False  # also train the vision tower of a vision-language model, and send it to engines
    quantization: Annotated[str, OneOf("nf4")] | None = None  # frozen weights under lora: nf4 (QLoRA); null: in dtype
    quantization_kwargs: dict[str, Any] = field(default_factory=dict)  # {bnb_4bit_use_double_quant: true}
    kwargs: dict[str, Any] = field(default_factory=dict)  # arguments of from_pretrained: {attn_implementation: sdpa}

    def __post_init__(self):
        check_path("model.name", self.name)

    def load(self, name: str, **options: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Load the model and its tokenizer from a directory or the hub; ``options`` replace settings."""
        from torchrl_rloo.modules import load_model

        return load_model(name, **non_null_fields(self, "name", "kwargs") | options, **self.kwargs)


@dataclass
class DataConfig:
    """Training and held-out prompts."""

    source: str | None = None  # hub id, .jsonl/.json/.parquet/.csv file, saved dataset, URL or embedded; null: task's
    split: str | None = None  # split of source; null: train, or the task's
    name: str | None = None  # configuration of a hub dataset, family or environment; null: its default
    arguments: dict[str, Any] = field(default_factory=dict)  # of the family or environment: {max_number: 9}
    eval_source: str | None = None  # held-out prompts; null: split off source, or the published test split
    eval_split: str | None = None  # split of eval_source; null: the same as of source
    eval_size: Count = 256  # largest number of held-out prompts
    prompt_column: str | None = None  # column with the prompt, text or messages; null: prompt, query or messages
    column_map: dict[str, str] = field(default_factory=dict)  # columns to rename: {target: answer} gives answer
    row_map: str | None = None  # dotted path of a function from a row to a row with a prompt; null: the task's
    system_prompt: str | None = None  # system message for prompts without one; null: the task's
    examples: Whole = 0  # solved prompts to show before each text prompt, for base models; needs a column answer
    chat: bool | None = None  # turn text prompts into chat messages; null: if the tokenizer has a chat template
    template_kwargs: dict[str, Any] = field(default_factory=dict)  # arguments of the template: {enable_thinking: false}
    max_prompt_length: Count | None = None  # drop prompts longer than this, in tokens; null: keep all
    limit: Count | None = None  # number of rows of source to read; null: all
    shuffle: bool = True  # draw each epoch in a new random order; false: in the order of source
    streaming: Count | None = None  # read rows as they are drawn, and shuffle among this many; null: read all at once

    def __post_init__(self):
        if not (self.source or "").startswith(("http://", "https://")):  # the address of an environment
            check_path("data.source", self.source or "")
        check_path("data.eval_source", self.eval_source or "")
        if self.streaming is not None:
            stream = f"data.streaming={self.streaming}"
            if self.max_prompt_length is None:
                raise ValueError(f"{stream} requires data.max_prompt_length, since no one knows the longest; set it")
            if self.examples:
                raise ValueError(f"{stream} cannot be combined with data.examples={self.examples}; set it to 0")
            if not self.shuffle:
                raise ValueError(f"{stream} shuffles, unlike data.shuffle=false; set data.streaming=1 alone")

    def load(
        self, task: TaskBase, tokenizer: PreTrainedTokenizerBase, seed: int
    ) -> tuple[PromptDataset, PromptDataset]:
        """Load the prompts to train on, and the held-out ones."""
        options = non_null_fields(self, "examples", "shuffle") | ({"chat": False} if self.examples else {})
        if not task.takes_arguments and options.pop("arguments"):
            raise ValueError(f"data.arguments={self.arguments} has no effect with task={task.name}; set it to {{}}")
        train, held_out = self.show_examples(tokenizer, *task.load(**options, seed=seed, tokenizer=tokenizer))
        train.in_order = not self.shuffle
        return train, held_out

    def show_examples(self, tokenizer: PreTrainedTokenizerBase, *prompts: PromptDataset) -> Sequence[PromptDataset]:
        """Show the first text prompts, with their answers, before the others, and in chats as one user message."""
        from torchrl_rloo.data import show_examples

        shown = show_examples(self.examples, *prompts, chat=self.chat) if self.examples else prompts
        return [each.for_tokenizer(tokenizer) for each in shown]


@dataclass
class GenerateConfig:
    """Sampling of the policy's turns."""

    max_new_tokens: Count = 32  # largest number of tokens per turn
    temperature: NonNegative = 1.0  # divisor of the logits
    top_p: TopP = 1.0  # probability mass of the most likely tokens to sample from; 1: all
    top_k: Count | None = None  # number of most likely tokens to sample from; null: all
    min_p: Share = 0.0  # smallest probability of a token, relative to the most likely one; 0: any
    repetition_penalty: Positive = 1.0  # penalty of tokens already in the row; 1: none; above 1: less likely
    presence_penalty: float = 0.0  # subtracted from logits of tokens already in the turn; 0: none
    frequency_penalty: float = 0.0  # subtracted for each time that a token is already in the turn; 0: none
    logit_bias: Any = None  # added to the logits of token ids: {13: -1.5}; null: nothing
    min_new_tokens: Whole = 0  # tokens of a turn before which it cannot end
    bad_words: list[str] | None = None  # texts that a turn must not have; null: none
    structured: Any = None  # grammar of a turn: {regex: ...}, json, choice or grammar; null: none
    stop_strings: list[str] | None = None  # texts that end a turn; null: none
    stop_token_ids: list[int] | None = None  # token ids that end a turn; null: none

    def arguments(self, seed: int) -> dict[str, Any]:
        """Return ``generate_kwargs`` of a policy."""
        return {"seed": seed} | non_null_fields(self)


@dataclass
class EnvironmentConfig:
    """Turns and limits of conversations."""

    transforms: list[Any] | None = None  # transforms that answer turns: [{_target_: ...}]; null: the task's
    max_turns: Count | None = None  # turns of the policy per conversation; null: the task's
    max_tokens: Count | None = None  # tokens per conversation; null: the task's, or the context if it has several turns
    max_seconds: Positive | None = None  # seconds per conversation, checked between turns; null: the task's
    on_time_limit: Annotated[str, OneOf("score", "abstain")] | None = None  # what max_seconds ends; null: score it
    on_rewrite: Annotated[str, OneOf("keep", "split")] | None = None  # row whose past the template rewrites; null: keep

    def make(self, task: TaskBase, context: int | None) -> tuple[Callable[[], list], dict[str, Any]]:
        """Return a factory of the transforms that answer turns, and the limits of a conversation.

        Args:
            task: task of the conversations.
            context: longest conversation of the model, in tokens.
        """
        from torchrl_rloo.envs.tasks.registry import conversation_settings

        return conversation_settings(task, self.transforms, non_null_fields(self, "transforms"), context)


@dataclass
class InferenceConfig:
    """Engine that samples, and its weight updates."""

    engine: Any = None  # class (_target_) and arguments of the engine; null: the Hugging Face model samples
    updater: Any = None  # class (_target_) and arguments of the weight updater of the engine
    replicas: Count = 1  # engines that share the requests; more than one requires a pool
    per_replica: dict[str, Any] = field(default_factory=dict)  # engine arguments with one value per replica
    pool: Any = None  # class (_target_) and arguments of the pool that supervises the engines; null: one engine alone
    self_test: bool = True  # check before training that the engine follows a change of the weights
    sleep: bool = False  # free the engine's GPU memory while training; requires engine.enable_sleep_mode=true
    parity_every: Whole = 0  # steps between parity/* metrics, which compare sampler and trainer; 0: never

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

    @property
    def on_ray(self) -> bool:
        """True if the engines are actors of a Ray cluster."""
        return str((self.engine or {}).get("_target_")).endswith(".RayEngine")

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the engine that samples; those of an actor's engine are one level deeper."""
        return self.engine.get("make_engine", self.engine) if self.engine is not None else {}

    def check_transport(self) -> None:
        """Raise ``ValueError`` if this machine cannot have the transport of weights, before a model is loaded."""
        transport = (self.updater or {}).get("transport")
        if isinstance(transport, dict):
            from hydra.errors import InstantiationException
            from hydra.utils import instantiate

            try:
                instantiate(transport)
            except InstantiationException as error:
                raise error.__cause__ or error from None

    def make_engine(self, model: str, length: int | None = None) -> Engine:
        """Start the engines, in a supervised pool if the settings have one.

        Args:
            model: directory or hub id that they load unless the settings name another one.
            length: longest row of the run in tokens, for which they reserve memory unless the settings have a limit.
        """
        from hydra.utils import instantiate

        arguments, nested = dict(self.engine), self.arguments
        if "model" in nested:
            nested = nested | {"model": nested["model"] or model}
            if "max_model_len" in nested:
                nested["max_model_len"] = nested["max_model_len"] or length
            arguments = arguments | {"make_engine": nested} if "make_engine" in arguments else nested
        starts = [
            partial(instantiate, arguments | {k: v[i] for k, v in self.per_replica.items()})
            for i in range(self.replicas)
        ]
        with ExitStack() as started:  # close the first engines if a later one does not start
            together = (start() for start in starts)
            if self.on_ray:
                from torchrl_rloo.ray import start_together

                together = start_together(starts)
            engines = [started.enter_context(engine) for engine in together]
            engine = engines[0] if self.pool is None else instantiate(self.pool, engines)
            started.pop_all()
        return engine

    def connect(
        self, engine: Engine | None, sampler: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ranks: Ranks
    ) -> WeightUpdater:
        """Send the weights of a model to the engine, verify that they arrive, and return the updater.

        Args:
            engine: engine of rank 0.
            sampler: model to send.
            tokenizer: its tokenizer.
            ranks: ranks that hold a part of the model.
        """
        from hydra.utils import instantiate

        from torchrl_rloo import diagnostics

        updater = instantiate(self.updater, sampler, engine if ranks.is_main else [])
        if self.self_test:
            ranks.log(str(diagnostics.self_test(updater, sampler, tokenizer, engine, ranks=ranks)))
        else:
            updater.initialize()
        return updater


@dataclass
class OptimizerConfig:
    """Optimizer of the trained weights, which are float32."""

    name: Annotated[str, OneOf(*OPTIMIZERS)] = "adamw"  # adamw, adamw_8bit, muon (hidden matrices), sgd, adafactor, ...
    lr: Positive = 3.0e-4  # peak learning rate; models of billions of weights need about 1e-6
    betas: list[float] | None = None  # decay rates of the mean gradient and square; null: [0.9, 0.99] if it has them
    weight_decay: NonNegative | None = None  # weight decay, multiplied by lr for adamw, adamw_8bit and muon; null: 0
    kwargs: dict[str, Any] = field(default_factory=dict)  # further arguments of the optimizer: {momentum: 0.9}

    def __post_init__(self):
        if self.betas is not None and (len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas)):
            raise ValueError(f"optimizer.betas={self.betas} must be two numbers of at least 0 and below 1")
        _check_kwargs("optimizer", self)

    def make(self, model: PreTrainedModel, *, offload_states: bool = False) -> Optimizer:
        """Build the optimizer of a model's trained weights."""
        from torchrl_rloo.training import make_optimizer

        return make_optimizer(model, **non_null_fields(self, "kwargs"), **self.kwargs, offload_states=offload_states)


@dataclass
class ScheduleConfig:
    """Learning rate of each optimizer step."""

    name: Annotated[str, OneOf(*SCHEDULES)] = "linear"  # linear, cosine, constant, or a class of torch: StepLR
    warmup_steps: Whole | None = None  # optimizer steps of the warmup; null: 5, or a tenth of a run shorter than 50
    final_fraction: Share | None = None  # share of the peak at the last step; null: 0.1 for linear and cosine
    kwargs: dict[str, Any] = field(default_factory=dict)  # arguments of the class: {step_size: 30}

    def __post_init__(self):
        _check_kwargs("schedule", self)

    def make(self, optimizer: Optimizer, steps: int) -> LRScheduler:
        """Build the schedule of a number of optimizer steps."""
        from torchrl_rloo.training import make_schedule

        return make_schedule(optimizer, steps, **non_null_fields(self, "kwargs"), **self.kwargs)


def _check_kwargs(name: str, section: Any) -> None:
    """Raise ``ValueError`` if the further arguments of a section repeat one of its settings."""
    if repeated := [f.name for f in fields(section) if f.name in section.kwargs]:
        raise ValueError(f"{name}.kwargs has {repeated[0]}; set {name}.{repeated[0]}")


@dataclass
class CheckpointConfig:
    """Checkpoints of a run."""

    every: Whole = 10  # steps between checkpoints; 0: only at the end or when stopped
    keep: Count = 2  # number of newest checkpoints to keep
    asynchronous: bool = False  # write a copy in CPU memory while training continues; needs memory for one more state


@dataclass
class LoggerConfig:
    """Metrics and tables of a run."""

    samples: Whole = 8  # rows per table of samples; 0: no tables
    loggers: list[Logger] = field(default_factory=lambda: ["tensorboard"])  # tensorboard, wandb, mlflow, trackio
    logger_kwargs: dict[str, Any] = field(default_factory=dict)  # arguments by logger: {wandb: {project: rloo}}
    run_name: str | None = None  # name of the run in all loggers; null: that of output_dir


@dataclass
class LogConfig(LoggerConfig):
    """Metrics, tables and transcripts of a run."""

    samples_every: Whole = 20  # steps between tables of training completions; 0: none
    unique_prompts: bool = False  # one completion of each prompt in these tables; false: whole groups
    transcripts: bool = False  # write a page of each evaluation's conversations to output_dir/transcripts

    def choose(self, rows: TensorDictBase) -> TensorDictBase:
        """Return the rows that a table of training completions shows."""
        if not self.unique_prompts:
            return rows[: self.samples]
        first = {prompt: i for i, prompt in reversed(list(enumerate(rows["prompt_id"].tolist())))}
        return rows[sorted(first.values())[: self.samples]]


@dataclass
class RollbackConfig:
    """Return to an earlier checkpoint when a health rule fires."""

    on: list[str] = field(default_factory=lambda: ["stop"])  # rules or severities (info, warn, stop) that go back
    lr_factor: float = 0.5  # factor of the learning rate after each rollback
    max_rollbacks: int = 3  # rollbacks after which the rules end the run


@dataclass
class HealthConfig:
    """Rules about the metrics of a run."""

    rules: list[str] = field(default_factory=list)  # further rules: dotted paths of a Rule or of a list of them
    ignore: list[str] = field(default_factory=list)  # names of rules to leave out
    stop_on: list[str] = field(default_factory=lambda: ["nan"])  # rules or severities (info, warn, stop) that end a run
    rollback: Any = None  # go back to a checkpoint: {on: [stop], lr_factor: 0.5, max_rollbacks: 3}; null: never

    def __post_init__(self):
        self.rollback = parse_section(RollbackConfig, self.rollback, "health.rollback")

    def make(self) -> Any:
        """Build the rules."""
        from torchrl_rloo.diagnostics.health.monitor import make_health

        return make_health(**asdict(self))


@dataclass
class RunConfig:
    """Settings of every run, at the top level of a recipe's configuration."""

    seed: int = 0  # seed of prompts, samples, minibatches and the built-in model's warm start
    threads: Count | None = 1  # CPU threads; null: torch's choice; the same number repeats a run bit for bit
    resume: Resume = "auto"  # auto (same settings), extend (also other steps, ranks or engine), never, or a step
    stop_after: Count | None = None  # stop after this step, with a checkpoint, as a stop signal does; null: never
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    health: HealthConfig = field(default_factory=HealthConfig)

    def run_arguments(self) -> dict[str, Any]:
        """Return arguments of :class:`~torchrl_rloo.run.Run` and :func:`~torchrl_rloo.run.check_resumable`."""
        return {
            "settings": asdict(self),
            "defaults": asdict(type(self)()),
            "resume": self.resume,
            "checkpoint_every": self.checkpoint.every,
            "keep": self.checkpoint.keep,
            "asynchronous": self.checkpoint.asynchronous,
            "stop_after": self.stop_after,
            "loggers": self.log.loggers,
            "logger_kwargs": self.log.logger_kwargs,
            "run_name": self.log.run_name,
        }

    def check_resumable(self) -> None:
        """Refuse to continue a run with other settings, before anything is loaded."""
        from torchrl_rloo.run import check_resumable

        check_resumable(self.output_dir, **self.run_arguments())

    def check_optimizer(self, steps: int) -> None:
        """Refuse an optimizer or schedule that cannot be built, before a model is loaded."""
        from torch import nn

        self.schedule.make(self.optimizer.make(nn.Linear(2, 2)), steps)


def check_lora(lora: Any) -> None:
    """Raise ``ValueError`` if settings of an adapter are no mapping, or add to those of a saved adapter."""
    check_settings("lora", lora)
    if lora and "adapter" in lora:
        if others := sorted(set(lora) - {"adapter"}):
            raise ValueError(f"lora.adapter={lora['adapter']} has its own settings; remove lora.{others[0]}")
        check_path("lora.adapter", lora["adapter"])


def keeps_copy(lora: Any) -> bool:
    """Return whether the initial model is a copy: it is not the base model of a new adapter."""
    return lora is None or "adapter" in lora


def check_ks(ks: list[int], num_samples: int, section: str = "eval") -> None:
    """Raise ``ValueError`` if pass@k cannot be estimated for one of the numbers."""
    if wrong := [k for k in ks if not 1 <= k <= num_samples]:
        raise ValueError(
            f"{section}.ks={ks}: {wrong} are not between 1 and num_samples={num_samples}; raise num_samples"
        )
