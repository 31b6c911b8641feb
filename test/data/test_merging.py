"""Merging of identical rows, which does not change a loss's gradient."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict

from torchrl_rloo.data import gather_actions, keys, ragged, stack_rows
from torchrl_rloo.data.merging import merge_identical
from torchrl_rloo.data.rows import action_tokens


def make_row(tokens: list[int] = (1, 2, 3), advantage: float = 0.5, **entries) -> TensorDict:
    n = len(tokens)
    data = {
        keys.TOKENS: torch.tensor(tokens),
        keys.ACTION_MASK: torch.arange(n) > 0,
        keys.LOG_PROBS: -torch.tensor(tokens).float(),
        keys.ADVANTAGE: torch.tensor([[advantage]]),
        keys.TRUNCATED: torch.tensor([False]),
        keys.GROUP_ID: torch.tensor(entries.pop("group", 0)),
    }
    row = TensorDict(data, [])
    for key, value in entries.items():
        row.set(getattr(keys, key, key), value)
    return row


def multiplicities(rows: LazyStackedTensorDict) -> list[int]:
    assert rows[keys.MULTIPLICITY].dtype == torch.int64
    return rows[keys.MULTIPLICITY].tolist()


def test_equal_rows_become_one_in_order_of_first_appearance() -> None:
    rows = stack_rows([make_row([5, 6]), make_row(), make_row([5, 6]), make_row([7]), make_row([5, 6])])
    merged = merge_identical(rows)
    assert [t.tolist() for t in ragged(merged, keys.TOKENS)] == [[5, 6], [1, 2, 3], [7]]
    assert multiplicities(merged) == [3, 1, 1]
    assert keys.MULTIPLICITY not in rows.keys() and len(rows) == 5


def test_where_a_row_came_from_does_not_matter() -> None:
    first = make_row(group=4, POLICY_VERSION=torch.tensor(7), SEED=torch.tensor(1), PROMPT_ID=torch.tensor(3))
    second = make_row(group=5, POLICY_VERSION=torch.tensor(8), SEED=torch.tensor(2), PROMPT_ID=torch.tensor(9))
    for row, versions in ((first, [7, 7]), (second, [8, 9])):
        row.set(keys.ACTION_VERSIONS, torch.tensor(versions))
    first.set("query", NonTensorData("a"))
    second.set("query", NonTensorData("b"))
    merged = merge_identical(stack_rows([first, second]))
    assert multiplicities(merged) == [2]
    assert int(merged[0][keys.GROUP_ID]) == 4 and merged[0]["query"] == "a"


def test_everything_that_a_loss_may_read_does() -> None:
    three = torch.zeros(3)
    different = {
        "advantage": make_row(advantage=0.25),
        "log-probs": make_row(LOG_PROBS=three),
        "mask": make_row(ACTION_MASK=torch.tensor([False, False, True])),
        "truncated": make_row(TRUNCATED=torch.tensor([True])),
        "an entry more": make_row(SAMPLE_WEIGHT=torch.tensor(1.0)),
        "another value of it": make_row(SAMPLE_WEIGHT=torch.tensor(2.0)),
        "reference": make_row(REF_LOG_PROBS=three),
        "proximal": make_row(PROXIMAL_LOG_PROBS=three),
        "shape": make_row(ADVANTAGE=torch.full((3, 1), 0.5)),
        "dtype": make_row(ADVANTAGE=torch.tensor([[0.5]], dtype=torch.float64)),
        "support": make_row(SUPPORT_IDS=torch.tensor([1], dtype=torch.int32)),
        "an entry of the user's own": make_row(mine=torch.tensor(1)),
    }
    rows = [make_row(), *different.values()]
    assert multiplicities(merge_identical(stack_rows(rows))) == [1] * len(rows)
    twice = merge_identical(stack_rows([r.clone() for r in rows + rows]))
    assert multiplicities(twice) == [2] * len(rows)


def test_multiplicities_add_up() -> None:
    counts = [2, 1, 5]
    rows = [make_row(MULTIPLICITY=torch.tensor(n)) for n in counts] + [make_row([9], MULTIPLICITY=torch.tensor(3))]
    merged = merge_identical(stack_rows(rows))
    assert multiplicities(merged) == [8, 3]
    assert multiplicities(merge_identical(merged)) == [8, 3]


def test_equal_bits_are_equal() -> None:
    nan, bfloat = torch.tensor([[float("nan")]]), torch.ones(3, dtype=torch.bfloat16)
    rows = [make_row(ADVANTAGE=nan.clone(), LOG_PROBS=bfloat.clone()) for _ in range(2)]
    assert multiplicities(merge_identical(stack_rows(rows))) == [2]


def test_no_rows_stay_no_rows() -> None:
    assert len(merge_identical(stack_rows([make_row()])[:0])) == 0


row_strategy = st.tuples(st.lists(st.integers(0, 3), min_size=2, max_size=3), st.sampled_from([-1.0, 0.5]))


@settings(max_examples=50, deadline=None)
@given(st.lists(row_strategy, min_size=1, max_size=12))
def test_a_loss_weighted_by_multiplicity_keeps_its_gradient(drawn: list[tuple[list[int], float]]) -> None:
    rows = stack_rows([make_row(tokens, advantage, group=i) for i, (tokens, advantage) in enumerate(drawn)])
    merged = merge_identical(rows)
    assert len(merged) == len({(tuple(t), a) for t, a in drawn}) and sum(multiplicities(merged)) == len(rows)
    logits = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)

    def gradient(batch: LazyStackedTensorDict, counts: torch.Tensor) -> torch.Tensor:
        actions = action_tokens(batch)
        table = logits.log_softmax(-1)
        log_probs = gather_actions([table[t.roll(1), t] for t in ragged(batch, keys.TOKENS)], actions)
        terms = -batch[keys.ADVANTAGE].reshape(-1).double() * log_probs.sum(1).exp()
        return torch.autograd.grad((terms * counts).sum() / counts.sum(), logits)[0]

    expected = gradient(rows, torch.ones(len(rows)))
    torch.testing.assert_close(gradient(merged, merged[keys.MULTIPLICITY]), expected, rtol=0, atol=1e-12)
