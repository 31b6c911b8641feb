"""Faults of a run on a Ray cluster: the audit, rows that are lost with their node, and bounded memory in the store."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from threading import Event

import pytest
import torch
from torchrl.data import ReplayBuffer

from support.ray_cluster import RAY_GROUP
from support.waiting import PATIENCE, in_thread, wait_until
from torchrl_rloo.collectors import GroupSource, check_audit
from torchrl_rloo.collectors.ledger import GroupState
from torchrl_rloo.collectors.staleness import token_staleness
from torchrl_rloo.data import keys, load_prompts
from torchrl_rloo.embedded import addition_prompts, build_tokenizer
from torchrl_rloo.engines import EnginePool, ScriptedEngine, ScriptedTurn
from torchrl_rloo.engines.base import EngineError
from torchrl_rloo.engines.supervisor import Supervisor
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.modules import vLLMWrapper
from torchrl_rloo.ray import RayEngine, RayGroupBuffer, RayLLMCollector, ReferencedSource, start_together
from torchrl_rloo.replay import MCAdvantage, RowStorage
from torchrl_rloo.runtime.ranks import Ranks
from torchrl_rloo.weight_update import WeightPublisher

pytest.importorskip("ray")
pytestmark = [pytest.mark.xdist_group(RAY_GROUP), pytest.mark.usefixtures("functions_by_value")]

GROUPS, MEMBERS, STALENESS = 2, 2, 1


def lengths(completion_ids, **_) -> list[float]:
    return [float(sum(ids) % 5) for ids in completion_ids]


def make_env() -> DatasetChatEnv:
    prompts = load_prompts(addition_prompts("train", size=64))
    sizes = {"prompts_per_batch": GROUPS, "num_generations": MEMBERS}
    return DatasetChatEnv(prompts, build_tokenizer(), rewards=lengths, seed=0, **sizes)


def script(request, index, tokens: int = 8, latency: float = 0.01) -> ScriptedTurn:
    return ScriptedTurn([5 + (request.seed + i) % 40 for i in range(tokens)], latency=latency)


class RefusingEngine(ScriptedEngine):
    """Engine that refuses weights while a file exists."""

    def __init__(self, refuse: str):
        super().__init__(partial(script, latency=0.1))
        self.refuse = Path(refuse)

    def update_weights(self, step, info=None, *, timeout):
        if step == "finish" and self.refuse.exists():
            self.refuse.unlink()
            raise EngineError("refused on purpose")
        return super().update_weights(step, info, timeout=timeout)


def sampler(tokens: int) -> vLLMWrapper:
    """Make a policy whose engine is in the worker."""
    engine = ScriptedEngine(partial(script, tokens=tokens))
    return vLLMWrapper(engine, tokenizer=build_tokenizer(), generate_kwargs={"max_new_tokens": tokens})


@pytest.fixture
def collect_with():
    """``collect_with(**arguments)``: a collector, which is shut down after the test."""
    made = []

    def make(policy=None, tokens: int = 8, **arguments) -> RayLLMCollector:
        factory = {} if policy is not None else {"policy_factory": partial(sampler, tokens)}
        made.append(RayLLMCollector(make_env, policy, seed=0, **factory, **arguments))
        return made[-1]

    yield make
    for collector in made:
        collector.shutdown(raise_on_error=False)


class Owner:
    """Actor that owns an object, which is lost with it."""

    def put(self) -> list:
        import ray

        return [ray.put(bytes(1 << 20))]


def lost_object():
    """Return a reference to an object that the store has lost."""
    import ray

    owner = ray.remote(Owner).options(num_cpus=0).remote()
    (reference,) = ray.get(owner.put.remote())
    ray.kill(owner)

    def is_lost() -> bool:
        try:
            ray.get(reference, timeout=1.0)
        except ray.exceptions.GetTimeoutError:
            return False
        except ray.exceptions.RayError:
            return True
        return False

    wait_until(is_lost)
    return reference


def test_faults_of_six_kinds_lose_and_double_no_group(collect_with, tmp_path: Path) -> None:
    refuse, audit, rng = tmp_path / "refuse", tmp_path / "audit.jsonl", random.Random(0)
    engines = start_together([partial(RayEngine, partial(RefusingEngine, str(refuse)))] * 2)
    supervisor = Supervisor(probe_every=0.5, probe_timeout=2.0, max_restarts=100, backoff=0.1, max_backoff=0.1)
    with EnginePool(engines, supervisor=supervisor) as pool:
        updater = WeightPublisher(torch.nn.Linear(8, 8), pool, in_flight="continue", timeout=5.0)
        policy = vLLMWrapper(pool, tokenizer=build_tokenizer(), generate_kwargs={"max_new_tokens": 8})
        collector = collect_with(policy, weight_updater=updater, max_staleness=STALENESS, audit=audit)
        source = ReferencedSource(Ranks.single(), GroupSource(collector), updater)
        trained: Counter[tuple[int, int]] = Counter()

        def step() -> None:
            source.collect()
            rows = source.own.rows
            assert not len(rows) or token_staleness(rows, source.policy_version).max() <= STALENESS
            trained.update((int(row[keys.GROUP_ID]), int(row[keys.TRAJECTORY_ID])) for row in rows.unbind(0))
            source.update_policy_weights_()

        def complete() -> list:
            return [g for g in collector.ledger.groups.values() if (g.group_id, g.attempt) in collector.runner.objects]

        def lose(reference) -> bool:
            """Replace the rows of a group that no step has taken; those of a delivered one were fetched already."""
            group = next((g for g in complete() if g.state == GroupState.COMPLETE), None)
            if group is not None:
                collector.runner.objects[group.group_id, group.attempt] = reference
            return group is not None

        def is_ready(count: int) -> bool:
            return pool.counts["pool/restarts"] >= count and [m.state for m in pool.members] == ["ready"] * 2

        def strike(kind: str) -> None:
            restarts = pool.counts["pool/restarts"]
            if kind.startswith("engine"):
                os.kill(rng.choice(engines).pid, signal.SIGKILL if kind == "engine killed" else signal.SIGSTOP)
                step()  # while it is away
                wait_until(partial(is_ready, restarts + 1))
            elif kind == "worker killed":
                os.kill(collector.runner.fleet.workers[0].facts["pid"], signal.SIGKILL)
                wait_until(lambda: collector.counts.get("workers/lost"))
            elif kind == "refused push":
                refuse.touch()
                step()
                wait_until(lambda: not refuse.exists() and is_ready(0))
            elif kind == "slow consumer":  # sampling stops at the bound
                wait_until(lambda: len(collector.ledger.groups) == len(complete()))
                assert len(complete()) <= GROUPS * (2 + STALENESS)
            else:
                reference = lost_object()
                wait_until(lambda: collector._call_on_loop(lose, reference))

        # The worker and the first engine restart at the same time
        kinds = ["slow consumer", "worker killed", "engine stopped", "refused push", "engine killed", "lost rows"]
        step()
        for kind in kinds:
            strike(kind)
            if kind != "worker killed":
                step()
        assert collector.counts["workers/lost_groups"] >= 1
        step()
        collector.shutdown()
    result = check_audit(audit)
    delivered = {group for group, _ in trained}
    assert set(trained.values()) == {1} and set(Counter(group for group, _ in trained).values()) == {MEMBERS}
    assert result.acknowledged <= delivered <= result.acknowledged | result.open
    assert collector.counts["workers/lost"] == 1 and pool.counts["pool/deaths"] >= 2


def test_the_store_holds_no_more_than_the_bound_while_the_trainer_stalls(collect_with) -> None:
    import ray
    from ray._private.internal_api import node_stats

    node = ray.nodes()[0]
    used = partial(node_stats, node["NodeManagerAddress"], node["NodeManagerPort"], False)

    def stored() -> int:
        return used().store_stats.object_store_bytes_used

    before = stored()
    collector = collect_with(tokens=4000, max_staleness=STALENESS)
    most, places = 0, GROUPS * (1 + STALENESS)
    for _ in range(5):
        references = collector.collect_references()
        # The trainer stalls until the workers have nothing to do
        wait_until(
            lambda: (
                collector.metrics()["workers/in_flight"] == 0
                and not any(worker.orders for worker in collector.runner.fleet.workers)
            )
        )
        found = collector.metrics()
        assert found["workers/stored_groups"] <= places + GROUPS
        size = found["workers/stored_bytes"] / found["workers/stored_groups"]
        most = max(most, found["workers/stored_groups"])
        del references
    assert most >= GROUPS and size > 100_000  # in the store, and not in the owner's memory
    wait_until(lambda: stored() - before <= 2 * (places + GROUPS) * size)
    collector.shutdown()
    wait_until(lambda: stored() - before < size)  # nothing is left behind


class LateRanks(Ranks):
    """Rank whose collectives wait for another rank, which is slow."""

    def __init__(self):
        super().__init__(0, 1)
        self.arrived = Event()

    def all_gather(self, value, name: str = "all_gather"):
        assert self.arrived.wait(PATIENCE)
        return super().all_gather(value, name)


def test_sampling_stops_at_the_bound_while_another_rank_is_slow(collect_with) -> None:
    collector, ranks = collect_with(max_staleness=STALENESS), LateRanks()
    source = ReferencedSource(ranks, GroupSource(collector), None)

    def is_idle(drawn: int) -> bool:
        busy = collector.runner._queue or any(worker.orders for worker in collector.runner.fleet.workers)
        return collector.ledger.counts["ledger/drawn"] >= drawn and not busy

    for step in range(2):
        ranks.arrived.clear()
        collecting = in_thread(source.collect)
        allowed = GROUPS * (1 + STALENESS + step)
        wait_until(partial(is_idle, allowed))
        assert collector.ledger.counts["ledger/drawn"] == allowed and not collecting.done()
        ranks.arrived.set()
        assert len(collecting.result(PATIENCE)[0]) == GROUPS * MEMBERS


def test_rows_are_used_twice_through_a_buffer_that_has_references_only(collect_with) -> None:
    buffer = RayGroupBuffer(max_uses=2)
    references = collect_with().collect_references()
    buffer.extend_references(references)
    assert buffer.stats()["buffer/bytes"] == sum(references.nbytes) > 0
    local = ReplayBuffer(storage=RowStorage(), transform=MCAdvantage())
    local.extend(references.fetch())
    expected = {int(row[keys.TRAJECTORY_ID]): row for row in local[:].unbind(0)}
    for _ in range(2):
        rows = buffer.sample(GROUPS, timeout_s=PATIENCE)
        assert len(rows) == GROUPS * MEMBERS
        for row in rows.unbind(0):
            other = expected[int(row[keys.TRAJECTORY_ID])]
            assert torch.equal(row[keys.TOKENS], other[keys.TOKENS])
            assert torch.equal(row[keys.ADVANTAGE], other[keys.ADVANTAGE])
    assert len(buffer) == 0


class Node:
    """Further node of the cluster, with the resource ``doomed``."""

    def __init__(self, address: str):
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--address={address}", "--num-cpus=2"]
        command += ['--resources={"doomed": 2}', "--object-store-memory=100000000", "--block"]
        self.process = subprocess.Popen(
            command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def kill(self) -> None:
        """Kill all processes of the node at once."""
        import psutil

        if self.process.poll() is None:
            for process in psutil.Process(self.process.pid).children(recursive=True):
                process.kill()
            self.process.kill()
            self.process.wait()


def test_rows_that_are_lost_with_their_node_are_sampled_again(collect_with, ray_cluster: str) -> None:
    import ray

    node = Node(ray_cluster)
    try:
        wait_until(lambda: ray.cluster_resources().get("doomed"))
        options = {"resources": {"doomed": 1}}
        collector = collect_with(tokens=4000, worker_options=options)
        collect, killed = collector.collect_references, []

        def collect_and_kill():
            references = collect()
            node.kill()
            killed.extend(references.group_ids)
            collector._workers.options.clear()  # the next worker may be anywhere
            return references

        collector.collect_references = collect_and_kill
        source = ReferencedSource(Ranks.single(), GroupSource(collector), None)
        metadata, _ = source.collect()
    finally:
        node.kill()
    assert killed == [0, 1] and collector.counts["workers/lost_groups"] == GROUPS  # the driver's node had no copy
    assert sorted(int(g) for g in metadata[keys.GROUP_ID].reshape(-1)) == [0, 0, 1, 1]
    assert len(source.own.rows) == GROUPS * MEMBERS and all(
        len(r[keys.TOKENS]) > 4000 for r in source.own.rows.unbind(0)
    )
