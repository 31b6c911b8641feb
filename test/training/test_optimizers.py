"""Optimizers by name against independent ones, their states, and settings that they refuse."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from torchrl_rloo.cli import config
from torchrl_rloo.data import notices
from torchrl_rloo.embedded import build_model, build_tokenizer
from torchrl_rloo.run.checkpoint import Checkpointer
from torchrl_rloo.run.shards import gather_state, restore_state
from torchrl_rloo.training import make_optimizer, make_schedule, optimizer_classes, optimizer_step
from torchrl_rloo.training.optimizer_classes import _levels, _update_chunk
from torchrl_rloo.training.optimizers import OPTIMIZERS
from torchrl_rloo.training.schedules import SCHEDULES

SETTINGS = {"sgd": {"momentum": 0.9}}


class Model(nn.Module):
    """Embedding, layers and head, with parameters large enough for states of 8 bits."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(80, 64), nn.Linear(64, 80, bias=False)
        self.layers = nn.ModuleList([nn.Linear(64, 96), nn.Linear(96, 64)])

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def make_model() -> Model:
    torch.manual_seed(0)
    return Model()


def set_gradients(model: nn.Module, step: int, scale: float = 1.0) -> None:
    """Set gradients whose sizes span four decades; some rows of each matrix have none."""
    generator = torch.Generator().manual_seed(step)
    for p in model.parameters():
        spread = 10 ** (-4 * torch.rand(p.shape, generator=torch.Generator().manual_seed(p.numel())))
        p.grad = scale * spread * torch.randn(p.shape, generator=generator)
        p.grad[: len(p) // 8] = 0


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range = range(5)) -> nn.Module:
    for step in steps:
        set_gradients(model, step)
        optimizer.step()
    return model


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# ------------------------------------------------------------------------------------------------------- 8-bit AdamW
def quantize(values: torch.Tensor, code: torch.Tensor, block: int) -> torch.Tensor:
    """Return values rounded to the nearest code times the largest magnitude of their block, in float64."""
    blocks = values.double().reshape(-1, block)
    scale = blocks.abs().amax(1, keepdim=True)
    nearest = ((blocks / scale.clamp(min=1e-300))[..., None] - code.double()).abs().argmin(-1)
    return (code.double()[nearest] * scale).reshape(values.shape)


def test_8bit_adamw_is_the_formula_with_rounded_moments():
    model, lr, decay, (beta1, beta2) = make_model(), 1e-2, 0.1, (0.9, 0.99)
    w = model.layers[0].weight.detach().double().clone()
    first, second = torch.zeros_like(w), torch.zeros_like(w)
    codes = [_levels(name, torch.device("cpu"))[0] for name in ("exp_avg", "exp_avg_sq")]
    optimizer = make_optimizer(model, "adamw_8bit", lr=lr, weight_decay=decay)
    for step in range(1, 6):
        set_gradients(model, step)
        g = model.layers[0].weight.grad.double()
        first, second = beta1 * first + (1 - beta1) * g, beta2 * second + (1 - beta2) * g.square()
        corrected = first / (1 - beta1**step), second / (1 - beta2**step)
        w = w * (1 - lr * decay) - lr * corrected[0] / (corrected[1].sqrt() + 1e-8)
        first, second = quantize(first, codes[0], 64), quantize(second.sqrt(), codes[1], 64).square()
        optimizer.step()
    off = (model.layers[0].weight.detach() - w).abs()
    assert off.median() < 1e-7 and (off < 1e-6).double().mean() > 0.99  # a tie may round to the other neighbor
    assert off.max() < lr


def test_levels_are_those_of_the_paper():
    functional = pytest.importorskip("bitsandbytes.functional")
    for name in ("exp_avg", "exp_avg_sq"):
        levels, limits = _levels(name, torch.device("cpu"))
        torch.testing.assert_close(levels, functional.create_dynamic_map(signed=name == "exp_avg"), rtol=1e-6, atol=0)
        assert len(limits) == 255 and torch.equal(torch.bucketize(levels, limits), torch.arange(256))


def test_8bit_adamw_of_small_parameters_is_adamw():
    models = [nn.Linear(24, 8), nn.Linear(24, 8)]
    models[1].load_state_dict(models[0].state_dict())
    for model, name in zip(models, ("adamw", "adamw_8bit"), strict=True):
        train(model, make_optimizer(model, name, lr=1e-2, weight_decay=0.1))
    torch.testing.assert_close(weights(models[1]), weights(models[0]), rtol=1e-6, atol=1e-7)


