"""Comparison with TRL's offline trainers: loss of each step, held-out metric and speed of the same run.

    python benchmarks/bench_trl_offline.py                    # all methods
    python benchmarks/bench_trl_offline.py sft dpo --steps 5  # some of them

Each side trains in a separate process with one thread. Start, rows, order and optimizer are the same. TRL gets plain
texts, so that it sees the same ids.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from common import print_table, run_python

from torchrl_rloo.data import concatenate, encode_preferences, keys, ragged, stack_rows
from torchrl_rloo.data.preferences import encode_demonstrations
from torchrl_rloo.embedded import addition_preferences, warm_start
from torchrl_rloo.modules import TransformersWrapper, load_model
from torchrl_rloo.objectives import PreferenceLoss, SFTLoss, merge_outputs
from torchrl_rloo.training import accumulate, optimizer_step

METHODS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # TRL's trainer, its settings, and ours
    "sft": ("trl.SFTTrainer", {}, {}),
    "dpo": ("trl.DPOTrainer", {"loss_type": ["sigmoid"], "beta": 0.1}, {"beta": 0.1}),
    "dpo_norm": ("trl.DPOTrainer", {"loss_type": ["sigmoid_norm"], "beta": 5.0}, {"beta": 5.0}),
    "ipo": ("trl.DPOTrainer", {"loss_type": ["ipo"], "beta": 0.1}, {"beta": 0.1}),
    "kto": ("trl.KTOTrainer", {"beta": 0.1}, {"beta": 0.1}),
    "simpo": (
        "trl.experimental.cpo.CPOTrainer",
        {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.0, "cpo_alpha": 0.0},
        {"beta": 2.0, "gamma": 1.0, "cpo_alpha": 0.0},
    ),
    "orpo": ("trl.experimental.orpo.ORPOTrainer", {"beta": 0.1}, {"alpha": 0.1}),
}
SIZE, HELD_OUT, LR, BETAS = 32, 256, 3e-5, (0.9, 0.99)


def make_texts(tokenizer, number: int) -> list[dict[str, str]]:
    """Return prompts with a chosen and a rejected answer as the texts that the template writes."""
    pairs = []
    for pair in addition_preferences(2 * number + 64)[:number]:
        prompt = tokenizer.apply_chat_template(pair["chosen"][:-1], tokenize=False, add_generation_prompt=True)
        answers = {part: pair[part][-1]["content"] + tokenizer.eos_token for part in ("chosen", "rejected")}
        pairs.append({"prompt": prompt, **answers})
    return pairs


def labeled(pairs: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Return one completion of each pair with its label, by turns the chosen and the rejected one."""
    parts = ("chosen", "rejected")
    return [{"prompt": p["prompt"], "completion": p[parts[i % 2]], "label": i % 2 == 0} for i, p in enumerate(pairs)]


def encode(method: str, pairs: list[dict[str, str]], tokenizer):
    """Return the rows of a method."""
    if method == "sft":
        return encode_demonstrations([{"query": p["prompt"], "demonstration": p["chosen"]} for p in pairs], tokenizer)
    return encode_preferences(labeled(pairs) if method == "kto" else pairs, tokenizer)


def make_loss(method: str, model, tokenizer, reference=None):
    scorer = TransformersWrapper(model, tokenizer=tokenizer, generate=False, packing="packed")
    if method == "sft":
        return SFTLoss(scorer)
    needs = method not in ("simpo", "orpo")
    ref = scorer.get_new_version(model=reference) if needs else None
    return PreferenceLoss(scorer, {"name": method, **METHODS[method][2]}, reference=ref)


