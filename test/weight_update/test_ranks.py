"""Weight updates from a model sharded over two ranks: who sends what, failures, retries and refills.

As a script, this file runs one rank.
"""

from __future__ import annotations

import copy
import os
import time
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from support.fork_server import ForkServer
from support.rank_scripts import EndedRanks, become_rank, mark_passed, run_checks, run_ranks
from support.weights import Group
from torchrl_rloo.collectors.weights import PolicyWeights
from torchrl_rloo.embedded import build_model, build_tokenizer
from torchrl_rloo.engines.base import EngineError
from torchrl_rloo.engines.root import call_root
from torchrl_rloo.engines.transformers_engine import TransformersEngine
from torchrl_rloo.runtime.ranks import RankError, Ranks
from torchrl_rloo.training.shard import shard_model
from torchrl_rloo.weight_update import (
    InProcessWeightUpdater,
    LoRAPublisher,
    SequentialWeightUpdater,
    WeightSyncError,
    shards,
    shared_memory,
)
from torchrl_rloo.weight_update.files import Files
from torchrl_rloo.weight_update.shards import gather, list_pieces, simplify
from torchrl_rloo.weight_update.shared_memory import SharedMemory
from torchrl_rloo.weight_update.source import WeightSource
from torchrl_rloo.weight_update.transport import Direct, PackedStorage
from torchrl_rloo.weight_update.weight_publisher import WeightPublisher

BUCKET = 60_000  # bytes: the tiny model goes in several, and its embedding by itself
TOKENIZER = build_tokenizer()
IDS = torch.arange(5, 29)[None]
put_pieces = PackedStorage.put_pieces


def sharded(model: nn.Module, **settings) -> nn.Module:
    """Shard a model in place: each layer, and the rest at the root."""
    mesh = init_device_mesh("cpu", (2,))
    decoder = model.get_base_model().model if find_spec("peft") and hasattr(model, "peft_config") else model.model
    for layer in decoder.layers:
        fully_shard(layer, mesh=mesh, **settings)
    return fully_shard(model, mesh=mesh, **settings)


def train(*models: nn.Module) -> None:
    """Train one step and run a forward pass, which leaves the root's parameters gathered."""
    for model in models:
        model(input_ids=IDS, labels=IDS).loss.backward()
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5).step()
        model.zero_grad()
        with torch.no_grad():
            model(input_ids=IDS)


def assert_has(engine: TransformersEngine | nn.Module, model: nn.Module) -> None:
    """Check that an engine or a copy has the weights of a model that is not sharded."""
    found = (engine.model if isinstance(engine, TransformersEngine) else engine).state_dict()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


class Fallible(TransformersEngine):
    """Engine that fails at the end of the next updates."""

    failures = 0

    def update_weights(self, step, info=None, *, timeout):
        if step == "finish" and self.failures > 0:
            self.failures -= 1
            raise EngineError("not now")
        return super().update_weights(step, info, timeout=timeout)


def make_engine() -> Fallible:
    return Fallible(build_model(TOKENIZER, 0).eval())


@contextmanager
def counted_bytes():
    """Count the bytes that this rank sends to another one: a list of a number per message."""
    sent, send = [], distributed.send
    with mock.patch.object(distributed, "send", lambda tensor, *a: (sent.append(tensor.nbytes), send(tensor, *a))):
        yield sent


def check_gathers(rank: int, folder: Path) -> None:
    """Compare gathers with the whole tensors, for all kinds of placements."""
    line, grid = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (2, 1))
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(s, generator=generator, dtype=torch.float64) for s in ((5, 3), (1, 4), (8,), (3, 7), (4, 4))]
    whole += [torch.arange(6, dtype=torch.int8), torch.randn(3, 2, generator=generator).bfloat16()]
    kinds = [[Shard(0)], [Shard(0)], [Shard(0)], [Shard(1)], [Replicate()], [Shard(0)], [Shard(-1)]]
    tensors = [distribute_tensor(t, line, kind) for t, kind in zip(whole, kinds, strict=True)]
    tensors += [distribute_tensor(whole[0], grid, [Replicate(), Shard(0)]), whole[2]]
    tensors += [distribute_tensor(whole[0], grid, [Shard(0), Shard(1)])]
    tensors += [DTensor.from_local(whole[0] / 2, line, [Partial()])]
    wanted = [*whole, whole[0], whole[2], whole[0], whole[0]]
    for to in (0, 1, None):
        found = gather(tensors, to)
        if to in (rank, None):
            assert all(torch.equal(f, w) and not isinstance(f, DTensor) for f, w in zip(found, wanted, strict=True))
        else:
            assert found == []
    # Each element is in exactly one block, which is this rank's local tensor
    for tensor in map(simplify, tensors):
        filled = torch.zeros(tensor.shape, dtype=torch.int64)
        for piece in list_pieces(tensor):
            piece.of(filled).add_(1)
            if piece.rank == rank and isinstance(tensor, DTensor):
                assert tuple(tensor.to_local().shape) == piece.shape
        assert bool((filled == 1).all())


