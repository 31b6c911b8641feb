"""Parquet export of stored rollouts, for people who read them with pandas or datasets."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tensordict import TensorDictBase, is_non_tensor

from torchrl_rloo.data import keys
from torchrl_rloo.data.metadata import metadata_of
from torchrl_rloo.data.stop_reasons import stop_reason
from torchrl_rloo.replay.row_files import RolloutFiles
from torchrl_rloo.runtime.files import temporary_name

_INTEGERS = (keys.GROUP_ID, keys.PROMPT_ID, keys.POLICY_VERSION, keys.NUM_TURNS, keys.NUM_TOOL_CALLS)


def export_parquet(files: RolloutFiles, path: str | os.PathLike) -> int:
    """Write the metadata and text of stored rows to a Parquet file, one row each, without token ids.

    Columns are ``group_id``, ``prompt_id``, ``policy_version``, ``num_turns``, ``num_tool_calls``, ``tokens``,
    ``action_tokens``, ``reward``, ``rewards`` (one per reward function), ``stop_reason``, and all text columns. Text
    stays text; other values such as messages become JSON. One file is in memory at a time.

    Args:
        files: the stored rollouts.
        path: Parquet file to write, which appears when it is complete.

    Returns:
        Number of rows.

    Example:
        ::

            export_parquet(RolloutFiles("rollouts"), "rollouts.parquet")
            pandas.read_parquet("rollouts.parquet").groupby("policy_version").reward.mean()
    """
    import pyarrow
    from pyarrow import parquet

    numbers = [(name, pyarrow.int64()) for name in (*_INTEGERS, "tokens", "action_tokens")]
    scores = [("reward", pyarrow.float64()), ("rewards", pyarrow.list_(pyarrow.float64()))]
    fixed = [*numbers, *scores, ("stop_reason", pyarrow.string())]
    text = sorted({name for file in files.files() for name in file.columns} - {name for name, _ in fixed})
    schema = pyarrow.schema([*fixed, *((name, pyarrow.string()) for name in text)])
    path, count = Path(path), 0
    temporary = temporary_name(path)
    try:
        with parquet.ParquetWriter(temporary, schema) as writer:
            for _, rows in files.groups():
                lines = [_line(*pair, text) for pair in zip(rows.unbind(0), metadata_of(rows).unbind(0), strict=True)]
                writer.write_table(pyarrow.Table.from_pylist(lines, schema))
                count += len(lines)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return count


def _line(row: TensorDictBase, metadata: TensorDictBase, text: list[str]) -> dict[str, Any]:
    """Return a row as values of columns; absent ones are None."""
    line = {name: int(metadata[name]) for name in _INTEGERS if name in metadata.keys()}
    line |= {"tokens": int(metadata[keys.TOKEN_COUNT]), "action_tokens": int(metadata[keys.VERSION_COUNTS][:, 1].sum())}
    if (reward := row.get(keys.REWARD, None)) is not None:
        line["reward"] = float(reward.sum())
    if (rewards := row.get(keys.REWARDS, None)) is not None:
        line["rewards"] = rewards.flatten().tolist()
    if row.get(keys.STOP_REASON, None) is not None:
        line["stop_reason"] = stop_reason(row)
    for name in text:
        entry = row.get(name, None)
        if entry is not None:
            line[name] = _as_text(entry.data if is_non_tensor(entry) else entry)
    return line


def _as_text(value: Any) -> str:
    value = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return value.encode("utf-8", "backslashreplace").decode()  # Arrow takes no lone surrogates
