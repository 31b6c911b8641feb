"""WeightPublisher and LoRAPublisher: two phases, snapshots, groups whose members fail, and versions."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from torchrl_rloo.embedded import build_model
from torchrl_rloo.engines.base import EngineDeadError, EngineError, EngineTimeoutError, Request
from torchrl_rloo.engines.scripted import ScriptedEngine, ScriptedTurn
from torchrl_rloo.engines.transformers_engine import TransformersEngine
from torchrl_rloo.weight_update import (
    Direct,
    Files,
    LoRAPublisher,
    SharedMemory,
    WeightPublisher,
    WeightSource,
    WeightSyncError,
    WeightTarget,
)
from torchrl_rloo.weight_update.protocol import TargetGroup
from torchrl_rloo.weight_update.transport import Transport

PATIENT = 60.0
TWO_BUCKETS = {"bucket_bytes": 40_000}  # of a layer of 100 by 100


class Group(TargetGroup):
    """Group that records what the publisher reports."""

    def __init__(self, *engines: WeightTarget):
        self.engines, self.out = list(engines), set()
        self.filled: list[tuple[int, int]] = []
        self.failed: list[tuple[int, Exception]] = []
        self.fill: Callable[[WeightTarget], None] | None = None

    def targets(self) -> list[WeightTarget]:
        return [engine for engine in self.engines if engine not in self.out]

    def attach(self, fill) -> None:
        assert self.fill is None
        self.fill = fill

    def mark_filled(self, engine, version) -> None:
        self.filled.append((self.engines.index(engine), version))

    def mark_failed(self, engine, error) -> None:
        self.failed.append((self.engines.index(engine), error))
        self.out.add(engine)


@pytest.fixture
def make_engine() -> Iterator[Callable[..., ScriptedEngine]]:
    """``make_engine(latency=0.0, **update_latency)``"""
    made = []

    def make(latency: float = 0.0, **update_latency: float) -> ScriptedEngine:
        made.append(ScriptedEngine(lambda r, i: ScriptedTurn([7] * 10, latency=latency), update_latency=update_latency))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def make_transport(tmp_path) -> Callable[[str], Transport]:
    makers = {"direct": Direct, "shared_memory": SharedMemory}
    return lambda name: makers.get(name, lambda: Files(tmp_path))()


def steps(engine: ScriptedEngine) -> list[tuple[str, bool]]:
    """Return the steps of the updates since the last call, and whether the engine was paused."""
    found = [(record.step, record.paused) for record in engine.updates]
    engine.updates.clear()
    return found


STAGING = [("start", False), ("bucket", False), ("bucket", False)]
FIRST = [("abort", False), ("connect", False), *STAGING]


def test_engines_sample_while_weights_are_staged_and_pause_only_to_load(make_engine):
    engine = make_engine(latency=1.0, bucket=0.15)
    publisher = WeightPublisher(nn.Linear(100, 100), engine, in_flight="continue", **TWO_BUCKETS)
    future, began = engine.submit(Request([1], 10, 0)), time.monotonic()
    assert publisher.push_weights() == 1
    assert steps(engine) == [*FIRST, ("finish", True)]
    sample = future.result(PATIENT)
    assert time.monotonic() - began < 1.25, "1.3 s if the buckets arrived during the pause"
    assert sample.versions[0] == 0 and sample.versions[-1] == 1
    assert publisher.last_push.still_seconds[0] < 0.1


@pytest.mark.parametrize("name", ["direct", "shared_memory", "files"])
@pytest.mark.parametrize("staged", [True, False], ids=["staged", "streamed"])
def test_training_does_not_change_what_is_filled(name, staged, make_transport, tokenizer):
    trained = build_model(tokenizer, seed=1)
    engines = [TransformersEngine(build_model(tokenizer, seed=seed)) for seed in (2, 3)]
    group = Group(*engines)
    publisher = WeightPublisher(
        trained, group, transport=make_transport(name), bucket_bytes=100_000, staged=staged, timeout=PATIENT
    )
    for version in (1, 2, 3):
        assert publisher.push_weights() == version
        expected = {name: tensor.clone() for name, tensor in trained.state_dict().items()}
        with torch.no_grad():
            for parameter in trained.parameters():
                parameter.add_(1.0)
        assert all(engine.version == version and same(engine.model.state_dict(), expected) for engine in engines)
    # An engine that lost its weights gets the last ones, while the other is left alone
    with torch.no_grad():
        engines[1].model.lm_head.weight.zero_()
    engines[1].version, engines[0].update_weights = 0, None
    group.filled.clear()
    group.fill(engines[1])
    assert engines[1].version == 3 and group.filled == [(1, 3)]
    assert same(engines[1].model.state_dict(), expected)
    publisher.close()


def same(state: dict, other: dict) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in state.items())


def test_a_commit_pauses_one_engine_at_a_time(make_engine):
    standing, most = set(), []

    def watch(engine: ScriptedEngine) -> None:
        pause, resume = engine.pause, engine.resume

        def watched_pause(*args, **kwargs):
            pause(*args, **kwargs)
            standing.add(engine)
            most.append(len(standing))

        engine.pause, engine.resume = watched_pause, lambda: (standing.discard(engine), resume())

    engines = [make_engine(finish=0.05) for _ in range(3)]
    for engine in engines:
        watch(engine)
    WeightPublisher(nn.Linear(2, 2), engines).push_weights()
    assert most == [1, 1, 1]


def test_a_version_that_one_engine_loaded_is_current_after_a_failure(make_engine):
    """The engine samples with it from then on, and rows must not be newer than the updater's version."""
    engines = [make_engine(), make_engine()]
    engines[1].fail_updates["finish"] = [EngineError("no memory")]
    updater = WeightPublisher(nn.Linear(100, 100), engines)
    with pytest.raises(WeightSyncError, match="no memory"):
        updater.push_weights()
    assert updater.current_version == engines[0].version == 1 and not engines[0].paused
    assert updater.push_weights() == 2


