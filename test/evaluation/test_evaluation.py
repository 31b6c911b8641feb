"""Evaluation: separate scorers and random numbers, N samples of every prompt, any environment."""

from __future__ import annotations

import json
import time
from collections import Counter
from statistics import fmean, stdev

import pytest
import torch

from torchrl_rloo.data import load_prompts
from torchrl_rloo.embedded import addition_prompts, build_model, build_tokenizer
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.envs.transforms import FeedbackTransform
from torchrl_rloo.evaluation.evaluation import Evaluation, completion_table
from torchrl_rloo.evaluation.result import EvaluationResult
from torchrl_rloo.evaluation.statistics import maj_at_k, mean_interval, pass_at_k
from torchrl_rloo.modules import TransformersWrapper
from torchrl_rloo.rewards import boxed_accuracy
from torchrl_rloo.rewards.executors import ThreadExecutor
from torchrl_rloo.rewards.matching import final_answer

ENDS = ("low", "high", "length", "clipped_ratio", "min_length", "max_length")
ENDS += tuple(f"{which}_terminated_length" for which in ("mean", "min", "max"))


def make(scorers, size=7, rows=None, **kwargs):
    tokenizer = build_tokenizer()
    policy = TransformersWrapper(
        build_model(tokenizer, seed=0).eval(), tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 3, "seed": 5}
    )
    return policy, Evaluation(policy, load_prompts(rows or addition_prompts("test", size=size)), scorers, **kwargs)


def first_id(prompts, completions, completion_ids, **columns):
    """Score a completion by its first id, to distinguish random completions."""
    return [float(ids[0]) for ids in completion_ids]


def odd(prompts, completions, completion_ids, **columns):
    """Score 1 for about half of the completions."""
    return [float(ids[0] % 2) for ids in completion_ids]


def test_scores_every_prompt_once_with_its_columns():
    seen = []

    def scorer(prompts, completions, completion_ids, answer):
        seen.extend(answer)
        return [float(i % 2) for i in range(len(answer))]

    _, evaluate = make(scorer, batch_size=4)
    metrics, table = evaluate()
    answers = [row["answer"] for row in addition_prompts("test", size=7)]
    assert seen == answers * 2  # greedy, then sampled
    assert metrics["eval/greedy"] == pytest.approx(3 / 7) and metrics["eval/sampled"] == pytest.approx(4 / 7)
    ends = {f"eval/{name}_{end}" for name in ("greedy", "sampled") for end in ENDS}
    counts = {"eval/failed", "eval/abstained"}
    assert metrics.keys() == {"eval/greedy", "eval/sampled", "eval/sampled_entropy"} | counts | ends
    assert metrics["eval/greedy_low"] == mean_interval(torch.tensor([0, 1, 0, 1, 0, 1, 0.0])).low
    assert [row["answer"] for row in table] == answers
    assert {"prompt", "completion", "reward", "truncated"} <= table[0].keys() and "What is" in table[0]["prompt"]


def test_abstentions_count_as_wrong():
    def scorer(prompts, completions, **columns):
        return [None] + [1.0] * (len(completions) - 1)

    _, evaluate = make(scorer)
    metrics, table = evaluate()
    assert abs(metrics["eval/greedy"] - 6 / 7) < 1e-6 and metrics["eval/failed"] == 0
    assert table[0]["reward"] != table[0]["reward"]  # NaN: it has no return


def test_metrics_of_several_samples_are_those_of_training():
    """As ``completions/*``, ``reward_std`` and ``frac_reward_zero_std``, by plain loops."""

    def rare(completion_ids, **columns):
        return [float(ids[0] % 3 == 0) for ids in completion_ids]

    _, evaluate = make(rare, num_samples=3, size=9)
    result = evaluate.run()
    metrics, samples = result.metrics, [s for s in result.samples if s.sample is not None]
    lengths, ended = [s.tokens for s in samples], [s.tokens for s in samples if not s.truncated] or [0]
    expected = {"min_length": min(lengths), "max_length": max(lengths), "mean_terminated_length": fmean(ended)}
    expected |= {"min_terminated_length": min(ended), "max_terminated_length": max(ended)}
    groups = [{s.scores["rare"] for s in samples if s.prompt_id == prompt} for prompt in range(9)]
    expected |= {"reward_std": stdev(s.scores["rare"] for s in samples)}
    expected |= {"frac_reward_zero_std": fmean(len(scores) == 1 for scores in groups)}
    assert {name: metrics[f"eval/sampled_{name}"] for name in expected} == pytest.approx(expected, rel=1e-6)
    assert 0 < expected["frac_reward_zero_std"] < 1 and metrics["eval/sampled_length"] == fmean(lengths)


