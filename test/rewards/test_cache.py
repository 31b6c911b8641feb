from __future__ import annotations

import multiprocessing
import pickle
import subprocess
import sys
import threading

import pytest

from torchrl_rloo.rewards.cache import DiskCache, cache_key


def fill(path, worker, n):
    cache = DiskCache(path)
    for i in range(n):
        cache.put(f"{worker}/{i}", [worker, i])
        cache.put("shared", worker)


def test_values_survive_in_another_process(tmp_path):
    cache = DiskCache(tmp_path / "new folder" / "answers.sqlite")
    cache.put("k", {"score": 0.5, "reason": "{} ü \ud800"})
    program = "import sys; from torchrl_rloo.rewards.cache import DiskCache as C; print(C(sys.argv[1]).get_many(['k']))"
    out = subprocess.run([sys.executable, "-c", program, str(cache.path)], capture_output=True, text=True, timeout=60)
    assert out.stdout.strip() == str({"k": {"score": 0.5, "reason": "{} ü \ud800"}}), out.stderr


def test_only_what_is_there_comes_back_and_the_last_value_counts(tmp_path):
    cache = DiskCache(tmp_path / "c")
    cache.put("a", 1)
    cache.put("a", 2)
    cache.put("n", None)
    assert cache.get_many(["a", "b", "n"]) == {"a": 2, "n": None} and len(cache) == 2


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
    assert len(cache) == 6 * 10 + 1
    assert cache.get_many(["p2/9", "t0/0"]) == {"p2/9": ["p2", 9], "t0/0": ["t0", 0]}


def test_pickles_after_use(tmp_path):
    cache = DiskCache(tmp_path / "c")
    cache.put("a", 1)
    assert pickle.loads(pickle.dumps(cache)).get_many(["a"]) == {"a": 1}


def test_a_file_that_is_no_cache_is_named(tmp_path):
    (tmp_path / "c").write_text("not a database " * 100)
    with pytest.raises(OSError, match=f"{tmp_path / 'c'}.*not a database"):
        DiskCache(tmp_path / "c").get_many(["a"])


def test_a_key_depends_on_values_and_not_on_their_order():
    key = cache_key({"a": 1, "b": [1, 2]})
    assert key == cache_key({"b": [1, 2], "a": 1})
    assert len({key, cache_key({"a": 1, "b": [2, 1]}), cache_key({"a": "1", "b": [1, 2]}), cache_key({"a": 1})}) == 4
