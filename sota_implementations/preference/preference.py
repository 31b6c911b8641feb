"""Train a language model on preferences without sampling: DPO, length-normalized DPO, IPO, KTO, ORPO or SimPO.

Examples:
  preference.py                                  the built-in model prefers right sums to wrong ones, on the CPU
  preference.py loss.name=simpo loss.gamma=0.5           another objective and its coefficient
  preference.py model.name=my/model model.device=cuda data.source=pairs.jsonl data.type=chatml.intel optimizer.lr=5e-7
  preference.py 'data.sources=[{source: a.jsonl, type: chatml.intel}, {source: my/b, type: chatml.argilla}]'
  preference.py lora='{r: 16, target_modules: all-linear}'    the reference is the model without the adapter
  torchrl-rloo run --ranks 2 preference train.parallel=ddp    two ranks of this machine, each with the model
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from torchrl_rloo.cli import config as c
from torchrl_rloo.cli.fields import NonNegative, OneOf, Positive, non_null_fields
from torchrl_rloo.cli.offline import OfflineConfig, PairsConfig, TrainConfig, finish
from torchrl_rloo.cli.recipe import command_line, parse_args, run_recipe


@dataclass
class LossConfig:
    """Objective and its coefficients; null: the objective's default."""

    name: Annotated[str, OneOf("dpo", "dpo_norm", "ipo", "kto", "orpo", "simpo")] = "dpo"  # objective
    beta: Positive | None = None  # pull to the reference, or scale of rewards; dpo, dpo_norm, ipo, kto, simpo
    label_smoothing: NonNegative | None = None  # assumed share of swapped labels; dpo, dpo_norm
    alpha: NonNegative | None = None  # weight of the odds ratio; orpo
    gamma: NonNegative | None = None  # target margin of the rewards; simpo
    cpo_alpha: NonNegative | None = None  # weight of the likelihood of chosen completions; simpo
    desirable_weight: NonNegative | None = None  # weight of desirable completions; kto
    undesirable_weight: NonNegative | None = None  # weight of undesirable completions; kto

    def make(self) -> Any:
        """Return the objective; raise ``ValueError`` if it does not have a coefficient."""
        from torchrl_rloo.functional.preference import PREFERENCE_OBJECTIVES
        from torchrl_rloo.runtime.lookup import resolve

        return resolve("loss.name", non_null_fields(self), PREFERENCE_OBJECTIVES)


@dataclass
class Config(OfflineConfig):
    """Settings of training on preferences."""

    output_dir: str = "outputs/preference/${loss.name}/seed${seed}"  # directory of checkpoints, report and model
    data: PairsConfig = field(default_factory=PairsConfig)
    train: TrainConfig = field(default_factory=lambda: TrainConfig(packing="packed"))
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: c.OptimizerConfig = field(default_factory=lambda: c.OptimizerConfig(lr=3e-5))

    def __post_init__(self):
        super().__post_init__()
        if self.train.micro_batch_tokens is not None:
            value = self.train.micro_batch_tokens
            raise ValueError(f"train.micro_batch_tokens={value} cannot count pairs; set train.micro_batch_size")


if __name__ == "__main__":  # parse before torch is imported, so --help and wrong settings respond at once
    CONFIG = parse_args(Config, __file__, __doc__)

from tensordict import TensorDictBase

from torchrl_rloo.data import encode_preferences, keys, ragged
from torchrl_rloo.data.preference_formats import LABELED_FORMATS
from torchrl_rloo.data.preferences import PreferenceDataset
from torchrl_rloo.data.rows import step_indices
from torchrl_rloo.diagnostics import RunReport
from torchrl_rloo.objectives import PreferenceLoss, merge_outputs
from torchrl_rloo.run import Run, repeat_after_rollback
from torchrl_rloo.runtime.ranks import Ranks
from torchrl_rloo.training import accumulate, offload_activations, optimizer_step

PARTS = ("chosen", "rejected")
HEADLINE = ("loss", "eval/pair_accuracy", "eval/greedy", "time/step")
PANELS = (("eval/pair_accuracy", "rewards/accuracy"), ("eval/pair_margin", "rewards/margin"), ("eval/loss", "loss"))
PANELS += (("eval/greedy",), ("log_probs/chosen", "log_probs/rejected"), ("grad_norm",))


