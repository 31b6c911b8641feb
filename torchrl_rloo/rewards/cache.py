"""Disk cache of answers that are expensive to compute."""

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
    """Cache of JSON values by key, in one SQLite file that threads and processes may share.

    Each access opens the file (0.3 ms), so the object holds no handle: it can be pickled and survives a fork. Stored
    values survive a crash of the process. Writes are not flushed to disk, which would be 40 times slower, so a power
    failure may corrupt the file. Entries never expire; delete the file to clear the cache. SQLite's locks require a
    local disk.

    Args:
        path: file, created with its folder at the first access.
        timeout: seconds to wait while another process writes.

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
        """Return the stored values of ``keys``, without the keys that are not stored.

        Raises:
            OSError: if the file cannot be read or is not a cache.
        """
        found = {}
        with self._open() as db:
            for key in keys:
                row = db.execute("SELECT value FROM answers WHERE key = ?", (key,)).fetchone()
                if row is not None:
                    found[key] = json.loads(row[0])
        return found

    def put(self, key: str, value: Any) -> None:
        """Store a value; it replaces an earlier one.

        Raises:
            OSError: if the file cannot be written.
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
            raise OSError(f"cache {self.path}: {error}; unlock or delete the file, or set another path") from error


def cache_key(value: Any) -> str:
    """Return a key that is the same for equal JSON values, in any order of their names."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
