"""Transports: exact buckets for all workers, no leftover files, and refusals of what others put in place."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from torchrl_rloo.weight_update import shared_memory
from torchrl_rloo.weight_update.files import Files
from torchrl_rloo.weight_update.protocol import EngineError, TensorInfo, packed_size
from torchrl_rloo.weight_update.protocol import xxh3 as checksum
from torchrl_rloo.weight_update.shared_memory import SharedMemory, SharedMemoryReceiver
from torchrl_rloo.weight_update.transport import (
    TRANSPORTS,
    Direct,
    Link,
    Receiver,
    Storage,
    Transport,
    find_transport,
)

WORKERS = [1, 2]  # of two engines
TIMEOUT = 60.0
CPU = torch.device("cpu")


def make_buckets(seed: int = 0) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(30, 4, generator=generator)
    return [
        [table, table, table[2:5], table.T],  # tied ones and views
        [torch.tensor(3.5), torch.empty(0, 2), torch.randn(7, generator=generator).bfloat16()],
        [torch.randint(9, (5,), generator=generator), torch.tensor([True, False]), torch.tensor(7, dtype=torch.int8)],
    ]


def test_another_process_finds_a_transport_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "my_transport.py").write_text(
        "from torchrl_rloo.weight_update import Files\n\n\nclass Own(Files):\n    name = 'own'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(EngineError, match="list your own in TORCHRL_RLOO_TRANSPORTS=my_module.MyTransport"):
        find_transport("own")
    monkeypatch.setenv("TORCHRL_RLOO_TRANSPORTS", "my_transport.Own")
    assert find_transport("own").__module__ == "my_transport"
    del TRANSPORTS["own"]


def infos_of(tensors: list[torch.Tensor]) -> list[TensorInfo]:
    return [TensorInfo.of(f"t{i}", tensor) for i, tensor in enumerate(tensors)]


def connect(transport: Transport, workers: list[int] = WORKERS) -> tuple[list[Link], list[list[Receiver]]]:
    """Connect to engines and return their links, and the receivers of their workers."""
    links, receivers = [transport.connect(n, TIMEOUT) for n in workers], []
    for link, n in zip(links, workers, strict=True):
        link.open(lambda options, n=n: receivers.append([transport.receiver(options, CPU, rank) for rank in range(n)]))
    return links, receivers


def store(transport: Transport, version: int = 1, keep: bool = True) -> Storage:
    sizes = [packed_size(infos_of(tensors)) for tensors in make_buckets(version)]
    return transport.store(version, sizes, keep)


def send(storage: Storage, number: int, links: list[Link], receivers: list[list[Receiver]], version: int) -> None:
    """Send a stored bucket to all workers, which take it."""
    tensors = make_buckets(version)[number]
    for link, of_engine in zip(links, receivers, strict=True):
        link.deliver(
            storage.get(number), lambda payload, of=of_engine: [take(receiver, tensors, payload) for receiver in of]
        )


def deliver(
    transport: Transport, links: list[Link], receivers: list[list[Receiver]], version: int = 1, keep: bool = True
) -> Storage:
    """Store and send all buckets, as a publisher does."""
    storage = store(transport, version, keep)
    for number, tensors in enumerate(make_buckets(version)):
        storage.put(number, infos_of(tensors), tensors)
        send(storage, number, links, receivers, version)
    return storage


def take(receiver: Receiver, tensors: list[torch.Tensor], payload: dict) -> None:
    received = receiver.receive(infos_of(tensors), payload)
    assert [TensorInfo.of("", t) for t in received] == [TensorInfo.of("", t) for t in tensors]
    assert checksum(received) == checksum(tensors)


@pytest.fixture
def make_transport(tmp_path) -> Callable[[str], Transport]:
    makers = {"direct": Direct, "shared_memory": SharedMemory}
    return lambda name: makers.get(name, lambda: Files(tmp_path))()


@pytest.mark.parametrize("keep", [True, False], ids=["kept", "sent once"])
@pytest.mark.parametrize("name", ["direct", "files", "shared_memory"])
def test_all_workers_get_all_buckets_again_and_again(name, keep, make_transport):
    transport = make_transport(name)
    for _ in range(2):  # it can be used again after it was closed
        links, receivers = connect(transport)
        for version in (1, 2, 3):
            storage = deliver(transport, links, receivers, version, keep)
            assert storage.kept or not keep
            if keep:  # a late engine gets the same from the storage only
                for number in (0, 1, 2):
                    send(storage, number, links[:1], receivers[:1], version)
            transport.release(storage, reusable=version == 1)
        for link, of_engine in zip(links, receivers, strict=True):
            for receiver in of_engine:
                receiver.close()
            link.close()
        transport.close()


@pytest.mark.parametrize("name", ["shared_memory", "files"])
def test_what_was_received_stays_when_the_storage_goes(name, make_transport):
    transport = make_transport(name)
    links, receivers = connect(transport, [1])
    buckets, taken, storage = make_buckets(), [], store(transport)
    for number, tensors in enumerate(buckets):
        storage.put(number, infos_of(tensors), tensors)
        taken.append(receivers[0][0].receive(infos_of(tensors), links[0].send(storage.get(number))))
    transport.release(storage, reusable=False)
    deliver(transport, links, receivers, version=2)
    transport.close()
    assert [checksum(tensors) for tensors in taken] == [checksum(tensors) for tensors in buckets]


def test_shared_memory_is_mapped_without_copies_and_reused_only_if_no_worker_reads_it(tmp_path):
    transport = SharedMemory(tmp_path)
    links, receivers = connect(transport, [1])
    first = deliver(transport, links, receivers, version=1)
    (table, *_) = receivers[0][0].receive(infos_of(make_buckets(1)[0]), first.get(0))
    first.view(0)[:4] = 255
    assert table.flatten()[0].isnan(), "the worker reads the trainer's memory"
    transport.release(first, reusable=True)
    second = deliver(transport, links, receivers, version=2)
    assert second.path == first.path and len(list(tmp_path.iterdir())) == 1
    transport.release(second, reusable=False)
    assert not list(tmp_path.iterdir())
    assert deliver(transport, links, receivers, version=3).path != first.path
    transport.close()
    assert not list(tmp_path.iterdir())


def test_files_of_a_killed_trainer_are_removed_by_the_next_one(tmp_path):
    (tmp_path / "torchrl_rloo-weights-orphan").write_bytes(b"weights")
    (tmp_path / "notes.txt").write_text("not ours")
    alive = SharedMemory(tmp_path)
    storage = store(alive)
    assert {path.name for path in tmp_path.iterdir()} == {"notes.txt", Path(storage.path).name}
    other = SharedMemory(tmp_path)
    store(other)
    assert Path(storage.path).exists(), "its trainer is alive"
    del storage, alive, other
    gc.collect()
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_without_shared_memory_the_temporary_directory_serves(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_memory, "MEMORY", tmp_path / "missing")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    transport = SharedMemory()
    assert Path(store(transport).path).parent == tmp_path
    transport.close()


def test_too_little_room_is_an_error_that_leaves_nothing(tmp_path):
    transport = SharedMemory(tmp_path)
    with pytest.raises(OSError, match=f"no room.*{1 << 60} bytes.*Files"):
        transport.store(1, [1 << 60], keep=True)
    assert not list(tmp_path.iterdir())


def test_a_worker_elsewhere_is_told_which_transports_reach_it(tmp_path):
    receiver = SharedMemoryReceiver({}, CPU, 0)
    payload = {"path": str(tmp_path / "a"), "size": 64, "offset": 0, "nbytes": 64, "uid": 0}
    with pytest.raises(FileNotFoundError, match="not on this machine.*VLLMNCCL.*Files"):
        receiver.receive([TensorInfo("x", "float32", (16,))], payload)
    assert not list(tmp_path.iterdir())


def test_files_are_whole_and_of_one_version(tmp_path):
    transport = Files(tmp_path / "new")
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "notes.txt").write_text("not ours")
    links, receivers = connect(transport)
    (tmp_path / "new" / "weights-0").mkdir()  # of an earlier run
    for version in (1, 2):
        storage = deliver(transport, links, receivers, version)
        names = sorted(str(path.relative_to(tmp_path / "new")) for path in (tmp_path / "new").rglob("*.*"))
        assert names == ["notes.txt", *(f"weights-{version}-{version}/0000{i}.safetensors" for i in range(3))]
        transport.release(storage, reusable=True)
    transport.close()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077], ids=oct)
@pytest.mark.parametrize("make", [SharedMemory, Files])
def test_files_of_weights_are_closed_to_other_users(make: type, mask: int, tmp_path: Path):
    transport, before = make(tmp_path), os.umask(mask)
    try:
        storage = deliver(transport, *connect(transport))
    finally:
        os.umask(before)
    (made,) = tmp_path.iterdir()
    assert made.stat().st_mode & 0o077 == 0
    transport.release(storage, reusable=False)


@pytest.mark.parametrize("kind", ["link", "fifo", "folder", "group", "world", "stranger", "short"])
def test_a_worker_refuses_what_another_user_put_in_place(kind: str, tmp_path: Path):
    transport, tensors = SharedMemory(tmp_path), make_buckets()[0]
    storage = store(transport, 0)
    storage.put(0, infos_of(tensors), tensors)
    payload = storage.get(0)
    path = Path(payload["path"])
    copy = path.rename(tmp_path / "copy")
    if kind == "link":
        path.symlink_to(copy)
    elif kind == "fifo":
        os.mkfifo(path, 0o600)
    elif kind == "folder":
        path.mkdir(0o700)
    else:
        path.write_bytes(copy.read_bytes()[: 8 if kind == "short" else None])
        path.chmod({"group": 0o620, "world": 0o602}.get(kind, 0o600))
        if kind == "stranger":
            if os.geteuid():
                pytest.skip("requires root")
            os.chown(path, 12345, 12345)
    with pytest.raises((PermissionError, ValueError)):
        SharedMemoryReceiver({}, CPU, 0).receive(infos_of(tensors), payload)
    path.rename(tmp_path / "refused")  # the storage removes its path


def test_orphans_that_are_links_or_fifos_leave_others_files_alone(tmp_path: Path):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "torchrl_rloo-weights-link").symlink_to(tmp_path / "precious")
    os.mkfifo(tmp_path / "torchrl_rloo-weights-fifo")
    transport = SharedMemory(tmp_path)
    store(transport)
    assert (tmp_path / "precious").read_text() == "mine" and (tmp_path / "torchrl_rloo-weights-link").is_symlink()
    transport.close()