@pytest.mark.parametrize("step", ["abort", "connect", "start", "bucket", "finish"])
def test_a_member_that_fails_is_reported_and_the_others_go_on(step, make_engine):
    engines = [make_engine() for _ in range(3)]
    engines[1].fail_updates[step] = [RuntimeError("out of luck")]
    group = Group(*engines)
    publisher = WeightPublisher(nn.Linear(100, 100), group, timeout=PATIENT, **TWO_BUCKETS)
    assert publisher.push_weights() == 1
    assert [engine.version for engine in engines] == [1, 0, 1] and sorted(group.filled) == [(0, 1), (2, 1)]
    ((number, error),) = group.failed
    assert number == 1 and "out of luck" in str(error)
    # The supervisor restarts it, and the publisher fills only this member
    engines[1].restart()
    before = len(engines[0].updates)
    group.fill(engines[1])
    assert engines[1].version == 1 and group.filled[-1] == (1, 1) and len(engines[0].updates) == before
    group.out.clear()
    assert publisher.push_weights() == 2 and [engine.version for engine in engines] == [2, 2, 2]


@pytest.mark.parametrize("step", ["bucket", "finish"])
def test_a_member_that_hangs_does_not_delay_the_commit_of_others(step, make_engine, monkeypatch):
    monkeypatch.setattr("torchrl_rloo.weight_update.delivery.STRAGGLER_SECONDS", 0.2)
    hung, alive = make_engine(), make_engine()
    group = Group(hung, alive)
    publisher = WeightPublisher(nn.Linear(100, 100), group, timeout=PATIENT, **TWO_BUCKETS)
    publisher.push_weights()
    hung.update_latency[step] = inf
    publisher.timeout = 2.0
    pushing = threading.Thread(target=publisher.push_weights)
    began = time.monotonic()
    pushing.start()
    while alive.version != 2:
        assert time.monotonic() - began < 1.5
        time.sleep(0.01)
    assert pushing.is_alive()
    pushing.join(PATIENT)
    assert time.monotonic() - began < 2.0 + 2.5
    ((number, error),) = group.failed
    assert number == 0 and isinstance(error, EngineTimeoutError)
    assert (hung.version, publisher.current_version) == (1, 2)


