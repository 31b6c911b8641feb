"""Ragged rows: padding and its inverse, action tokens and their values."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict
from torchrl.modules.llm.policies import LogProbs, Masks, Tokens

from torchrl_rloo.data import action_tokens, concatenate, gather_actions, keys, pad, ragged, stack_rows, tensor_rows
from torchrl_rloo.data.rows import (
    PACKINGS,
    copy_row,
    limit_length,
    make_tensorclass,
    merge_identical,
    micro_batches,
    place_actions,
    prefix_order,
    spread_actions,
    step_indices,
    unpad,
)

lengths = st.lists(st.integers(0, 7), min_size=1, max_size=5)
masks = st.lists(st.lists(st.booleans(), max_size=8).map(lambda m: [False, *m]), min_size=1, max_size=5)
few = settings(max_examples=60, deadline=None)


def numbers(n: int) -> torch.Tensor:
    return torch.arange(1, n + 1)


def make_rows(action_masks: list[list[bool]]) -> LazyStackedTensorDict:
    """Make rows whose token ids are all different."""
    rows, start = [], 1
    for mask in action_masks:
        data = {keys.TOKENS: torch.arange(start, start + len(mask)), keys.ACTION_MASK: torch.tensor(mask)}
        rows.append(TensorDict(data, []))
        start += len(mask)
    return stack_rows(rows)


@few
@given(lengths, st.sampled_from(["left", "right"]), st.sampled_from([0, -1, 99]))
def test_pad_keeps_the_values_and_fills_the_rest(sizes: list[int], side: str, filler: int) -> None:
    values = [numbers(n) for n in sizes]
    padded = pad(values, filler, side)
    assert padded.shape == (len(sizes), max(sizes)) and padded.dtype == torch.int64
    for row, value in zip(padded, values, strict=True):
        gap = [filler] * (max(sizes) - len(value))
        assert row.tolist() == (gap + value.tolist() if side == "left" else value.tolist() + gap)


@few
@given(lengths)
def test_unpad_inverts_pad(sizes: list[int]) -> None:
    values = [numbers(n).float() for n in sizes]
    again = unpad(pad(values), sizes)
    with pytest.raises(ValueError):
        unpad(pad(values), [*sizes, 1])
    assert pad([value.bool() for value in values]).dtype == torch.bool
    assert all(torch.equal(a, v) for a, v in zip(again, values, strict=True)) and len(again) == len(values)


@few
@given(masks)
def test_action_tokens(action_masks: list[list[bool]]) -> None:
    rows = make_rows(action_masks)
    actions = action_tokens(rows, padding_id=-7)
    width, most = max(map(len, action_masks)), max(map(sum, action_masks))
    assert actions.tokens.shape == actions.action_mask.shape == (len(rows), width)
    assert actions.mask.shape == (len(rows), most)
    for i, mask in enumerate(action_masks):
        n = len(mask)
        assert actions.tokens[i, :n].tolist() == rows[i][keys.TOKENS].tolist()
        assert (actions.tokens[i, n:] == -7).all() and not actions.action_mask[i, n:].any()
        assert actions.action_mask[i, :n].tolist() == mask
        assert actions.mask[i].tolist() == [k < sum(mask) for k in range(most)]


@few
@given(masks)
def test_gather_place_and_spread(action_masks: list[list[bool]]) -> None:
    """Gathering left-aligns the values at action tokens, and spreading restores them with 0 on all other tokens."""
    rows = make_rows(action_masks)
    actions = action_tokens(rows)
    values = [row[keys.TOKENS].float() for row in rows.unbind(0)]
    gathered = gather_actions(values, actions)
    assert gathered.shape == actions.mask.shape
    for row, value, mask in zip(gathered, values, action_masks, strict=True):
        expected = [v for v, m in zip(value.tolist(), mask, strict=True) if m]
        assert row.tolist() == expected + [0.0] * (len(row) - len(expected))
    flat = torch.cat([v[torch.tensor(m)] for v, m in zip(values, action_masks, strict=True)])
    assert torch.equal(place_actions(flat, actions), gathered)
    spread = spread_actions(gathered, rows, actions)
    for ours, value, mask in zip(spread, values, action_masks, strict=True):
        assert ours.tolist() == [v if m else 0.0 for v, m in zip(value.tolist(), mask, strict=True)]
    assert torch.equal(gather_actions(spread, actions), gathered)


def test_place_has_a_gradient() -> None:
    actions = action_tokens(make_rows([[False, True, False, True], [False, False, True, False]]))
    flat = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    (place_actions(flat, actions) * torch.tensor([[1.0, 10.0], [100.0, 1000.0]])).sum().backward()
    assert flat.grad.tolist() == [1.0, 10.0, 100.0]


def test_padding_never_leaks_from_a_nan() -> None:
    """Values on context tokens and padding are ignored, even NaN."""
    actions = action_tokens(make_rows([[False, True], [False, False, True, True]]))
    values = [torch.tensor([torch.nan, 1.0]), torch.tensor([torch.nan, torch.nan, 2.0, 3.0])]
    assert gather_actions(values, actions).tolist() == [[1.0, 0.0], [2.0, 3.0]]


def test_an_action_needs_something_before_it() -> None:
    with pytest.raises(ValueError, match="first token of a row is an action"):
        action_tokens(make_rows([[False, True], [True, False]]))


@pytest.mark.parametrize("rows", [TensorDict({"a": torch.zeros(2)}, [2]), make_rows([[False], [False, True]])])
def test_a_missing_entry_is_named(rows) -> None:
    with pytest.raises(KeyError, match="nowhere"):
        ragged(rows, "nowhere")


def test_ragged_reads_dense_batches_and_tensorclasses() -> None:
    assert [v.tolist() for v in ragged(TensorDict({"a": torch.eye(2)}, [2]), "a")] == [[1.0, 0.0], [0.0, 1.0]]
    rows = stack_rows([TensorDict({"tokens": make_tensorclass(Tokens, full=numbers(n))}, []) for n in (2, 3)])
    assert [len(v) for v in ragged(rows, keys.TOKENS)] == [2, 3]


def test_concatenate_keeps_order_and_tensors() -> None:
    one, two = make_rows([[False], [False, True]]), make_rows([[False, False, True]])
    both = concatenate([one, two])
    assert both.batch_size == (3,) and [len(t) for t in ragged(both, keys.TOKENS)] == [1, 2, 3]
    assert both[2][keys.TOKENS].data_ptr() == two[0][keys.TOKENS].data_ptr()


def test_tensor_rows_leaves_text_out() -> None:
    rows = make_rows([[False, True], [False]])
    for row in rows.unbind(0):
        row.set("query", NonTensorData([{"role": "user", "content": "a"}]))
        row.set("text", TensorDict({"prompt": torch.zeros(1)}, [])).set(("next", "reward"), torch.ones(1, 1))
    bare = tensor_rows(rows)
    assert set(bare.keys(True, True)) == {keys.TOKENS, keys.ACTION_MASK, keys.REWARD}
    assert "query" in rows[0].keys(), "the rows given keep theirs"


@pytest.mark.parametrize("cls", [Tokens, Masks, LogProbs])
def test_collection_is_the_class_itself(cls: type) -> None:
    """The fast construction of TorchRL's classes equals their constructors."""
    field = {Tokens: "full", Masks: "all_assistant_mask", LogProbs: "full"}[cls]
    made, expected = make_tensorclass(cls, **{field: torch.ones(3)}), cls(**{field: torch.ones(3)})
    assert type(made) is cls and made.batch_size == expected.batch_size == torch.Size([])
    assert torch.equal(getattr(made, field), getattr(expected, field))
    assert made.padded is False


