"""Simulated clusters: speed of the modes, the driver's limit, cost of the simulator and distance from the collector.

``modes`` compares four modes on one load with a heavy tail, each on its best split of 128 GPUs. ``driver`` grows the
number of engines until the driver is the limit. ``scale`` measures the CPU time of 1,024 engines and 100,000
conversations in flight. ``real`` compares a simulation with the collector over a scripted engine that sleeps.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import time
from typing import Any

import torch
from common import ONE_THREAD, cpu_seconds, print_result, print_table

from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import load_prompts
from torchrl_rloo.diagnostics import (
    GPUS,
    ClusterSettings,
    Distribution,
    EngineSpeed,
    Load,
    Mode,
    ModelCost,
    ProcessCosts,
    engine_speed,
    linear_rate,
    search_split,
    simulate,
    train_rate,
)
from torchrl_rloo.diagnostics.cluster_load import Turn
from torchrl_rloo.diagnostics.cluster_simulation import modes as all_modes
from torchrl_rloo.diagnostics.cluster_split import bottleneck
from torchrl_rloo.embedded import build_tokenizer
from torchrl_rloo.engines.base import Request
from torchrl_rloo.engines.scripted import ScriptedEngine, ScriptedTurn
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.modules import vLLMWrapper
from torchrl_rloo.weight_update import WeightUpdater

# 7.6 billion parameters, as of Qwen2.5-7B; answers of 3,000 tokens on average, the longest 16,384
MODEL = ModelCost(7.6e9, 7.6e9, kv_elements=28_672, layers=28, width=3584)
LOAD = Load(Distribution(3000.0, p99=16_384.0, maximum=16_384.0), prompt=Distribution(512.0))


def make(mode: Mode, groups: int, engines: int, trainer_gpus: int, **changes: Any) -> ClusterSettings:
    averages, gpu = LOAD.averages(), GPUS["H100"]
    settings = {
        "load": LOAD,
        "engines": engines,
        "speed": engine_speed(MODEL, gpu, 1, averages.context),
        "groups_per_batch": groups,
        "group_size": 16,
        "train_rate": trainer_gpus * train_rate(MODEL, gpu, averages.row),
        "transfer_seconds": 1.5,
        "still_seconds": 0.8,
        "mode": mode,
    }
    return ClusterSettings(**(settings | changes))


def modes(args: argparse.Namespace) -> list[dict[str, Any]]:
    gpus, groups, steps = (16, 8, 2) if args.quick else (args.gpus, args.groups, 4)
    table: list[dict[str, Any]] = []

    def add(name: str, engines: int, trainer_gpus: int, result: Any) -> None:
        first = table[0]["tokens/s"] if table else result.tokens_per_second
        table.append(
            {
                "mode": name,
                "engines + trainer GPUs": f"{engines} + {trainer_gpus}",
                "steps/h": result.steps_per_hour,
                "tokens/s": result.tokens_per_second,
                "speed": result.tokens_per_second / first,
                "engines busy": result.engine_busy,
                "running": result.running,
                "trainer busy": result.trainer_busy,
                "staleness": result.mean_staleness,
                "masked": result.masked_tokens / result.tokens,
            }
        )

    add("sync, same GPUs", gpus, gpus, simulate(make(Mode(), groups, gpus, gpus), steps, warmup=2))
    for name, mode in all_modes(args.staleness).items():
        splits = search_split(lambda e, t, mode=mode: make(mode, groups, e, t), gpus, 1, steps=steps, warmup=3)
        best = max(splits, key=lambda split: split.result.tokens_per_second)
        add(name, *best)
    return table


def driver(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Keep the trainer and the batch in proportion to the engines, so that only the driver's work grows."""
    table, load = [], Load(Distribution(200.0, p99=1000.0), prompt=Distribution(200.0))
    for engines in (4, 16) if args.quick else (16, 64, 256, 1024):
        settings = ClusterSettings(
            load,
            engines,
            EngineSpeed(linear_rate(60.0, 2000.0), prefill=3e4),
            groups_per_batch=2 * engines,
            group_size=8,
            train_rate=2500.0 * engines,
            still_seconds=0.5,
            mode=Mode(2, in_flight="continue"),
            costs=ProcessCosts(group_seconds=args.group_ms / 1e3, turn_seconds=1e-3, workers=engines),
        )
        result = simulate(settings, 4, warmup=3)
        table.append(
            {
                "engines": engines,
                "groups/s": settings.groups_per_batch * result.steps / result.seconds,
                "groups/s an engine": settings.groups_per_batch * result.steps / result.seconds / engines,
                "driver busy": result.driver_busy,
                "engines busy": result.engine_busy,
                "limit": bottleneck(result),
            }
        )
    return table


