"""Ranks that train together give the weights and metrics of one process, whatever way the work is cut up.

Every preset, layout and way to distribute the model occurs; ``benchmarks/bench_ranks.py`` runs all combinations.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from support import rank_training
from support.fork_server import ForkServer
from support.rank_scripts import run_ranks
from torchrl_rloo.data import keys, stack_rows
from torchrl_rloo.data.metadata import shares_of, split_by_tokens
from torchrl_rloo.data.rows import PACKINGS
from torchrl_rloo.objectives import PRESETS
from torchrl_rloo.runtime.ranks import Ranks
from torchrl_rloo.training import accumulate, shard_model

LAYOUTS = tuple(itertools.product(PACKINGS, ("ddp", "fsdp")))
FITTING = {"pass_at_k": {"advantage": {"estimator": {"k": 2, "success": 0.5}}}}  # groups have three members
# One case for each preset, of changing layouts
CASES: list[dict[str, Any]] = [
    {"preset": preset, "steps": 2, "packing": packing, "parallel": parallel, **FITTING.get(preset, {})}
    for preset, (packing, parallel) in zip(PRESETS, itertools.cycle(LAYOUTS), strict=False)
]
# Ways to cut up the work; with two tokens in a pass, most ranks run some passes without rows
CASES += [
    {"preset": "grpo", "steps": 2, "parallel": "fsdp", "packing": "packed", "accumulate": {"max_tokens": 30}},
    {"preset": "rloo", "steps": 2, "parallel": "ddp", "accumulate": {"micro_batch_size": 2}, "minibatches": 5},
    {
        "preset": "dapo",
        "steps": 2,
        "parallel": "fsdp",
        "tied": False,
        "minibatches": 2,
        "accumulate": {"micro_batch_size": 2, "reduce": "every_pass"},
    },
    {"preset": "rloo_trl", "steps": 2, "parallel": "fsdp", "packing": "shared_prefix", "checkpointing": True},
    {"preset": "rloo_trl", "steps": 2, "parallel": "ddp", "packing": "packed", "checkpointing": True},
    {"preset": "rloo_trl", "steps": 2, "parallel": "fsdp", "samples": True},
    {"preset": "rloo_trl", "steps": 20, "parallel": "fsdp"},
    {"preset": "dr_grpo", "steps": 1, "parallel": "fsdp", "rewards": 1.0},
    {"preset": "grpo", "steps": 1, "parallel": "fsdp", "accumulate": {"micro_batch_size": 1}, "minibatches": 5},
]


def train_ranks(server: ForkServer, folder: Path, size: int, cases: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Train cases on ranks of one group; return the results of each rank."""
    (folder / "cases.json").write_text(json.dumps(cases))
    return run_ranks(server, rank_training.__file__, folder, size).results()


def alone(case: dict[str, Any]) -> dict[str, Any]:
    return rank_training.train({key: value for key, value in case.items() if key != "parallel"}, None)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_give_the_weights_of_one_process(size, tmp_path, fork_server):
    cases = CASES if size == 2 else CASES[1:11:3] + CASES[11:14]
    results = train_ranks(fork_server, tmp_path, size, cases)
    for number, case in enumerate(cases):
        expected = alone(case)
        for rank, of_rank in enumerate(results):
            assert number < len(of_rank), f"rank {rank} ended before {case}"
            found = of_rank[number]
            assert "error" not in found, found["error"]
            assert found["weights"].keys() == expected["weights"].keys()
            for name, weight in expected["weights"].items():
                message = f"{case}, rank {rank}: {name}"
                torch.testing.assert_close(found["weights"][name], weight, rtol=0, atol=1e-5, msg=message)
            assert found["metrics"] == pytest.approx(expected["metrics"], rel=2e-3, abs=1e-4), case


