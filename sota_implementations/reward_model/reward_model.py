"""A reward model from preferences: score both completions of a pair, make the better one's score the higher, repeat.

python reward_model.py                                               a judge of the embedded task, on a CPU core
python reward_model.py model.name=... data.source=... data.type=...  any model and preference dataset
python reward_model.py --help                                        all settings; the file in config explains them

The model is a Transformers classifier of one label, and beside it lies the temperature that calibrates its scores.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator, Sequence
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hydra
import torch
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDictBase
from torch.nn.utils import clip_grad_norm_

from torchrl_rloo.data import keys, load_preferences
from torchrl_rloo.data.rows import stack_rows
from torchrl_rloo.diagnostics import DEFINITIONS, write_report
from torchrl_rloo.diagnostics.calibration import PICTURE, Calibration, calibrate, write_calibration
from torchrl_rloo.embedded import demonstrations, resolve_model
from torchrl_rloo.modules import context_length
from torchrl_rloo.modules.reward_model import RewardModel, encode_pairs, load_reward_model
from torchrl_rloo.objectives.reward_model import RewardModelLoss, merge_reward_outputs
from torchrl_rloo.run import Checkpointer, RunLogger, StepTimer, StopSignal, cpu_seconds, linear_schedule, run_state

EMBEDDED, EMBEDDED_PAIRS = "embedded", 8192
PARTS = ("chosen", "rejected")
HEADLINE = ("loss", "rewards/accuracy", "eval/pair_accuracy", "time/step")
PANELS = (("eval/pair_accuracy", "rewards/accuracy"), ("eval/pair_nll", "loss"), ("eval/pair_ece",))
PANELS += (("rewards/chosen", "rewards/rejected"), ("rewards/margin",), ("grad_norm",))


def main(cfg: DictConfig) -> None:
    settings, output, timer = OmegaConf.to_container(cfg, resolve=True), Path(cfg.output_dir), StepTimer()
    if cfg.threads:
        torch.set_num_threads(cfg.threads)
    torch.manual_seed(cfg.seed)
    if cfg.resume not in ("auto", "never"):
        raise ValueError(f"resume={cfg.resume!r} must be 'auto' or 'never'")
    run = build(copy.deepcopy(settings), output)
    start, cpu_before = 0, 0.0
    state = run.checkpoints.load() if cfg.resume == "auto" else run.checkpoints.clear()
    if state is not None:
        start, cpu_before = run_state.restore(state, settings, run.stateful)
        print(f"resumed after step {start} from {run.checkpoints.directory}", flush=True)

    def due(step: int, every: int) -> bool:
        return every > 0 and step % every == 0

    with StopSignal() as stop, run.logger:
        if start == 0:
            with timer("eval"):
                metrics = evaluate(run, 0, cfg)
            run.logger.log(0, metrics, timings=timer.take())
        order = batches(len(run.train_set), cfg.train.pairs_per_step, cfg.seed, start)
        for step, indices in zip(range(start + 1, cfg.train.steps + 1), order, strict=False):
            with timer("train"):
                metrics = train(run, stack_rows([run.train_set[i] for i in indices]), cfg)
            last = step == cfg.train.steps
            if due(step, cfg.eval.every) or last:
                with timer("eval"):
                    metrics |= evaluate(run, step, cfg)
            run.logger.log(step, metrics, timings=timer.take() | {"cpu_seconds": cpu_before + cpu_seconds()})
            if due(step, cfg.checkpoint.every) or last or stop.requested:
                cpu = cpu_before + cpu_seconds()
                run.checkpoints.save(step, run_state.gather(step, cpu, settings, run.stateful))
            if stop.requested and not last:
                print(f"stopped after step {step}; the same command goes on from there", flush=True)
                return
    finish(run, cfg, settings, output, cpu_before)


def train(run: SimpleNamespace, batch: TensorDictBase, cfg: DictConfig) -> dict[str, float]:
    """One optimizer step."""
    size = cfg.train.micro_batch_size or len(batch)
    counts = run.loss_fn.count(batch, micro_batch_size=size)
    outputs = []
    for micro in batch.split(size):
        out = run.loss_fn(micro, counts)
        out.loss.backward()
        outputs.append(out.detach())
    norm = clip_grad_norm_(run.model.parameters(), cfg.max_grad_norm or inf, error_if_nonfinite=True)
    run.optimizer.step()
    run.scheduler.step()
    run.optimizer.zero_grad()
    metrics = {"grad_norm": float(norm), "learning_rate": run.scheduler.get_last_lr()[0]}
    return merge_reward_outputs(outputs) | metrics


@torch.no_grad()
def held_out(run: SimpleNamespace, cfg: DictConfig) -> tuple[torch.Tensor, torch.Tensor, Calibration]:
    """Scores of the better and the worse completions of the held-out pairs, ``[P]`` each, and calibration."""
    outputs = [run.loss_fn(part) for part in run.eval_set.split(cfg.eval.batch_size)]
    chosen, rejected = (torch.cat([getattr(o, f"{part}_rewards").cpu() for o in outputs]) for part in PARTS)
    return chosen, rejected, calibrate(chosen - rejected, bins=cfg.eval.bins)


def evaluate(run: SimpleNamespace, step: int, cfg: DictConfig) -> dict[str, float]:
    """Metrics of the held-out pairs; before the first step and after the last a few of them go into the log."""
    chosen, rejected, found = held_out(run, cfg)
    if step in (0, cfg.train.steps):
        table = []
        for row, better, worse in zip(run.eval_set.unbind(0)[: cfg.log.samples], chosen, rejected, strict=False):
            texts = {part: run.tokenizer.decode(row[part][keys.TOKENS]) for part in PARTS}
            table.append(texts | {"reward of chosen": float(better), "of rejected": float(worse)})
        run.logger.log_table(step, "held-out pairs", table)
    metrics = {"eval/pair_accuracy": found.accuracy, "eval/pair_margin": float((chosen - rejected).mean())}
    return metrics | {"eval/pair_nll": found.before.nll, "eval/pair_ece": found.before.ece}


def finish(run: SimpleNamespace, cfg: DictConfig, settings: dict, output: Path, cpu_before: float) -> None:
    """Saves the model with its calibration, writes the report, and prints the result as one line of JSON."""
    directory = output / "model"
    run.model.save_pretrained(directory)
    run.tokenizer.save_pretrained(directory)
    found = held_out(run, cfg)[-1]
    write_calibration(found, directory)
    result = {
        "held_out_accuracy_before": run.logger.history[0]["eval/pair_accuracy"],
        "held_out_accuracy_after": found.accuracy,
        "accuracy_interval": found.interval,
        "temperature": found.temperature,
        "separable": found.separable,
        "ece_before_calibration": found.before.ece,
        "ece_after_calibration": found.after.ece,
        "nll_before_calibration": found.before.nll,
        "nll_after_calibration": found.after.nll,
        "cpu_seconds": round(cpu_before + cpu_seconds(), 1),
    }
    page = write_report(
        output,
        history=run.logger.history,
        summary=result,
        tables=run.logger.tables,
        definitions=DEFINITIONS,
        settings=settings,
        panels=PANELS,
        figures={"Calibration on held-out pairs": directory / PICTURE},
        title="Reward model",
    )
    print(json.dumps(result | {"report": str(page.resolve()), "model": str(directory.resolve())}))


def build(cfg: dict, output: Path) -> SimpleNamespace:
    """The parts of the loop, made from the settings."""
    model_name = resolve_model(cfg["model"]["name"], cfg["seed"], log=print)
    model, tokenizer = load_reward_model(**(cfg["model"] | {"name": model_name}))
    max_length = cfg["data"].pop("max_length") or context_length(model) or inf
    train_set, eval_set = (
        fitting(encode_pairs(examples, tokenizer), max_length, words)
        for examples, words in zip(pairs(**cfg["data"], seed=cfg["seed"]), ("training", "held-out"), strict=True)
    )
    steps, size = cfg["train"]["steps"], cfg["train"]["pairs_per_step"]
    if not 0 < size <= len(train_set) or steps < 1:
        raise ValueError(f"train: {steps=} must be at least 1 and pairs_per_step={size} from 1 to {len(train_set)}")
    print(f"{model_name}: {model.num_parameters():,} parameters")
    epochs = steps * size / len(train_set)
    print(f"{len(train_set):,} training pairs, each seen {epochs:.2g} times; {len(eval_set):,} held out", flush=True)
    optimizer = torch.optim.AdamW(model.parameters(), **cfg["optimizer"])
    scheduler = linear_schedule(optimizer, steps, **cfg["schedule"])
    log = {"loggers": cfg["log"]["loggers"], "logger_kwargs": cfg["log"]["logger_kwargs"]}
    logger = RunLogger(output, total_steps=steps, headline=HEADLINE, **log)
    return SimpleNamespace(
        model=model,
        tokenizer=tokenizer,
        train_set=train_set,
        eval_set=eval_set,
        loss_fn=RewardModelLoss(RewardModel(model), **cfg["loss"]),
        optimizer=optimizer,
        scheduler=scheduler,
        logger=logger,
        checkpoints=Checkpointer(output / "checkpoints", keep=cfg["checkpoint"]["keep"]),
        stateful={"model": model, "optimizer": optimizer, "scheduler": scheduler, "logger": logger},
    )


def pairs(
    source: Any, type: str, *, eval_source: Any, eval_split: str | None, eval_size: int, seed: int, **options: Any
) -> tuple[Sequence[dict], Sequence[dict]]:
    """Training and held-out pairs; no prompt is in both."""
    if source == EMBEDDED:  # the same problems, worked by a clean and by a sloppy teacher, where the latter went wrong
        clean, sloppy = (demonstrations(EMBEDDED_PAIRS, seed=1, clean=is_clean) for is_clean in (True, False))
        source = [{"chosen": good, "rejected": bad} for good, bad in zip(clean, sloppy, strict=True) if good != bad]
    examples = list(load_preferences(source, type, **options))
    if eval_source is not None:
        held_out = options | {"limit": None} | ({"split": eval_split} if eval_split else {})
        held_out = list(load_preferences(eval_source, type, **held_out))
        if len(held_out) > eval_size:  # from all of it, which may be in order of subject
            held_out = random.Random(0).sample(held_out, eval_size)
        seen = {str(example["prompt"]) for example in examples}
        if shared := sum(str(example["prompt"]) in seen for example in held_out):
            raise ValueError(f"{shared} of the {len(held_out)} pairs of eval_source have prompts of training pairs")
        return examples, held_out
    groups: dict[str, list[dict]] = {}
    for example in examples:
        groups.setdefault(str(example["prompt"]), []).append(example)
    shuffled = random.Random(seed).sample(list(groups.values()), len(groups))
    held_out, rest = [], []
    for group in shuffled:
        (held_out if len(held_out) + len(group) <= eval_size else rest).extend(group)
    if not held_out or not rest:
        raise ValueError(f"data.eval_size={eval_size} of {len(examples)} pairs leaves none to train on or to hold out")
    return rest, held_out


def fitting(rows: TensorDictBase, max_length: float, words: str) -> TensorDictBase:
    """The pairs of which neither conversation is longer than so many tokens."""
    kept = [row for row in rows.unbind(0) if max(len(row[part][keys.TOKENS]) for part in PARTS) <= max_length]
    if not kept:
        raise ValueError(f"all {len(rows)} {words} pairs are longer than {max_length} tokens: raise data.max_length")
    if len(kept) < len(rows):
        print(f"{len(rows) - len(kept)} of {len(rows)} {words} pairs left out: longer than {max_length} tokens")
    return stack_rows(kept)


def batches(num_pairs: int, size: int, seed: int, start: int) -> Iterator[list[int]]:
    """Indices of the pairs of step ``start + 1`` and of all later ones: in each epoch no pair twice, in a new order."""
    per_epoch = num_pairs // size
    for epoch in range(start // per_epoch, 2**31):
        order = torch.randperm(num_pairs, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch)).tolist()
        for k in range(start % per_epoch if epoch == start // per_epoch else 0, per_epoch):
            yield order[k * size : (k + 1) * size]


if __name__ == "__main__":
    hydra.main(version_base="1.3", config_path="config", config_name="reward_model")(main)()
