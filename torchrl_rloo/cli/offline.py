"""Settings and parts that the recipes on given rows share: ``sft``, ``preference`` and ``reward_model``."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from torchrl_rloo.cli import config as c
from torchrl_rloo.cli import rloo_sections as s
from torchrl_rloo.cli.fields import Count, OneOf, Positive, Whole, check_names, non_null_fields
from torchrl_rloo.cli.rloo_config import check_model

if TYPE_CHECKING:
    from tensordict import TensorDictBase
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from torchrl_rloo.data.preferences import PreferenceDataset
    from torchrl_rloo.modules import Scorer, TransformersWrapper
    from torchrl_rloo.run import Run
    from torchrl_rloo.runtime.ranks import Ranks

EMBEDDED = "embedded"


@dataclass
class RowsConfig:
    """Training and held-out rows."""

    source: str = EMBEDDED  # hub id, .jsonl/.json/.parquet/.csv file, saved dataset, or embedded
    sources: list[Any] = field(default_factory=list)  # several in place of source: [a.jsonl, {source: b, limit: 9}]
    split: str = "train"  # split of source
    name: str | None = None  # configuration of a hub dataset; null: its default
    limit: Count | None = None  # number of rows of a source to read; null: all
    eval_source: str | None = None  # held-out rows in the same layout; null: split off the sources by prompt
    eval_split: str | None = None  # split of eval_source; null: the same as of source
    eval_size: Count = 512  # largest number of held-out pairs; sft: number of held-out prompts
    max_length: Count | None = None  # longest row in tokens; null: the model's context
    too_long: Annotated[str, OneOf("drop", "truncate")] = "drop"  # longer rows: drop, or cut the prompt from the left

    own: ClassVar[tuple[str, ...]] = ("source", "split", "name", "limit")  # settings of each of several sources

    def __post_init__(self):
        if self.sources and self.source != EMBEDDED:
            raise ValueError(f"data.sources cannot be combined with data.source={self.source}; name it in data.sources")
        self.sources = [each if isinstance(each, dict) else {"source": str(each)} for each in self.sources]
        for each in self.sources:
            check_names([f"data.sources.{name}" for name in each], RowsConfig, [f"data.sources.{n}" for n in self.own])
            c.check_path("data.sources", each.get("source", "."))
        for name in ("source", "eval_source"):
            c.check_path(f"data.{name}", getattr(self, name) or "")
        if self.eval_split is not None and self.eval_source is None:
            raise ValueError(f"data.eval_split={self.eval_split} requires data.eval_source; set it")

    @property
    def is_embedded(self) -> bool:
        """True for the rows of the built-in task."""
        return self.source == EMBEDDED and not self.sources

    def fit(
        self, rows: TensorDictBase, model: PreTrainedModel, word: str, ranks: Ranks | None = None
    ) -> TensorDictBase:
        """Return the rows that are not too long for the model, and print how many these are."""
        from torchrl_rloo.data.rows import limit_length, stack_rows
        from torchrl_rloo.modules import context_length

        limit = self.max_length or context_length(model) or float("inf")
        kept = limit_length(rows, limit, self.too_long == "truncate")
        if not kept:
            raise ValueError(f"all {len(rows)} {word} are longer than {limit} tokens; raise data.max_length")
        if ranks is None or ranks.is_main:
            print(f"{len(kept):,} {word}, {len(rows) - len(kept)} dropped: longer than {limit} tokens", flush=True)
        return stack_rows(kept)


@dataclass
class PairsConfig(RowsConfig):
    """Training and held-out preference pairs."""

    type: str = "chat_template.argilla_chat"  # layout of the rows, as listed by load_preferences
    options: dict[str, Any] = field(default_factory=dict)  # arguments of load_preferences: {drop_bad_rows: true}

    own: ClassVar[tuple[str, ...]] = (*RowsConfig.own, "type")

    def load(self, seed: int, **options: Any) -> tuple[PreferenceDataset, PreferenceDataset]:
        """Load training and held-out examples that share no prompt."""
        from torchrl_rloo.data import load_preference_splits
        from torchrl_rloo.embedded import addition_preferences

        options |= non_null_fields(self, "max_length", "too_long", "options") | self.options
        options |= {"source": addition_preferences()} if self.is_embedded else {}
        return load_preference_splits(**options, seed=seed)


@dataclass
class TrainConfig(s.TrainConfig):
    """Training steps."""

    steps: Count = 120  # number of optimizer steps
    epochs: Positive | None = None  # passes over the training rows, which replace steps; null: steps
    rows_per_step: Count = 32  # rows, or preference pairs, of an optimizer step
    micro_batch_size: Count | None = None  # rows or pairs per forward and backward pass; null: all of a step

    def count_steps(self, number: int) -> int:
        """Return the number of optimizer steps on a number of rows."""
        if self.rows_per_step > number:
            raise ValueError(f"train.rows_per_step={self.rows_per_step} must be at most the {number} training rows")
        return self.steps if self.epochs is None else max(1, round(self.epochs * (number // self.rows_per_step)))


@dataclass
class EvalConfig:
    """Evaluation on held-out rows."""

    every: Whole = 20  # steps between evaluations; 0: only before the first and after the last step
    batch_size: Count = 64  # rows or pairs per pass
    task: str | None = None  # task whose held-out prompts are answered; null: addition on embedded data, else none
    task_size: Count = 256  # largest number of these prompts
    max_new_tokens: Count = 32  # largest number of tokens of these answers


@dataclass
class OfflineConfig(c.RunConfig):
    """Settings of training on given rows."""

    lora: Any = None  # arguments of peft.LoraConfig, or {adapter: folder} of a saved one; null: train all weights
    model: c.ModelConfig = field(default_factory=c.ModelConfig)
    data: RowsConfig = field(default_factory=RowsConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: c.OptimizerConfig = field(default_factory=c.OptimizerConfig)
    schedule: c.ScheduleConfig = field(default_factory=c.ScheduleConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: c.CheckpointConfig = field(default_factory=lambda: c.CheckpointConfig(every=50))
    log: c.LoggerConfig = field(default_factory=lambda: c.LoggerConfig(samples=4))

    def __post_init__(self):
        c.check_lora(self.lora)
        check_model(self.model, self.train, self.lora)
        for name in ("task_size", "max_new_tokens") if self.eval.task is None and not self.data.is_embedded else ():
            if (value := getattr(self.eval, name)) != getattr(EvalConfig, name):
                raise ValueError(f"eval.{name}={value} has no effect without eval.task; set that to a task")

    def load_model(self, ranks: Ranks) -> tuple[str, PreTrainedModel, PreTrainedTokenizerBase]:
        """Set seed and threads, and load the model with its adapter."""
        import torch

        from torchrl_rloo import embedded, modules

        self.check_resumable()
        self.check_optimizer(self.train.steps)
        torch.manual_seed(self.seed)
        torch.set_num_threads(self.threads or torch.get_num_threads())
        name = ranks.broadcast(lambda: embedded.resolve_model(self.model.name, self.seed, log=print), "start model")
        model, tokenizer = self.model.load(name, device=str(ranks.device), meta=self.train.load_shards)
        model = model if self.lora is None else modules.add_adapter(model, self.lora)
        ranks.log(f"{name}: {model.num_parameters():,} parameters, {modules.count_trained(model):,} trained")
        return name, model, tokenizer

    def make_scorer(
        self, name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ranks: Ranks, reference: bool
    ) -> tuple[TransformersWrapper, Scorer | None]:
        """Distribute the model over the ranks; return its scorer, and with ``reference`` that of the initial model."""
        from torchrl_rloo import modules

        copy = modules.frozen_copy(model) if reference and c.keeps_copy(self.lora) else None
        for each in filter(None, (model, copy)):
            self.train.distribute(each, ranks, name, **self.model.kwargs)
        options = {"packing": self.train.packing, **self.train.scoring}
        scorer = modules.TransformersWrapper(model, tokenizer=tokenizer, generate=False, **options)
        if copy is not None:
            return scorer, scorer.get_new_version(model=copy)
        return scorer, modules.AdapterReference(scorer) if reference else None

    def make_task_evaluation(self, scorer: TransformersWrapper, ranks: Ranks) -> Callable[[Run], None]:
        """Return a function that logs the accuracy of greedy answers to a task's held-out prompts, if there is one."""
        from torchrl_rloo import embedded, evaluation, modules
        from torchrl_rloo.engines.root import gathered
        from torchrl_rloo.envs.tasks.registry import conversation_settings

        if self.eval.task is None and not self.data.is_embedded:
            return lambda run: None
        task = embedded.resolve_task(self.eval.task or "addition")
        _, prompts = task.load(eval_size=self.eval.task_size, seed=self.seed, tokenizer=scorer.tokenizer)
        sampling = {"max_new_tokens": self.eval.max_new_tokens, "seed": self.seed}
        policy = scorer.get_new_version(generate=True, generate_kwargs=sampling)
        make_transforms, chat = conversation_settings(task, None, {}, modules.context_length(scorer.model))
        options = {"make_transforms": make_transforms, "env_kwargs": chat, "extract": task.extract_answer}
        greedy = evaluation.Evaluation(policy, prompts, task.make_scorer(), num_samples=0, **options)

        def evaluate(run: Run) -> None:
            with gathered(scorer.model):
                result = ranks.on_main(greedy.run, "evaluation")
            if result is not None:
                run.log(result.metrics)
                if self.log.samples:
                    run.log_table("held-out completions", result.table(self.log.samples))

        return evaluate


def finish(run: Run, report: Any, model: Any, tokenizer: Any, result: dict[str, Any], panels: Any, title: str) -> None:
    """Save the model, write the report, and print the result as one line of JSON."""
    from torchrl_rloo.modules import save_model
    from torchrl_rloo.training import check_copies

    check_copies(model, run.ranks)
    folder = save_model(model, tokenizer, run.directory / "model")
    if run.ranks.is_main:
        result = {name: value for name, value in result.items() if value == value}  # NaN: never evaluated
        logged = {name for record in run.logger.history for name in record}
        page = report.write(result, panels=[names for names in panels if logged.issuperset(names)], title=title)
        print(json.dumps(result | {"report": str(page.resolve()), "model": str(folder.resolve())}))
