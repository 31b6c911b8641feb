"""Models sharded over two ranks with ``fully_shard``: both gather, and rank 0 sends the whole model.

As a script, this file runs one rank.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard

from support.fork_server import ForkServer
from support.rank_scripts import EndedRanks, become_rank, run_checks, run_ranks
from support.weights import push
from torchrl_rloo.embedded import build_model, build_tokenizer
from torchrl_rloo.engines.base import Engine, EngineError, Request
from torchrl_rloo.engines.transformers_engine import TransformersEngine
from torchrl_rloo.weight_update import WeightSyncError
from torchrl_rloo.weight_update.lora import LoRAPublisher
from torchrl_rloo.weight_update.source import WeightSource
from torchrl_rloo.weight_update.weight_publisher import WeightPublisher

peft = pytest.importorskip("peft")

TOKENIZER = build_tokenizer()
IDS = torch.arange(5, 29)[None]


def sharded(model: nn.Module, **settings) -> nn.Module:
    """Shard a model in place: each layer, and the rest at the root."""
    mesh = init_device_mesh("cpu", (2,))
    decoder = model.get_base_model().model if isinstance(model, peft.PeftModel) else model.model
    for layer in decoder.layers:
        fully_shard(layer, mesh=mesh, **settings)
    fully_shard(model, mesh=mesh, **settings)
    assert isinstance(model, FSDPModule) and all(hasattr(p, "full_tensor") for p in model.parameters())
    return model


def sent(source: WeightSource) -> dict[str, torch.Tensor]:
    names = [info.name for info in source.manifest()]
    middle = len(names) // 2
    tensors = source.tensors(0, middle) + source.tensors(middle, len(names))
    assert not any(hasattr(t, "full_tensor") or t.requires_grad for t in tensors)
    return dict(zip(names, tensors, strict=True))


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float = 0.0) -> None:
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def train(model: nn.Module) -> None:
    """Train one step, and run a forward pass, which leaves the root's parameters gathered."""
    model(input_ids=IDS, labels=IDS).loss.backward()
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5).step()
    model.zero_grad()
    with torch.no_grad():
        model(input_ids=IDS)


def check_tensors(rank: int, folder: Path) -> None:
    whole, model = build_model(TOKENIZER, 0), sharded(build_model(TOKENIZER, 0))
    source, first = WeightSource(model), sent(WeightSource(whole))
    first = {n: t.clone() for n, t in first.items()}
    assert source.sends == (rank == 0) and source.manifest() == WeightSource(whole).manifest()
    assert_same(sent(source), first)
    for m in (whole, model):
        train(m)
    assert not all(hasattr(p, "full_tensor") for p in model.parameters())
    found = sent(source)
    assert_same(found, sent(WeightSource(whole)), tolerance=1e-6)
    assert all(not torch.equal(found[n], first[n]) for n in found)
    halved = sent(WeightSource(model, dtype=torch.bfloat16))
    assert_same(halved, {n: t.bfloat16() for n, t in found.items()})
    train(model)  # training continues


def check_master_weights(rank: int, folder: Path) -> None:
    """Check that the trained weights are sent, not the rounded ones that a forward pass leaves gathered."""
    whole = build_model(TOKENIZER, 0)
    model = sharded(build_model(TOKENIZER, 0), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    source = WeightSource(model)
    with torch.no_grad():
        model(input_ids=IDS)
    assert model.model.embed_tokens.weight.dtype is torch.bfloat16
    assert_same(sent(source), sent(WeightSource(whole)))
    with torch.no_grad():
        model(input_ids=IDS)
    assert_same(sent(WeightSource(model)), sent(WeightSource(whole)))


def adapted() -> nn.Module:
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "o_proj", "up_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(build_model(TOKENIZER, 0), config)
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        if p.requires_grad:
            p.data = 0.1 * torch.randn(p.shape, generator=generator)
    return model


def check_adapter(rank: int, folder: Path) -> None:
    whole, model = adapted(), sharded(adapted())
    for m in (whole, model):
        train(m)
    assert_same(sent(WeightSource(model)), sent(WeightSource(whole)), tolerance=1e-6)

    class Reading(TransformersEngine):
        def update_weights(self, step, info=None, *, timeout):
            if info["version"] == 1:
                raise EngineError("not now")
            self.adapter = load_file(Path(info["path"]) / "adapter_model.safetensors")
            return [{"version": info["version"], "checksums": [info["checksum"]]}]

    engines = [Reading(build_model(TOKENIZER, 0))] if rank == 0 else []
    updater = LoRAPublisher(model, engines, directory=folder)
    with pytest.raises(WeightSyncError, match="not now"):
        push(updater, 1)
    push(updater, 2)
    if rank == 0:
        wanted = peft.get_peft_model_state_dict(whole, save_embedding_layers=False)
        assert_same(engines[0].adapter, dict(sorted(wanted.items())), tolerance=1e-6)


def check_push(rank: int, folder: Path) -> None:
    """Push to an engine of rank 0, with an error on both ranks and one on neither."""

    class Failing(TransformersEngine):
        fails = True

        def update_weights(self, step, info=None, *, timeout):
            if step == "finish" and self.fails:
                raise EngineError("not now")
            return super().update_weights(step, info, timeout=timeout)

    model = sharded(build_model(TOKENIZER, 1))
    engines: list[Engine] = [Failing(build_model(TOKENIZER, 0).eval())] if rank == 0 else []
    updater = WeightPublisher(model, engines, bucket_bytes=30_000)
    for version in (1, 2):
        train(model)
        for engine in engines:
            engine.fails = version == 1
        if version == 1:
            with pytest.raises(WeightSyncError, match="not now"):
                push(updater, version)
        else:
            push(updater, version)
    whole = copy.deepcopy(build_model(TOKENIZER, 1))
    whole.load_state_dict(
        sent(WeightSource(model)) | {"lm_head.weight": sent(WeightSource(model))["model.embed_tokens.weight"]}
    )
    for engine in engines:
        assert engine.version == 2
        (sample,) = engine.generate([Request(prompt=IDS[0].tolist(), limit=8, seed=0)])
        ids = torch.tensor([[*IDS[0].tolist(), *sample.tokens]])
        with torch.no_grad():
            scores = whole(input_ids=ids).logits[0, -9:-1].log_softmax(-1).gather(-1, ids[0, -8:, None])[:, 0]
        torch.testing.assert_close(scores, torch.tensor(sample.log_probs), rtol=0, atol=1e-5)


def check_refusal(rank: int, folder: Path) -> None:
    model = FullyShardedDataParallel(build_model(TOKENIZER, 0), device_id=torch.device("cpu"))
    with pytest.raises(ValueError, match="the model is in FullyShardedDataParallel; shard it with fully_shard"):
        WeightSource(model)


CHECKS = (check_tensors, check_master_weights, check_adapter, check_push, check_refusal)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer) -> EndedRanks:
    return run_ranks(fork_server, __file__, tmp_path_factory.mktemp("ranks"), 2)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_two_ranks(ran: EndedRanks, check):
    ran.assert_passed(check)


if __name__ == "__main__":
    become_rank(lambda ranks, folder: run_checks(CHECKS, folder, ranks.rank, folder))
