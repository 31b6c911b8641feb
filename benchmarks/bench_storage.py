"""Rollouts on disk: a folder of rollouts against ``torch.save`` and a Parquet file of ``datasets``.

    python benchmarks/bench_storage.py

All sides store the same rows, whose text is short, and read all tensors back. Times are the best of several repetitions
on one thread, with files in the page cache; writes of a folder are flushed to disk, the others are not.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_rows import best_ms, make_rows
from common import print_result, print_table
from tensordict import TensorDictBase

from torchrl_rloo.data import keys, stack_rows
from torchrl_rloo.replay import RolloutFiles, RolloutWriter


def grouped(rows: TensorDictBase, size: int) -> TensorDictBase:
    """Give the rows groups of ``size`` members and a policy version."""
    for i, row in enumerate(rows.unbind(0)):
        row.set(keys.GROUP_ID, torch.tensor(i // size)).set(keys.POLICY_VERSION, torch.tensor(0))
    return rows


def write_folder(rows: TensorDictBase, folder: Path, groups_per_file: int) -> None:
    """Write a folder of rollouts."""
    shutil.rmtree(folder, ignore_errors=True)
    RolloutWriter(folder, model="random", tokenizer="0" * 64, groups_per_file=groups_per_file).extend(rows)


def read_folder(folder: Path) -> int:
    """Read a folder of rollouts, and return the number of its rows."""
    return sum(len(rows) for _, rows in RolloutFiles(folder).groups())


def write_torch(rows: TensorDictBase, path: Path) -> None:
    """Write rows with ``torch.save``, which pickles each of them."""
    torch.save(rows, path)


def read_torch(path: Path) -> int:
    """Read rows with ``torch.load``, which runs what the file says."""
    return len(torch.load(path, weights_only=False))


def write_parquet(rows: TensorDictBase, path: Path) -> None:
    """Write rows as a Parquet file of ``datasets``, with lists of numbers."""
    import datasets

    lines = []
    for row in rows.unbind(0):
        line: dict[str, Any] = {"query": row[keys.QUERY], "completion": row[keys.COMPLETION]}
        for key, value in row.items(True, True):
            if isinstance(value, torch.Tensor):
                line["/".join(key) if isinstance(key, tuple) else key] = value.numpy().reshape(-1)
        lines.append(line)
    datasets.Dataset.from_list(lines).to_parquet(path)


def read_parquet(path: Path) -> int:
    """Read a Parquet file into tensors, and return the number of its rows."""
    import pyarrow.parquet as parquet

    table, count = parquet.read_table(path), 0
    for name in table.column_names:
        column = table.column(name).combine_chunks()
        if name not in ("query", "completion"):
            flat = torch.from_numpy(column.values.to_numpy(zero_copy_only=False).copy())
            count = len(flat.split(column.value_lengths().to_pylist()))
    return count


def measure(
    name: str, path: Path, write: Callable[[], None], read: Callable[[], int], number: int, repetitions: int
) -> dict[str, Any]:
    """Return seconds and bytes per 1,000 rows."""
    write_ms, _ = best_ms(write, repetitions)
    read_ms, count = best_ms(read, repetitions)
    if count != number:
        raise RuntimeError(f"{name} returned {count} of {number} rows")
    size = sum(file.stat().st_size for file in path.rglob("*")) if path.is_dir() else path.stat().st_size
    scale = 1000 / number
    return {
        "format": name,
        "write s": write_ms * scale / 1e3,
        "read s": read_ms * scale / 1e3,
        "MB": size * scale / 1e6,
    }


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--groups-per-file", type=int, default=16)
    parser.add_argument("--repetitions", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = grouped(stack_rows(make_rows(args.rows, args.tokens).unbind(0)), args.group)
    with tempfile.TemporaryDirectory() as temporary:
        folder, saved, parquet = (Path(temporary) / name for name in ("rollouts", "rows.pt", "rows.parquet"))
        lines = [
            measure(
                name,
                path,
                lambda path=path, write=write: write(rows, path),
                lambda path=path, read=read: read(path),
                args.rows,
                args.repetitions,
            )
            for name, path, write, read in (
                ("folder of rollouts", folder, lambda r, p: write_folder(r, p, args.groups_per_file), read_folder),
                ("torch.save", saved, write_torch, read_torch),
                ("datasets, Parquet", parquet, write_parquet, read_parquet),
            )
        ]
    print_table(f"1,000 rows of about {args.tokens:,} tokens", lines)
    print_result({f"{line['format']} {name}": line[name] for line in lines for name in list(line)[1:]})


if __name__ == "__main__":
    main()
