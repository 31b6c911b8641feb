"""Hugging Face files of sharded models: equal to those of one process, byte for byte, and loaded shard by shard.

As a script, this file runs one of two ranks.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from support.fork_server import ForkServer
from support.rank_scripts import EndedRanks, become_rank, run_checks, run_ranks
from torchrl_rloo.embedded import build_model, build_tokenizer
from torchrl_rloo.modules import add_adapter, load_model, load_shards, save_model
from torchrl_rloo.modules.model_files import save_on_all
from torchrl_rloo.runtime.ranks import RankError, Ranks
from torchrl_rloo.training import shard_model

peft = pytest.importorskip("peft")

TOKENIZER = build_tokenizer()
IDS = torch.arange(5, 29)[None]
LORA = {"r": 4, "target_modules": ["q_proj", "down_proj"]}


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def adapted(model: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    return add_adapter(model, LORA)


def check_saving(ranks: Ranks, folder: Path) -> None:
    """Save sharded, replicated and whole models: the same files, in one file or in several."""
    for kind in ("model", "adapter"):

        def build(kind: str = kind) -> nn.Module:
            model = build_model(TOKENIZER, 0)
            return model if kind == "model" else adapted(model)

        wanted = folder / f"{kind}-whole"
        ranks.broadcast(lambda build=build, wanted=wanted: save_model(build(), TOKENIZER, wanted))
        for parallel in ("fsdp", "ddp"):
            model, found = shard_model(build(), ranks, parallel), folder / f"{kind}-{parallel}"
            (folder / f"{kind}-{parallel}").mkdir(exist_ok=True)
            if ranks.is_main:
                (found / "adapter_model.safetensors").write_bytes(b"stale")
            ranks.all_gather(None)
            with torch.no_grad():
                model(input_ids=IDS)  # leaves the root's parameters gathered
            save_model(model, TOKENIZER, found)
            assert files_of(found) == files_of(wanted)
            assert files_of(found).keys() >= {f"{'adapter_' * (kind == 'adapter')}model.safetensors"}
    # Several files with an index
    whole, model = build_model(TOKENIZER, 0), shard_model(build_model(TOKENIZER, 0), ranks, "fsdp")
    ranks.broadcast(lambda: whole.save_pretrained(folder / "parts-whole", max_shard_size="200KB"))
    ranks.broadcast(lambda: (folder / "parts").mkdir())
    save_on_all(model, folder / "parts", lambda: None, max_size="200KB")
    found = files_of(folder / "parts")
    assert found == files_of(folder / "parts-whole") and len(found) > 4
    loaded = AutoModelForCausalLM.from_pretrained(folder / "parts").state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in whole.state_dict().items())


def check_failure(ranks: Ranks, folder: Path) -> None:
    """Raise an error of rank 0 on both, before or between tensors."""
    model = shard_model(build_model(TOKENIZER, 0), ranks, "fsdp")
    ranks.broadcast(lambda: (folder / "file").write_text("mine"))
    with pytest.raises(OSError if ranks.is_main else RankError, match="cannot write|file"):
        save_model(model, TOKENIZER, folder / "file")
    second = sorted(path.name for path in (folder / "parts").glob("*.safetensors"))[1]
    ranks.broadcast(lambda: (folder / "blocked" / second / "mine").mkdir(parents=True))
    with pytest.raises(OSError if ranks.is_main else RankError, match="it is a folder"):
        save_on_all(model, folder / "blocked", lambda: None, max_size="200KB")


def assert_same_model(found: nn.Module, wanted: nn.Module) -> None:
    for kind in ("named_parameters", "named_buffers"):
        pairs = zip(getattr(found, kind)(), getattr(wanted, kind)(), strict=True)
        for (name, tensor), (other, expected) in pairs:
            assert name == other and type(tensor) is type(expected)
            assert (tensor.dtype, tensor.requires_grad) == (expected.dtype, expected.requires_grad)
            if hasattr(tensor, "full_tensor"):
                assert tensor.placements == expected.placements
                tensor, expected = tensor.to_local(), expected.to_local()
            assert torch.equal(tensor, expected), name
    with torch.no_grad():
        assert torch.equal(found(input_ids=IDS).logits, wanted(input_ids=IDS).logits)
    assert found.training == wanted.training
    for model in (found, wanted):
        model(input_ids=IDS, labels=IDS).loss.backward()
    pairs = zip(found.parameters(), wanted.parameters(), strict=True)
    assert all((a.grad is None) == (b.grad is None) for a, b in pairs)


def check_loading(ranks: Ranks, folder: Path) -> None:
    """Read shards that are equal to those of a model that was loaded whole."""
    for dtype in ("float32", "bfloat16"):
        for name in (folder / "parts", folder / "model-fsdp"):
            if name.name == "parts":
                ranks.broadcast(lambda name=name: TOKENIZER.save_pretrained(name) and None)
            for parallel in ("fsdp", "none"):
                for with_adapter in (False, True):
                    models = []
                    for meta in (False, True):
                        model, _ = load_model(name, dtype=dtype, meta=meta)
                        assert model.lm_head.weight.is_meta == meta
                        model = adapted(model) if with_adapter else model
                        model = shard_model(model, ranks, parallel) if parallel == "fsdp" else model
                        if meta:
                            load_shards(model, name)
                        models.append(model)
                    assert models[1].generation_config == models[0].generation_config
                    assert_same_model(models[1], models[0])
                    base = models[1].get_base_model() if with_adapter else models[1]
                    assert base.lm_head.weight is base.model.embed_tokens.weight


def check_refusals(ranks: Ranks, folder: Path) -> None:
    """Name files of another model, and buffers that nothing can compute."""
    if not ranks.is_main:
        return
    other = folder / "other"
    save_model(build_model(TOKENIZER, 0), TOKENIZER, other)
    tensors = load_file(other / "model.safetensors")
    model, _ = load_model(other, meta=True)
    changes = {
        r"no tensors \['model.norm.weight'\]": lambda t: t.pop("model.norm.weight"),
        "other shapes of .*norm": lambda t: t.update({"model.norm.weight": torch.ones(3)}),
    }
    for reason, change in changes.items():
        changed = dict(tensors)
        change(changed)
        save_file(changed, other / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=reason):
            load_shards(model, other)
    (other / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has no \*.safetensors files"):
        load_shards(model, other)
    model.model.register_buffer("mask", torch.ones(3, device="meta"), persistent=False)
    with pytest.raises(ValueError, match=r"Qwen2Model cannot compute its buffer model.mask"):
        load_shards(model, folder / "model-fsdp")


CHECKS = (check_saving, check_failure, check_loading, check_refusals)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer) -> EndedRanks:
    return run_ranks(fork_server, __file__, tmp_path_factory.mktemp("ranks"), 2)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_two_ranks(ran: EndedRanks, check):
    ran.assert_passed(check)


if __name__ == "__main__":
    become_rank(lambda ranks, folder: run_checks(CHECKS, folder, ranks, folder))
