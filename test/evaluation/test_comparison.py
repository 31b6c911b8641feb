"""Comparison of two evaluations of the same prompts."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace

import pytest

from torchrl_rloo.evaluation.comparison import compare
from torchrl_rloo.evaluation.result import EvaluatedSample, EvaluationResult, EvaluationSettings
from torchrl_rloo.evaluation.statistics import mcnemar_test

SIGNS = list(itertools.product((-1, 1), repeat=3))
SETTINGS = EvaluationSettings(("right", "short"), num_samples=4, ks=(4,), generate_kwargs={"temperature": 1.0})


def evaluated(skill: float, seed: int = 0, prompts: int = 40, **changes) -> EvaluationResult:
    """Return an evaluation of a policy with the given probability of a correct answer."""
    rng, samples = random.Random(seed), []
    for prompt in range(prompts):
        for sample in (None, 0, 1, 2, 3):
            right = float(rng.random() < skill)
            scores = {"right": right, "short": rng.random()}
            text = f"{prompt} {sample} {right}"
            samples.append(EvaluatedSample(prompt, sample, f"prompt {prompt}", text, scores, extracted=str(right)))
    return EvaluationResult(samples, replace(SETTINGS, **changes))


def test_each_metric_is_tested_prompt_by_prompt():
    first, second = evaluated(0.3, label="base"), evaluated(0.8, seed=1, label="trained")
    found = compare(first, second)
    assert list(found.metrics) == list(first.values)
    greedy = found.metrics["greedy"]
    gained = [i for i in range(40) if second.values["greedy"][i] > first.values["greedy"][i]]
    assert list(greedy.improved_ids) == gained and greedy.test.better == len(gained) and greedy.prompts == 40
    assert greedy.test.p_value == mcnemar_test(len(greedy.improved_ids), len(greedy.worsened_ids)) < 0.01
    assert greedy.test.difference == pytest.approx(greedy.second.mean - greedy.first.mean)
    assert found.metrics["short/avg@4"].test.low < 0 < found.metrics["short/avg@4"].test.high
    assert found.metrics["sampled"].test.low > 0.2  # four samples per prompt give a narrower interval than one
    back = compare(second, first).metrics["greedy"]
    assert (back.improved_ids, back.worsened_ids) == (greedy.worsened_ids, greedy.improved_ids)
    assert back.test.p_value == greedy.test.p_value


def test_the_same_result_does_not_differ_from_itself():
    first = evaluated(0.5)
    for metric in compare(first, first).metrics.values():
        assert (metric.test.difference, metric.test.p_value) == (0.0, 1.0)
        assert (metric.improved_ids, metric.worsened_ids) == ((), ())
    assert compare(first, first).labels == ("first", "second")


def test_table_and_changed_prompts_read_well():
    found = compare(evaluated(0.3, label="base"), evaluated(0.8, seed=1, label="base"))
    lines = found.table().splitlines()
    assert len(lines) == 2 + len(found.metrics) and len({len(line) for line in lines}) == 1
    assert "base (1)" in lines[0] and "base (2)" in lines[0] and set(lines[1]) == {"|", "-"}
    flipped, greedy = found.changed_prompts(), found.metrics["greedy"]
    assert [f["prompt_id"] for f in flipped] == [*greedy.improved_ids, *greedy.worsened_ids]
    assert flipped[0]["change"] == 1.0 and flipped[-1]["change"] == -1.0
    assert flipped[0]["first"].endswith("None 0.0") and flipped[0]["second"].endswith("None 1.0")
    assert found.changed_prompts("sampled")[0]["second"].split()[1] == "0"
    with pytest.raises(KeyError, match="metric='speed' must be one of"):
        found.changed_prompts("speed")
    assert json.loads(json.dumps(found.to_dict()))["metrics"]["greedy"]["p_value"] == greedy.test.p_value


def test_saved_results_can_be_compared(tmp_path):
    first, second = evaluated(0.3), evaluated(0.8, seed=1)
    loaded = [EvaluationResult.load(r.save(tmp_path / str(i))) for i, r in enumerate((first, second))]
    assert compare(*loaded).table() == compare(first, second).table()
    stops = {"generate_kwargs": {"stop_token_ids": (1, 2)}}  # a tuple, which a file returns as a list
    first = evaluated(0.3, **stops)
    loaded = EvaluationResult.load(first.save(tmp_path / "again"))
    assert not compare(loaded, evaluated(0.3, **stops)).differing_settings


def test_means_of_three_samples_that_are_equally_far_apart_tie():
    """Thirds in float32 would break ties of sign patterns and make p-values too small."""

    def thirds(*right: int) -> EvaluationResult:
        scores = [(i, k, {"right": float(k < n)}) for i, n in enumerate(right) for k in range(3)]
        samples = [EvaluatedSample(i, k, f"prompt {i}", "", scores) for i, k, scores in scores]
        return EvaluationResult(samples, EvaluationSettings(("right",), num_samples=3, greedy=False))

    prompts = itertools.product(range(3), repeat=2)  # scores of a prompt's samples in the two evaluations
    for pairs in itertools.combinations_with_replacement(prompts, 3):  # the order of prompts does not matter
        first, second = zip(*pairs, strict=True)
        found = compare(thirds(*first), thirds(*second)).metrics["sampled"].test
        steps = [b - a for a, b in zip(first, second, strict=True)]
        signed = [abs(sum(s * d for s, d in zip(signs, steps, strict=True))) for signs in SIGNS]
        assert found.p_value == sum(value >= abs(sum(steps)) for value in signed) / len(SIGNS), (first, second)
        assert found.difference == pytest.approx(sum(steps) / 9, abs=1e-12)


def test_other_prompts_are_refused():
    first = evaluated(0.5)
    with pytest.raises(ValueError, match="40 and 39 prompts, and only one has 1 of them, e.g. prompt_id=39"):
        compare(first, evaluated(0.5, prompts=39))
    other = EvaluationResult([replace(s, prompt=s.prompt + "!" * (s.prompt_id == 7)) for s in first.samples], SETTINGS)
    with pytest.raises(ValueError, match="prompt_id=7 is 'prompt 7' in the first evaluation and 'prompt 7!'"):
        compare(first, other)


def test_other_settings_are_refused_unless_asked_for():
    first, hot = evaluated(0.5), evaluated(0.6, seed=1, generate_kwargs={"temperature": 2.0})
    with pytest.raises(ValueError, match=r"differ in generate_kwargs: \{'temperature': 1.0\} and \{'temperature': 2.0"):
        compare(first, hot)
    found = compare(first, hot, same_settings=False)
    assert "note: generate_kwargs differs" in found.table().splitlines()[-1]
    more = evaluated(0.6, seed=1, ks=(2, 4))
    assert set(compare(first, more).metrics) == set(first.values)  # only shared metrics


def test_metrics_must_be_of_the_same_prompts_in_both():
    first, second = evaluated(0.3), evaluated(0.5)
    for changed in (first, second):
        values = {name: dict(by_prompt) for name, by_prompt in changed.values.items()}
        del values["greedy"][next(iter(values["greedy"]))]
        changed.__dict__["values"] = values
        with pytest.raises(ValueError, match="metric='greedy' has 1 prompts in one evaluation only, e.g. prompt_id="):
            compare(first, second)
        del changed.__dict__["values"]
    assert compare(first, second).metrics


def test_the_saved_comparison_has_the_names_of_the_attributes():
    found = compare(evaluated(0.3), evaluated(0.5))
    saved = found.to_dict()
    assert set(saved) == {"labels", "differing_settings", "metrics"}
    greedy = found.metrics["greedy"]
    names = ("improved_ids", "worsened_ids")
    assert [saved["metrics"]["greedy"][name] for name in names] == [list(getattr(greedy, name)) for name in names]
