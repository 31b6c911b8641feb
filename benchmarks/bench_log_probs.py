"""CPU time and peak memory of the log-prob head and its alternatives, from hidden states to the loss and back.

    python benchmarks/bench_log_probs.py
    python benchmarks/bench_log_probs.py --sizes 32k --repeats 5

Every method scores the same 8 x 256 action tokens of one small model (48 with ``262k``), in a separate process on one
thread. Time and memory are measured from the end of the decoder on: forward, and backward to the gradients of the
hidden states and of the projection's weight. It requires Linux, since it resets the kernel's peak memory there.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import resource
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from common import cpu_seconds, print_result, print_table, qwen2, run_python, word_tokenizer

SIZES = {
    "32k": {"vocab_size": 32_000, "hidden_size": 256},
    "32k-wide": {"vocab_size": 32_000, "hidden_size": 896},
    "152k": {"vocab_size": 152_000, "hidden_size": 256},
    "262k": {"vocab_size": 262_144, "hidden_size": 640},
}
DECODER = {"intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4}
ROWS, WARM_UP_ACTIONS = 8, 4
ACTIONS = dict.fromkeys(SIZES, 256) | {"262k": 48}  # full logits of 256 would take 2.1 GB
MEMORY_SHARE = 0.9  # share of the machine's free memory above which allocations of a process fail
TOLERANCE = 1e-3  # relative difference between the gradients of any two methods


class Scored(NamedTuple):
    """Batch to score: tokens ``[B, A + 1]``, of which all but the first are actions, and advantages ``[B, 1]``."""

    tokens: Any
    advantages: Any


def policy_loss(log_probs, batch: Scored, vocab_size: int):
    """Average ratio times advantage. The sampler's log-probs are those of a uniform choice, so ratios are near 1."""
    ratios = (log_probs.view(ROWS, -1) + math.log(vocab_size)).exp()
    return -(ratios * batch.advantages).mean()


def hidden_and_targets(model, batch: Scored):
    """Return the flat hidden states ``[N, H]`` before each action, and the actions ``[N]``."""
    hidden = model.model(input_ids=batch.tokens, use_cache=False).last_hidden_state
    return hidden[:, :-1].flatten(0, 1), batch.tokens[:, 1:].flatten()


def ours(model, batch: Scored, *, entropy: bool):
    """Compute the loss with ``torchrl_rloo.functional.token_log_probs``."""
    from torchrl_rloo.functional import token_log_probs

    hidden, targets = hidden_and_targets(model, batch)
    log_probs = token_log_probs(hidden, model.lm_head.weight, targets, entropy=entropy)[0]
    return policy_loss(log_probs, batch, model.config.vocab_size)


def full_logits(model, batch: Scored, *, entropy: bool):
    """Compute the loss with all logits, ``log_softmax`` and ``gather``, and the entropy without a gradient."""
    import torch

    hidden, targets = hidden_and_targets(model, batch)
    full = model.lm_head(hidden).log_softmax(-1)
    if entropy:
        with torch.no_grad():
            -(full.exp() * full).sum(-1)
    return policy_loss(full.gather(-1, targets[:, None])[:, 0], batch, model.config.vocab_size)


def trl_head(model, batch: Scored, *, entropy: bool):
    """Compute the loss with TRL's ``add_fused_lm_head`` as ``RLOOTrainer`` does, which always requests the entropy."""
    import torch
    from trl.trainer.utils import add_fused_lm_head

    if "forward" not in vars(model):
        add_fused_lm_head(model, outputs=("log_probs", "entropy") if entropy else ("log_probs",))
    labels = batch.tokens.clone()
    labels[:, 0] = -100
    scored = model(batch.tokens, torch.ones_like(batch.tokens), labels=labels, fused_lm_head=True)
    return policy_loss(scored.log_probs, batch, model.config.vocab_size)


