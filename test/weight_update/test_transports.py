"""Transports: exact buckets for all workers, no leftover files, and time-outs for lost workers."""

from __future__ import annotations

import socket
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from torchrl_rloo.weight_update import shared_memory
from torchrl_rloo.weight_update.checksums import xxh3 as checksum
from torchrl_rloo.weight_update.collective import Collective
from torchrl_rloo.weight_update.files import Files
from torchrl_rloo.weight_update.open_update import RECEIVERS
from torchrl_rloo.weight_update.protocol import TensorInfo
from torchrl_rloo.weight_update.shared_memory import SharedMemory
from torchrl_rloo.weight_update.transport import Direct, Receiver, Transport

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


def infos_of(tensors: list[torch.Tensor]) -> list[TensorInfo]:
    return [TensorInfo.of(f"t{i}", tensor) for i, tensor in enumerate(tensors)]


def connect(transport: Transport, workers: list[int] = WORKERS, nbytes: int = 4096) -> list[Receiver]:
    options = transport.open(workers, nbytes, TIMEOUT)
    with ThreadPoolExecutor() as pool:
        made = [
            pool.submit(RECEIVERS[transport.name], option, CPU, rank)
            for option, n in zip(options, workers, strict=True)
            for rank in range(n)
        ]
        receivers = [future.result(TIMEOUT) for future in made]
    transport.connected()
    return receivers


def deliver(transport: Transport, receivers: list[Receiver], version: int = 1) -> None:
    """Send all buckets, each while the workers take the previous one, as an updater does."""
    taking: list[Future] = []
    with ThreadPoolExecutor() as pool:
        for number, tensors in enumerate(make_buckets(version)):
            payload = transport.send(version, number, infos_of(tensors), tensors)
            for future in taking:
                future.result(TIMEOUT)
            taking = [pool.submit(take, receiver, tensors, payload) for receiver in receivers]
        for future in taking:
            future.result(TIMEOUT)


def take(receiver: Receiver, tensors: list[torch.Tensor], payload: dict) -> None:
    received = receiver.receive(infos_of(tensors), payload)
    assert [TensorInfo.of("", t) for t in received] == [TensorInfo.of("", t) for t in tensors]
    assert checksum(received) == checksum(tensors)


@pytest.fixture
def make_transport(tmp_path) -> Callable[[str], Transport]:
    makers = {"direct": Direct, "shared_memory": SharedMemory, "collective": Collective}
    return lambda name: makers.get(name, lambda: Files(tmp_path))()


@pytest.mark.parametrize("name", sorted(RECEIVERS))
def test_all_workers_get_all_buckets_again_and_again(name, make_transport):
    transport = make_transport(name)
    for _ in range(2):  # it can be opened again
        receivers = connect(transport)
        for version in (1, 2, 2):
            deliver(transport, receivers, version)
        for receiver in receivers:
            receiver.close()
        transport.close()


@pytest.mark.parametrize("name", ["shared_memory", "collective", "files"])
def test_what_was_received_stays(name, make_transport):
    transport = make_transport(name)
    receivers = connect(transport, [1])
    buckets = make_buckets()
    taken = []
    for number, tensors in enumerate(buckets):
        payload = transport.send(1, number, infos_of(tensors), tensors)
        taken.append(receivers[0].receive(infos_of(tensors), payload))
    transport.close()
    assert [checksum(tensors) for tensors in taken] == [checksum(tensors) for tensors in buckets]


def test_files_in_memory_have_no_name_once_all_have_connected(tmp_path):
    transport = SharedMemory(tmp_path)
    transport.open([1], 4096, TIMEOUT)
    assert [path.stat().st_size for path in tmp_path.iterdir()] == [4096, 4096]
    transport.close()
    assert not list(tmp_path.iterdir())  # a worker was lost before it had connected
    receivers = connect(transport)
    assert not list(tmp_path.iterdir())
    deliver(transport, receivers)


def test_without_shared_memory_the_temporary_directory_serves(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_memory, "MEMORY", tmp_path / "missing")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    transport = SharedMemory()
    (options,) = transport.open([1], 4096, TIMEOUT)
    assert {Path(path).parent for path in options["paths"]} == {tmp_path}
    transport.close()


def test_too_little_room_is_an_error_that_leaves_nothing(tmp_path):
    transport = SharedMemory(tmp_path)
    with pytest.raises(OSError, match=f"no room.*{1 << 60} bytes.*bucket_bytes"):
        transport.open([1], 1 << 60, TIMEOUT)
    assert not list(tmp_path.iterdir())


def test_a_worker_elsewhere_is_told_which_transports_reach_it(tmp_path):
    options = {"paths": [str(tmp_path / "a"), str(tmp_path / "b")], "nbytes": 64}
    with pytest.raises(FileNotFoundError, match="not on this machine.*Collective.*Files"):
        RECEIVERS["shared_memory"](options, CPU, 0)
    assert not list(tmp_path.iterdir())


def test_files_are_whole_and_of_one_version(tmp_path):
    transport = Files(tmp_path / "new")
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "notes.txt").write_text("not ours")
    receivers = connect(transport)
    for version in (1, 2):
        deliver(transport, receivers, version)
        names = sorted(str(path.relative_to(tmp_path / "new")) for path in (tmp_path / "new").rglob("*.*"))
        assert names == ["notes.txt", *(f"weights-{version}/0000{i}.safetensors" for i in range(3))]
    transport.close()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["notes.txt"]


def test_a_lost_worker_is_an_error_and_a_new_group_works():
    transport = Collective()
    (receiver,) = connect(transport, [1])
    receiver.close()
    tensors = [torch.ones(256)]
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="peer"):
        while time.monotonic() - began < TIMEOUT / 2:
            transport.send(1, 0, infos_of(tensors), tensors)
            time.sleep(0.05)
    transport.close()
    deliver(transport, connect(transport))
    transport.close()


def test_a_worker_that_does_not_join_is_an_error_in_time():
    transport = Collective()
    transport.open([1], 64, 1.0)
    began = time.monotonic()
    with pytest.raises((TimeoutError, dist.DistError), match="not joined|imed out|imeout"):
        transport.connected()
    assert time.monotonic() - began < 30
    transport.close()


def test_a_fixed_port_can_be_opened_again_while_an_earlier_group_still_waits():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    transport = Collective(port=port)
    transport.open([1], 64, TIMEOUT)  # no engine joins
    deliver(transport, connect(transport))
    transport.close()


def test_another_backend_is_refused():
    with pytest.raises(ValueError, match="backend='mpi'"):
        Collective("mpi")


def test_threads_of_closed_groups_end():
    before = set(threading.enumerate())
    transport = Collective()
    connect(transport)
    started = set(threading.enumerate()) - before
    assert started
    transport.close()
    deadline = time.monotonic() + TIMEOUT
    while started & set(threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
