"""Steps from which a policy learns nothing are told once, with their cause."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from support.gradients import assert_same_gradient, gradient_of
from support.rank_scripts import become_rank, run_ranks
from torchrl_rloo.data import keys, notices, stack_rows
from torchrl_rloo.embedded import build_model, build_tokenizer
from torchrl_rloo.modules import TransformersWrapper
from torchrl_rloo.objectives import RLOOLoss
from torchrl_rloo.objectives.step import Normalizers
from torchrl_rloo.replay import MCAdvantage
from torchrl_rloo.runtime.ranks import Ranks

NAN = float("nan")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "_SHOWN", set())


def rows_of(rewards: list[float], size: int, actions: int = 2, **settings) -> TensorDictBase:
    rows = [
        TensorDict(
            {
                keys.GROUP_ID: torch.tensor(i // size),
                keys.GROUP_SIZE: torch.tensor(size),
                keys.REWARD: torch.tensor([[reward]]),
                keys.ACTION_MASK: torch.arange(4) >= 4 - actions,
            }
        )
        for i, reward in enumerate(rewards)
    ]
    return MCAdvantage(**settings).inv(stack_rows(rows))


CASES = {
    "groups of one": (([1.0, 0.0, 2.0], 1), {}, "trains nothing: each row is alone in its group.*num_generations=2"),
    "no rewards": (([0.0] * 4, 2), {}, "trains nothing: all rewards are 0. Pass rewards="),
    "equal rewards": (([1.0, 1.0, 3.0, 3.0], 2), {}, "trains nothing: the rows of each group earn the same"),
    "all abstain": (([NAN] * 4, 2), {}, "trains nothing: all rows abstain"),
    "only entropy": (([1.0, 0.0], 1), {"entropy_coeff": 0.01}, "only terms without one train.*alone in its group"),
}


@pytest.fixture
def policy() -> TransformersWrapper:
    return TransformersWrapper(build_model(tokenizer := build_tokenizer(), seed=0), tokenizer=tokenizer, generate=False)


@pytest.mark.parametrize("case", CASES)
def test_a_step_without_advantages_names_its_cause_once(case: str, policy, caplog: pytest.LogCaptureFixture) -> None:
    rows, settings, message = CASES[case]
    loss = RLOOLoss(policy, **settings)
    for _ in range(2):
        loss.normalizers(rows_of(*rows))
    (told,) = caplog.messages
    assert re.search(message, told)


@pytest.mark.parametrize(
    ("rewards", "size", "settings"),
    [([1.0, 0.0, 1.0, 1.0], 2, {}), ([1.0, 0.0], 1, {"estimator": "reinforce"}), ([NAN, 1.0, 0.0], 3, {})],
    ids=["one group of two", "reinforce", "one abstains"],
)
def test_a_step_with_an_advantage_says_nothing(rewards, size, settings, policy, caplog) -> None:
    RLOOLoss(policy).normalizers(rows_of(rewards, size, **settings))
    assert not caplog.messages


def test_a_step_without_action_tokens_is_told(policy, caplog: pytest.LogCaptureFixture) -> None:
    RLOOLoss(policy).normalizers(rows_of([1.0, 0.0], 2, actions=0))
    assert "the loss covers no action token of a step" in caplog.text


def test_a_part_of_a_step_says_nothing(policy, caplog: pytest.LogCaptureFixture) -> None:
    """The other rows of the step may have an advantage."""
    loss, rows = RLOOLoss(policy), rows_of([1.0, 0.0, 1.0, 1.0], 2)
    normalizers = loss.normalizers(rows)
    for row in rows.unbind(0):
        row.update({keys.TOKENS: torch.arange(3, 7), keys.LOG_PROBS: torch.zeros(4)})
    loss(rows[2:], normalizers)
    assert not caplog.messages


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
            assert_same_gradient(gradient, expected)
        parts = [gradient_of(policy, loss(part_of(rows, name, rank)).loss / 2) for rank in range(2)]
        apart = [a + b for a, b in zip(*parts, strict=True)]  # the result of separate normalizers for each rank
        assert max(float((a - b).norm()) for a, b in zip(apart, expected, strict=True)) > 1e-3 * scale, name


if __name__ == "__main__":
    become_rank(run_rank)