def test_without_survivors_the_push_fails_and_the_old_version_stays_for_fills(make_engine):
    engines = [make_engine(), make_engine()]
    group = Group(*engines)
    publisher = WeightPublisher(nn.Linear(100, 100), group, timeout=0.5, **TWO_BUCKETS)
    publisher.push_weights()
    for engine in engines:
        engine.fail_updates["bucket"] = [RuntimeError("out of luck")]
    with pytest.raises(WeightSyncError, match="version 2 of the weights did not arrive.*out of luck"):
        publisher.push_weights()
    assert len(group.failed) == 2 and (publisher.version, publisher.current_version) == (3, 1)
    assert [engine.version for engine in engines] == [1, 1] and engines[0].failed_version is None
    engines[0].restart()
    publisher.fill(engines[0])
    assert engines[0].version == 1, "the failed version was never in use"
    group.out.clear()
    assert publisher.push_weights() == 4 and publisher.current_version == 4


def test_a_push_that_all_members_failed_reaches_the_first_one_that_returns(make_engine):
    """Until then nothing samples, so the old weights are of no use."""
    engine = make_engine()
    group = Group(engine)
    publisher = WeightPublisher(nn.Linear(100, 100), group, timeout=PATIENT, **TWO_BUCKETS)
    engine.fail_updates["bucket"] = [RuntimeError("out of luck")]
    threading.Timer(0.3, group.out.clear).start()
    assert publisher.push_weights() == engine.version == 2 and len(group.failed) == 1


def test_a_push_waits_for_a_member_that_is_being_restarted(make_engine):
    group = Group(engine := make_engine())
    publisher = WeightPublisher(nn.Linear(2, 2), group, timeout=0.3)
    group.out.add(engine)
    with pytest.raises(WeightSyncError, match="no member of the Group could take weights within timeout=0.3"):
        publisher.push_weights()
    publisher.timeout = PATIENT
    threading.Timer(0.3, group.out.clear).start()
    assert publisher.push_weights() == 2 and engine.version == 2


def test_fill_waits_for_a_push_in_flight_and_gives_its_version(make_engine):
    first, late = make_engine(bucket=0.2), make_engine()
    group = Group(first, late)
    group.out.add(late)
    publisher = WeightPublisher(nn.Linear(100, 100), group, **TWO_BUCKETS)
    pushing = threading.Thread(target=publisher.push_weights)
    pushing.start()
    time.sleep(0.1)
    group.fill(late)
    pushing.join(PATIENT)
    assert late.version == 1 and group.filled == [(0, 1), (1, 1)]
    updates = len(late.updates)
    group.fill(late)
    assert len(late.updates) == updates and group.filled[-1] == (1, 1), "it has the version already"


def test_fill_before_the_first_push_gives_the_initial_weights_if_training_has_not_begun(tokenizer):
    trained, engines = build_model(tokenizer, seed=1), [TransformersEngine(build_model(tokenizer, s)) for s in (2, 3)]
    publisher = WeightPublisher(trained, Group(*engines))
    publisher.fill(engines[0])
    assert (engines[0].version, publisher.version) == (0, 0) and same(
        engines[0].model.state_dict(), trained.state_dict()
    )
    with torch.no_grad():
        trained.lm_head.weight.add_(1.0)
    publisher.fill(engines[1])  # from the snapshot
    assert same(engines[1].model.state_dict(), engines[0].model.state_dict())
    late = WeightPublisher(trained, Group(*engines))
    with torch.no_grad():
        trained.lm_head.weight.add_(1.0)
    with pytest.raises(WeightSyncError, match=r"no snapshot of version 0; call initialize\(\)"):
        late.fill(engines[0])


