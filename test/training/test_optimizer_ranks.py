"""Optimizer steps of two ranks with shards: weights, norms and states are those of one process, and copies stay equal.

As a script, this file runs one rank. Each check runs in the same two processes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from support.rank_scripts import EndedRanks, become_rank, run_checks, run_ranks
from support.rank_training import TOKENIZER, build_model, build_rows
from torchrl_rloo.data.rows import PACKINGS
from torchrl_rloo.modules import TransformersWrapper
from torchrl_rloo.runtime.ranks import Ranks
from torchrl_rloo.training import check_copies, make_optimizer, make_schedule, optimizer_step, shard_model
from torchrl_rloo.training.optimizers import OPTIMIZERS, WHOLE_ONLY
from torchrl_rloo.training.step import gradient_norm

SIZE = 2
STEPS = 6
SETTINGS = {"sgd": {"momentum": 0.9}, "muon": {"weight_decay": 0.1}, "adamw": {"weight_decay": 0.1}}


class Model(nn.Module):
    """Embedding, layers and head; the layers have rows that two ranks share unequally."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 128)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(128, 65), nn.Tanh(), nn.Linear(65, 128)) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(128), nn.Linear(128, 50, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.head(self.norm(hidden)).log_softmax(-1)


def build() -> Model:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Model()


def sharded(model: Model) -> Model:
    mesh = init_device_mesh("cpu", (SIZE,), mesh_dim_names=("shard",))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def set_gradients(model: nn.Module, reference: nn.Module, step: int) -> None:
    """Run a backward pass of the reference, and give the model its gradients: the same bits, sharded."""
    ids = torch.randint(40, (4, 5), generator=torch.Generator().manual_seed(step))  # ids 40 to 49 never occur
    reference(ids)[:, :-1].gather(-1, ids[:, 1:, None]).mean().backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        p.grad = distribute_tensor(q.grad.clone(), p.device_mesh, p.placements)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def difference(model: nn.Module, reference: nn.Module) -> float:
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max(float((whole(p.detach()) - q.detach()).abs().max()) for p, q in pairs)


def train(name: str, steps: int = STEPS, **settings: object) -> list[tuple[nn.Module, torch.optim.Optimizer]]:
    """Train a sharded model and a whole one on the same gradients; return both with their optimizers.

    Those of Muon and 8-bit AdamW are not clipped: both round, so the last bit of the norm would decide some roundings.
    """
    models = sharded(build()), build()
    settings = SETTINGS.get(name, {}) | settings
    optimizers = [make_optimizer(model, name, lr=1e-2, **settings) for model in models]
    schedules = [make_schedule(optimizer, STEPS, "cosine") for optimizer in optimizers]
    for step in range(steps):
        set_gradients(*models, step)
        both = zip(models, optimizers, schedules, strict=True)
        limit = None if name in ("muon", "adamw_8bit") else 0.1
        norms = [optimizer_step(m, o, schedule, max_grad_norm=limit) for m, o, schedule in both]
        assert not isinstance(norms[0], DTensor) and norms[0].ndim == 0
        torch.testing.assert_close(*norms, rtol=1e-6, atol=0)
    return list(zip(models, optimizers, strict=True))


# -------------------------------------------------------------------------------------------------- checks of one rank
def check_optimizers(rank: int) -> None:
    """Check that steps on shards give the weights of one process, for each optimizer."""
    for name in OPTIMIZERS:
        if name in WHOLE_ONLY:
            with pytest.raises(ValueError, match="cannot be combined with sharded parameters"):
                train(name)
            continue
        (model, _), (reference, _) = train(name)
        found, moved = difference(model, reference), difference(reference, build())
        print(f"{name}: {found:.1e} of {moved:.1e}", flush=True)
        assert moved > 1e-5, name
        assert found < 1e-6, (name, found)
    (model, _), (reference, _) = train("muon", steps=2, nesterov=False)
    assert difference(model, reference) < 1e-6 < difference(reference, train("muon", steps=2)[1][0])


def check_states(rank: int) -> None:
    """Check that states are those of one process, and load into another optimizer on shards."""
    for name in ("adamw_8bit", "muon"):
        (model, optimizer), (reference, other) = train(name)
        options = StateDictOptions(full_state_dict=True)
        state = get_optimizer_state_dict(model, optimizer, options=options)["state"]
        expected = get_optimizer_state_dict(reference, other)["state"]
        kinds = {value.dtype for values in expected.values() for value in values.values()}
        assert (torch.uint8 in kinds) == (name == "adamw_8bit")
        for parameter, values in expected.items() if rank == 0 else ():  # the other rank gets nothing
            assert state[parameter].keys() == values.keys()
            for key, value in values.items():
                assert state[parameter][key].dtype == value.dtype
                torch.testing.assert_close(state[parameter][key], value, rtol=1e-5, atol=1e-9)
        # Go on from the shards of the states
        again = sharded(build())
        with torch.no_grad():
            for p, q in zip(again.parameters(), model.parameters(), strict=True):
                p.copy_(q)
        loaded = make_optimizer(again, name, lr=1e-2, **SETTINGS.get(name, {}))
        shards = get_optimizer_state_dict(model, optimizer)  # torch does not copy the tensors that it loads
        set_optimizer_state_dict(again, loaded, copy.deepcopy(shards))
        for m, o in ((model, optimizer), (again, loaded)):
            set_gradients(m, build(), 99)
            optimizer_step(m, o)
        for p, q in zip(model.parameters(), again.parameters(), strict=True):
            assert torch.equal(p.to_local(), q.to_local()), name


def reference_norm(gradients: list[torch.Tensor]) -> float:
    return sum(float(g.double().square().sum()) for g in gradients) ** 0.5


