"""Fine-tune a language model on conversations, or on prompts with completions (SFT).

Reinforcement learning continues with the saved model, or with the saved adapter.

Examples:
  sft.py                                                     the built-in model learns addition, on the CPU
  sft.py model.name=my/model model.device=cuda data.source=chats.jsonl lora='{r: 16, target_modules: all-linear}'
  sft.py data.source=openai/gsm8k data.name=main data.prompt_column=question data.completion_column=answer
  sft.py 'data.sources=[a.jsonl, {source: my/chats, limit: 1000}]' train.epochs=3
  torchrl-rloo run --ranks 2 sft train.parallel=fsdp    two ranks of this machine, each with a shard
  torchrl-rloo run rloo 'lora={adapter: outputs/sft/seed0/model}'    RLOO continues the adapter of a run with lora
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any

from torchrl_rloo.cli import config as c
from torchrl_rloo.cli.fields import NonNegative, OneOf, Positive, non_null_fields
from torchrl_rloo.cli.offline import OfflineConfig, RowsConfig, TrainConfig, finish
from torchrl_rloo.cli.recipe import command_line, parse_args, run_recipe


@dataclass
class DemonstrationsConfig(RowsConfig):
    """Training and held-out conversations, or prompts with completions."""

    prompt_column: str | None = None  # column of the prompt or the conversation; null: messages, prompt, question, ...
    completion_column: str | None = None  # column of the completion; null: completion, response, answer, ...
    row_map: str | None = None  # dotted path of a function from a row to one with such columns; null: none
    system_prompt: str | None = None  # system message of conversations without one; null: none
    template_kwargs: dict[str, Any] = field(default_factory=dict)  # arguments of the template: {enable_thinking: false}


@dataclass
class LossConfig:
    """Terms of the loss."""

    tokens: Annotated[str, OneOf("completions", "all")] = "completions"  # what is learned: completions, or all tokens
    aggregation: Annotated[str, OneOf("token_mean", "sequence_mean", "sequence_sum")] | None = None  # null: of the loss
    loss_function: Annotated[str, OneOf("sft", "minor_sft")] = "sft"  # sft (likelihood), minor_sft (against reference)
    beta: Positive | None = None  # scale of the log-ratio in minor_sft; null: 0.1
    kl_to_ref_coeff: NonNegative = 0.0  # coefficient of the KL to the initial model in sft; 0: none

    def __post_init__(self):
        if self.beta is not None and self.loss_function != "minor_sft":
            raise ValueError(f"loss.beta={self.beta} has no effect with loss.loss_function={self.loss_function}")

    @property
    def needs_reference(self) -> bool:
        """True if the loss compares with the initial model."""
        return self.loss_function == "minor_sft" or self.kl_to_ref_coeff > 0


@dataclass
class Config(OfflineConfig):
    """Settings of supervised fine-tuning."""

    output_dir: str = "outputs/sft/seed${seed}"  # directory of checkpoints, metrics, report and trained model
    data: DemonstrationsConfig = field(default_factory=DemonstrationsConfig)
    train: TrainConfig = field(default_factory=lambda: TrainConfig(packing="packed"))
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: c.OptimizerConfig = field(default_factory=lambda: c.OptimizerConfig(lr=1e-3))


if __name__ == "__main__":  # parse before torch is imported, so --help and wrong settings respond at once
    CONFIG = parse_args(Config, __file__, __doc__)

from itertools import islice
from math import exp

from torchrl_rloo.data import PromptDataset, encode_demonstrations, keys, ragged
from torchrl_rloo.data.prompts import IMAGE_COLUMNS
from torchrl_rloo.data.rows import step_indices
from torchrl_rloo.data.sources import PlainRow, read_source
from torchrl_rloo.diagnostics import RunReport
from torchrl_rloo.embedded import addition_demonstrations
from torchrl_rloo.envs.tasks import Task
from torchrl_rloo.objectives import SFTLoss, merge_outputs
from torchrl_rloo.run import Run, repeat_after_rollback
from torchrl_rloo.runtime.lookup import import_object
from torchrl_rloo.runtime.ranks import Ranks
from torchrl_rloo.training import accumulate, offload_activations, optimizer_step

HEADLINE = ("loss", "eval/nll", "eval/greedy", "time/step")
PANELS = (("eval/nll", "nll"), ("eval/greedy",), ("entropy",), ("grad_norm",), ("learning_rate",))


def main(cfg: Config) -> None:
    with cfg.train.join_ranks(cfg.model.device) as ranks:
        repeat_after_rollback(lambda step: train(cfg if step is None else replace(cfg, resume=step), ranks))


def train(cfg: Config, ranks: Ranks) -> None:
    # Load model and demonstrations
    health = cfg.health.make()
    name, model, tokenizer = cfg.load_model(ranks)
    sets = []
    for examples, word in zip(load_demonstrations(cfg, tokenizer), ("training", "held-out"), strict=True):
        rows = encode_demonstrations(examples.rows, tokenizer, **cfg.data.template_kwargs)
        sets.append(cfg.data.fit(rows, model, f"{word} rows", ranks))
        for row in sets[-1].unbind(0) if cfg.loss.tokens == "all" else ():
            row[keys.ACTION_MASK][1:] = True  # nothing predicts the first token
    train_set, eval_set = sets
    steps = cfg.train.count_steps(len(train_set))

    # Build loss, optimizer and learning-rate schedule
    scorer, reference = cfg.make_scorer(name, model, tokenizer, ranks, cfg.loss.needs_reference)
    loss_fn = SFTLoss(scorer, **non_null_fields(cfg.loss, "tokens"), reference=reference)
    optimizer = cfg.optimizer.make(model, offload_states="optimizer" in cfg.train.offload)
    scheduler = cfg.schedule.make(optimizer, steps)
    evaluate_task = cfg.make_task_evaluation(scorer, ranks)

    def evaluate() -> None:
        """Log the loss on all held-out rows, and the accuracy of answers."""
        with run.time("eval"):
            outputs = accumulate(loss_fn, eval_set, micro_batch_size=cfg.eval.batch_size, ranks=ranks, backward=False)
            found = merge_outputs(outputs)
            run.log({f"eval/{metric}": found[metric] for metric in ("loss", "nll", "kl") if metric in found})
            run.log({"eval/perplexity": exp(found["nll"])})
            evaluate_task(run)

    # Train on rows in shuffled epochs; evaluate between steps
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    settings = cfg.run_arguments() | {"headline": HEADLINE, "health": health, "ranks": ranks}
    limits = {"micro_batch_size": cfg.train.micro_batch_size, "max_tokens": cfg.train.micro_batch_tokens}
    with Run(cfg.output_dir, steps, parts, **settings) as run:
        report = RunReport(run, command_line())
        if run.step == 0:
            evaluate()
        for step in run.steps():
            ranks.place = f"step {step}"
            batch = train_set[step_indices(step, len(train_set), cfg.train.rows_per_step, cfg.seed)]
            with run.time("train"), offload_activations("activations" in cfg.train.offload):
                outputs = accumulate(loss_fn, batch, ranks=ranks, **limits)
                norm = optimizer_step(model, optimizer, scheduler, cfg.train.max_grad_norm)
            run.log(merge_outputs(outputs) | {"grad_norm": float(norm), "learning_rate": scheduler.get_last_lr()[0]})
            tokens = sum(map(len, ragged(batch, keys.TOKENS)))
            run.log({}, timings={"trained_tokens_per_second": tokens / run.seconds("train")})
            if run.is_due(cfg.eval.every) or run.is_last:
                evaluate()
            report.refresh()
    if run.finished:
        result = run.summary("eval/nll", "eval/perplexity", "eval/greedy")
        finish(run, report, model, tokenizer, result, PANELS, title="Supervised fine-tuning")


def load_demonstrations(cfg: Config, tokenizer) -> tuple[PromptDataset, PromptDataset]:
    """Load training and held-out demonstrations that share no prompt."""
    data, row_map = cfg.data, cfg.data.row_map and import_object(cfg.data.row_map, "data.row_map")

    def read(row: dict[str, Any]) -> dict[str, Any]:
        return split_row(data, row_map(row) if row_map else row, chat=bool(tokenizer.chat_template))

    given = non_null_fields(data, "sources", "max_length", "too_long", *(f.name for f in fields(data)[10:]))
    if data.is_embedded:
        given["source"] = [{"messages": each} for each in addition_demonstrations(4096, seed=1, clean=True)]
    if data.sources:  # of any columns, so they are read before they are joined
        given |= {"source": [], "split": "train", "name": None, "limit": None}
        for each in data.sources:
            one = {"split": data.split, "name": data.name, "limit": data.limit} | each
            rows = (row for _, row in read_source(one["source"], one["split"], one["name"]))
            given["source"] += map(read, islice(rows, one["limit"]))
    task = Task("demonstrations", lambda *_: [], rewards=(), scorer=None, row_map=None if data.sources else read)
    return task.load(**given, seed=cfg.seed)


MESSAGES, PROMPTS = ("messages", "conversations"), ("prompt", "question", "problem", "instruction", "text")
COMPLETIONS = ("completion", "response", "answer", "solution", "output")
SPEAKERS = {"human": "user", "gpt": "assistant"}  # of ShareGPT, whose messages have from and value


def split_row(data: DemonstrationsConfig, row: dict[str, Any], chat: bool) -> dict[str, Any]:
    """Return ``{"prompt", "demonstration"}`` of a row, two lists of messages or two texts.

    A row is a conversation, a prompt and a completion (each text or messages), or a text alone, all of whose tokens are
    learned. Alpaca's input follows its instruction. Without a chat template, texts stay texts.
    """
    images = {name: row[name] for name in IMAGE_COLUMNS if name in row}
    row = {n: value for n in row if n not in images and (value := PlainRow(row)[n]) not in (None, "")}
    prompt_column = data.prompt_column or next((name for name in (*MESSAGES, *PROMPTS) if name in row), None)
    column = data.completion_column or next(
        (n for n in COMPLETIONS if n in row and prompt_column not in MESSAGES), None
    )
    if prompt_column not in row or column not in (None, *row):
        raise ValueError(f"the row has the columns {sorted(row)}; set data.prompt_column and data.completion_column")
    prompt = row[prompt_column]
    if isinstance(prompt, str):
        prompt = f"{prompt}\n\n{row['input']}" if "input" in row else prompt
        if column is None or (isinstance(row[column], str) and not chat):
            return {"prompt": prompt, "demonstration": row.get(column, ""), **images}
    messages, answers = as_messages(prompt, "user"), [] if column is None else as_messages(row[column], "assistant")
    first = next((i for i, m in enumerate(messages) if m["role"] == "assistant"), 0)
    if not answers:
        messages, answers = messages[:first], messages[first:]
    if not messages or not any(message["role"] == "assistant" for message in answers):
        raise ValueError(f"a conversation must have a prompt and then an assistant message, got {prompt!r:.200}")
    if data.system_prompt is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": data.system_prompt}, *messages]
    return {"prompt": messages, "demonstration": answers, **images}


def as_messages(value: Any, role: str) -> list[dict[str, Any]]:
    """Return text as one message, and messages with OpenAI's names of fields and roles."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return [
        {k: v for k, v in message.items() if k not in ("from", "value")}
        | {
            "role": SPEAKERS.get(speaker := message.get("role", message.get("from")), speaker),
            "content": message.get("content", message.get("value", "")),
        }
        for message in value
    ]


if __name__ == "__main__":
    run_recipe(main, CONFIG)
