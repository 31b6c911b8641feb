"""Asynchronous RLOO with vLLM and bounded staleness, in one file: a start for a loop of your own.

    python tutorials/minimal_async.py                          vLLM in this process, the built-in task and model
    python tutorials/minimal_async.py --max-staleness 0        sampling and training alternate
    torchrl-rloo serve MODEL --dtype float32                   in another terminal, on other cores or GPUs; then
    python tutorials/minimal_async.py --model MODEL --server http://127.0.0.1:8000

vLLM samples the next batch in a background thread while the loop trains on the last one. Each weight update has a new
version, and every token has the version that sampled it. No token is trained on that is more than `--max-staleness`
versions old. The loss weighs each row by its probability under the trained model, over that under the sampler.

Measured on two CPU cores, with other load, after the warm start: 60 steps take 45 s, of which 15 s start vLLM. The mean
reward of ten steps grows from 0.33, 0.28 and 0.30 to 0.75, 0.75 and 0.77 (seeds 0, 1, 2). Sampling ahead cuts the wait
from 0.24 to 0.07 s a step. It does not cut the step (0.38 and 0.43 s), since both sides share a Python process. With a
server of one thread a step takes 0.65 s instead of 0.89 s.
"""

import argparse
import os
import time
from contextlib import ExitStack

# Set before torch and vLLM are imported: with one thread each, sampler and trainer do not spin on each other's cores
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from torchrl.data import ReplayBuffer, SamplerWithoutReplacement

from torchrl_rloo.collectors import LLMCollector, token_staleness
from torchrl_rloo.data import load_prompts, tensor_rows
from torchrl_rloo.embedded import addition_prompts, warm_start
from torchrl_rloo.engines import VLLMEngine, VLLMServer
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.modules import load_model, vLLMWrapper
from torchrl_rloo.objectives import RLOOLoss
from torchrl_rloo.replay import MCAdvantage, RowStorage
from torchrl_rloo.rewards import boxed_accuracy
from torchrl_rloo.training import accumulate, optimizer_step
from torchrl_rloo.weight_update import WeightPublisher

PROMPTS, COMPLETIONS, MAX_NEW_TOKENS = 16, 8, 32  # of a step
MICRO_BATCH, LEARNING_RATE, MAX_GRAD_NORM = 64, 3e-4, 1.0


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory or hub id; default: the built-in model, warm-started")
    parser.add_argument("--server", help="address of a vLLM server of that model; default: vLLM in this process")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps (default: 60)")
    parser.add_argument("--max-staleness", type=int, default=1, help="age of a trained token, in updates (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="seed of prompts, samples and shuffling (default: 0)")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.manual_seed(args.seed)
    with ExitStack() as stack:  # closes what follows in reverse order, also after an error or Ctrl-C
        # Model and data; replace the prompts and the reward function by yours
        name = args.model or warm_start(seed=0, log=print)
        model, tokenizer = load_model(name)
        prompts = load_prompts(addition_prompts("train"))
        env = DatasetChatEnv(
            prompts,
            tokenizer,
            prompts_per_batch=PROMPTS,
            num_generations=COMPLETIONS,
            rewards=boxed_accuracy,
            seed=args.seed,
        )

        # Sampling: an engine with separate weights, and a collector that keeps it busy while the loop trains
        engine = stack.enter_context(VLLMServer(args.server) if args.server else VLLMEngine(name, dtype="float32"))
        policy = vLLMWrapper(
            engine, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": MAX_NEW_TOKENS, "seed": args.seed}
        )
        updater = WeightPublisher(model, engine)
        stack.callback(updater.close)
        collector = LLMCollector(env, policy, weight_updater=updater, max_staleness=args.max_staleness)
        stack.callback(collector.shutdown)

        # Learning: leave-one-out advantages as rows enter the buffer, one loss, one optimizer
        buffer = ReplayBuffer(
            storage=RowStorage(),
            sampler=SamplerWithoutReplacement(),
            transform=MCAdvantage(),
            batch_size=PROMPTS * COMPLETIONS,
        )
        loss_fn = RLOOLoss(policy.get_new_version(model=model, generate=False))
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0)

        for step in range(args.steps):
            start = time.monotonic()
            rows = collector.collect()  # 1. take whole groups, most of which were sampled during the last step
            waited = time.monotonic() - start
            ages = token_staleness(rows, collector.policy_version)
            buffer.extend(tensor_rows(rows))  # 2. compute advantages
            for batch in buffer:  # 3. optimize, while vLLM samples
                accumulate(loss_fn, batch, micro_batch_size=MICRO_BATCH)
                optimizer_step(model, optimizer, max_grad_norm=MAX_GRAD_NORM)
            buffer.empty()
            collector.update_policy_weights_()  # 4. publish the weights under the next version
            print(
                f"step {step}: reward {rows['next', 'rewards'].mean():.2f}, staleness {ages.float().mean():.2f} "
                f"(at most {ages.max()}), waited {waited:.2f} of {time.monotonic() - start:.2f} s",
                flush=True,
            )
        print(f"tokens beyond the bound, which the loss left out: {collector.counts.get('staleness/masked_tokens', 0)}")


if __name__ == "__main__":
    main()