def check_norms(rank: int) -> None:
    """Check that the norm counts each value once: shards of two meshes, copies, partial sums, whole parameters."""
    line = init_device_mesh("cpu", (SIZE,))
    grid = init_device_mesh("cpu", (1, SIZE), mesh_dim_names=("replicate", "shard"))
    generator = torch.Generator().manual_seed(0)
    gradients, parameters = [], []
    for mesh, placements in (
        (line, [Shard(0)]),
        (line, [Replicate()]),
        (grid, [Replicate(), Shard(1)]),
        (None, None),
        (line, [Partial()]),
        (line, [Shard(0)]),
    ):
        gradient = torch.randn(7, 6, generator=generator) * 3
        gradients.append(gradient)
        if mesh is None:
            parameters.append(nn.Parameter(torch.zeros(7, 6)))
            parameters[-1].grad = gradient.clone()
            continue
        partial = placements[0].is_partial()
        kept = [Replicate()] if partial else placements
        parameters.append(nn.Parameter(distribute_tensor(torch.zeros(7, 6), mesh, kept)))
        if partial:
            share = gradient * (0.25 if rank == 0 else 0.75)
            parameters[-1].grad = DTensor.from_local(share, mesh, placements)
        else:
            parameters[-1].grad = distribute_tensor(gradient.clone(), mesh, placements)
    parameters.append(nn.Parameter(distribute_tensor(torch.zeros(3, 2), line, [Shard(0)])))  # without a gradient
    norm, expected = gradient_norm(parameters), reference_norm(gradients)
    assert not isinstance(norm, DTensor) and abs(float(norm) / expected - 1) < 1e-6
    told: list = [None] * SIZE
    distributed.all_gather_object(told, float(norm))
    assert len(set(told)) == 1
    # Clip
    module = nn.ParameterList(parameters)
    optimizer = torch.optim.SGD([{"params": [p]} for p in parameters], lr=1.0, foreach=False)
    optimizer_step(module, optimizer, max_grad_norm=0.5)
    for p, gradient in zip(parameters, gradients, strict=False):
        torch.testing.assert_close(whole(p.detach()), -gradient * 0.5 / expected, rtol=1e-5, atol=1e-7)


def check_errors(rank: int) -> None:
    """Check that a value that is not finite, in the shard of one rank, stops all ranks before the step."""
    model = sharded(build())
    optimizer = make_optimizer(model, lr=1e-2)
    before = [p.to_local().clone() for p in model.parameters()]
    set_gradients(model, build(), 0)
    if rank == 1:
        model.head.weight.grad.to_local()[0, 0] = torch.inf
    with pytest.raises(RuntimeError, match="the gradient norm is non-finite"):
        optimizer_step(model, optimizer, max_grad_norm=1.0)
    assert all(torch.equal(a, b.to_local()) for a, b in zip(before, model.parameters(), strict=True))


def check_recomputation(rank: int) -> None:
    """Check that DDP and FSDP run each layer again in the backward pass of a model in evaluation mode.

    The gradient is that of one process without recomputation, for each layout of rows.
    """
    ranks = Ranks(rank, SIZE, group=distributed.group.WORLD, control=distributed.group.WORLD)
    rows = build_rows(0, TransformersWrapper(build_model(), tokenizer=TOKENIZER, generate=False))
    for packing in PACKINGS:
        gradients = []
        for parallel in ("none", "ddp", "fsdp"):
            model, calls = build_model(), []
            if parallel != "none":
                model.gradient_checkpointing_enable()
                shard_model(model, ranks, parallel)
            policy = TransformersWrapper(model, tokenizer=TOKENIZER, generate=False, packing=packing)
            for number, layer in enumerate(model.model.layers):
                layer.mlp.register_forward_pre_hook(lambda *_, n=number, seen=calls: seen.append(n))
            torch.cat(list(policy.score(rows).log_probs)).square().sum().backward()
            layers = list(range(len(model.model.layers)))
            assert calls == (layers if parallel == "none" else layers + layers[::-1]), (packing, parallel, calls)
            assert not model.training and not any(layer.training for layer in model.model.layers)
            gradients.append([whole(p.grad) for p in model.parameters()])
        for found in gradients[1:]:
            for ours, expected in zip(found, gradients[0], strict=True):
                torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max() + 1))


def check_drift(rank: int) -> None:
    """Check that copies of weights that drift apart are named on all ranks."""
    ranks = Ranks(rank, SIZE, group=distributed.group.WORLD, control=distributed.group.WORLD)
    for parallel, shard, number in (("ddp", {}, 1), ("fsdp", {"shard_size": 1}, 1), ("fsdp", {}, 2)):
        model = shard_model(build_model(), ranks, parallel, **shard)
        assert len(set(check_copies(model, ranks).values())) == number
        if rank == 1:
            weight = next(model.parameters())
            with torch.no_grad():
                (weight.to_local() if isinstance(weight, DTensor) else weight).view(-1)[0] += 1e-6
        if number == 1:  # otherwise each rank has other weights
            with pytest.raises(RuntimeError, match=r"^ranks \[0, 1\] must have equal weights, but their checksums"):
                check_copies(model, ranks)


CHECKS: list[Callable[[int], None]] = [check_norms, check_errors, check_optimizers, check_states, check_recomputation]
CHECKS += [check_drift]


# -------------------------------------------------------------------------------------------------------------- tests
@pytest.fixture(scope="module")
def ran(tmp_path_factory, fork_server) -> EndedRanks:
    return run_ranks(fork_server, __file__, tmp_path_factory.mktemp("optimizer_ranks"), SIZE)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_two_ranks_agree_with_one_process(ran, check):
    ran.assert_passed(check)


if __name__ == "__main__":
    become_rank(lambda ranks, folder: run_checks(CHECKS, folder, ranks.rank))
