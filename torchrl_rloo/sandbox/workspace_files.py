"""File operations of a workspace, in a process with the rights of a command; run by its keeper."""

from __future__ import annotations

import os
import stat

MAX_FILE_BYTES = 1 << 20
_MAX_LISTED = 200  # entries of a folder that are shown
_MAX_PLACES = 10  # occurrences that are named


class FileError(Exception):
    """Error whose message tells the policy what to do."""


def resolve(folder: str, path: str) -> str:
    """Return the full path of a file or folder, which must be in the folder after all links are followed."""
    if not path or "\0" in path:
        raise FileError(f"path={path!r:.100} is no path: give one in the folder, such as src/main.py")
    full = os.path.realpath(os.path.join(folder, path))
    if full != folder and not full.startswith(folder + "/"):
        raise FileError(f"path={path!r:.200} leads out of {folder}: give a path in the folder, such as src/main.py")
    return full


def view(folder: str, path: str, first: int = 1, last: int | None = None) -> str:
    """Return the numbered lines of a file from ``first`` to ``last``, counted from 1, or the entries of a folder."""
    full = resolve(folder, path)
    if os.path.isdir(full):
        entries = sorted(e.name + "/" * e.is_dir(follow_symlinks=False) for e in os.scandir(full))
        more = [f"[{len(entries) - _MAX_LISTED} more entries are left out]"] * (len(entries) > _MAX_LISTED)
        return "\n".join(entries[:_MAX_LISTED] + more) or "(empty folder)"
    lines = _read(folder, full, path).split("\n")
    if lines[-1] == "":
        lines.pop()
    last = len(lines) if last is None else last
    if lines and not 1 <= first <= min(last, len(lines)):
        raise FileError(f"lines {first} to {last} are not in {path}: it has lines 1 to {len(lines)}")
    numbered = [f"{i:6}\t{line}" for i, line in enumerate(lines, 1) if first <= i <= last]
    return "\n".join(numbered) or "(empty file)"


def create(folder: str, path: str, content: str) -> str:
    """Write a file, new or instead of an old one, with the folders above it."""
    full = resolve(folder, path)
    replaced = os.path.lexists(full)
    if replaced:
        _check_regular(full, path)
    os.makedirs(os.path.dirname(full), exist_ok=True)
    _write(full, path, content)
    return f"{'Replaced' if replaced else 'Created'} {path} ({len(content.splitlines())} lines)."


def replace(folder: str, path: str, old: str, new: str) -> str:
    """Replace the only occurrence of a text in a file."""
    full = resolve(folder, path)
    text = _read(folder, full, path)
    if not old:
        raise FileError("old is empty: give the text to replace, or write the whole file with create")
    if old == new:
        raise FileError("old and new are equal: give the text that should stand there in new")
    places, start = [], text.find(old)
    while start >= 0 and len(places) <= _MAX_PLACES:
        places.append(text.count("\n", 0, start) + 1)
        start = text.find(old, start + 1)
    if not places:
        raise FileError(f"old does not occur in {path}: view the file and copy the text exactly, with its white space")
    if len(places) > 1:
        more = " and more" if len(places) > _MAX_PLACES else ""
        lines = ", ".join(map(str, places[:_MAX_PLACES])) + more
        raise FileError(f"old occurs more than once in {path}, in lines {lines}: add text around it until it is unique")
    _write(full, path, text.replace(old, new, 1))
    return f"Replaced the text in line {places[0]} of {path}."


def write_all(folder: str, files: dict[str, str]) -> str:
    """Write the first files of a workspace."""
    for path, content in files.items():
        create(folder, path, content)
    return ""


OPERATIONS = {"view": view, "create": create, "replace": replace, "write_all": write_all}


def _check_regular(full: str, path: str) -> None:
    status = os.lstat(full)
    if stat.S_ISDIR(status.st_mode):
        raise FileError(f"{path} is a folder: give the path of a file")
    if not stat.S_ISREG(status.st_mode):
        raise FileError(f"{path} is no regular file: remove it first, or give another path")
    if status.st_nlink > 1:
        raise FileError(f"{path} has several hard links: copy it to a new file first")


def _read(folder: str, full: str, path: str) -> str:
    if not os.path.lexists(full):
        top = ", ".join(sorted(os.listdir(folder))[:20]) or "nothing"
        raise FileError(f"there is no file {path}: the folder has {top}; create the file, or view a folder to see more")
    _check_regular(full, path)
    if os.path.getsize(full) > MAX_FILE_BYTES:
        raise FileError(f"{path} is larger than {MAX_FILE_BYTES >> 20} MB: use the shell")
    try:
        with open(full, encoding="utf-8", newline="") as file:
            return file.read()
    except UnicodeDecodeError:
        raise FileError(f"{path} is no UTF-8 text: use the shell") from None


def _write(full: str, path: str, content: str) -> None:
    data = content.encode(errors="replace")
    if len(data) > MAX_FILE_BYTES:
        raise FileError(f"the content of {path} is larger than {MAX_FILE_BYTES >> 20} MB: write less")
    with open(full, "wb") as file:
        file.write(data)