def test_8bit_moments_of_rows_do_not_depend_on_other_rows(monkeypatch):
    """So chunks and shards of rows have the moments of the whole parameter."""
    found = []
    for values in (2**24, 640):  # all rows at a time, or ten
        monkeypatch.setattr("torchrl_rloo.training.optimizer_classes.CHUNK_VALUES", values)
        found.append(weights(train(model := make_model(), make_optimizer(model, "adamw_8bit", lr=1e-2))))
    assert torch.equal(*found)


def test_weights_of_16_bits_step_in_float32():
    p, state = torch.ones(4, 64, dtype=torch.bfloat16), {name: torch.zeros(4, 64) for name in ("exp_avg", "exp_avg_sq")}
    group = {"lr": 0.5, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}
    _update_chunk(p, torch.ones_like(p), state, 1, group)
    assert torch.equal(p, torch.full_like(p, 0.5))


# -------------------------------------------------------------------------------------------------------------- Muon
def test_muon_is_torch_muon_on_hidden_matrices_and_adamw_elsewhere():
    settings = {"lr": 1e-2, "weight_decay": 0.1}
    model, reference = make_model(), make_model()
    optimizer = make_optimizer(model, "muon", **settings, momentum=0.8, betas=(0.8, 0.9))
    matrices = [layer.weight for layer in reference.layers]
    others = [p for p in reference.parameters() if all(p is not m for m in matrices)]
    muon = torch.optim.Muon(matrices, **settings, momentum=0.8, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(others, **settings, betas=(0.8, 0.9))
    for step in range(3):
        for m in (model, reference):
            set_gradients(m, step)
        optimizer.step(), muon.step(), adamw.step()
    assert torch.equal(weights(model), weights(reference))
    with pytest.raises(NotImplementedError, match="fixed groups"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


@pytest.mark.parametrize("tied", [True, False])
def test_muon_leaves_embedding_and_head_of_a_language_model_to_adamw(tied):
    model = build_model(build_tokenizer(), seed=0)
    if not tied:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    optimizer = make_optimizer(nn.ModuleList([model, nn.Linear(64, 1)]), "muon", lr=1e-3)
    names = {id(p): name for name, p in model.named_parameters()}
    muon, adamw = [[names.get(id(p), "value") for p in group["params"]] for group in optimizer.param_groups]
    assert all(".layers." in name and name.endswith("proj.weight") for name in muon)
    assert len(muon) == 7 * len(model.model.layers)
    assert ("lm_head.weight" in adamw) == (not tied) and {"model.embed_tokens.weight", "value"} <= set(adamw)


# ------------------------------------------------------------------------------------------------------------ states
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_checkpoint_continues_bit_for_bit(tmp_path, name):
    settings = {"lr": 1e-2, **SETTINGS.get(name, {})}
    model = make_model()
    optimizer = make_optimizer(model, name, **settings)
    schedule = make_schedule(optimizer, 8, "cosine")
    for step in range(3):
        set_gradients(model, step)
        optimizer_step(model, optimizer, schedule, max_grad_norm=1.0)
    parts = {"model": model, "optimizer": optimizer, "scheduler": schedule}
    Checkpointer(tmp_path).save(3, {"parts": gather_state(**parts)})
    # Load it into new parts, and go on with both
    other = Model()
    loaded = make_optimizer(other, name, **settings)
    again = {"model": other, "optimizer": loaded, "scheduler": make_schedule(loaded, 8, "cosine")}
    restore_state(Checkpointer(tmp_path).load()["parts"], **again)
    for each in (parts, again):
        for step in range(3, 6):
            set_gradients(each["model"], step)
            optimizer_step(*each.values(), max_grad_norm=1.0)
    assert torch.equal(weights(model), weights(other)) and not torch.equal(weights(model), weights(make_model()))
    assert again["scheduler"].get_last_lr() == schedule.get_last_lr()


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "muon", "adafactor", "nadam"])
def test_steps_in_chunks_are_the_steps_of_all_parameters(monkeypatch, name):
    """As with states that wait in CPU memory, which only a GPU moves."""
    monkeypatch.setattr(optimizer_classes, "CHUNK_BYTES", 30_000)
    expected = train(model := make_model(), make_optimizer(model, name, lr=1e-2))
    model = make_model()
    optimizer = optimizer_classes.OffloadedStates(make_optimizer(model, name, lr=1e-2))
    assert len(list(optimizer_classes._chunks(list(model.parameters())))) == 4
    train(model, optimizer, range(2))
    assert all(p.grad is not None for p in model.parameters())
    # Go on with another one
    other = optimizer_classes.OffloadedStates(make_optimizer(model, name, lr=1e-2))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, other, range(2, 5))
    assert torch.equal(weights(model), weights(expected))


