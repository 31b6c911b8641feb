"""Tests of collectors over pools whose members die, hang and restart: no group, token or version goes wrong."""

from __future__ import annotations

import random
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

import pytest
import torch
from tensordict import TensorDictBase
from torch import nn

from support.collecting import Gate, assert_same, groups_of, in_state, reasons
from support.waiting import PATIENCE, in_thread, wait_until
from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import ragged
from torchrl_rloo.engines import EngineDeadError, EngineError, EnginePool, Request, Supervisor
from torchrl_rloo.engines.scripted import ScriptedEngine, ScriptedTurn
from torchrl_rloo.weight_update import InProcessWeightUpdater, SequentialWeightUpdater, WeightPublisher

SUPERVISOR = {"probe_every": 0.02, "probe_timeout": 0.1, "backoff": 0.01, "max_restarts": 1000}


class Fragile(ScriptedEngine):
    """Engine that calls a function once before a step of an update, and whose restart may have to wait."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.before: dict[str, Callable[[], None]] = {}
        self.may_restart = threading.Event()
        self.may_restart.set()
        self.restarting = False

    def update_weights(self, step, info=None, *, timeout):
        self.before.pop(step, lambda: None)()
        return super().update_weights(step, info, timeout=timeout)

    def restart(self) -> None:
        self.restarting = True
        assert self.may_restart.wait(PATIENCE)
        super().restart()
        self.restarting = False


def play(request: Request, index: int) -> ScriptedTurn:
    """Return a turn of random length that depends on the request only."""
    rng = random.Random(f"{request.seed} {list(request.prompt)}")
    tokens = [30 + rng.randrange(60) for _ in range(rng.randrange(1, 6))]
    return ScriptedTurn(tokens, [-rng.random() for _ in tokens], latency=rng.choice([0.0, 0.002, 0.01]))


@pytest.fixture
def make_engines() -> Iterator[Callable[..., list[Fragile]]]:
    """``make_engines(n)``: scripted engines, closed at the end."""
    made: list[Fragile] = []

    def make(n: int, script: Callable = play) -> list[Fragile]:
        made.extend(Fragile(script, request_timeout=60.0) for _ in range(n))
        return made[-n:]

    yield make
    for engine in made:
        engine.may_restart.set()
        engine.close()


@pytest.fixture
def pooled(scripted, make_engines) -> Iterator[Callable[..., tuple[LLMCollector, EnginePool, list[Fragile]]]]:
    """Make a collector over a pool of scripted engines."""
    pools = []

    def make(*transforms, n: int = 2, script: Callable = play, patience: float = PATIENCE, **kwargs):
        engines = make_engines(n, script)
        pools.append(EnginePool(engines, supervisor=Supervisor(**SUPERVISOR), patience=patience))
        return scripted(*transforms, engine=pools[-1], **kwargs), pools[-1], engines

    yield make
    for pool in pools:
        pool.close()


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20))


def publisher(model: nn.Module, **kwargs) -> Callable[[EnginePool], WeightPublisher]:
    """Return a maker of publishers of two buckets or more."""
    return lambda pool: WeightPublisher(model, pool, bucket_bytes=1000, timeout=20.0, **kwargs)


def train(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))


def versions(rows: TensorDictBase) -> set[int]:
    """Return the versions of all sampled tokens."""
    return set(torch.cat(ragged(rows, keys.ACTION_VERSIONS)).tolist())


def states(pool: EnginePool) -> list[str]:
    return [member.state for member in pool.members]


def fingerprints(engines: list[Fragile]) -> dict[int, set[str]]:
    """Return the checksums of the first bucket that any engine got, by version."""
    found = defaultdict(set)
    for engine in engines:
        for update in list(engine.updates):
            if update.step == "bucket" and update.info["bucket"] == 0:
                found[update.info["version"]].add(update.info["checksum"])
    return found


# Members that hang or die


def test_a_hung_member_changes_no_row(pooled) -> None:
    """Requests that hang inside a member are sampled elsewhere with their seeds, to the same bits."""
    undisturbed, _, _ = pooled(Gate(turns=3), n=1)
    collector, pool, engines = pooled(Gate(turns=3))
    for batch in range(4):
        expected = undisturbed.collect()
        collecting = in_thread(collector.collect)
        if batch == 1:
            wait_until(lambda: len(engines[1].requests) > 4, every=0.0005)
            engines[1].hang()
        assert_same(collecting.result(30), expected)
    assert pool.counts["pool/deaths"] >= 1 and engines[1].start_count >= 1


@pytest.mark.parametrize("ahead", [0, 4])
def test_a_version_names_one_set_of_weights_whenever_engines_die(ahead: int, pooled, model) -> None:
    """Engines die between two batches, and at every step of a push. The run continues without a stale token."""
    updater = publisher(model)
    collector, pool, engines = pooled(Gate(turns=2), ahead=ahead, updater=updater, max_failed_pushes=9)
    places = [None, "between", "start", "bucket", "finish", "both", "between", "finish", "start", "both", None]
    pushed, sampled = [0], set()
    for i, place in enumerate(places):
        rows = collector.collect()
        sampled |= (found := versions(rows))
        assert max(found) <= collector.policy_version and (ahead or found == {collector.policy_version})
        train(model)
        # Kill an engine, or both at different steps
        engine = engines[i % 2]
        if place == "both":
            engines[0].before["start"], engines[1].before["finish"] = engines[0].kill, engines[1].kill
        elif place == "between":
            engine.kill()
        elif place is not None:
            engine.before[place] = engine.kill
        in_thread(collector.update_policy_weights_).result(30)
        pushed.append(collector.policy_version)
    by_version = fingerprints(engines)
    assert all(len(checksums) == 1 for checksums in by_version.values()), by_version
    assert sampled <= set(by_version)
    assert pushed == sorted(pushed) and len(set(pushed)) > len(places) - 5
    assert pool.counts["pool/restarts"] >= 6 and len(collector.collect()) == 4


@pytest.mark.parametrize("ahead", [0, 8])
def test_a_restarted_member_samples_nothing_before_its_fill(ahead: int, pooled, model) -> None:
    """Both members die, and one restarts later: no token is of the checkpoint's weights."""
    updater = publisher(model, in_flight="continue")
    collector, pool, engines = pooled(Gate(turns=6), ahead=ahead, prompts_per_batch=6, updater=updater)
    for _ in range(3):
        train(model)
        collector.update_policy_weights_()
    engines[1].may_restart.clear()
    collecting = in_thread(collector.collect)
    wait_until(lambda: min(len(engine.requests) for engine in engines) > 3, every=0.0005)
    for engine in engines:
        engine.kill()
    assert versions(collecting.result(30)) == {3}
    before = len(engines[1].requests)
    collecting = in_thread(collector.collect)
    engines[1].may_restart.set()
    found = versions(collecting.result(30))
    while len(engines[1].requests) == before:
        found |= versions(collector.collect())
    assert found == {3} and engines[1].version == 3 and pool.counts["pool/restarts"] >= 2


