"""Ratios on the sampled support: truncated sets are recorded and scored over after weight updates."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import LazyStackStorage, ReplayBuffer

from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import encode_prompt, keys, tensor_rows
from torchrl_rloo.data.rows import ragged, stack_rows
from torchrl_rloo.envs import ChatEnv, DatasetChatEnv
from torchrl_rloo.envs.transforms import FeedbackTransform
from torchrl_rloo.modules import TransformersWrapper

TRUNCATIONS = {
    "top_k": {"top_k": 6},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.1},
    "all": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.4},
}
each_truncation = pytest.mark.parametrize("truncation", TRUNCATIONS)
each_way = pytest.mark.parametrize("with_head", [True, False], ids=["tiles", "full logits"])


@pytest.fixture(scope="module")
def ids(bpe, prompts) -> list[list[int]]:
    return [encode_prompt(bpe, row[keys.QUERY]) for row in prompts]


@pytest.fixture(scope="module")
def make_policy(random_model, bpe) -> Callable[..., TransformersWrapper]:
    def make(record_support: bool = True, num_samples: int | None = None, **kwargs) -> TransformersWrapper:
        settings = {"max_new_tokens": 8, "seed": 0, **kwargs}
        return TransformersWrapper(
            random_model,
            tokenizer=bpe,
            generate_kwargs=settings,
            num_samples=num_samples,
            record_support=record_support,
        )

    return make


@pytest.fixture(scope="module")
def moved(random_model):
    """Model some updates later."""
    later, generator = copy.deepcopy(random_model), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in later.parameters():
            parameter += 0.1 * parameter.std() * torch.randn(parameter.shape, generator=generator)
    return later


def scorer_of(policy: TransformersWrapper, model, with_head: bool = True) -> TransformersWrapper:
    scorer = policy.get_new_version(model=model, generate=False)
    assert scorer.head is not None and not scorer.record_support
    scorer.head = scorer.head if with_head else None
    return scorer


def supports(row: TensorDictBase) -> list[list[int]]:
    """Return the recorded ids of each action token."""
    ids, sizes = row[keys.SUPPORT_IDS], row[keys.SUPPORT_SIZES]
    assert ids.dtype == sizes.dtype == torch.int32
    return [part.tolist() for part in ids.split(sizes.tolist())]


def processed(model, row: TensorDictBase, *, temperature=1.0, repetition_penalty=1.0, **_) -> list[torch.Tensor]:
    """Return the float64 logits ``[V]`` before each action token, with penalty and temperature, without padding."""
    tokens = row[keys.TOKENS]
    with torch.no_grad():
        logits = copy.deepcopy(model).double()(input_ids=tokens[None], use_cache=False).logits[0]
    values = []
    for t in row[keys.ACTION_MASK].nonzero()[:, 0].tolist():
        z = logits[t - 1].clone()
        for v in set(tokens[:t].tolist()):
            z[v] = z[v] / repetition_penalty if z[v] > 0 else z[v] * repetition_penalty
        values.append(z / temperature)
    return values


def kept(z: torch.Tensor, *, top_k=None, top_p=1.0, min_p=0.0, **_) -> set[int]:
    """Return the ids that top-k, top-p and min-p keep at each token."""
    order = z.argsort(descending=True).tolist()[:top_k]
    probs = z[order].softmax(0).tolist()
    nucleus = [v for i, v in enumerate(order) if sum(probs[:i]) < top_p]
    return {v for v in nucleus if z[v].exp() >= min_p * z.max().exp()}


def check_on_policy(policy: TransformersWrapper, rows: TensorDictBase) -> None:
    """Check that the ratio is 1 with unchanged weights."""
    scored = scorer_of(policy, policy.model).score(rows)
    behaviour = torch.cat([r[keys.LOG_PROBS][r[keys.ACTION_MASK]] for r in rows.unbind(0)])
    torch.testing.assert_close(scored.log_probs[scored.actions.mask], behaviour, rtol=0, atol=1e-5)


@each_truncation
def test_what_is_recorded_is_what_the_truncation_left(
    truncation: str, make_policy: Callable, prompt_rows: Callable, ids
) -> None:
    policy = make_policy(**TRUNCATIONS[truncation])
    rows = policy(prompt_rows(*ids, *ids))
    assert len({len(r) for r in ragged(rows, keys.RESPONSE_TOKENS)}) > 1, "rows that end early leave the batch"
    sizes = set()
    for row in rows.unbind(0):
        logits = processed(policy.model, row, **TRUNCATIONS[truncation])
        assert len(supports(row)) == len(logits) == int(row[keys.ACTION_MASK].sum())
        for recorded, z in zip(supports(row), logits, strict=True):
            assert len(set(recorded)) == len(recorded)
            assert set(recorded) == kept(z, **TRUNCATIONS[truncation])
            sizes.add(len(recorded))
        for recorded, token in zip(supports(row), row[keys.RESPONSE_TOKENS].tolist(), strict=True):
            assert token in recorded
    assert sizes == {6} if truncation == "top_k" else len(sizes) > 3
    check_on_policy(policy, rows)


def test_recording_changes_nothing_else(make_policy: Callable, prompt_rows: Callable, ids) -> None:
    settings = TRUNCATIONS["all"]
    with_support, without = (make_policy(flag, **settings)(prompt_rows(*ids)) for flag in (True, False))
    assert (with_support["support"] is not None) and "support" not in without.keys()
    for key in (keys.TOKENS, keys.LOG_PROBS, keys.ACTION_MASK):
        for a, b in zip(ragged(with_support, key), ragged(without, key), strict=True):
            assert torch.equal(a, b)
    policy = make_policy(**settings)
    assert all(key in policy(prompt_rows(*ids)).keys() for key in policy.out_keys) and "support" in policy.out_keys


def test_a_rows_support_does_not_depend_on_the_batch(make_policy: Callable, prompt_rows: Callable, ids) -> None:
    policy, seeds = make_policy(**TRUNCATIONS["all"]), [11, 12, 13, 14]
    together = policy(prompt_rows(*ids, seed=seeds))
    for row, prompt, seed in zip(together.unbind(0), ids, seeds, strict=True):
        (alone,) = policy(prompt_rows(prompt, seed=[seed])).unbind(0)
        assert [set(s) for s in supports(alone)] == [set(s) for s in supports(row)]
    grouped = make_policy(num_samples=2, **TRUNCATIONS["all"])(prompt_rows(*ids))
    for group in grouped.unbind(0):
        check_on_policy(policy, group)


@each_way
@each_truncation
def test_moved_weights_are_scored_over_the_recorded_tokens(
    truncation: str, with_head: bool, make_policy: Callable, prompt_rows: Callable, ids, moved
) -> None:
    """Scores equal a float64 loop; truncating again with the moved weights would differ."""
    policy = make_policy(**TRUNCATIONS[truncation])
    rows = policy(prompt_rows(*ids))
    scored = scorer_of(policy, moved, with_head).score(rows)
    expected, entropies = [], []
    for row in rows.unbind(0):
        logits = processed(moved, row, **TRUNCATIONS[truncation])
        for z, recorded, token in zip(logits, supports(row), row[keys.RESPONSE_TOKENS].tolist(), strict=True):
            full = z[recorded].log_softmax(0)
            expected.append(full[recorded.index(token)])
            entropies.append(-(full.exp() * full).sum())
    mask = scored.actions.mask
    torch.testing.assert_close(scored.log_probs[mask].double(), torch.stack(expected), rtol=0, atol=2e-5)
    torch.testing.assert_close(scored.entropy[mask].double(), torch.stack(entropies), rtol=0, atol=5e-5)
    bare = stack_rows([row.exclude("support") for row in rows.unbind(0)])
    assert not torch.allclose(scorer_of(policy, moved, with_head).score(bare).log_probs, scored.log_probs, atol=1e-2)


@each_way
@each_truncation
def test_the_mean_importance_ratio_is_one(
    truncation: str, with_head: bool, make_policy: Callable, prompt_rows: Callable, ids, moved
) -> None:
    """The mean over the support, weighted by behavior probabilities, is 1; other ratios are biased."""
    settings = TRUNCATIONS[truncation]
    policy = make_policy(max_new_tokens=1, **settings)
    (sampled,) = policy(prompt_rows(ids[2])).unbind(0)
    (support,) = supports(sampled)
    rows = []
    for token in support:  # the same row with another token of the support
        row, tokens = sampled.copy(), sampled[keys.TOKENS].clone()
        tokens[-1] = token
        row.set("tokens", TensorDict({"full": tokens}, []))
        rows.append(row)
    rows = stack_rows(rows)

    def score(model, drop: tuple[str, ...] = (), **changed) -> torch.Tensor:
        scorer = scorer_of(policy, model, with_head)
        scorer = scorer.get_new_version(generate_kwargs=settings | changed) if changed else scorer
        return scorer.score(stack_rows([r.exclude(*drop) for r in rows.unbind(0)])).log_probs[:, 0].double()

    mu = score(policy.model)
    assert mu.exp().sum().item() == pytest.approx(1, abs=1e-5)
    assert (mu.exp() * (score(moved) - mu).exp()).sum().item() == pytest.approx(1, abs=1e-5)
    untruncated = {"top_k": None, "top_p": 1.0, "min_p": 0.0}
    plain = [score(model, ("support",), **untruncated) for model in (moved, policy.model)]
    assert abs((mu.exp() * (plain[0] - plain[1]).exp()).sum().item() - 1) > 0.01, "unprocessed on both sides"
    assert abs((mu.exp() * (score(moved, ("support",)) - mu).exp()).sum().item() - 1) > 0.01, "truncated anew"


# supports on the way from environment to buffer


def conversations(policy, bpe, prompts, turns: int = 3, replay_buffer: ReplayBuffer | None = None) -> LLMCollector:
    def respond(conversation, row):
        taken = sum(m["role"] == "assistant" for m in conversation)
        return [{"role": "user", "content": "again"}] if taken < turns else None

    env = DatasetChatEnv(
        prompts,
        bpe,
        prompts_per_batch=len(prompts),
        num_generations=2,
        shuffle=False,
        transforms=[FeedbackTransform(respond, max_turns=4)],
    )
    return LLMCollector(env, policy, replay_buffer=replay_buffer)


@pytest.mark.parametrize("stops", [{}, {"stop_token_ids": list(range(20, 120))}], ids=["end of turn", "stop ids"])
@each_truncation
def test_rows_of_several_turns(truncation: str, stops: dict, make_policy: Callable, bpe, prompts, moved) -> None:
    """Supports of all turns stay in order through environment, collector and replay buffer."""
    policy = make_policy(**TRUNCATIONS[truncation], **stops)
    buffer = ReplayBuffer(storage=LazyStackStorage(100))
    rows = conversations(policy, bpe, prompts, replay_buffer=buffer).collect()
    assert int(rows[keys.NUM_TURNS].max()) == 3
    stored = buffer[: len(rows)]
    for batch in (rows, tensor_rows(rows), stored):
        check_on_policy(policy, batch)
    for row, copied in zip(rows.unbind(0), stored.unbind(0), strict=True):
        assert supports(copied) == supports(row)
        logits = processed(policy.model, row, **TRUNCATIONS[truncation])
        for recorded, z in zip(supports(row), logits, strict=True):
            assert set(recorded) == kept(z, **TRUNCATIONS[truncation])
    assert scorer_of(policy, moved).score(stored).log_probs.isfinite().all()


def test_a_new_conversation_starts_a_new_support(make_policy: Callable, bpe, query_rows: Callable, user) -> None:
    """Reset drops the supports of the last conversation."""
    env, policy = ChatEnv(bpe, batch_size=2), make_policy(top_k=5)
    stepped = env.step(policy(env.reset(query_rows(user("abc"), user("cab")))))
    assert all(len(supports(row)) > 0 for row in stepped["next"].unbind(0)), "a transform sees it where a turn ends"
    again = policy(env.reset(stepped))
    assert all(len(supports(row)) == int(row[keys.ACTION_MASK].sum()) for row in again.unbind(0))
    check_on_policy(policy, again)


def test_a_row_that_brings_unrecorded_actions_is_refused(make_policy: Callable, prompt_rows: Callable, ids) -> None:
    rows = make_policy(False, top_k=5)(prompt_rows(*ids))
    for row in rows.unbind(0):
        row.set(keys.PROMPT_TOKENS, row[keys.TOKENS])
    with pytest.raises(ValueError, match="action tokens without"):
        make_policy(top_k=5)(rows)


def test_supports_that_do_not_fit_are_refused(make_policy: Callable, prompt_rows: Callable, ids) -> None:
    policy = make_policy(top_k=5)
    rows = policy(prompt_rows(*ids))
    scorer = scorer_of(policy, policy.model)

    def with_first(**entries: torch.Tensor) -> TensorDictBase:
        first, *others = rows.unbind(0)
        first = first.copy()
        first.set("support", TensorDict({"ids": first[keys.SUPPORT_IDS], "sizes": first[keys.SUPPORT_SIZES]} | entries))
        return stack_rows([first, *others])

    sizes, own = rows[0][keys.SUPPORT_SIZES], rows[0][keys.SUPPORT_IDS]
    with pytest.raises(ValueError, match="every action token requires one size"):
        scorer.score(with_first(sizes=sizes[:-1]))
    with pytest.raises(ValueError, match="every action token requires one size"):
        scorer.score(with_first(ids=own[:-1]))
    with pytest.raises(ValueError, match="every action token requires one size"):
        scorer.score(with_first(ids=own[5:], sizes=sizes - torch.eye(len(sizes), dtype=torch.int32)[0] * 5))
    with pytest.raises(ValueError, match="not in its recorded support"):
        scorer.score(with_first(ids=torch.full_like(own, 383)))
    bare = stack_rows([rows[0].exclude("support"), *rows.unbind(0)[1:]])
    with pytest.raises(ValueError, match=r"rows \[0\] have no"):
        scorer.score(bare)


# settings


@pytest.mark.parametrize("kwargs", [{}, {"temperature": 0.5}, {"temperature": 0, "top_k": 3}], ids=str)
def test_a_distribution_that_truncates_nothing_is_refused(kwargs: dict, make_policy: Callable) -> None:
    with pytest.raises(ValueError, match="record_support=True requires a distribution that truncates"):
        make_policy(**kwargs)


def test_a_scorer_does_not_record(random_model, bpe) -> None:
    with pytest.raises(ValueError, match="generate=True"):
        TransformersWrapper(
            random_model, tokenizer=bpe, generate=False, generate_kwargs={"top_k": 5}, record_support=True
        )


def test_new_versions(make_policy: Callable) -> None:
    policy = make_policy(top_p=0.9)
    assert policy.get_new_version().record_support and policy.get_new_version(num_samples=2).record_support
    assert not policy.get_new_version(generate=False).record_support
    assert not policy.get_new_version(generate_kwargs={"temperature": 0}).record_support, "greedy, to evaluate"
    assert not policy.get_new_version(generate_kwargs={}).record_support
    assert policy.get_new_version(generate_kwargs={"top_k": 3}).record_support
    assert not make_policy(False, top_p=0.9).get_new_version().record_support
    assert make_policy(False, top_p=0.9).get_new_version(record_support=True).record_support
