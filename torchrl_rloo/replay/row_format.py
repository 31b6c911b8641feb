"""Format of stored rows: packed rows as one safetensors file, without pickle.

The tensors of a file are those of :class:`~torchrl_rloo.data.packed.PackedRows`: ``"rows/<key>"`` and
``"shapes/<key>"``, with the parts of a nested key separated by ``/``. ``"columns"`` is UTF-8 JSON of text and other
plain values. ``"layout_of_row"`` has the structure of each row. int64 tensors use the smallest type that holds their
values. The header contains an index of the groups, so that a reader chooses groups before it reads tensors.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import quote, unquote

import safetensors.torch
import torch
from safetensors import SafetensorError
from tensordict import NestedKey
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory, LogProbs, Masks, Text, Tokens

from torchrl_rloo.data.packed import Layout, PackedRows
from torchrl_rloo.data.templates import from_history, to_history
from torchrl_rloo.weight_update.protocol import xxh3

FORMAT = "torchrl_rloo rows 1"
_CLASSES = {cls.__name__: cls for cls in (Tokens, Masks, LogProbs, Text, ChatHistory)}
_KINDS = ("tensor", "column", "object")
_NARROW = (torch.uint8, torch.int16, torch.int32)
_MAX_HEADER_BYTES = 100_000_000  # limit of safetensors
_TAG = "$"
# Values that JSON lacks: name, type, and functions to and from JSON
_CODECS: tuple[tuple[str, type, Callable[[Any], Any], Callable[[Any], Any]], ...] = (
    ("tuple", tuple, lambda v: [_to_json(item) for item in v], lambda v: tuple(map(_from_json, v))),
    ("bytes", bytes, lambda v: base64.b64encode(v).decode(), lambda v: base64.b64decode(v, validate=True)),
    ("decimal", decimal.Decimal, str, decimal.Decimal),
    (
        "datetime",
        datetime.datetime,
        lambda v: [v.isoformat(), v.fold],
        lambda v: datetime.datetime.fromisoformat(v[0]).replace(fold=v[1]),
    ),
    ("date", datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    (
        "time",
        datetime.time,
        lambda v: [v.isoformat(), v.fold],
        lambda v: datetime.time.fromisoformat(v[0]).replace(fold=v[1]),
    ),
    (
        "timedelta",
        datetime.timedelta,
        lambda v: [v.days, v.seconds, v.microseconds],
        lambda v: datetime.timedelta(*v),
    ),
    ("history", History, lambda v: from_history(v), lambda v: to_history([v])[0]),
)
_ENCODERS = {kind: (name, encode) for name, kind, encode, _ in _CODECS}
_DECODERS = {name: decode for name, _, _, decode in _CODECS}


def encode_rows(packed: PackedRows, index: Mapping[str, Any]) -> bytes:
    """Encode packed rows as the content of a file."""
    # Name the tensors, and narrow their integers
    tensors = {_name("rows", key): value for key, value in packed.tensors.items()}
    tensors |= {_name("shapes", key): value for key, value in packed.shapes.items()}
    tensors["layout_of_row"] = torch.tensor(packed.layout_of_row, dtype=torch.int64)
    narrow = {name: _narrow(value).contiguous() for name, value in tensors.items()}
    wide = [name for name, value in tensors.items() if narrow[name].dtype != value.dtype]
    # Add text and structure
    columns = [[_parts(key), [_column_value(key, value) for value in values]] for key, values in packed.columns.items()]
    content = {"columns": columns, "layouts": [_layout_to_json(layout) for layout in packed.layouts], "int64": wide}
    text = bytearray(json.dumps(content, separators=(",", ":")).encode())
    narrow["columns"] = torch.frombuffer(text, dtype=torch.uint8)
    header = {"format": FORMAT, "index": json.dumps(index), "checksum": _checksum(narrow)}
    return safetensors.torch.save(narrow, header)


def split_header(content: bytes) -> bytes:
    """Return the header of a file from its first bytes, with the length in front."""
    size = int.from_bytes(content[:8], "little")
    if len(content) < 8 or size > _MAX_HEADER_BYTES or len(content) < 8 + size:
        raise ValueError(f"{len(content)} bytes must contain a header of {size} bytes")
    return content[: 8 + size]


def decode_index(content: bytes) -> Any:
    """Return the index of a file, given its header or all of it."""
    try:
        return json.loads(_metadata(content)["index"])
    except (LookupError, TypeError, RecursionError) as error:
        raise ValueError(f"it is not a file of rows: {type(error).__name__}: {error}") from error


def decode_rows(content: bytes) -> PackedRows:
    """Decode the content of a file. Nothing in it can name code: structures are those of an allow-list."""
    try:
        expected = _metadata(content)["checksum"]
        tensors = safetensors.torch.load(content)
        if _checksum(tensors) != expected:
            raise ValueError("its checksum does not match its content")
        extra = json.loads(tensors.pop("columns").numpy().tobytes())
        for name in extra["int64"]:
            tensors[name] = tensors[name].to(torch.int64)
        layout_of_row = tensors.pop("layout_of_row").tolist()
        packed = PackedRows(
            {_key(name): value for name, value in tensors.items() if name.startswith("rows/")},
            {_key(name): value for name, value in tensors.items() if name.startswith("shapes/")},
            {_short(parts): [_from_json(value) for value in values] for parts, values in extra["columns"]},
            [_layout_from_json(layout) for layout in extra["layouts"]],
            layout_of_row,
        )
        _check(packed)
    except (SafetensorError, LookupError, TypeError, AttributeError, RuntimeError, ArithmeticError) as error:
        raise ValueError(f"it is not a file of rows: {type(error).__name__}: {error}") from error
    return packed


def _metadata(content: bytes) -> dict[str, str]:
    header = json.loads(split_header(content)[8:])
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    version = metadata.get("format") if isinstance(metadata, dict) else None
    if version != FORMAT:
        raise ValueError(f"format={version!r:.80} must be {FORMAT!r}; read it with the version that wrote it")
    return metadata


def _checksum(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return a checksum of tensors with their names, types and shapes."""
    names = sorted(tensors)
    described = json.dumps([(name, str(tensors[name].dtype), list(tensors[name].shape)) for name in names]).encode()
    return xxh3([torch.frombuffer(bytearray(described), dtype=torch.uint8), *(tensors[name] for name in names)])