def test_touches_no_random_stream_and_repeats_itself():
    policy, evaluate = make(first_id)
    before, stream = torch.get_rng_state(), policy.generator.get_state()
    first = evaluate()
    assert evaluate() == first
    assert torch.equal(torch.get_rng_state(), before) and torch.equal(policy.generator.get_state(), stream)


def test_samples_depend_on_the_seed_alone():
    def sampled(**kwargs):
        return [(s.prompt_id, s.sample, s.completion, s.seed) for s in make(first_id, **kwargs)[1].run().samples]

    whole = sampled(num_samples=3, greedy=False)
    assert sampled(num_samples=3, greedy=False, batch_size=4) == whole
    assert [s for s in whole if s[1] < 2] == sampled(num_samples=2, greedy=False)
    assert len({s[2] for s in whole if s[0] == 0}) > 1 and len({s[3] for s in whole}) == len(whole)
    other = sampled(num_samples=3, greedy=False, seed=1)
    assert other != whole and [s[:2] for s in other] == [s[:2] for s in whole]


def test_follows_the_policy_weights():
    policy, evaluate = make(first_id)
    before = evaluate()[0]["eval/greedy"]
    with torch.no_grad():
        policy.model.get_output_embeddings().weight.normal_(std=3.0)
    assert evaluate()[0]["eval/greedy"] != before


def test_groups_give_pass_and_maj_at_k_of_every_scorer():
    _, evaluate = make(
        {"odd": odd, "first": first_id}, num_samples=4, ks=(1, 2, 4), extract=lambda text: text[:1] or None
    )
    result = evaluate.run()
    names = ["greedy", "sampled"] + [f"odd/{m}" for m in ("pass@1", "pass@2", "pass@4", "maj@2", "maj@4")]
    names += [f"first/{m}" for m in ("greedy", "avg@4", "pass@1", "pass@2", "pass@4", "maj@2", "maj@4")]
    assert list(result.values) == names
    for i in range(7):
        group = [s for s in result.samples if s.prompt_id == i and s.sample is not None]
        right = [s.scores["odd"] for s in group]
        votes = [s.completion.removeprefix("assistant: ")[:1] or None for s in group]
        assert [s.sample for s in group] == [0, 1, 2, 3] and [s.extracted for s in group] == votes
        assert result.values["sampled"][i] == result.values["odd/pass@1"][i] == sum(right) / 4
        assert result.values["odd/pass@2"][i] == pytest.approx(pass_at_k(torch.tensor([sum(right)]), 4, 2).item())
        assert result.values["odd/maj@2"][i] == pytest.approx(maj_at_k(votes, right, 2))
        assert result.values["first/pass@4"][i] == max(s.scores["first"] for s in group)
    for name, of_prompt in result.values.items():
        mean = sum(of_prompt.values()) / 7
        low, value, high = (result.metrics[f"eval/{name}{end}"] for end in ("_low", "", "_high"))
        assert value == pytest.approx(mean) and low <= value <= high and low < high
    assert 0 < result.metrics["eval/sampled"] < result.metrics["eval/odd/pass@4"]


def test_own_sampling_and_no_greedy_completions():
    _, evaluate = make(first_id, num_samples=2, greedy=False, generate_kwargs={"max_new_tokens": 6, "top_k": 1})
    result = evaluate.run()
    assert {s.sample for s in result.samples} == {0, 1} and "eval/greedy" not in result.metrics
    assert max(s.tokens for s in result.samples) == 6
    assert all(len({s.completion for s in result.samples if s.prompt_id == i}) == 1 for i in range(7))  # top_k 1
    assert len(result.table(limit=5)) == 5
    _, only_greedy = make(first_id, num_samples=0)
    counts = {"eval/failed", "eval/abstained"}
    assert only_greedy()[0].keys() == {"eval/greedy"} | {f"eval/greedy_{end}" for end in ENDS} | counts


