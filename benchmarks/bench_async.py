"""Utilization of an engine by multi-turn conversations, and the cost of a conversation.

    python benchmarks/bench_async.py                 # all parts, about ten minutes
    python benchmarks/bench_async.py --parts busy    # or scale, pool, real
    python benchmarks/bench_async.py --quick         # seconds; the figures mean nothing

- ``busy``: a scripted engine with 64 slots and Pareto-distributed latencies, and conversations of 1 to 8 turns. The
  figures are the share of slots that are busy over time (the ideal is 100 %) and the staleness of trained tokens.
- ``scale``: memory, threads and CPU time of 10,000 concurrent conversations.
- ``pool``: turns per CPU second with pools of 1 to 64 engines that answer at once.
- ``real``: the embedded model. TransformersWrapper samples its turns in batches, all together or as they are ready.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from threading import Thread, active_count
from typing import Any

import torch
from common import ONE_THREAD, cpu_seconds, print_result, print_table

from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.collectors.staleness import token_staleness
from torchrl_rloo.data import load_prompts
from torchrl_rloo.embedded import addition_prompts, build_model, build_tokenizer
from torchrl_rloo.engines import EnginePool, Sticky
from torchrl_rloo.engines.base import Request
from torchrl_rloo.engines.scripted import ScriptedEngine, ScriptedTurn
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.envs.turn_transform import TurnTransform
from torchrl_rloo.modules import TransformersWrapper, vLLMWrapper
from torchrl_rloo.weight_update import WeightUpdater

PLACES, GENERATIONS, MOST_TURNS = 64, 4, 8
TAIL = 2.0  # exponent of the Pareto distribution, whose variance is infinite


class Again(TurnTransform):
    """Transform that answers each turn at once, until the conversation has the number of turns in its prompt's row."""

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
    """Return a script of short turns with Pareto latencies of this mean, in seconds."""
    rng, tokens = random.Random(0), [*tokenizer("#### 12")["input_ids"], tokenizer.eos_token_id]
    return lambda request, index: ScriptedTurn(tokens, latency=pareto(rng, mean))


# Utilization of an engine


class Versions(WeightUpdater):
    """Updater that changes nothing but the engine's version."""

    def __init__(self, engine: ScriptedEngine):
        self.engine = engine

    def _send(self, version: int) -> None:
        self.engine.version = version


def busy(args: argparse.Namespace) -> list[dict[str, Any]]:
    tokenizer, groups = build_tokenizer(), PLACES // GENERATIONS
    batches = 1 if args.quick else args.batches
    table = [{"side": "ideal", "busy": 1.0, "turns/s": PLACES / args.latency}]
    table.append(torchrl_at_best(args.latency, 20 if args.quick else 5000))
    sides: list[dict[str, Any]] = [{"ahead": int(n * groups)} for n in args.ahead]
    # A few more conversations than slots, so that a slot is not free while its next turn is prepared
    most = {"max_in_flight": PLACES + PLACES // 4}
    sides += [{"max_staleness": n, "on_stale": how} | most for n in args.staleness for how in ("mask", "wait")]
    for kwargs in sides:
        with ScriptedEngine(play(args.latency, tokenizer), max_concurrency=PLACES) as engine:
            policy = vLLMWrapper(engine, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 16, "seed": 0})
            collector = LLMCollector(make_env(tokenizer, groups), policy, weight_updater=Versions(engine), **kwargs)
            for _ in range(1 if args.quick else 3):  # reach the steady state
                collector.collect()
                collector.update_policy_weights_()
            # Measure from one batch's delivery to another's
            engine.tick()
            before, start, cpu, turns = engine.request_seconds, time.monotonic(), cpu_seconds(), collector.dialog_turns
            staleness: Counter[int] = Counter()
            for _ in range(batches):
                rows = collector.collect()
                staleness.update(token_staleness(rows, collector.policy_version).tolist())
                time.sleep(args.train)
                collector.update_policy_weights_()
            engine.tick()
            seconds, turns = time.monotonic() - start, collector.dialog_turns - turns
            masked, tokens = collector.counts.get("staleness/masked_tokens", 0), sum(staleness.values())
            shares = [staleness[age] / tokens for age in range(max(staleness) + 1)]
            table.append(
                {
                    "side": " ".join(f"{k}={v}" for k, v in kwargs.items() if k != "max_in_flight"),
                    "busy": (engine.request_seconds - before) / (PLACES * seconds),
                    "turns/s": turns / seconds,
                    "tokens by staleness": " ".join(f"{age}: {share:.0%}" for age, share in enumerate(shares)),
                    "masked": f"{masked / (masked + collector.num_tokens):.1%}" if "max_staleness" in kwargs else None,
                    "CPU ms a turn": 1e3 * (cpu_seconds() - cpu) / turns,
                }
            )
            collector.shutdown()
    names = dict.fromkeys(name for row in table for name in row)
    return [{name: row.get(name) for name in names} for row in table]


def torchrl_at_best(mean: float, steps: int) -> dict[str, Any]:
    """Compute the best utilization of TorchRL's collector, which steps all slots together.

    Its environment (0.14.1) raises on conversations of unequal lengths, so this is only the schedule. Each finished
    conversation is replaced at once, and a step takes the time of its slowest request and nothing more.
    """
    rng = random.Random(0)
    latencies = [[pareto(rng, mean) for _ in range(PLACES)] for _ in range(steps)]
    seconds = sum(map(max, latencies))
    share = sum(map(sum, latencies)) / (PLACES * seconds)
    return {
        "side": "TorchRL's LLMCollector, at best",
        "busy": share,
        "turns/s": steps * PLACES / seconds,
    }


# Number of conversations


