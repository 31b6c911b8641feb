"""Groups with a greedy member, or with demonstrations as members."""

from __future__ import annotations

import pytest
import torch

from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import keys, load_prompts, stack_rows
from torchrl_rloo.data.outcomes import sampled_rows
from torchrl_rloo.data.templates import encode_conversation
from torchrl_rloo.embedded import build_model
from torchrl_rloo.engines import TransformersEngine
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.modules import TransformersWrapper, vLLMWrapper
from torchrl_rloo.objectives import RLOOLoss
from torchrl_rloo.replay import MCAdvantage

G = 4
SETTINGS = {"max_new_tokens": 6, "seed": 0}
ROWS = [
    {"prompt": "What is 2+3?", "solution": r"\boxed{5}"},
    {"prompt": "What is 47+38?", "solution": [r"\boxed{85}", "no"]},
    {"prompt": "What is 1+1?", "solution": None},
    {"prompt": "What is 8+1?", "solution": ["a", "b", "c", "d", "e"]},  # one member at least is sampled
]


def solved(completions, **_) -> list[float]:
    return [float("boxed" in c[-1]["content"]) for c in completions]


@pytest.fixture(scope="module")
def model(tokenizer):
    return build_model(tokenizer, seed=0).eval()


def collect(model, tokenizer, engine: bool = False, **guides):
    env = DatasetChatEnv(
        load_prompts(ROWS, chat=True),
        tokenizer,
        prompts_per_batch=4,
        num_generations=G,
        rewards=solved,
        shuffle=False,
        **guides,
    )
    policy = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs=SETTINGS)
    if engine:
        policy = vLLMWrapper(TransformersEngine(model), tokenizer=tokenizer, generate_kwargs=SETTINGS)
    collector = LLMCollector(env, policy)
    rows = collector.collect()
    collector.shutdown()
    return rows


def tokens_of(rows) -> list[list[int]]:
    return [row[keys.TOKENS].tolist() for row in rows.unbind(0)]