def test_training_moves_all_weights():
    """Otherwise equal weights would prove nothing."""
    start = dict(rank_training.build_model().named_parameters())
    moved = alone({"preset": "rloo", "steps": 2})["weights"]
    for name, weight in moved.items():
        assert float((weight - start[name.removeprefix("0.")]).detach().abs().max()) > 1e-4, name


def test_shares_are_balanced_and_whole():
    generator = torch.Generator().manual_seed(0)
    for size in (1, 2, 3, 7):
        lengths = torch.randint(1, 50, (20,), generator=generator).tolist()
        shares = split_by_tokens(lengths, size)
        assert sorted(i for share in shares for i in share) == list(range(20))
        loads = [sum(lengths[i] for i in share) for share in shares]
        assert max(loads) - min(loads) <= max(lengths)
    assert split_by_tokens([3], 3) == [[0], [], []]


def test_rows_of_a_prompt_stay_on_one_rank():
    start = rank_training.TransformersWrapper(
        rank_training.build_model(), tokenizer=rank_training.TOKENIZER, generate=False
    )
    rows = rank_training.build_rows(0, start)
    members = rank_training.MEMBERS
    for share in shares_of(rows, 2, "shared_prefix"):
        groups = [i // members for i in share]
        assert all(groups.count(group) == members for group in groups)
    # A single group is larger than a share, so its rows are split
    assert all(shares_of(stack_rows(list(rows[:members].unbind(0))), 2, "shared_prefix"))


def test_trees_are_cut_between_ranks_where_rows_share_the_fewest_tokens():
    """The rows share a system prompt; two of the three trees have branches."""
    texts = ["s" * 9 + text for text in ("aaaabb", "aaaacc", "aaaad", "ee", "fghi", "fghj")]
    rows = [TensorDict({keys.TOKENS: torch.tensor([ord(c) for c in text])}, []) for text in texts]
    shares = shares_of(stack_rows(rows), 2, "shared_prefix")
    assert sorted(i for share in shares for i in share) == list(range(6))
    assert [[i for i in (0, 1, 2) if i in share] for share in shares if 0 in share] == [[0, 1, 2]]
    assert [[i for i in (4, 5) if i in share] for share in shares if 4 in share] == [[4, 5]]
    assert shares_of(stack_rows(rows), 1, "shared_prefix") == [list(range(6))]


def test_pairs_are_split_between_ranks_in_every_packing():
    def entry(n):
        return {keys.TOKENS: torch.arange(n)}

    rows = [{"chosen": TensorDict(entry(n), []), "rejected": TensorDict(entry(2), [])} for n in (5, 3, 3, 2)]
    pairs = stack_rows([TensorDict(row, []) for row in rows])
    assert [shares_of(pairs, 2, packing) for packing in PACKINGS] == [[[0, 3], [1, 2]]] * 3


def test_wrong_arguments_are_refused_by_name():
    model, single = rank_training.build_model(), Ranks.single()
    with pytest.raises(ValueError, match="parallel='zero' must be one of"):
        shard_model(model, single, "zero")
    with pytest.raises(ValueError, match="parallel='fsdp' requires ranks of a process group"):
        shard_model(model, single, "fsdp")
    with pytest.raises(ValueError, match="parallel='none' cannot be combined with 2 ranks"):
        shard_model(model, Ranks(0, 2), "none")
    with pytest.raises(ValueError, match="shard_size=2 requires parallel='fsdp'"):
        shard_model(model, single, "none", shard_size=2)
    with pytest.raises(ValueError, match="float32_head=True"):
        shard_model(model, single, "none", float32_head=True)
    policy = rank_training.TransformersWrapper(model, tokenizer=rank_training.TOKENIZER, generate=False)
    loss = rank_training.RLOOLoss(policy)
    rows = rank_training.build_rows(0, policy)
    for row in rows.unbind(0):
        row.set("advantage", torch.ones(1, 1))
    with pytest.raises(ValueError, match="reduce='never' must be one of"):
        accumulate(loss, rows, reduce="never")
