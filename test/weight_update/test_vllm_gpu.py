"""GPU transports of vLLM on CPU tensors: vLLM's real classes on both sides, with stand-ins for what only a GPU has.

The stand-ins are NCCL's communicator, CUDA streams, and the export of GPU memory to another process. The marked tests
at the end run them on GPUs. As a script, this file receives over CUDA IPC: ``test_vllm_gpu.py MANIFEST``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Queue
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from support.weights import Group
from torchrl_rloo.cli.config import InferenceConfig
from torchrl_rloo.embedded import build_model
from torchrl_rloo.engines.transformers_engine import TransformersEngine
from torchrl_rloo.weight_update import VLLMIPC, VLLMNCCL, WeightPublisher, WeightSyncError, vllm_gpu
from torchrl_rloo.weight_update.protocol import TensorInfo, packed_size
from torchrl_rloo.weight_update.vllm_gpu import VLLMIPCLink, VLLMReceiver, decode_export, encode_export

CPU = torch.device("cpu")
TRANSPORTS = {"nccl": VLLMNCCL, "ipc": VLLMIPC}
TIMEOUT = 60.0
GPU = "GPU-stand-in"


@pytest.fixture(scope="module")
def vllm():
    return pytest.importorskip("vllm")


class Communicators:
    """Stand-in for NCCL: communicators of one id, of which rank 0 broadcasts to the others over queues."""

    def __init__(self):
        self.queues: dict[tuple[bytes, int], Queue] = {}
        self.sizes: list[int] = []
        self._lock = threading.Lock()

    def join(self, unique_id: bytes, rank: int, world_size: int, device: object) -> SimpleNamespace:
        queues = [self._queue(unique_id, other) for other in range(1, world_size)]
        mine = self._queue(unique_id, rank)

        def broadcast(tensor: torch.Tensor, src: int, stream: object) -> None:
            assert src == 0 and tensor.dtype is torch.uint8
            if rank == 0:
                self.sizes.append(tensor.numel())
                for queue in queues:
                    queue.put(tensor.clone())
                return
            received = mine.get(timeout=TIMEOUT)
            assert received is not None and received.shape == tensor.shape, "the ends cut the stream differently"
            tensor.copy_(received)

        return SimpleNamespace(broadcast=broadcast, destroy=lambda: mine.put(None))

    def _queue(self, unique_id: bytes, rank: int) -> Queue:
        with self._lock:
            return self.queues.setdefault((unique_id, rank), Queue())


@pytest.fixture
def no_gpu(vllm, monkeypatch: pytest.MonkeyPatch) -> Communicators:
    """Let vLLM's transfers run without a GPU: streams, device numbers, exports and communicators are stand-ins."""
    from vllm.distributed.weight_transfer import nccl_common, packed_tensor

    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=GPU))
    communicators, ids = Communicators(), iter(range(100))
    monkeypatch.setattr(nccl_common, "uid_init_process_group", communicators.join)
    monkeypatch.setattr(vllm_gpu, "_new_unique_id", lambda: bytes([next(ids)]) * 128)
    # A buffer in memory of this process, under its number
    exported: list[torch.Tensor] = []

    def export(buffer: torch.Tensor):
        exported.append(buffer)
        handle = bytes([len(exported) - 1])
        place = (torch.Tensor, buffer.size(), buffer.stride(), 0, torch.storage.TypedStorage, torch.uint8, 0, handle)
        return None, (*place, buffer.numel(), 0, False, b"counter", 0, b"event", True)

    empty = torch.empty
    monkeypatch.setattr(packed_tensor, "reduce_tensor", export)
    monkeypatch.setattr(
        "torch.multiprocessing.reductions.rebuild_cuda_tensor", lambda *arguments: exported[arguments[7][0]]
    )
    monkeypatch.setattr(torch, "empty", lambda *size, device=None, **kw: empty(*size, **kw))
    monkeypatch.setattr(vllm_gpu, "require_cuda", lambda name: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return communicators


@pytest.fixture(params=sorted(TRANSPORTS))
def transport(request: pytest.FixtureRequest, no_gpu: Communicators):
    transport = TRANSPORTS[request.param]()
    transport.device = CPU
    return transport


@pytest.fixture
def engines(tokenizer) -> Iterator[list[TransformersEngine]]:
    made = [TransformersEngine(build_model(tokenizer, seed=0).eval()) for _ in range(2)]
    yield made
    for engine in made:
        engine.close()


def assert_equal(engine: TransformersEngine, model: nn.Module) -> None:
    found = engine.model.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("staged", [True, False], ids=["staged", "streamed"])
def test_engines_get_every_version(transport, staged, engines, tokenizer, change, no_gpu):
    model = build_model(tokenizer, seed=1)
    updater = WeightPublisher(
        model, engines, transport=transport, bucket_bytes=100_000, staged=staged, timeout=TIMEOUT, verify_every=2
    )
    for version in (1, 2, 3):
        change(model, version)
        assert updater.push_weights() == version
        for engine in engines:
            assert engine.version == version
            assert_equal(engine, model)
    assert updater.last_push.buckets > 3
    if isinstance(transport, VLLMNCCL):
        assert len(no_gpu.sizes) == 2 * 3 * updater.last_push.buckets, "a message for each bucket and engine"
    updater.close()


def test_a_corrupt_bucket_is_found_and_the_next_push_repairs_it(transport, engines, tokenizer, monkeypatch):
    model, damage = build_model(tokenizer, seed=1), [True]
    receive = VLLMReceiver.receive

    def damaged(self, infos, payload):
        tensors = receive(self, infos, payload)
        if damage:
            damage.pop()
            tensors[0] = tensors[0].clone()
            tensors[0].view(-1)[0] += 1
        return tensors

    monkeypatch.setattr(VLLMReceiver, "receive", damaged)
    updater = WeightPublisher(model, engines[:1], transport=transport, bucket_bytes=100_000, timeout=TIMEOUT)
    with pytest.raises(WeightSyncError, match="is corrupt: its checksum"):
        updater.push_weights()
    assert engines[0].version == 0 and engines[0].failed_version is None
    assert updater.push_weights() == 2
    assert_equal(engines[0], model)
    updater.close()


def test_a_snapshot_fills_an_engine_while_the_model_trains(transport, engines, tokenizer, change):
    model, group = build_model(tokenizer, seed=1), Group(*engines)
    published = build_model(tokenizer, seed=1)
    updater = WeightPublisher(model, group, transport=transport, bucket_bytes=100_000, timeout=TIMEOUT)
    updater.push_weights()
    change(model, 1)
    change(engines[0].model, 2)
    engines[0].version = 0
    group.fill(engines[0])
    assert engines[0].version == 1
    assert_equal(engines[0], published)
    updater.close()


def test_tensors_of_odd_sizes_and_several_types(transport, no_gpu):
    tensors = [torch.arange(3, dtype=torch.int8), torch.randn(2, 5), torch.randn(3).bfloat16(), torch.randn(3).double()]
    infos = [TensorInfo.of(str(i), t) for i, t in enumerate(tensors)]
    storage = transport.store(1, [packed_size(infos)], keep=False)
    storage.put(0, infos, tensors)
    link, receivers = transport.connect(1, TIMEOUT), []
    link.open(lambda options: receivers.append(transport.receiver(through_json(options), torch.device("cpu", 0), 0)))
    received: list[torch.Tensor] = []
    link.deliver(storage.get(0), lambda payload: received.extend(receivers[0].receive(infos, through_json(payload))))
    for tensor, expected in zip(received, tensors, strict=True):
        assert torch.equal(tensor, expected) and tensor.dtype is expected.dtype
    receivers[0].close()
    link.close()


def through_json(value: dict) -> dict:
    return json.loads(json.dumps(value))


def test_an_export_survives_json():
    arguments = (torch.Tensor, torch.Size([4]), (1,), 0, torch.storage.TypedStorage, torch.uint8, 0, b"\x00\xff", 4, 0)
    arguments += (False, b"counter", 64, b"event", True)
    assert decode_export(json.loads(json.dumps(encode_export(arguments)))) == arguments
    with pytest.raises(ValueError, match="exports a CUDA buffer with .*float32"):
        encode_export((*arguments[:5], torch.float32, *arguments[6:]))


@pytest.mark.parametrize("make", TRANSPORTS.values())
def test_without_a_gpu_they_are_refused_by_name(make):
    if torch.cuda.is_available():
        pytest.skip("requires a machine without CUDA")
    message = rf"transport={make.__name__}\(\) requires a CUDA device; use SharedMemory"
    with pytest.raises(ValueError, match=message):
        make()
    updater = {"transport": {"_target_": f"torchrl_rloo.weight_update.{make.__name__}"}}
    with pytest.raises(ValueError, match=message):
        InferenceConfig(engine={"_target_": "unused"}, updater=updater).check_transport()


def test_an_engine_on_another_gpu_is_told_so(no_gpu):
    link = VLLMIPCLink(1, CPU)
    receiver = VLLMReceiver(link.options, torch.device("cpu", 0), 0)

    def receive(payload: dict) -> None:
        payload["ipc_handles"] = {"another": payload["ipc_handles"][GPU]}
        receiver.receive([TensorInfo("a", "uint8", (4,))], payload)

    with pytest.raises(ValueError, match="IPC handle not found for GPU UUID"):
        link.deliver(torch.zeros(64, dtype=torch.uint8), receive)


@pytest.mark.gpu
def test_another_process_maps_the_buffer(tmp_path: Path):
    if not torch.cuda.is_available():
        pytest.skip("requires a CUDA device")
    pytest.importorskip("vllm")
    transport, tensors = VLLMIPC(), [torch.randn(1000, 10, device="cuda"), torch.arange(7, device="cuda")]
    infos = [TensorInfo.of(str(i), t) for i, t in enumerate(tensors)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, __file__, json.dumps([list(i) for i in infos])]
    receiver = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    link = transport.connect(1, TIMEOUT)

    def receive(payload: dict) -> None:
        receiver.stdin.write(json.dumps(payload) + "\n")
        receiver.stdin.flush()
        sums.append(json.loads(receiver.stdout.readline()))

    try:
        for factor in (1, 2, 3):
            sums: list[list[float]] = []
            storage = transport.store(1, [packed_size(infos)], keep=False)
            storage.put(0, infos, [factor * tensor for tensor in tensors])
            link.deliver(storage.get(0), receive)
            expected = [factor * float(tensor.sum()) for tensor in tensors]
            assert sums[0] == pytest.approx(expected, rel=1e-3, abs=1e-2)
    finally:
        receiver.kill()
        link.close()


@pytest.mark.gpu
def test_two_gpus_broadcast():
    if torch.cuda.device_count() < 2:
        pytest.skip("requires two CUDA devices, since NCCL refuses two ranks on one")
    pytest.importorskip("vllm")
    transport, tensors = VLLMNCCL(), [torch.randn(1000, 10), torch.arange(7)]
    infos = [TensorInfo.of(str(i), t) for i, t in enumerate(tensors)]
    link, receivers, received = transport.connect(1, TIMEOUT), [], []

    def on_second_gpu(call: Callable[[], None]) -> None:
        torch.cuda.set_device(1)
        call()
        torch.cuda.set_device(0)

    link.open(
        lambda options: on_second_gpu(lambda: receivers.append(transport.receiver(options, torch.device("cuda", 1), 0)))
    )
    storage = transport.store(1, [packed_size(infos)], keep=False)
    storage.put(0, infos, tensors)
    link.deliver(
        storage.get(0),
        lambda payload: on_second_gpu(lambda: received.extend(t.cpu() for t in receivers[0].receive(infos, payload))),
    )
    assert all(torch.equal(tensor, expected) for tensor, expected in zip(received, tensors, strict=True))
    link.close()


if __name__ == "__main__":
    described = [TensorInfo(name, dtype, tuple(shape)) for name, dtype, shape in json.loads(sys.argv[1])]
    worker = VLLMReceiver({"backend": "ipc", "workers": 1, "init_info": {"packed": True}}, torch.device("cuda", 0), 0)
    for line in sys.stdin:
        print(json.dumps([float(t.sum()) for t in worker.receive(described, json.loads(line))]), flush=True)
