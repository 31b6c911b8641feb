"""CPU time and memory of the training forward and backward passes with and without padding, for the same gradient.

    python benchmarks/bench_packing.py                          # two sizes, answers of 32 to 320 tokens
    python benchmarks/bench_packing.py --answers 6 32 --prompt 16

One step is forward and backward of REINFORCE over groups of answers to shared prompts. Each figure comes from a
separate process with one thread. The packings alternate, and ratios are computed round by round.
"""

from __future__ import annotations

import argparse
import json
import sys
from statistics import median
from typing import Any

from common import cpu_seconds, peak_memory_mb, print_result, print_table, run_python

SIZES = {
    "embedded": {
        "vocab_size": 384,
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    },
    "large": {
        "vocab_size": 32_000,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    },
}
PROMPTS = {"embedded": 16, "large": 8}
STEPS = {"embedded": 6, "large": 2}  # measured steps of a process, after one warm-up step
GROUP = 8
PACKINGS = ("none", "packed", "shared_prefix")


def make_rows(size: str, prompt: int, shortest: int, longest: int):
    """Return tokens and action masks of ``GROUP`` answers to each prompt, with uniformly drawn lengths."""
    import torch

    draw = torch.Generator().manual_seed(0)
    tokens, masks = [], []
    for _ in range(PROMPTS[size]):
        question = torch.randint(0, SIZES[size]["vocab_size"], (prompt,), generator=draw)
        for length in torch.randint(shortest, longest + 1, (GROUP,), generator=draw).tolist():
            answer = torch.randint(0, SIZES[size]["vocab_size"], (length,), generator=draw)
            tokens.append(torch.cat([question, answer]))
            masks.append(torch.arange(prompt + length) >= prompt)
    return tokens, masks


def time_steps(size: str, packing: str, tokens, masks) -> dict[str, Any]:
    """Return median CPU seconds of forward and backward over rows in this process, and what they took.

    Args:
        size: name of the model's sizes.
        packing: layout of the rows.
        tokens: ids of the rows.
        masks: action masks of the rows.
    """
    import torch
    from common import qwen2, word_tokenizer

    from torchrl_rloo.data.rows import pad
    from torchrl_rloo.functional import token_log_probs
    from torchrl_rloo.modules.packing import action_hidden, supports_packing

    model = qwen2(word_tokenizer(SIZES[size]["vocab_size"]), **SIZES[size])
    decoder = model.get_decoder()
    targets = torch.cat([t[m] for t, m in zip(tokens, masks, strict=True)])
    advantages = torch.randn(len(tokens), generator=torch.Generator().manual_seed(0))
    weights = torch.cat([a.expand(int(m.sum())) for a, m in zip(advantages, masks, strict=True)]) / len(tokens)
    assert packing == "none" or supports_packing(decoder)
    positions: list[int] = []
    decoder.get_input_embeddings().register_forward_pre_hook(lambda module, args: positions.append(args[0].numel()))

    def hidden_states() -> torch.Tensor:
        if packing != "none":
            return action_hidden(decoder, tokens, masks, packing)
        out = decoder(input_ids=pad(tokens), use_cache=False).last_hidden_state
        return out[:, :-1][pad(masks, False)[:, 1:]]

    def step() -> tuple[float, float]:
        """Return the CPU seconds of the decoder and of the log-prob head, each forward and backward."""
        model.zero_grad()
        start = cpu_seconds()
        hidden = hidden_states()
        decoder_end = cpu_seconds()
        leaf = hidden.detach().requires_grad_()
        (-weights * token_log_probs(leaf, model.lm_head.weight, targets).log_probs).sum().backward()
        head_end = cpu_seconds()
        hidden.backward(leaf.grad)
        return decoder_end - start + cpu_seconds() - head_end, head_end - decoder_end

    step()
    decoder_s, head_s = (median(values) for values in zip(*(step() for _ in range(STEPS[size])), strict=True))
    return {
        "parameters": model.num_parameters(),
        "positions": positions[-1],
        "decoder_s": decoder_s,
        "head_s": head_s,
        "peak_mb": peak_memory_mb(),
        "gradient": torch.cat([p.grad.flatten() for p in model.parameters()]),
    }


def measure(size: str, packing: str, prompt: str, shortest: str, longest: str) -> None:
    """Measure one packing at one size in this process, and print the figures as JSON."""
    figures = time_steps(size, packing, *make_rows(size, int(prompt), int(shortest), int(longest)))
    figures["gradient_norm"] = float(figures.pop("gradient").double().norm())
    print(json.dumps(figures))


def compare(size: str, rounds: int, rows: list[str]) -> dict[str, Any]:
    """Run each packing ``rounds`` times in alternating order, and print a table."""
    done: dict[str, list[dict[str, Any]]] = {packing: [] for packing in PACKINGS}
    for number in range(rounds):
        order = PACKINGS if number % 2 == 0 else PACKINGS[::-1]
        for packing in order:
            done[packing].append(run_python(__file__, "--measure", size, packing, *rows))
            took = f"{done[packing][-1]['decoder_s']:.3f} CPU s in the decoder"
            print(f"{size}, round {number + 1} of {rounds}, {packing}: {took}", file=sys.stderr, flush=True)
    norms = [r["gradient_norm"] for runs in done.values() for r in runs]
    if max(norms) - min(norms) > 1e-4 * max(norms):
        raise AssertionError(f"the gradients of the packings have different norms: {norms}")
    table = []
    for packing, runs in done.items():
        decoder, head, peak = (median(r[k] for r in runs) for k in ("decoder_s", "head_s", "peak_mb"))
        pairs = list(zip(done["none"], runs, strict=True))
        ratios = [p["decoder_s"] / r["decoder_s"] for p, r in pairs]
        whole = [(p["decoder_s"] + p["head_s"]) / (r["decoder_s"] + r["head_s"]) for p, r in pairs]
        figures = {"packing": packing, "positions": runs[0]["positions"], "decoder CPU s": decoder, "head CPU s": head}
        figures |= {"peak MB": peak, "padded / this, decoder": median(ratios)}
        figures |= {"lowest": min(ratios), "highest": max(ratios), "padded / this, step": median(whole)}
        table.append(figures)
    parameters = done["none"][0]["parameters"]
    print_table(f"{size}: {parameters:,} parameters, {PROMPTS[size]} prompts x {GROUP} answers", table)
    return {"parameters": parameters, "packings": table}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=3, help="runs of each packing at each size")
    parser.add_argument("--prompt", type=int, default=128, help="number of tokens in a prompt")
    parser.add_argument("--answers", type=int, nargs=2, default=(32, 320), help="range of tokens in an answer")
    args = parser.parse_args()
    rows = [str(n) for n in (args.prompt, *args.answers)]
    print_result({size: compare(size, args.rounds, rows) for size in args.sizes})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure(*sys.argv[2:])
    else:
        main()
