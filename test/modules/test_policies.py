"""TransformersWrapper: settings, modes, seeds, and TorchRL's classes and losses with it."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory, LLMWrapperBase, LogProbs, Masks, Text, Tokens
from torchrl.objectives.llm import GRPOLoss
from transformers import Qwen2ForCausalLM

from torchrl_rloo.data import encode_prompt, keys
from torchrl_rloo.data.rows import ragged, stack_rows
from torchrl_rloo.data.templates import to_history
from torchrl_rloo.engines import find_head
from torchrl_rloo.engines.generation import GenerationConfig
from torchrl_rloo.modules import TransformersWrapper
from torchrl_rloo.objectives import RLOOLoss


def responses(rows: TensorDictBase) -> list[list[int]]:
    return [r.tolist() for r in ragged(rows, keys.RESPONSE_TOKENS)]


@pytest.fixture(scope="module")
def ids(bpe, prompts) -> list[list[int]]:
    return [encode_prompt(bpe, row[keys.QUERY]) for row in prompts]


@pytest.fixture(scope="module")
def make_policy(random_model, bpe) -> Callable[..., TransformersWrapper]:
    def make(*, num_samples: int | None = None, input_mode: str = "tokens", **generate_kwargs) -> TransformersWrapper:
        kwargs = {"max_new_tokens": 8, **generate_kwargs}
        settings = {"num_samples": num_samples, "input_mode": input_mode}
        return TransformersWrapper(random_model, tokenizer=bpe, generate_kwargs=kwargs, **settings)

    return make


def test_the_models_own_ends_of_turn_count(make_tokenizer: Callable, make_model: Callable, prompt_rows: Callable, ids):
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *range(30, 90)]
    policy = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 12, "seed": 0})
    assert set(policy.stop_ids) == {tokenizer.eos_token_id, *range(30, 90)}
    assert any(30 <= r[-1] < 90 and len(r) < 12 for r in responses(policy(prompt_rows(*ids))))


def test_a_stop_string_may_cross_tokens_but_not_the_prompt(
    make_tokenizer: Callable, make_model: Callable, prompt_rows: Callable
) -> None:
    tokenizer = make_tokenizer()
    a, b = tokenizer.convert_tokens_to_ids(["a", "b"])
    model = make_model(tokenizer)
    with torch.no_grad():  # only a and b can be sampled, each with probability 1/2
        model.lm_head.weight.zero_()
        model.lm_head.bias.fill_(-1e4)
        model.lm_head.bias[[a, b]] = 0.0
    kwargs = {"max_new_tokens": 12, "seed": 0, "stop_strings": ["ab"]}
    out = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs=kwargs)(prompt_rows(*[[a]] * 16))
    for response, truncated in zip(responses(out), out[keys.RESPONSE_TRUNCATED], strict=True):
        text = tokenizer.decode(response)
        assert "ab" not in text[:-1] and text.endswith("ab") != bool(truncated)
    assert any(r[0] == b for r in responses(out)), "the prompt's a and the turn's b are not a stop"


# greedy


def test_greedy_has_no_log_probs_to_train_on(make_policy: Callable, prompt_rows: Callable, ids, random_model) -> None:
    out = make_policy(temperature=0)(prompt_rows(*ids))
    assert all((v == 0).all() for v in ragged(out, keys.LOG_PROBS))
    scorer = make_policy(temperature=0).get_new_version(generate=False)
    with pytest.raises(ValueError, match="temperature=0"):
        scorer.score(out)
    scorer.head = None  # a model whose head cannot be found
    with pytest.raises(ValueError, match="temperature=0"):
        scorer.score(out)


def test_do_sample_conflicts() -> None:
    with pytest.raises(ValueError, match="temperature=0.7"):
        GenerationConfig.from_kwargs({"do_sample": False, "temperature": 0.7})
    assert GenerationConfig.from_kwargs({"do_sample": False, "temperature": 0}).distribution.temperature == 0
    assert GenerationConfig.from_kwargs({"do_sample": True}).distribution.temperature == 1


@pytest.mark.parametrize(
    "kwargs", [{"top_kk": 1}, {"num_return_sequences": 2}, {"max_tokens": 3, "seed": 1}, {"num_beams": 2}]
)
def test_unknown_arguments_are_refused_with_the_known_ones(kwargs: dict, make_policy: Callable) -> None:
    with pytest.raises(TypeError) as raised:
        make_policy(**kwargs)
    assert next(iter(kwargs)) in str(raised.value)
    known = (
        "max_new_tokens temperature top_k top_p min_p repetition_penalty stop_token_ids stop_strings seed ignore_eos"
    )
    for name in [*known.split(), "do_sample", "num_samples"]:
        assert name in str(raised.value)


# modes and classes


@pytest.mark.parametrize("input_mode", ["tokens", "text", "history"])
def test_outputs_are_torchrls_classes(
    input_mode: str, make_policy: Callable, bpe, user: Callable, prompt_rows: Callable
) -> None:
    messages, text = user("abc"), "abc cab"
    first = {
        "tokens": lambda: {keys.PROMPT_TOKENS: torch.tensor([5, 6, 7])},
        "text": lambda: {"text": Text(prompt=text)},
        "history": lambda: {"history": ChatHistory(prompt=to_history([messages])[0])},
    }[input_mode]
    policy = make_policy(input_mode=input_mode, seed=0)
    assert isinstance(policy, LLMWrapperBase)
    out = policy(stack_rows([TensorDict(first(), []) for _ in range(2)]))
    for rows in (out, out[0]):
        assert isinstance(rows["tokens"], Tokens)
        assert isinstance(rows["masks"], Masks) and isinstance(rows["log_probs"], LogProbs)
    row = out[0]
    said = bpe.decode(row[keys.RESPONSE_TOKENS], skip_special_tokens=True)
    assert row[keys.TOKENS].dtype == torch.int64 and row[keys.LOG_PROBS].dtype == torch.float32
    assert row[keys.ACTION_MASK].dtype == torch.bool and row[keys.ATTENTION_MASK].all()
    if input_mode == "text":
        assert isinstance(row["text"], Text)
        assert row[keys.PROMPT_TOKENS].tolist() == bpe(text)["input_ids"]
        assert (row["text", "prompt"], row["text", "response"], row["text", "full"]) == (text, said, text + said)
    elif input_mode == "history":
        assert isinstance(row["history"], ChatHistory)
        assert row[keys.PROMPT_TOKENS].tolist() == encode_prompt(bpe, messages)
        for part in ("prompt", "response", "full"):
            assert isinstance(row["history", part], History)
        assert row["history", "response"].content == [said] and row["history", "response"].role == ["assistant"]
        assert row["history", "full"].content == ["abc", said] and row["history", "prompt"].content == ["abc"]
    assert all(k in out.keys() for k in policy.out_keys)


def test_a_dense_batch_is_as_good_as_a_ragged_one(make_policy: Callable, prompt_rows: Callable, ids) -> None:
    dense = TensorDict({keys.PROMPT_TOKENS: torch.tensor([ids[0]] * 3)}, [3])
    assert responses(make_policy(seed=0)(dense)) == responses(make_policy(seed=0)(prompt_rows(*[ids[0]] * 3)))


# scoring, and TorchRL on top of it

SETTINGS = [{}, {"temperature": 0.5}, {"temperature": 1.5, "top_k": 20, "top_p": 0.9}]


@pytest.mark.parametrize("distribution", SETTINGS, ids=str)
def test_a_new_version_keeps_the_distribution(
    distribution: dict, make_policy: Callable, prompt_rows: Callable, ids
) -> None:
    policy = make_policy(seed=0, num_samples=2, **distribution)
    scorer = policy.get_new_version(generate=False)
    assert scorer.distribution == policy.distribution and scorer.model is policy.model
    assert scorer.num_samples is None and not scorer.generate and policy.generate
    assert policy.get_new_version(num_samples=3).num_samples == 3
    other = policy.get_new_version(generate=False, generate_kwargs={"temperature": 2.0})
    assert other.distribution.temperature == 2.0
    flat = stack_rows([r for g in policy(prompt_rows(*ids)).unbind(0) for r in g.unbind(0)])
    expected = [r[keys.LOG_PROBS].clone() for r in flat.unbind(0)]
    for ours, theirs in zip(ragged(scorer(flat), keys.LOG_PROBS), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    with pytest.raises(RuntimeError, match="generate=False"):
        policy.score(flat)


@pytest.mark.parametrize("distribution", [{"top_k": 2}, {"top_p": 0.3}, {"min_p": 0.5}], ids=str)
@pytest.mark.parametrize("with_head", [True, False])
def test_truncated_distributions_stay_finite_when_the_weights_move(
    with_head: bool, distribution: dict, random_model, bpe, prompt_rows: Callable, ids
) -> None:
    """A sampled token that new weights would truncate has a finite score and gradient."""
    policy = TransformersWrapper(
        random_model, tokenizer=bpe, generate_kwargs={"max_new_tokens": 8, "seed": 0, **distribution}
    )
    out = policy(prompt_rows(*ids))
    moved = copy.deepcopy(random_model)
    with torch.no_grad():
        moved.lm_head.weight.neg_()
    scorer = policy.get_new_version(model=moved, generate=False)
    scorer.head = scorer.head if with_head else None
    scored = scorer.score(out)
    assert scored.log_probs.isfinite().all() and scored.entropy.isfinite().all()
    scored.log_probs.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in moved.parameters())


@pytest.mark.parametrize("distribution", SETTINGS, ids=str)
def test_torchrls_get_dist_is_the_sampled_distribution(
    distribution: dict, make_policy: Callable, prompt_rows: Callable, ids
) -> None:
    policy = make_policy(seed=0, **distribution)
    out = policy(prompt_rows(*ids))
    dist = policy.get_new_version(generate=False).get_dist(out, mask_key=keys.ACTION_MASK)
    tokens = out.get(keys.TOKENS, as_padded_tensor=True, padding_side="left", padding_value=-100)
    mask = out.get(keys.ACTION_MASK, as_padded_tensor=True, padding_side="left", padding_value=False)
    behaviour = torch.cat([r[keys.LOG_PROBS][r[keys.ACTION_MASK]] for r in out.unbind(0)])
    torch.testing.assert_close(dist.log_prob(tokens)[mask], behaviour, rtol=0, atol=1e-5)


@pytest.mark.parametrize("distribution", SETTINGS[:2], ids=str)
@pytest.mark.parametrize("masking_strategy", ["sft", "rlhf"])
def test_torchrls_grpo_loss_runs_on_our_scorer(
    masking_strategy: str, distribution: dict, make_policy: Callable, prompt_rows: Callable, ids, random_model
) -> None:
    """With unchanged weights its ratio is also 1: no clipping, ESS 1, and a gradient."""
    policy = make_policy(seed=0, **distribution)
    rows = policy(prompt_rows(*ids))
    for row, advantage in zip(rows.unbind(0), (1.0, -1.0, 0.5, -0.5), strict=True):
        row.set("advantage", torch.full((len(row[keys.TOKENS]), 1), advantage))
    loss_fn = GRPOLoss(policy.get_new_version(generate=False), masking_strategy=masking_strategy, entropy_bonus=False)
    out = loss_fn(rows)
    assert out.ESS.item() == pytest.approx(1, abs=1e-5)
    assert out.clip_fraction.item() == 0
    out.loss_objective.backward()
    try:
        assert random_model.lm_head.weight.grad.abs().max() > 0
    finally:
        random_model.zero_grad()


def test_rows_without_masks_are_scored_after_their_prompt(make_policy: Callable, prompt_rows: Callable, ids) -> None:
    policy = make_policy(seed=0)
    out = policy(prompt_rows(*ids))
    bare = stack_rows([TensorDict({"tokens": row["tokens"]}, []) for row in out.unbind(0)])
    scored = policy.get_new_version(generate=False)(bare)
    for ours, theirs in zip(ragged(scored, keys.LOG_PROBS), ragged(out, keys.LOG_PROBS), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    nothing = stack_rows([TensorDict({keys.TOKENS: torch.tensor([1, 2])}, [])])
    with pytest.raises(KeyError, match="prompt"):
        policy.get_new_version(generate=False)(nothing)


def test_a_written_conversation_is_scored_from_its_history(
    make_tokenizer: Callable, make_model: Callable, user: Callable
) -> None:
    tokenizer = make_tokenizer("chatml_generation")
    model = make_model(tokenizer)
    chat = [*user("abc"), {"role": "assistant", "content": "cab"}]
    row = TensorDict({"history": ChatHistory(full=to_history([chat])[0])}, [])
    scorer = TransformersWrapper(model, tokenizer=tokenizer, input_mode="history", generate=False)
    out = scorer(stack_rows([row]))[0]
    ids = tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"]
    assert out[keys.TOKENS].tolist() == ids
    answer = tokenizer("cab<|im_end|>", add_special_tokens=False)["input_ids"]
    assert out[keys.TOKENS][out[keys.ACTION_MASK]].tolist() == answer
    full = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    at = out[keys.ACTION_MASK].nonzero()[:, 0]
    expected = full[at - 1, out[keys.TOKENS][at]]
    torch.testing.assert_close(out[keys.LOG_PROBS][at], expected, rtol=0, atol=1e-5)
    assert (out[keys.LOG_PROBS][~out[keys.ACTION_MASK]] == 0).all()


# heads of other models


class OddHead(Qwen2ForCausalLM):
    """Model whose logits differ from those of its head, which only a trial shows."""

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * torch.linspace(0.5, 1.5, out.logits.shape[-1])
        return out


@pytest.mark.parametrize("distribution", [{}, {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.3}], ids=str)
def test_an_unknown_head_gives_one_warning_and_the_same_log_probs(
    distribution: dict, bpe, random_model, prompt_rows: Callable, ids, caplog
) -> None:
    odd = copy.deepcopy(random_model)
    odd.__class__ = OddHead
    kwargs = {"max_new_tokens": 8, "seed": 0, **distribution}
    policy = TransformersWrapper(odd, tokenizer=bpe, generate_kwargs=kwargs)
    out = policy(prompt_rows(*ids))
    with caplog.at_level(logging.WARNING):
        scorer = policy.get_new_version(generate=False)
        scored = scorer.score(out)
        scorer.score(out)
    assert scorer.head is None
    assert [r.levelname for r in caplog.records] == ["WARNING"] and "OddHead" in caplog.text
    behaviour = torch.cat([r[keys.LOG_PROBS][r[keys.ACTION_MASK]] for r in out.unbind(0)])
    torch.testing.assert_close(scored.log_probs[scored.actions.mask], behaviour, rtol=0, atol=1e-5)
    scored.log_probs.sum().backward()
    assert odd.model.embed_tokens.weight.grad.isfinite().all()


def test_full_logits_and_tiles_agree(make_policy: Callable, prompt_rows: Callable, ids, random_model) -> None:
    """Both scorers agree on log-probs, entropies and gradients."""
    policy = make_policy(seed=0, temperature=0.8, top_k=50, repetition_penalty=1.2)
    out = policy(prompt_rows(*ids))
    results = []
    for head in (find_head(random_model), None):
        scorer = policy.get_new_version(generate=False)
        scorer.head = head
        scored = scorer.score(out)
        (
            scored.log_probs * torch.linspace(-1, 1, scored.log_probs.numel()).reshape_as(scored.log_probs)
        ).sum().backward()
        gradients = [p.grad.clone() for p in random_model.parameters()]
        random_model.zero_grad()
        results.append((scored.log_probs, scored.entropy, gradients))
    (log_probs, entropy, gradients), (full_log_probs, full_entropy, full_gradients) = results
    assert results[0][0].shape == results[1][0].shape
    torch.testing.assert_close(log_probs, full_log_probs, rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy, full_entropy, rtol=0, atol=1e-5)
    for ours, theirs in zip(gradients, full_gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_scoring_has_a_gradient_and_generation_has_none(make_policy: Callable, prompt_rows: Callable, ids) -> None:
    policy = make_policy(seed=0)
    out = policy(prompt_rows(*ids))
    assert not any(v.requires_grad for v in ragged(out, keys.LOG_PROBS))
    scorer = policy.get_new_version(generate=False)
    scored = scorer.score(out)
    assert scored.log_probs.requires_grad and scored.entropy.requires_grad
    assert scorer.score(out, entropy=False).entropy is None
    for row in out.unbind(0):
        row.set(keys.ADVANTAGE, torch.zeros(1, 1))
    assert RLOOLoss(scorer)(out).loss_objective.requires_grad


# masks and log-probs of earlier turns: kept if they fit the ids, else an error


@pytest.fixture
def second_turn(make_policy, prompt_rows) -> TensorDictBase:
    """Row after its first turn, with feedback ids appended to every key."""
    rows = make_policy(seed=0)(prompt_rows([5, 6, 7]))
    for row in rows.unbind(0):
        row.set(keys.PROMPT_TOKENS, torch.cat([row[keys.TOKENS], torch.tensor([8, 9])]))
        row.set(keys.ACTION_MASK, torch.cat([row[keys.ACTION_MASK], torch.zeros(2, dtype=torch.bool)]))
        row.set(keys.LOG_PROBS, torch.cat([row[keys.LOG_PROBS], torch.zeros(2)]))
    return rows


@pytest.mark.parametrize("key", [keys.ACTION_MASK, keys.LOG_PROBS])
@pytest.mark.parametrize("change", [lambda values: values[:-2], lambda values: values.repeat(2)])
def test_another_length_than_that_of_the_ids_is_refused(make_policy, second_turn, key, change) -> None:
    row = second_turn[0]
    row.set(key, change(row[key]))
    with pytest.raises(ValueError, match=rf"a prompt of {len(row[keys.PROMPT_TOKENS])} ids has \d+ values of"):
        make_policy(seed=0)(second_turn)


@pytest.mark.parametrize("missing", ["masks", "log_probs"])
def test_one_without_the_other_is_refused(make_policy, second_turn, missing: str) -> None:
    row = second_turn[0]
    del row[missing]
    with pytest.raises(ValueError, match="has no values of .*or delete both"):
        make_policy(seed=0)(second_turn)


def test_a_row_without_both_begins_anew(make_policy, second_turn) -> None:
    row = second_turn[0]
    del row["masks"], row["log_probs"]
    out = make_policy(seed=0)(second_turn)[0]
    assert int(out[keys.ACTION_MASK].sum()) == len(out[keys.RESPONSE_TOKENS])