def _narrow(value: torch.Tensor) -> torch.Tensor:
    """Return an int64 tensor in the smallest type that holds its values, and any other tensor itself."""
    if value.dtype != torch.int64 or not value.numel():
        return value
    low, high = (int(bound) for bound in value.aminmax())
    for dtype in _NARROW:
        if torch.iinfo(dtype).min <= low and high <= torch.iinfo(dtype).max:
            return value.to(dtype)
    return value


# Names of keys


def _parts(key: NestedKey) -> list[str]:
    return [key] if isinstance(key, str) else list(key)


def _short(parts: list[str]) -> NestedKey:
    if not parts or not all(isinstance(part, str) for part in parts):
        raise ValueError(f"key={parts!r:.80} must be a list of names")
    return parts[0] if len(parts) == 1 else tuple(parts)


def _name(kind: str, key: NestedKey) -> str:
    return "/".join([kind, *(quote(part, safe="") for part in _parts(key))])


def _key(name: str) -> NestedKey:
    return _short([unquote(part) for part in name.split("/")[1:]])


# Structures


def _layout_to_json(layout: Layout) -> list[Any]:
    if layout.cls is not None and _CLASSES.get(layout.cls.__name__) is not layout.cls:
        raise ValueError(f"an entry has the class {layout.cls.__name__}, but must have one of {sorted(_CLASSES)}")
    entries = [[name, kind if isinstance(kind, str) else _layout_to_json(kind)] for name, kind in layout.entries]
    values = None if layout.values is None else [list(pair) for pair in layout.values]
    return [list(layout.batch_size), entries, None if layout.cls is None else layout.cls.__name__, values]


