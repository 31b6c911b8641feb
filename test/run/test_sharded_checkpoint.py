"""Checkpoints of sharded models: real ranks save, other numbers of ranks load, and bits are compared.

As a script, this file runs one of four ranks. A check on fewer ranks uses the first ones.
"""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from support.fork_server import ForkServer
from support.rank_scripts import EndedRanks, become_rank, run_checks, run_ranks
from torchrl_rloo.embedded import build_model, build_tokenizer
from torchrl_rloo.run import Checkpointer
from torchrl_rloo.run.shards import STATE, gather_state, restore_state
from torchrl_rloo.runtime.ranks import RankError, Ranks

WORLD = 4
IDS = torch.arange(5, 29)[None]


class Policy(nn.Module):
    """Language model with tied weights, and a head that is smaller than the number of ranks."""

    def __init__(self):
        super().__init__()
        self.lm = build_model(build_tokenizer(), 0)
        self.head = nn.Linear(1, 1)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.head(self.lm(input_ids=ids, labels=ids).loss[None, None])


class Scaled(torch.optim.AdamW):
    """AdamW with a state per row, as optimizers with quantized moments have, and one that each rank has whole."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for p in self.state:
            if p.ndim == 2:
                self.state[p]["scale"] = p[:, :1] * 2
                self.state[p]["largest"] = torch.full_like(p[0], 3.0)


class World:
    """Ranks and meshes of every size."""

    def __init__(self, rank: int):
        self.rank = rank
        self.meshes = {size: DeviceMesh("cpu", torch.arange(size)) for size in range(2, WORLD + 1)}
        self.meshes["hybrid"] = DeviceMesh("cpu", torch.arange(WORLD).view(2, 2), mesh_dim_names=("copies", "shards"))
        self.groups = {size: torch.distributed.new_group(range(size)) for size in range(2, WORLD + 1)}

    def ranks(self, size: int) -> Ranks | None:
        """Return the first ranks; None on the others."""
        if self.rank >= size:
            return None
        return Ranks.single() if size == 1 else Ranks(self.rank, size, control=self.groups[size])

    def parts(self, layout: int | str | None) -> dict[str, Any]:
        """Build a model, sharded by a mesh or in no way (None), with its optimizer."""
        torch.manual_seed(0)
        model = Policy()
        if layout is not None:
            for layer in model.lm.model.layers:
                fully_shard(layer, mesh=self.meshes[layout])
            fully_shard(model, mesh=self.meshes[layout])
        groups = [{"params": list(model.lm.parameters())}, {"params": list(model.head.parameters()), "lr": 0.1}]
        return {"model": model, "optimizer": Scaled(groups, lr=0.01)}


def train(parts: dict[str, Any], steps: int = 1) -> None:
    for _ in range(steps):
        parts["model"](IDS).sum().backward()
        parts["optimizer"].step()
        parts["optimizer"].zero_grad()


def flat(state: Any, path: tuple = ()) -> dict[tuple, Any]:
    """Return the whole values of a state by path; a collective call if they are sharded."""
    if isinstance(state, torch.Tensor):
        whole = state.full_tensor() if hasattr(state, "full_tensor") else state
        return {path: whole.detach().clone()}
    if isinstance(state, (dict, list, tuple)):
        items = state.items() if isinstance(state, dict) else enumerate(state)
        return {key: value for name, item in items for key, value in flat(item, (*path, name)).items()}
    return {path: state}


def contents(parts: dict[str, Any]) -> dict[tuple, Any]:
    return flat({name: part.state_dict() for name, part in parts.items()})


def assert_same(found: dict[tuple, Any], wanted: dict[tuple, Any], tolerance: float = 0.0) -> None:
    assert found.keys() == wanted.keys()
    for path, value in wanted.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(found[path], value, rtol=0, atol=tolerance, msg=lambda m, p=path: f"{p}: {m}")
        else:
            assert found[path] == value, path


def save(folder: Path, ranks: Ranks, step: int, parts: dict[str, Any], **settings) -> Path:
    checkpointer = Checkpointer(folder, ranks=ranks, **settings)
    path = checkpointer.save(step, {"step": step, "parts": gather_state(**parts)})
    checkpointer.close()
    return path


# Saved on -> loaded on: number of ranks and layout
SAVERS = {"fsdp4": (4, 4), "hybrid": (4, "hybrid"), "ddp2": (2, None)}
LOADERS = ((4, 4), (3, 3), (4, "hybrid"), (1, None))


def check_resharding(world: World, folder: Path) -> None:
    """Save and load in all layouts: equal bits, and training continues equally."""
    for name, (size, layout) in SAVERS.items():
        if (ranks := world.ranks(size)) is not None:
            parts = world.parts(layout)
            train(parts, 2)
            path = save(folder / name, ranks, 2, parts)
            assert path.suffix == ("" if layout else ".pt")
            wanted = contents(parts)
            train(parts)
            if world.rank == 0:
                torch.save([wanted, contents(parts)], folder / f"{name}.pt")
            else:
                contents(parts)
        torch.distributed.barrier()
        wanted, later = torch.load(folder / f"{name}.pt")
        for size, layout in LOADERS:
            if (ranks := world.ranks(size)) is None:
                continue
            parts = world.parts(layout)
            state = Checkpointer(folder / name, ranks=ranks).load()
            restore_state(state["parts"], **parts)
            assert_same(contents(parts), wanted)
            tied = parts["model"].lm
            assert tied.lm_head.weight is tied.model.embed_tokens.weight
            sharded = [hasattr(p, "full_tensor") for p in parts["model"].parameters()]
            states = parts["optimizer"].state.values()
            sharded += [hasattr(value, "full_tensor") for s in states for value in s.values() if value.ndim]
            assert all(flag == (layout is not None) for flag in sharded)
            for p, s in parts["optimizer"].state.items():
                if layout is not None and p.ndim == 2:
                    assert s["scale"].placements == s["exp_avg"].placements == p.placements
                    assert all(placement.is_replicate() for placement in s["largest"].placements)
            train(parts)
            assert_same(contents(parts), later, tolerance=1e-5)
            if (size, layout) == SAVERS[name]:
                assert_same(contents(parts), later)
        torch.distributed.barrier()


def check_asynchronous(world: World, folder: Path) -> None:
    """Save asynchronously: the bytes of the moment, whatever training does at the same time."""
    for size, layout in ((3, 3), (2, None), (1, None)):
        if (ranks := world.ranks(size)) is None:
            torch.distributed.new_group(range(size), backend="gloo")  # all processes take part, as in the others' save
            continue
        parts = world.parts(layout)
        train(parts)
        names = {way: folder / f"{way}-{size}" for way in ("synchronous", "asynchronous")}
        wanted = save(names["synchronous"], ranks, 1, parts)
        checkpointer = Checkpointer(names["asynchronous"], ranks=ranks, asynchronous=True)
        path = checkpointer.save(1, {"step": 1, "parts": gather_state(**parts)})
        train(parts)  # with other collective calls
        checkpointer.wait()
        assert contents_of(path) == contents_of(wanted) != {}
        # The next save waits for the one before, and close for the last one
        for step in (2, 3):
            checkpointer.save(step, {"step": step, "parts": gather_state(**parts)})
        checkpointer.close()
        assert checkpointer.steps() == [2, 3]
        # Errors surface in the next call, on all ranks
        checkpointer.lock()
        ranks.all_gather(None, "look at the steps")  # all have looked before the folder is removed
        if ranks.is_main:
            shutil.rmtree(names["asynchronous"])
        checkpointer.save(4, {"step": 4, "parts": gather_state(**parts)})
        with pytest.raises((OSError, RankError), match=r"cannot write|rank 0 failed"):
            checkpointer.wait()
        checkpointer.close()


def contents_of(path: Path) -> dict[str, Any]:
    """Return the contents of a checkpoint by file: bytes, but of safetensors also the header, whose order varies."""
    if path.is_file():
        return {"bytes": path.read_bytes()}
    found: dict[str, Any] = {"state": str(torch.load(path / STATE)["state"])}
    for file in sorted(path.glob("*.safetensors")):
        content = file.read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        found[file.name] = (json.loads(content[8:end]), content[end:])
    return found


def check_failures(world: World, folder: Path) -> None:
    """Raise an error of one rank on all, which leaves the checkpoint before."""
    ranks = world.ranks(2)
    if ranks is None:
        return
    parts = world.parts(2)
    save(folder / "failures", ranks, 1, parts)
    # A file that exceeds the limit of one rank
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if world.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    with pytest.raises(OSError, match=r"cannot write \S+incomplete\S+: .* size limit .*; raise it"):
        save(folder / "failures", ranks, 2, parts)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    # A state that only rank 0 has
    checkpointer = Checkpointer(folder / "failures", ranks=ranks)
    with pytest.raises((TypeError, RuntimeError), match=r"state\['mine'\] is a .*set"):
        checkpointer.save(3, {"mine": {1} if ranks.is_main else None, "parts": gather_state(**parts)})
    assert ranks.all_gather(None) == [None, None]
    assert checkpointer.steps() == [1]
    ranks.all_gather(None)
    # A damaged file, which only one of the ranks verifies
    shutil.copytree(
        folder / "failures" / "step_00000001", folder / "failures" / "step_00000002"
    ) if ranks.is_main else 0
    ranks.all_gather(None)
    if ranks.is_main:
        damaged = sorted((folder / "failures" / "step_00000002").glob("*.safetensors"))[1]
        damaged.write_bytes(damaged.read_bytes()[:-1] + b"\0")
    ranks.all_gather(None)
    path, _ = checkpointer.newest()
    assert path.name == "step_00000001"


def check_tied(world: World, folder: Path) -> None:
    """Save tied weights once."""
    if (ranks := world.ranks(3)) is None:
        return
    parts = world.parts(3)
    path = save(folder / "tied", ranks, 1, parts)
    if ranks.is_main:
        from safetensors import safe_open

        names = [list(safe_open(file, "pt").keys()) for file in sorted(path.glob("*.safetensors"))]
        everything = {name for found in names for name in found}
        assert "parts/model/lm.model.embed_tokens.weight" in everything
        assert "parts/model/lm.lm_head.weight" not in everything


CHECKS = (check_resharding, check_asynchronous, check_failures, check_tied)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer) -> EndedRanks:
    return run_ranks(fork_server, __file__, tmp_path_factory.mktemp("ranks"), WORLD)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_ranks(ran: EndedRanks, check):
    ran.assert_passed(check)


if __name__ == "__main__":
    become_rank(lambda ranks, folder: run_checks(CHECKS, folder, World(ranks.rank), folder))
