"""Evaluation: own scorer, own random numbers, every prompt once."""

from __future__ import annotations

import pytest
import torch

from torchrl_rloo.data import load_prompts
from torchrl_rloo.diagnostics import Evaluation, completion_table
from torchrl_rloo.embedded import addition_prompts, build_model, build_tokenizer
from torchrl_rloo.modules import TransformersWrapper
from torchrl_rloo.rewards import boxed_accuracy


def make(scorer, **kwargs):
    tokenizer = build_tokenizer()
    policy = TransformersWrapper(
        build_model(tokenizer, seed=0).eval(), tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 3, "seed": 5}
    )
    return policy, Evaluation(policy, load_prompts(addition_prompts("test", size=7)), scorer, **kwargs)


def test_scores_every_prompt_once_with_its_columns():
    seen = []

    def scorer(prompts, completions, completion_ids, answer):
        seen.extend(answer)
        return [float(i % 2) for i in range(len(answer))]

    _, evaluate = make(scorer, batch_size=4)
    metrics, table = evaluate()
    answers = [row["answer"] for row in addition_prompts("test", size=7)]
    assert seen == answers * 2  # greedy, then sampled
    assert metrics == {"eval/greedy": 3 / 7, "eval/sampled": 3 / 7}
    assert [row["answer"] for row in table] == answers
    assert {"prompt", "completion", "reward", "truncated"} <= table[0].keys() and "What is" in table[0]["prompt"]


def test_abstentions_count_as_wrong():
    def scorer(prompts, completions, **columns):
        return [None] + [1.0] * (len(completions) - 1)

    _, evaluate = make(scorer)
    assert abs(evaluate()[0]["eval/greedy"] - 6 / 7) < 1e-6


def test_touches_no_random_stream_and_repeats_itself():
    policy, evaluate = make(boxed_accuracy)
    before, stream = torch.get_rng_state(), policy.generator.get_state()
    first = evaluate()
    assert evaluate() == first
    assert torch.equal(torch.get_rng_state(), before) and torch.equal(policy.generator.get_state(), stream)


def test_follows_the_policy_weights():
    policy, evaluate = make(lambda prompts, completions, completion_ids, **_: [float(ids[0]) for ids in completion_ids])
    before = evaluate()[0]["eval/greedy"]
    with torch.no_grad():
        policy.model.get_output_embeddings().weight.normal_(std=3.0)
    assert evaluate()[0]["eval/greedy"] != before


def test_table_of_text_completions():
    policy, _ = make(boxed_accuracy)
    from torchrl_rloo.collectors import LLMCollector
    from torchrl_rloo.envs import DatasetChatEnv

    data = load_prompts([{"prompt": "one", "n": 1}, {"prompt": "two", "n": 2}], chat=False)
    env = DatasetChatEnv(data, policy.tokenizer, prompts_per_batch=2, rewards=lambda **kw: [0.5, None], shuffle=False)
    table = completion_table(LLMCollector(env, policy).collect(), limit=1)
    assert len(table) == 1 and table[0]["prompt"] == "one" and table[0]["n"] == 1 and table[0]["reward"] == 0.5


def test_a_broken_scorer_ends_the_evaluation():
    def broken(prompts, completions, **columns):
        raise OSError("no such judge")

    _, evaluate = make(broken)
    with pytest.raises(RuntimeError, match="broken.*no such judge"):
        evaluate()


def test_a_policy_without_a_seed_keeps_the_global_stream():
    policy, _ = make(boxed_accuracy)
    free = policy.get_new_version(generate_kwargs={"max_new_tokens": 3, "do_sample": True})
    before = torch.get_rng_state()
    Evaluation(free, load_prompts(addition_prompts("test", size=3)), boxed_accuracy)()
    assert torch.equal(torch.get_rng_state(), before)