def test_a_fill_trusts_no_version_number_after_a_restart_or_a_resume(make_engine):
    """An engine that restarted, or one filled before a checkpoint was loaded, may have other weights of that number."""
    engine = make_engine()
    publisher = WeightPublisher(nn.Linear(2, 2), Group(engine))
    fills = 0
    for change in (lambda: None, engine.restart, lambda: publisher.resume_from(0), lambda: None):
        change()
        publisher.fill(engine)
        fills += [step for step, _ in steps(engine)].count("finish")
        assert engine.version == publisher.current_version == 0
    assert fills == 3, "one fill at the start, one for each change"


def test_a_fill_from_an_older_snapshot_lowers_no_version(make_engine, monkeypatch):
    """Rows of a member that loaded the newer version and failed later must not be newer than the current one."""
    engines = [make_engine(), make_engine()]
    group = Group(*engines)
    publisher = WeightPublisher(nn.Linear(2, 2), group, timeout=0.5)
    publisher.push_weights()
    monkeypatch.setattr(engines[0], "resume", Mock(side_effect=EngineError("late")))
    engines[1].fail_updates["finish"] = [EngineError("no memory")]
    with pytest.raises(WeightSyncError, match="version 2 of the weights did not arrive"):
        publisher.push_weights()
    assert engines[0].version == publisher.current_version == 2
    engines[1].restart()
    publisher.fill(engines[1])
    assert (engines[1].version, publisher.current_version) == (1, 2)


def test_initialize_sends_the_current_weights_once_under_the_current_version(make_engine):
    group = Group(engine := make_engine())
    publisher = WeightPublisher(nn.Linear(2, 2), group)
    publisher.resume_from(7)
    publisher.initialize()
    assert (publisher.version, publisher.current_version, engine.version) == (7, 7, 7) and group.filled == [(0, 7)]
    publisher.initialize()
    assert [step for step, _ in steps(engine)].count("finish") == 1
    assert publisher.push_weights() == 8
    publisher.resume_from(8)
    publisher.initialize()
    assert [step for step, _ in steps(engine)].count("finish") == 2, "a resumed model has other weights"


def test_initialize_after_a_failure_and_training_takes_a_new_version():
    """Some engine may have the earlier weights under the first version."""
    engines = [ScriptedEngine([], fail_updates={"finish": failures}) for failures in ([], [EngineError("late"), None])]
    publisher = WeightPublisher(source := nn.Linear(2, 2), engines)
    with pytest.raises(WeightSyncError, match="late"):
        publisher.initialize()
    with torch.no_grad():
        source.weight.add_(1.0)
    publisher.initialize()
    assert [engine.version for engine in engines] == [1, 1] and publisher.current_version == 1


def test_a_late_worker_never_reads_the_bytes_of_another_version(tmp_path, make_engine):
    """The file of a version that an engine failed to finish is not written again."""
    engine, other = make_engine(), make_engine()
    source = nn.Linear(100, 100)
    publisher = WeightPublisher(source, Group(engine, other), transport=SharedMemory(tmp_path), **TWO_BUCKETS)
    paths = []
    take = engine._take
    engine._take = lambda step, info, now: (
        paths.append(info["payload"]["path"]) if step == "bucket" and info["bucket"] == 0 else None,
        take(step, info, now),
    )[1]
    for _ in range(4):
        publisher.push_weights()
    assert len(set(paths)) == 2 and paths[:2] == paths[2:], "two files take turns"
    other.fail_updates["finish"] = [RuntimeError("out of luck")]
    publisher.push_weights()  # with the first file
    for _ in range(3):
        publisher.push_weights()
    assert paths[0] not in paths[5:] and not Path(paths[0]).exists()
    assert len(list(tmp_path.iterdir())) == 2
    publisher.close()
    assert not list(tmp_path.iterdir())


def test_plain_engines_share_one_file_between_versions(tmp_path, make_engine):
    publisher = WeightPublisher(nn.Linear(100, 100), make_engine(), transport=SharedMemory(tmp_path), **TWO_BUCKETS)
    for _ in range(3):
        publisher.push_weights()
        (file,) = tmp_path.iterdir()
    assert file.stat().st_size < 41_000


class Moody(WeightSource):
    """Source that fails at the second bucket of the second version."""

    calls = 0

    def collect(self, first, last, to=0):
        self.calls += 1
        if self.calls == 4:
            raise RuntimeError("out of memory")
        return super().collect(first, last, to)


