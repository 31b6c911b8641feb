"""Tests of the output head of many families, with and without adapters: it is exact, or not found with a warning."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable

import pytest
import torch
import transformers
from tensordict import TensorDictBase
from torch import nn

from torchrl_rloo.data import encode_prompt, keys
from torchrl_rloo.data.rows import ragged
from torchrl_rloo.engines import find_head, score_positions
from torchrl_rloo.engines.head import predicting_states
from torchrl_rloo.functional import SamplingDistribution
from torchrl_rloo.modules import TransformersWrapper

peft = pytest.importorskip("peft")

SMALL = {"vocab_size": 384, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128}
RANGE = {"initializer_range": 0.3, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
PLAIN = SMALL | HEADS | RANGE
EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": False}
GEMMA = {"head_dim": 16, "final_logit_softcapping": 2.0, "attn_logit_softcapping": 2.0, "sliding_window": 6}
GPT = {"vocab_size": 384, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 128}
OPT = {"vocab_size": 384, "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
CONFIGS = {
    "qwen2": lambda: transformers.Qwen2Config(**PLAIN),
    "qwen2 tied": lambda: transformers.Qwen2Config(**PLAIN, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**PLAIN, head_dim=16),
    "llama": lambda: transformers.LlamaConfig(**PLAIN),
    "gemma2": lambda: transformers.Gemma2Config(**PLAIN, **GEMMA),
    "cohere": lambda: transformers.CohereConfig(**PLAIN, logit_scale=0.25),
    "granite": lambda: transformers.GraniteConfig(**PLAIN, logits_scaling=3.0),
    "mistral": lambda: transformers.MistralConfig(**PLAIN, sliding_window=6),
    "gpt2": lambda: transformers.GPT2Config(**GPT, **RANGE),
    "phi": lambda: transformers.PhiConfig(**PLAIN),  # its head has a bias
    "opt": lambda: transformers.OPTConfig(**OPT, word_embed_proj_dim=16, max_position_embeddings=128, init_std=0.3),
    "mixtral": lambda: transformers.MixtralConfig(**PLAIN, **EXPERTS, num_local_experts=4),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
        **PLAIN, **EXPERTS, num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=16
    ),
}
each_family = pytest.mark.parametrize("family", CONFIGS)


def build(family: str, dtype: torch.dtype = torch.float32) -> transformers.PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = transformers.AutoModelForCausalLM.from_config(CONFIGS[family]()).eval()
        if getattr(net.get_output_embeddings(), "bias", None) is not None:
            nn.init.normal_(net.get_output_embeddings().bias)
    return net.to(dtype)


@pytest.fixture(scope="module")
def ids(bpe, prompts) -> list[list[int]]:
    return [encode_prompt(bpe, row[keys.QUERY]) for row in prompts]


@pytest.fixture(scope="module")
def make_policy(bpe) -> Callable[..., TransformersWrapper]:
    def make(net: nn.Module, **kwargs) -> TransformersWrapper:
        return TransformersWrapper(net, tokenizer=bpe, generate_kwargs={"max_new_tokens": 8, "seed": 0, **kwargs})

    return make


def behaviour(rows: TensorDictBase) -> torch.Tensor:
    return torch.cat([r[keys.LOG_PROBS][r[keys.ACTION_MASK]] for r in rows.unbind(0)])


def own_log_probs(net: nn.Module, row: TensorDictBase) -> torch.Tensor:
    """Compute log-probs of a row's action tokens from the model's logits of only this row."""
    tokens, at = row[keys.TOKENS], row[keys.ACTION_MASK].nonzero()[:, 0]
    with torch.no_grad():
        full = net(input_ids=tokens[None], use_cache=False).logits[0].float().log_softmax(-1)
    return full[at - 1, tokens[at]]


def loss_gradients(scorer: TransformersWrapper, rows: TensorDictBase) -> dict[str, torch.Tensor]:
    """Return the gradients of a loss of log-probs and entropies, by parameter."""
    scored = scorer.score(rows)
    weights = torch.linspace(-1, 1, scored.log_probs.numel()).reshape_as(scored.log_probs)
    scorer.model.zero_grad()
    (scored.log_probs * weights + 0.1 * scored.entropy).sum().backward()
    return {n: p.grad.clone() for n, p in scorer.model.named_parameters() if p.grad is not None}


def check_both_ways(scorer: TransformersWrapper, rows: TensorDictBase) -> None:
    """Check that the head and full logits give the same log-probs, entropies and gradients."""
    full = copy.copy(scorer)
    full.head = None
    ours, theirs = scorer.score(rows), full.score(rows)
    torch.testing.assert_close(ours.log_probs, theirs.log_probs, rtol=0, atol=2e-5)
    torch.testing.assert_close(ours.entropy, theirs.entropy, rtol=0, atol=5e-5)
    ours, theirs = loss_gradients(scorer, rows), loss_gradients(full, rows)
    scorer.model.zero_grad()
    assert ours.keys() == theirs.keys()
    largest = max(float(g.abs().max()) for g in theirs.values())
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, theirs[name], rtol=1e-3, atol=1e-5 * largest, msg=lambda m, n=name: n + m)


@each_family
def test_families(family: str, make_policy: Callable, prompt_rows: Callable, ids, caplog) -> None:
    """Sampler and scorer agree with the model's logits row by row.

    The families have soft caps, scales, biases, learned positions, experts, and windows shorter than the prompts.
    """
    net = build(family)
    policy = make_policy(net)
    rows = policy(prompt_rows(*ids))
    scorer = policy.get_new_version(generate=False)
    assert scorer.head is not None and not caplog.records
    scored = scorer.score(rows)
    for row, log_probs, mask in zip(rows.unbind(0), scored.log_probs, scored.actions.mask, strict=True):
        expected = own_log_probs(net, row)
        torch.testing.assert_close(log_probs[mask], expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(row[keys.LOG_PROBS][row[keys.ACTION_MASK]], expected, rtol=0, atol=2e-5)
    check_both_ways(scorer, rows)


# Adapters

TARGETS = {
    "head": ["lm_head"],
    "head and layers": ["lm_head", "q_proj"],
    "layers": ["q_proj", "v_proj"],
}


def lora(net: nn.Module, target_modules: list[str], **kwargs) -> nn.Module:
    """Return the model with an adapter that has an effect, since peft begins with B = 0."""
    adapted = peft.get_peft_model(net, peft.LoraConfig(target_modules=target_modules, r=4, **kwargs)).eval()
    randomise(adapted)
    return adapted


def randomise(adapted: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("family", ["qwen2", "llama", "gemma2", "granite", "mixtral"])
def test_lora(family: str, targets: str, make_policy: Callable, prompt_rows: Callable, ids, caplog) -> None:
    plain = build(family)
    before = make_policy(plain)(prompt_rows(*ids))
    net = lora(plain, TARGETS[targets])
    policy = make_policy(net)
    rows = policy(prompt_rows(*ids))
    scorer = policy.get_new_version(generate=False)
    assert scorer.head is not None and not caplog.records
    assert not torch.equal(behaviour(rows)[:4], behaviour(before)[:4]), "the adapter does something"
    for row in rows.unbind(0):
        expected = own_log_probs(net, row)
        torch.testing.assert_close(row[keys.LOG_PROBS][row[keys.ACTION_MASK]], expected, rtol=1e-6, atol=2e-5)
    check_both_ways(scorer, rows)
    gradients = loss_gradients(scorer, rows)
    net.zero_grad()
    assert all("lora_" in name for name in gradients), "the model's own weights are frozen"
    assert any("lm_head.lora_A" in name for name in gradients) == (targets != "layers")
    assert all(g.abs().max() > 0 for g in gradients.values())


@pytest.mark.parametrize(
    "settings",
    [{"use_rslora": True, "lora_alpha": 32}, {"lora_bias": True}, {"bias": "lora_only"}, {"modules_to_save": ["norm"]}],
    ids=str,
)
def test_lora_settings(settings: dict, make_policy: Callable, prompt_rows: Callable, ids) -> None:
    net = lora(build("phi" if "bias" in "".join(settings) else "qwen2"), ["lm_head"], **settings)
    scorer = make_policy(net).get_new_version(generate=False)
    assert scorer.head is not None
    check_both_ways(scorer, make_policy(net)(prompt_rows(*ids)))


def test_adapters_may_be_switched_under_a_wrapper(make_policy: Callable, prompt_rows: Callable, ids) -> None:
    """Adapters may be replaced, merged, or disabled (for the reference of a LoRA policy): each use reads the change."""
    net = lora(build("qwen2"), ["lm_head"])
    rows = make_policy(net)(prompt_rows(*ids))
    scorer = make_policy(net).get_new_version(generate=False)

    def check() -> torch.Tensor:
        scored = scorer.score(rows)
        expected = torch.cat([own_log_probs(net, row) for row in rows.unbind(0)])
        torch.testing.assert_close(scored.log_probs[scored.actions.mask], expected, rtol=0, atol=2e-5)
        return expected

    first = check()
    with net.disable_adapter():
        assert not torch.allclose(check(), first)
    net.add_adapter("other", peft.LoraConfig(target_modules=["lm_head"], r=2, lora_alpha=1))
    randomise(net)
    net.set_adapter("other")
    assert not torch.allclose(check(), first)
    net.base_model.set_adapter(["default", "other"])
    check()
    net.merge_adapter()
    check()
    head = net.get_output_embeddings()
    merged = head.base_layer.weight.clone()
    with net.disable_adapter():  # peft unmerges a merged adapter
        scored = scorer.score(rows).log_probs
        assert not torch.equal(head.base_layer.weight, merged)
        torch.testing.assert_close(scored, scorer.score(rows).log_probs)
    net.add_adapter("dora", peft.LoraConfig(target_modules=["lm_head"], r=2, use_dora=True))
    net.set_adapter("dora")
    with pytest.raises(ValueError, match="dora"):
        scorer.score(rows)


def test_dropout_in_the_head_is_the_layers_own() -> None:
    """In train mode dropout affects the adapter's hidden states as in the layer itself."""
    net = lora(build("qwen2"), ["lm_head"], lora_dropout=0.5)
    head = find_head(net)
    hidden, targets = torch.randn(40, 32), torch.arange(40)
    net.train()
    drawn = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        drawn.append(head.token_log_probs(hidden, targets).log_probs)
    torch.manual_seed(0)
    expected = head.projection(hidden).log_softmax(-1)[torch.arange(40), targets]
    torch.testing.assert_close(drawn[0], expected, rtol=0, atol=1e-5)
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


