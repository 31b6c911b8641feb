"""Tokens per second of the rollout phase: groups of completions of long prompts, with their log-probs.

    python benchmarks/bench_rollout.py                     # an 11M model
    python benchmarks/bench_rollout.py --size 110M

All sides sample the same prompts from the same weights one after the other, in float32 with one thread per process.
Every completion has the full length. Sides with vLLM in this process share one engine, whose prefix cache is emptied
before each side's turn.
"""

from __future__ import annotations

import argparse
import os

# Set before torch is imported, since OpenMP threads of vLLM's kernels spin while they wait
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import tempfile
import time
from collections.abc import Callable
from statistics import median

import torch
from common import print_table
from tensordict import TensorDict
from torchrl.modules.llm.policies import vLLMWrapper as TorchRLvLLMWrapper
from transformers import Qwen2Config, Qwen2ForCausalLM

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


def sides(model, directory: str, args: argparse.Namespace) -> tuple[dict[str, Callable], VLLMEngine, AsyncVLLMEngine]:
    """Return a sampler for each side, and the engines to close.

    A sampler samples ``G`` completions of each prompt ``[P, L]`` and returns the number of sampled tokens.
    """
    tokenizer = build_tokenizer()
    settings = {"dtype": "float32", "max_model_len": args.prompt + args.new, "kv_cache_memory_bytes": 2 << 30}
    engine, process = VLLMEngine(directory, **settings), AsyncVLLMEngine(directory, **settings)
    kwargs = {"max_new_tokens": args.new, "ignore_eos": True, "seed": 0}

    def ours(policy) -> Callable[[torch.Tensor], int]:
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
            engine.llm,
            tokenizer=tokenizer,
            input_mode="tokens",
            return_log_probs=True,
            num_samples=num_samples,
            generate_kwargs={"max_tokens": args.new, "ignore_eos": True},
        )

        def sample(prompts: torch.Tensor) -> int:
            prompts = prompts if num_samples else prompts.repeat_interleave(args.generations, 0)
            rows = stack_rows([TensorDict({keys.PROMPT_TOKENS: p}, []) for p in prompts])
            with torch.no_grad():
                out = policy(rows)
            return sum(len(t) for t in out.reshape(-1).get(keys.RESPONSE_TOKENS, as_list=True))

        return sample

    made = {
        "ours, vLLM in process": ours(vLLMWrapper(engine, tokenizer=tokenizer, generate_kwargs=kwargs)),
        "ours, vLLM in its own process": ours(vLLMWrapper(process, tokenizer=tokenizer, generate_kwargs=kwargs)),
        "ours, TransformersWrapper": ours(TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs=kwargs)),
        "transformers generate": hugging_face,
        "TorchRL vLLMWrapper, rows repeated": torchrl(None),
        "TorchRL vLLMWrapper, num_samples": torchrl(args.generations),
    }
    return made, engine, process


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="11M", help="number of parameters of the model")
    parser.add_argument("--prompts", type=int, default=8, help="prompts in a round")
    parser.add_argument("--generations", type=int, default=8, help="completions of each prompt")
    parser.add_argument("--prompt", type=int, default=400, help="tokens in a prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens in a completion")
    parser.add_argument("--rounds", type=int, default=5, help="rounds, after one warm-up round")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = build(args.size)
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        build_tokenizer().save_pretrained(directory)
        candidates, engine, process = sides(model, directory, args)
        rates: dict[str, list[float]] = {name: [] for name in candidates}
        with engine, process:
            for round_ in range(args.rounds + 1):
                prompts = torch.randint(1, model.config.vocab_size, (args.prompts, args.prompt))
                for name, sample in candidates.items():
                    engine.llm.reset_prefix_cache()
                    start = time.perf_counter()
                    tokens = sample(prompts)
                    seconds = time.perf_counter() - start
                    assert tokens == args.prompts * args.generations * args.new, f"{name} sampled {tokens} tokens"
                    if round_:
                        rates[name].append(tokens / seconds)
    base = rates["TorchRL vLLMWrapper, rows repeated"]
    print_table(
        f"{args.size}, {args.prompts} prompts of {args.prompt} tokens x {args.generations} x {args.new} tokens",
        [
            {
                "side": name,
                "tokens/s": median(r),
                "range": f"{min(r):.0f}-{max(r):.0f}",
                "of TorchRL's": median(a / b for a, b in zip(r, base, strict=True)),
            }
            for name, r in rates.items()
        ],
    )


if __name__ == "__main__":
    main()
