"""Training on a Ray cluster: session, rollout workers, engines in actors, weights and rows in the object store."""

from torchrl_rloo.ray.buffer import RayGroupBuffer, RayMCAdvantage
from torchrl_rloo.ray.collector import RayLLMCollector
from torchrl_rloo.ray.engine import RayEngine, start_together
from torchrl_rloo.ray.object_store import ObjectStore
from torchrl_rloo.ray.primer import RayDataLoadingPrimer
from torchrl_rloo.ray.session import ray_session
from torchrl_rloo.ray.source import ReferencedSource

__all__ = [
    "ObjectStore",
    "RayDataLoadingPrimer",
    "RayEngine",
    "RayGroupBuffer",
    "RayLLMCollector",
    "RayMCAdvantage",
    "ReferencedSource",
    "ray_session",
    "start_together",
]
