"""Rows with pictures: exactness in every layout, a step compared with TRL, and memory of many rows.

    python benchmarks/bench_images_cost.py --mode exactness
    python benchmarks/bench_images_cost.py --mode trl [--sizes small large] [--pairs 3]
    python benchmarks/bench_images_cost.py --mode memory

- ``exactness`` has the largest difference between the log-probs of a sampler and a scorer, in nats and float32. The
  models are tiny random ones of all families.
- ``trl`` is ``bench_vs_trl.py`` on pictures: each prompt has its own, and all weights are trained on both sides.
- ``memory`` has 10,000 rows of 1,000 pictures of 64x64 pixels: without images, with digests, and with the pixels of the
  built-in model's processor (32x32) in each row.

Each figure of ``trl`` and ``memory`` comes from a separate process.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from bench_vs_trl import BATCH, LOOPS, summary, write_lines
from common import print_result, print_table, run_python

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "test"))

LAYOUTS = ("none", "packed", "shared_prefix")
CASES = ("one image", "two images", "several turns", "two sizes")
SIZES = {  # pixels and width of a picture's side, patch, layers, width, and patches that make a token
    "small": {"side": 32, "patch": 16, "layers": 2, "width": 64, "scale": 1},
    "large": {"side": 224, "patch": 14, "layers": 4, "width": 256, "scale": 4},
}
STEPS = {"small": 6, "large": 1}  # measured steps of a process, after one warm-up step
ROWS, PICTURES, TOKENS = 10_000, 1_000, 200


# ------------------------------------------------------------------------------------------------------------ exactness
def sample_case(model, tokenizer, store, case: str) -> tuple[Any, Any]:
    """Return a policy and rows that it sampled, two per prompt."""
    from support.vision_models import picture
    from torchrl_rloo.collectors import LLMCollector
    from torchrl_rloo.data import load_prompts
    from torchrl_rloo.envs import DatasetChatEnv
    from torchrl_rloo.envs.transforms import FeedbackTransform
    from torchrl_rloo.modules import TransformersWrapper

    shapes = [(100, 30), (17, 200)] if case == "two sizes" else [(40, 24)] * 2
    images = [
        [picture(*shape, seed=9 * k + i) for k in range(1 + (case == "two images"))] for i, shape in enumerate(shapes)
    ]

    def respond(conversation, row):
        return [{"role": "user", "content": [picture(40, 24, len(conversation)), "and now?"]}]

    prompts = [{"prompt": [{"role": "user", "content": "What color is it?"}], "images": shown} for shown in images]
    env = DatasetChatEnv(
        load_prompts(prompts, images=store),
        tokenizer,
        prompts_per_batch=len(prompts),
        num_generations=2,
        shuffle=False,
        transforms=[FeedbackTransform(respond, max_turns=3)] if case == "several turns" else [],
    )
    stops = list(range(3, 256, 9))  # a random model seldom samples the end of a turn
    sampling = {"max_new_tokens": 24, "seed": 0, "stop_token_ids": stops}
    policy = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs=sampling)
    return policy, LLMCollector(env, policy, dialog_turns_per_batch=2 * len(prompts)).collect()


def largest_gap(policy, rows, packing: str) -> float:
    """Return the largest difference between the log-probs of the sampler and of a scorer."""
    import torch

    from torchrl_rloo.data import keys

    with torch.no_grad():
        scores = policy.get_new_version(generate=False, packing=packing).score(rows).log_probs
    sampled = [row[keys.LOG_PROBS][row[keys.ACTION_MASK]] for row in rows.unbind(0)]
    return max(float((score[: len(own)] - own).abs().max()) for score, own in zip(scores, sampled, strict=True))


def exact_gaps(families: list[str], cases: list[str]) -> Iterator[dict[str, Any]]:
    """Yield a row of gaps for each family and case."""
    from support.vision_models import build
    from torchrl_rloo.modules import add_adapter

    for family in families:
        with tempfile.TemporaryDirectory() as folder:
            model, tokenizer, store = build(family, folder)
            played = {case: sample_case(model, tokenizer, store, case) for case in cases}
            plain = {case: {p: largest_gap(*played[case], p) for p in LAYOUTS} for case in cases}
            add_adapter(model, {"r": 4, "target_modules": "all-linear", "init_lora_weights": False})
            for case in cases:
                policy, rows = sample_case(model, tokenizer, store, case)
                adapted = max(largest_gap(policy, rows, packing) for packing in LAYOUTS)
                yield {"family": family, "rows": case, **plain[case], "LoRA, any layout": adapted}


def compare_exactness(families: list[str], cases: list[str]) -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    table = list(exact_gaps(families, cases))
    print_table("largest difference in nats between sampler and scorer, float32", table)
    return {"gaps": table}


# ------------------------------------------------------------------------------------------------------------------ trl
def build_start(size: str, folder: str) -> None:
    """Save a start model that sees pictures, whose end of turn it cannot sample."""
    import torch
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration, Idefics3ImageProcessorPil

    from torchrl_rloo.embedded import build_tokenizer
    from torchrl_rloo.images.encoder import ImageEncoder
    from torchrl_rloo.modules import save_model

    shape, tokenizer = SIZES[size], build_tokenizer(images=True)
    vocabulary = len(tokenizer)
    tokenizer.add_special_tokens({"eos_token": "<|never|>"})
    width, side = shape["width"], shape["side"]
    layers = {"hidden_size": width, "num_hidden_layers": shape["layers"], "num_attention_heads": width // 32}
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    text = {"model_type": "llama", "vocab_size": vocabulary, "intermediate_size": 2 * width, "head_dim": 32, **layers}
    tower = {"image_size": side, "patch_size": shape["patch"], "intermediate_size": 4 * width, **layers}
    torch.manual_seed(0)
    model = Idefics3ForConditionalGeneration(
        Idefics3Config(
            text_config=text | ends | {"num_key_value_heads": width // 32},
            vision_config=tower,
            scale_factor=shape["scale"],
            image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
            tie_word_embeddings=True,
            **ends,
        )
    )
    edge = {"longest_edge": side}
    processor = Idefics3ImageProcessorPil(do_resize=False, size=edge, max_image_size=edge, do_image_splitting=False)
    tokenizer.images = ImageEncoder(model.config, processor, tokenizer)
    save_model(model, tokenizer, folder)
    print(json.dumps({"parameters": model.num_parameters()}))


def picture_prompts(size: str, count: int, folder: Path) -> list[dict[str, Any]]:
    """Return prompts of random words, each with its own picture."""
    from support.vision_models import picture

    rng, rows = random.Random(0), []
    for i in range(count):
        path, words = folder / f"{size}{i}.png", rng.choices(["How many", "circles", "red", "rings", "squares"], k=8)
        picture(SIZES[size]["side"], SIZES[size]["side"], i).save(path)
        rows.append({"prompt": [{"role": "user", "content": " ".join(words)}], "images": [str(path)]})
    return rows


def compare_step(size: str, pairs: int, folder: Path) -> dict[str, Any]:
    """Run each side ``pairs`` times in alternation, and print a table."""
    model, steps = folder / size, STEPS[size] + 1
    parameters = run_python(__file__, "--build", size, str(model))["parameters"]
    prompts = write_lines(folder / f"{size}.jsonl", picture_prompts(size, steps * BATCH["num_prompts"], folder))
    run = {"model": str(model), "prompts": prompts, "steps": steps, "learning_rate": 1e-4, "reward": "id_sum", **BATCH}
    sides = {"trl": ("trl", {})} | {f"ours, {p}": ("ours", {"packing": p}) for p in ("none", "shared_prefix")}
    results: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for _ in range(pairs):
        for side, (name, more) in sides.items():
            done = run_python(LOOPS, name, json.dumps(run | {"images": True} | more))
            results[side].append(done)
            print(f"{size}, {side}: {done['cpu_s_per_step']:.3f} CPU s, {done['peak_mb']:.0f} MB", file=sys.stderr)
    figures: dict[str, Any] = {}
    for side, done in results.items():
        ratios = [t["cpu_s_per_step"] / o["cpu_s_per_step"] for t, o in zip(results["trl"], done, strict=True)]
        memory = median(o["peak_mb"] / t["peak_mb"] for t, o in zip(results["trl"], done, strict=True))
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        figures[side] = summary(done) | {"TRL / side": median(ratios), "range": spread, "MB, side / TRL": memory}
    edge = SIZES[size]["side"]
    title = f"{size}: {parameters:,} parameters, pictures of {edge}x{edge} pixels; medians of {pairs} pairs"
    print_table(title, [{"side": side, **each} for side, each in figures.items()])
    return figures


# --------------------------------------------------------------------------------------------------------------- memory
def resident_mb() -> float:
    import os

    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def store_rows(kind: str, folder: str) -> None:
    """Keep the rows in a replay buffer, write them to a folder, and print the memory and the bytes."""
    import torch
    from bench_rows import make_rows
    from bench_storage import grouped
    from torchrl.data import ReplayBuffer

    from support.vision_models import picture
    from torchrl_rloo.data import keys
    from torchrl_rloo.embedded.model import build_processor
    from torchrl_rloo.images import ImageStore
    from torchrl_rloo.images.encoder import digests
    from torchrl_rloo.replay import RolloutWriter, RowStorage

    torch.set_num_threads(1)
    store, process = ImageStore(Path(folder) / "images"), build_processor()
    buffer = ReplayBuffer(storage=RowStorage())
    warm = grouped(make_rows(10, TOKENS), 10)
    digests([store.add(picture(64, 64, 0))]), process(images=[[picture(64, 64, 0)]], return_tensors="pt")
    buffer.extend(warm), buffer.empty()
    start, paths = resident_mb(), []
    for seed in range(PICTURES):
        image = picture(64, 64, seed)
        if kind == "digests":
            paths.append(store.add(image))
        rows = grouped(make_rows(ROWS // PICTURES, TOKENS), ROWS // PICTURES)
        for row in rows.unbind(0):
            row.set(keys.GROUP_ID, torch.tensor(seed))
            if kind == "digests":
                row.set(keys.IMAGES, digests(paths[-1:]))
            elif kind == "pixels":
                row.set("pixel_values", process(images=[[image]], return_tensors="pt")["pixel_values"][0])
        buffer.extend(rows)
    kept = resident_mb() - start
    out = Path(folder) / "rows"
    RolloutWriter(out, model="random", tokenizer="0" * 64).extend(buffer[:])
    files = {"rows": out, "pictures": store.folder}
    sizes = {f"MB of {n}": sum(f.stat().st_size for f in p.rglob("*") if f.is_file()) / 1e6 for n, p in files.items()}
    print(json.dumps({"MB in the buffer": kept, **sizes}))


def compare_memory() -> dict[str, Any]:
    figures = {}
    for kind in ("none", "digests", "pixels"):
        with tempfile.TemporaryDirectory() as folder:
            figures[kind] = run_python(__file__, "--store", kind, folder)
    title = f"{ROWS:,} rows of about {TOKENS} tokens, with {PICTURES:,} pictures of 64x64 pixels"
    print_table(title, [{"images of a row": kind, **each} for kind, each in figures.items()])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=("exactness", "trl", "memory"), default="exactness")
    parser.add_argument("--families", nargs="+", help="for exactness; all by default")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES), help="for trl")
    parser.add_argument("--pairs", type=int, default=3, help="for trl")
    parser.add_argument("--build", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--store", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.build:
        return build_start(*args.build)
    if args.store:
        return store_rows(*args.store)
    if args.mode == "exactness":
        from support.vision_models import FAMILIES

        figures = compare_exactness(args.families or list(FAMILIES), list(CASES))
    elif args.mode == "memory":
        figures = compare_memory()
    else:
        with tempfile.TemporaryDirectory() as name:
            figures = {size: compare_step(size, args.pairs, Path(name)) for size in args.sizes}
    print_result({"benchmark": f"images, {args.mode}"} | figures)


if __name__ == "__main__":
    main()
