"""One local Ray cluster per session, and what its actors run, which they import from here."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from math import inf

import pytest

from torchrl_rloo.embedded import build_model, build_tokenizer
from torchrl_rloo.engines.base import EngineError, Request
from torchrl_rloo.engines.scripted import ScriptedEngine, ScriptedTurn
from torchrl_rloo.engines.transformers_engine import TransformersEngine

RAY_GROUP = "ray"  # of xdist: the tests that share the cluster
NUM_CPUS = 16  # places for actors, whatever the machine has
ENDLESS, REFUSED = 1_000_000, 1_000_001  # first ids of prompts


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[str]:
    """Address of a local Ray cluster of this session."""
    ray = pytest.importorskip("ray")
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder:  # a short path
        context = ray.init(
            num_cpus=NUM_CPUS,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=256 << 20,
            runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}},
            _temp_dir=folder,
        )
        try:
            yield context.address_info["gcs_address"]
        finally:
            ray.shutdown()


@pytest.fixture(scope="module")
def functions_by_value(ray_cluster: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """Address of the cluster, to which functions of the test's module travel by value."""
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(request.module)
    yield ray_cluster
    cloudpickle.unregister_pickle_by_value(request.module)


def echo(request: Request, index: int) -> ScriptedTurn:
    """Return a turn of the request's seed, after as many milliseconds as the first id of the prompt."""
    first = request.prompt[0]
    if first == REFUSED:
        raise EngineError(f"prompt {first} is refused")
    latency = inf if first == ENDLESS else first / 1000
    return ScriptedTurn(
        [request.seed, *request.prompt], [-0.1 / (1 + request.seed)] * (1 + len(request.prompt)), latency
    )


class RecordingEngine(ScriptedEngine):
    """Engine that keeps the messages of updates as they arrive, and answers each with those of its last update."""

    def __init__(self) -> None:
        super().__init__(echo)
        self._messages: list[tuple[str, dict]] = []

    def update_weights(self, step, info=None, *, timeout):
        self._messages.append((step, dict(info or {})))
        if step == "abort":
            return [{"rank": 0, "messages": self._messages}]
        return super().update_weights(step, info, timeout=timeout)


def transformers_engine(seed: int = 0) -> TransformersEngine:
    """Make an engine of the embedded model."""
    tokenizer = build_tokenizer()
    return TransformersEngine(build_model(tokenizer, seed).eval(), tokenizer)


def echo_engine() -> ScriptedEngine:
    """Make an engine that plays :func:`echo`."""
    return ScriptedEngine(echo)
