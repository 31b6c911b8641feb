"""WeightPublisher with vLLM: engines sample with the training model's weights, for all transports and kinds of models.

Run as a script this file is one of two ranks: ``test_vllm_publisher.py RANK FOLDER``.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from support.checkpoints import save_checkpoint
from support.engines import GROUP
from support.weights import push
from torchrl_rloo.embedded import build_model, build_tokenizer
from torchrl_rloo.engines.base import Engine, Request
from torchrl_rloo.engines.scripted import ScriptedEngine
from torchrl_rloo.engines.vllm_async import AsyncVLLMEngine
from torchrl_rloo.runtime.ranks import Ranks
from torchrl_rloo.training.shard import shard_model
from torchrl_rloo.weight_update import WeightSyncError
from torchrl_rloo.weight_update.files import Files
from torchrl_rloo.weight_update.shared_memory import SharedMemory
from torchrl_rloo.weight_update.source import WeightSource
from torchrl_rloo.weight_update.transport import Direct, Transport
from torchrl_rloo.weight_update.weight_publisher import WeightPublisher

pytestmark = pytest.mark.xdist_group(GROUP)

BUCKET = 100_000  # bytes: the tiny models go in several
SIZES = {
    "vocab_size": 384,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


@pytest.fixture(scope="module")
def make_trained(tokenizer) -> Callable[[str], nn.Module]:
    """Build a tiny model of a kind that vLLM loads in a special way: ``make_trained(kind)``."""

    def make(kind: str) -> nn.Module:
        torch.manual_seed(0)
        if kind == "tied":
            return build_model(tokenizer, seed=0).eval()
        if kind == "llama":
            return LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=96, tie_word_embeddings=False)).eval()
        sizes = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 32}
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **sizes, intermediate_size=96, norm_topk_prob=True)).eval()

    return make


@pytest.fixture
def own_process(async_engine: Engine) -> Engine:
    """Engine of the embedded model in a separate process."""
    return async_engine


@pytest.fixture
def make_transport(tmp_path) -> Callable[[str], Transport]:
    def make(name: str) -> Transport:
        return {"shared_memory": SharedMemory, "files": lambda: Files(tmp_path)}[name]()

    return make


def per_expert(name: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
    """Yield the checkpoint's names: transformers keeps the experts of a layer in one tensor."""
    prefix, fused, kind = name.partition("experts.")
    if not fused:
        yield name, tensor
    elif kind == "down_proj":
        yield from ((f"{prefix}experts.{i}.down_proj.weight", t) for i, t in enumerate(tensor))
    else:
        for i, t in enumerate(tensor):
            gate, up = t.chunk(2)
            yield f"{prefix}experts.{i}.gate_proj.weight", gate
            yield f"{prefix}experts.{i}.up_proj.weight", up


@pytest.mark.parametrize("staged", [True, False], ids=["staged", "streamed"])
@pytest.mark.parametrize("name", ["shared_memory", "files"])
def test_updates_of_another_process(
    name, staged, own_process, make_transport, make_trained, change, log_prob_error, assert_greedy_tokens_equal
):
    trained = make_trained("tied")
    updater = WeightPublisher(
        trained, own_process, transport=make_transport(name), bucket_bytes=BUCKET, staged=staged, timeout=120
    )
    for version in range(1, 4):
        change(trained, version)
        assert log_prob_error(own_process, trained) > 0.1
        push(updater, version)
        assert own_process.version == version
        assert log_prob_error(own_process, trained) < 1e-5
    assert_greedy_tokens_equal(own_process, trained)
    updater.close()


