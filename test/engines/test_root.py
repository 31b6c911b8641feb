"""Calls through the root of a model in DDP: a rank may score alone.

As a script, this file runs one rank.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed, nn

from support.rank_scripts import become_rank, run_ranks
from support.rank_training import TOKENIZER, build_model, build_rows
from torchrl_rloo.modules import TransformersWrapper
from torchrl_rloo.runtime.ranks import Ranks

LIMIT_S = 30  # far more than a rank needs to come to a call


def make_policy(model: nn.Module) -> TransformersWrapper:
    return TransformersWrapper(model, tokenizer=TOKENIZER, generate=False)


def run_rank(ranks: Ranks, folder: Path) -> dict[str, list[torch.Tensor]]:
    """Score on rank 0 only, without gradients, and then train on both ranks."""
    rows = build_rows(0, make_policy(build_model()))
    # Torch's default sends the buffers of rank 0 before each forward pass
    group = distributed.new_group(timeout=timedelta(seconds=LIMIT_S))
    replica = nn.parallel.DistributedDataParallel(build_model(), process_group=group)
    assert list(replica.buffers())
    policy, scores = make_policy(replica), []
    if ranks.is_main:
        with torch.no_grad():
            scores = list(policy.score(rows).log_probs)
    distributed.barrier()
    torch.cat(list(policy.score(rows[ranks.rank :: 2]).log_probs)).sum().backward()
    return {"scores": scores, "gradient": [p.grad for p in replica.module.parameters()]}


def test_rank_0_scores_alone_and_both_train(tmp_path, fork_server):
    first, second = run_ranks(fork_server, __file__, tmp_path, 2).results()
    policy = make_policy(build_model())
    scored = policy.score(build_rows(0, make_policy(build_model())))
    torch.cat(list(scored.log_probs)).sum().backward()
    for found, expected in zip(first["scores"], scored.log_probs, strict=True):
        torch.testing.assert_close(found, expected.detach())
    # DDP averages the gradients of both halves of the rows
    for found in (first, second):
        for ours, parameter in zip(found["gradient"], policy.model.parameters(), strict=True):
            torch.testing.assert_close(2 * ours, parameter.grad, rtol=1e-4, atol=1e-4)


if __name__ == "__main__":
    become_rank(run_rank)