def test_an_error_of_the_trainer_leaves_the_members_and_the_old_snapshot(make_engine):
    group = Group(engine := make_engine())
    publisher = WeightPublisher(Moody(nn.Linear(100, 100)), group, **TWO_BUCKETS)
    publisher.push_weights()
    with pytest.raises(WeightSyncError, match="version 2 .*the trainer failed: RuntimeError: out of memory"):
        publisher.push_weights()
    assert not group.failed and engine.version == 1
    engine.restart()
    publisher.fill(engine)
    assert engine.version == 1 and publisher.push_weights() == 3


@pytest.mark.parametrize("kind", ["xxh3", "device"])
def test_every_nth_push_has_checksums_and_the_others_check_the_rest(kind, tokenizer):
    engine = TransformersEngine(build_model(tokenizer, seed=1))
    sent, update = [], engine.update_weights

    def watched(step, info=None, *, timeout):
        if step == "bucket":
            sent.append(info["checksum"])
        return update(step, info, timeout=timeout)

    engine.update_weights = watched
    publisher = WeightPublisher(build_model(tokenizer, seed=2), engine, checksum=kind, verify_every=2)
    for _ in range(4):
        publisher.push_weights()
    assert [checksum is None for checksum in sent] == [False, True, False, True] and sent[0] == sent[2]
    engine.update_weights = lambda step, info=None, *, timeout: [
        report | ({"tensors": 3} if step == "finish" else {}) for report in update(step, info, timeout=timeout)
    ]
    with pytest.raises(WeightSyncError, match=r"version 5 .*numbers of tensors \[\(5, \[.*\], 3\)\]"):
        publisher.push_weights()


def test_a_missing_checksum_is_an_error_if_the_start_announced_them(make_engine):
    engine = make_engine()
    manifest = [["x", "float32", [2]]]
    engine.update_weights("connect", {"transport": "files", "manifest": manifest, "staged": True}, timeout=1.0)
    engine.update_weights("start", {"version": 1, "verify": True}, timeout=1.0)
    bucket = {"version": 1, "bucket": 0, "first": 0, "last": 1, "checksum": None, "payload": {}}
    with pytest.raises(EngineError, match="checksum=None, but start announced verify=True"):
        engine.update_weights("bucket", bucket, timeout=1.0)


def test_a_lora_adapter_is_staged_as_a_folder_and_fills_a_restarted_member(make_engine, tmp_path):
    peft = pytest.importorskip("peft")
    from torchrl_rloo.embedded import build_tokenizer

    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(build_model(build_tokenizer(), 0), config)
    engines = [make_engine(), make_engine()]
    group = Group(*engines)
    publisher = LoRAPublisher(model, group, directory=tmp_path)
    engines[1].fail_updates["adapter"] = [EngineDeadError("gone")]
    assert publisher.push_weights() == 1
    assert [steps(engine) for engine in engines][0] == [("adapter", True)]
    assert [number for number, _ in group.failed] == [1] and engines[1].version == 0
    engines[1].restart()
    group.fill(engines[1])
    assert engines[1].version == 1 and not steps(engines[0])
    group.out.clear()
    assert publisher.push_weights() == 2
    assert [engine.version for engine in engines] == [2, 2] and len(list(tmp_path.glob("*/*"))) == 1
    publisher.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"engines": []}, r"engines=\[\] must"),
        ({"bucket_bytes": 0}, "bucket_bytes=0"),
        ({"timeout": 0}, "timeout=0"),
        ({"in_flight": "keep"}, "in_flight='keep'"),
        ({"transport": "nccl"}, "transport='nccl'"),
        ({"checksum": "crc"}, "checksum='crc'"),
        ({"verify_every": 0}, "verify_every=0"),
    ],
)
def test_arguments_out_of_range_are_refused(make_engine, arguments, message):
    with pytest.raises(ValueError, match=message):
        WeightPublisher(nn.Linear(2, 2), **{"engines": make_engine()} | arguments)
