from __future__ import annotations

import multiprocessing
import os
import random
import sqlite3
import subprocess
import threading

import pytest

from torchrl_rloo.rewards.judge import DiskCache, cache_key


def fill(path, worker, n):
    cache = DiskCache(path)
    for i in range(n):
        cache.put(f"{worker}/{i}", [worker, i])
        cache.put("shared", worker)


def test_only_what_is_there_comes_back_and_the_last_value_counts(tmp_path):
    cache = DiskCache(tmp_path / "c")
    cache.put("a", 1)
    cache.put("a", 2)
    cache.put("n", None)
    assert cache.get_many(["a", "b", "n"]) == {"a": 2, "n": None}


def test_threads_and_processes_write_at_the_same_time(tmp_path):
    path = tmp_path / "c"
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=fill, args=(path, f"p{w}", 10)) for w in range(3)]
    workers += [threading.Thread(target=fill, args=(path, f"t{w}", 10)) for w in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert all(w.exitcode == 0 for w in workers[:3])
    cache = DiskCache(path)
    keys = [f"{kind}{w}/{i}" for kind in "pt" for w in range(3) for i in range(10)]
    assert cache.get_many(keys) == {key: [key[:2], int(key[3:])] for key in keys}


def test_a_key_depends_on_values_and_not_on_their_order():
    key = cache_key({"a": 1, "b": [1, 2]})
    assert key == cache_key({"b": [1, 2], "a": 1})
    assert len({key, cache_key({"a": 1, "b": [2, 1]}), cache_key({"a": "1", "b": [1, 2]}), cache_key({"a": 1})}) == 4


FOREIGN = {
    "text": b"not a database " * 100,
    "truncated": None,
    "zeros": bytes(8192),
    "header alone": b"SQLite format 3\0",
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_run_continues_without_a_damaged_cache(tmp_path, caplog, name):
    path = tmp_path / "c"
    filled = DiskCache(path)
    for i in range(40):
        filled.put(str(i), "x" * 500)
    path.write_bytes(path.read_bytes()[:6000] if FOREIGN[name] is None else FOREIGN[name])
    cache = DiskCache(path)
    for i in range(40):
        assert cache.get_many([str(i)]) in ({}, {str(i): "x" * 500})
        cache.put(str(i), "x" * 500)
    assert caplog.text.count("the run continues without the cache") == 1 and str(path) in caplog.text
    path.unlink()
    fresh = DiskCache(path)
    fresh.put("0", 1)
    assert fresh.get_many(["0"]) == {"0": 1}


@pytest.mark.parametrize(
    "stored", ["[0.9, 'x']", '[1.0, "x"]', "", None, 7, 0.5, b"\x00\xff", "f" * 32 + "[1.0]", "[" * 9999, "{", "NaN"]
)
def test_a_value_without_its_checksum_is_missing(tmp_path, stored):
    cache = DiskCache(tmp_path / "c")
    cache.put("a", [0.5, "x"])
    cache.put("b", [0.25, "y"])
    with sqlite3.connect(cache.path) as db:
        db.execute("CREATE TABLE loose AS SELECT * FROM answers")  # without NOT NULL
        db.execute("DROP TABLE answers")
        db.execute("ALTER TABLE loose RENAME TO answers")
        db.execute("UPDATE answers SET value = ? WHERE key = 'a'", (stored,))
    assert cache.get_many(["a", "b"]) == {"b": [0.25, "y"]}


def test_a_value_moved_to_another_key_is_missing(tmp_path):
    cache = DiskCache(tmp_path / "c")
    cache.put("a", [0.5, "x"])
    with sqlite3.connect(cache.path) as db:
        db.execute("UPDATE answers SET key = 'b'")
    assert cache.get_many(["a", "b"]) == {}


def test_no_flipped_bit_changes_a_value(tmp_path, caplog):
    cache = DiskCache(tmp_path / "c")
    values = {str(i): [i / 10, f"reason {i}"] for i in range(10)}
    for key, value in values.items():
        cache.put(key, value)
    content, rng, found = cache.path.read_bytes(), random.Random(0), []
    places = [i for i, byte in enumerate(content) if byte]  # most of the file is empty
    for place in rng.sample(places, 300):
        changed = bytearray(content)
        changed[place] ^= 1 << rng.randrange(8)
        cache.path.write_bytes(changed)
        found.append(DiskCache(cache.path).get_many(values))
        assert found[-1].items() <= values.items()
    assert any(len(some) < len(values) for some in found)


@pytest.mark.parametrize(
    "schema", ["answers (x TEXT)", "answers (key TEXT, value TEXT, more TEXT NOT NULL)", "other (a)"]
)
def test_a_database_of_something_else_is_survived(tmp_path, schema, caplog):
    with sqlite3.connect(tmp_path / "c") as db:
        db.execute(f"CREATE TABLE {schema}")
    cache = DiskCache(tmp_path / "c")
    cache.put("a", 1)
    assert cache.get_many(["a"]) in ({}, {"a": 1})
    assert ("continues without" in caplog.text) == ("answers" in schema)


@pytest.mark.parametrize("kind", ["folder", "fifo", "device", "below a file"])
def test_a_path_that_is_no_file_is_named(tmp_path, kind, caplog):
    path = tmp_path / "c"
    if kind == "below a file":
        path.write_text("")
        path = path / "c"
    elif kind == "device":
        path.symlink_to("/dev/null")
    else:
        path.mkdir() if kind == "folder" else os.mkfifo(path)
    cache = DiskCache(path)
    cache.put("a", 1)
    assert cache.get_many(["a"]) == {} and str(tmp_path / "c") in caplog.text


def test_a_locked_file_costs_one_wait(tmp_path, caplog):
    cache = DiskCache(tmp_path / "c", timeout=0.2)
    cache.put("a", 1)
    other = sqlite3.connect(tmp_path / "c")
    other.execute("BEGIN EXCLUSIVE")
    other.execute("INSERT INTO answers VALUES ('x', 'y')")
    attempts = []
    for _ in range(500):  # 500 waits would be 100 seconds
        attempts.append(cache.get_many(["a"]))
        cache.put("b", 2)
    other.close()
    assert attempts == [{}] * 500 and caplog.text.count("database is locked") == 1
    assert DiskCache(tmp_path / "c").get_many(["a", "b"]) == {"a": 1}


@pytest.mark.parametrize("how", ["full", "read-only"])
def test_a_disk_that_takes_nothing_is_named_and_survived(tmp_path, caplog, how):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "none", disk], capture_output=True).returncode:
        pytest.skip("only root can mount a file system")
    try:
        cache = DiskCache(disk / "c")
        cache.put("a", "kept")
        if how == "read-only":
            subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        for i in range(20):
            cache.put(str(i), "x" * 20_000)
        found = DiskCache(disk / "c").get_many(["a", *map(str, range(20))])
    finally:
        subprocess.run(["umount", "-l", disk], check=True)
    assert set(found.values()) <= {"kept", "x" * 20_000} and len(found) < 20
    assert str(disk / "c") in caplog.text and ("full" in caplog.text or "readonly" in caplog.text)


def test_it_is_tried_again_later(tmp_path, monkeypatch):
    monkeypatch.setattr("torchrl_rloo.rewards.judge._PAUSE", 0.0)
    (tmp_path / "c").write_bytes(b"\xff" * 99)
    cache = DiskCache(tmp_path / "c")
    cache.put("a", 1)
    assert cache.get_many(["a"]) == {}
    (tmp_path / "c").unlink()
    cache.put("a", 1)
    assert cache.get_many(["a"]) == {"a": 1}
