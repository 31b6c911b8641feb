"""Training that three ranks continue in a model that is new to DDP or FSDP has the bits of training without a stop.

As a script, this file is one rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrl.data import ReplayBuffer, SamplerWithoutReplacement

from support.rank_scripts import become_rank, run_ranks
from support.rank_training import TOKENIZER, build_model, build_rows
from torchrl_rloo.engines.root import call_root, replica_of
from torchrl_rloo.modules import TransformersWrapper
from torchrl_rloo.objectives import PRESETS, RLOOLoss
from torchrl_rloo.replay import MCAdvantage, RowStorage
from torchrl_rloo.runtime.ranks import Ranks
from torchrl_rloo.training import accumulate, minibatches, optimizer_step, shard_model
from torchrl_rloo.weight_update.shards import gather, reshard

SIZE = 3  # the sum of two ranks has the same bits in any order
STEPS = 3
ROWS = 2  # of a pass; each rank makes several in a step


class Training:
    """Model of one process, and its optimizer."""

    def __init__(self, ranks: Ranks, parallel: str):
        self.ranks, wrapper = ranks, {"tokenizer": TOKENIZER, "generate": False}
        self.start = TransformersWrapper(build_model(), **wrapper)
        self.model = shard_model(build_model(), ranks, parallel)
        self.loss = RLOOLoss(TransformersWrapper(self.model, **wrapper), **PRESETS["rloo"].loss_arguments)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def step(self, number: int) -> None:
        buffer = ReplayBuffer(
            storage=RowStorage(),
            sampler=SamplerWithoutReplacement(),
            transform=MCAdvantage(3),
            generator=torch.Generator().manual_seed(number),
        )
        buffer.extend(build_rows(number, self.start))
        for batch in minibatches(buffer, 1):
            accumulate(self.loss, batch, ranks=self.ranks, micro_batch_size=ROWS)
            optimizer_step(self.model, self.optimizer)

    def restarted(self, parallel: str) -> Training:
        """Return a training with the same state in new objects, as a resumed process has them."""
        other = Training(self.ranks, parallel)
        reshard(self.model)
        with torch.no_grad():
            for new, old in zip(other.model.parameters(), self.model.parameters(), strict=True):
                new.copy_(old)
        other.optimizer.load_state_dict(self.optimizer.state_dict())
        return other

    def weights(self) -> dict[str, torch.Tensor]:
        reshard(self.model)
        return {name: gather([p.detach()], None)[0].clone() for name, p in self.model.named_parameters()}


def train(ranks: Ranks, parallel: str, restarts: tuple[int, ...] = ()) -> dict[str, torch.Tensor]:
    """Return the weights after some steps, with new objects before those in ``restarts``."""
    training = Training(ranks, parallel)
    for step in range(STEPS):
        if step in restarts:
            training = training.restarted(parallel)
        training.step(step)
    return training.weights()


def count_reductions(ranks: Ranks) -> list[int]:
    """Return the reductions in the backward pass of one that accumulates and of one that reduces.

    The first two come after a forward pass without a graph, as a new policy makes one to try the output head.
    """
    model, counts = nn.Linear(3, 2), []
    shard_model(model, ranks, "ddp")
    replica = replica_of(model)

    def count(state, bucket):  # DDP refuses postponed annotations
        counts[-1] += 1
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    replica.register_comm_hook(None, count)
    for accumulates, idle in ((True, True), (False, True), (True, False), (False, False)):
        if idle:
            call_root(model, lambda: model(torch.ones(1, 3)).detach())
        counts.append(0)
        replica.require_backward_grad_sync = not accumulates
        call_root(model, model.forward, torch.ones(1, 3)).sum().backward()
        replica.require_backward_grad_sync = True
    return counts


def run(ranks: Ranks, folder: Path) -> dict[str, Any]:
    found = {parallel: [train(ranks, parallel, restarts) for restarts in ((), (1, 2))] for parallel in ("ddp", "fsdp")}
    return found | {"reductions": count_reductions(ranks)}


@pytest.fixture(scope="module")
def results(tmp_path_factory, fork_server) -> list[dict[str, Any]]:
    return run_ranks(fork_server, __file__, tmp_path_factory.mktemp("restarted"), SIZE).results()


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_restart_changes_no_bit(results, parallel):
    start = dict(build_model().named_parameters())
    for result in results:
        whole, restarted = result[parallel]
        changed = [name for name, weight in whole.items() if not torch.equal(weight, restarted[name])]
        assert not changed, f"{len(changed)} of {len(whole)} weights differ, first {changed[0]}"
        assert all(not torch.equal(weight, start[name]) for name, weight in whole.items())


def test_a_pass_without_a_graph_makes_the_next_one_reduce_no_gradient(results):
    for result in results:
        assert result["reductions"] == [0, 1, 0, 1]


if __name__ == "__main__":
    become_rank(run)
