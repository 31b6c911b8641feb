"""The GPU suite runs to its end on a CPU with tiny sizes, and writes what its README promises."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from torchrl_rloo.modules import add_adapter

pytestmark = pytest.mark.xdist_group("gpu_suite")  # one dry run for all
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
def results(load, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run all parts as a dry run, and return the results by part."""
    out = tmp_path_factory.mktemp("gpu") / "gpu.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["run.py", "--out", str(out), "--dry-run"])
        load("run").main()
    found = json.loads(out.read_text())
    assert found.keys() == load("run").PARTS.keys() and not any("error" in part for part in found.values())
    return {name: part["result"] for name, part in found.items()}


def test_heads_agree_with_float64(results) -> None:
    (figures,) = results["head"].values()
    for name in ("ours", "ours, entropy", "TRL", "TRL, entropy", "full logits"):
        assert max(figures[name][f"{what}_error"] for what in ("loss", "hidden", "weight")) < 1e-6
        assert figures[name]["ms"] > 0 and figures[name]["peak_bytes"] is None
    assert "error" in figures["Liger"] and figures["flops"] == 6 * 40 * 512 * 64


def test_layouts_agree_with_padding(results) -> None:
    figures = results["attention"]
    for name in ("padded", "packed", "packed, blocks", "shared_prefix", "shared_prefix, blocks"):
        assert figures[name]["error"] < 1e-5 and figures[name]["ms"] > 0


def test_ways_of_sampling_are_compared(results) -> None:
    figures = results["decoding"]["tiny, 4 lines"]
    assert figures["ours"]["ratio"] == figures["ours"]["tokens_per_s"] / figures["transformers"]["tokens_per_s"]


def test_operations_of_a_pass_are_counted(results) -> None:
    figures = results["training"]
    body = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)  # projections and MLPs
    useful = 6 * (body * 32 + 512 * 64 * 24) + 6 * 2 * 64 * 2 * 16**2
    whole = 6 * (body + 512 * 64) * 32 + 12 * 2 * 64 * 2 * 16**2
    for name in ("tiny", "tiny, checkpointing"):
        assert (figures[name]["flops"], figures[name]["flops_6n"]) == (useful, whole)
        for mfu, flops in (("mfu", useful), ("mfu_6n", whole)):
            seconds = figures[name]["pass_ms"] / 1000
            assert figures[name][mfu] == pytest.approx(flops / seconds / figures["peak_flops"])


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("size", ["tiny", "tiny-qwen3"])
def test_both_conventions_agree_with_torch(load, size: str, lora: bool) -> None:
    flops, measure = load("flops"), load("measure")
    model = AutoModelForCausalLM.from_config(measure.build_config(size), attn_implementation="eager").eval()
    if lora:
        model.enable_input_require_grads()  # else the first layer has no gradient of its input
        model = add_adapter(model, {"r": 4, "target_modules": "all-linear"})
    with FlopCounterMode(display=False) as counter:  # eager attention computes whole squares
        model(input_ids=torch.arange(24)[None]).logits.sum().backward()
    matrices, counted = flops.read_matrices(model), counter.get_total_flops()
    half = 6 * matrices.width * 2 * 24**2
    assert flops.useful_flops(matrices, [24], 24) + half == counted
    wider = 2 * half * (matrices.width - matrices.hidden) // matrices.width  # prime-rl takes the hidden size
    assert flops.flops_6n(matrices, [24]) + wider == counted


def test_windows_and_prompts_are_not_counted(load) -> None:
    flops = load("flops")
    matrices = flops.Matrices(7, 0, 5, 5, 4, 8, (None, 3))
    pairs = 10**2 / 2 + (3 * 10 - 3**2 / 2)
    assert flops.useful_flops(matrices, [10], 6) == 4 * 7 * 10 + 6 * 5 * 6 + 12 * 8 * pairs