def scale(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure memory and threads while all conversations wait for the engine, and CPU time over all turns."""
    count, generations = (200, 8) if args.quick else (args.conversations, 8)
    tokenizer, now = build_tokenizer(), [0.0]
    turn = ScriptedTurn([*tokenizer("#### 12")["input_ids"], tokenizer.eos_token_id], latency=1.0)
    with ScriptedEngine(lambda request, index: turn, clock=lambda: now[0], request_timeout=1e9) as engine:
        policy = vLLMWrapper(engine, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 16, "seed": 0})
        collector = LLMCollector(make_env(tokenizer, count // generations, generations), policy)
        before, cpu = resident(), cpu_seconds()
        rows, memory, looking, threads = paced(collector, engine, now, count)
        row = {
            "conversations": len(rows),
            "turns": collector.dialog_turns,
            "CPU ms a turn": 1e3 * (cpu_seconds() - cpu - looking) / collector.dialog_turns,
            "KB a conversation": (memory - before) / 1e3 / count,
            "threads": threads,
        }
        del rows
        collector.shutdown()
    return [row]


# Pools


def pool(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure turns per CPU second with pools of engines that answer at once."""
    tokenizer, table = build_tokenizer(), []
    turn = ScriptedTurn([*tokenizer("#### 12")["input_ids"], tokenizer.eos_token_id])
    groups, sizes = (4, [None, 1, 2]) if args.quick else (256, [None, *args.pools])
    for size in sizes:
        engines = [ScriptedEngine(lambda request, index: turn) for _ in range(size or 1)]
        engine = engines[0] if size is None else EnginePool(engines, router=Sticky())
        with engine:
            policy = vLLMWrapper(engine, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 16, "seed": 0})
            collector = LLMCollector(make_env(tokenizer, groups), policy)
            collector.collect()
            cpu, turns = cpu_seconds(), collector.dialog_turns
            collector.collect()
            cpu, turns = cpu_seconds() - cpu, collector.dialog_turns - turns
            side = "one engine, no pool" if size is None else f"pool of {size}"
            table.append({"side": side, "turns": turns, "turns per CPU s": turns / cpu})
            collector.shutdown()
    return table


def paced(collector: LLMCollector, engine: ScriptedEngine, now: list[float], count: int) -> tuple[Any, int, float, int]:
    """Collect a batch whose turns end only once all conversations wait for the engine.

    Returns:
        The rows, the largest memory in bytes at such times, the CPU seconds of measuring it, and the most threads.
    """
    batches: list[Any] = []
    thread = Thread(target=lambda: batches.append(collector.collect()), daemon=True)
    thread.start()
    memory, looking, threads = 0, 0.0, 0
    while thread.is_alive():
        if len(engine.requests) == count - sum(list(collector.runner.ended_counts.values())) > 0:
            begin = time.thread_time()
            memory, threads = max(memory, resident()), max(threads, active_count())
            looking += time.thread_time() - begin
            engine.requests.clear()  # the engine keeps them for tests
            now[0] += 1.0
            engine.tick()
        time.sleep(0.02)
    return batches[0], memory, looking, threads


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


# A real model


def real(args: argparse.Namespace) -> list[dict[str, Any]]:
    tokenizer, table = build_tokenizer(), []
    model = build_model(tokenizer, seed=0).eval()
    groups, batches = PLACES // GENERATIONS, 1 if args.quick else args.batches
    for n in args.ahead:
        kwargs = {"ahead": int(n * groups)} | ({"max_in_flight": PLACES} if n else {})
        policy = TransformersWrapper(
            model, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 16, "ignore_eos": True, "seed": 0}
        )
        collector = LLMCollector(make_env(tokenizer, groups), policy, **kwargs)
        collector.collect()
        start, cpu, turns = time.monotonic(), cpu_seconds(), collector.dialog_turns
        for _ in range(batches):
            collector.collect()
        seconds, cpu, turns = time.monotonic() - start, cpu_seconds() - cpu, collector.dialog_turns - turns
        table.append(
            {
                "batches ahead": n,
                "tokens per CPU s": 16 * turns / cpu,
                "tokens/s": 16 * turns / seconds,
                "turns": turns,
            }
        )
        collector.shutdown()
    return table


PARTS = {"busy": busy, "scale": scale, "pool": pool, "real": real}
TITLES = {
    "busy": "An engine with 64 slots and Pareto latencies: share of busy slots",
    "scale": "Concurrent conversations",
    "pool": "Pools of engines that answer at once",
    "real": "The embedded model, 16 tokens a turn, conversations of 1 to 8 turns",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--latency", type=float, default=0.4, help="mean duration of a scripted request, in seconds")
    parser.add_argument("--batches", type=int, default=8, help="measured batches of 64 conversations per side")
    parser.add_argument("--ahead", type=float, nargs="+", default=[0, 1, 2, 3], help="batches sampled ahead")
    parser.add_argument("--staleness", type=int, nargs="+", default=[1, 2], help="values of max_staleness")
    parser.add_argument("--train", type=float, default=1.0, help="seconds between a batch and its update")
    parser.add_argument("--pools", type=int, nargs="+", default=[1, 4, 16, 64], help="numbers of engines in a pool")
    parser.add_argument("--conversations", type=int, default=10_000)
    parser.add_argument("--quick", action="store_true", help="smallest size of everything")
    args = parser.parse_args()
    if args.quick:
        args.latency, args.ahead, args.train = 0.01, [0, 1], 0.0
    os.environ.update(ONE_THREAD)
    torch.set_num_threads(1)
    figures = {}
    for name in args.parts:
        figures[name] = PARTS[name](args)
        print_table(TITLES[name], figures[name])
    print_result(figures)


if __name__ == "__main__":
    main()