def test_tasks_of_a_mixture_have_metrics_of_their_own():
    rows = [row | {"task": ("sums", "more")[i > 4]} for i, row in enumerate(addition_prompts("test", size=7))]
    _, evaluate = make(odd, rows=rows)
    result = evaluate.run()
    assert list(result.values["tasks/more/sampled"]) == [5, 6] and len(result.values["tasks/sums/greedy"]) == 5
    parts = 5 * result.metrics["eval/tasks/sums/sampled"] + 2 * result.metrics["eval/tasks/more/sampled"]
    assert parts / 7 == pytest.approx(result.metrics["eval/sampled"])
    _, one = make(odd, rows=[row | {"task": "sums"} for row in rows])
    assert not [name for name in one()[0] if "tasks" in name]


def test_an_environment_of_several_turns(prompts, bpe, random_model):
    """Scores are its return and those of a scorer."""
    policy = TransformersWrapper(random_model, tokenizer=bpe, generate_kwargs={"max_new_tokens": 64, "seed": 0})

    def feedback(conversation, row):
        taken = sum(m["role"] == "assistant" for m in conversation)
        return [{"role": "user", "content": "Sure?"}] if taken < row["turns"] else None

    def reward(prompts, completions, turns):
        return [float(n) for n in turns]

    arguments = {
        "make_transforms": lambda: [FeedbackTransform(feedback, max_turns=5)],
        "env_kwargs": {"rewards": reward},
    }
    scorers = {"return": None, "odd": odd}
    result = Evaluation(policy, prompts, scorers, num_samples=2, batch_size=3, **arguments).run()
    turns = {i: row["turns"] for i, row in enumerate(prompts)}
    assert result.values["greedy"] == result.values["sampled"] == turns
    assert all(s.completion.count("assistant:") == turns[s.prompt_id] for s in result.samples)
    assert all(s.prompt == f"user: {prompts[s.prompt_id]['query'][0]['content']}" for s in result.samples)


def test_table_of_text_completions():
    policy, _ = make(boxed_accuracy)
    from torchrl_rloo.collectors import LLMCollector

    def half(completions, **columns):
        return [0.5] * len(completions)

    data = load_prompts([{"prompt": "one", "n": 1}, {"prompt": "two", "n": 2}], chat=False)
    env = DatasetChatEnv(data, policy.tokenizer, prompts_per_batch=2, rewards=half, shuffle=False)
    table = completion_table(LLMCollector(env, policy).collect(), limit=1)
    assert len(table) == 1 and table[0]["prompt"] == "one" and table[0]["n"] == 1 and table[0]["reward"] == 0.5


def test_a_broken_scorer_ends_the_evaluation():
    def broken(prompts, completions, **columns):
        raise OSError("no such judge")

    _, evaluate = make(broken)
    with pytest.raises(RuntimeError, match="(?s)broken failed on all 14 completions.*no such judge"):
        evaluate()


def test_a_scorer_that_fails_on_some_loses_their_scores():
    def sometimes(prompts, completions, completion_ids, answer):
        if addition_prompts("test", size=7)[2]["answer"] in answer:
            raise ValueError("not this one")
        return [1.0] * len(answer)

    _, evaluate = make(sometimes, batch_size=1)
    result = evaluate.run()
    same = Counter(row["answer"] for row in addition_prompts("test", size=7))
    assert max(same.values()) == 1
    assert result.metrics["eval/failed"] == 2 and result.metrics["eval/greedy"] == pytest.approx(6 / 7)
    assert [s.scores["sometimes"] for s in result.samples[:3]] == [1.0, 1.0, None]
    assert "scorer sometimes failed on 2" in result.summary()