def train_ours(method: str, model, tokenizer, pairs: list[dict[str, str]], steps: int) -> tuple[list[float], float]:
    """Return the loss of each step, and the CPU seconds of all."""
    loss_fn = make_loss(method, model, tokenizer, copy.deepcopy(model).requires_grad_(False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, weight_decay=0.0)
    rows, losses, start = encode(method, pairs, tokenizer), [], time.process_time()
    for step in range(steps):
        batch = rows[step * SIZE : (step + 1) * SIZE]
        if method == "kto":  # TRL pairs a prompt with the answer before it, we with the one after it
            batch = stack_rows(list(batch.unbind(0))[::-1])
        outputs = accumulate(loss_fn, batch)
        optimizer_step(model, optimizer, None, 1.0)
        merged = merge_outputs(outputs)
        # TRL's ORPO also learns the prompt, so only the odds ratio is compared
        losses.append(merged["loss"] + (merged["log_probs/chosen"] if method == "orpo" else 0.0))
    return losses, time.process_time() - start


def train_trl(method: str, model, tokenizer, pairs: list[dict[str, str]], steps: int) -> tuple[list[float], float]:
    """Return the loss of each step, and the CPU seconds of all."""
    import importlib

    import datasets
    from torch.utils.data import SequentialSampler

    path, options, _ = METHODS[method]
    module = importlib.import_module(path.rpartition(".")[0])
    trainer_class = getattr(module, path.rpartition(".")[2])
    config_class = getattr(module, path.rpartition(".")[2].replace("Trainer", "Config"))
    losses: list[float] = []

    class Trainer(trainer_class):
        def _get_train_sampler(self, *args: Any) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss = super().training_step(*args, **kwargs)
            metrics = self._stored_metrics["train"] if method == "orpo" else None
            losses.append(float(loss) if metrics is None else -0.1 * metrics["log_odds_ratio"][-1])
            return loss

    rows = pairs
    if method == "sft":
        rows = [{"prompt": p["prompt"], "completion": p["chosen"]} for p in pairs]
    elif method == "kto":
        rows, options = labeled(pairs), {**options, "train_sampling_strategy": "sequential"}
    with tempfile.TemporaryDirectory() as folder:
        config = config_class(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=SIZE,
            learning_rate=LR,
            lr_scheduler_type="constant",
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            max_grad_norm=1.0,
            max_length=None if method not in ("simpo", "orpo") else 512,
            logging_steps=10_000,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            disable_tqdm=True,
            **options,
        )
        data = {"train_dataset": datasets.Dataset.from_list(rows), "processing_class": tokenizer}
        trainer = Trainer(model=model, args=config, **data)
        start = time.process_time()
        trainer.train()
        return losses, time.process_time() - start


def run_side(side: str, method: str, steps: int, path: str) -> dict[str, Any]:
    """Train one side, and evaluate its model on held-out rows."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, tokenizer = load_model(path)
    pairs = make_texts(tokenizer, steps * SIZE + HELD_OUT)
    start, (trained, held_out) = copy.deepcopy(model), (pairs[:-HELD_OUT], pairs[-HELD_OUT:])
    losses, seconds = (train_ours if side == "ours" else train_trl)(method, model, tokenizer, trained, steps)
    rows = encode(method, trained, tokenizer)
    parts = rows if method in ("sft", "kto") else concatenate([rows["chosen"], rows["rejected"]])
    loss_fn = make_loss(method, model.eval(), tokenizer, start)
    found = merge_outputs(accumulate(loss_fn, encode(method, held_out, tokenizer), backward=False))
    tokens = sum(map(len, ragged(parts, keys.TOKENS)))
    metric = found["nll"] if method == "sft" else found["rewards/accuracy"]
    return {"losses": losses, "tokens_per_second": tokens / seconds, "held_out": metric, "loss": found["loss"]}


def compare(method: str, ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    pairs = list(zip(ours["losses"], theirs["losses"], strict=True))
    pairs = pairs[:1] if method == "orpo" else pairs  # later steps start from other weights
    differences = [abs(a - b) / max(1.0, abs(b)) for a, b in pairs]
    return {
        "method": method,
        "TRL": METHODS[method][0].removeprefix("trl."),
        "first loss": f"{ours['losses'][0]:.6f}",
        "last loss": f"{ours['losses'][-1]:.6f}",
        "largest difference": f"{max(differences):.1e}",
        "held out, ours / TRL": f"{ours['held_out']:.4f} / {theirs['held_out']:.4f}",
        "tokens per CPU s, ours / TRL": f"{ours['tokens_per_second']:,.0f} / {theirs['tokens_per_second']:,.0f}",
        "ratio": f"{ours['tokens_per_second'] / theirs['tokens_per_second']:.2f}",
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", default=list(METHODS), help=f"of {', '.join(METHODS)}")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--side", choices=("ours", "trl"), help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        warnings.simplefilter("ignore")
        results = {}
        for method in args.methods:
            results[method] = run_side(args.side, method, args.steps, args.model)
            print(method, results[method], file=sys.stderr, flush=True)
        print(json.dumps(results))
    else:
        command = [str(Path(__file__).resolve()), *args.methods, "--steps", str(args.steps)]
        command += ["--model", str(warm_start(0, log=print)), "--side"]
        sides = {side: run_python(*command, side) for side in ("ours", "trl")}
        rows = [compare(method, *(results[method] for results in sides.values())) for method in args.methods]
        print_table(f"{args.steps} steps of {SIZE} rows", rows)
