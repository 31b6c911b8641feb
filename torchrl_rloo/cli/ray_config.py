"""Section of the recipes' configurations about a Ray cluster."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from torchrl_rloo.cli.rloo_config import RLOOConfig
from torchrl_rloo.cli.rollouts_config import check_not_stored
from torchrl_rloo.cli.sampling_config import is_on_ray


@dataclass
class RayConfig:
    """Cluster and rollout workers."""

    address: str | None = None  # cluster to join: auto, or host:port of its head; null: start a local one
    num_cpus: int | None = None  # CPUs that a local cluster lends; null: one for each engine and worker, at least
    dashboard: bool = False  # start the dashboard of a local cluster, on port 8265
    num_workers: int = 2  # rollout workers: environment, tools and rewards of their conversations
    worker_options: dict[str, Any] = field(default_factory=dict)  # options of their actors: {num_cpus: 2}
    worker_conversations: int | None = None  # conversations that a worker is given at a time; null: no limit
    beat_every: float = 0.2  # seconds between two heartbeats of a worker
    beat_timeout: float = 60.0  # seconds in which a worker must answer one; then it is replaced
    start_timeout: float = 600.0  # seconds in which a worker must start, with its wait for a place
    max_worker_restarts: int = 5  # replacements of a worker in an hour

    def __post_init__(self):
        if self.address is not None and (self.num_cpus is not None or self.dashboard):
            raise ValueError(
                f"ray.num_cpus={self.num_cpus} and ray.dashboard={self.dashboard} are of a local cluster and cannot be "
                f"combined with ray.address={self.address}"
            )
        for name in ("num_cpus", "num_workers", "worker_conversations"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"ray.{name}={value} must be at least 1")

    def prepare(self) -> None:
        """Set what Ray reads when it is imported: all ranks authenticate to the local cluster that rank 0 starts."""
        if self.address is None and "RAY_ADDRESS" not in os.environ:
            os.environ.setdefault("RAY_AUTH_MODE", "token")

    def local(self, engines: int) -> dict[str, Any]:
        """Return the arguments of ``ray.init`` for a local cluster; none for a running one, such as that of a job.

        Args:
            engines: number of engines.
        """
        if self.address is not None or (os.environ.get("RAY_ADDRESS") and self.num_cpus is None):
            return {}
        return {"num_cpus": self.num_cpus or engines + self.num_workers, "include_dashboard": self.dashboard}

    def workers(self) -> dict[str, Any]:
        """Return the arguments of :class:`~torchrl_rloo.ray.RayLLMCollector` about workers."""
        names = ("num_workers", "worker_options", "worker_conversations", "beat_every", "beat_timeout")
        names += ("start_timeout", "max_worker_restarts")
        return {name: getattr(self, name) for name in names}


def check_on_cluster(cfg: RLOOConfig) -> None:
    """Raise ``ValueError`` if a setting has no effect on a cluster, where rank 0 has no rows of others."""
    if cfg.inference.engine is not None and not is_on_ray(cfg.inference):
        target = cfg.inference.engine["_target_"]
        raise ValueError(
            f"inference.engine={target} is not an engine of a cluster; use inference=ray_transformers or ray_vllm"
        )
    check_not_stored(cfg.rollouts)
    for name in ("refill", "cache"):
        if getattr(cfg.curriculum, name) is not None:
            raise ValueError(f"curriculum.{name} needs all rows on rank 0 and cannot be set here; use rloo_sync")
    refused = {
        "inference.sleep": cfg.inference.sleep,
        "train.offload": "activations" in cfg.train.offload and ["activations"],
        "sampler.offload": cfg.sampler.offload,
        "collector.max_batch_size": cfg.collector.max_batch_size,
    }
    for name, value in refused.items():
        if value:
            raise ValueError(f"{name}={value} has no effect on a cluster; remove it")
    for name in ("tensor_parallel", "context_parallel"):
        if (value := getattr(cfg.train, name)) > 1:
            raise ValueError(f"train.{name}={value} cannot be combined with rows that each rank fetches; set it to 1")