# Nothing that lives


def test_groups_outlast_a_time_without_members(pooled, caplog) -> None:
    """A collect without members waits, logs, and raises after the patience. Its groups come after the restart."""
    collector, _, engines = pooled(Gate(turns=2), patience=0.5, ahead=2)
    delivered = groups_of(collector.collect())
    for engine in engines:
        engine.may_restart.clear()
        engine.kill()
    with pytest.raises(EngineDeadError, match=r"no member was ready for patience=0.5 s: .*kill\(\) was called"):
        for _ in range(3):  # groups may have been complete
            delivered += groups_of(in_thread(collector.collect).result(30))
    assert "wait for a ready member" in caplog.text
    for engine in engines:
        engine.may_restart.set()
    delivered += [group for _ in range(4) for group in groups_of(in_thread(collector.collect).result(30))]
    counts = Counter(delivered)
    assert set(counts.values()) == {2} and set(range(max(counts))) <= set(counts) | in_state(collector, "leased")


def test_a_request_that_kills_its_members_fails_alone(pooled) -> None:
    """A poisonous request fails after three members; the other conversations are complete."""
    poisonous = []

    def kills(request: Request, index: int) -> ScriptedTurn:
        poisonous[:] = poisonous or [request]
        error = EngineDeadError("segmentation fault") if request == poisonous[0] else None
        return ScriptedTurn([40, 41], latency=0.005, error=error)

    collector, pool, _ = pooled(script=kills, prompts_per_batch=4)
    rows = in_thread(collector.collect).result(30)
    assert reasons(rows).count("failed") == 1 and len(rows) == 8 and pool.counts["pool/deaths"] == 3


