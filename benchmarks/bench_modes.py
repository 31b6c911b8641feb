"""Training steps per second of four modes on one heavy-tailed load, over Ray and in simulation.

    python benchmarks/bench_modes.py                      # three seeds, about ten minutes
    python benchmarks/bench_modes.py --seeds 0 --quick    # a minute; the figures mean little

The load stands for agents with tools on a model of 7 billion parameters. Turns, tokens of a turn and latencies of tools
are lognormal: 4 turns on average and 16 at most, 750 tokens (99 % quantile 4,096, at most 8,192) at 50 tokens a second,
and 2 s a tool (99 % quantile 20 s, at most 60 s). All conversations of a batch run at once, as with 128 rows a GPU in
published runs. Training takes 30 % of an on-policy step, since published runs report that rollouts take 70 % of it.

The collector, its workers, the engines' actors and the weight updates are real. Engines and tools sleep, and the
trainer as well; time runs 100 times faster, and one scripted token stands for 25. The simulation has the same
conversations, turn by turn.

Modes: ``sync`` is on-policy. ``one-step-off`` samples the next batch while it trains. ``async`` allows more staleness;
an update waits for the turns in flight. ``partial`` lets them continue under the new weights.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from random import Random
from statistics import mean
from typing import Any

import torch
from common import ONE_THREAD, cpu_seconds, local_ray, print_result, print_table
from simulate_cluster import ClusterSettings, Distribution, EngineSpeed, Load, Mode, Turn, modes, simulate

from torchrl_rloo.collectors.conversation import _hash  # to know the seeds of all conversations
from torchrl_rloo.data import keys, load_prompts
from torchrl_rloo.data.metadata import version_counts
from torchrl_rloo.embedded import addition_prompts, build_tokenizer
from torchrl_rloo.engines import EnginePool, Request, ScriptedEngine, ScriptedTurn
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.envs.turn_transform import TurnTransform
from torchrl_rloo.modules import vLLMWrapper
from torchrl_rloo.modules.vllm_policy import _derive_seed
from torchrl_rloo.ray import RayEngine, RayLLMCollector, start_together
from torchrl_rloo.weight_update import WeightPublisher

TURNS, TOKENS = Distribution(4.0, p99=16.0, maximum=16.0), Distribution(750.0, p99=4096.0, maximum=8192.0)
TOOL_SECONDS = Distribution(2.0, p99=20.0, maximum=60.0)
TOKENS_PER_SECOND, MERGED, FASTER = 50.0, 25, 100.0  # of one stream; tokens of a scripted one; virtual seconds a second
ENGINES, GROUPS, SIZE, WORKERS = 4, 16, 8, 2
SLOTS = GROUPS * SIZE // ENGINES
IN_FLIGHT = GROUPS * SIZE * 5 // 4  # a few more conversations than slots, since some wait for tools
ROLLOUT_SHARE = 0.7  # of an on-policy step


def turns_of(seed: int) -> int:
    """Return the number of turns of a conversation."""
    return max(1, round(TURNS.sample(Random(f"turns {seed}"))))


def tokens_of(seed: int) -> int:
    """Return the number of scripted tokens of a turn."""
    return max(1, round(TOKENS.sample(Random(f"tokens {seed}")) / MERGED))


def tool_seconds_of(seed: int, turn: int) -> float:
    """Return the latency of the tool after a turn, in virtual seconds."""
    return TOOL_SECONDS.sample(Random(f"tool {seed} {turn}"))


def seeded_load(run_seed: int) -> Load:
    """Return the conversations of the collector with this seed, in scripted tokens."""

    def conversation(group_id: int, member: int) -> list[Turn]:
        seed, done, turns = _hash(run_seed, group_id, member), 0, []
        number = turns_of(seed)
        for turn in range(1, number + 1):
            tokens = tokens_of(_derive_seed(seed, done))
            turns.append(Turn(0.0, 0.0, tokens, tool_seconds_of(seed, turn) if turn < number else 0.0))
            done += tokens
        return turns

    return conversation


class Tool(TurnTransform):
    """Transform that answers each turn but the last after the latency of a tool."""

    async def step_row(self, row, next_row) -> None:
        seed, turn = int(row[keys.SEED]), int(next_row[keys.NUM_TURNS])
        if turn < turns_of(seed):
            await asyncio.sleep(tool_seconds_of(seed, turn) / FASTER)
            self.chat_env.continue_row(next_row, [{"role": "user", "content": "Go on."}])


def reward(completions, **columns: Any) -> list[float]:
    return [0.0] * len(completions)


def play(request: Request, index: int) -> ScriptedTurn:
    tokens = tokens_of(request.seed)
    end = request.stop_ids[0] if request.stop_ids else 0
    return ScriptedTurn([5] * (tokens - 1) + [end], latency=tokens * MERGED / TOKENS_PER_SECOND / FASTER)


def make_engine() -> ScriptedEngine:
    return ScriptedEngine(play, max_concurrency=SLOTS)


def run(mode: Mode, engines: list[RayEngine], train: float, seed: int, steps: int, warmup: int) -> dict[str, float]:
    """Run the loop of a user, and return its figures in virtual seconds."""
    tokenizer = build_tokenizer()
    env = DatasetChatEnv(
        load_prompts(addition_prompts("train", size=512)),
        tokenizer,
        prompts_per_batch=GROUPS,
        num_generations=SIZE,
        rewards=reward,
        transforms=[Tool()],
    )
    pool = EnginePool(engines)
    policy = vLLMWrapper(pool, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 400, "seed": seed})
    publisher = WeightPublisher(torch.nn.Linear(4, 4), pool, in_flight=mode.in_flight)
    staleness = {"max_staleness": mode.max_staleness, "on_stale": mode.on_stale} if mode.max_staleness else {}
    collector = RayLLMCollector(
        env,
        policy,
        num_workers=WORKERS,
        max_in_flight=IN_FLIGHT // WORKERS,  # of each worker
        weight_updater=publisher,
        seed=seed,
        **staleness,
    )
    ages: Counter[int] = Counter()
    waited = pushed = 0.0
    for step in range(warmup + steps):
        if step == warmup:
            began, cpu, waited, pushed = time.monotonic(), cpu_seconds(), 0.0, 0.0
            ages.clear()
        asked = time.monotonic()
        references = collector.collect_references()
        waited += time.monotonic() - asked
        for row in references.metadata.unbind(0):
            for version, tokens in version_counts(row).tolist():
                ages[collector.policy_version - version] += tokens
        time.sleep(train / FASTER)
        asked = time.monotonic()
        collector.update_policy_weights_()
        pushed += time.monotonic() - asked
    seconds, cpu = time.monotonic() - began, cpu_seconds() - cpu
    collector.shutdown()
    pool.supervisor.stop()
    masked = sum(n for age, n in ages.items() if mode.max_staleness is not None and age > mode.max_staleness)
    return {
        "step s": seconds * FASTER / steps,
        "waits": waited / seconds,
        "pushes": pushed / seconds,
        "staleness": sum(age * n for age, n in ages.items()) / ages.total(),
        "masked": masked / ages.total(),
        "driver CPU": cpu / seconds,
    }


def settings_of(seed: int, max_staleness: int) -> ClusterSettings:
    """Return the simulated cluster, whose training takes its share of an on-policy step."""
    cluster = ClusterSettings(
        seeded_load(seed),
        ENGINES,
        EngineSpeed(TOKENS_PER_SECOND / MERGED, max_running=SLOTS),
        GROUPS,
        SIZE,
        still_seconds=2.0,
        commit_at_once=1,  # one engine after the other, as the publisher does
        max_in_flight=IN_FLIGHT,
    )
    steps = 12
    rollout = simulate(cluster, steps, warmup=0).seconds / steps
    return replace(cluster, train_seconds=rollout * (1 - ROLLOUT_SHARE) / ROLLOUT_SHARE)


def compare(engines: list[RayEngine], seed: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    cluster, table = settings_of(seed, args.staleness), []
    for name, mode in modes(args.staleness).items():
        real = run(mode, engines, cluster.train_seconds, seed, args.steps, args.warmup)
        simulated = simulate(replace(cluster, mode=mode), args.steps, warmup=args.warmup)
        row = {"seed": seed, "mode": name, "step s": real["step s"], "simulated": simulated.seconds / args.steps}
        first = table[0] if table else row
        row |= {"speed": first["step s"] / row["step s"], "simulated speed": first["simulated"] / row["simulated"]}
        row |= {"trains": cluster.train_seconds / real["step s"]}
        table.append(row | {k: v for k, v in real.items() if k != "step s"})
    return table


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--staleness", type=int, default=2, help="bound of the last two modes")
    parser.add_argument("--steps", type=int, default=10, help="measured steps")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them")
    parser.add_argument("--quick", action="store_true", help="smallest size of everything")
    args = parser.parse_args()
    if args.quick:
        args.steps, args.warmup = 2, 1
    os.environ.update(ONE_THREAD)
    torch.set_num_threads(1)
    table: list[dict[str, Any]] = []
    with local_ray(ENGINES + WORKERS):
        engines = start_together([partial(RayEngine, make_engine)] * ENGINES)
        for seed in args.seeds:
            part = compare(engines, seed, args)
            print_table(f"Seed {seed}; seconds are virtual", part)
            table += part
        for engine in engines:
            engine.close()
    summary = [
        {
            "mode": name,
            "speed": mean(row["speed"] for row in table if row["mode"] == name),
            "lowest": min(row["speed"] for row in table if row["mode"] == name),
            "highest": max(row["speed"] for row in table if row["mode"] == name),
            "simulated speed": mean(row["simulated speed"] for row in table if row["mode"] == name),
        }
        for name in modes(args.staleness)
    ]
    print_table("Steps a second relative to sync, over the seeds", summary)
    print_result({"runs": table, "summary": summary})


if __name__ == "__main__":
    main()