small_rows = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=9)


@few
@given(small_rows)
def test_each_row_follows_the_one_with_which_it_shares_most(rows: list[list[int]]) -> None:
    order, shared = prefix_order([torch.tensor(row) for row in rows])
    assert sorted(order) == list(range(len(rows)))
    seen: set[tuple[int, ...]] = set()
    for i, length in zip(order, shared, strict=True):
        prefixes = [tuple(rows[i][:n]) for n in range(1, len(rows[i]) + 1)]
        assert [prefix in seen for prefix in prefixes] == [n <= length for n in range(1, len(rows[i]) + 1)]
        seen.update(prefixes)


def test_rows_are_ordered_by_their_ids_whatever_their_size() -> None:
    ids = [1, 256, 255, 70000, 0]
    assert prefix_order([torch.tensor([i], dtype=torch.int32) for i in ids]) == ([3, 1, 2, 0, 4], [0] * 5)


def grouped_rows(groups: list[list[int]], prompt: int) -> LazyStackedTensorDict:
    """Make rows of each group ``g``: ``prompt`` times the id ``g``, then as many tokens as ``groups`` says."""
    rows = []
    for g, lengths in enumerate(groups):
        for n in lengths:
            tokens = torch.cat([torch.full((prompt,), g), torch.randint(100, 10**9, (n,))])
            rows.append(TensorDict({keys.TOKENS: tokens, keys.ACTION_MASK: torch.arange(prompt + n) >= prompt}, []))
    return stack_rows(rows)


