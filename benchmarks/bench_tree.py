"""Tokens and CPU time of the training forward and backward passes over rows that begin alike, for the same gradient.

    python benchmarks/bench_tree.py                    # branches, turns and plain groups, two sizes
    python benchmarks/bench_tree.py --cases branches --sizes large

``shared_prefix`` computes each node of the rows' token tree once. It is compared with padding, with packing, and with
sharing of whole prompts only. Each figure comes from a separate process with one thread. The layouts alternate, and
ratios are computed round by round.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

from bench_packing import GROUP, PROMPTS, SIZES, make_rows, time_steps
from common import print_result, print_table, run_python

LAYOUTS = ("none", "packed", "shared_prompt", "shared_prefix")
PROMPT, TURNS = 128, 4
TOLERANCE = 1e-5  # largest difference of gradients, as a share of their largest entry


def draw_text(size: str, generator, shortest: int, longest: int):
    """Draw token ids, of a uniformly drawn length."""
    import torch

    length = int(torch.randint(shortest, longest + 1, (), generator=generator))
    return torch.randint(0, SIZES[size]["vocab_size"], (length,), generator=generator)


def branches(size: str):
    """Return rows of a tree search: each row but the first of a group leaves an earlier answer anywhere."""
    import torch

    draw = torch.Generator().manual_seed(0)
    text = partial(draw_text, size, draw)
    tokens, masks = [], []
    for _ in range(PROMPTS[size]):
        group = [text(PROMPT + 320, PROMPT + 320)]
        for _ in range(GROUP - 1):
            stem = group[int(torch.randint(len(group), (), generator=draw))]
            kept = int(torch.randint(PROMPT, len(stem), (), generator=draw))
            group.append(torch.cat([stem[:kept], text(32, 320)]))
        tokens += group
        masks += [torch.arange(len(row)) >= PROMPT for row in group]
    return tokens, masks


def turns(size: str):
    """Return rows of conversations whose template drops the reasoning of earlier turns, a row per turn."""
    import torch

    text = partial(draw_text, size, torch.Generator().manual_seed(0))
    tokens, masks = [], []
    for _ in range(PROMPTS[size]):
        prompt = text(PROMPT, PROMPT)
        for _ in range(GROUP // TURNS):
            context = prompt
            for _ in range(TURNS):
                reasoning, answer, feedback = text(16, 96), text(16, 48), text(16, 96)
                tokens.append(torch.cat([context, reasoning, answer]))
                masks.append(torch.arange(len(tokens[-1])) >= len(context))
                context = torch.cat([context, answer, feedback])
    return tokens, masks


def plain(size: str):
    """Return groups of answers to shared prompts."""
    return make_rows(size, PROMPT, 32, 320)


CASES = {"branches": branches, "turns": turns, "plain": plain}


def whole_prompts(masks):
    """Return a stand-in for ``prefix_order`` that finds only whole prompts which rows share."""
    from torchrl_rloo.data.rows import prefix_order

    def order_of(tokens) -> tuple[list[int], list[int]]:
        if len(tokens) != len(masks):  # the rows that probe the decoder
            return prefix_order(tokens)
        prompts = [tuple(t[: int(m.int().argmax())].tolist()) for t, m in zip(tokens, masks, strict=True)]
        order = sorted(range(len(tokens)), key=prompts.__getitem__)
        alike = [k > 0 and prompts[i] == prompts[order[k - 1]] for k, i in enumerate(order)]
        return order, [len(prompts[i]) * same for i, same in zip(order, alike, strict=True)]

    return order_of


def measure(case: str, size: str, layout: str, path: str) -> None:
    """Measure one layout of a case in this process, save the gradient, and print the figures as JSON."""
    import torch

    from torchrl_rloo.modules import packing

    tokens, masks = CASES[case](size)
    if layout == "shared_prompt":
        layout, order_of = "shared_prefix", whole_prompts(masks)
    else:
        order_of = packing.prefix_order
    with mock.patch.object(packing, "prefix_order", order_of):
        figures = time_steps(size, layout, tokens, masks)
    torch.save(figures.pop("gradient"), path)
    print(json.dumps(figures))


def largest_difference(paths: list[Path]) -> float:
    """Return the largest difference of any gradient from the first, as a share of the first one's largest entry."""
    import torch

    first, *others = (torch.load(path) for path in paths)
    return max(float((other - first).abs().max() / first.abs().max()) for other in others)


def compare(case: str, size: str, rounds: int) -> dict[str, Any]:
    """Run each layout ``rounds`` times in alternating order, and print a table."""
    done: dict[str, list[dict[str, Any]]] = {layout: [] for layout in LAYOUTS}
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, layout) for layout in LAYOUTS]
        for number in range(rounds):
            for layout, path in list(zip(LAYOUTS, paths, strict=True))[:: 1 if number % 2 == 0 else -1]:
                done[layout].append(run_python(__file__, "--measure", case, size, layout, str(path)))
                took = f"{done[layout][-1]['decoder_s']:.3f} CPU s in the decoder"
                print(f"{case}, {size}, round {number + 1} of {rounds}, {layout}: {took}", file=sys.stderr, flush=True)
        difference = largest_difference(paths)
    if difference > TOLERANCE:
        raise AssertionError(f"the gradients of the layouts differ by {difference:.2g} of their largest entry")
    table = []
    for layout, runs in done.items():
        decoder, head, peak = (median(r[k] for r in runs) for k in ("decoder_s", "head_s", "peak_mb"))
        figures = {"layout": layout, "tokens": runs[0]["positions"], "decoder CPU s": decoder, "head CPU s": head}
        figures["peak MB"] = peak
        for name in ("none", "packed", "shared_prompt"):
            ratios = [other["decoder_s"] / run["decoder_s"] for other, run in zip(done[name], runs, strict=True)]
            figures[f"{name} / this, decoder"] = median(ratios)
        table.append(figures)
    print_table(f"{case}, {size}: largest difference of gradients {difference:.1e}", table)
    return {"difference": difference, "layouts": table}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=3, help="runs of each layout of each case")
    args = parser.parse_args()
    figures = {size: {case: compare(case, size, args.rounds) for case in args.cases} for size in args.sizes}
    print_result(figures)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure(*sys.argv[2:])
    else:
        main()
