"""Split of a cluster's GPUs between engines and trainer: an estimate on paper, then a search by simulation."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torchrl_rloo.diagnostics.cluster_simulation import ClusterResult, ClusterSettings, simulate

MakeCluster = Callable[[int, int], ClusterSettings]
_BUSY = 0.9  # share above which a process is the limit


class Split(NamedTuple):
    """One split of the GPUs and its simulation.

    Attributes:
        engines: number of engines.
        trainer_gpus: GPUs of the trainer.
        result: result of the simulation.
    """

    engines: int
    trainer_gpus: int
    result: ClusterResult


class StepEstimate(NamedTuple):
    """Seconds of a step on paper.

    Attributes:
        sample: time of all engines to sample a batch, were none idle.
        train: time of the trainer.
        push: time of a weight update.
        driver: time of the driver's CPU.
    """

    sample: float
    train: float
    push: float
    driver: float

    def seconds(self, overlaps: bool) -> float:
        """Return the duration of a step: the sum, or with overlap that of the slowest part."""
        if not overlaps:
            return self.sample + self.train + self.push
        return max(self.sample, self.train + self.push, self.driver)


def estimate_step(settings: ClusterSettings) -> StepEstimate:
    """Estimate the seconds of a step from means, without stragglers.

    Args:
        settings: the cluster.
    """
    load, speed = settings.load.averages(), settings.speed
    rows = settings.groups_per_batch * settings.group_size
    ahead = 1 + (settings.mode.max_staleness or 0) + settings.mode.ahead / settings.groups_per_batch
    in_flight = min(rows * ahead, settings.max_in_flight or rows * ahead)
    running = min(in_flight / settings.engines, speed.max_running, speed.cache_tokens / max(1.0, load.context))
    group_read = load.first_read + (settings.group_size - 1) * load.other_read
    read = settings.groups_per_batch * group_read / speed.prefill
    sample = (rows * load.sampled / speed.rate(max(1, round(running))) + read) / settings.engines
    train = settings.train_seconds + rows * load.row / settings.train_rate
    costs = settings.costs
    driver = settings.groups_per_batch * (
        costs.group_seconds + settings.group_size * load.turns * costs.driver_turn_seconds
    )
    return StepEstimate(sample, train, settings.transfer_seconds + settings.still_seconds, driver)


def search_split(
    make: MakeCluster, gpus: int, engine_gpus: int, *, steps: int = 4, warmup: int = 2, max_simulations: int = 6
) -> list[Split]:
    """Find the split with the most trained tokens per second.

    The search starts at the best split on paper, and moves to neighbors while they are better.

    Args:
        make: function that returns the cluster of a number of engines and of trainer GPUs.
        gpus: GPUs in total.
        engine_gpus: GPUs of an engine.
        steps: measured steps of each simulation.
        warmup: steps before them.
        max_simulations: largest number of simulations.

    Returns:
        The simulated splits, in the order of their engines.

    Raises:
        ValueError: if there are too few GPUs for an engine and a trainer.
    """
    most = (gpus - 1) // engine_gpus
    if most < 1:
        raise ValueError(f"gpus={gpus} must be above engine_gpus={engine_gpus}, so that one is left for the trainer")

    def cluster(engines: int) -> ClusterSettings:
        return make(engines, gpus - engines * engine_gpus)

    def estimate(engines: int) -> float:
        settings = cluster(engines)
        return estimate_step(settings).seconds(settings.mode.max_staleness != 0)

    tried: dict[int, ClusterResult] = {}

    def score(engines: int) -> float:
        if engines not in tried:
            tried[engines] = simulate(cluster(engines), steps, warmup=warmup)
        return tried[engines].tokens_per_second

    # Move by about an eighth of the GPUs, then by half as much
    best = min(range(1, most + 1), key=estimate)
    stride = max(1, most // 8)
    while stride and len(tried) < max_simulations:
        near = [e for e in (best - stride, best, best + stride) if 1 <= e <= most]
        if (better := max(near, key=score)) == best:
            stride //= 2
        best = better
    return [Split(e, gpus - e * engine_gpus, result) for e, result in sorted(tried.items())]


def bottleneck(result: ClusterResult) -> str:
    """Return what limits a cluster: ``"driver"``, ``"workers"``, ``"trainer"``, ``"engines"`` or ``"waiting"``.

    Args:
        result: result of a simulation. ``"waiting"`` means that none is busy, so they wait for each other.
    """
    shares = {
        "driver": result.driver_busy,
        "workers": result.worker_busy,
        "trainer": result.trainer_busy + result.trainer_pushing,
        "engines": result.engine_busy + result.engine_still,
    }
    name = next((name for name, share in shares.items() if share >= _BUSY), None)
    return name or "waiting"


def advise_cluster(result: ClusterResult) -> str:
    """Return one sentence about the limit of a cluster and its remedy.

    Args:
        result: result of a simulation.
    """
    settings, costs = result.settings, result.settings.costs
    rate = settings.groups_per_batch * result.steps / result.seconds
    limit = bottleneck(result)
    if limit == "driver":
        turns = settings.load.averages().turns * settings.group_size
        most = 1 / (costs.group_seconds + turns * costs.driver_turn_seconds)
        remedy = (
            "run conversations on rollout workers"
            if costs.driver_turn_seconds
            else "use larger groups, or several drivers that each own a share of the prompts"
        )
        return f"the driver is the limit at {rate:.1f} of {most:.1f} groups/s: {remedy}"
    if limit == "workers":
        busy = result.worker_busy * costs.workers
        return f"the rollout workers are the limit: start more than {busy:.0f} of them"
    if limit == "trainer":
        if result.trainer_pushing > result.trainer_busy:
            return "the trainer waits for weight updates: use in_flight=continue, or a faster transport"
        return "the trainer is the limit: give it more GPUs, or raise its MFU (packing, fewer forward passes)"
    if limit == "engines":
        return "the engines are the limit: give them more GPUs, or more conversations at a time"
    remedy = "allow more staleness" if settings.mode.max_staleness != 0 else "sample ahead (mode=partial)"
    return f"engines and trainer wait for each other: {remedy}, or use larger batches"
