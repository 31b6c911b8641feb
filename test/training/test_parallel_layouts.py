"""Tensor and context parallelism: ranks that split matrices or tokens give the weights of one process.

As a script, this file runs one rank.
"""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

from support.rank_scripts import become_rank, run_ranks
from support.rank_training import TOKENIZER, build_model, build_rows, train
from torchrl_rloo.modules import TransformersWrapper, ValueHead
from torchrl_rloo.modules.context_parallel import split_tokens
from torchrl_rloo.run.shards import detach_shards, read_tensors, write_folder
from torchrl_rloo.runtime.ranks import Ranks
from torchrl_rloo.training import shard_model
from torchrl_rloo.training.parallel_tensor import average_copies, split_layers
from torchrl_rloo.weight_update.source import WeightSource

SIZE, STEPS, FEW = 4, 20, 2
LIMIT_S = 2.0  # time-out of ranks that wait for one that never comes
MODEL = {"family": "qwen3", "heads": [8, 4], "layers": 2}  # Qwen3 also has norms of the queries and keys of each head
BASE = {"preset": "rloo", "model": MODEL, "steps": FEW}
TWO, FOUR = {"tensor_parallel": 2}, {"tensor_parallel": 4}
PASSES = {"accumulate": {"max_tokens": 60}, "checkpointing": True}  # several passes in each step
CASES: dict[str, dict[str, Any]] = {
    "tensor": {"ranks": FOUR, "parallel": "none"},
    "tensor, ddp": {"ranks": TWO, "parallel": "ddp", "packing": "packed"},
    "tensor, fsdp": {"ranks": TWO, "parallel": "fsdp", "packing": "shared_prefix", **PASSES},
    "tensor, hsdp": {"ranks": TWO, "parallel": "fsdp", "shard": {"shard_size": 1}},
    "context, ddp": {"ranks": {"context_parallel": 4}, "parallel": "ddp", "packing": "packed"},
    "context, fsdp": {"ranks": {"context_parallel": 2}, "parallel": "fsdp", "packing": "shared_prefix", **PASSES},
    "tensor, context": {
        "ranks": {**TWO, "context_parallel": 2},
        "parallel": "fsdp",
        "packing": "packed",
        "steps": STEPS,
    },
}


def make_ranks(rank: int, **settings: Any) -> Ranks:
    world = distributed.group.WORLD
    return Ranks(rank, SIZE, group=world, control=world, **settings)


def push(rank: int) -> list[dict[str, torch.Tensor]]:
    """Return the tensors of a split model that all ranks get, and those that only rank 1 gets."""
    source = WeightSource(shard_model(build_model(**MODEL), make_ranks(rank, **TWO)))
    names = [info.name for info in source.manifest()]
    tensors = [source.tensors(0, len(names), to) for to in (None, 1)]
    return [dict(zip(names, [t.clone() for t in values], strict=bool(values))) for values in tensors]