UNKNOWN = {
    "dora": peft.LoraConfig(target_modules=["lm_head"], r=2, use_dora=True),
    "loha": peft.LoHaConfig(target_modules=["lm_head"], r=2),
    "ia3": peft.IA3Config(target_modules=["lm_head"], feedforward_modules=[]),
    "a trained copy": peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "prompt tuning": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}


@pytest.mark.parametrize("adapter", UNKNOWN)
def test_other_adapters_keep_full_logits_with_one_warning(
    adapter: str, make_policy: Callable, prompt_rows: Callable, ids, caplog
) -> None:
    net = peft.get_peft_model(build("qwen2"), UNKNOWN[adapter]).eval()
    if adapter == "prompt tuning":  # its forward pass differs from that of its parts
        assert find_head(net) is None and len(caplog.records) == 1
        return
    policy = make_policy(net)
    rows = policy(prompt_rows(*ids))
    assert not caplog.records, "a sampler holds the logits of one token each: nothing to warn of"
    scorer = policy.get_new_version(generate=False)
    assert scorer.head is None
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    scored = scorer.score(rows)
    torch.testing.assert_close(scored.log_probs[scored.actions.mask], behaviour(rows), rtol=0, atol=2e-5)
    (scored.log_probs + scored.entropy).sum().backward()
    assert any(p.grad is not None and p.grad.abs().max() > 0 for p in net.parameters() if p.requires_grad)