# ---------------------------------------------------------------------------------------------------------- settings
def test_names_of_settings_are_those_of_the_library():
    assert config.OPTIMIZERS == OPTIMIZERS and config.SCHEDULES == SCHEDULES


REFUSED = [
    ({"name": "adamww"}, "optimizer 'adamww': unknown (did you mean 'adamw'"),
    ({"name": "lbfgs"}, "optimizer 'lbfgs': unknown"),
    ({"name": "sgd", "betas": [0.9, 0.99]}, "has no effect with optimizer 'sgd', which has no betas; set it to null"),
    ({"name": "rprop", "weight_decay": 0.0}, "weight_decay=0.0 has no effect with optimizer 'rprop'"),
    ({"name": "sgd", "momentun": 0.9}, "unknown names ['momentun'] for optimizer 'sgd' (did you mean 'momentum'?)"),
    ({"name": "sgd", "momentum": -1}, "optimizer 'sgd': Invalid momentum value: -1"),
    ({"name": "muon", "adjust_lr_fn": "no"}, "optimizer 'muon': Adjust learning rate function no is not supported"),
    ({"name": "adamw_8bit", "betas": [0.9, 1.0]}, "optimizer 'adamw_8bit': betas=(0.9, 1.0) must be"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED, ids=[str(settings) for settings, _ in REFUSED])
def test_settings_are_refused_before_a_model_is_loaded(settings, message):
    with pytest.raises(ValueError) as raised:
        make_optimizer(nn.Linear(2, 2), **{"lr": 1e-3} | settings)
    assert message in str(raised.value)


def test_models_are_refused():
    with pytest.raises(ValueError, match="weight has dtype=torch.bfloat16, in which most steps of lr=1e-06"):
        make_optimizer(nn.Linear(2, 2, dtype=torch.bfloat16), lr=1e-6)
    with pytest.raises(ValueError, match="no trained parameters"):
        make_optimizer(nn.Linear(2, 2).requires_grad_(False), lr=1e-6)
    with pytest.raises(ValueError, match="offload_states=True has no effect on weight, which is on the CPU"):
        make_optimizer(nn.Linear(2, 2), lr=1e-6, offload_states=True)
    with pytest.raises(ValueError, match="no hidden matrices"):
        make_optimizer(nn.Embedding(2, 2), "muon", lr=1e-6)


# ------------------------------------------------------------------------------------------- a step that trains nothing


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    set_gradients(model, 0)
    optimizer_step(model, optimizer)


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    """As after an adapter or sharding that came after the optimizer."""
    model = make_model()
    with pytest.raises(
        ValueError, match="holds none of the model's 6 trained parameters; make it from the trained model"
    ):
        step(model, torch.optim.SGD(make_model().parameters(), lr=0.1))
    with pytest.raises(ValueError, match="no parameter of the model requires a gradient; unfreeze"):
        optimizer_step(model.requires_grad_(False), torch.optim.SGD(model.parameters(), lr=0.1))


def test_what_an_optimizer_leaves_out_is_told(caplog: pytest.LogCaptureFixture, monkeypatch) -> None:
    monkeypatch.setattr(notices, "_SHOWN", set())
    model = make_model()
    for _ in range(2):
        step(model, torch.optim.SGD(model.layers.parameters(), lr=0.1))
    (told,) = caplog.messages
    assert "2 of the model's 6 trained parameters have a gradient, but are not in the optimizer" in told


@pytest.mark.parametrize(("lr", "warmup", "number"), [(0.0, 0, 1), (0.0, 5, 1), (0.1, 5, 0)])
def test_a_learning_rate_of_0_is_told(lr: float, warmup: int, number: int, caplog, monkeypatch) -> None:
    """The first step of a warm-up also has a rate of 0, but others follow."""
    monkeypatch.setattr(notices, "_SHOWN", set())
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    if warmup:
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: n / warmup)
    step(model, optimizer)
    assert len(caplog.messages) == number and all("lr=0" in message for message in caplog.messages)
