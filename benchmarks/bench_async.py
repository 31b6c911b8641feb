"""How busy an engine is kept by conversations of several turns, and what a conversation costs.

    python benchmarks/bench_async.py                 # all parts, about ten minutes
    python benchmarks/bench_async.py --parts busy    # or scale, or real
    python benchmarks/bench_async.py --quick         # seconds, figures of no worth

``busy``: an engine that plays a script, 64 requests at a time, each as long as a Pareto variable says; conversations of
1 to 8 turns. The figure is the share of the engine's places that are busy over time, 100 % being the ideal.
``scale``: 10,000 conversations at once, memory and CPU time of each. ``real``: the embedded model, whose turns
TransformersWrapper samples in batches, in lock-step and as conversations become ready.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from common import ONE_THREAD, cpu_seconds, print_result, print_table

from torchrl_rloo.collectors import AsyncLLMCollector, LLMCollector
from torchrl_rloo.data import load_prompts
from torchrl_rloo.embedded import addition_prompts, build_model, build_tokenizer
from torchrl_rloo.engines.base import Request
from torchrl_rloo.engines.scripted import ScriptedEngine, ScriptedTurn
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.envs.turn_transform import TurnTransform
from torchrl_rloo.modules import TransformersWrapper, vLLMWrapper

PLACES, GENERATIONS, MOST_TURNS = 64, 4, 8
TAIL = 2.0  # exponent of the Pareto distribution: its variance is infinite


class Again(TurnTransform):
    """Answers each turn at once, until the conversation has had as many as its prompt says."""

    async def step_row(self, row, next_row) -> None:
        if int(next_row["num_turns"]) < row["turns"]:
            self.chat_env.continue_row(next_row, [{"role": "user", "content": "Are you sure?"}])


def reward(completions, **columns: Any) -> list[float]:
    return [float(len(c)) for c in completions]


def make_env(tokenizer, groups: int, generations: int = GENERATIONS) -> DatasetChatEnv:
    prompts = [{**p, "turns": 1 + i % MOST_TURNS} for i, p in enumerate(addition_prompts("train", size=512))]
    return DatasetChatEnv(
        load_prompts(prompts),
        tokenizer,
        prompts_per_batch=groups,
        num_generations=generations,
        rewards=reward,
        transforms=[Again()],
    )


def pareto(rng: random.Random, mean: float) -> float:
    return mean * (TAIL - 1) / TAIL * rng.paretovariate(TAIL)


def play(mean: float, tokenizer) -> Callable[[Request, int], ScriptedTurn]:
    """A script of short turns, with latencies of this mean in seconds."""
    rng, tokens = random.Random(0), [*tokenizer("#### 12")["input_ids"], tokenizer.eos_token_id]
    return lambda request, index: ScriptedTurn(tokens, latency=pareto(rng, mean))


# how busy an engine is


def busy(args: argparse.Namespace) -> list[dict[str, Any]]:
    tokenizer, groups = build_tokenizer(), PLACES // GENERATIONS
    batches = 1 if args.quick else args.batches
    table = [{"side": "ideal", "busy": 1.0, "turns/s": PLACES / args.latency, "batches ahead": None}]
    table.append(torchrl_at_best(args.latency, 20 if args.quick else 5000))
    sides = [("LLMCollector", LLMCollector, {})]
    sides += [("AsyncLLMCollector", AsyncLLMCollector, {"ahead": int(n * groups)}) for n in args.ahead]
    for name, cls, kwargs in sides:
        with ScriptedEngine(play(args.latency, tokenizer), max_concurrency=PLACES) as engine:
            policy = vLLMWrapper(engine, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 16, "seed": 0})
            collector = cls(make_env(tokenizer, groups), policy, **kwargs)
            if kwargs.get("ahead"):
                for _ in range(1 if args.quick else 3):  # up to the steady state
                    collector.collect()
            engine.tick()
            before, start, cpu, turns = engine.request_seconds, time.monotonic(), cpu_seconds(), collector.dialog_turns
            for _ in range(batches):
                collector.collect()
            engine.tick()
            seconds, turns = time.monotonic() - start, collector.dialog_turns - turns
            table.append(
                {
                    "side": name,
                    "busy": (engine.request_seconds - before) / (PLACES * seconds),
                    "turns/s": turns / seconds,
                    "batches ahead": kwargs["ahead"] / groups if kwargs else None,
                    "CPU ms a turn": 1e3 * (cpu_seconds() - cpu) / turns,
                }
            )
            collector.shutdown()
    for row in table:
        row.setdefault("CPU ms a turn", None)
    return table


def torchrl_at_best(mean: float, steps: int) -> dict[str, Any]:
    """TorchRL's collector steps all places together, each finished conversation replaced at once.

    Its environment (0.14.1) raises on conversations of unequal lengths, so this is the schedule alone, with no time for
    anything but the slowest of each step's requests.
    """
    rng = random.Random(0)
    latencies = [[pareto(rng, mean) for _ in range(PLACES)] for _ in range(steps)]
    seconds = sum(map(max, latencies))
    share = sum(map(sum, latencies)) / (PLACES * seconds)
    return {
        "side": "TorchRL's LLMCollector, at best",
        "busy": share,
        "turns/s": steps * PLACES / seconds,
        "batches ahead": None,
    }


# how many conversations


def scale(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Memory while all wait for the engine at their last turn, and CPU time over all turns."""
    count, generations = (200, 8) if args.quick else (args.conversations, 8)
    tokenizer, now, table = build_tokenizer(), [0.0], []
    tokens = [*tokenizer("#### 12")["input_ids"], tokenizer.eos_token_id]
    for name, cls in (("AsyncLLMCollector", AsyncLLMCollector), ("LLMCollector", LLMCollector)):
        lock_step = cls is LLMCollector
        turn = ScriptedTurn(tokens, latency=0.0 if lock_step else 1.0)
        with ScriptedEngine(lambda request, index, turn=turn: turn, clock=lambda: now[0]) as engine:
            policy = vLLMWrapper(engine, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 16, "seed": 0})
            collector = cls(make_env(tokenizer, count // generations, generations), policy)
            before, cpu, memory, looking = resident(), cpu_seconds(), None, 0.0
            if lock_step:
                rows = collector.collect()
            else:
                rows, memory, looking = paced(collector, engine, now, count)
            cpu = cpu_seconds() - cpu - looking
            table.append(
                {
                    "side": name,
                    "conversations": len(rows),
                    "turns": collector.dialog_turns,
                    "CPU us a turn": 1e6 * cpu / collector.dialog_turns,
                    "KB a conversation": None if memory is None else (memory - before) / 1e3 / count,
                }
            )
            del rows
            collector.shutdown()
    return table


def paced(collector: AsyncLLMCollector, engine: ScriptedEngine, now: list[float], count: int) -> tuple[Any, int, float]:
    """Collects a batch whose turns end only once all conversations wait.

    Returns:
        The rows, the largest memory at such times, and the CPU time of looking at it.
    """
    batches: list[Any] = []
    thread = Thread(target=lambda: batches.append(collector.collect()), daemon=True)
    thread.start()
    memory, looking = 0, 0.0
    while thread.is_alive():
        if len(engine.requests) == count - sum(list(collector.runner.ended.values())) > 0:
            begin = time.thread_time()
            memory = max(memory, resident())
            looking += time.thread_time() - begin
            engine.requests.clear()  # it keeps them for tests to look at
            now[0] += 1.0
            engine.tick()
        time.sleep(0.02)
    return batches[0], memory, looking


def resident() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


# a real model


def real(args: argparse.Namespace) -> list[dict[str, Any]]:
    tokenizer, table = build_tokenizer(), []
    model = build_model(tokenizer, seed=0).eval()
    groups, batches = PLACES // GENERATIONS, 1 if args.quick else args.batches
    sides = [("LLMCollector", LLMCollector, {})]
    sides += [
        ("AsyncLLMCollector", AsyncLLMCollector, {"ahead": int(n * groups), "max_in_flight": PLACES})
        for n in args.ahead
    ]
    for name, cls, kwargs in sides:
        policy = TransformersWrapper(
            model, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 16, "ignore_eos": True, "seed": 0}
        )
        collector = cls(make_env(tokenizer, groups), policy, **kwargs)
        collector.collect()
        start, cpu, turns = time.monotonic(), cpu_seconds(), collector.dialog_turns
        for _ in range(batches):
            collector.collect()
        seconds, cpu, turns = time.monotonic() - start, cpu_seconds() - cpu, collector.dialog_turns - turns
        table.append(
            {
                "side": name,
                "batches ahead": kwargs["ahead"] / groups if kwargs else None,
                "tokens per CPU s": 16 * turns / cpu,
                "tokens/s": 16 * turns / seconds,
                "turns": turns,
            }
        )
        collector.shutdown()
    return table


PARTS = {"busy": busy, "scale": scale, "real": real}
TITLES = {
    "busy": "An engine of 64 places, Pareto latencies: share of its places that is busy",
    "scale": "Conversations at once",
    "real": "The embedded model, 16 tokens a turn, conversations of 1 to 8 turns",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--latency", type=float, default=0.4, help="mean of a scripted request, seconds")
    parser.add_argument("--batches", type=int, default=8, help="measured batches of 64 conversations a side")
    parser.add_argument("--ahead", type=float, nargs="+", default=[0, 1, 2, 3], help="in batches")
    parser.add_argument("--conversations", type=int, default=10_000)
    parser.add_argument("--quick", action="store_true", help="the least of everything")
    args = parser.parse_args()
    if args.quick:
        args.latency, args.ahead = 0.01, [0, 1]
    os.environ.update(ONE_THREAD)
    torch.set_num_threads(1)
    figures = {}
    for name in args.parts:
        figures[name] = PARTS[name](args)
        print_table(TITLES[name], figures[name])
    print_result(figures)


if __name__ == "__main__":
    main()
