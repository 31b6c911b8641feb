"""PackedRows: rows of real collections and of any structure, packed, pickled and restored."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictBase
from torchrl.data.llm import History

from support.collected_rows import addition, any_row, calculator, check_same, guessing, split
from torchrl_rloo.data import keys
from torchrl_rloo.data.packed import PackedRows, pack_rows, unpack_rows
from torchrl_rloo.data.rows import stack_rows


def check_round_trip(rows: TensorDictBase, protocol: int = 4) -> PackedRows:
    packed = pack_rows(rows)
    received = pickle.loads(pickle.dumps(packed, protocol=protocol))
    for restored in (unpack_rows(packed), unpack_rows(received)):
        assert restored.batch_size == rows.batch_size
        for row, again in zip(rows.unbind(0), restored.unbind(0), strict=True):
            check_same(row, again)
    return received


@pytest.mark.parametrize("collect", [addition, calculator, guessing, split])
def test_rows_of_a_collection_return_as_they_were(collect: Any) -> None:
    rows = collect()
    received = check_round_trip(rows)
    assert received.shapes[keys.TOKENS].shape == (len(rows), 1)
    if collect is split:
        assert len(received.layouts) == 2 and len(received.shapes[keys.PREVIOUS_SEGMENTS, "tokens"]) == 2
    if collect is addition:
        assert isinstance(received.columns["messages"][0], History)


@settings(max_examples=25, deadline=None)
@given(rows=st.lists(any_row(), min_size=1, max_size=5), protocol=st.sampled_from([4, 5]))
def test_rows_of_any_structure_return_as_they_were(rows: list[TensorDictBase], protocol: int) -> None:
    check_round_trip(stack_rows(rows), protocol)


def test_a_pickle_holds_the_rows_and_nothing_else_of_their_storage() -> None:
    part = torch.arange(1_000_000)[:3]
    assert len(pickle.dumps(pack_rows(stack_rows([TensorDict(ids=part)])))) < 2000


def test_unpacked_rows_are_views_of_the_received_bytes() -> None:
    buffers: list[pickle.PickleBuffer] = []
    packed = pack_rows(stack_rows([TensorDict(ids=torch.arange(n)) for n in (5, 3)]))
    message = pickle.dumps(packed, protocol=5, buffer_callback=buffers.append)
    shared = [bytearray(buffer.raw()) for buffer in buffers]
    rows = unpack_rows(pickle.loads(message, buffers=shared))
    for buffer in shared:
        buffer[:] = bytes(len(buffer))
    assert rows[0]["ids"].tolist() == [0] * 5 and rows[1]["ids"].tolist() == [0] * 3


def test_rows_that_cannot_be_packed_are_refused() -> None:
    rows = stack_rows([TensorDict(x=torch.zeros(1)), TensorDict(x=torch.zeros(1, dtype=torch.int64))])
    with pytest.raises(ValueError, match="key='x' must have one dtype"):
        pack_rows(rows)
    with pytest.raises(ValueError, match="no rows to pack"):
        pack_rows(rows[:0])
