"""Rows split over two ranks: shared normalizers and averaged gradients equal those of one process.

As a script, this file runs one rank.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tensordict import TensorDictBase

from support.rank_scripts import become_rank, run_ranks
from torchrl_rloo.data import keys, stack_rows
from torchrl_rloo.embedded import build_model, build_tokenizer
from torchrl_rloo.modules import TransformersWrapper
from torchrl_rloo.objectives import RLOOLoss
from torchrl_rloo.objectives.normalizers import Normalizers
from torchrl_rloo.runtime.ranks import Ranks

SPLIT = ([1, 2, 4, 6], [0, 3, 5])  # unequal numbers of rows and of tokens
MERGED = ([0, 3, 4, 5, 6], [1, 2])
SETTINGS = {
    "sequence_sum": {},
    "sequence_mean": {"ratio": "sequence_mean", "aggregation": "sequence_mean", "kl_to_ref_coeff": 0.1},
    "token_mean": {"ratio": "token", "aggregation": "token_mean", "entropy_coeff": 0.1},
    "constant": {"ratio": "token", "aggregation": {"name": "constant", "length": 9.0}},
    "truncated rows left out": {
        "ratio": "token",
        "aggregation": "token_mean",
        "mask_truncated_completions": True,
        "kl_to_inference_coeff": 0.2,
    },
    "high entropy": {"ratio": "token", "aggregation": "token_mean", "high_entropy_fraction": 0.3},
    "high entropy, truncated rows left out": {
        "ratio": "none",
        "aggregation": "sequence_mean",
        "mask_truncated_completions": True,
        "high_entropy_fraction": 0.4,
    },
}


def make_policy() -> TransformersWrapper:
    tokenizer = build_tokenizer()
    return TransformersWrapper(build_model(tokenizer, seed=0).eval(), tokenizer=tokenizer, generate=False)


def part_of(rows: TensorDictBase, name: str, rank: int) -> TensorDictBase:
    split = MERGED if "truncated" in name else SPLIT
    return stack_rows([rows[i] for i in split[rank]])


def gradient_of(policy: TransformersWrapper, loss: torch.Tensor) -> list[torch.Tensor]:
    policy.zero_grad()
    loss.backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in policy.parameters()]


def run_rank(ranks: Ranks, folder: Path) -> dict[str, tuple]:
    policy, rows, results = make_policy(), torch.load(folder / "rows.pt", weights_only=False), {}
    for name, settings in SETTINGS.items():
        loss, part = RLOOLoss(policy, **settings), part_of(rows, name, ranks.rank)
        normalizers = loss.normalizers(part, ranks.group)
        gradient = gradient_of(policy, loss(part, normalizers).loss)
        for g in gradient:  # as DistributedDataParallel does
            torch.distributed.all_reduce(g)
            g /= 2
        results[name] = (normalizers.num_rows, normalizers.num_tokens, normalizers.entropy_threshold, gradient)
    return results


def test_averaged_gradients_of_two_ranks_are_those_of_one_process(tmp_path, rows_of, rows_with, fork_server):
    policy = make_policy()

    def own(tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            full = policy.model(input_ids=tokens[None]).logits[0, :-1].log_softmax(-1)
        return torch.cat([torch.zeros(1), full.gather(-1, tokens[1:, None])[:, 0]])

    rows = rows_with(rows_of(own, 300, torch.float32), "weighted", "merged")
    torch.save(rows, tmp_path / "rows.pt")
    results = run_ranks(fork_server, __file__, tmp_path, 2).results()
    for name, settings in SETTINGS.items():
        loss = RLOOLoss(policy, **settings)
        whole = loss.normalizers(rows)
        expected = gradient_of(policy, loss(rows).loss)
        scale = max(float(g.norm()) for g in expected)
        assert scale > 0
        for num_rows, num_tokens, threshold, gradient in (result[name] for result in results):
            halved = Normalizers(whole.num_rows / 2, whole.num_tokens / 2, whole.entropy_threshold)
            assert Normalizers(num_rows, num_tokens, threshold) == halved, name
            for ours, theirs in zip(gradient, expected, strict=True):
                assert float((ours - theirs).norm()) <= 1e-5 * scale, name
        parts = [gradient_of(policy, loss(part_of(rows, name, rank)).loss / 2) for rank in range(2)]
        apart = [a + b for a, b in zip(*parts, strict=True)]  # the result of separate normalizers for each rank
        assert max(float((a - b).norm()) for a, b in zip(apart, expected, strict=True)) > 1e-3 * scale, name


def test_both_ranks_have_truncated_rows_and_action_tokens(rows_of, bigram_rows):
    """Otherwise the settings above would not be tested."""
    for split in (SPLIT, MERGED):
        assert sorted(split[0] + split[1]) == list(range(len(bigram_rows)))
        tokens = [sum(int(bigram_rows[i][keys.ACTION_MASK].sum()) for i in part) for part in split]
        assert tokens[0] != tokens[1] and min(tokens) > 0
    assert [any(bool(bigram_rows[i][keys.TRUNCATED]) for i in part) for part in MERGED] == [True, True]


if __name__ == "__main__":
    become_rank(run_rank)
