from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from time import sleep

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from support.engines import GROUP
from support.weights import push
from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import stack_rows
from torchrl_rloo.embedded import build_model, build_tokenizer
from torchrl_rloo.engines.base import Engine, Request
from torchrl_rloo.engines.transformers_engine import TransformersEngine
from torchrl_rloo.modules.policies import TransformersWrapper
from torchrl_rloo.modules.reference import AdapterReference
from torchrl_rloo.weight_update import WeightSyncError
from torchrl_rloo.weight_update.lora import LoRAPublisher
from torchrl_rloo.weight_update.publisher import Publisher
from torchrl_rloo.weight_update.weight_publisher import WeightPublisher

pytestmark = pytest.mark.xdist_group(GROUP)

peft = pytest.importorskip("peft")

TOKENIZER = build_tokenizer()
REQUESTS = [Request(prompt=tuple(range(5, 85)), limit=12, seed=seed) for seed in range(3)]
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SETTINGS = {
    "attention": {"target_modules": LINEAR[:4]},
    "rank_stabilised": {"target_modules": LINEAR, "use_rslora": True},
    "patterns": {"target_modules": LINEAR, "rank_pattern": {"q_proj": 8}, "alpha_pattern": {"up_proj": 3}},
}


def adapted(name: str = "attention", seed: int = 0, **settings) -> nn.Module:
    config = {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"} | SETTINGS[name] | settings
    return randomize(peft.get_peft_model(build_model(TOKENIZER, 0), peft.LoraConfig(**config)).eval(), seed)


def randomize(model: nn.Module, seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        if p.requires_grad:
            p.data = 0.12 * torch.randn(p.shape, generator=generator)
    return model


def rows_of(samples: list) -> TensorDict:
    rows = []
    for request, sample in zip(REQUESTS, samples, strict=True):
        tokens = torch.tensor([*request.prompt, *sample.tokens])
        rows.append(TensorDict({keys.TOKENS: tokens, keys.ACTION_MASK: torch.arange(len(tokens)) >= 80}, []))
    return stack_rows(rows)


@pytest.fixture
def base_engine(vllm_engine: Engine) -> Engine:
    """Engine with the base model's weights and no adapter."""
    return vllm_engine


def spoil_next(engine: Engine, spoil: Callable[[dict], list[dict] | None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Call ``spoil`` with the message of the engine's next adapter update, and report its result if it has one."""
    update = engine.update_weights

    def spoilt(step, info=None, *, timeout):
        monkeypatch.undo()
        reports = spoil(info)
        return update(step, info, timeout=timeout) if reports is None else reports

    monkeypatch.setattr(engine, "update_weights", spoilt)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_engine_follows_the_adapter_and_the_reference_is_the_base(
    base_engine: Engine, log_prob_error: Callable[..., float], tmp_path: Path, name: str
):
    engine, base = base_engine, build_model(TOKENIZER, 0).eval()
    model = adapted(name)
    policy = TransformersWrapper(model, tokenizer=TOKENIZER)
    reference = AdapterReference(policy)
    base_scorer = TransformersWrapper(base, tokenizer=TOKENIZER, generate=False)
    updater = LoRAPublisher(model, engine, directory=tmp_path / "adapters")
    assert log_prob_error(engine, base) < 1e-5 and log_prob_error(engine, model) > 0.1
    without = engine.generate(REQUESTS)
    rows = rows_of(without)
    for step in range(3):
        randomize(model, seed=step + 1)
        assert log_prob_error(engine, model) > 0.1
        push(updater, engine.version + 1)
        assert log_prob_error(engine, model) < 1e-5
        assert [p.name for p in (tmp_path / "adapters").glob("*/*")] == [f"version-{engine.version}-push-{step + 1}"]
        of_reference = reference.score(rows).log_probs
        assert torch.equal(of_reference, base_scorer.score(rows).log_probs)
        of_engine = torch.stack([torch.tensor(sample.log_probs) for sample in without])
        torch.testing.assert_close(of_reference, of_engine, rtol=0, atol=1e-5)
    updater.close()
    assert list((tmp_path / "adapters").iterdir()) == []
    assert log_prob_error(engine, model) < 1e-5


def test_nothing_of_the_training_model_changes(base_engine: Engine):
    model = adapted().train()
    ids = torch.arange(12)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    before = copy.deepcopy(model)
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    config = copy.deepcopy(model.peft_config)
    push(LoRAPublisher(model, base_engine), base_engine.version + 1)
    for (n, p), q, gradient in zip(model.named_parameters(), before.parameters(), gradients, strict=True):
        same = torch.equal(p, q) and p.requires_grad == q.requires_grad
        assert same and (p.grad is gradient is None or torch.equal(p.grad, gradient)), n
    assert [m.training for m in model.modules()] == [m.training for m in before.modules()]
    assert model.peft_config == config
    assert torch.equal(model.eval()(input_ids=ids).logits, before.eval()(input_ids=ids).logits)


def test_merged_weights_sample_as_the_adapter_does(base_engine: Engine):
    model = adapted("patterns", seed=3)
    updater = LoRAPublisher(model, base_engine)
    push(updater, base_engine.version + 1)
    of_adapter = base_engine.generate(REQUESTS)
    push(WeightPublisher(model, base_engine), base_engine.version + 1)
    of_merged = base_engine.generate(REQUESTS)
    for a, b in zip(of_adapter, of_merged, strict=True):
        assert a.tokens == b.tokens and set(b.versions) == {a.versions[0] + 1}
        torch.testing.assert_close(torch.tensor(a.log_probs), torch.tensor(b.log_probs), rtol=0, atol=1e-5)


def test_no_request_continues_with_an_adapter_that_it_was_not_started_with(
    async_engine: Engine, log_prob_error: Callable[..., float]
):
    engine, model = async_engine, adapted()
    to_adapter = LoRAPublisher(model, engine, in_flight="continue")
    to_weights = WeightPublisher(model, engine, in_flight="continue")

    def ends_of(publisher: Publisher) -> set[tuple]:
        """Push while requests run, and return how they ended and with which versions."""
        futures = [engine.submit(Request([5, 6, 7, 8 + seed], 1000, seed)) for seed in range(4)]
        sleep(0.1)
        publisher.version = engine.version
        publisher.push_weights()
        samples = [future.result(300) for future in futures]
        assert log_prob_error(engine, model) < 1e-5
        return {(sample.finish, *sorted(set(sample.versions))) for sample in samples}

    assert ends_of(to_adapter) <= {("abort", 0), ("abort",)}, "they have no adapter"
    assert ends_of(to_adapter) <= {("length", 1, 2), ("length", 2)}, "the adapter is replaced in place"
    assert ends_of(to_weights) <= {("abort", 2), ("abort",)}, "loading weights drops the adapter"
    assert ends_of(to_weights) <= {("length", 3, 4), ("length", 4)}


def corrupt(info: dict) -> None:
    file = Path(info["path"]) / "adapter_model.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


def truncate(info: dict) -> None:
    file = Path(info["path"]) / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (corrupt, "corrupt: its checksum is"),
        (truncate, "check_adapter failed"),
        (lambda info: [], r"its workers report .*\[\], not"),
        (lambda info: [{"version": info["version"] - 1, "checksums": [info["checksum"]]}], "its workers report"),
    ],
    ids=["corrupt", "truncated", "silent", "older"],
)
def test_a_failed_update_leaves_the_old_adapter_and_another_one_succeeds(
    base_engine: Engine,
    log_prob_error: Callable[..., float],
    tmp_path: Path,
    spoil: Callable,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
):
    model = adapted()
    updater = LoRAPublisher(model, base_engine, directory=tmp_path)
    version = base_engine.version + 1
    push(updater, version)
    old = copy.deepcopy(model)
    randomize(model, seed=5)
    spoil_next(base_engine, spoil, monkeypatch)
    with pytest.raises(WeightSyncError, match=rf"version {version + 1} .*engine 0 \(VLLMEngine\).*{reason}"):
        updater.push_weights()
    assert base_engine.version == version and updater.version == version + 1
    assert log_prob_error(base_engine, old) < 1e-5
    assert updater.push_weights() == version + 2 == base_engine.version and log_prob_error(base_engine, model) < 1e-5
    assert len(list(tmp_path.glob("*/*"))) == 1


def test_one_of_several_engines_fails(base_engine: Engine, log_prob_error: Callable[..., float]):
    model, version = adapted(), base_engine.version + 1
    other = TransformersEngine(build_model(TOKENIZER, 0).eval(), TOKENIZER, request_timeout=60)
    updater = LoRAPublisher(model, [base_engine, other])
    with pytest.raises(WeightSyncError, match=r"engine 1 \(TransformersEngine\).*cannot load adapters"):
        push(updater, version)
    assert log_prob_error(other, build_model(TOKENIZER, 0)) < 1e-5  # not left paused
    push(LoRAPublisher(model, [base_engine, base_engine]), version)
    assert log_prob_error(base_engine, model) < 1e-5


def test_an_engine_without_adapters_says_so(base_engine: Engine):
    model = adapted(r=16)
    with pytest.raises(WeightSyncError, match=r"version 9.*rank"):
        push(LoRAPublisher(model, base_engine), 9)


def test_files_go_with_the_updater(tmp_path: Path):
    class Deaf(TransformersEngine):
        def update_weights(self, step, info=None, *, timeout):
            assert (Path(info["path"]) / "adapter_config.json").is_file()
            return [{"version": info["version"], "checksums": [info["checksum"]]}]

    updater = LoRAPublisher(adapted(), Deaf(build_model(TOKENIZER, 0)), directory=tmp_path)
    updater.push_weights()
    updater.push_weights()
    assert [p.name for p in tmp_path.glob("*/*")] == ["version-2-push-2"]
    del updater
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_written_is_an_error(tmp_path: Path):
    (tmp_path / "file").write_text("")
    updater = LoRAPublisher(adapted(), TransformersEngine(build_model(TOKENIZER, 0)), directory=tmp_path / "file")
    with pytest.raises(WeightSyncError, match="version 1 .*could not be written"):
        updater.push_weights()


def with_unfrozen_norm() -> nn.Module:
    model = adapted()
    model.base_model.model.model.norm.weight.requires_grad_(True)
    return model


def with_two_active() -> nn.Module:
    model = adapted()
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    model.base_model.set_adapter(["default", "second"])
    return model


@pytest.mark.parametrize(
    ("make", "error", "reason"),
    [
        (lambda: build_model(TOKENIZER, 0), TypeError, "Qwen2ForCausalLM, but must be a peft PeftModel"),
        (lambda: adapted(use_dora=True), ValueError, "use_dora"),
        (lambda: adapted(modules_to_save=["norm"]), ValueError, "modules_to_save"),
        (lambda: adapted(target_modules=["q_proj"], lora_bias=True), ValueError, "lora_bias"),
        (lambda: adapted(init_lora_weights="pissa"), ValueError, "'pissa', which also changes the base weights"),
        (with_unfrozen_norm, ValueError, "norm.weight is trained but is not part of the adapter"),
        (with_two_active, ValueError, r"one active adapter, got \['default', 'second'\]"),
    ],
    ids=["base", "dora", "modules_to_save", "lora_bias", "pissa", "unfrozen", "two"],
)
@pytest.mark.filterwarnings("ignore")
def test_what_engines_cannot_add_is_refused(make: Callable[[], nn.Module], error: type[Exception], reason: str):
    with pytest.raises(error, match=reason):
        LoRAPublisher(make(), TransformersEngine(build_model(TOKENIZER, 0)))


def test_arguments_out_of_range_are_refused():
    engine = TransformersEngine(build_model(TOKENIZER, 0))
    for arguments, reason in [({"timeout": 0}, "timeout=0"), ({"in_flight": "drop"}, "in_flight='drop'")]:
        with pytest.raises(ValueError, match=reason):
            LoRAPublisher(adapted(), engine, **arguments)
    with pytest.raises(ValueError, match=r"engines=\[\] must"):
        LoRAPublisher(adapted(), [])
    assert LoRAPublisher(torch.compile(adapted()), engine).adapter == "default"
