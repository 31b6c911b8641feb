"""Tests of vision towers: frozen ones get no adapter and are not sent; folders have all that others read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.vision_models import FAMILIES, build
from torchrl_rloo.engines import TransformersEngine
from torchrl_rloo.images.towers import frozen_towers
from torchrl_rloo.modules import add_adapter, load_model, save_merged, save_model
from torchrl_rloo.modules.model_files import save_tokenizer
from torchrl_rloo.weight_update import LoRAPublisher, WeightPublisher, WeightSource, WeightSyncError

TOWERS = {"idefics3": "vision_model", "smolvlm": "vision_model", "llava_next": "vision_tower", "gemma3": "vision_tower"}


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Folder of a saved model of each family."""
    model, tokenizer, _ = build(request.param, tmp_path / "images")
    return save_model(model, tokenizer, tmp_path / request.param)


def changed(model: torch.nn.Module) -> torch.nn.Module:
    """Change the trained parameters."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
    return model


def tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_equal(one: torch.nn.Module, other: torch.nn.Module) -> None:
    first, second = one.state_dict(), other.state_dict()
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def test_a_folder_keeps_tokenizer_and_image_processor(folder: Path, tmp_path: Path):
    model, tokenizer = load_model(folder)
    assert tokenizer.chat_template and (folder / "processor_config.json").is_file()
    save_merged(model, tokenizer, tmp_path / "again")
    same, other = load_model(tmp_path / "again")
    assert other.images.settings() == tokenizer.images.settings()
    assert_equal(model, same)


def test_only_the_tower_is_frozen_and_not_sent(folder: Path):
    name = TOWERS.get(folder.name, "visual")
    trained, tokenizer = load_model(folder)
    frozen = [n for n, p in trained.named_parameters() if not p.requires_grad]
    assert frozen == [n for n, _ in trained.named_parameters() if f".{name}." in n] != []
    engine = TransformersEngine(load_model(folder)[0], tokenizer)
    publisher = WeightPublisher(changed(trained), engine)
    # Every tensor is sent or compared, once
    sent, kept = (
        [info.name for info in infos]
        for infos in (publisher.source.manifest(), [i for i, _ in publisher.source.frozen])
    )
    whole = WeightSource(load_model(folder, train_vision=True)[0])
    assert not whole.frozen and sorted([*sent, *kept]) == sorted(info.name for info in whole.manifest())
    assert all(f"{name}." in one for one in kept) and not any(f"{name}." in one for one in sent)
    publisher.push_weights()
    assert_equal(engine.model, trained)
    # What was not announced must be sent, and what was announced must be equal
    publisher.source.frozen.pop()
    with pytest.raises(WeightSyncError, match="1 of the engine's tensors would keep their old weights"):
        WeightPublisher(publisher.source, engine).push_weights()
    engine.model.get_parameter(frozen[0]).add_(1)
    with pytest.raises(WeightSyncError, match="the frozen tensor .* has checksum .* in the engine"):
        WeightPublisher(trained, engine).push_weights()


def test_a_trained_tower_is_sent(folder: Path):
    trained, tokenizer = load_model(folder, train_vision=True)
    assert not frozen_towers(trained)
    engine = TransformersEngine(load_model(folder)[0], tokenizer)
    WeightPublisher(changed(trained), engine).push_weights()
    assert_equal(engine.model, trained)


def test_adapters_are_of_the_language_model_unless_the_tower_is_trained(folder: Path, tmp_path: Path):
    pytest.importorskip("peft")
    config = {"r": 2, "target_modules": "all-linear"}
    adapted = add_adapter(load_model(folder)[0], config)
    language = adapted.get_base_model().get_decoder()
    inside = {parameter for parameter in language.parameters() if parameter.requires_grad}
    assert inside and inside == {parameter for parameter in adapted.parameters() if parameter.requires_grad}
    assert frozen_towers(adapted)
    engine = TransformersEngine(load_model(folder)[0])
    WeightPublisher(changed(adapted), engine).push_weights()
    save_merged(adapted, load_model(folder)[1], tmp_path / "merged")
    assert_equal(engine.model, load_model(tmp_path / "merged")[0])
    # With a trained tower, it has adapters, which engines do not load by themselves
    whole = add_adapter(load_model(folder, train_vision=True)[0], config)
    assert not frozen_towers(whole)
    with pytest.raises(ValueError, match="which sees images; use WeightPublisher"):
        LoRAPublisher(whole, engine)
    WeightPublisher(changed(whole), engine).push_weights()
    with pytest.raises(ValueError, match="exclude_modules='x' cannot be combined with a frozen vision tower"):
        add_adapter(load_model(folder)[0], {**config, "exclude_modules": "x"})


def test_a_text_tokenizer_is_saved_alone(tmp_path: Path):
    from torchrl_rloo.embedded import build_tokenizer

    save_tokenizer(build_tokenizer(), tmp_path)
    assert not (tmp_path / "processor_config.json").exists()