@pytest.mark.parametrize("kind", ["llama", "moe"])
def test_updates_by_reference(kind, make_vllm_engine, make_trained, change, log_prob_error, assert_greedy_tokens_equal):
    trained = make_trained(kind)
    engine = make_vllm_engine(trained)
    converts = [None, per_expert] if kind == "moe" else [None]
    version = 0
    for convert in converts:
        source = WeightSource(trained, convert=convert)
        for staged in (True, False):
            updater = WeightPublisher(
                source, engine, transport=Direct(), bucket_bytes=BUCKET, staged=staged, timeout=120
            )
            for _ in range(2):
                version += 1
                change(trained, version)
                assert log_prob_error(engine, trained) > 0.1
                push(updater, version)
                assert log_prob_error(engine, trained) < 1e-5
            assert updater.last_push.buckets > 1
    assert_greedy_tokens_equal(engine, trained)
    assert (worker_of(engine).weight_transfer_engine.plan is None) == (kind == "moe")  # vLLM itself loads experts


def worker_of(engine: Engine):
    """Return vLLM's worker of an engine in this process."""
    return engine.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker


def weights_of(engine: Engine) -> dict[str, torch.Tensor]:
    """Return a copy of vLLM's weights."""
    model = worker_of(engine).model_runner.model
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_an_engine_in_bfloat16_is_as_if_started_with_the_new_weights(make_vllm_engine, make_trained, change):
    """Weights are bit-identical whether the engine or the source casts; a kernel may round by memory address."""
    first, other = make_trained("tied"), make_trained("tied")
    change(other, 1)
    requests = [Request(prompt=range(5, 50), limit=12, seed=seed) for seed in range(3)]
    engine = make_vllm_engine(first, dtype="bfloat16")
    weights, samples = weights_of(engine), engine.generate(requests)
    for version, dtype in ((1, None), (3, torch.bfloat16)):
        for trained, number in ((other, version), (first, version + 1)):
            source = WeightSource(trained, dtype=dtype)
            push(WeightPublisher(source, engine, transport=Direct(), bucket_bytes=BUCKET), number)
            found = weights_of(engine)
            same = [torch.equal(found[name], tensor) for name, tensor in weights.items()]
            assert all(same) == (trained is first)
        for old, new in zip(samples, engine.generate(requests), strict=True):
            difference = torch.tensor(old.log_probs) - torch.tensor(new.log_probs)
            assert old.tokens != new.tokens or difference.abs().max() < 0.03


def test_nothing_cached_of_old_weights_is_used(vllm_engine, make_trained, change, log_prob_error, monkeypatch):
    trained = make_trained("tied")
    engine = vllm_engine
    updater = WeightPublisher(trained, engine)
    assert isinstance(updater.transport, Direct)
    assert log_prob_error(engine, trained) < 1e-5  # its prompt fills two blocks of the cache
    change(trained, 1)
    push(updater, 1)
    assert log_prob_error(engine, trained) < 1e-5
    monkeypatch.setattr(engine.llm, "reset_prefix_cache", lambda **_: True)
    change(trained, 2)
    push(updater, 2)
    assert log_prob_error(engine, trained) > 0.01  # so the check above would fail with stale weights


@pytest.fixture
def watched() -> Iterator[ScriptedEngine]:
    with ScriptedEngine([]) as engine:
        yield engine


def steps(engine: ScriptedEngine) -> list[str]:
    """Return the steps of the updates since the last call."""
    found = [record.step for record in engine.updates]
    engine.updates.clear()
    return found


UPDATE = ["start", "bucket", "bucket", "finish"]
FIRST = ["abort", "connect", *UPDATE]


def test_it_connects_once_and_anew_for_another_engine_or_other_tensors(watched):
    source = WeightSource(nn.Linear(100, 100))
    updater = WeightPublisher(source, watched, bucket_bytes=40_000)
    push(updater, 1)
    assert steps(watched) == FIRST
    push(updater, 2)
    assert steps(watched) == UPDATE
    watched.restart()
    push(updater, 3)
    assert steps(watched) == FIRST
    updater.source = WeightSource(nn.Linear(100, 100), dtype=torch.float64)
    updater.bucket_bytes = 80_000
    push(updater, 4)
    assert steps(watched) == FIRST
    updater.close()
    push(updater, 5)
    assert steps(watched) == FIRST


