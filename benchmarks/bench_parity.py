"""Differences between the log-probs of a vLLM engine and of the training model at equal weights.

    python benchmarks/bench_parity.py [--models embedded random]
    python benchmarks/bench_parity.py --models FOLDER       # a saved model, which continues addition problems

vLLM samples in float32, in bfloat16, and in bfloat16 with a float32 head, which the training model always has. Hugging
Face models in float32 and in bfloat16 score the samples.

- ``embedded`` is the warm-started default model, whose answers have about 23 tokens.
- ``random`` is a Qwen2 of 30 million random parameters. Its last norm is scaled up until its distribution is about as
  sharp as a trained model's. This makes rounding errors larger than in a trained model.

It requires vLLM and 50 seconds of one CPU core, and ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import OFFLINE, ONE_THREAD, print_result, print_table, qwen2, word_tokenizer

REQUESTS = {"embedded": 64, "random": 16}  # about 1,000 tokens of each model; 16 of saved ones
DTYPES = ("float32", "bfloat16")
ENGINES = {dtype: {"dtype": dtype} for dtype in DTYPES}
FLOAT32_HEAD = "bfloat16, float32 head"
ENGINES[FLOAT32_HEAD] = {"dtype": "bfloat16", "hf_overrides": {"head_dtype": "float32"}}
SETTINGS = {"T=1": {"temperature": 1.0}, "T=0.7": {"temperature": 0.7}, "T=1, top-p 0.9": {"top_p": 0.9}}
SIZES = {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8}
SIZES |= {"num_attention_heads": 8, "num_key_value_heads": 8}
NORM_SCALE = 8.0  # scale of the random model's last norm
LIMIT = 64  # maximum number of tokens in a turn
PROMPT_LENGTH = 16  # tokens in a prompt of the random model


def checkpoint(name: str, directory: Path) -> Path:
    """Return a directory with the model and its tokenizer."""
    import torch

    from torchrl_rloo.embedded import warm_start

    if name == "embedded":
        return warm_start(seed=0)
    if name != "random":
        return Path(name)
    tokenizer = word_tokenizer(SIZES["vocab_size"])
    model = qwen2(tokenizer, **SIZES)
    with torch.no_grad():
        model.model.norm.weight.mul_(NORM_SCALE)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def make_prompts(name: str, tokenizer) -> list[list[int]]:
    """Return ids of addition problems, or of random words."""
    import torch

    from torchrl_rloo.data.templates import encode_prompt
    from torchrl_rloo.embedded import addition_prompts

    if name != "random":
        return [encode_prompt(tokenizer, row["query"]) for row in addition_prompts("test", size=REQUESTS.get(name, 16))]
    generator = torch.Generator().manual_seed(1)
    return torch.randint(8, SIZES["vocab_size"], (REQUESTS[name], PROMPT_LENGTH), generator=generator).tolist()


def sampled_rows(engine, prompts: list[list[int]], stop_ids: tuple[int, ...], setting: dict[str, float]):
    """Sample a turn after each prompt, and return the rows."""
    import torch
    from tensordict import TensorDict

    from torchrl_rloo.data import keys, stack_rows
    from torchrl_rloo.engines.base import Request
    from torchrl_rloo.functional import SamplingDistribution

    distribution = SamplingDistribution(**setting)
    requests = [Request(p, LIMIT, seed, distribution, stop_ids) for seed, p in enumerate(prompts)]
    rows = []
    for request, sample in zip(requests, engine.generate(requests), strict=True):
        before, n = len(request.prompt), len(sample.tokens)
        row = {
            keys.TOKENS: torch.tensor([*request.prompt, *sample.tokens]),
            keys.ACTION_MASK: torch.tensor([False] * before + [True] * n),
            keys.LOG_PROBS: torch.tensor([0.0] * before + sample.log_probs),
        }
        rows.append(TensorDict(row, []))
    return stack_rows(rows)


def measure(name: str, path: Path, sampling: list[str]) -> Iterator[dict[str, Any]]:
    """Yield one line of the table for each engine, setting and trainer."""
    from torchrl_rloo.data import keys
    from torchrl_rloo.data.rows import gather_actions, ragged
    from torchrl_rloo.diagnostics.parity import log_prob_gap
    from torchrl_rloo.engines.vllm_inprocess import VLLMEngine
    from torchrl_rloo.modules import TransformersWrapper, load_model

    trainers = {dtype: load_model(path, dtype=dtype) for dtype in DTYPES}
    tokenizer = trainers["float32"][1]
    prompts = make_prompts(name, tokenizer)
    stop_ids = (tokenizer.eos_token_id,) if name != "random" else ()
    for engine_name, arguments in ENGINES.items():
        with VLLMEngine(path, max_model_len=256, **arguments) as engine:
            labels = ["T=1"] if engine_name == FLOAT32_HEAD else sampling
            batches = {label: sampled_rows(engine, prompts, stop_ids, SETTINGS[label]) for label in labels}
        for label, rows in batches.items():
            for dtype, (model, _) in trainers.items():
                kwargs = SETTINGS[label]
                scored = TransformersWrapper(model, tokenizer=tokenizer, generate=False, generate_kwargs=kwargs).score(
                    rows
                )
                sampler = gather_actions(ragged(rows, keys.LOG_PROBS), scored.actions)
                gap = log_prob_gap(sampler, scored.log_probs, scored.actions.mask)
                tokens = int(scored.actions.mask.sum())
                line = {"engine": engine_name, "trainer": dtype, "sampling": label, "tokens": tokens}
                yield line | {k: float(v) for k, v in gap._asdict().items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(REQUESTS), help="embedded, random, or folders of models")
    parser.add_argument("--sampling", nargs="+", choices=SETTINGS, default=list(SETTINGS), help="distributions")
    args = parser.parse_args()
    os.environ.update(ONE_THREAD | OFFLINE | {"VLLM_LOGGING_LEVEL": "ERROR"})  # must be set before torch is imported
    import torch

    results = {}
    with tempfile.TemporaryDirectory() as directory:
        for name in args.models:
            path = checkpoint(name, Path(directory))
            with torch.no_grad():
                results[name] = list(measure(name, path, args.sampling))
            turns = REQUESTS.get(name, 16)
            print_table(f"{name}: {turns} turns of at most {LIMIT} tokens; gaps in nats", results[name])
    print_result(results)


if __name__ == "__main__":
    main()