def contents(rows: LazyStackedTensorDict) -> list[tuple[int, ...]]:
    return [tuple(t.tolist()) for t in ragged(rows, keys.TOKENS)]


def cost(rows: LazyStackedTensorDict, packing: str) -> int:
    lengths = [len(t) for t in ragged(rows, keys.TOKENS)]
    if packing == "none":
        return len(lengths) * max(lengths)
    if packing == "packed":
        return sum(lengths)
    return len({row[:n] for row in contents(rows) for n in range(1, len(row) + 1)})


def rows_of_tokens(rows: list[list[int]]) -> LazyStackedTensorDict:
    return stack_rows([TensorDict({keys.TOKENS: torch.tensor(row)}, []) for row in rows])


groups_of_rows = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=4)


@few
@given(
    groups_of_rows.map(lambda groups: grouped_rows(groups, prompt=3)) | small_rows.map(rows_of_tokens),
    st.sampled_from(PACKINGS),
    st.integers(1, 60),
    st.none() | st.integers(1, 6),
)
def test_micro_batches_hold_every_row_once_and_keep_both_limits(
    rows: LazyStackedTensorDict, packing: str, budget: int, size: int | None
) -> None:
    pieces = list(micro_batches(rows, size, max_tokens=budget, packing=packing))
    assert sorted(c for piece in pieces for c in contents(piece)) == sorted(contents(rows))
    for piece in pieces:
        assert len(piece) == 1 or cost(piece, packing) <= budget
        assert size is None or len(piece) <= size
    assert len(pieces) == 1 or cost(rows, packing) > budget or len(rows) > (size or len(rows))


def test_a_budget_counts_what_the_layout_makes_of_the_rows() -> None:
    rows = grouped_rows([[10, 2], [2, 2]], prompt=5)  # lengths 15, 7, 7, 7
    sizes = {
        (packing, budget): [len(p) for p in micro_batches(rows, max_tokens=budget, packing=packing)]
        for packing, budget in [("none", 30), ("packed", 30), ("shared_prefix", 26), ("shared_prefix", 25)]
    }
    assert sizes["none", 30] == [2, 2]  # 2 x 15, 2 x 7
    assert sizes["packed", 30] == [3, 1]  # 15 + 7 + 7, 7
    assert sizes["shared_prefix", 26] == [4]  # 5 + 12, 5 + 4
    assert sizes["shared_prefix", 25] == [3, 1]


def test_rows_of_a_prompt_stay_together_where_it_is_shared() -> None:
    rows = grouped_rows([[9, 1, 5], [8, 2, 6], [7, 3, 4]], prompt=4)
    pieces = list(micro_batches(rows, max_tokens=20, packing="shared_prefix"))
    assert [{c[0] for c in contents(p)} for p in pieces] == [{2}, {1}, {0}]
    assert sorted(len(c) - 4 for c in contents(pieces[0])) == [3, 4, 7]


def test_longest_rows_come_first_and_what_fits_is_not_touched() -> None:
    rows = grouped_rows([[1, 4], [3, 2]], prompt=1)
    lengths = [[len(c) for c in contents(p)] for p in micro_batches(rows, 3)]
    assert lengths == [[5, 4, 3], [2]]
    for kwargs in ({}, {"size": 4}, {"max_tokens": 20}, {"size": 5, "max_tokens": 14, "packing": "packed"}):
        (whole,) = micro_batches(rows, **kwargs)
        assert whole is rows
    (empty,) = micro_batches(rows[:0], max_tokens=5)
    assert len(empty) == 0


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"size": 0}, "size=0 must be at least 1"),
        ({"max_tokens": 0}, "max_tokens=0 must be at least 1"),
        ({"packing": "dense"}, "packing='dense' must be one of"),
    ],
)
def test_wrong_limits_are_refused(kwargs: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(micro_batches(grouped_rows([[1]], prompt=1), **kwargs))


def test_a_copied_row_can_be_changed_alone() -> None:
    row = TensorDict({"ids": torch.arange(3), "nested": TensorDict({"a": torch.ones(2)})})
    row.set("tokens", Tokens(full=torch.arange(4), prompt=torch.arange(2)))
    row.set("query", NonTensorData("text"))
    copied = copy_row(row)
    assert set(copied.keys(True, True)) == set(row.keys(True, True)) and copied["query"] == "text"
    assert isinstance(copied["tokens"], Tokens) and copied["ids"] is row["ids"]
    copied.set(("nested", "a"), torch.zeros(2))
    copied["tokens"].full = torch.zeros(1)
    copied.set("more", torch.ones(1))
    assert row["nested", "a"].tolist() == [1, 1] and row["tokens"].full.tolist() == [0, 1, 2, 3]
    assert "more" not in row.keys()


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
        "not a number": make_row(advantage=float("nan"), LOG_PROBS=torch.ones(3, dtype=torch.bfloat16)),
    }
    rows = [make_row(), *different.values()]
    assert multiplicities(merge_identical(stack_rows(rows))) == [1] * len(rows)
    twice = merge_identical(stack_rows([r.clone() for r in rows + rows]))
    assert multiplicities(twice) == [2] * len(rows)