@pytest.mark.parametrize("engine", [False, True])
def test_the_first_member_is_greedy_and_the_others_are_sampled_as_before(model, tokenizer, engine):
    plain, guided = collect(model, tokenizer, engine), collect(model, tokenizer, engine, greedy_member=True)
    assert [int(row[keys.ORIGIN]) for row in guided.unbind(0)] == [keys.GREEDY, *[keys.SAMPLED] * (G - 1)] * 4
    greedy = {**SETTINGS, "temperature": 0.0}
    policy = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs=greedy)
    for i, (before, after) in enumerate(zip(tokens_of(plain), tokens_of(guided), strict=True)):
        if i % G:
            assert after == before
        else:
            prompt = guided[i][keys.PROMPT_TOKENS]
            assert after == tokens_of(policy(stack_rows([guided[i].select(keys.PROMPT_TOKENS)])))[0] and len(
                after
            ) > len(prompt)
    # The greedy rows are the baseline, and leave the batch
    for i, row in enumerate(guided.unbind(0)):
        row.set(keys.REWARD, torch.tensor([[float(i % 3)]]))
    rows = MCAdvantage(G, estimator="remax").inv(guided)
    assert len(rows) == 4 * (G - 1) and len(sampled_rows(guided)) == len(rows)
    expected = [float(i % 3) - float(i // G * G % 3) for i in range(4 * G) if i % G]
    assert rows[keys.ADVANTAGE].flatten().tolist() == expected
    with pytest.raises(KeyError, match="greedy_member=True"):
        MCAdvantage(G, estimator="remax").inv(plain)
    with pytest.raises(ValueError, match="compares whole rows"):
        MCAdvantage(G, estimator="remax", credit="turn")


@pytest.mark.parametrize("engine", [False, True])
def test_demonstrations_are_members_with_the_tokens_of_the_template(model, tokenizer, engine):
    rows = collect(model, tokenizer, engine, demonstrations="solution")
    origins = rows[keys.ORIGIN].reshape(4, G)
    assert (origins == keys.DEMONSTRATION).sum(1).tolist() == [1, 2, 0, G - 1]
    assert keys.DEMONSTRATION_IDS not in rows.keys()
    for i, row in enumerate(rows.unbind(0)):
        texts = ROWS[i // G]["solution"]
        texts = [texts] if isinstance(texts, str) else texts or []
        action = row[keys.ACTION_MASK]
        if int(row[keys.ORIGIN]) == keys.SAMPLED:
            continue
        messages = [*row[keys.QUERY], {"role": "assistant", "content": texts[i % G]}]
        ids, mask = encode_conversation(tokenizer, messages)
        end = len(mask) - mask[::-1].index(True)
        whole, length = ids[:end], len(row[keys.TOKENS])
        assert row[keys.TOKENS].tolist() == whole[:length] and row[keys.ACTION_MASK].tolist() == mask[:length]
        assert bool(row[keys.TRUNCATED]) == (length < len(whole)) and int(action.sum()) <= SETTINGS["max_new_tokens"]
        assert not row[keys.LOG_PROBS].any()
        assert row[keys.COMPLETION][-1]["content"] == texts[i % G] or length < len(whole)
        assert row[keys.REWARD].item() == float("boxed" in row[keys.COMPLETION][-1]["content"])
    advantages = MCAdvantage(G).inv(rows)[keys.ADVANTAGE].reshape(4, G)
    torch.testing.assert_close(advantages.sum(1), torch.zeros(4))
    returns = rows[keys.REWARD].reshape(4, G)
    torch.testing.assert_close(advantages, returns - (returns.sum(1, keepdim=True) - returns) / (G - 1))


@pytest.mark.parametrize(("surrogate", "gamma"), [({"name": "shaping", "gamma": 0.3}, 0.3), ("unclipped", None)])
def test_the_loss_shapes_the_demonstrations_and_clips_the_rest(model, tokenizer, surrogate, gamma):
    rows = MCAdvantage(G).inv(collect(model, tokenizer, demonstrations="solution"))
    for i, row in enumerate(rows.unbind(0)):  # the built-in model may solve nothing
        row.set(keys.ADVANTAGE, torch.tensor([[(-1.0) ** i * (1 + i % 3)]]))
    scorer = TransformersWrapper(model, tokenizer=tokenizer, generate=False)
    settings = {"ratio": "token", "surrogate": {"name": "clip", "low": 0.2}, "aggregation": "token_mean"}
    out = RLOOLoss(scorer, **settings, demonstration_surrogate=surrogate)(rows)
    with torch.no_grad():
        scored = scorer.score(rows).log_probs.double()
    total, count = 0.0, 0
    for i, row in enumerate(rows.unbind(0)):
        advantage, action = row[keys.ADVANTAGE].item(), row[keys.ACTION_MASK]
        for new, old in zip(scored[i].tolist(), row[keys.LOG_PROBS][action].tolist(), strict=False):
            ratio = torch.tensor(new - old).exp().item()
            if int(row[keys.ORIGIN]) == keys.DEMONSTRATION:
                total -= (ratio if gamma is None else ratio / (ratio + gamma)) * advantage
            else:
                total -= min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
            count += 1
    assert out.loss.item() == pytest.approx(total / count, rel=1e-5)
    assert out.log_ratio_max.item() < 1e-4 and out.ESS.item() == pytest.approx(1.0, abs=1e-5)  # of the sampled rows


@pytest.mark.parametrize(
    ("guides", "message"),
    [
        ({"demonstrations": "answer"}, "demonstrations='answer' must be one of the columns"),
        ({"greedy_member": True, "num_generations": 1}, "num_generations=1 leaves no sampled member"),
    ],
)
def test_guides_that_cannot_be_followed_are_refused(tokenizer, guides, message):
    with pytest.raises(ValueError, match=message):
        DatasetChatEnv(load_prompts(ROWS), tokenizer, prompts_per_batch=2, **{"num_generations": 2} | guides)