def resharded(rank: int, folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a model that loaded the checkpoint of a split one."""
    ranks = make_ranks(rank, **TWO)
    state, shards = detach_shards({"model": dict(shard_model(build_model(**MODEL), ranks).state_dict())})
    (folder / "saved").mkdir(exist_ok=True)
    write_folder(folder / "saved", state, shards, ranks)
    # Load it without tensor parallelism
    model = shard_model(build_model(**MODEL), make_ranks(rank))
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    read_tensors({f"model/{name}": p for name, p in model.named_parameters()}, folder / "saved")
    return {name: p.detach().full_tensor() for name, p in model.named_parameters()}


def error_without_rule() -> str:
    """Return the error of a plan that forgets to sum a gradient."""
    model = build_model(**MODEL)
    model._tp_plan = {name: style for name, style in model.tp_plan.items() if not name.endswith("q_norm")}
    with pytest.raises(NotImplementedError) as error:
        split_layers(model, init_device_mesh("cpu", (SIZE,)))
    return str(error.value)


def averaged_gradients(rank: int) -> dict[str, torch.Tensor]:
    """Return gradients that differ between ranks, as rounding may make them, after their average."""
    model = shard_model(build_model(**MODEL), make_ranks(rank, **TWO), "ddp")
    for p in model.parameters():
        p.grad = torch.full_like(p, rank)
    average_copies(model.parameters())
    return {name: p.grad.to_local().clone() for name, p in model.named_parameters()}


def score(rank: int) -> list[torch.Tensor]:
    """Score rows whose supports are recorded, with split tokens and whole."""
    rows = build_rows(0, TransformersWrapper(build_model(**MODEL), tokenizer=TOKENIZER, generate=False))
    sampler = {"generate_kwargs": {"top_k": 5, "repetition_penalty": 1.2}, "tokenizer": TOKENIZER, "generate": False}
    values = []
    for split in ({"context_parallel": SIZE}, {}):
        model = build_model(**MODEL)
        if split:
            shard_model(model, make_ranks(rank, **split), "ddp")
        scored = TransformersWrapper(model, packing="packed", **sampler).score(rows)
        values += [scored.log_probs.detach(), scored.entropy.detach()]
    return values


def error_without_packing(rank: int) -> str:
    model = shard_model(build_model(**MODEL), make_ranks(rank, context_parallel=SIZE), "ddp")
    rows = build_rows(0, TransformersWrapper(build_model(**MODEL), tokenizer=TOKENIZER, generate=False))
    with pytest.raises(ValueError) as error:
        TransformersWrapper(model, tokenizer=TOKENIZER, generate=False).score(rows)
    return str(error.value)


def wait_for_rank_3(rank: int) -> tuple[float, str]:
    """Return how long rank 2 waits for the shards of rank 3, and its error."""
    model = shard_model(build_model(**MODEL), make_ranks(rank, timeout=LIMIT_S), shard_size=2)
    seconds, error = 0.0, None
    if rank == 2:
        began = time.monotonic()
        with pytest.raises(RuntimeError) as error:
            model(input_ids=torch.zeros(1, 3, dtype=torch.int64))
        seconds = time.monotonic() - began
    distributed.barrier()  # all ranks live until then
    return seconds, "" if error is None else str(error.value)


def timeouts_of_groups(rank: int, **split: int) -> list[float]:
    """Return the time-out of each group that is made to split a model."""
    groups = distributed.distributed_c10d._world.pg_map
    before = set(groups)
    shard_model(build_model(**MODEL), make_ranks(rank, timeout=77.0, **split), "ddp")
    backends = [group._get_backend(torch.device("cpu")) for group in groups if group not in before]
    return [backend.options._timeout.total_seconds() for backend in backends]


def run_rank(ranks: Ranks, folder: Path) -> dict[str, Any]:
    rank = ranks.rank
    results: dict[str, Any] = {
        name: train(BASE | case, make_ranks(rank, **case["ranks"])) for name, case in CASES.items()
    }
    results["push"], results["averaged"] = push(rank), averaged_gradients(rank)
    results["resharded"] = resharded(rank, folder)
    results["scores"] = score(rank)
    results["errors"] = error_without_rule(), error_without_packing(rank)
    results["timeouts"] = [timeouts_of_groups(rank, **split) for split in (TWO, {"context_parallel": 2})]
    results["waited"] = wait_for_rank_3(rank)
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory, fork_server) -> list[dict[str, Any]]:
    return run_ranks(fork_server, __file__, tmp_path_factory.mktemp("layouts"), SIZE).results()


@pytest.fixture(scope="module")
def expected() -> dict[int, dict[str, Any]]:
    return {steps: train(BASE | {"steps": steps}, None) for steps in (FEW, STEPS)}


@pytest.mark.parametrize("name", CASES)
def test_weights_and_metrics_are_those_of_one_process(results, expected, name):
    one = expected[(BASE | CASES[name])["steps"]]
    for result in results:
        assert result[name]["weights"].keys() == one["weights"].keys()
        for key, value in one["weights"].items():
            torch.testing.assert_close(result[name]["weights"][key], value, rtol=0, atol=1e-5)
        assert result[name]["metrics"] == pytest.approx(one["metrics"], rel=1e-4, abs=1e-4)


def test_training_moved_the_weights(expected):
    """Otherwise equal weights would say nothing."""
    start = dict(torch.nn.ModuleList([build_model(**MODEL)]).named_parameters())
    assert all(float((w - start[n]).detach().abs().max()) > 1e-3 for n, w in expected[STEPS]["weights"].items())


def test_pushes_whole_tensors_of_a_split_model(results):
    source = WeightSource(build_model(**MODEL))
    whole = dict(zip((i.name for i in source.manifest()), source.tensors(0, len(source.manifest())), strict=True))
    for rank, result in enumerate(results):
        everywhere, on_one = result["push"]
        for tensors in [everywhere, *([on_one] if rank == 1 else [])]:
            assert tensors.keys() == whole.keys()
            assert all(torch.equal(tensors[name], value) for name, value in whole.items())


def test_checkpoint_of_a_split_model_loads_into_shards(results):
    whole = dict(build_model(**MODEL).named_parameters())
    for result in results:
        assert result["resharded"].keys() == whole.keys()
        assert all(torch.equal(result["resharded"][name], value) for name, value in whole.items())


def test_copies_of_whole_parameters_get_the_same_gradient(results):
    for rank, result in enumerate(results):
        for name, gradient in result["averaged"].items():
            split = "_proj" in name
            assert bool((gradient == (rank if split else (0.5, 0.5, 2.5, 2.5)[rank])).all()), name


def test_split_rows_have_the_scores_of_whole_ones(results):
    for result in results:
        log_probs, entropy, *whole = result["scores"]
        for value, reference in zip((log_probs, entropy), whole, strict=True):
            torch.testing.assert_close(value, reference, rtol=0, atol=1e-5)


def test_wrong_plans_and_padded_training_are_refused(results):
    for result in results:
        plan, padded = result["errors"]
        assert "tensor_parallel=4" in plan and "gradient of model.layers.0.self_attn.q_norm" in plan
        assert "packing='none'" in padded and "context_parallel=4" in padded


def test_groups_of_some_ranks_have_the_timeout_of_the_ranks(results):
    for result in results:
        assert all(found and set(found) == {77.0} for found in result["timeouts"])
    seconds, error = results[2]["waited"]
    assert LIMIT_S <= seconds < 60 and "imed out" in error


@pytest.mark.parametrize(
    ("split", "match"),
    [
        ({"tensor_parallel": 0}, "tensor_parallel=0 must be at least 1"),
        ({"tensor_parallel": 2, "context_parallel": 4}, "must divide the number of ranks, 4"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(split, match):
    with pytest.raises(ValueError, match=match):
        Ranks(0, 4, **split)


def test_neighbors_share_rows():
    ranks = [Ranks(rank, 8, tensor_parallel=2, context_parallel=2) for rank in range(8)]
    assert [(r.data_rank, r.data_size, r.averaged) for r in ranks] == [(rank // 4, 2, 4) for rank in range(8)]


def change_plan(model: torch.nn.Module) -> torch.nn.Module:
    model._tp_plan = {**model.tp_plan, "model.layers.*.mlp.up_proj": "packed_colwise"}
    return model


def without_plan(model: torch.nn.Module) -> torch.nn.Module:
    model._tp_plan = {}
    return model


def with_adapter(model: torch.nn.Module) -> torch.nn.Module:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))


@pytest.mark.parametrize(
    ("model", "size", "match"),
    [
        (lambda: with_adapter(build_model()), 2, "tensor_parallel=2 cannot be combined with LoRA"),
        (lambda: build_model(heads=(4, 1)), 2, "must divide num_key_value_heads=1"),
        (lambda: change_plan(build_model(**MODEL)), 2, "style 'packed_colwise'"),
        (lambda: without_plan(build_model(**MODEL)), 2, "requires a model with a tp_plan"),
        (lambda: torch.nn.Linear(2, 2), 2, "requires a Transformers model, got Linear"),
        (lambda: build_model(**MODEL), 3, "tensor_parallel=3 must divide"),
    ],
)
def test_models_that_cannot_be_split_are_refused_by_name(model, size, match):
    with pytest.raises(ValueError, match=match):
        split_layers(model(), SimpleNamespace(size=lambda: size))


@pytest.mark.parametrize(
    ("model", "match"),
    [
        (lambda: ValueHead(build_model()), "context_parallel=2 requires a causal language model.*ValueHead"),
        (lambda: build_model(heads=(4, 1)), r"context_parallel=2 \* tensor_parallel=1 must divide num_key_value_heads"),
    ],
)
def test_models_whose_rows_cannot_be_split_are_refused_by_name(model, match):
    with pytest.raises(ValueError, match=match):
        split_tokens(model(), Ranks(0, 2, context_parallel=2))


if __name__ == "__main__":
    become_rank(run_rank)
