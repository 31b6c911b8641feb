"""Tokens per second of the rollout phase: groups of completions of long prompts, with their log-probs.

    python benchmarks/bench_rollout.py                     # an 11M model
    python benchmarks/bench_rollout.py --size 110M
    python benchmarks/bench_rollout.py --model FOLDER --sides "own process" TransformersWrapper --prompt 40 --new 6

All sides sample the same prompts from the same weights one after the other, in float32 with one thread per process.
Every completion has the full length. Sides with vLLM in this process share one engine, whose prefix cache is emptied
before each side's turn. CPU seconds are of this process and of the engine's.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os

# Set before torch is imported, since OpenMP threads of vLLM's kernels spin while they wait
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from statistics import median

import torch
from common import cpu_seconds, print_table
from tensordict import TensorDict
from torchrl.modules.llm.policies import vLLMWrapper as TorchRLvLLMWrapper
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import ragged, stack_rows
from torchrl_rloo.embedded import build_tokenizer
from torchrl_rloo.engines import AsyncVLLMEngine, VLLMEngine
from torchrl_rloo.modules import TransformersWrapper, vLLMWrapper

SIZES = {"11M": (4, 256, 512, 4, 32_000), "110M": (12, 768, 2048, 12, 32_000)}


def build(size: str) -> Qwen2ForCausalLM:
    layers, hidden, intermediate, heads, vocab = SIZES[size]
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    return Qwen2ForCausalLM(config).eval()


def sides(model, directory: str, args: argparse.Namespace, stack: ExitStack) -> dict[str, Callable[[], Callable]]:
    """Return functions that make the samplers of the sides; ``stack`` closes their engines.

    A sampler samples ``G`` completions of each prompt ``[P, L]`` and returns the number of sampled tokens.
    """
    tokenizer = build_tokenizer()
    settings = {"dtype": "float32", "max_model_len": args.prompt + args.new, "kv_cache_memory_bytes": 2 << 30}

    @cache
    def engine(kind: type) -> VLLMEngine | AsyncVLLMEngine:
        return stack.enter_context(kind(directory, **settings))

    kwargs = {"max_new_tokens": args.new, "ignore_eos": True, "seed": 0}

    def ours(policy_class, sampler) -> Callable[[torch.Tensor], int]:
        policy = policy_class(sampler, tokenizer=tokenizer, generate_kwargs=kwargs)

        def sample(prompts: torch.Tensor) -> int:
            rows = [TensorDict({keys.PROMPT_TOKENS: p}, []) for p in prompts for _ in range(args.generations)]
            return sum(map(len, ragged(policy(stack_rows(rows)), keys.RESPONSE_TOKENS)))

        return sample

    def hugging_face(prompts: torch.Tensor) -> int:
        out = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            top_k=0,
            num_return_sequences=args.generations,
            min_new_tokens=args.new,
            max_new_tokens=args.new,
            return_dict_in_generate=True,
            output_logits=True,
            pad_token_id=0,
        )
        sampled = out.sequences[:, prompts.shape[1] :]
        for logits, tokens in zip(out.logits, sampled.T, strict=True):
            logits.log_softmax(-1).gather(1, tokens[:, None])
        return sampled.numel()

    def torchrl(num_samples: int | None) -> Callable[[torch.Tensor], int]:
        policy = TorchRLvLLMWrapper(
            engine(VLLMEngine).llm,
            tokenizer=tokenizer,
            input_mode="tokens",
            return_log_probs=True,
            num_samples=num_samples,
            generate_kwargs={"max_tokens": args.new, "ignore_eos": True},
        )

        def sample(prompts: torch.Tensor) -> int:
            prompts = prompts if num_samples else prompts.repeat_interleave(args.generations, 0)
            rows = stack_rows([TensorDict({keys.PROMPT_TOKENS: p}, []) for p in prompts])
            engine(VLLMEngine).llm.reset_prefix_cache()
            with torch.no_grad():
                out = policy(rows)
            return sum(len(t) for t in out.reshape(-1).get(keys.RESPONSE_TOKENS, as_list=True))

        return sample

    return {
        "ours, vLLM in process": lambda: ours(vLLMWrapper, engine(VLLMEngine)),
        "ours, vLLM in its own process": lambda: ours(vLLMWrapper, engine(AsyncVLLMEngine)),
        "ours, TransformersWrapper": lambda: ours(TransformersWrapper, model),
        "transformers generate": lambda: hugging_face,
        "TorchRL vLLMWrapper, num_samples": lambda: torchrl(args.generations),
        "TorchRL vLLMWrapper, rows repeated": lambda: torchrl(None),
    }


def all_cpu_seconds() -> float:
    """Return the CPU time of this process and of those that it started."""
    ticks, started = os.sysconf("SC_CLK_TCK"), multiprocessing.active_children()
    stats = [Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split() for child in started]
    return cpu_seconds() + sum(int(stat[11]) + int(stat[12]) for stat in stats) / ticks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="11M", help="number of parameters of the model")
    parser.add_argument("--model", metavar="FOLDER", help="a saved model, in place of a random one")
    parser.add_argument("--sides", nargs="+", default=[""], help="parts of the names of sides to measure")
    parser.add_argument("--prompts", type=int, default=8, help="prompts in a round")
    parser.add_argument("--generations", type=int, default=8, help="completions of each prompt")
    parser.add_argument("--prompt", type=int, default=400, help="tokens in a prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens in a completion")
    parser.add_argument("--rounds", type=int, default=5, help="rounds, after one warm-up round")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rates: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        if args.model:
            directory, model = args.model, AutoModelForCausalLM.from_pretrained(args.model, dtype="float32").eval()
        else:
            model = build(args.size)
            model.save_pretrained(directory)
            build_tokenizer().save_pretrained(directory)
        chosen = sides(model, directory, args, stack)
        candidates = {n: make() for n, make in chosen.items() if any(part in n for part in args.sides)}
        for round_ in range(args.rounds + 1):
            prompts = torch.randint(1, model.config.vocab_size, (args.prompts, args.prompt))
            for name, sample in candidates.items():
                start, cpu = time.perf_counter(), all_cpu_seconds()
                tokens = sample(prompts)
                seconds, cpu = time.perf_counter() - start, all_cpu_seconds() - cpu
                assert tokens == args.prompts * args.generations * args.new, f"{name} sampled {tokens} tokens"
                if round_:
                    rates.setdefault(name, []).append((tokens / seconds, tokens / cpu))
    base = [rate for rate, _ in [*rates.values()][-1]]
    print_table(
        f"{args.model or args.size}, {args.prompts} prompts of {args.prompt} tokens x {args.generations} x {args.new}",
        [
            {
                "side": name,
                "tokens/s": median(rate for rate, _ in pairs),
                "range": f"{min(pairs)[0]:.0f}-{max(pairs)[0]:.0f}",
                "tokens/CPU s": median(rate for _, rate in pairs),
                "ratio to the last": median(a / b for (a, _), b in zip(pairs, base, strict=True)),
            }
            for name, pairs in rates.items()
        ],
    )


if __name__ == "__main__":
    main()
