"""Disk cache of answers that are expensive to compute."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchrl_rloo.runtime.files import make_folder

_log = logging.getLogger(__name__)

_DIGITS = 32  # hexadecimal digits of a checksum
_PAUSE = 60.0  # seconds without access after an error


class DiskCache:
    """Cache of JSON values by key, in one SQLite file that threads and processes may share.

    Each access opens the file (0.3 ms), so the object holds no handle: it can be pickled and survives a fork. Stored
    values survive a crash of the process. Writes are not flushed to disk, which would be 40 times slower, so a power
    failure may corrupt the file. Each value has a checksum: a damaged one counts as missing. Entries never expire;
    delete the file to clear the cache. SQLite's locks require a local disk.

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
                if row is not None and _is_whole(key, row[0]):
                    found[key] = json.loads(row[0][_DIGITS:])
        return found

    def put(self, key: str, value: Any) -> None:
        """Store a value; it replaces an earlier one.

        Raises:
            OSError: if the file cannot be written.
        """
        text = json.dumps(value)
        with self._open() as db:
            db.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", (key, _digest(key, text) + text))

    def __len__(self) -> int:
        with self._open() as db:
            return db.execute("SELECT count(*) FROM answers").fetchone()[0]

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        try:
            make_folder(self.path.parent)
            if self.path.exists() and not self.path.is_file():
                raise OSError(f"cache={self.path} is not a regular file; remove it, or set another path")
            db = sqlite3.connect(self.path, timeout=self.timeout)
            try:
                db.execute("PRAGMA synchronous = OFF")
                with db:  # one transaction
                    db.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, value TEXT NOT NULL)")
                    yield db
            finally:
                db.close()
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise OSError(
                f"cache={self.path}: {error}; unlock it, make it writable or delete it, or set another path"
            ) from error


def _digest(key: str, text: str) -> str:
    return hashlib.sha256(f"{key}\n{text}".encode()).hexdigest()[:_DIGITS]


def _is_whole(key: str, stored: Any) -> bool:
    """Return whether a stored value is text that begins with its checksum."""
    return isinstance(stored, str) and stored[:_DIGITS] == _digest(key, stored[_DIGITS:])


class LenientCache(DiskCache):
    """Cache that a run can do without: an error counts as an empty cache, and one warning names it.

    After an error it waits a minute before the next access, so that a lock held by another process costs little time.

    Args:
        path: see :class:`DiskCache`.
        timeout: see :class:`DiskCache`.
    """

    def __init__(self, path: str | os.PathLike, *, timeout: float = 30.0):
        super().__init__(path, timeout=timeout)
        self._warned, self._resumes_at = False, -math.inf

    def get_many(self, keys: Iterable[str]) -> dict[str, Any]:
        """Return the stored values of ``keys``; none after an error."""
        return self._attempt(super().get_many, keys) or {}

    def put(self, key: str, value: Any) -> None:
        """Store a value, if that is possible."""
        self._attempt(super().put, key, value)

    def _attempt(self, access: Callable[..., Any], *args: Any) -> Any:
        if time.monotonic() < self._resumes_at:
            return None
        try:
            result = access(*args)
        except OSError as error:
            if not self._warned:
                _log.warning("%s; the run continues without the cache", error)
            self._warned, self._resumes_at = True, time.monotonic() + _PAUSE
            return None
        self._warned = False
        return result


def cache_key(value: Any) -> str:
    """Return a key that is the same for equal JSON values, in any order of their names."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
