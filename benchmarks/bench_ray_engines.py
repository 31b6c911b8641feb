"""Requests to engines in Ray actors, and weights over the object store, against engines in this process.

    python benchmarks/bench_ray_engines.py

Scripted engines take no time to sample, so the figures are the costs of the requests alone. ``burst`` submits all
requests at once. ``spread`` keeps some in flight that end one by one, as with a model, so that few share a message.
CPU times are of all threads. Both sides of a row run on the same machine, one after the other.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from threading import Semaphore
from typing import Any

import torch
from common import cpu_seconds, local_ray, print_result, print_table
from torch import nn

from torchrl_rloo.engines import Engine, EnginePool, Request, Sample, ScriptedEngine, ScriptedTurn, TransformersEngine
from torchrl_rloo.ray import ObjectStore, RayEngine, start_together
from torchrl_rloo.weight_update import Direct, SharedMemory, WeightPublisher
from torchrl_rloo.weight_update.transport import Link

PROMPT, TURN = 256, 64  # tokens
TICKS = os.sysconf("SC_CLK_TCK")


def script(request: Request, index: int) -> ScriptedTurn:
    """Return a turn whose latency in milliseconds is the first id of the prompt."""
    return ScriptedTurn([7] * TURN, [-0.5] * TURN, latency=request.prompt[0] / 1000)


def cpu_of(pid: int) -> float:
    """Return the CPU seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def sample(pool: EnginePool, requests: Sequence[Request], in_flight: int) -> list[Sample]:
    """Sample requests with a number of them in flight."""
    free, futures = Semaphore(in_flight), []
    for request in requests:
        free.acquire()
        futures.append(pool.submit(request))
        futures[-1].add_done_callback(lambda _: free.release())
    return [future.result() for future in futures]


def measure(engines: list[Engine], requests: Sequence[Request], in_flight: int) -> dict[str, float]:
    """Return seconds, and CPU microseconds per request here and in the actors."""
    pool = EnginePool(engines)
    actors = [engine.pid for engine in engines if isinstance(engine, RayEngine)]
    sample(pool, requests[: len(requests) // 4], in_flight)
    began, here, there = time.perf_counter(), cpu_seconds(), sum(map(cpu_of, actors))
    assert len(sample(pool, requests, in_flight)) == len(requests)
    seconds, n = time.perf_counter() - began, len(requests)
    here, there = cpu_seconds() - here, sum(map(cpu_of, actors)) - there
    pool.supervisor.stop()
    return {"requests/s": n / seconds, "driver us": 1e6 * here / n, "actors us": 1e6 * there / n}


def bench_requests(numbers: Sequence[int], count: int) -> list[dict[str, Any]]:
    """Compare actors with engines in this process, for bursts and for requests that end one by one."""
    rng = random.Random(0)
    loads = {
        "burst": ([Request([0] + [5] * (PROMPT - 1), TURN, seed) for seed in range(count)], count),
        "spread": ([Request([rng.randint(200, 800)] + [5] * (PROMPT - 1), TURN, s) for s in range(count)], 256),
    }
    rows = []
    for n in numbers:
        local = [ScriptedEngine(script) for _ in range(n)]
        remote = start_together([partial(RayEngine, partial(ScriptedEngine, script))] * n)
        for name, (requests, in_flight) in loads.items():
            here, there = measure(local, requests, in_flight), measure(remote, requests, in_flight)
            row = {"engines": n, "load": name, "in process req/s": here["requests/s"], "Ray req/s": there["requests/s"]}
            row["ratio"] = there["requests/s"] / here["requests/s"]
            row |= {"in process CPU us": here["driver us"], "Ray driver CPU us": there["driver us"]}
            rows.append(row | {"Ray actors CPU us": there["actors us"]})
        for engine in [*local, *remote]:
            engine.close()
    return rows


def model_of(mb: int) -> nn.Module:
    """Make a model with ``mb`` MB of weights, in tensors of 4 MB."""
    model = nn.Module()
    for i in range(mb // 4):
        model.register_parameter(f"p{i}", nn.Parameter(torch.ones(1000, 1000), requires_grad=False))
    return model


def transformers_engine(mb: int) -> TransformersEngine:
    """Make an engine around a model of ``mb`` MB."""
    model = model_of(mb)
    model.device = torch.device("cpu")
    return TransformersEngine(model)


class Elsewhere(ObjectStore):
    """Transport that takes every engine for one on another node, so that buckets pass the object store."""

    def connect(self, workers: int, timeout: float, node_id: str | None = None) -> Link:
        return super().connect(workers, timeout, "another node")


def bench_weights(mb: int) -> list[dict[str, Any]]:
    """Compare pushes to an engine in an actor and in this process with a plain copy of all tensors."""
    source = model_of(mb)
    target = {name: torch.empty_like(p) for name, p in source.named_parameters()}

    def copy() -> None:
        for name, parameter in source.named_parameters():
            target[name].copy_(parameter)

    remote, local = RayEngine(partial(transformers_engine, mb)), transformers_engine(mb)
    ways: dict[str, Callable[[], Any]] = {"plain copy": copy}
    for name, engine, transport in (
        ("direct, in process", local, Direct()),
        ("shared memory, actor", remote, SharedMemory()),
        ("object store, actor on this node", remote, ObjectStore()),
        ("object store, actor elsewhere", remote, Elsewhere()),
    ):
        ways[name] = WeightPublisher(source, engine, transport=transport).push_weights
        ways[f"{name}, no checksums"] = WeightPublisher(
            source, engine, transport=transport, verify_every=1_000_000
        ).push_weights
    rows = []
    for name, way in ways.items():
        seconds = []
        for _ in range(4):  # the first one connects, and carries checksums
            began = time.perf_counter()
            way()
            seconds.append(time.perf_counter() - began)
        rows.append({"way": name, "MB/s": mb / min(seconds[1:])})
    for row in rows:
        row["of the plain copy"] = row["MB/s"] / rows[0]["MB/s"]
    remote.close()
    return rows


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--megabytes", type=int, default=400)
    args = parser.parse_args()
    with local_ray(max(args.engines) + 1, 4 * args.megabytes + 100):
        requests = bench_requests(args.engines, args.requests)
        print_table(f"Requests of {PROMPT} tokens, answers of {TURN}; CPU per request", requests)
        weights = bench_weights(args.megabytes)
        print_table(f"Weights of {args.megabytes} MB to one engine", weights)
        print_result({"requests": requests, "weights": weights})


if __name__ == "__main__":
    main()