def sent(source: WeightSource) -> dict[str, torch.Tensor]:
    """Return the tensors that a source sends, gathered in two ranges."""
    names = [info.name for info in source.manifest()]
    middle = len(names) // 2
    return dict(zip(names, source.tensors(0, middle) + source.tensors(middle, len(names)), strict=True))


def assert_same(tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(tensors) == list(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(tensors[name], tensor, rtol=0, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def check_source(rank: int, folder: Path) -> None:
    """Compare what a sharded model and a whole one send, before and after training; FSDP1 is refused."""
    whole, model = build_model(TOKENIZER, 0), sharded(build_model(TOKENIZER, 0))
    source = WeightSource(model)
    assert source.sends == (rank == 0) and source.manifest() == WeightSource(whole).manifest()
    for _ in range(2):
        assert_same(sent(source), sent(WeightSource(whole)))
        train(whole, model)
        assert not all(hasattr(p, "full_tensor") for p in model.parameters()), "the root's stay gathered"
    assert_same(sent(source), sent(WeightSource(whole)))
    with pytest.raises(ValueError, match="the model is in FullyShardedDataParallel; shard it with fully_shard"):
        WeightSource(FullyShardedDataParallel(build_model(TOKENIZER, 0), device_id=torch.device("cpu")))


def check_adapter(rank: int, folder: Path) -> None:
    """Merge and send a sharded adapter, whose first push fails."""
    if find_spec("peft") is None:
        return
    import peft

    def adapted() -> nn.Module:
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")
        model = peft.get_peft_model(build_model(TOKENIZER, 0), config)
        generator = torch.Generator().manual_seed(0)
        for p in model.parameters():
            if p.requires_grad:
                p.data = 0.1 * torch.randn(p.shape, generator=generator)
        return model

    class Reading(TransformersEngine):
        def update_weights(self, step, info=None, *, timeout):
            if info["version"] == 1:
                raise EngineError("not now")
            self.adapter = load_file(Path(info["path"]) / "adapter_model.safetensors")
            return [{"version": info["version"], "checksums": [info["checksum"]]}]

    whole, model = adapted(), sharded(adapted())
    train(whole, model)
    assert_same(sent(WeightSource(model)), sent(WeightSource(whole)))
    engines = [Reading(build_model(TOKENIZER, 0))] if rank == 0 else []
    updater = LoRAPublisher(model, engines, directory=folder)
    with pytest.raises(WeightSyncError, match="not now"):
        updater.push_weights()
    assert updater.push_weights() == 2
    if rank == 0:
        expected = peft.get_peft_model_state_dict(whole, save_embedding_layers=False)
        assert_same(engines[0].adapter, dict(sorted(expected.items())))
    updater.close()


def check_transports(rank: int, folder: Path) -> None:
    """Push several versions over each transport; blocks reach shared memory without another rank."""
    whole, model = build_model(TOKENIZER, 1), sharded(build_model(TOKENIZER, 1))
    total = sum(p.numel() * 4 for p in whole.parameters())
    makers = {"memory": SharedMemory, "files": lambda: Files(folder / "files"), "direct": Direct}
    for name, make in makers.items():
        engines = [make_engine(), make_engine()] if rank == 0 else []
        updater = WeightPublisher(model, engines, transport=make(), bucket_bytes=BUCKET, verify_every=2)
        for version in (1, 2, 3):
            train(whole, model)
            with counted_bytes() as sent:
                assert updater.push_weights() == version == updater.current_version
            for engine in engines:
                assert engine.version == version
                assert_has(engine, whole)
            # Half of the model is on rank 1, which sends none of it or all
            if rank == 1:
                assert sum(sent) == pytest.approx(0.0 if name == "memory" else 0.5 * total, rel=0.05)
                assert max(sent, default=0) < 2 * BUCKET
        updater.close()
        for engine in engines:
            engine.close()


def check_casts_and_conversions(rank: int, folder: Path) -> None:
    """Send halved, renamed and merged weights, of a model that computes in bfloat16 with float32 weights."""
    whole = build_model(TOKENIZER, 1)
    model = sharded(build_model(TOKENIZER, 1), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    with torch.no_grad():
        model(input_ids=IDS)
    for transport in (SharedMemory(), Files(folder / "converted"), Direct()):
        for settings in ({"dtype": torch.bfloat16}, {"convert": lambda name, tensor: [(name, tensor)]}):
            engines = [make_engine()] if rank == 0 else []
            updater = WeightPublisher(
                WeightSource(model, **settings), engines, transport=transport, bucket_bytes=BUCKET
            )
            updater.push_weights()
            dtype = settings.get("dtype", torch.float32)
            for engine in engines:
                assert_has(engine, copy.deepcopy(whole).to(dtype).float())
                engine.close()
            updater.close()


def check_failures(rank: int, folder: Path) -> None:
    """Fail in an engine, in the writing of either rank and in a conversion; the next push succeeds."""
    whole, model = build_model(TOKENIZER, 1), sharded(build_model(TOKENIZER, 1))
    engine = make_engine()
    updater = WeightPublisher(model, [engine] if rank == 0 else [], transport=SharedMemory(folder), bucket_bytes=BUCKET)
    # An engine: rank 0 raises, and join() does not
    engine.failures = 1
    if rank == 0:
        with pytest.raises(WeightSyncError, match="version 1 .*not now"):
            updater.push_weights()
    else:
        assert updater.join() == 0 and updater.version == 1
    engine.failures = 1
    with pytest.raises(WeightSyncError, match="not now"):
        updater.push_weights()
    # The writing of a rank
    for failing in (0, 1):

        def put(self, bucket, *args, failing=failing):
            if rank == failing and bucket >= 2:
                raise OSError("disk full")
            return put_pieces(self, bucket, *args)

        with mock.patch.object(PackedStorage, "put_pieces", put):
            message = "OSError: disk full" if failing == 0 else "rank 1 failed: OSError: disk full"
            with pytest.raises(WeightSyncError, match=message):
                updater.push_weights()
    train(whole, model)
    assert updater.push_weights() == 5
    if rank == 0:
        assert_has(engine, whole)

    # A conversion, which only rank 0 makes
    def convert(name, tensor):
        if tensor.device.type != "meta":
            assert rank == 0
            raise RuntimeError("no room")
        yield name, tensor

    source, updater.source = updater.source, WeightSource(model, convert=convert)
    with pytest.raises(WeightSyncError, match="RuntimeError: no room"):
        updater.push_weights()
    updater.source = source
    assert updater.push_weights() == 7
    # Rank 1 leaves the files of rank 0 alone
    if rank == 1:
        updater.close()
    distributed.barrier()
    assert len(list(folder.glob("torchrl_rloo-weights-*"))) == 1
    distributed.barrier()
    updater.close()


def check_other_machine(rank: int, folder: Path) -> None:
    """Send to rank 0 if another rank cannot open the files."""
    whole, model = build_model(TOKENIZER, 1), sharded(build_model(TOKENIZER, 1))
    engines = [make_engine()] if rank == 0 else []
    updater = WeightPublisher(model, engines, transport=SharedMemory(), bucket_bytes=BUCKET)
    with mock.patch.object(shared_memory, "_map", side_effect=FileNotFoundError) if rank == 1 else mock.MagicMock():
        with counted_bytes() as sent:
            updater.push_weights()
    assert (sum(sent) > 0) == (rank == 1)
    for engine in engines:
        assert_has(engine, whole)
    updater.close()


def check_groups(rank: int, folder: Path) -> None:
    """Retry and refill on rank 0 while the other rank waits for rows."""
    whole, model = build_model(TOKENIZER, 1), sharded(build_model(TOKENIZER, 1))
    group = Group(*([make_engine(), make_engine()] if rank == 0 else []))
    updater = WeightPublisher(model, group, bucket_bytes=BUCKET, transport=SharedMemory(), timeout=20.0)
    if rank == 0:
        with pytest.raises(WeightSyncError, match="call initialize"):
            updater.fill(group.engines[0])  # before there is a snapshot, without a word to the other rank
    # Both initialize; the collector of rank 0 then has nothing to send
    updater.initialize()
    assert updater.filled and updater.version == 0
    if rank == 0:
        weights = PolicyWeights(updater, lambda: pytest.fail("nothing to send"), 2)
        weights.initialize()
        assert weights.version == 0
    # All members fail once: rank 0 gathers again in the same call
    train(whole, model)
    before = whole.state_dict() | {}
    for engine in group.engines:
        engine.failures = 1
    if rank == 0:
        targets = group.targets

        def recovering():  # the first look finds none, as a supervisor takes time to restart members
            group.targets = lambda: (group.failed.clear(), targets())[1] if group.failed else targets()
            return []

        def failed(engine, error, mark=group.mark_failed):
            mark(engine, error)
            if len(group.failed) == 2:
                group.targets = recovering

        group.mark_failed = failed
    assert updater.push_weights() == 2 and updater.version == 2
    for engine in group.engines:
        assert engine.version == 2
        assert_has(engine, whole)
    # A refill does not need the other rank, nor the current weights of the model
    before = {name: tensor.clone() for name, tensor in whole.state_dict().items()}
    train(whole, model)
    if rank == 0:
        (first, _) = group.engines
        with torch.no_grad():
            first.model.model.embed_tokens.weight.zero_()
        first.version = 0
        updater.fill(first)
        assert first.version == 2
        for name, tensor in first.model.state_dict().items():
            torch.testing.assert_close(tensor, before[name], rtol=0, atol=1e-6)
    rows = [torch.arange(3) if rank == 0 else None]
    distributed.broadcast_object_list(rows, src=0)
    assert rows[0].tolist() == [0, 1, 2]
    updater.close()


def check_copies(rank: int, folder: Path) -> None:
    """Fill the sampler's copy of rank 0, alone and before an engine."""
    whole, model = build_model(TOKENIZER, 1), sharded(build_model(TOKENIZER, 1))
    target = build_model(TOKENIZER, 0) if rank == 0 else None
    if rank == 0:
        with pytest.raises(ValueError, match="target=None requires a rank other than 0"):
            InProcessWeightUpdater(model, None)
    updater = InProcessWeightUpdater(model, target)
    engines = [make_engine()] if rank == 0 else []
    if rank == 0:
        updater = SequentialWeightUpdater(updater, WeightPublisher(target, engines))
        assert not updater.filled
        updater.initialize()
    for version in (1, 2):
        train(whole, model)
        before = [p.data_ptr() for p in target.parameters()] if rank == 0 else []
        assert (updater.push_weights() if rank == 0 else updater.join()) == version
        if rank == 0:
            assert [p.data_ptr() for p in target.parameters()] == before
            assert target.lm_head.weight is target.model.embed_tokens.weight
            assert_has(target, whole)
            assert_has(engines[0], whole)


def check_shard_model(rank: int, folder: Path) -> None:
    """Push models that ``shard_model`` distributes: in bfloat16, in copies (HSDP), and replicas (DDP)."""
    ranks = Ranks(rank, 2, group=distributed.group.WORLD, control=distributed.group.WORLD)
    kinds = [{"precision": "bfloat16", "float32_head": True}, {"shard_size": 1}, {"parallel": "ddp"}]
    for settings in kinds:
        whole, model = build_model(TOKENIZER, 1), shard_model(build_model(TOKENIZER, 1), ranks, **settings)
        with torch.no_grad():
            call_root(model, model.forward, input_ids=IDS)
        target = build_model(TOKENIZER, 0) if rank == 0 else None
        engines = [make_engine()] if rank == 0 else []
        publisher = WeightPublisher(model, engines, transport=SharedMemory(), bucket_bytes=BUCKET)
        updater = SequentialWeightUpdater(InProcessWeightUpdater(model, target), publisher)
        with counted_bytes() as sent:
            updater.push_weights() if rank == 0 else updater.join()
        assert not sent or "precision" in settings, "rank 0 has all blocks"
        if rank == 0:
            assert_has(target, whole)
            assert_has(engines[0], whole)
        publisher.close()


def check_replicas(rank: int, folder: Path) -> None:
    """Check that replicas of a model need nothing of each other."""
    model = nn.parallel.DistributedDataParallel(build_model(TOKENIZER, 1))
    engines = [make_engine()] if rank == 0 else []
    updater = WeightPublisher(model, engines, transport=Direct())
    if rank == 0:
        updater.push_weights()
        assert_has(engines[0], model.module)
    else:
        assert updater.join() == 0
        updater.initialize()


def check_end(rank: int, folder: Path) -> None:
    """End rank 0 soon if the other rank is lost in the middle of a gather."""
    model = sharded(build_model(TOKENIZER, 1))
    updater = WeightPublisher(model, [make_engine()] if rank == 0 else [], transport=Direct(), bucket_bytes=BUCKET)
    updater.push_weights()
    if rank == 1:
        mark_passed(check_end, folder)
        with mock.patch.object(shards, "_gather_blocks", lambda *_: os._exit(0)):
            updater.push_weights()
    began = time.monotonic()
    with pytest.raises(RankError, match="rank 0 failed while all ranks gathered weights"):
        updater.push_weights()
    assert time.monotonic() - began < 20


CHECKS = (
    check_gathers,
    check_source,
    check_adapter,
    check_transports,
    check_casts_and_conversions,
    check_failures,
    check_other_machine,
    check_groups,
    check_copies,
    check_shard_model,
    check_replicas,
    check_end,
)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer) -> EndedRanks:
    return run_ranks(fork_server, __file__, tmp_path_factory.mktemp("ranks"), 2)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_two_ranks(ran: EndedRanks, check):
    ran.assert_passed(check)


if __name__ == "__main__":
    become_rank(lambda ranks, folder: run_checks(CHECKS, folder, ranks.rank, folder))
