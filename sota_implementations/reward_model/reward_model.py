"""Train a reward model on preferences: score both completions of a pair and raise the score of the better one.

The result is a Transformers classifier with one label, saved with the temperature that calibrates its scores.

Examples:
  reward_model.py                                            train a judge of the built-in task, on the CPU
  reward_model.py model.gaussian=true                        rewards with a variance: the uncertainty of PURM
  reward_model.py model.name=my/model model.device=cuda data.source=pairs.jsonl data.type=chat_template.default \\
      optimizer.lr=1e-5
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torchrl_rloo.cli import config as c
from torchrl_rloo.cli.fields import Count, DType, Positive, Whole, non_null_fields
from torchrl_rloo.cli.offline import PairsConfig
from torchrl_rloo.cli.recipe import command_line, parse_args, run_recipe


@dataclass
class ModelConfig:
    """Model to train and how to load it."""

    name: str = "embedded"  # hub id or local directory of a causal model or one-label classifier; or embedded
    dtype: DType = "float32"  # data type of the trained weights: float32 or float64; fewer bits lose small steps
    device: str = "cpu"  # device of the model: cpu or cuda
    gaussian: bool = False  # learn the mean and the standard deviation of rewards (PURM, arXiv 2503.22480)
    kwargs: dict[str, Any] = field(default_factory=dict)  # arguments of from_pretrained


@dataclass
class TrainConfig:
    """Training steps."""

    steps: Count = 300  # number of optimizer steps
    pairs_per_step: Count = 32  # preference pairs per optimizer step
    micro_batch_size: Count | None = None  # pairs per forward and backward pass; null: all of a step
    max_grad_norm: Positive | None = 1.0  # largest norm of the gradient; null: no clipping


@dataclass
class LossConfig:
    """Terms of the loss."""

    centering_coeff: float = 0.01  # coefficient of (chosen + rejected)^2, which centers rewards at 0; 0: none
    batch_sum_coeff: float = 0.0  # coefficient of the squared mean reward of a step, against extreme rewards; 0: none
    label_smoothing: float = 0.0  # assumed share of swapped labels


@dataclass
class EvalConfig:
    """Evaluation on held-out pairs."""

    every: Whole = 50  # steps between evaluations; 0: only before the first and after the last step
    batch_size: Count = 64  # pairs per batch
    bins: Count = 10  # bins of the reliability curve


@dataclass
class Config(c.RunConfig):
    """Settings of the training of a reward model."""

    output_dir: str = "outputs/reward_model/seed${seed}"  # directory of checkpoints, metrics, report and trained model
    model: ModelConfig = field(default_factory=ModelConfig)
    data: PairsConfig = field(default_factory=PairsConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: c.OptimizerConfig = field(default_factory=lambda: c.OptimizerConfig(lr=1e-3))
    schedule: c.ScheduleConfig = field(default_factory=c.ScheduleConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: c.CheckpointConfig = field(default_factory=lambda: c.CheckpointConfig(every=50))
    log: c.LoggerConfig = field(default_factory=lambda: c.LoggerConfig(samples=4))


if __name__ == "__main__":  # parse before torch is imported, so --help and wrong settings respond at once
    CONFIG = parse_args(Config, __file__, __doc__)

import json  # noqa: E402

import torch
from tensordict import TensorDictBase
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import step_indices
from torchrl_rloo.diagnostics import RunReport
from torchrl_rloo.embedded import resolve_model
from torchrl_rloo.evaluation import Calibration, calibrate, write_calibration
from torchrl_rloo.evaluation.calibration import CALIBRATION_PLOT
from torchrl_rloo.modules import save_model
from torchrl_rloo.modules.heads import RewardModel, encode_pairs, load_reward_model
from torchrl_rloo.objectives import merge_outputs
from torchrl_rloo.objectives.preference import RewardModelLoss
from torchrl_rloo.run import Run, repeat_after_rollback
from torchrl_rloo.training import accumulate, optimizer_step

PARTS = ("chosen", "rejected")
KNOWN = 256  # rewards of held-out completions that a Gaussian model keeps, to measure its uncertainty later
HEADLINE = ("loss", "rewards/accuracy", "eval/pair_accuracy", "time/step")
PANELS = (("eval/pair_accuracy", "rewards/accuracy"), ("eval/pair_nll", "loss"), ("eval/pair_ece",))
PANELS += (("rewards/chosen", "rewards/rejected"), ("rewards/margin",), ("grad_norm",))


def main(cfg: Config) -> None:
    repeat_after_rollback(lambda step: train(cfg if step is None else replace(cfg, resume=step)))


def train(cfg: Config) -> None:
    # Load model and pairs
    health = cfg.health.make()
    cfg.check_resumable()
    cfg.check_optimizer(cfg.train.steps)
    torch.manual_seed(cfg.seed)
    torch.set_num_threads(cfg.threads or torch.get_num_threads())
    name = resolve_model(cfg.model.name, cfg.seed, log=print)
    model, tokenizer = load_reward_model(name, **non_null_fields(cfg.model, "name", "kwargs"), **cfg.model.kwargs)
    train_set, eval_set = (
        cfg.data.fit(encode_pairs(examples, tokenizer), model, f"{word} pairs")
        for examples, word in zip(cfg.data.load(cfg.seed), ("training", "held-out"), strict=True)
    )
    if cfg.train.pairs_per_step > len(train_set):
        size = cfg.train.pairs_per_step
        raise ValueError(f"train.pairs_per_step={size} must be at most the {len(train_set)} training pairs")
    print(f"{name}: {model.num_parameters():,} parameters", flush=True)

    # Build loss, optimizer and learning-rate schedule
    loss_fn = RewardModelLoss(RewardModel(model), **asdict(cfg.loss), micro_batch_size=cfg.train.micro_batch_size)
    optimizer = cfg.optimizer.make(model)
    scheduler = cfg.schedule.make(optimizer, cfg.train.steps)

    # Train on pairs in shuffled epochs; evaluate between steps
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    settings = cfg.run_arguments() | {"headline": HEADLINE, "health": health}
    with Run(cfg.output_dir, cfg.train.steps, parts, **settings) as run:
        report = RunReport(run, command_line())
        if run.step == 0:
            evaluate(run, cfg, loss_fn, eval_set, tokenizer)
        for step in run.steps():
            with run.time("train"):
                batch = train_set[step_indices(step, len(train_set), cfg.train.pairs_per_step, cfg.seed)]
                outputs = accumulate(loss_fn, batch, micro_batch_size=cfg.train.micro_batch_size)
                norm = optimizer_step(model, optimizer, scheduler, cfg.train.max_grad_norm)
            learning_rate = scheduler.get_last_lr()[0]
            run.log(merge_outputs(outputs) | {"grad_norm": float(norm), "learning_rate": learning_rate})
            if run.is_due(cfg.eval.every) or run.is_last:
                evaluate(run, cfg, loss_fn, eval_set, tokenizer)
            report.refresh()
    if run.finished:
        if cfg.model.gaussian:
            model.config.held_out_rewards = known_rewards(loss_fn, eval_set, cfg.eval.batch_size)
        finish(run, report, model, tokenizer, score_pairs(cfg, loss_fn, eval_set)[1])


@torch.no_grad()
def score_pairs(
    cfg: Config, loss_fn: RewardModelLoss, eval_set: TensorDictBase
) -> tuple[dict[str, torch.Tensor], Calibration]:
    """Return the scores of both completions of the held-out pairs, ``[P]`` each, and their calibration."""
    outputs = [loss_fn(part) for part in eval_set.split(cfg.eval.batch_size)]
    scores = {part: torch.cat([getattr(output, f"{part}_rewards").cpu() for output in outputs]) for part in PARTS}
    return scores, calibrate(scores["chosen"] - scores["rejected"], bins=cfg.eval.bins)


@torch.no_grad()
def known_rewards(loss_fn: RewardModelLoss, eval_set: TensorDictBase, batch_size: int) -> list[list[float]]:
    """Return means and standard deviations of held-out completions, at most ``KNOWN`` of each."""
    parts = [part[name] for part in eval_set[: KNOWN // 2].split(batch_size) for name in PARTS]
    means, log_stds = torch.cat([loss_fn.reward_model.outputs(part).cpu() for part in parts]).unbind(-1)
    return [means.tolist(), log_stds.exp().tolist()]


def evaluate(
    run: Run, cfg: Config, loss_fn: RewardModelLoss, eval_set: TensorDictBase, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Log metrics of the held-out pairs; before the first and after the last step also log a few pairs."""
    with run.time("eval"):
        scores, found = score_pairs(cfg, loss_fn, eval_set)
    margin = float((scores["chosen"] - scores["rejected"]).mean())
    run.log({"eval/pair_accuracy": found.accuracy, "eval/pair_margin": margin})
    run.log({"eval/pair_nll": found.before.nll, "eval/pair_ece": found.before.ece})
    if run.step == 0 or run.is_last:
        texts = [
            {part: tokenizer.decode(row[part][keys.TOKENS]) for part in PARTS}
            | {f"{part} reward": float(scores[part][i]) for part in PARTS}
            for i, row in enumerate(eval_set[: cfg.log.samples].unbind(0))
        ]
        run.log_table("held-out pairs", texts)


def finish(
    run: Run, report: RunReport, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, found: Calibration
) -> None:
    """Save the model with its calibration, write the report, and print the result as one line of JSON."""
    folder = save_model(model, tokenizer, run.directory / "model")
    write_calibration(found, folder)
    result = {
        "held_out_accuracy_before": run.first_and_last("eval/pair_accuracy")[0],
        "held_out_accuracy_after": found.accuracy,
        "temperature": found.temperature,
        "separable": found.separable,
        "cpu_seconds": round(run.cpu_seconds, 1),
    }
    figures = {"Calibration on held-out pairs": folder / CALIBRATION_PLOT}
    page = report.write(result, panels=PANELS, figures=figures, title="Reward model")
    print(json.dumps(result | {"report": str(page.resolve()), "model": str(folder.resolve())}))


if __name__ == "__main__":
    run_recipe(main, CONFIG)