def test_a_scorer_that_hangs_costs_one_score():
    answer = addition_prompts("test", size=7)[2]["answer"]

    def hangs(prompts, completions, completion_ids, **columns):
        if answer in columns["answer"]:
            time.sleep(20)
        return [1.0] * len(completions)

    _, evaluate = make(hangs, num_samples=0, executor=ThreadExecutor(timeout=0.3))
    metrics, _ = evaluate()
    assert metrics["eval/failed"] == 1 and metrics["eval/greedy"] == pytest.approx(6 / 7)


def test_extraction_that_fails_is_no_vote():
    def extract(text):
        raise KeyError("box")

    _, evaluate = make(odd, num_samples=2, ks=[2], extract=extract)
    result = evaluate.run()
    assert {s.extracted for s in result.samples} == {None} and result.metrics["eval/odd/maj@2"] == 0.0
    _, no_votes = make(odd, num_samples=2, ks=[2], extract=None)
    assert "eval/odd/maj@2" not in no_votes()[0]


def test_a_policy_without_a_seed_keeps_the_global_stream():
    policy, _ = make(boxed_accuracy)
    free = policy.get_new_version(generate_kwargs={"max_new_tokens": 3, "do_sample": True})
    before = torch.get_rng_state()
    Evaluation(free, load_prompts(addition_prompts("test", size=3)), boxed_accuracy)()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_saved_and_loaded_it_is_the_same(tmp_path, format):
    rows = [row | {"task": ("sums", "more")[i % 2], "n": [i, None]} for i, row in
            enumerate(addition_prompts("test", size=5))]  # fmt: skip

    def gaps(prompts, completions, completion_ids, n, **columns):
        if any(i == 3 for i, _ in n):
            raise ValueError("three")
        return [None if i == 1 else 0.1 * i for i, _ in n]

    _, evaluate = make({"odd": odd, "gaps": gaps}, rows=rows, num_samples=2, ks=[2], label="base")
    result = evaluate.run()
    directory = result.save(tmp_path / "new" / "result", format=format)
    loaded = EvaluationResult.load(directory)
    assert loaded.samples == result.samples and loaded.settings == result.settings
    assert (
        loaded.metrics == result.metrics and loaded.values == result.values and loaded.failed == {"odd": 0, "gaps": 3}
    )
    assert loaded.abstained == {"odd": 0, "gaps": 3} and loaded.metrics["eval/abstained"] == 3
    assert "scorer gaps failed on 3" in loaded.summary() and "scorer gaps abstained on 3" in loaded.summary()
    recorded = json.loads((directory / "evaluation.json").read_text())
    assert recorded["metrics"]["eval/sampled"] == result.metrics["eval/sampled"]
    assert recorded["settings"]["generate_kwargs"] == {"max_new_tokens": 3}
    other = "jsonl" if format == "parquet" else "parquet"
    result.save(directory, format=other)
    assert [p.suffix for p in directory.glob("samples.*")] == [f".{other}"]
    assert EvaluationResult.load(directory).metrics == result.metrics


def test_a_parquet_table_is_one_of_plain_columns(tmp_path):
    import pyarrow.parquet

    _, evaluate = make(odd, size=3)
    evaluate.run().save(tmp_path)
    table = pyarrow.parquet.read_table(tmp_path / "samples.parquet").to_pydict()
    assert table["prompt_id"] == [0, 1, 2] * 2 and table["sample"] == [None] * 3 + [0] * 3
    assert json.loads(table["columns"][0])["answer"] == addition_prompts("test", size=3)[0]["answer"]
    assert set(table["score/odd"]) <= {0.0, 1.0} and all(table["truncated"])


