"""Rows per second of `RayLLMCollector` here and in TorchRL, on the same scripted turns.

    python benchmarks/bench_ray_torchrl.py                # one latency for all turns
    python benchmarks/bench_ray_torchrl.py --spread 1.0   # latencies with a heavy tail

A step samples groups of conversations of one turn, each of which sleeps for its latency and answers with the same ids.
TorchRL runs `LLMCollector` in one actor, with a wrapper of transformers whose model sleeps: all rows of a batch until
the last one ends. This toolkit has one rollout worker and one scripted engine. The driver gets the rows of both.
Latencies are lognormal with the same mean. Both sides alternate in one run.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from common import ONE_THREAD, local_ray, print_result, print_table
from tensordict import TensorDict, TensorDictBase, set_list_to_stack
from torchrl.collectors.llm import RayLLMCollector as TorchRLCollector
from torchrl.envs.llm import DatasetChatEnv as TorchRLEnv
from torchrl.modules.llm import TransformersWrapper as TorchRLWrapper

from torchrl_rloo.data import keys, load_prompts
from torchrl_rloo.embedded import addition_prompts, build_model, build_tokenizer
from torchrl_rloo.engines import Request, ScriptedEngine, ScriptedTurn
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.modules import vLLMWrapper
from torchrl_rloo.ray import RayLLMCollector

SIZE, TOKENS = 8, 16


def latency_of(number: int, mean: float, spread: float) -> float:
    """Return the seconds of a turn, lognormal around a mean."""
    return mean * random.Random(number).lognormvariate(-(spread**2) / 2, spread)


def reward(prompts: Any, completions: Any, completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [float(sum(ids) % 7) for ids in completion_ids]


# This toolkit


def play(mean: float, spread: float, request: Request, index: int) -> ScriptedTurn:
    answer = [5] * (TOKENS - 1) + [request.stop_ids[0]]
    return ScriptedTurn(answer, latency=latency_of(request.seed, mean, spread))


def make_policy(mean: float, spread: float) -> vLLMWrapper:
    engine = ScriptedEngine(partial(play, mean, spread))
    return vLLMWrapper(engine, tokenizer=build_tokenizer(), generate_kwargs={"max_new_tokens": TOKENS, "seed": 0})


def make_env(groups: int) -> DatasetChatEnv:
    prompts = load_prompts(addition_prompts("train", size=512))
    return DatasetChatEnv(
        prompts, build_tokenizer(), prompts_per_batch=groups, num_generations=SIZE, rewards=reward, seed=0
    )


def ours(groups: int, mean: float, spread: float) -> tuple[Callable[[], int], Callable[[], None]]:
    """Return a function that collects a batch and returns its rows, and one that ends the collector."""
    factory = partial(make_policy, mean, spread)
    collector = RayLLMCollector(partial(make_env, groups), policy_factory=factory, num_workers=1)

    def step() -> int:
        rows = collector.collect()
        return sum(len(row[keys.TOKENS]) > 0 for row in rows.unbind(0))

    return step, collector.shutdown


# TorchRL


class SleepingModel(torch.nn.Module):
    """Model of TorchRL's side, whose turns sleep together until the longest ends."""

    def __init__(self, mean: float, spread: float):
        super().__init__()
        tokenizer = build_tokenizer()
        self.inner, self.end, self.turns = build_model(tokenizer, seed=0), tokenizer.eos_token_id, 0
        self.mean, self.spread, self.config = mean, spread, self.inner.config
        self.generation_config, self.device = self.inner.generation_config, torch.device("cpu")

    def generate(self, input_ids: torch.Tensor, **kwargs: Any) -> dict[str, Any]:
        rows = len(input_ids)
        time.sleep(max(latency_of(self.turns + i, self.mean, self.spread) for i in range(rows)))
        self.turns += rows
        answer = torch.tensor([5] * (TOKENS - 1) + [self.end]).expand(rows, -1)
        logits = torch.zeros(rows, self.config.vocab_size)
        return {"sequences": torch.cat([input_ids, answer], 1), "logits": (logits,) * TOKENS}


def make_torchrl_policy(mean: float, spread: float) -> TorchRLWrapper:
    tokenizer = build_tokenizer()
    return TorchRLWrapper(
        SleepingModel(mean, spread),
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
        generate_kwargs={"max_new_tokens": TOKENS},
    )


def collate(batch: list[dict[str, Any]]) -> TensorDictBase:
    return torch.stack([TensorDict.from_dict(row) for row in batch])


def make_torchrl_env(groups: int) -> Any:
    from bench_overhead import _Reward  # here, since an actor unpickles this function

    set_list_to_stack(True).set()
    prompts = addition_prompts("train", size=512)
    rows = [{"query": p["query"][1]["content"], "answer": p["answer"]} for p in prompts]
    loader = torch.utils.data.DataLoader(rows, batch_size=1, collate_fn=collate)
    env = TorchRLEnv.from_dataloader(
        loader, repeats=SIZE, batch_size=(groups * SIZE,), tokenizer=build_tokenizer(), input_mode="history"
    )
    return env.append_transform(_Reward(reward))


def torchrl(groups: int, mean: float, spread: float) -> tuple[Callable[[], int], Callable[[], None]]:
    """Return the same for TorchRL."""
    rows = groups * SIZE
    collector = TorchRLCollector(
        partial(make_torchrl_env, groups),
        policy_factory=partial(make_torchrl_policy, mean, spread),
        dialog_turns_per_batch=rows,
        flatten_data=True,
        remote_config={"num_cpus": 1},
    )

    def step() -> int:
        return len(collector.next())

    return step, collector.shutdown


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=8, help="groups of 8 rows in a step")
    parser.add_argument("--latency", type=float, default=0.2, help="mean seconds of a turn")
    parser.add_argument("--spread", type=float, default=0.0, help="standard deviation of the logarithm of the seconds")
    parser.add_argument("--steps", type=int, default=10, help="measured steps of each side")
    args = parser.parse_args()
    os.environ.update(ONE_THREAD)
    torch.set_num_threads(1)
    with local_ray(4):
        sides = {"here": ours, "TorchRL": torchrl}
        made = {name: make(args.groups, args.latency, args.spread) for name, make in sides.items()}
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for step in range(2 + args.steps):
            for name, (collect, _) in made.items():
                began = time.monotonic()
                rows = collect()
                if rows != args.groups * SIZE:
                    raise RuntimeError(f"{name} delivered {rows} rows, not {args.groups * SIZE}")
                if step >= 2:
                    seconds[name].append(time.monotonic() - began)
        for _, end in made.values():
            end()
    table = [
        {"side": name, "rows/s": args.groups * SIZE / median(found), "median s a step": median(found)}
        for name, found in seconds.items()
    ]
    for row in table:
        row["relative to TorchRL"] = row["rows/s"] / table[1]["rows/s"]
    print_table(f"{args.groups * SIZE} rows a step, turns of {args.latency:g} s, spread {args.spread:g}", table)
    print_result({"rows": table})


if __name__ == "__main__":
    main()