def linear_cross_entropy(model, batch: Scored, *, entropy: bool, rows: int = 128):
    """Compute the loss with PyTorch's function in chunks of ``rows``. It has no entropy.

    Weights of single tokens require ``reduction="none"``.
    """
    from torch.nn import LinearCrossEntropyOptions, functional

    hidden, targets = hidden_and_targets(model, batch)
    options = LinearCrossEntropyOptions(batch_chunk_size=rows, chunking_method=None)
    losses = functional.linear_cross_entropy(hidden, model.lm_head.weight, targets, reduction="none", options=options)
    return policy_loss(-losses, batch, model.config.vocab_size)


def grpo_loss(model, batch: Scored, *, entropy: bool):
    """Compute TorchRL's ``GRPOLoss`` over its ``TransformersWrapper``. Its entropy is a bonus with a gradient."""
    import torch
    from tensordict import TensorDict
    from torchrl.modules.llm import TransformersWrapper
    from torchrl.objectives.llm import GRPOLoss

    tokenizer = word_tokenizer(64)  # only its padding id is used
    actor = TransformersWrapper(model, tokenizer=tokenizer, input_mode="tokens", generate=False, pad_output=False)
    wide = (0.99, 100.0)  # clips nothing, so that the gradients are those of the other methods
    loss = GRPOLoss(actor, masking_strategy="rlhf", entropy_bonus=entropy, clip_epsilon=wide)
    everywhere = torch.ones_like(batch.tokens, dtype=torch.bool)
    actions = everywhere.clone()
    actions[:, 0] = False
    rows = TensorDict(
        {
            "tokens": {"full": batch.tokens},
            "masks": {"all_attention_mask": everywhere, "all_assistant_mask": actions},
            "log_probs": {"full": torch.where(actions, -math.log(model.config.vocab_size), 0.0)},
            "advantage": batch.advantages[..., None],
        },
        [ROWS],
    )
    values = loss(rows.to_lazystack(0))
    return values.loss_objective + values.loss_entropy if entropy else values.loss_objective


METHODS: dict[str, tuple[Callable[..., Any], bool]] = {  # name -> function, and whether it computes the entropy
    "ours": (ours, False),
    "full logits": (full_logits, False),
    "TRL": (trl_head, False),
    "linear_cross_entropy": (linear_cross_entropy, False),
    "GRPOLoss": (grpo_loss, False),
    "ours, entropy": (ours, True),
    "full logits, entropy": (full_logits, True),
    "TRL, entropy": (trl_head, True),
    "GRPOLoss, entropy": (grpo_loss, True),
}


class Cut:
    """Hook at the end of the decoder, which makes its output a leaf and starts measuring time and memory.

    No memory of the decoder is allocated after it, so all further memory is the head's.
    """

    def __init__(self, model):
        model.model.requires_grad_(False)
        model.model.register_forward_hook(self)

    def __call__(self, module, args, output):
        self.hidden = output.last_hidden_state.detach().requires_grad_()
        output.last_hidden_state = self.hidden
        ctypes.CDLL(None).malloc_trim(0)  # otherwise memory that the decoder freed would hide the head's
        Path("/proc/self/clear_refs").write_text("5")
        self.resident, self.seconds = status_mb("VmRSS"), cpu_seconds()
        return output


