"""Weight updates from sharded ranks without an engine that loads: their memory and time.

``bench_weight_sync.py`` runs this file once for each rank.
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
            with tempfile.TemporaryDirectory() as folder:
                options = [str(getattr(args, name)) for name in ARGUMENTS]
                command = [sys.executable, __file__, transport, folder, *options]
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


if __name__ == "__main__":
    run_rank(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