def scale(args: argparse.Namespace) -> list[dict[str, Any]]:
    engines, groups = (64, 128) if args.quick else (1024, 2500)
    table = []
    for on_stale in ("mask", "requeue"):
        mode = Mode(4, on_stale, in_flight="continue")
        settings = make(mode, groups, engines, engines, group_size=8)
        cpu = cpu_seconds()
        result = simulate(settings, 2, warmup=1)
        cpu = cpu_seconds() - cpu
        groups_run = groups * (3 + 1 + mode.max_staleness)
        table.append(
            {
                "side": f"on_stale={on_stale}",
                "engines": engines,
                "conversations in flight": groups * 8 * (1 + mode.max_staleness),
                "conversations begun": groups_run * 8,
                "CPU s": cpu,
                "CPU ms a conversation": 1e3 * cpu / groups_run / 8,
                "simulated s": result.seconds,
            }
        )
    return table


# The real collector


class Latencies(Load):
    """Conversations of one turn. All of a group take equally many tokens, one per millisecond."""

    def conversation(self, group_id: int, member: int) -> list[Turn]:
        return [Turn(0.0, 0.0, 1e3 * latency(group_id), 0.0)]


def latency(group_id: int) -> float:
    return 0.4 * random.Random(group_id).paretovariate(2.0)


class Versions(WeightUpdater):
    """Updater that changes nothing but the engine's version."""

    def __init__(self, engine: ScriptedEngine):
        self.engine = engine

    def _send(self, version: int) -> None:
        self.engine.version = version


def real(args: argparse.Namespace) -> list[dict[str, Any]]:
    slots, groups, size, train, steps = 16, 8, 4, 1.5, 2 if args.quick else 8
    tokenizer, table = build_tokenizer(), []
    tokens = [*tokenizer("#### 12")["input_ids"], tokenizer.eos_token_id]
    prompts = load_prompts([{"prompt": f"{i}+{i}?"} for i in range(64)])
    for staleness in (0, 1, 3):
        env = DatasetChatEnv(
            prompts,
            tokenizer,
            prompts_per_batch=groups,
            num_generations=size,
            rewards=lambda completions, **_: [0.0] * len(completions),
        )

        def script(request: Request, index: int) -> ScriptedTurn:
            return ScriptedTurn(tokens, latency=latency(request.session[0]))

        with ScriptedEngine(script, max_concurrency=slots) as engine:
            policy = vLLMWrapper(engine, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 16, "seed": 0})
            collector = LLMCollector(env, policy, max_staleness=staleness or None, weight_updater=Versions(engine))
            start = time.monotonic()
            for _ in range(steps):
                collector.collect()
                time.sleep(train)
                collector.update_policy_weights_()
            seconds = time.monotonic() - start
            collector.shutdown()
        settings = ClusterSettings(
            Latencies(Distribution(1.0)),
            1,
            EngineSpeed(linear_rate(1000.0, math.inf), max_running=slots),
            groups,
            size,
            train_seconds=train,
            mode=Mode(staleness, in_flight="continue"),
        )
        simulated = simulate(settings, steps, warmup=0).seconds
        table.append(
            {"max_staleness": staleness, "real s": seconds, "simulated s": simulated, "real / sim": seconds / simulated}
        )
    return table


PARTS = {"modes": modes, "driver": driver, "scale": scale, "real": real}
TITLES = {
    "modes": "Modes on one heavy-tailed load, each on its best split",
    "driver": "Growing clusters under one driver",
    "scale": "Cost of a simulation",
    "real": "The collector over a scripted engine that sleeps, and its simulation",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--gpus", type=int, default=128, help="GPUs of the part modes")
    parser.add_argument("--groups", type=int, default=64, help="groups of 16 in a step of the part modes")
    parser.add_argument("--staleness", type=int, default=4, help="bound of the asynchronous modes")
    parser.add_argument("--group-ms", type=float, default=5.0, help="CPU ms of the driver for each group")
    parser.add_argument("--quick", action="store_true", help="smallest size of everything")
    args = parser.parse_args()
    os.environ.update(ONE_THREAD)
    torch.set_num_threads(1)
    figures = {}
    for name in args.parts:
        figures[name] = PARTS[name](args)
        print_table(TITLES[name], figures[name])
    print_result(figures)


if __name__ == "__main__":
    main()