def test_a_head_with_more_to_it_is_not_taken_for_a_product(caplog) -> None:
    config = transformers.RobertaConfig(**PLAIN | {"pad_token_id": 1}, is_decoder=True)
    with caplog.at_level(logging.WARNING):
        assert find_head(transformers.AutoModelForCausalLM.from_config(config)) is None
    assert len([r for r in caplog.records if "output head" in r.message]) == 1


def test_finding_the_head_leaves_the_modes_alone() -> None:
    net = build("qwen2").train()
    net.model.layers[0].eval()
    modes = [m.training for m in net.modules()]
    assert find_head(net) is not None
    assert [m.training for m in net.modules()] == modes


# Precision


def test_the_sampler_keeps_float32_logits_of_bfloat16_weights(make_policy: Callable, prompt_rows: Callable) -> None:
    """A sampled token has the log-prob of exact sums, although the model's logits are rounded to bfloat16."""
    net = build("qwen2", torch.bfloat16)
    prompt = [5, 80, 9, 33, 7]
    policy = make_policy(net, max_new_tokens=1)
    row = policy(prompt_rows(prompt))[0]
    with torch.no_grad():
        hidden = net.model(input_ids=torch.tensor([prompt])).last_hidden_state[0, -1]
        exact = hidden.double() @ net.lm_head.weight.double().T
        rounded = net(input_ids=torch.tensor([prompt])).logits[0, -1].double()
    (sampled,) = row[keys.RESPONSE_TOKENS].tolist()
    assert float(row[keys.LOG_PROBS][-1]) == pytest.approx(exact.log_softmax(-1)[sampled].item(), abs=1e-5)
    assert (exact - rounded).abs().max() > 1e-3


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "phi"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_sampler_and_scorer_multiply_alike(family: str, dtype: torch.dtype) -> None:
    """Sampler and scorer compute the same log-probs from the same hidden states, in any precision."""
    head = find_head(build(family, dtype))
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 5, 32, generator=generator).to(dtype)
    targets = torch.randint(384, (15,), generator=generator)
    logits = head.logits(hidden)
    assert logits.shape == (3, 5, 384) and not logits.requires_grad
    assert logits.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    expected = logits.flatten(0, 1).log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    scored = head.token_log_probs(hidden.flatten(0, 1), targets).log_probs
    torch.testing.assert_close(scored.detach(), expected, rtol=0, atol=2e-6)


