"""Ranks that fetch their own rows of a step give the weights and metrics of one process with all rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from support import own_rows
from support.fork_server import ForkServer
from support.rank_scripts import run_ranks
from support.rank_training import GROUPS, MEMBERS, TOKENIZER, build_model, build_rows
from torchrl_rloo.data import keys, stack_rows
from torchrl_rloo.data.metadata import MAX_LOAD, OwnRows, metadata_of, shares_of_groups
from torchrl_rloo.modules import TransformersWrapper
from torchrl_rloo.objectives import RLOOLoss
from torchrl_rloo.runtime.ranks import Ranks
from torchrl_rloo.training import accumulate

PPO = {"preset": "reinforce_pp", "kl": None, "loss": {"old_log_probs": "proximal"}, "scores": True, "epochs": 2}
CASES: dict[str, dict[str, Any]] = {
    "KL in the reward": {"preset": "rloo", "parallel": "ddp", "reference": 0.05, "kl": None},
    "KL in the loss": {"preset": "grpo", "parallel": "fsdp", "packing": "shared_prefix"},
    "tokens": {"preset": "dapo", "parallel": "fsdp", "accumulate": {"micro_batch_size": 2, "reduce": "every_pass"}},
    "sequences": {"preset": "gspo", "parallel": "ddp", "packing": "packed", "accumulate": {"max_tokens": 30}},
    "whitened": {"preset": "reinforce_pp_baseline", "parallel": "fsdp", "minibatches": 2},
    "ppo": PPO | {"parallel": "ddp", "minibatches": 3},
    "entropy": {"preset": "cispo", "parallel": "fsdp", "scores": True, "loss": {"high_entropy_fraction": 0.4}},
    "stale tokens": {"preset": "rloo_trl", "parallel": "ddp", "on_stale": "mask", "kl": None, "minibatches": 2},
    "stale rows": {"preset": "dr_grpo", "parallel": "fsdp", "on_stale": "baseline"},
    "samples": {"preset": "dr_grpo", "parallel": "ddp", "segments": True, "minibatches": 2, "on_stale": "mask"},
    "minibatches of a row": {
        "preset": "rloo",
        "parallel": "ddp",
        "kl": None,
        "minibatches": GROUPS * MEMBERS,
        "steps": 1,
    },
    "a rank without rows": {"preset": "rloo", "parallel": "ddp", "rows": 1, "members": 1, "scores": True, "kl": None}
    | {"reference": 0.1, "advantage": {"estimator": "reinforce"}},
    "no signal": {"preset": "dr_grpo", "parallel": "fsdp", "rewards": 1.0},
    "lost on one rank": {"preset": "rloo", "parallel": "ddp", "kl": None, "lost": {"1": [0, 2, 5, 8]}},
    "rows of two ranks": {
        "preset": "dapo",
        "parallel": "ddp",
        "packing": "packed",
        "ranks": {"context_parallel": 2},
        "model": {"heads": (4, 2)},
    },
}
OF_THREE = ("KL in the reward", "whitened", "entropy", "samples", "a rank without rows", "lost on one rank")


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_with_own_rows_give_the_weights_of_one_process(size, tmp_path: Path, fork_server: ForkServer):
    cases = {name: {"steps": 2} | CASES[name] for name in (CASES if size == 2 else OF_THREE)}
    (tmp_path / "cases.json").write_text(json.dumps(list(cases.values())))
    results = run_ranks(fork_server, own_rows.__file__, tmp_path, size).results()
    for number, (name, case) in enumerate(cases.items()):
        expected = own_rows.train_own_rows({k: v for k, v in case.items() if k not in ("parallel", "ranks")}, None)
        for rank, of_rank in enumerate(results):
            assert number < len(of_rank), f"rank {rank} ended before {name!r}"
            found = of_rank[number]
            assert "error" not in found, f"{name}: {found['error']}"
            for key, weight in expected["weights"].items():
                message = f"{name}, rank {rank}: {key}"
                torch.testing.assert_close(found["weights"][key], weight, rtol=0, atol=1e-5, msg=message)
            assert rank or bool(found["replaced"]) == ("lost" in case), name
            assert found["metrics"] == pytest.approx(expected["metrics"], rel=2e-3, abs=1e-4, nan_ok=True), name


class OtherRank(Ranks):
    """Rank 0 of two, of which rank 1 tells what a test gives it."""

    def __init__(self, change):
        super().__init__(0, 2)
        self.change = change

    def all_gather(self, value: Any, name: str = "") -> list[Any]:
        return [value, self.change(value)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda told: told, r"the ranks own \[10, 10\] rows of batches of \[15, 15\]"),  # rows that both have
        (lambda told: (0, *told[1:]), r"the ranks own \[10, 0\] rows"),  # rows that none has
        (
            lambda told: (5, told[1], 0),
            r"the ranks own \[10, 5\] rows of batches of \[15, 15\]; pass the same metadata",
        ),
    ],
    ids=["twice", "never", "another batch"],
)
def test_a_row_must_belong_to_one_rank(change, message):
    policy = TransformersWrapper(build_model(), tokenizer=TOKENIZER, generate=False)
    rows = own_rows.as_finished(build_rows(0, policy))
    for row in rows.unbind(0):
        row.set(keys.ADVANTAGE, torch.ones(1, 1))
    metadata = metadata_of(rows)
    own = OwnRows(metadata, stack_rows(list(rows.unbind(0))[:10]))
    with pytest.raises(RuntimeError, match=message):
        accumulate(RLOOLoss(policy), metadata, ranks=OtherRank(change), rows_of=own.rows_of)
    # One process must have all rows
    with pytest.raises(RuntimeError, match=r"own \[10\] rows of batches of \[15\]"):
        accumulate(RLOOLoss(policy), metadata, rows_of=own.rows_of)


def metadata_of_lengths(lengths: list[int], members: int) -> Any:
    rows = [
        {keys.GROUP_ID: torch.tensor(i // members), keys.TOKEN_COUNT: torch.tensor(n)} for i, n in enumerate(lengths)
    ]
    return stack_rows([TensorDict(row, []) for row in rows])


@pytest.mark.parametrize(("groups", "size"), [(64, 8), (16, 8), (8, 3), (3, 8), (1, 2)])
def test_shares_are_balanced_and_mostly_whole_groups(groups, size):
    generator, members = torch.Generator().manual_seed(groups), 8
    lengths = (torch.randn(groups * members, generator=generator).exp() * 500 + 100).long().tolist()
    metadata = metadata_of_lengths(lengths, members)
    shares = shares_of_groups(metadata, size)
    assert sorted(i for share in shares for i in share) == list(range(len(lengths)))
    assert all(share == sorted(share) for share in shares)
    loads = [sum(lengths[i] for i in share) for share in shares]
    assert max(loads) <= max(MAX_LOAD * sum(lengths) / size, min(loads) + max(lengths))
    fetches = sum(len({i // members for i in share}) for share in shares)
    assert fetches <= groups + 2 * size


def test_rows_that_are_trained_on_are_balanced_without_the_others():
    lengths = [10] * 16
    metadata = metadata_of_lengths(lengths, 2)
    trained = [i < 8 for i in range(16)]
    for share in shares_of_groups(metadata, 4, trained):
        assert sum(trained[i] for i in share) == 2 and len(share) == 4
