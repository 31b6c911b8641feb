"""Copies of weights that drift apart are found on all ranks.

As a script, this file runs one rank.
"""

from __future__ import annotations

from pathlib import Path

import torch

from support.rank_scripts import become_rank, run_ranks
from support.rank_training import build_model
from torchrl_rloo.runtime.ranks import Ranks
from torchrl_rloo.training import check_copies, shard_model


def message(model: torch.nn.Module, ranks: Ranks) -> str:
    try:
        return f"{len(set(check_copies(model, ranks).values()))} checksums"
    except RuntimeError as error:
        return str(error)


def run_rank(ranks: Ranks, folder: Path) -> dict[str, list[str]]:
    found = {}
    for name, parallel, shard in (("ddp", "ddp", {}), ("hsdp", "fsdp", {"shard_size": 1}), ("fsdp", "fsdp", {})):
        model = shard_model(build_model(), ranks, parallel, **shard)
        found[name] = [message(model, ranks)]
        if ranks.rank == 1:
            weight = next(model.parameters())
            with torch.no_grad():
                (weight.to_local() if hasattr(weight, "to_local") else weight).view(-1)[0] += 1e-6
        found[name].append(message(model, ranks))
    return found


def test_copies_that_drift_apart_are_named_on_all_ranks(tmp_path, fork_server):
    for found in run_ranks(fork_server, __file__, tmp_path, 2).results():
        for name in ("ddp", "hsdp"):
            assert found[name][0] == "1 checksums"
            assert found[name][1].startswith("ranks [0, 1] must have equal weights, but their checksums are ")
        assert found["fsdp"] == ["2 checksums", "2 checksums"]  # each rank has other weights


if __name__ == "__main__":
    become_rank(run_rank)
