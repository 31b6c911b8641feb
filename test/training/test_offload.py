"""States and activations in CPU memory: nothing changes but their place."""

from __future__ import annotations

import pytest
import torch

from torchrl_rloo.embedded import build_model, build_tokenizer
from torchrl_rloo.modules.policies import recompute_in_eval
from torchrl_rloo.training import make_optimizer, offload_activations, shard

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="requires a GPU")
IDS = torch.arange(5, 69).repeat(4, 1)


@pytest.fixture
def packed(monkeypatch):
    """Tensors that were saved, and those of them that were copied."""
    seen, pack = [], shard._pack

    def spy(tensor):
        result = pack(tensor)
        seen.append((tensor, isinstance(result, tuple)))
        return result

    monkeypatch.setattr(shard, "_pack", spy)
    return seen


def gradients(model: torch.nn.Module, enabled: bool) -> list[torch.Tensor]:
    model.zero_grad()
    ids = IDS.to(model.device)
    with offload_activations(enabled), recompute_in_eval(model):
        model(input_ids=ids, labels=ids).loss.backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_activations_move_and_gradients_stay(packed, checkpointing):
    model = build_model(build_tokenizer(), seed=0).eval()
    if checkpointing:
        model.gradient_checkpointing_enable()
    expected = gradients(model, False)
    assert not packed
    found = gradients(model, True)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    # Parameters and small tensors stay; with recomputation, layers save little more than their inputs
    moved = [tensor for tensor, copied in packed if copied]
    storages = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert moved and not any(t.untyped_storage().data_ptr() in storages for t in moved)
    hidden = model.config.hidden_size
    inputs = [t for t in moved if t.shape == (*IDS.shape, hidden)]
    layers = len(model.model.layers)
    assert len(inputs) > 3 * layers if not checkpointing else layers <= len(inputs) <= layers + 4


def test_small_and_expanded_tensors_stay(packed):
    weight = torch.nn.Parameter(torch.ones(600, 600))
    with offload_activations():
        (weight * torch.ones(600, 1).expand(600, 600)).sum().backward()
        (weight[0] * torch.ones(600)).sum().backward()
    assert packed and not any(copied for _, copied in packed)


@GPU
def test_activations_of_a_gpu_move():
    model = build_model(build_tokenizer(), seed=0).eval().cuda()
    expected = gradients(model, False)
    assert all(torch.equal(a, b) for a, b in zip(gradients(model, True), expected, strict=True))


@GPU
@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "muon"])
def test_states_of_a_gpu_wait_on_the_cpu(name):
    models = [build_model(build_tokenizer(), seed=0).eval().cuda() for _ in range(2)]
    optimizers = [
        make_optimizer(model, name, lr=1e-3, offload_states=offloaded)
        for model, offloaded in zip(models, (False, True), strict=True)
    ]
    for _ in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            gradients(model, False)
            optimizer.step()
            for state in optimizer.state.values():
                kinds = {
                    value.device.type for value in state.values() if isinstance(value, torch.Tensor) and value.ndim
                }
                assert kinds == ({"cpu"} if optimizer is optimizers[1] else {"cuda"})
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(p, q)
    # A checkpoint never brings all states to the device
    again = make_optimizer(models[1], name, lr=1e-3, offload_states=True)
    again.load_state_dict(optimizers[0].state_dict())
    assert all(v.device.type == "cpu" for s in again.state.values() for v in s.values() if v.ndim)