# Updaters, states and ends


def test_updaters_in_a_row_reach_a_pool(pooled, model) -> None:
    """A local copy and the pool behind it share versions, also over a death in the push."""
    copy = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20))
    collector, pool, engines = pooled(
        updater=lambda pool: SequentialWeightUpdater(InProcessWeightUpdater(model, copy), publisher(copy)(pool)),
        ahead=2,
    )
    weights = {}
    for i in range(4):
        rows = collector.collect()
        assert max(versions(rows)) <= collector.policy_version
        train(model)
        wait_until(lambda: states(pool) == ["ready", "ready"])
        engines[i % 2].before["finish"] = engines[i % 2].kill
        in_thread(collector.update_policy_weights_).result(30)
        weights[collector.policy_version] = model[0].weight.detach().clone()
    assert list(weights) == [1, 2, 3, 4] and torch.equal(copy[0].weight, weights[4])
    assert all(len(checksums) == 1 for checksums in fingerprints(engines).values())


@pytest.mark.parametrize("ahead", [0, 4])
def test_a_resumed_pool_is_filled_under_the_checkpoints_version(ahead: int, pooled, model) -> None:
    collector, _, engines = pooled(Gate(turns=2), ahead=ahead, updater=publisher(model))
    for _ in range(3):
        collector.collect()
        train(model)
        collector.update_policy_weights_()
    state, expected = collector.state_dict(), fingerprints(engines)[3]
    resumed, pool, others = pooled(Gate(turns=2), ahead=ahead, updater=publisher(model))
    resumed.load_state_dict(state)
    others[0].kill()  # a member that must restart first
    rows = in_thread(resumed.collect).result(30)
    assert versions(rows) == {3} and resumed.policy_version == 3
    wait_until(lambda: states(pool) == ["ready", "ready"])
    assert fingerprints(others) == {3: expected}
    train(model)
    resumed.update_policy_weights_()
    assert resumed.policy_version == 4


def test_a_closed_pool_ends_a_collect_and_loses_no_group(pooled) -> None:
    gate = Gate(closed={1})
    collector, pool, _ = pooled(gate)
    collecting = in_thread(collector.collect)
    wait_until(lambda: gate.waiting)
    pool.close()
    gate.closed.clear()
    with pytest.raises(EngineError, match="closed"):
        collecting.result(30)
    with pytest.raises(EngineError, match="closed"):
        in_thread(collector.collect).result(30)
    assert in_state(collector, "drawn", "leased", "complete") == {0, 1}  # group 0 may have ended before


def test_shutdown_does_not_wait_for_a_restart(pooled, model) -> None:
    collector, pool, engines = pooled(updater=publisher(model))
    collector.collect()
    for engine in engines:
        engine.may_restart.clear()
        engine.kill()
    collecting = in_thread(collector.collect)
    wait_until(lambda: all(engine.restarting for engine in engines))
    in_thread(collector.shutdown).result(10)
    in_thread(pool.close).result(10)
    with pytest.raises(RuntimeError, match="shut down"):
        collecting.result(10)
    for engine in engines:
        engine.may_restart.set()
    wait_until(lambda: all(engine.closed for engine in engines))
    wait_until(lambda: all(member.job is None for member in pool.members))
    assert states(pool) == ["closed", "closed"]
