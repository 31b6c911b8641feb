"""vLLMWrapper: turns aborted by a pause, dead engines, and the version that sampled each token."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from threading import Lock

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.modules.llm.policies import LogProbs, Masks, Tokens

from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import encode_prompt, keys
from torchrl_rloo.data.rows import ragged, stack_rows
from torchrl_rloo.embedded import build_model
from torchrl_rloo.engines.base import Engine, EngineError, Request, Sample
from torchrl_rloo.engines.scripted import ScriptedEngine, ScriptedTurn
from torchrl_rloo.engines.transformers_engine import TransformersEngine
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.envs.transforms import FeedbackTransform
from torchrl_rloo.functional.sampling import SamplingDistribution
from torchrl_rloo.modules import TransformersWrapper, vLLMWrapper
from torchrl_rloo.weight_update.protocol import TensorInfo
from torchrl_rloo.weight_update.protocol import xxh3 as checksum

LIMIT = 12
G = 2  # number of members in a group
IDS = [[5, 6, 7], [40], [30, 31, 32, 33, 34], [8, 9]]


class CuttingEngine(TransformersEngine):
    """Engine that aborts real turns as a pause would, with a new version after every call.

    Args:
        cuts: tokens kept of each turn, per call; None keeps the whole turn.
    """

    def __init__(self, model, tokenizer, cuts: Sequence[Sequence[int | None]] = ()):
        super().__init__(model, tokenizer)
        self.cuts, self.calls = list(cuts), []

    def generate(self, requests: Sequence[Request]) -> list[Sample]:
        samples = super().generate(requests)
        cuts = self.cuts[len(self.calls)] if len(self.calls) < len(self.cuts) else [None] * len(samples)
        self.calls.append(list(requests))
        self.version += 1
        return [
            s if n is None else Sample(s.tokens[:n], s.log_probs[:n], "abort", s.versions[:n])
            for s, n in zip(samples, cuts, strict=True)
        ]


@pytest.fixture
def make_policy(tokenizer) -> Callable[..., vLLMWrapper]:
    def make(engine: Engine, *, num_samples: int | None = None, **kwargs) -> vLLMWrapper:
        kwargs = {"max_new_tokens": LIMIT, "seed": 0, **kwargs}
        return vLLMWrapper(engine, tokenizer=tokenizer, generate_kwargs=kwargs, num_samples=num_samples)

    return make


def responses(rows: TensorDictBase) -> list[list[int]]:
    return [r.tolist() for r in ragged(rows, keys.RESPONSE_TOKENS)]


def versions(rows: TensorDictBase) -> list[list[int]]:
    return [v.tolist() for v in ragged(rows, keys.ACTION_VERSIONS)]


# requests


def test_a_request_says_all_that_there_is_to_a_turn(make_policy: Callable, tokenizer, prompt_rows: Callable) -> None:
    with ScriptedEngine(lambda request, index: ScriptedTurn([3, 4])) as engine:
        engine.stop_ids = (77,)
        kwargs = {"temperature": 0.5, "top_k": 9, "stop_token_ids": [50], "stop_strings": ["x"]}
        policy = make_policy(engine, num_samples=2, **kwargs)
        policy(prompt_rows(IDS[0], IDS[1], max_new_tokens=[5, 40]))
        seeds = {request.seed for request in engine.requests}
        assert len(seeds) == 4 and all(0 <= seed < 2**63 for seed in seeds)
        expected = [(IDS[0], 5)] * 2 + [(IDS[1], LIMIT)] * 2
        assert [(r.prompt, r.limit) for r in engine.requests] == expected
        for request in engine.requests:
            assert request.distribution == SamplingDistribution(temperature=0.5, top_k=9)
            assert set(request.stop_ids) == {50, 77, tokenizer.eos_token_id} and request.stop_strings == ("x",)
        make_policy(engine, ignore_eos=True, stop_token_ids=[50])(prompt_rows(IDS[0], seed=[-3]))
        assert engine.requests[-1].stop_ids == (50,) and engine.requests[-1].seed >= 0


def test_no_two_samples_share_a_seed_at_any_turn(make_policy: Callable, prompt_rows: Callable) -> None:
    """Seeds differ between samples, also at second turns after first turns of similar lengths."""
    with ScriptedEngine(lambda request, index: ScriptedTurn([3])) as engine:
        policy = make_policy(engine, num_samples=4)
        samples = policy(prompt_rows(IDS[0], seed=[5]))[0].unbind(0)
        for n in range(1, 9):
            turn = {keys.PROMPT_TOKENS: torch.full((n + 1,), 3), keys.ACTION_MASK: torch.arange(n + 1) > 0}
            turn |= {keys.LOG_PROBS: torch.zeros(n + 1), keys.ACTION_VERSIONS: torch.zeros(n, dtype=torch.long)}
            make_policy(engine)(stack_rows([row.select(keys.SEED).update(turn) for row in samples]))
        seeds = [request.seed for request in engine.requests]
        assert len(set(seeds)) == len(seeds) == 4 * 9


@pytest.fixture
def make_env(tokenizer, prompts) -> Callable[..., DatasetChatEnv]:
    """Make an environment of two groups."""

    def make(*transforms, **settings) -> DatasetChatEnv:
        options = {
            "prompts_per_batch": 2,
            "num_generations": G,
            "rewards": lambda completions, **_: [1.0] * len(completions),
        }
        return DatasetChatEnv(prompts, tokenizer, transforms=transforms, **options | settings)

    return make


def test_a_sample_becomes_a_turn(make_policy: Callable, prompt_rows: Callable) -> None:
    turns = [ScriptedTurn([3, 4], [-0.5, -1.5]), ScriptedTurn(range(20, 60)), ScriptedTurn([9], finish="length")]
    with ScriptedEngine(turns) as engine:
        out = make_policy(engine)(prompt_rows(*IDS[:3]))
        assert responses(out) == [[3, 4], list(range(20, 20 + LIMIT)), [9]]
        assert out[keys.RESPONSE_TRUNCATED].flatten().tolist() == [False, True, True]
        assert out[0][keys.LOG_PROBS].tolist() == [0, 0, 0, -0.5, -1.5]
        assert versions(out) == [[0] * 2, [0] * LIMIT, [0]] and out[0][keys.ACTION_VERSIONS].dtype == torch.int64


# turns aborted by a pause


@pytest.mark.parametrize("settings", [{"structured": {"regex": "[0-9]{8,}"}}, {"presence_penalty": 1.0}], ids=str)
def test_a_turn_whose_distribution_needs_all_of_it_starts_again(
    settings: dict, make_policy, random_model, tokenizer, prompt_rows
) -> None:
    """An engine would count the part before an abort as the prompt."""
    with CuttingEngine(random_model, tokenizer, cuts=[[3, None]]) as engine:
        policy = make_policy(engine, **settings)
        rows = policy(prompt_rows(*IDS[:2]))
        assert [len(call) for call in engine.calls] == [2, 1] and engine.calls[1] == engine.calls[0][:1]
        scored = policy.get_new_version(generate=False, model=engine.model).score(rows)
    sampled = torch.cat([row[keys.LOG_PROBS][row[keys.ACTION_MASK]] for row in rows.unbind(0)])
    torch.testing.assert_close(scored.log_probs[scored.actions.mask], sampled, rtol=0, atol=1e-5)


def test_a_turn_that_was_cut_off_is_continued(make_policy: Callable, model, tokenizer, prompt_rows: Callable) -> None:
    """It works for turns aborted twice, never, before their first token, and at their limit."""
    engine = CuttingEngine(model, tokenizer, [[3, None, 0, LIMIT], [2, None], [None]])
    policy = make_policy(engine, ignore_eos=True, temperature=0.7, stop_strings=["never said"])
    out = policy(prompt_rows(*IDS, seed=[10, 11, 12, 13]))
    assert [len(r) for r in responses(out)] == [LIMIT] * 4 and out[keys.RESPONSE_TRUNCATED].all()
    assert versions(out) == [[0] * 3 + [1] * 2 + [2] * 7, [0] * LIMIT, [1] * LIMIT, [0] * LIMIT]
    first, second, third = engine.calls
    said = responses(out)[0]
    assert [(r.prompt, r.limit) for r in second] == [([*IDS[0], *said[:3]], LIMIT - 3), (IDS[2], LIMIT)]
    assert [(r.prompt, r.limit) for r in third] == [([*IDS[0], *said[:5]], LIMIT - 5)]
    assert second[1] == first[2], "nothing was sampled, so nothing changes"
    assert len({first[0].seed, second[0].seed, third[0].seed}) == 3, "numbers are not used twice"
    for request in (*second, *third):
        assert (request.distribution, request.stop_strings) == (first[0].distribution, first[0].stop_strings)
    behaviour = torch.cat([row[keys.LOG_PROBS][row[keys.ACTION_MASK]] for row in out.unbind(0)])
    scored = policy.get_new_version(generate=False, model=model).score(out)
    torch.testing.assert_close(scored.log_probs[scored.actions.mask], behaviour, rtol=0, atol=1e-5)
    again = make_policy(CuttingEngine(model, tokenizer, engine.cuts), ignore_eos=True, temperature=0.7)
    assert responses(again(prompt_rows(*IDS, seed=[10, 11, 12, 13]))) == responses(out)


def test_what_ends_a_continued_turn(make_policy: Callable, model, tokenizer, prompt_rows: Callable) -> None:
    stops = list(range(0, 320, 4))
    engine = CuttingEngine(model, tokenizer, [[1] * 32])
    out = make_policy(engine, stop_token_ids=stops, ignore_eos=True)(prompt_rows(*IDS * 8, seed=list(range(32))))
    cut = [r for r in responses(out) if len(r) > 1]
    assert any(r[-1] in stops for r in cut) and not any(set(r[1:-1]) & set(stops) for r in cut)
    for row in out.unbind(0):
        end = row[keys.RESPONSE_TOKENS][-1].item()
        if len(row[keys.RESPONSE_TOKENS]) > 1:
            assert bool(row[keys.RESPONSE_TRUNCATED]) == (end not in stops)


def test_a_stop_string_may_be_cut_in_two(make_policy: Callable, tokenizer, prompt_rows: Callable) -> None:
    a, b = tokenizer.convert_tokens_to_ids(["a", "b"])
    now = [0.0]

    def script(request: Request, index: int) -> ScriptedTurn:
        if index == 1:  # aborts the first turn after its first token
            now[0] += 1
            engine.pause("abort")
            engine.resume()
        return ScriptedTurn([a, b], latency=2.0) if index == 0 else ScriptedTurn([b, a, a], finish="length")

    with ScriptedEngine(script, clock=lambda: now[0]) as engine:
        out = make_policy(engine, stop_strings=["ab"])(prompt_rows(IDS[0], IDS[1]))
    assert responses(out)[0] == [a, b] and not out[0][keys.RESPONSE_TRUNCATED].item()


# answers that contradict the protocol

GOOD = Sample([3, 4], [-0.5, -1.5], "stop", [0, 0])
WRONG = {
    "nothing": (None, "answered None"),
    "no ids": (GOOD._replace(tokens=[3.5, 4]), "cannot be interpreted as an integer"),
    "no log-probs": (GOOD._replace(log_probs=[None, -1.0]), "return a Sample of plain numbers"),
    "few log-probs": (GOOD._replace(log_probs=[-0.5]), "2 tokens with 1 log-probs and 2 versions"),
    "many versions": (GOOD._replace(versions=[0] * 3), "2 tokens with 2 log-probs and 3 versions"),
    "too long": (Sample([3] * 13, [-1.0] * 13, "length", [0] * 13), "13 tokens, above limit=12"),
    "another end": (GOOD._replace(finish="done"), "finish='done', which must be one of"),
    "negative id": (GOOD._replace(tokens=[3, -1]), "the id -1, but ids must be from 0 to"),
    "large id": (GOOD._replace(tokens=[3, 2**70]), f"the id {2**70}"),
    "later version": (GOOD._replace(versions=[0, 1]), "version 1, but versions must be from 0 to 0"),
    "negative version": (GOOD._replace(versions=[-1, 0]), "version -1"),
    "NaN": (GOOD._replace(log_probs=[-0.5, float("nan")]), "log-prob nan, which must be finite and at most 0"),
    "-inf": (GOOD._replace(log_probs=[float("-inf"), 0.0]), "log-prob -inf"),
    "positive": (GOOD._replace(log_probs=[0.0, 0.1]), "log-prob 0.1"),
}


class Answering(ScriptedEngine):
    """Engine that gives its ``answers`` in order, each at once, and the last one for ever."""

    def __init__(self, *answers):
        super().__init__([])
        self.answers, self.given = answers, 0

    def submit(self, request: Request) -> Future:
        future, number = Future(), min(self.given, len(self.answers) - 1)
        self.given += 1
        future.set_result(self.answers[number])
        return future


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_fails_its_turn_alone(name: str, make_policy: Callable, make_env: Callable, prompt_rows) -> None:
    """Also in the second part of a turn. Rounding may lift a log-prob above 0."""
    answer, message = WRONG[name]
    good, part = GOOD._replace(log_probs=[1e-6, -1.0]), Sample([5], [-1.0], "abort", [0])
    for answers in ([answer], [good, answer], [part, answer, good]):
        with Answering(*answers) as engine, pytest.raises(EngineError, match=re.escape(message)):
            make_policy(engine)(prompt_rows(*IDS[:2]))
    with Answering(answer, part, good) as engine:
        collector = LLMCollector(make_env(), make_policy(engine))
        rows = collector.collect()
        assert sorted(int(row[keys.ACTION_MASK].sum()) for row in rows.unbind(0)) == [0, 2, 2, 3]
        assert rows["next", "reward"].isnan().sum() == 1 and collector.counts["collector/failed_turns"] == 1
        collector.shutdown()


@pytest.mark.parametrize("part", [Sample([], [], "abort", []), Sample([5], [-1.0], "abort", [0])], ids=["empty", "one"])
def test_an_engine_that_only_aborts_ends_a_turn_and_the_run(part: Sample, make_policy, make_env, prompt_rows) -> None:
    with Answering(part) as engine:
        with pytest.raises(EngineError, match="Answering aborted a turn 100 times in a row"):
            make_policy(engine, max_new_tokens=1000)(prompt_rows(*IDS[:2]))
        engine.given = 0
        collector = LLMCollector(make_env(), make_policy(engine, max_new_tokens=1000), max_consecutive_failures=3)
        for _ in range(2):
            with pytest.raises(
                RuntimeError, match="the policy failed on 3 consecutive turns.*aborted a turn 100 times"
            ):
                collector.collect()
        collector.shutdown()


def test_an_engine_that_answers_at_once_does_not_block_time_limits(make_policy: Callable, make_env: Callable) -> None:
    talk = FeedbackTransform(lambda completion, row: [{"role": "user", "content": "again"}])
    with Answering(GOOD._replace(tokens=[3], log_probs=[-1.0], versions=[0])) as engine:
        collector = LLMCollector(make_env(talk, max_seconds=0.3), make_policy(engine))
        assert collector.collect()[keys.TRUNCATED].all()
        collector.shutdown()


# versions of rows


def collect(policy: vLLMWrapper, prompts, tokenizer, respond: Callable, size: int = 4) -> TensorDictBase:
    env = DatasetChatEnv(
        prompts,
        tokenizer,
        prompts_per_batch=size,
        num_generations=2,
        shuffle=False,
        transforms=[FeedbackTransform(respond, max_turns=4)],
    )
    return LLMCollector(env, policy).collect()


def turn_lengths(row: TensorDictBase) -> list[int]:
    """Return the number of action tokens of each turn, from the runs of the action mask."""
    runs, lengths = row[keys.ACTION_MASK].int().unique_consecutive(return_counts=True)
    return lengths[runs.bool()].tolist()


def test_versions_of_several_turns(make_policy: Callable, model, tokenizer, prompts) -> None:
    """The version starts at 3 and grows with every call: one per turn, and one for aborted first turns."""

    def respond(conversation, row):
        turns = sum(message["role"] == "assistant" for message in conversation)
        return [{"role": "user", "content": "again"}] if turns < row["turns"] else None

    engine = CuttingEngine(model, tokenizer, [[None] * 4 + [0] * 4])
    engine.version = 3
    policy = make_policy(engine, stop_token_ids=list(range(0, 320, 2)), max_new_tokens=60)
    rows = collect(policy, prompts, tokenizer, respond)
    assert set(rows[keys.NUM_TURNS].tolist()) == {1, 2, 3}
    for number, row in enumerate(rows.unbind(0)):
        oldest = 3 if number < 4 else 4
        of_turns = [oldest, 5, 6]
        expected = [v for v, n in zip(of_turns, turn_lengths(row), strict=False) for _ in range(n)]
        assert row[keys.ACTION_VERSIONS].tolist() == expected
        assert int(row[keys.POLICY_VERSION]) == oldest
    assert len(engine.calls) == 4


@pytest.mark.parametrize("recorded", [None, 2, 4])
def test_versions_that_do_not_fit_a_row_are_refused(
    recorded: int | None, make_policy: Callable, model, tokenizer
) -> None:
    row = TensorDict({"tokens": Tokens(prompt=torch.tensor([5, 6, 7, 8, 9]))}, [])
    row.update({"masks": Masks(all_assistant_mask=torch.tensor([False, False, True, True, True]))})
    row.update({"log_probs": LogProbs(full=torch.zeros(5))})
    if recorded is not None:
        row[keys.ACTION_VERSIONS] = torch.zeros(recorded, dtype=torch.long)
    with pytest.raises(ValueError, match=rf"3 action tokens, but 'action_versions' of {recorded or 0}"):
        make_policy(TransformersEngine(model, tokenizer))(stack_rows([row]))


# other versions of the wrapper


def test_a_new_version_keeps_the_settings(make_policy: Callable, model, tokenizer) -> None:
    engine = TransformersEngine(model, tokenizer)
    kwargs = {"max_new_tokens": 7, "seed": 3, "temperature": 0.5, "top_k": 9}
    policy = vLLMWrapper(
        engine,
        tokenizer=tokenizer,
        input_mode="history",
        generate_kwargs=kwargs,
        num_samples=3,
    )
    new = policy.get_new_version()
    assert type(new) is vLLMWrapper and new.engine is engine and new.tokenizer is tokenizer
    assert (new.input_mode, new.num_samples, new.config) == ("history", 3, policy.config)
    other = TransformersEngine(model, tokenizer)
    changed = policy.get_new_version(engine=other, num_samples=None, generate_kwargs={"temperature": 0}, generate=True)
    assert changed.engine is other and changed.num_samples is None and changed.distribution.temperature == 0
    assert changed.input_mode == "history"
    scorer = policy.get_new_version(generate=False, model=model)
    assert type(scorer) is TransformersWrapper and not scorer.generate and scorer.model is model
    assert scorer.distribution == policy.distribution and scorer.input_mode == "history"
    packed = policy.get_new_version(generate=False, model=model, packing="packed", generate_kwargs={"temperature": 2.0})
    assert packed.packing == "packed" and packed.distribution == SamplingDistribution(temperature=2.0)
    with pytest.raises(ValueError, match="pass model="):
        policy.get_new_version(generate=False)


# vLLM itself


def send_weights(engine: Engine, model, version: int) -> None:
    named = dict(model.named_parameters())
    manifest = [TensorInfo.of(name, tensor) for name, tensor in named.items()]
    tensors = [tensor.detach() for tensor in named.values()]
    bucket = {"version": version, "bucket": 0, "first": 0, "last": len(tensors), "checksum": checksum(tensors)}
    steps = (
        ("connect", {"transport": "direct", "options": {}, "manifest": [list(i) for i in manifest], "staged": True}),
        ("start", {"version": version}),
        ("bucket", bucket | {"payload": {"tensors": tensors}}),
        ("finish", {"version": version}),
    )
    for step, info in steps:
        engine.update_weights(step, info, timeout=60.0)


def test_vllm_gets_new_weights_between_two_turns(make_policy: Callable, vllm_engine, model, tokenizer, prompts) -> None:
    """Each turn has log-probs of the weights that its versions name; the row has the oldest version."""
    new, updated, lock = build_model(tokenizer, seed=1).eval(), [], Lock()

    def respond(conversation, row):
        with lock:  # called by several conversations at a time
            if not updated:
                updated.append(send_weights(vllm_engine, new, version=1))
        turns = sum(message["role"] == "assistant" for message in conversation)
        return [{"role": "user", "content": "again"}] if turns < 2 else None

    policy = make_policy(vllm_engine, stop_token_ids=list(range(0, 320, 2)), max_new_tokens=60)
    rows = collect(policy, prompts, tokenizer, respond, size=2)
    by_model = [policy.get_new_version(generate=False, model=m)(rows.clone()) for m in (model, new)]
    for number, row in enumerate(rows.unbind(0)):
        first, second = turn_lengths(row)
        assert row[keys.ACTION_VERSIONS].tolist() == [0] * first + [1] * second
        assert int(row[keys.POLICY_VERSION]) == 0
        assert row[keys.PROMPT_TOKENS].tolist() == encode_prompt(tokenizer, row[keys.QUERY])
        behaviour = row[keys.LOG_PROBS][row[keys.ACTION_MASK]]
        old, fresh = (scored[number][keys.LOG_PROBS][row[keys.ACTION_MASK]] for scored in by_model)
        torch.testing.assert_close(behaviour[:first], old[:first], rtol=0, atol=1e-5)
        torch.testing.assert_close(behaviour[first:], fresh[first:], rtol=0, atol=1e-5)
        assert (old[first:] - fresh[first:]).abs().max() > 0.1