def test_nothing_is_loaded_of_an_unfinished_evaluation(tmp_path):
    with pytest.raises(FileNotFoundError, match="has no evaluation.json"):
        EvaluationResult.load(tmp_path)
    _, evaluate = make(odd, size=2)
    with pytest.raises(ValueError, match="format='csv' must be one of"):
        evaluate.run().save(tmp_path, format="csv")


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"num_samples": -1}, "num_samples=-1 must be at least 0"),
        ({"num_samples": 0, "greedy": False}, "num_samples=0 must be at least 1"),
        ({"num_samples": 4, "ks": (1, 8)}, r"must be between 1 and num_samples=4, got \[8\]"),
        (
            {"num_samples": 2, "generate_kwargs": {"temperature": 0}},
            "temperature=0 cannot be combined with num_samples=2",
        ),
        ({"scorers": {}}, "scorers is empty"),
        ({"scorers": {"a/b": odd}}, r"scorer names \['a/b'\] clash"),
        ({"scorers": "numeric_matchh"}, "did you mean 'numeric_match'"),
        (
            {"scorers": {"a": odd, "b": "boxed_accuracy"}, "rows": [{"prompt": "Hi", "gold": "1"}]},
            r"scorer boxed_accuracy requires \['answer'\], which the dataset does not have: its columns are \['gold'\]",
        ),
    ],
)
def test_what_does_not_fit_is_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        make(kwargs.pop("scorers", odd), **kwargs)


def test_unknown_sampling_arguments_are_refused_at_once():
    with pytest.raises(TypeError, match="top_q"):
        make(odd, generate_kwargs={"top_q": 1})


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{3}, no: \boxed{1,234.50}", "2469/2"),
        (r"\boxed{\frac{1}{2}}", "1/2"),
        (r"\boxed{ \frac{1}{2} }. So 7.", "1/2"),
        (r"\boxed{-0}", "0"),
        (r"\boxed{}", None),
        ("2 + 2 is 5.\nNo, it is 4.\n\n", "4"),
        ("it costs $1,000,000", "1000000"),
        ("100", "100"),
        ("Answer: (B)", "answer:(b)"),
        (" \n ", None),
        ("", None),
    ],
)
def test_final_answers(text, answer):
    assert final_answer(text) == answer


def test_samples_have_entropy_kl_and_diversity_that_survive_a_file(tmp_path):
    """Entropy and KL agree with sums over the rows, and the diversity with a count by hand."""
    policy = make(odd)[0]
    reference = TransformersWrapper(
        build_model(policy.tokenizer, seed=1).eval(),
        tokenizer=policy.tokenizer,
        generate=False,
        generate_kwargs={"max_new_tokens": 3, "seed": 5},
    )
    evaluate = make(odd, size=3, num_samples=3, reference=reference, extract=lambda text: text[:1])[1]
    result = evaluate.run(keep_rows=True)
    rows = result.rows[3:]  # the greedy ones come first
    masks = [row["masks", "all_assistant_mask"] for row in rows]
    tokens = sum(int(mask.sum()) for mask in masks)
    sampled = [row["log_probs", "full"][mask] for row, mask in zip(rows, masks, strict=True)]
    expected = [row["next", "ref_log_probs", "full"][mask] for row, mask in zip(rows, masks, strict=True)]
    metrics = result.metrics
    assert metrics["eval/sampled_entropy"] == pytest.approx(-sum(float(s.sum()) for s in sampled) / tokens)
    kl = sum(float((s - e).sum()) for s, e in zip(sampled, expected, strict=True)) / tokens
    assert metrics["eval/sampled_kl"] == pytest.approx(kl, abs=1e-6) and abs(kl) > 1e-4
    groups = [[s for s in result.samples if s.prompt_id == i and s.sample is not None] for i in range(3)]
    for name, texts in (("distinct", lambda s: s.completion), ("distinct_answers", lambda s: s.extracted)):
        share = sum((len({texts(s) for s in group}) - 1) / 2 for group in groups) / 3
        assert metrics[f"eval/sampled_{name}"] == pytest.approx(share)
    assert 0 <= metrics["eval/sampled_ngram_overlap"] <= 1 and "sampled_kl" in result.summary()
    for format in ("parquet", "jsonl"):
        assert EvaluationResult.load(result.save(tmp_path, format=format)).metrics == metrics
    assert result.metrics_of_set("hard")["eval/hard/sampled_kl"] == metrics["eval/sampled_kl"]


def test_a_reference_of_another_distribution_is_refused():
    policy = make(odd)[0]
    hot = policy.get_new_version(generate=False, generate_kwargs={"temperature": 0.5})
    with pytest.raises(ValueError, match="give both the same sampling settings"):
        make(odd, reference=hot)
