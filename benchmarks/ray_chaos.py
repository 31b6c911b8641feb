"""Trainer and engines that bench_ray_chaos.py harms: one rank of an asynchronous run on a Ray cluster.

    python benchmarks/ray_chaos.py FOLDER ADDRESS SETTINGS    # a rank; bench_ray_chaos.py starts all of them

Rank 0 writes ``status.json`` several times a second: workers, engines, and counters. A file in the folder with the name
of an order makes the run harm itself: an engine refuses weights, or the object store loses rows.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Mapping
from contextlib import closing, nullcontext, suppress
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch
from chaos import FaultLog
from tensordict import TensorDictBase
from torchrl.data import ReplayBuffer, SamplerWithoutReplacement

from torchrl_rloo.collectors import GroupSource
from torchrl_rloo.collectors.staleness import token_staleness
from torchrl_rloo.data import keys, load_prompts
from torchrl_rloo.data.rows import unbind_rows
from torchrl_rloo.embedded import addition_prompts, build_model, build_tokenizer
from torchrl_rloo.engines import EnginePool, Request, ScriptedEngine, ScriptedTurn
from torchrl_rloo.engines.base import EngineError
from torchrl_rloo.engines.supervisor import Supervisor
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.envs.transforms import FeedbackTransform
from torchrl_rloo.modules import TransformersWrapper, vLLMWrapper
from torchrl_rloo.objectives import RLOOLoss
from torchrl_rloo.ray import RayEngine, RayLLMCollector, ReferencedSource, ray_session, start_together
from torchrl_rloo.ray.object_store import ObjectStoreReceiver
from torchrl_rloo.replay import MCAdvantage, RowStorage
from torchrl_rloo.run import Run
from torchrl_rloo.runtime.ranks import Ranks
from torchrl_rloo.training import accumulate, make_optimizer, minibatches, optimizer_step, shard_model
from torchrl_rloo.weight_update import WeightPublisher

REFUSE, LOSE = "refuse weights", "lose rows"  # orders
TURNS = 2
STATUS_S = 0.1  # time between two looks at the run


def take_order(folder: Path, order: str) -> bool:
    """Return whether an order is given; only one caller of all processes gets it."""
    try:
        (folder / order).unlink()
    except FileNotFoundError:
        return False
    return True


class FlakyEngine(ScriptedEngine):
    """Scripted engine that reads and checks the weights of the object store, and refuses them when ordered.

    Args:
        folder: folder of the run.
        latency: mean seconds of a turn.
    """

    def __init__(self, folder: str, latency: float):
        self.folder, self._received = Path(folder), ObjectStoreReceiver({}, torch.device("cpu"), 0)
        end = build_tokenizer().eos_token_id

        def script(request: Request, index: int) -> ScriptedTurn:
            rng = random.Random(request.seed)
            tokens = [*(5 + rng.randrange(40) for _ in range(rng.randint(2, 12))), end]
            return ScriptedTurn(tokens, [-rng.random() for _ in tokens], latency=latency * rng.expovariate(1))

        super().__init__(script)

    def update_weights(self, step, info: Mapping[str, Any] | None = None, *, timeout: float) -> list[dict]:
        if step == "finish" and take_order(self.folder, REFUSE):
            FaultLog(self.folder / "faults.jsonl").write(REFUSE, pid=os.getpid(), version=info["version"])
            raise EngineError("refused on purpose")
        return super().update_weights(step, info, timeout=timeout)

    def _take(self, step, info: dict[str, Any], now: float) -> dict[str, Any]:
        if step != "bucket":
            return super()._take(step, info, now)
        self._update.take(info, self._received)
        return {}


def score(completions, completion_ids, **_) -> list[float]:
    """Return rewards that differ within a group, so that every step has a gradient."""
    return [sum(ids) % 7 / 7 for ids in completion_ids]


def ask_again(conversation, row) -> list[dict[str, str]] | None:
    """Continue each conversation once."""
    return [{"role": "user", "content": "Sure?"}] if len(conversation) < 2 * TURNS else None


def make_env(groups: int, members: int) -> DatasetChatEnv:
    """Make the environment of driver and workers."""
    return DatasetChatEnv(
        load_prompts(addition_prompts("train", size=512)),
        build_tokenizer(),
        rewards=score,
        transforms=[FeedbackTransform(ask_again)],
        prompts_per_batch=groups,
        num_generations=members,
        seed=0,
    )


def make_pool(settings: Mapping[str, Any], folder: Path, **place: Any) -> EnginePool:
    """Start the engines, and supervise them closely."""
    make = partial(FlakyEngine, str(folder), settings["latency"])
    engines = start_together([partial(RayEngine, make, **place)] * settings["engines"])
    limits = {"probe_every": 0.5, "probe_timeout": settings["patience"], "max_restarts": 1000, "max_backoff": 1.0}
    return EnginePool(engines, supervisor=Supervisor(**limits))


def make_collector(settings: Mapping[str, Any], folder: Path, pool: EnginePool, updater: Any) -> RayLLMCollector:
    """Make the collector, whose workers are called often and replaced without a limit."""
    policy = vLLMWrapper(pool, tokenizer=build_tokenizer(), generate_kwargs={"max_new_tokens": 16})
    return RayLLMCollector(
        partial(make_env, settings["groups"], settings["members"]),
        policy,
        num_workers=settings["workers"],
        worker_options={"scheduling_strategy": "SPREAD"},
        beat_timeout=settings["patience"],
        max_worker_restarts=1000,
        max_staleness=settings["max_staleness"],
        max_failed_pushes=1000,
        weight_updater=updater,
        audit=folder / "ledger.jsonl",
        seed=settings["seed"],
    )


class Status:
    """Thread of rank 0 that reports workers and engines, and lets the object store lose rows when ordered.

    Args:
        folder: folder of the run.
        collector: collector of the run.
        pool: its engines.
        run: the run, for its step.
    """

    def __init__(self, folder: Path, collector: RayLLMCollector, pool: EnginePool, run: Run):
        self.folder, self.collector, self.pool, self.run = folder, collector, pool, run
        self._ended, self._began = Event(), run.step
        self._thread = Thread(target=self._watch, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(STATUS_S):
            with suppress(EngineError):  # an engine that restarts has no process
                self._write()
            if (self.folder / LOSE).exists():
                reference = lost_object()
                while (group := self.collector._call_on_loop(self._lose, reference)) is None:
                    if self._ended.wait(STATUS_S):
                        return
                FaultLog(self.folder / "faults.jsonl").write(LOSE, group=group)
                take_order(self.folder, LOSE)

    def _write(self) -> None:
        collector, ready = self.collector, self.collector.runner.fleet.ready()
        status = {
            "pid": os.getpid(),
            "steps": self.run.step - self._began,
            "step": self.run.step,
            "version": collector.policy_version,
            "workers": [worker.facts for worker in ready],
            "engines": [
                {"pid": m.target.pid, "node": m.target.node_id, "state": m.state, "version": m.target.version}
                for m in self.pool.members
            ],
            "objects": len(collector.runner.objects),
            "counts": dict(collector.counts) | dict(self.pool.counts),
        }
        path = self.folder / "status.json"
        path.with_suffix(".new").write_text(json.dumps(status))
        path.with_suffix(".new").replace(path)

    def _lose(self, reference: Any) -> int | None:
        """Replace the rows of a complete group by a lost object, and return its id; None if there is none."""
        for group in self.collector.ledger.groups.values():
            key = (group.group_id, group.attempt)
            if group.state == "complete" and key in self.collector.runner.objects:
                self.collector.runner.objects[key] = reference
                return group.group_id
        return None


class Owner:
    """Actor that owns an object, which is lost with it."""

    def put(self) -> list[Any]:
        """Return a reference to an object of this process."""
        import ray

        return [ray.put(bytes(1 << 20))]


def lost_object() -> Any:
    """Return a reference to an object that the store has lost."""
    import ray

    owner = ray.remote(Owner).options(num_cpus=0).remote()
    (reference,) = ray.get(owner.put.remote())
    ray.kill(owner)
    while True:  # until the cluster has noticed it
        try:
            ray.get(reference, timeout=1.0)
        except ray.exceptions.GetTimeoutError:
            continue
        except ray.exceptions.RayError:
            return reference
        time.sleep(STATUS_S)


def record_rows(folder: Path, ranks: Ranks, step: int, version: int, rows: TensorDictBase) -> None:
    """Append what this rank trains on in a step."""
    rows = unbind_rows(rows)
    stale = [token_staleness(row.unsqueeze(0), version) for row in rows]
    record = {"step": step, "rank": ranks.rank, "version": version}
    record |= {"rows": [[int(row[keys.GROUP_ID]), int(row[keys.TRAJECTORY_ID])] for row in rows]}
    record |= {"staleness": torch.cat([torch.zeros(0, dtype=torch.long), *stale]).bincount().tolist()}
    with (folder / f"trained_{ranks.rank}.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")


def train(ranks: Ranks, folder: Path, settings: Mapping[str, Any]) -> None:
    """Train until a signal ends the run; the same call resumes it."""
    torch.set_num_threads(1)
    tokenizer = build_tokenizer()
    model = shard_model(build_model(tokenizer, seed=0), ranks, "ddp")
    loss_fn = RLOOLoss(TransformersWrapper(model, tokenizer=tokenizer, generate=False))
    optimizer = make_optimizer(model, lr=1e-4)
    buffer = ReplayBuffer(
        storage=RowStorage(),
        sampler=SamplerWithoutReplacement(),
        transform=MCAdvantage(settings["members"]),
        generator=torch.Generator().manual_seed(settings["seed"]),
    )
    pool = make_pool(settings, folder) if ranks.is_main else None
    updater = WeightPublisher(model, pool or [], in_flight="continue", timeout=settings["patience"])
    collector = make_collector(settings, folder, pool, updater) if ranks.is_main else None
    source = ReferencedSource(ranks, GroupSource(collector) if ranks.is_main else None, updater)
    parts = {"model": model, "optimizer": optimizer, "source": source}
    run = Run(folder, 1_000_000, parts, checkpoint_every=settings["checkpoint_every"], ranks=ranks, loggers=[])
    with pool or nullcontext(), closing(source), run:
        updater.initialize()
        with closing(Status(folder, collector, pool, run)) if ranks.is_main else nullcontext():
            for step in run.steps():
                metadata, _ = source.collect()
                buffer.extend(metadata)
                record_rows(folder, ranks, step, source.policy_version, source.own.rows)
                for batch in minibatches(buffer, 1, 1):
                    accumulate(loss_fn, batch, ranks=ranks, rows_of=source.rows_of)
                    optimizer_step(model, optimizer, max_grad_norm=1.0)
                buffer.empty()
                source.update_policy_weights_()
                if ranks.is_main:
                    run.log({"staleness": source.policy_version - metadata[keys.POLICY_VERSION].float().mean().item()})


def main() -> None:
    folder, address, settings = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    with (
        Ranks.from_environment("cpu", timeout=settings["rank_timeout"], group=True) as ranks,
        ray_session(address, ranks=ranks),
    ):
        began = time.monotonic()
        train(ranks, folder, settings)
        ranks.log(f"ended after {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