row_strategy = st.tuples(st.lists(st.integers(0, 3), min_size=2, max_size=3), st.sampled_from([-1.0, 0.5]))


@settings(max_examples=50, deadline=None)
@given(st.lists(row_strategy, min_size=1, max_size=12))
def test_a_loss_weighted_by_multiplicity_keeps_its_gradient(drawn: list[tuple[list[int], float]]) -> None:
    rows = stack_rows([make_row(tokens, advantage, group=i) for i, (tokens, advantage) in enumerate(drawn)])
    merged = merge_identical(rows)
    distinct = list(dict.fromkeys((tuple(t), a) for t, a in drawn))  # in order of first appearance
    assert [tuple(t.tolist()) for t in ragged(merged, keys.TOKENS)] == [t for t, _ in distinct]
    assert multiplicities(merged) == [drawn.count((list(t), a)) for t, a in distinct]
    assert multiplicities(merge_identical(concatenate([merged, merged]))) == [2 * n for n in multiplicities(merged)]
    assert keys.MULTIPLICITY not in rows.keys() and len(merge_identical(rows[:0])) == 0
    logits = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)

    def gradient(batch: LazyStackedTensorDict, counts: torch.Tensor) -> torch.Tensor:
        actions = action_tokens(batch)
        table = logits.log_softmax(-1)
        log_probs = gather_actions([table[t.roll(1), t] for t in ragged(batch, keys.TOKENS)], actions)
        terms = -batch[keys.ADVANTAGE].reshape(-1).double() * log_probs.sum(1).exp()
        return torch.autograd.grad((terms * counts).sum() / counts.sum(), logits)[0]

    expected = gradient(rows, torch.ones(len(rows)))
    torch.testing.assert_close(gradient(merged, merged[keys.MULTIPLICITY]), expected, rtol=0, atol=1e-12)


def make_pair(prompt: int, chosen: int, rejected: int, masked: bool) -> TensorDict:
    parts = {}
    for name, length, first in (("chosen", chosen, 100), ("rejected", rejected, 200)):
        parts[name] = TensorDict({keys.TOKENS: torch.cat([numbers(prompt), first + numbers(length)])}, [])
        if masked:
            parts[name].set(keys.ACTION_MASK, torch.arange(prompt + length) >= prompt)
    return TensorDict(parts, [])


@pytest.mark.parametrize("masked", [True, False])
def test_long_pairs_are_dropped_or_lose_equal_tokens_of_their_prompt(masked):
    rows = stack_rows([make_pair(*sizes, masked) for sizes in ((3, 2, 1), (5, 2, 3), (1, 4, 6), (1, 7, 1))])
    assert [len(row["chosen"][keys.TOKENS]) for row in limit_length(rows, 6)] == [5]
    first, second = limit_length(rows.clone(), 6, truncate=True)
    assert torch.equal(first["rejected"][keys.TOKENS], rows[0]["rejected"][keys.TOKENS])
    assert second["chosen"][keys.TOKENS].tolist() == [3, 4, 5, 101, 102]
    assert second["rejected"][keys.TOKENS].tolist() == [3, 4, 5, 201, 202, 203]
    if masked:
        assert second["chosen"][keys.ACTION_MASK].tolist() == [False] * 3 + [True] * 2


def test_long_rows_keep_their_actions():
    rows = make_rows([[False] * 4 + [True], [False] + [True] * 3 + [False], [False, True]])
    kept = limit_length(rows, 3, truncate=True)
    assert [row[keys.TOKENS].tolist() for row in kept] == [[3, 4, 5], [11, 12]]
    assert [row[keys.ACTION_MASK].tolist() for row in kept] == [[False, False, True], [False, True]]


def test_an_epoch_has_each_row_once():
    epochs = [sum((step_indices(6 * e + k, 20, 3, seed=0) for k in range(1, 7)), []) for e in range(2)]
    assert all(len(set(epoch)) == 18 for epoch in epochs) and epochs[0] != epochs[1]
    assert step_indices(1, 20, 3, seed=1) != step_indices(1, 20, 3, seed=0)
