from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import keys, load_prompts
from torchrl_rloo.embedded import addition_prompts, build_model
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.modules import TransformersWrapper
from torchrl_rloo.rewards import boxed_accuracy
from torchrl_rloo.weight_update import InProcessWeightUpdater, WeightUpdater


def make_module(seed: int, width: int = 4) -> nn.Module:
    """Make a module with parameters and with float and integer buffers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = nn.Sequential(nn.Linear(width, 3), nn.BatchNorm1d(3), nn.Linear(3, 2, bias=False))
    module[1].num_batches_tracked.fill_(seed)
    module[1].running_mean.fill_(0.5 * seed)
    return module


def assert_equal_weights(a: nn.Module, b: nn.Module) -> None:
    for (name, x), y in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        assert torch.equal(x.to(y.dtype), y), name


def test_current_parameters_and_buffers_are_copied_into_the_samplers_memory():
    source, target = make_module(1), make_module(2).requires_grad_(False)
    source(torch.randn(5, 4)).sum().backward()
    places = [p.data_ptr() for p in target.parameters()]
    updater = InProcessWeightUpdater(source, target)
    for step in range(3):
        with torch.no_grad():
            for p in source.parameters():
                p.add_(step)
        pushed = copy.deepcopy(source)
        assert updater.push_weights() == updater.current_version == step + 1
        assert_equal_weights(source, target)
        with torch.no_grad():
            source[0].weight.zero_()
        assert_equal_weights(pushed, target)
    assert [p.data_ptr() for p in target.parameters()] == places
    assert target[1].num_batches_tracked.item() == 2 and target[1].running_mean[0] == source[1].running_mean[0]
    assert all(p.grad is not None for p in source.parameters())
    assert not any(p.requires_grad or p.grad is not None for p in target.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_weights_are_cast_to_the_samplers_dtype(dtype):
    source, target = make_module(1), make_module(2).to(dtype)
    InProcessWeightUpdater(source, target).push_weights()
    assert {p.dtype for p in target.parameters()} == {dtype}
    assert target[1].num_batches_tracked.dtype == torch.int64
    assert_equal_weights(source, target)


def test_one_module_for_both_is_left_as_it_is():
    module = make_module(1)
    before = copy.deepcopy(module)
    versions = [p._version for p in module.parameters()]
    InProcessWeightUpdater(module, module).push_weights()
    assert_equal_weights(module, before)
    assert [p._version for p in module.parameters()] == versions


def test_tied_weights_stay_tied(tokenizer):
    source, target = build_model(tokenizer, seed=0), build_model(tokenizer, seed=1)
    InProcessWeightUpdater(source, target).push_weights()
    assert_equal_weights(source, target)
    assert target.lm_head.weight is target.model.embed_tokens.weight
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        assert torch.equal(source.eval()(ids).logits, target.eval()(ids).logits)


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (make_module(0), make_module(0, width=5), r"'0.weight'.*\[3, 4\].*\[3, 5\]"),
        (make_module(0), nn.Sequential(nn.Linear(4, 3)), "1.bias"),
        (nn.Linear(2, 2, bias=False), nn.Linear(2, 2), "bias"),
        (nn.Linear(2, 2), nn.Linear(2, 2, bias=False), "bias"),
        (nn.Linear(1, 1), nn.Linear(3, 1), "weight"),  # could be broadcast, and must not be
    ],
)
def test_modules_that_differ_are_refused(source, target, message):
    with pytest.raises(ValueError, match=message):
        InProcessWeightUpdater(source, target)


class FailingUpdater(WeightUpdater):
    """Updater that fails while ``fails`` is set, and records the requested versions."""

    def __init__(self):
        self.fails, self.versions = True, []

    def _send(self, version: int) -> None:
        self.versions.append(version)
        if self.fails:
            raise RuntimeError("the sampler did not answer")


@pytest.fixture
def make_collector(tokenizer):
    model = build_model(tokenizer, seed=0).eval()
    dataset = load_prompts(addition_prompts("train", size=4))

    def make(updater: WeightUpdater | None = None) -> LLMCollector:
        env = DatasetChatEnv(dataset, tokenizer, prompts_per_batch=1, num_generations=2, rewards=boxed_accuracy)
        policy = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 2, "seed": 0})
        return LLMCollector(env, policy, weight_updater=updater)

    return make


def test_a_failed_push_spends_its_version(make_collector):
    updater = FailingUpdater()
    collector = make_collector(updater)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="did not answer"):
            collector.update_policy_weights_()
        assert collector.policy_version == 0
    updater.fails = False
    collector.update_policy_weights_()
    collector.update_policy_weights_()
    assert collector.policy_version == 4
    assert updater.versions == [1, 2, 3, 4]


def test_a_resumed_updater_continues_the_numbering_and_leaves_the_restored_sampler():
    source, target = make_module(1), make_module(2)
    updater = InProcessWeightUpdater(source, target)
    updater.resume_from(7)
    assert updater.version == updater.current_version == 7
    updater.initialize()
    assert not torch.equal(source[0].weight, target[0].weight), "a sampler may be older than the model"
    assert updater.push_weights() == 8
    updater.resume_from(5)
    assert updater.push_weights() == 9, "spent versions stay spent"
    with pytest.raises(ValueError, match="version=-1"):
        updater.resume_from(-1)


def test_a_collector_without_an_updater_says_so(make_collector):
    with pytest.raises(RuntimeError, match="weight_updater"):
        make_collector().update_policy_weights_()


def test_the_policy_samples_from_the_new_weights(make_collector, tokenizer):
    collector = make_collector()
    source = build_model(tokenizer, seed=7).eval()
    collector.weight_updater = InProcessWeightUpdater(source, collector.policy.model)
    collector.update_policy_weights_()
    rows = collector.collect()
    with torch.no_grad():
        for row in rows.unbind(0):
            tokens, action = row[keys.TOKENS], row[keys.ACTION_MASK]
            full = source(tokens[None]).logits[0, :-1].log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
            torch.testing.assert_close(row[keys.LOG_PROBS][action], full[action[1:]], atol=1e-5, rtol=0)
    assert collector.policy_version == 1