# Hidden states as an argument


@pytest.mark.parametrize("with_head", [True, False])
@pytest.mark.parametrize("distribution", [{}, {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.3}], ids=str)
def test_given_hidden_states_are_used_and_the_model_is_not_run(with_head: bool, distribution: dict) -> None:
    net = build("gemma2")
    head = find_head(net) if with_head else None
    tokens = torch.randint(384, (3, 20), generator=torch.Generator().manual_seed(0))
    positions = torch.rand(3, 20, generator=torch.Generator().manual_seed(1)) < 0.5
    positions[:, 0] = False
    settings = SamplingDistribution(**distribution)
    expected = score_positions(net, head, tokens, positions, settings, top_k=3)
    states, _ = predicting_states(net, head, tokens, positions)
    assert states.shape == (int(positions.sum()), 32 if with_head else 384)
    handle = net.model.register_forward_pre_hook(lambda *_: pytest.fail("the decoder was run"))
    scored = score_positions(net, head, tokens, positions, settings, hidden=states, top_k=3)
    handle.remove()
    for ours, theirs in zip(scored, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    (scored.log_probs + scored.entropy).sum().backward()
    assert net.model.layers[0].self_attn.q_proj.weight.grad.abs().max() > 0
    with pytest.raises(ValueError, match="hidden has"):
        score_positions(net, head, tokens, positions, settings, hidden=states[:-1])
    assert score_positions(net, head, tokens, positions, settings, hidden=states, entropy=False).entropy is None


# Mixtures of experts


@pytest.mark.parametrize("with_head", [True, False])
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_the_router_loss_is_that_of_each_row_alone(
    family: str, with_head: bool, make_policy: Callable, prompt_rows: Callable, ids
) -> None:
    """The router loss of rows of unequal lengths ignores padding, as a loop over tokens, layers and experts shows."""
    net = build(family)
    policy = make_policy(net)
    rows = policy(prompt_rows(*ids))
    assert len({len(t) for t in ragged(rows, keys.TOKENS)}) > 1
    scorer = policy.get_new_version(generate=False)
    scorer.head = scorer.head if with_head else None
    assert scorer.score(rows).router_loss is None
    scored = scorer.score(rows, router_loss=True)
    torch.testing.assert_close(scored.log_probs, scorer.score(rows).log_probs)
    chosen, probability, count = torch.zeros(4).double(), torch.zeros(4).double(), 0
    with torch.no_grad():
        for tokens in ragged(rows, keys.TOKENS):
            logits = net(input_ids=tokens[None], use_cache=False, output_router_logits=True).router_logits
            for layer in logits:
                for token in layer.double().softmax(-1):
                    chosen[token.topk(2).indices] += 1
                    probability += token
                    count += 1
    expected = 4 * float((chosen / count * probability / count).sum())
    assert scored.router_loss.item() == pytest.approx(expected, rel=1e-4)
    scored.router_loss.backward()
    routers = [p.grad for n, p in net.named_parameters() if ".gate.weight" in n]
    assert routers and all(g is not None and g.abs().max() > 0 for g in routers)
    assert net.get_output_embeddings().weight.grad is None


def test_the_router_loss_of_an_adapted_mixture(make_policy: Callable, prompt_rows: Callable, ids) -> None:
    net = build("mixtral")
    rows = make_policy(net)(prompt_rows(*ids))
    expected = make_policy(net).get_new_version(generate=False).score(rows, router_loss=True).router_loss
    adapted = peft.get_peft_model(net, peft.LoraConfig(target_modules=["q_proj"])).eval()
    scored = make_policy(adapted).get_new_version(generate=False).score(rows, router_loss=True)
    torch.testing.assert_close(scored.router_loss, expected)


def test_a_model_without_experts_has_no_router_loss(make_policy: Callable, prompt_rows: Callable, ids) -> None:
    policy = make_policy(build("qwen2"))
    with pytest.raises(ValueError, match="'qwen2'"):
        policy.get_new_version(generate=False).score(policy(prompt_rows(*ids)), router_loss=True)
