"""Answers that were paid for, kept on disk."""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class DiskCache:
    """JSON values by key in one SQLite file, which any number of threads and processes may use at a time.

    Every access opens the file anew (0.3 ms), so the object holds no handle: it pickles and survives a fork. What was
    put survives the end of a process, however sudden. The disk is not waited for (40 times slower), so a power cut may
    spoil the file. Nothing expires; delete the file to forget. SQLite's locks want a local disk, not a network one.

    Args:
        path: the file; it and its folder are made at the first use.
        timeout: seconds to wait for another process that is writing.

    Example:
        >>> import tempfile
        >>> cache = DiskCache(tempfile.mkdtemp() + "/answers.sqlite")
        >>> key = cache_key({"model": "m", "messages": ["hello"]})
        >>> cache.put(key, {"score": 7})
        >>> cache.get_many([key, "another"]) == {key: {"score": 7}}
        True
    """

    def __init__(self, path: str | os.PathLike, *, timeout: float = 30.0):
        self.path, self.timeout = Path(path).expanduser().absolute(), timeout

    def get_many(self, keys: Iterable[str]) -> dict[str, Any]:
        """The values of those keys that are there.

        Raises:
            OSError: if the file cannot be read or is no such cache.
        """
        found = {}
        with self._open() as db:
            for key in keys:
                row = db.execute("SELECT value FROM answers WHERE key = ?", (key,)).fetchone()
                if row is not None:
                    found[key] = json.loads(row[0])
        return found

    def put(self, key: str, value: Any) -> None:
        """Keeps a value, in place of the one before.

        Raises:
            OSError: if it cannot be written.
        """
        with self._open() as db:
            db.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", (key, json.dumps(value)))

    def __len__(self) -> int:
        with self._open() as db:
            return db.execute("SELECT count(*) FROM answers").fetchone()[0]

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            db = sqlite3.connect(self.path, timeout=self.timeout)
            try:
                db.execute("PRAGMA synchronous = OFF")
                with db:  # one transaction
                    db.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, value TEXT NOT NULL)")
                    yield db
            finally:
                db.close()
        except sqlite3.Error as error:
            raise OSError(f"cache {self.path}: {error}: free or delete the file, or name another") from error


def cache_key(value: Any) -> str:
    """A key that equal JSON values share, whatever the order of their names."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