def main(cfg: Config) -> None:
    with cfg.train.join_ranks(cfg.model.device) as ranks:
        repeat_after_rollback(lambda step: train(cfg if step is None else replace(cfg, resume=step), ranks))


def train(cfg: Config, ranks: Ranks) -> None:
    # Load model and preferences
    health, objective = cfg.health.make(), cfg.loss.make()
    name, model, tokenizer = cfg.load_model(ranks)
    noun = "pairs" if objective.paired else "labeled completions"
    train_set, eval_set = (
        cfg.data.fit(encode_preferences(examples, tokenizer), model, f"{word} {noun}", ranks)
        for examples, word in zip(load_examples(cfg, objective.paired), ("training", "held-out"), strict=True)
    )
    steps = cfg.train.count_steps(len(train_set))

    # Build loss, optimizer and learning-rate schedule
    scorer, reference = cfg.make_scorer(name, model, tokenizer, ranks, objective.reference)
    passes = {"micro_batch_size": cfg.train.micro_batch_size}
    loss_fn = PreferenceLoss(scorer, objective, reference=reference, **passes)
    optimizer = cfg.optimizer.make(model, offload_states="optimizer" in cfg.train.offload)
    scheduler = cfg.schedule.make(optimizer, steps)
    evaluate_task = cfg.make_task_evaluation(scorer, ranks)

    def evaluate() -> None:
        """Log metrics of all held-out preferences, and the accuracy of answers."""
        with run.time("eval"):
            outputs = accumulate(loss_fn, eval_set, micro_batch_size=cfg.eval.batch_size, ranks=ranks, backward=False)
            found = merge_outputs(outputs)
            pairs = {f"eval/pair_{metric}": found[f"rewards/{metric}"] for metric in ("accuracy", "margin")}
            run.log({"eval/loss": found["loss"], **pairs})
            evaluate_task(run)

    # Train on pairs in shuffled epochs; evaluate between steps
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    settings = cfg.run_arguments() | {"headline": HEADLINE, "health": health, "ranks": ranks}
    with Run(cfg.output_dir, steps, parts, **settings) as run:
        report = RunReport(run, command_line())
        if run.step == 0:
            evaluate()
        for step in run.steps():
            ranks.place = f"step {step}"
            batch = train_set[step_indices(step, len(train_set), cfg.train.rows_per_step, cfg.seed)]
            with run.time("train"), offload_activations("activations" in cfg.train.offload):
                outputs = accumulate(loss_fn, batch, ranks=ranks, **passes)
                norm = optimizer_step(model, optimizer, scheduler, cfg.train.max_grad_norm)
            run.log(merge_outputs(outputs) | {"grad_norm": float(norm), "learning_rate": scheduler.get_last_lr()[0]})
            run.log({}, timings={"trained_tokens_per_second": count_tokens(batch) / run.seconds("train")})
            if run.is_due(cfg.eval.every) or run.is_last:
                evaluate()
            report.refresh()
    if run.finished:
        result = run.summary("eval/pair_accuracy", "eval/pair_margin", "eval/loss", "eval/greedy")
        finish(run, report, model, tokenizer, result, PANELS, title=f"Preferences, {cfg.loss.name}")


def load_examples(cfg: Config, paired: bool) -> tuple[PreferenceDataset, PreferenceDataset]:
    """Load training and held-out examples; for KTO, a type of pairs alone gives two labeled completions of each."""
    types = {each.get("type", cfg.data.type) for each in cfg.data.sources or [{}]}
    if paired or types <= LABELED_FORMATS.keys():
        return cfg.data.load(cfg.seed, objective=cfg.loss.name)
    train_set, eval_set = (
        PreferenceDataset(
            [{"prompt": e["prompt"], "completion": e[p], "label": p == "chosen"} for e in pairs for p in PARTS],
            markup=pairs.markup,
        )
        for pairs in cfg.data.load(cfg.seed)
    )
    return train_set, eval_set


def count_tokens(batch: TensorDictBase) -> int:
    """Return the number of tokens of pairs or labeled completions."""
    parts = [batch] if keys.TOKENS in batch.keys(True) else [batch[part] for part in PARTS]
    return sum(len(tokens) for part in parts for tokens in ragged(part, keys.TOKENS))


if __name__ == "__main__":
    run_recipe(main, CONFIG)
