"""Reading of a run's files while the run writes them: only what is new, and never half a line."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from torchrl_rloo.runtime.files import SAFE_FLAGS

_TAIL = 256  # bytes before the position that identify a file's content
_LONGEST = 64 << 20  # bytes of the longest line that is read
_DOCUMENT = 4 << 20  # bytes of the largest JSON document that is read


class LineFile:
    """Reader of a file of lines that grows, or that a resumed run replaces by a shorter one.

    Args:
        path: file to read; it may appear later.

    Attributes:
        restarts: number of times that the file was replaced, so that earlier lines no longer count.
        position: bytes read.
        pending: bytes that the last read left for the next one, without a last line that is not complete.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "metrics.jsonl"
        >>> _ = path.write_text('{"step": 1}\\n{"st')
        >>> LineFile(path).read()
        b'{"step": 1}\\n'
    """

    def __init__(self, path: Path):
        self.path, self.restarts, self.position, self.pending = path, 0, 0, 0
        self._identity: tuple[int, int] | None = None
        self._tail = b""

    def size(self) -> int:
        """Return the bytes of the file; 0 if it is missing."""
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    def read(self, limit: int = 1 << 24) -> bytes:
        """Return the next whole lines: about ``limit`` bytes of them, empty if there is nothing new.

        A last line without its end is left for a later read. A missing or unreadable file counts as empty.
        """
        try:
            descriptor = os.open(self.path, os.O_RDONLY | SAFE_FLAGS)
        except OSError:
            self._restart(None)
            return b""
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                self._restart(None)
                return b""
            identity = (status.st_dev, status.st_ino)
            if identity != self._identity or status.st_size < self.position or not self._is_same(file):
                self._restart(identity)
            return self._next_lines(file, limit, status.st_size)

    def _restart(self, identity: tuple[int, int] | None) -> None:
        self.restarts += self.position > 0
        self._identity, self.position, self.pending, self._tail = identity, 0, 0, b""

    def _is_same(self, file: Any) -> bool:
        """Return whether the bytes before the position are those that were read, as inode numbers are reused."""
        file.seek(self.position - len(self._tail))
        return file.read(len(self._tail)) == self._tail

    def _next_lines(self, file: Any, limit: int, size: int) -> bytes:
        file.seek(self.position)
        block = file.read(limit)
        while (end := block.rfind(b"\n") + 1) == 0 and (more := file.read(limit)) and len(block) < _LONGEST:
            block += more
        self.pending = max(0, size - file.tell())
        block = block[:end] if len(block) < _LONGEST or end else block  # skip a line that never ends
        self.position += len(block)
        self._tail = (self._tail + block)[-_TAIL:]
        return block


def read_last_lines(path: Path, size: int = 1 << 18) -> list[dict[str, Any]]:
    """Return the JSON objects in the last ``size`` bytes of a file, without damaged lines; empty if it is missing."""
    try:
        descriptor = os.open(path, os.O_RDONLY | SAFE_FLAGS)
    except OSError:
        return []
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return []
        start = max(0, os.fstat(descriptor).st_size - size)
        file.seek(start)
        lines = file.read(size).split(b"\n")
    return parse_objects(lines[1 if start else 0 : -1])[0]


def sample_lines(path: Path, count: int) -> list[dict[str, Any]]:
    """Return the JSON objects of about ``count`` lines, evenly from the first to the last, without damaged ones.

    The time does not grow with the file. It is empty if the file is missing.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | SAFE_FLAGS)
    except OSError:
        return []
    lines: dict[int, bytes] = {}
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return []
        for place in range(count):
            file.seek(status.st_size * place // count)
            if place:
                file.readline(_LONGEST)  # the rest of a line
            start = file.tell()
            if (line := file.readline(_LONGEST)).endswith(b"\n"):
                lines[start] = line
    return parse_objects(list(lines.values()))[0] + read_last_lines(path, 1 << 16)[-1:]


def parse_objects(lines: list[bytes]) -> tuple[list[dict[str, Any]], int]:
    """Return the JSON objects of lines, and the number of lines that hold none; empty lines count as neither.

    Example:
        >>> parse_objects([b'{"step": 1}', b"", b'{"st'])
        ([{'step': 1}], 1)
    """
    lines = [line for line in lines if line.strip()]
    try:  # one call for all lines is a little faster, and shares their names
        found = json.loads(b"[" + b",".join(lines) + b"]")
        if len(found) == len(lines) and all(type(record) is dict for record in found):
            return found, 0
    except (ValueError, RecursionError):
        pass
    objects = [record for line in lines if type(record := _parse(line)) is dict]
    return objects, len(lines) - len(objects)


def _parse(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


class Document:
    """JSON object in a file, which is read again when the file changes."""

    def __init__(self, path: Path):
        self._path, self._stamp, self._content = path, None, {}

    def read(self) -> dict[str, Any]:
        """Return the object; empty if the file is missing, too large or damaged."""
        try:
            descriptor = os.open(self._path, os.O_RDONLY | SAFE_FLAGS)
        except OSError:
            self._stamp, self._content = None, {}
            return {}
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            stamp = (status.st_ino, status.st_mtime_ns, status.st_size)
            if stamp != self._stamp:
                readable = stat.S_ISREG(status.st_mode) and status.st_size <= _DOCUMENT
                content = _parse(file.read()) if readable else None
                self._stamp, self._content = stamp, content if type(content) is dict else {}
        return self._content
