"""Turns per second of a cluster, CPU of its processes, and the way of a finished group to a rank.

    python benchmarks/bench_ray_throughput.py                            # 1, 4 and 16 engines
    python benchmarks/bench_ray_throughput.py --engines 16 --latency 0.125   # the load of 64 engines

Each engine is an actor with 8 places, whose turns sleep, so it could take 8 turns per latency: the ideal. Conversations
have 4 turns; groups have 8 conversations. Engines, rollout workers, the ledger and the collector are real. CPU times
are of all threads. ``way`` measures milliseconds from the score of a group's last row to its rows in the driver, one
group at a time.
"""

from __future__ import annotations

import argparse
import os
import time
from functools import partial
from statistics import quantiles
from typing import Any

import torch
from bench_ray_engines import cpu_of
from common import ONE_THREAD, cpu_seconds, local_ray, print_result, print_table

from torchrl_rloo.data import keys, load_prompts
from torchrl_rloo.embedded import addition_prompts, build_tokenizer
from torchrl_rloo.engines import EnginePool, Request, ScriptedEngine, ScriptedTurn
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.envs.turn_transform import TurnTransform
from torchrl_rloo.modules import vLLMWrapper
from torchrl_rloo.ray import RayEngine, RayLLMCollector, start_together

PLACES, SIZE, TURNS, TOKENS = 8, 8, 4, 16
CLOCK = 1000.0  # seconds after which a time stamp repeats, so that float32 has it to 0.1 ms


class Again(TurnTransform):
    """Transform that answers each turn but the last at once."""

    async def step_row(self, row, next_row) -> None:
        if int(next_row[keys.NUM_TURNS]) < TURNS:
            self.chat_env.continue_row(next_row, [{"role": "user", "content": "Go on."}])


def time_stamp(completions, **columns: Any) -> list[float]:
    """Return the time of the score as the reward."""
    return [time.time() % CLOCK] * len(completions)


def play(latency: float, request: Request, index: int) -> ScriptedTurn:
    return ScriptedTurn([5] * (TOKENS - 1) + [request.stop_ids[0]], latency=latency)


def make_engine(latency: float) -> ScriptedEngine:
    return ScriptedEngine(partial(play, latency), max_concurrency=PLACES)


def make_collector(pool: EnginePool, groups: int, workers: int, **settings: Any) -> RayLLMCollector:
    tokenizer = build_tokenizer()
    env = DatasetChatEnv(
        load_prompts(addition_prompts("train", size=512)),
        tokenizer,
        prompts_per_batch=groups,
        num_generations=SIZE,
        rewards=time_stamp,
        transforms=[Again()],
    )
    policy = vLLMWrapper(pool, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 32, "seed": 0})
    return RayLLMCollector(env, policy, num_workers=workers, **settings)


def measure(number: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return turns per second of a number of engines, and the CPU of all processes."""
    engines = start_together([partial(RayEngine, partial(make_engine, args.latency))] * number)
    pool = EnginePool(engines)
    collector = make_collector(pool, number, args.workers, max_staleness=2)
    collector.collect_references()
    while len(collector.runner.fleet.ready()) < args.workers:
        collector.collect_references()
    pids = {"workers": [worker.facts["pid"] for worker in collector.runner.fleet.workers]}
    pids["engines"] = [engine.pid for engine in engines]
    before = {name: sum(map(cpu_of, some)) for name, some in pids.items()}
    began, cpu, turns, groups = time.monotonic(), cpu_seconds(), 0, 0
    while time.monotonic() - began < args.seconds:
        references = collector.collect_references()
        turns += int(references.metadata[keys.NUM_TURNS].sum())
        groups += len(references.group_ids)
    seconds, cpu = time.monotonic() - began, cpu_seconds() - cpu
    spent = {name: sum(map(cpu_of, some)) - before[name] for name, some in pids.items()}
    collector.shutdown()
    pool.close()
    ideal = number * PLACES / args.latency
    return {
        "engines": number,
        "turns/s": turns / seconds,
        "of the ideal": turns / seconds / ideal,
        "driver CPU": cpu / seconds,
        "driver ms a group": 1e3 * cpu / groups,
        "workers ms a turn": 1e3 * spent["workers"] / turns,
        "engines ms a turn": 1e3 * spent["engines"] / turns,
        "all CPU": (cpu + sum(spent.values())) / seconds,
    }


def way(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return milliseconds from a group's score to its metadata and its rows."""
    engine = RayEngine(partial(make_engine, 0.01))
    pool = EnginePool([engine])
    collector = make_collector(pool, 1, 1)
    told, fetched = [], []
    for step in range(5 + args.groups):
        references = collector.collect_references()
        known = time.time()
        references.fetch()
        done = time.time()
        scored = float(references.metadata[keys.REWARD].max())
        if step >= 5:
            told.append(1e3 * ((known - scored) % CLOCK))
            fetched.append(1e3 * ((done - scored) % CLOCK))
    collector.shutdown()
    pool.close()
    table = []
    for name, values in {"metadata in the driver": told, "rows in the driver": fetched}.items():
        cuts = quantiles(values, n=10)
        table.append({"until": name, "median ms": cuts[4], "p90 ms": cuts[8]})
    return table


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=["turns", "way"], default=["turns", "way"])
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--workers", type=int, default=2, help="rollout workers")
    parser.add_argument("--latency", type=float, default=0.5, help="seconds of a turn")
    parser.add_argument("--seconds", type=float, default=15.0, help="measured time for each number of engines")
    parser.add_argument("--groups", type=int, default=50, help="groups of the part way")
    args = parser.parse_args()
    os.environ.update(ONE_THREAD)
    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    with local_ray(max(args.engines) + args.workers + 1):
        if "turns" in args.parts:
            figures["turns"] = []
            for number in args.engines:
                figures["turns"].append(measure(number, args))
                print_table(f"Turns of {args.latency:g} s, {args.workers} workers", figures["turns"][-1:])
        if "way" in args.parts:
            figures["way"] = way(args)
            print_table("From the score of a group to", figures["way"])
    print_result(figures)


if __name__ == "__main__":
    main()