def test_figures_of_prime_rl_follow_from_its_formula(load) -> None:
    part, measure = load("part_long_rows"), load("measure")
    for (size, lora), peers in part.PRIME_RL.items():
        matrices = load("flops").read_matrices(part.build(size, lora, measure.Setup("meta", False)))
        for row_tokens, (_, tokens_per_s, mfu_6n, _) in peers.items():
            seconds = part.ROWS * row_tokens / tokens_per_s
            assert part.figures(matrices, row_tokens, seconds, part.PEAK)["MFU 6N"] == pytest.approx(mfu_6n, rel=2e-4)


def test_long_rows_stand_next_to_prime_rl(results) -> None:
    table = results["long_rows"]["table"]
    assert [line["row tokens"] for line in table] == [16, 64, 16, 64]
    assert all(line["step s"] > 0 and line["MFU 6N"] > 0 and line["error"] is None for line in table)
    assert [line["prime-rl, GiB"] for line in table] == [12.53, 19.56, 23.30, 41.99]
    # Computed for its steps alone, without the time in which it wrote weights
    assert [round(line["prime-rl, MFU 6N of the step"], 3) for line in table] == [0.153, 0.284, 0.217, 0.374]
    assert [round(line["prime-rl, MFU"], 3) for line in table] == [0.153, 0.284, 0.194, 0.313]


def test_expectations_have_the_parts_of_the_plan(load) -> None:
    memory, speed = load("expect").tables().values()
    assert len(memory) == 6 and all(line["weights"] and line["activations"] for line in memory)
    for line in speed:
        assert line["s at MFU 10 %"] == pytest.approx(4 * line["s at MFU 40 %"])
        assert 3.35e12 / line["tokens/s, 1 lines"] > 2 * 268e6  # bytes of a token


def test_the_plan_stands_next_to_the_peak(results) -> None:
    figures = results["memory"]
    assert len(figures) == 5
    assert all({"measured", "planned"} <= figures[name].keys() for name in figures.keys() - {"sizes"})


def test_both_trainers_sample_the_same_number_of_tokens(results) -> None:
    figures = results["trl"]
    (ours,), (trl,) = figures["ours"], figures["trl"]
    assert ours["new_tokens"] == trl["new_tokens"] == 2 * 2 * 6
    assert figures["ratio"] == ours["tokens_per_s"] / trl["tokens_per_s"]
    assert all(side["sampling_s"] > 0 and side["training_s"] > 0 for side in (ours, trl))


def test_vllm_is_missed_by_name(results) -> None:
    (figures,) = results["trl"]["trl, vllm"]
    assert figures["error"].startswith("RuntimeError: vllm ")


def test_a_run_names_what_fits(load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    run, out = load("run"), tmp_path / "results.json"
    assert sum(run.PARTS.values()) <= 9 * 60 and run.fitting(["trl", "training", "head"], 120) == ["trl"]
    out.write_text(json.dumps({"head": "earlier"}))
    monkeypatch.setitem(run.PARTS, "attention", 0.5)  # too short for its imports
    argv = ["run.py", "--out", str(out), "--minutes", "0.1", "--parts", "training", "attention"]
    monkeypatch.setattr(sys, "argv", argv)
    run.main()
    found, printed = json.loads(out.read_text()), capsys.readouterr().out
    assert printed.startswith("fits: attention (0.5 s)\nleft out, unless others are faster: training (60 s)\n")
    assert "left out: training, which takes about 60 s of the 6 s left" in printed
    assert found.keys() == {"head", "attention"} and found["head"] == "earlier"
    assert "took more than 1 s" in found["attention"]["error"] and found["attention"]["seconds"] >= 1


def test_a_part_that_fails_leaves_an_error(load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    failed = load("run").run_part("attention", 300, "", tmp_path / "part.json")
    assert "ended with exit code 1" in failed["error"] and "Traceback" in failed["output"]


def test_a_part_that_is_stopped_keeps_what_it_had(load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(setup) -> None:
        setup.keep({"first": 1})
        raise MemoryError

    monkeypatch.setitem(sys.modules, "part_stopped", SimpleNamespace(run=stop))
    with pytest.raises(MemoryError):
        load("run").measure_part("stopped", "cpu", True, tmp_path / "result.json")
    found = json.loads((tmp_path / "result.json").read_text())
    assert found["result"] == {"first": 1}
    assert found["environment"]["device"] == "cpu" and found["environment"]["torch"]
