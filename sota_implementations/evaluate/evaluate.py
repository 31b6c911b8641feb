"""Evaluate a checkpoint on held-out prompts, greedily and by sampling, with confidence intervals.

Examples:
  evaluate.py model.name=outputs/rloo/addition/seed0/model         evaluate a trained model on its held-out prompts
  evaluate.py checkpoint=outputs/mine/checkpoints/step_00000010.pt      evaluate a checkpoint while its run continues
  evaluate.py model.name=... compare=outputs/evaluate/base              test it against an earlier result, paired
  evaluate.py compare=[outputs/evaluate/base,outputs/evaluate/trained]  only test the second result against the first
  evaluate.py task=gsm8k data.eval_source=test.jsonl model.name=... eval.num_samples=16 eval.ks=[1,4,16]
  evaluate.py inference=vllm inference.engine.dtype=bfloat16 model.name=...
  evaluate.py task=gsm8k data.eval_source=train.jsonl data.eval_size=10000 eval.greedy=false filter.path=kept.jsonl
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from torchrl_rloo.cli import config as c
from torchrl_rloo.cli.fields import Count, OneOf, Whole, non_null_fields
from torchrl_rloo.cli.recipe import parse_args, run_recipe


@dataclass
class ScoringConfig:
    """Completions to sample and scorers to apply."""

    scorers: dict[str, Any] = field(default_factory=dict)  # scorers by name, headline first; {}: the task's
    num_samples: Whole = 8  # sampled completions of each prompt; 0: only the greedy one
    ks: list[int] | None = None  # values of k for pass@k and maj@k; null: half and all of num_samples
    greedy: bool = True  # add one greedy completion of each prompt
    votes: Any = None  # dotted path of a function from text to answer, for maj@k; null: the task's; false: no maj@k
    batch_size: Count = 256  # conversations per batch
    transcripts: bool = False  # write a page of the conversations, token by token

    def __post_init__(self):
        c.check_ks(self.ks or [], self.num_samples)


@dataclass
class FilterConfig:
    """File of the prompts that the model solves sometimes, to train on."""

    path: str | None = None  # .jsonl file of the kept prompts, their columns and pass_rate, for data.source; null: none
    low: float = 0.05  # smallest pass rate that is kept: the mean score of the samples by the first scorer
    high: float = 0.9  # largest pass rate that is kept

    def __post_init__(self):
        if self.path is None and (self.low, self.high) != (0.05, 0.9):
            raise ValueError(f"filter.low={self.low} and filter.high={self.high} have no effect without filter.path")
        if self.path is not None and not self.path.endswith(".jsonl"):
            raise ValueError(f"filter.path={self.path} must end with .jsonl")
        if not self.low <= self.high:
            raise ValueError(f"filter.low={self.low} must be at most filter.high={self.high}")


@dataclass
class Config:
    """Settings of an evaluation."""

    seed: int = 0  # seed of samples, held-out prompts and the built-in model's warm start
    threads: Count | None = 1  # CPU threads; null: torch's choice
    output_dir: str = "outputs/evaluate/${now:%Y-%m-%d_%H-%M-%S}"  # directory of completions, metrics and comparison
    format: Annotated[str, OneOf("parquet", "jsonl")] = "parquet"  # file format of the completions: parquet or jsonl
    label: str | None = None  # name in tables and figures; null: model.name
    checkpoint: str | None = None  # checkpoint of a run with the same model and lora, whose weights are evaluated
    lora: dict[str, Any] | None = None  # adapter of the checkpoint's run; null: none
    compare: Any = None  # directory of an earlier result to test against, or a list of two to test against each other
    same_settings: bool = True  # refuse to compare results whose sampling or scorers differ
    task: c.TaskConfig = field(default_factory=c.TaskConfig)
    model: c.ModelConfig = field(default_factory=c.ModelConfig)
    data: c.DataConfig = field(default_factory=c.DataConfig)  # prompts; the same as in training gives its held-out ones
    generate: c.GenerateConfig = field(default_factory=c.GenerateConfig)
    environment: c.EnvironmentConfig = field(default_factory=c.EnvironmentConfig)
    inference: c.InferenceConfig = field(default_factory=c.InferenceConfig)  # engine; other settings have no effect
    eval: ScoringConfig = field(default_factory=ScoringConfig)
    filter: FilterConfig = field(default_factory=FilterConfig)

    unused: ClassVar = (
        "model.gradient_checkpointing",
        "model.train_vision",
        "data.shuffle",
        "data.streaming",
        "inference.updater",
        "inference.self_test",
    )
    unused += ("inference.sleep", "inference.parity_every")

    def __post_init__(self):
        for name, unset in (("dtype", "float32"), ("device", "cpu"), ("kwargs", {})):
            if self.inference.engine is not None and getattr(self.model, name) != unset:
                raise ValueError(f"model.{name} has no effect with an engine; set inference.engine.{name}")
        if self.checkpoint is not None and self.inference.engine is not None:
            raise ValueError(f"checkpoint={self.checkpoint} cannot be combined with an engine; set it to transformers")
        if self.lora is not None and self.checkpoint is None:
            raise ValueError("lora has no effect without checkpoint; name the adapter's folder in model.name")
        if self.filter.path is not None and not (self.eval.num_samples and self.data.examples == 0):
            raise ValueError(
                "filter.path requires eval.num_samples above 0, and data.examples=0: prompts are kept as is"
            )


if __name__ == "__main__":  # parse before torch is imported, so --help and wrong settings respond at once
    CONFIG = parse_args(Config, __file__, __doc__)

import json  # noqa: E402
from contextlib import nullcontext
from pathlib import Path
from time import perf_counter

import torch
from hydra.utils import get_method, instantiate
from transformers import PreTrainedModel

from torchrl_rloo.data import PromptDataset
from torchrl_rloo.embedded import resolve_model
from torchrl_rloo.engines import Engine
from torchrl_rloo.envs.tasks import TaskBase
from torchrl_rloo.evaluation import Evaluation, EvaluationResult, compare, write_evaluation_transcripts
from torchrl_rloo.evaluation.result import check_format
from torchrl_rloo.modules import (
    TransformersWrapper,
    TurnPolicy,
    add_adapter,
    context_length,
    load_tokenizer,
    vLLMWrapper,
)
from torchrl_rloo.rewards import load_reward
from torchrl_rloo.run.checkpoint import Checkpointer
from torchrl_rloo.run.shards import restore_state
from torchrl_rloo.runtime.files import make_folder, write_text


def main(cfg: Config) -> None:
    # Load earlier results; two of them are all that a comparison needs
    check_format(cfg.format)
    torch.set_num_threads(cfg.threads or torch.get_num_threads())
    folders = [] if cfg.compare is None else [cfg.compare] if isinstance(cfg.compare, str) else list(cfg.compare)
    results, output = [EvaluationResult.load(folder) for folder in folders], Path(cfg.output_dir)
    if len(results) < 2:
        results.append(evaluate(cfg, output))
    if len(results) == 2:
        comparison = compare(*results, same_settings=cfg.same_settings)
        comparison.save(output)
        print(f"\n{comparison.table()}\n\ncomparison in {output.resolve()}")


def evaluate(cfg: Config, output: Path) -> EvaluationResult:
    """Complete and score the held-out prompts, save the result, and print it as text and as one line of JSON."""
    # Load task, policy, and the transforms that answer its turns
    task = cfg.task.make()
    policy, engine = make_policy(cfg, str(resolve_model(cfg.model.name, cfg.seed, task.name, log=print)))
    make_transforms, chat = cfg.environment.make(
        task, engine.context_length if engine else context_length(policy.model)
    )
    with engine or nullcontext():
        prompts = held_out_prompts(cfg, task, policy.tokenizer)
        print(f"{cfg.model.name}: {len(prompts)} held-out prompts of task {task.name}", flush=True)
        # Sample completions and score them
        asked, started = cfg.eval, perf_counter()
        scorer = None if asked.scorers else task.make_scorer()
        scorer = scorer if isinstance(scorer, dict) else {"score": scorer}
        half_and_all = sorted({k for k in (asked.num_samples // 2, asked.num_samples) if k > 1})
        evaluation = Evaluation(
            policy,
            prompts,
            {name: load_reward(spec) for name, spec in asked.scorers.items()} or scorer,
            num_samples=asked.num_samples,
            ks=half_and_all if asked.ks is None else asked.ks,
            greedy=asked.greedy,
            extract=task.extract_answer if asked.votes is None else get_method(asked.votes) if asked.votes else None,
            batch_size=asked.batch_size,
            quarantine=output / "quarantine.jsonl",
            seed=cfg.seed,
            make_transforms=make_transforms,
            env_kwargs=chat | {"template_kwargs": cfg.data.template_kwargs},
            label=cfg.label or cfg.checkpoint or cfg.model.name,
        )
        result = evaluation.run(keep_rows=asked.transcripts)
    # Write files and figures
    result.save(output, format=cfg.format)
    if cfg.filter.path is not None:
        write_kept(cfg.filter, result, prompts)
    if asked.transcripts:
        page = output / "transcripts.html"
        write_evaluation_transcripts(page, result, policy.tokenizer, title=result.settings.label)
    closing = {"prompts": len(prompts), "seconds": round(perf_counter() - started, 1), "result": str(output.resolve())}
    print(f"{result.summary()}\n{json.dumps(result.plain_metrics | closing)}", flush=True)
    return result


def write_kept(wanted: FilterConfig, result: EvaluationResult, prompts: PromptDataset) -> None:
    """Write the prompts with a pass rate in the range; samples on which the scorer abstained do not count."""
    scores: dict[int, list[float]] = {}
    for sample in result.samples:
        score = sample.scores[result.settings.scorers[0]]
        if sample.sample is not None and score is not None:
            scores.setdefault(sample.prompt_id, []).append(score)
    rates = {i: sum(each) / len(each) for i, each in sorted(scores.items())}
    kept = [prompts[i] | {"pass_rate": rate} for i, rate in rates.items() if wanted.low <= rate <= wanted.high]
    make_folder(Path(wanted.path).parent)
    write_text(Path(wanted.path), "".join(json.dumps(row, default=str) + "\n" for row in kept))
    hard = sum(rate < wanted.low for rate in rates.values())
    counts = f"{hard} too hard, {len(rates) - len(kept) - hard} too easy, {len(prompts) - len(rates)} without a score"
    print(f"kept {len(kept)} of {len(prompts)} prompts in {wanted.path}: {counts}")


def make_policy(cfg: Config, name: str) -> tuple[TurnPolicy, Engine | None]:
    """Load the policy, and the engine that samples for it; None if the Hugging Face model samples."""
    turns, arguments = {"generate_kwargs": cfg.generate.arguments(cfg.seed)}, cfg.inference.engine
    # Without an engine the Hugging Face model samples
    if arguments is None:
        model, tokenizer = cfg.model.load(name)
        if cfg.checkpoint is not None:
            model = model if cfg.lora is None else add_adapter(model, cfg.lora)
            load_checkpoint(model, Path(cfg.checkpoint))
        return TransformersWrapper(model, tokenizer=tokenizer, **turns), None
    if (Path(name) / "adapter_config.json").is_file():
        raise ValueError(f"model.name={name} is an adapter, which an engine cannot load; set inference=transformers")
    if "model" in arguments:
        arguments = arguments | {"model": arguments["model"] or name}
    engine = instantiate(arguments)
    return vLLMWrapper(engine, tokenizer=load_tokenizer(name, chat_template=cfg.model.chat_template), **turns), engine


def load_checkpoint(model: PreTrainedModel, path: Path) -> None:
    """Load the weights of a run's checkpoint, a file or a folder of shards."""
    number = path.stem.removeprefix("step_")
    if not (path.exists() and number.isdecimal()):
        raise FileNotFoundError(f"checkpoint={path} must be one of a run's checkpoints, such as step_00000010.pt")
    restore_state({"model": Checkpointer(path.parent).load(int(number))["parts"]["model"]}, model=model)


def held_out_prompts(cfg: Config, task: TaskBase, tokenizer: object) -> PromptDataset:
    """Load the prompts that training with these settings holds out, or only ``eval_source``."""
    if cfg.data.eval_source is None or cfg.data.source is not None:
        return cfg.data.load(task, tokenizer, cfg.seed)[1]
    own = ("eval_source", "eval_split", "examples", "shuffle", "streaming", "arguments")
    options = non_null_fields(cfg.data, *own)
    options |= {"split": cfg.data.eval_split} if cfg.data.eval_split else {}
    if cfg.data.examples:  # they are the first prompts of the source
        options |= {"chat": False, "eval_size": cfg.data.eval_size + cfg.data.examples}
    held_out = task.load_held_out(cfg.data.eval_source, **options, tokenizer=tokenizer)
    return cfg.data.show_examples(tokenizer, held_out)[0]


if __name__ == "__main__":
    run_recipe(main, CONFIG)
