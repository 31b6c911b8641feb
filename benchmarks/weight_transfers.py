"""Parts of a weight update without an engine: memory of sharded ranks, and packed broadcasts.

``bench_weight_sync.py`` runs this file once for each rank and as the receiver of broadcasts.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

MIB = 1 << 20
ARGUMENTS = ("layers", "width", "vocabulary", "pushes", "bucket_mib")


def sharded_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Push a model that is sharded over ranks, with each number of ranks and transport."""
    rows = []
    for size in args.ranks:
        for transport in args.transports:
            if transport == "collective":  # needs workers that join; it gathers as by reference
                continue
            with tempfile.TemporaryDirectory() as folder:
                options = [str(getattr(args, name)) for name in ARGUMENTS]
                command = [sys.executable, __file__, "rank", transport, folder, *options]
                environments = [os.environ | {"RANK": str(r), "WORLD_SIZE": str(size)} for r in range(size)]
                ranks = [subprocess.Popen([*command, str(r)], env=e) for r, e in enumerate(environments)]
                if any([rank.wait() for rank in ranks]):
                    raise RuntimeError(f"a rank failed with transport={transport}, see above")
                found = [json.loads((Path(folder) / f"{r}.json").read_text()) for r in range(size)]
            rows.append(
                {
                    "transport": transport,
                    "ranks": size,
                    "MB": found[0]["MB"],
                    "s": found[0]["s"],
                    "growth of rank 0, MB": found[0]["growth"],
                    "of the others, MB": max(one["growth"] for one in found[1:]),
                    "sent by a rank, MB": max(one["sent"] for one in found[1:]),
                }
            )
    return rows


def run_rank(transport: str, folder: str, layers: int, width: int, vocabulary: int, pushes: int, mib: int, rank: int):
    """Push from one rank, and write how much private memory it took."""
    import torch
    from bench_weight_sync import build, make_transport
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from torchrl_rloo.engines.scripted import ScriptedEngine, ScriptedTurn
    from torchrl_rloo.weight_update import WeightPublisher

    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    model, _ = build(layers, width, vocabulary)
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    engines = [ScriptedEngine(lambda request, index: ScriptedTurn([7]))] if rank == 0 else []
    publisher = WeightPublisher(
        model, engines, transport=make_transport(transport, f"{folder}/weights"), bucket_bytes=mib * MIB
    )
    sent, send = [0], distributed.send

    def counting_send(tensor: torch.Tensor, *rest: Any) -> None:
        sent[0] += tensor.nbytes
        send(tensor, *rest)

    distributed.send = counting_send
    growths, seconds = [], []
    for _ in range(pushes):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        distributed.barrier()
        began, memory = time.perf_counter(), PeakMemory()
        publisher.push_weights()
        growths.append(memory.stop())
        seconds.append(time.perf_counter() - began)
    result = {"growth": max(growths), "s": median(seconds), "sent": sent[0] / pushes / 1e6}
    result["MB"] = sum(info.nbytes for info in publisher.source.manifest()) / 1e6
    (Path(folder) / f"{rank}.json").write_text(json.dumps(result))
    if rank == 0:
        publisher.close()
    os._exit(0)  # at a normal exit a gloo thread of the sharded model may abort the process


class PeakMemory:
    """Growth of this process's private memory from now on, which a thread looks at every millisecond."""

    def __init__(self):
        self._begin = self._peak = _private_bytes()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> float:
        """Return the peak growth in MB."""
        self._ended.set()
        self._thread.join()
        return (self._peak - self._begin) / 1e6

    def _watch(self) -> None:
        while not self._ended.wait(0.001):
            self._peak = max(self._peak, _private_bytes())


def _private_bytes() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


def packing_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Broadcast all tensors of a model over gloo to another process, tensor by tensor and packed."""
    import torch
    from bench_weight_sync import build

    from torchrl_rloo.weight_update import Collective, WeightSource
    from torchrl_rloo.weight_update.protocol import packed_size, plan_buckets

    torch.set_num_threads(1)
    source = WeightSource(build(args.layers, args.width, args.vocabulary)[0])
    manifest, rows = source.manifest(), []
    for name, limit in (("tensor by tensor", 1), ("packed", args.bucket_mib * MIB)):
        buckets = plan_buckets(manifest, limit)
        transport, sizes = Collective(), [packed_size(manifest[a:b]) for a, b in buckets]
        link = transport.connect(1, 60.0)
        plan = json.dumps([link.options, [list(i) for i in manifest], buckets, args.pushes])
        receiver = subprocess.Popen([sys.executable, __file__, "receive", plan], stdout=subprocess.PIPE, text=True)
        link.joined()
        times = []
        for _ in range(args.pushes):
            storage, began = transport.store(1, sizes, True), time.perf_counter()
            for number, (first, last) in enumerate(buckets):
                storage.put(number, manifest[first:last], source.tensors(first, last))
                link.send(storage.get(number))
            receiver.stdout.readline()  # it has all tensors
            times.append(time.perf_counter() - began)
            transport.release(storage, reusable=True)
        receiver.wait()
        link.close()
        megabytes = sum(i.nbytes for i in manifest) / 1e6
        seconds = median(times[1:])
        rows.append({"broadcast": name, "messages": len(buckets), "MB": megabytes, "s": seconds})
        rows[-1]["MB/s"] = megabytes / seconds
    return rows


def receive(plan: str) -> None:
    """Receive all buckets of each push, and print a line for each push."""
    import torch

    from torchrl_rloo.weight_update.collective import CollectiveReceiver
    from torchrl_rloo.weight_update.protocol import TensorInfo

    torch.set_num_threads(1)
    options, manifest, buckets, pushes = json.loads(plan)
    infos = [TensorInfo(name, dtype, tuple(shape)) for name, dtype, shape in manifest]
    receiver = CollectiveReceiver(options, torch.device("cpu"), 0)
    for _ in range(pushes):
        for first, last in buckets:
            receiver.receive(infos[first:last], {})
        print("received", flush=True)
    receiver.close()


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        run_rank(sys.argv[2], sys.argv[3], *map(int, sys.argv[4:]))
    else:
        receive(sys.argv[2])