def status_mb(field: str) -> float:
    """Return a memory figure of this process from the kernel, in MB (10^6 bytes)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":")) * 1024 / 1e6


def measure(size: str, method: str) -> None:
    """Measure one forward and backward pass of a method after a short warm-up, and print its time and memory."""
    import torch

    torch.set_num_threads(1)
    free = int(MEMORY_SHARE * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    resource.setrlimit(resource.RLIMIT_DATA, (free, free))
    model = qwen2(word_tokenizer(64), **SIZES[size], **DECODER)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())  # untied from the embedding
    cut, weight = Cut(model), model.lm_head.weight
    function, entropy = METHODS[method]
    for actions in (WARM_UP_ACTIONS, ACTIONS[size]):
        weight.grad = None
        batch = Scored(torch.randint(len(weight), (ROWS, actions + 1)), torch.randn(ROWS, 1))
        try:
            function(model, batch, entropy=entropy).backward()
        except RuntimeError as error:
            if "memory" not in str(error):
                raise
            print(json.dumps({"fits": False}))
            return
    result = {"fits": True, "cpu_s": cpu_seconds() - cut.seconds, "peak_mb": status_mb("VmHWM") - cut.resident}
    print(json.dumps(result | {"norms": [g.norm().item() for g in (cut.hidden.grad, weight.grad)]}))


def compare(size: str, repeats: int) -> dict[str, Any]:
    """Measure every method once in each of ``repeats`` rounds, and print a table."""
    from torchrl_rloo.functional.log_probs import TILE_ELEMENTS

    results: dict[str, list[dict[str, Any]]] = {method: [] for method in METHODS}
    loads = []
    for turn in range(repeats):
        for method, done in results.items():
            done.append(run_python(__file__, "--measure", size, method))
            loads.append(os.getloadavg()[0])
            print(f"{size}, round {turn + 1} of {repeats}, {method}: {done[-1]}", file=sys.stderr, flush=True)
    check_gradients(results)
    vocab_size, hidden_size = SIZES[size]["vocab_size"], SIZES[size]["hidden_size"]
    weight_mb, tile_mb = vocab_size * hidden_size * 4 / 1e6, TILE_ELEMENTS * 4 / 1e6
    figures = {method: summary(results, method, weight_mb, tile_mb) for method in METHODS}
    print_table(
        f"{size}: {ROWS} x {ACTIONS[size]} tokens, vocabulary {vocab_size:,}, hidden size {hidden_size}; medians of "
        f"{repeats} rounds, load {min(loads):.1f} to {max(loads):.1f}. Peaks exclude the decoder, its activations and "
        f"the weight's gradient of {weight_mb:.1f} MB, which every method has. A tile has {tile_mb:.1f} MB",
        [{"method": method} | row for method, row in figures.items()],
    )
    report_aims(figures)
    return figures


def check_gradients(results: dict[str, list[dict[str, Any]]]) -> None:
    """Raise unless all methods computed the same gradients, which GRPOLoss's entropy bonus hardly changes."""
    norms = [r["norms"] for done in results.values() for r in done if r["fits"]]
    for found in norms:
        if any(abs(a - b) > TOLERANCE * b for a, b in zip(found, norms[0], strict=True)):
            raise RuntimeError(f"gradients of the same loss have different norms: {found} and {norms[0]}")


def summary(results: dict[str, list[dict[str, Any]]], method: str, weight_mb: float, tile_mb: float) -> dict[str, Any]:
    """Return medians of one method, and of its ratios to ours with the same entropy setting, round by round."""
    baseline = results["ours, entropy" if METHODS[method][1] else "ours"]
    if not all(r["fits"] for r in results[method]):
        return dict.fromkeys(("CPU s", "CPU s / ours", "peak MB", "tiles", "peak / ours"), "did not fit")

    def mb(result: dict[str, Any]) -> float:
        return result["peak_mb"] - weight_mb

    pairs: Sequence[tuple[dict[str, Any], ...]] = list(zip(results[method], baseline, strict=True))
    peak = median(map(mb, results[method]))
    return {
        "CPU s": median(r["cpu_s"] for r in results[method]),
        "CPU s / ours": median(a["cpu_s"] / b["cpu_s"] for a, b in pairs),
        "peak MB": peak,
        "tiles": peak / tile_mb,
        "peak / ours": median(mb(a) / mb(b) for a, b in pairs),
    }


def report_aims(figures: dict[str, dict[str, Any]]) -> None:
    """Print targets and results, each with the entropy, which TRL's trainer and GRPOLoss compute by default."""
    found = (
        ("tiles at the peak of ours, at most 1.5", figures["ours, entropy"]["tiles"]),
        ("CPU time of TRL's head / ours, at least 2", figures["TRL, entropy"]["CPU s / ours"]),
        ("peak of GRPOLoss / ours, at least 6", figures["GRPOLoss, entropy"]["peak / ours"]),
    )
    print_table("Targets", [{"target": target, "result": value} for target, value in found])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--repeats", type=int, default=3, help="rounds per size, each with every method once")
    args = parser.parse_args()
    print_result({size: compare(size, args.repeats) for size in args.sizes})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure(*sys.argv[2:])
    else:
        main()