def _layout_from_json(content: Any) -> Layout:
    batch_size, entries, cls, values = content
    if not all(type(size) is int and size >= 0 for size in batch_size):
        raise ValueError(f"batch_size={batch_size!r:.80} must have numbers of at least 0")
    if cls is not None and cls not in _CLASSES:
        raise ValueError(f"class={cls!r:.80} must be one of {sorted(_CLASSES)}")
    if values is not None and not all(isinstance(name, str) and (v is None or type(v) is bool) for name, v in values):
        raise ValueError(f"fields={values!r:.80} of a tensorclass must be None or bool")
    read = []
    for name, kind in entries:
        if not isinstance(name, str) or isinstance(kind, str) and kind not in _KINDS:
            raise ValueError(f"entry {name!r:.80} of kind {kind!r:.80} must have a name and one of the kinds {_KINDS}")
        read.append((name, kind if isinstance(kind, str) else _layout_from_json(kind)))
    values = None if values is None else tuple((name, value) for name, value in values)
    return Layout(tuple(batch_size), tuple(read), None if cls is None else _CLASSES[cls], values)


def _check(packed: PackedRows) -> None:
    """Raise a ValueError if the structure of packed rows does not fit their values."""
    if packed.tensors.keys() != packed.shapes.keys():
        raise ValueError("each tensor must have shapes")
    for key, shapes in packed.shapes.items():
        if shapes.dim() != 2 or shapes.is_floating_point() or bool((shapes < 0).any()):
            raise ValueError(f"shapes of key={key!r:.80} must be a matrix of numbers of at least 0")
        sizes = [1 for _ in range(len(shapes))]
        for i, shape in enumerate(shapes.tolist()):  # Python's integers do not overflow
            for size in shape:
                sizes[i] *= size
        if packed.tensors[key].dim() != 1 or sum(sizes) != len(packed.tensors[key]):
            raise ValueError(f"shapes of key={key!r:.80} must fit its {packed.tensors[key].numel()} values")
    # Count the values that the rows take
    if not all(0 <= i < len(packed.layouts) for i in packed.layout_of_row):
        raise ValueError(f"layouts of rows must be below {len(packed.layouts)}")
    needed: Counter[tuple[str, NestedKey]] = Counter()
    for i, rows in Counter(packed.layout_of_row).items():
        for use in _uses(packed.layouts[i], ()):
            needed[use] += rows
    present = {("tensor", key): len(shapes) for key, shapes in packed.shapes.items()}
    present |= {("column", key): len(values) for key, values in packed.columns.items()}
    if needed != Counter(present):
        raise ValueError("the structure of the rows must fit the number of their values")


def _uses(layout: Layout, path: tuple[str, ...]) -> Iterator[tuple[str, NestedKey]]:
    """Return what a row of a layout takes a value of."""
    for name, kind in layout.entries:
        if not isinstance(kind, str):
            yield from _uses(kind, (*path, name))
        else:
            yield "tensor" if kind == "tensor" else "column", _short([*path, name])
    if layout.cls is not None and layout.values is None:
        yield "column", _short([*path, ""])


# Values of columns


def _column_value(key: NestedKey, value: Any) -> Any:
    try:
        return _to_json(value)
    except TypeError as error:
        remedy = "convert it, drop the entry, or write without text"
        raise ValueError(f"key={key!r} {error}, which cannot be stored; {remedy}") from error


def _to_json(value: Any) -> Any:
    kind = History if isinstance(value, History) else type(value)  # a part of a batch of histories has another type
    if value is None or kind in (str, bool, int, float):
        return value
    if kind is list:
        return [_to_json(item) for item in value]
    if kind is dict:
        if _TAG not in value and all(type(name) is str for name in value):
            return {name: _to_json(item) for name, item in value.items()}
        return {_TAG: "dict", "value": [[_to_json(name), _to_json(item)] for name, item in value.items()]}
    if kind not in _ENCODERS:
        raise TypeError(f"has a value of type {kind.__name__}")
    name, encode = _ENCODERS[kind]
    return {_TAG: name, "value": encode(value)}


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {name: _from_json(item) for name, item in value.items()}
    if value[_TAG] == "dict":
        return {_from_json(name): _from_json(item) for name, item in value["value"]}
    return _DECODERS[value[_TAG]](value["value"])
