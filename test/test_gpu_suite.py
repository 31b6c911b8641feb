"""The GPU suite runs to its end on a CPU with tiny sizes, and writes what its README promises."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SUITE = Path(__file__).resolve().parents[1] / "benchmarks" / "gpu"


@pytest.fixture(scope="module")
def load() -> Iterator[Callable[[str], ModuleType]]:
    """Import modules of the suite by name, which no other test sees."""
    before, path = set(sys.modules), list(sys.path)
    sys.path.insert(0, str(SUITE))
    yield importlib.import_module
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if str(SUITE.parent) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture(scope="module")
def results(load) -> Callable[[str], dict[str, Any]]:
    """Run a part in this process."""
    setup = load("measure").Setup("cpu", True)
    return lambda part: load(f"part_{part}").run(setup)


def test_heads_agree_with_float64(results) -> None:
    (figures,) = results("head").values()
    for name in ("ours", "ours, entropy", "TRL", "TRL, entropy", "full logits"):
        assert max(figures[name][f"{what}_error"] for what in ("loss", "hidden", "weight")) < 1e-6
        assert figures[name]["ms"] > 0 and figures[name]["peak_bytes"] is None
    assert "error" in figures["Liger"] and figures["flops"] == 6 * 40 * 512 * 64


def test_layouts_agree_with_padding(results) -> None:
    figures = results("attention")
    for name in ("padded", "packed", "packed, blocks", "shared_prefix", "shared_prefix, blocks"):
        assert figures[name]["error"] < 1e-5 and figures[name]["ms"] > 0


def test_ways_of_sampling_are_compared(results) -> None:
    figures = results("decoding")["tiny, 4 lines"]
    assert figures["ours"]["ratio"] == figures["ours"]["tokens_per_s"] / figures["transformers"]["tokens_per_s"]


def test_operations_of_a_pass_are_counted(results) -> None:
    figures = results("training")
    body = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 64 + 2 * 32 + 3 * 64 * 128 + 2 * 64) + 64  # projections, MLP and norms
    expected = 6 * (body * 32 + 512 * 64 * 24) + 6 * 2 * 64 * 2 * 16**2
    for name in ("tiny", "tiny, checkpointing"):
        assert figures[name]["flops"] == expected
        assert figures[name]["flops_per_s"] == pytest.approx(1000 * expected / figures[name]["pass_ms"])


def test_the_plan_stands_next_to_the_peak(results) -> None:
    figures = results("memory")
    assert len(figures) == 5
    assert all({"measured", "planned"} <= figures[name].keys() for name in figures.keys() - {"sizes"})


def test_both_trainers_sample_the_same_number_of_tokens(results) -> None:
    figures = results("trl")
    (ours,), (trl,) = figures["ours"], figures["trl"]
    assert ours["new_tokens"] == trl["new_tokens"] == 2 * 2 * 6
    assert figures["ratio"] == ours["tokens_per_s"] / trl["tokens_per_s"]
    assert all(side["sampling_s"] > 0 and side["training_s"] > 0 for side in (ours, trl))


def test_a_run_adds_to_its_file(load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, out = load("run"), tmp_path / "results.json"
    out.write_text(json.dumps({"head": "earlier"}))
    monkeypatch.setitem(run.PARTS, "attention", 1.0)  # too short for its imports
    monkeypatch.setattr(sys, "argv", ["run.py", "--out", str(out), "--device", "cpu", "--tiny", "--parts", "attention"])
    run.main()
    found = json.loads(out.read_text())
    assert found["head"] == "earlier" and found["attention"]["tiny"]
    assert "took more than 1 s" in found["attention"]["error"] and found["attention"]["seconds"] >= 1


def test_a_part_that_fails_leaves_an_error(load) -> None:
    failed = load("run").run_part("attention", "nowhere", True, 300, "")
    assert "ended with exit code 2" in failed["error"] and "nowhere" in failed["output"]


def test_a_process_of_a_part_writes_its_result_and_the_versions(load, tmp_path: Path) -> None:
    load("run").child("attention", "cpu", True, tmp_path / "result.json")
    found = json.loads((tmp_path / "result.json").read_text())
    assert found["result"]["rows"] == 8
    assert found["environment"]["device"] == "cpu" and found["environment"]["torch"]
