"""Engine with scripted turns: exact log-probs, weight updates, limits."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import stack_rows
from torchrl_rloo.diagnostics import self_test
from torchrl_rloo.embedded import build_model
from torchrl_rloo.engines import Request
from torchrl_rloo.engines.scripted import ScriptedModelEngine
from torchrl_rloo.functional.sampling import SamplingDistribution
from torchrl_rloo.modules import TransformersWrapper
from torchrl_rloo.weight_update import WeightPublisher

TURNS = {(5, 6, 7): [[8, 9, 2], [10, 2]], (6,): [[11, 12, 13, 14, 2]]}


@pytest.fixture
def engine(tokenizer):
    return ScriptedModelEngine(build_model(tokenizer, seed=3).eval(), tokenizer, turns=TURNS, default=[[20, 2]])


def test_turns_are_played_by_prompt_seed_and_limit(engine):
    requests = [
        Request([5, 6, 7], 9, seed=0),
        Request([5, 6, 7], 9, seed=3),
        Request([6], 2, seed=1),
        Request([9], 9, 0),
    ]
    played = engine.generate(requests)
    assert [sample.tokens for sample in played] == [[8, 9, 2], [10, 2], [11, 12], [20, 2]]
    assert [sample.finish for sample in played] == ["stop", "stop", "length", "stop"]


def test_log_probs_are_those_of_the_model(engine, tokenizer):
    distribution = SamplingDistribution(temperature=0.7, top_k=40)
    requests = [Request([5, 6, 7], 9, 0, distribution), Request([6], 9, 0, distribution)]
    rows = []
    for request, sample in zip(requests, engine.generate(requests), strict=True):
        tokens = torch.tensor([*request.prompt, *sample.tokens])
        mask = torch.arange(len(tokens)) >= len(request.prompt)
        rows.append(TensorDict({keys.TOKENS: tokens, keys.ACTION_MASK: mask}, []))
    played = [p for sample in engine.generate(requests) for p in sample.log_probs]
    settings = {"temperature": 0.7, "top_k": 40}
    scorer = TransformersWrapper(engine.model, tokenizer=tokenizer, generate=False, generate_kwargs=settings)
    scored = scorer.score(stack_rows(rows))
    torch.testing.assert_close(torch.tensor(played), scored.log_probs[scored.actions.mask].detach())
    greedy = SamplingDistribution(temperature=0.0)
    assert engine.generate([Request([6], 9, 0, greedy)])[0].log_probs == [0.0] * 5


def test_weights_arrive(engine, tokenizer):
    model = build_model(tokenizer, seed=0).eval()
    result = self_test(WeightPublisher(model, engine), model, tokenizer, engine)
    assert result.gap_changed < 1e-4 < 0.1 < result.movement


def test_a_script_without_turns_is_refused(model):
    for turns, default in (({}, []), ({(1,): []}, [[1]]), ({}, [[]])):
        with pytest.raises(ValueError, match="at least one turn each"):
            ScriptedModelEngine(model, turns=turns, default=default)