def test_figures_of_the_last_push(watched):
    updater = WeightPublisher(nn.Linear(100, 100), watched, bucket_bytes=40_000)
    assert updater.last_push is None
    updater.push_weights()
    found = updater.last_push
    assert found[0] == found.version == 1 and found.buckets == 2 and found.bytes == 4 * (100 * 100 + 100)
    assert found.bytes_per_second == found.bytes / found.seconds > 0 and 0 < found.still_seconds[0] < found.seconds


def test_auto_is_by_reference_only_within_one_process(watched):
    class Elsewhere(ScriptedEngine):
        in_process = False

    with Elsewhere([]) as elsewhere:
        assert isinstance(WeightPublisher(nn.Linear(2, 2), watched).transport, Direct)
        assert isinstance(WeightPublisher(nn.Linear(2, 2), [watched, elsewhere]).transport, SharedMemory)
        with pytest.raises(ValueError, match="Direct.*Elsewhere"):
            WeightPublisher(nn.Linear(2, 2), [watched, elsewhere], transport=Direct())


def run_rank(rank: int, folder: Path) -> None:
    """Run one of two ranks of a sharded model, with vLLM in a child process of rank 0."""
    ranks = Ranks.from_environment()
    trained, expected = build_model(build_tokenizer(), seed=0), build_model(build_tokenizer(), seed=0)
    shard_model(trained, ranks, "fsdp")
    ids = torch.arange(5, 29)[None]
    with ExitStack() as stack:
        engines = []
        if rank == 0:
            settings = {"dtype": "float32", "max_model_len": 256, "request_timeout": 300.0}
            engines = [stack.enter_context(AsyncVLLMEngine(folder / "checkpoint", **settings))]
        # Each transport: shared files that both ranks write, and a gather to rank 0
        version = 0
        for transport in (SharedMemory(), Files(folder / "files")):
            updater = WeightPublisher(trained, engines, transport=transport, bucket_bytes=BUCKET)
            updater.resume_from(version)
            for _ in range(2):
                version += 1
                for model in (trained, expected):
                    model(input_ids=ids, labels=ids).loss.backward()
                    torch.optim.SGD(model.parameters(), lr=1.0).step()
                    model.zero_grad()
                assert updater.push_weights() == version if rank == 0 else updater.join() == version
                for engine in engines:
                    (sample,) = engine.generate([Request(prompt=ids[0].tolist(), limit=12, seed=version)])
                    with torch.no_grad():
                        logits = expected(torch.tensor([[*ids[0].tolist(), *sample.tokens]])).logits
                    scores = logits[0, ids.shape[1] - 1 : -1].log_softmax(-1)
                    found = scores.gather(-1, torch.tensor(sample.tokens)[:, None])[:, 0]
                    torch.testing.assert_close(found, torch.tensor(sample.log_probs), rtol=0, atol=1e-5)
                    assert set(sample.versions) == {version}
            updater.close()
        # A dead engine is an error on both ranks, which stay in step
        for engine in engines:
            engine.close()
        with pytest.raises(WeightSyncError, match="is closed" if rank == 0 else "rank 0 could not send.*is closed"):
            updater.push_weights()
        total = torch.ones(())
        torch.distributed.all_reduce(total)
        assert total == 2
        updater.close()  # os._exit would leave its file
    (folder / f"passed-{rank}").touch()


def test_vllm_follows_a_model_that_two_ranks_train(vllm, tmp_path, fork_server, tokenizer):
    save_checkpoint(tmp_path / "checkpoint", build_model(tokenizer, seed=0), tokenizer)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": "2"}
    environment = os.environ | place | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ranks = [
        fork_server.start(
            Path(__file__),
            [str(rank), str(tmp_path)],
            environment=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    try:
        codes = [rank.wait(300) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert codes == [0, 0], [rank.stderr for rank in ranks]
    assert [(tmp_path / f"passed-{rank}").exists() for rank in range(2)] == [True, True]


if __name__ == "__main__":
    run_rank(int(sys.argv[1]), Path(sys.argv[2]))
    os._exit(0)  # at a normal exit a gloo thread of the sharded model may abort the process
