"""Format of stored rows: exact round trips, and files that lie about their content."""

from __future__ import annotations

import datetime
import decimal
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, TensorDict, TensorDictBase

from support.collected_rows import addition, any_row, calculator, check_same_rows, guessing, split
from support.stored_rows import make_groups
from torchrl_rloo.data import keys, pack_rows, stack_rows, tensor_rows, unpack_rows
from torchrl_rloo.replay import row_format
from torchrl_rloo.replay.row_format import decode_index, decode_rows, encode_rows, split_header


def store(rows: TensorDictBase) -> TensorDictBase:
    return unpack_rows(decode_rows(encode_rows(pack_rows(rows), {})))


@pytest.mark.parametrize("collect", [addition, calculator, guessing, split])
def test_rows_of_a_collection_return_as_they_were(collect: Callable[[], TensorDictBase]) -> None:
    rows = collect()
    check_same_rows(store(rows), rows)
    rows = tensor_rows(rows.exclude("messages"))
    check_same_rows(store(rows), rows)


def test_rows_with_support_sets_and_previous_samples_return_as_they_were() -> None:
    support = TensorDict({"ids": torch.arange(5, dtype=torch.int32), "sizes": torch.tensor([2, 3], dtype=torch.int32)})
    rows = [row.set(keys.SUPPORT_IDS[0], support.clone()) for row in make_groups(3).unbind(0)]
    check_same_rows(store(stack_rows(rows)), stack_rows(rows))


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(any_row(), min_size=1, max_size=5))
def test_rows_of_any_structure_return_as_they_were(rows: list[TensorDictBase]) -> None:
    check_same_rows(store(stack_rows(rows)), stack_rows(rows))


_PLAIN = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary(), st.dates(),
        st.datetimes(), st.times(), st.timedeltas(), st.decimals(allow_nan=False),
    ),
    lambda inner: st.one_of(
        st.lists(inner), st.tuples(inner), st.dictionaries(st.one_of(st.text(), st.integers(), st.just("$")), inner)
    ),
    max_leaves=8,
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(value=_PLAIN)
def test_plain_values_return_as_they_were(value: Any) -> None:
    stored = store(stack_rows([TensorDict(x=NonTensorData([value]))]))[0]["x"]
    assert stored == [value] and repr(stored) == repr([value])


def test_special_values_return_as_they_were() -> None:
    values = [math.inf, -0.0, "\ud800", 10**400, decimal.Decimal("1.10"), (1, [b"\xff"]), {"$": "tuple", "value": 1}]
    values += [datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc)]
    stored = store(stack_rows([TensorDict(x=NonTensorData(values), nan=NonTensorData([math.nan]))]))[0]
    assert repr(stored["x"]) == repr(values) and math.isnan(stored["nan"][0])


@pytest.mark.parametrize("bound", [255, 256, -1, 2**15, -(2**15) - 1, 2**31 - 1, 2**31, -(2**63)])
def test_integers_take_the_smallest_type_and_keep_their_values(bound: int) -> None:
    rows = stack_rows([TensorDict(ids=torch.tensor([0, bound]))])
    check_same_rows(store(rows), rows)
    written = safetensors.torch.load(encode_rows(pack_rows(rows), {}))["rows/ids"].dtype
    assert (written == torch.int64) == (not -(2**31) <= bound < 2**31)


def test_the_header_has_the_index() -> None:
    content = encode_rows(pack_rows(make_groups(1)), {"groups": [1]})
    header = split_header(content)
    assert len(header) < len(content) and decode_index(header) == {"groups": [1]}
    for part in (b"", content[:7], header[:-1]):
        with pytest.raises(ValueError, match="must contain a header"):
            split_header(part)


class Secret:
    """Class that no file may name."""


def test_a_value_that_cannot_be_stored_is_refused_by_its_key() -> None:
    with pytest.raises(ValueError, match="key='x' has a value of type Secret, which cannot be stored"):
        encode_rows(pack_rows(stack_rows([TensorDict(x=NonTensorData([Secret()]))])), {})


def test_any_flipped_bit_of_the_values_is_found() -> None:
    content = encode_rows(pack_rows(make_groups(1, length=3)), {})
    for place in range(len(split_header(content)), len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        with pytest.raises(ValueError, match="checksum"):
            decode_rows(bytes(damaged))


def forge(change: Callable[[dict[str, Any], dict[str, torch.Tensor]], None], text: str | None = None) -> bytes:
    """Return a file whose content was changed, with the checksum of its new content."""
    content = encode_rows(pack_rows(make_groups(1)), {})
    tensors = safetensors.torch.load(content)
    columns = json.loads(tensors["columns"].numpy().tobytes())
    change(columns, tensors)
    text = json.dumps(columns) if text is None else text
    tensors["columns"] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    header = {"format": row_format.FORMAT, "index": "{}", "checksum": row_format._checksum(tensors)}
    return safetensors.torch.save(tensors, header)


def _class(name: Any) -> Callable[..., None]:
    def change(columns: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        tokens = next(layout for key, layout in columns["layouts"][0][1] if key == "tokens")
        tokens[2] = name

    return change


def _code(columns: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    columns["columns"][0][1][0] = {"$": "os.system", "value": "true"}


def _kind(columns: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    columns["layouts"][0][1][0][1] = "pickle"


def _shape(value: list[list[int]]) -> Callable[..., None]:
    def change(columns: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        tensors["shapes/tokens/full"] = torch.tensor(value)
        columns["int64"].clear()

    return change


def _layout(columns: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    tensors["layout_of_row"] = torch.tensor([0, 9])


def _fewer(columns: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    columns["columns"][0][1].pop()


def _missing(columns: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    del tensors["shapes/tokens/full"]


@pytest.mark.parametrize(
    "change",
    [
        *(_class(name) for name in ("Secret", "test_row_format.Secret", "os.system", "builtins.eval", ["Tokens"], 1)),
        *(_shape(shape) for shape in ([[-1], [26]], [[2**62], [2**62]], [[25]], [[25], [25]])),
        _code,
        _kind,
        _layout,
        _fewer,
        _missing,
    ],
)
def test_a_file_that_lies_is_refused(change: Callable[..., None]) -> None:
    with pytest.raises(ValueError):
        unpack_rows(decode_rows(forge(change)))


def test_a_deeply_nested_file_is_refused() -> None:
    with pytest.raises(ValueError, match="recursion"):
        decode_rows(forge(lambda columns, tensors: None, "[" * 100_000 + "]" * 100_000))
    for index in ({"index": "[" * 100_000}, {}):
        content = safetensors.torch.save({"a": torch.zeros(1)}, {"format": row_format.FORMAT, **index})
        with pytest.raises(ValueError, match="not a file of rows"):
            decode_index(content)


def test_a_forged_file_without_a_lie_is_read() -> None:
    check_same_rows(unpack_rows(decode_rows(forge(lambda columns, tensors: None))), make_groups(1))


def test_a_file_of_another_format_is_refused() -> None:
    with pytest.raises(ValueError, match="format=None must be"):
        decode_rows(safetensors.torch.save({"weight": torch.zeros(2)}))
    with pytest.raises(ValueError):
        decode_rows(b"\x80\x04" + bytes(100))
