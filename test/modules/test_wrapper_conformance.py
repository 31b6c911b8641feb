"""Conformance of TransformersWrapper and vLLMWrapper with each engine, in one suite."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase
from torchrl.modules.llm.policies import ChatHistory, LogProbs, Masks, Text, Tokens
from transformers import PreTrainedModel

from support.checkpoints import save_checkpoint
from support.engines import GROUP, VLLMEngines
from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import encode_prompt, keys, tensor_rows
from torchrl_rloo.data.rows import ragged, stack_rows
from torchrl_rloo.data.templates import to_history
from torchrl_rloo.embedded import build_model
from torchrl_rloo.engines.base import EngineError
from torchrl_rloo.engines.transformers_engine import TransformersEngine
from torchrl_rloo.engines.vllm_inprocess import VLLMEngine
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.envs.transforms import FeedbackTransform
from torchrl_rloo.functional.sampling import process_logits
from torchrl_rloo.modules import TransformersWrapper, TurnPolicy, vLLMWrapper
from torchrl_rloo.objectives import RLOOLoss

pytestmark = pytest.mark.xdist_group(GROUP)

TOLERANCE = 1e-5  # nats, in float32; measured: 4e-6
MAX_MODEL_LEN = 256
PROCESSING = {
    "plain": {},
    "top_k": {"top_k": 12},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.05},
    "repetition_penalty": {"repetition_penalty": 1.4},
    "top_k-top_p-penalty": {"top_k": 40, "top_p": 0.9, "repetition_penalty": 0.8},
    "top_k-min_p-penalty": {"top_k": 40, "min_p": 0.02, "repetition_penalty": 1.2},
}
DISTRIBUTIONS = [  # test_token_exactness.py has every pair
    pytest.param({"temperature": t, **kwargs}, id=f"{t}-{name}")
    for t, (name, kwargs) in zip(itertools.cycle((0.5, 1.0, 1.5)), PROCESSING.items(), strict=False)
]


@pytest.fixture(scope="module")
def model(bpe) -> PreTrainedModel:
    """A random Qwen2 whose turns end after about ten tokens; by a common part of all embeddings, since vLLM's heads of
    Qwen2 have no bias."""
    made = build_model(bpe, seed=0)
    tied = made.lm_head.weight.detach()
    made.config.tie_word_embeddings = False
    made.lm_head = torch.nn.Linear(tied.shape[1], tied.shape[0], bias=False)
    with torch.no_grad():
        made.lm_head.weight.copy_(2 * tied)  # a peaked distribution
        made.lm_head.weight[bpe.eos_token_id] = 0.2
        made.model.embed_tokens.weight += 0.2
    return made.eval()


@pytest.fixture(scope="module")
def own_vllm_engine(model, bpe, vllm_engines: VLLMEngines, tmp_path_factory: pytest.TempPathFactory) -> VLLMEngine:
    path = save_checkpoint(tmp_path_factory.mktemp("model"), model, bpe)
    return vllm_engines.get(path, max_model_len=MAX_MODEL_LEN, enable_lora=False)


@pytest.fixture(scope="module")
def make_reference(model, bpe) -> Callable[..., TransformersWrapper]:
    """``make_reference(num_samples=None, input_mode="tokens", **generate_kwargs)``: wrapper without an engine."""

    def make(num_samples: int | None = None, input_mode: str = "tokens", **kwargs) -> TransformersWrapper:
        settings = {"num_samples": num_samples, "input_mode": input_mode}
        return TransformersWrapper(model, tokenizer=bpe, generate_kwargs={"max_new_tokens": 12, **kwargs}, **settings)

    return make


@pytest.fixture(scope="module", params=["transformers", "transformers_engine", "vllm"])
def make_policy(request: pytest.FixtureRequest, model, bpe, make_reference: Callable) -> Callable[..., TurnPolicy]:
    """``make_reference`` for each wrapper and engine."""
    if request.param == "transformers":
        return make_reference
    is_vllm = request.param == "vllm"
    engine = request.getfixturevalue("own_vllm_engine") if is_vllm else TransformersEngine(model, bpe)

    def make(num_samples: int | None = None, input_mode: str = "tokens", **kwargs) -> vLLMWrapper:
        settings = {"num_samples": num_samples, "input_mode": input_mode}
        return vLLMWrapper(engine, tokenizer=bpe, generate_kwargs={"max_new_tokens": 12, **kwargs}, **settings)

    return make


@pytest.fixture(scope="module")
def ids(bpe) -> list[list[int]]:
    """Four prompts of unequal lengths; the first has non-canonical ids."""
    spelled = bpe.convert_tokens_to_ids(list("abcabcbcaacb"))
    assert bpe("abcabcbcaacb", add_special_tokens=False)["input_ids"] != spelled
    return [spelled, [bpe.eos_token_id], [40, 41, 250, 251, 40, 41], list(range(20, 90))]


def responses(rows: TensorDictBase) -> list[list[int]]:
    return [r.tolist() for r in ragged(rows, keys.RESPONSE_TOKENS)]


def flat(grouped: TensorDictBase) -> TensorDictBase:
    return stack_rows([row for group in grouped.unbind(0) for row in group.unbind(0)])


def check_scores(rows: TensorDictBase, policy: TurnPolicy, model) -> None:
    """Check that the scorer's log-probs equal the sampled ones with unchanged weights, so the ratio is 1."""
    rows = tensor_rows(rows)
    scorer = policy.get_new_version(generate=False, model=model)
    scored = scorer.score(rows)
    behaviour = torch.cat([row[keys.LOG_PROBS][row[keys.ACTION_MASK]] for row in rows.unbind(0)])
    torch.testing.assert_close(scored.log_probs[scored.actions.mask], behaviour, rtol=0, atol=TOLERANCE)
    for row in rows.unbind(0):
        assert (row[keys.LOG_PROBS][~row[keys.ACTION_MASK]] == 0).all()
        row.set(keys.ADVANTAGE, torch.ones(1, 1))
    out = RLOOLoss(scorer)(rows)
    assert out.ESS.item() == pytest.approx(1, abs=TOLERANCE)
    assert out.log_ratio_max.item() <= TOLERANCE and out.clip_fraction.item() == 0


def schema(row: TensorDictBase) -> dict:
    leaves = {k: v for k, v in row.items(True, True) if isinstance(v, torch.Tensor) and k != keys.ACTION_VERSIONS}
    return {k: (v.dtype, v.ndim, v.device) for k, v in leaves.items()}


# inputs and outputs


def test_ids_go_in_and_come_out_bit_for_bit(make_policy: Callable, make_reference: Callable, prompt_rows, ids) -> None:
    policy = make_policy(seed=0)
    out, reference = policy(prompt_rows(*ids)), make_reference(seed=0)(prompt_rows(*ids))
    assert all(key in out.keys() for key in policy.out_keys)
    for row, prompt in zip(out.unbind(0), ids, strict=True):
        response, n = row[keys.RESPONSE_TOKENS], len(prompt)
        assert 1 <= len(response) <= 12
        assert row[keys.PROMPT_TOKENS].tolist() == prompt and row[keys.TOKENS].tolist() == prompt + response.tolist()
        assert row[keys.ACTION_MASK].tolist() == [False] * n + [True] * len(response)
        assert row[keys.ATTENTION_MASK].tolist() == [True] * len(row[keys.TOKENS])
        assert row[keys.LOG_PROBS].shape == row[keys.TOKENS].shape and row[keys.RESPONSE_TRUNCATED].shape == (1,)
        assert schema(row) == schema(reference[0])
        classes = [type(row[name]) for name in ("tokens", "masks", "log_probs")]
        assert classes == [Tokens, Masks, LogProbs]


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_sampled_and_scored_are_one_distribution(
    distribution: dict, make_policy: Callable, prompt_rows: Callable, ids, model
) -> None:
    policy = make_policy(num_samples=4, seed=0, **distribution)
    rows = flat(policy(prompt_rows(*ids)))
    assert len({tuple(r) for r in responses(rows)}) > 2
    check_scores(rows, policy, model)


@pytest.mark.parametrize("distribution", [{"temperature": 0.7, "top_k": 30}, {"top_p": 0.9}], ids=str)
def test_samples_have_the_models_frequencies(
    distribution: dict, make_policy: Callable, prompt_rows: Callable, ids, model
) -> None:
    """First tokens pass a chi-square test, and second tokens use other random numbers."""
    n = 1024
    policy = make_policy(seed=0, num_samples=n, ignore_eos=True, max_new_tokens=2, **distribution)
    of_stream = policy(prompt_rows(ids[0]))[0]
    of_rows = policy.get_new_version(num_samples=None)(prompt_rows(*[ids[0]] * n, seed=list(range(n))))
    first, second = torch.tensor(responses(of_stream) + responses(of_rows)).unbind(1)

    def log_probs(tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return process_logits(model(tokens).logits[:, -1], policy.distribution).log_softmax(-1).double()

    prompt = torch.tensor(ids[0])
    expected = log_probs(prompt[None])[0].exp() * len(first)
    common = expected >= 5
    observed = first.bincount(minlength=len(expected))
    assert observed[expected == 0].sum() == 0
    pairs = torch.stack([torch.cat([v[common], v[~common].sum()[None]]) for v in (observed.double(), expected)])
    chi2, freedom = ((pairs[0] - pairs[1]) ** 2 / pairs[1].clamp(min=1)).sum().item(), int(common.sum())
    assert chi2 < freedom + 5 * (2 * freedom) ** 0.5

    after, index = first.unique(return_inverse=True)
    rest = log_probs(torch.cat([prompt.expand(len(after), -1), after[:, None]], 1))[index]

    def ranks(probs: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
        """Return the probability mass before each sampled token, uniform in [0, 1] except for ties."""
        own = probs.gather(-1, sampled[:, None])[:, 0]
        return probs.cumsum(-1).gather(-1, sampled[:, None])[:, 0] - own / 2

    u, v = ranks((expected / len(first)).expand(len(first), -1), first), ranks(rest.exp(), second)
    assert abs(v.mean().item() - 0.5) < 4 / (12 * len(first)) ** 0.5
    assert abs(torch.corrcoef(torch.stack([u, v]))[0, 1].item()) < 4 / len(first) ** 0.5


@pytest.mark.parametrize("kwargs", [{"temperature": 0}, {"do_sample": False, "repetition_penalty": 1.3}], ids=str)
def test_greedy_is_the_most_likely_token(
    kwargs: dict, make_policy: Callable, make_reference: Callable, prompt_rows: Callable, ids, model
) -> None:
    out = make_policy(**kwargs)(prompt_rows(*ids, seed=[1, 2, 3, 4]))
    assert responses(out) == responses(make_reference(**kwargs)(prompt_rows(*ids)))
    assert all((v == 0).all() for v in ragged(out, keys.LOG_PROBS))
    if "temperature" in kwargs:
        for prompt, response in zip(ids, responses(out), strict=True):
            logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
            assert logits.argmax(-1).tolist() == response


# seeds and streams


def test_samples_of_a_prompt_differ_and_repeat(make_policy: Callable, prompt_rows: Callable, ids) -> None:
    rows = prompt_rows(*ids, group_id=[5, 6, 7, 8])
    out, again = (make_policy(num_samples=3, seed=0, ignore_eos=True)(rows) for _ in range(2))
    assert out.batch_size == (4, 3)
    for group, same, prompt, group_id in zip(out.unbind(0), again.unbind(0), ids, (5, 6, 7, 8), strict=True):
        assert len({tuple(r) for r in responses(group)}) == 3 and responses(group) == responses(same)
        assert all(row[keys.PROMPT_TOKENS].tolist() == prompt for row in group.unbind(0))
        assert group[keys.GROUP_ID].tolist() == [group_id] * 3
    assert keys.TOKENS not in rows.keys(True, True), "the rows given are prompts still"
    seeded = [responses(make_policy(num_samples=3)(prompt_rows(ids[0], seed=[7]))[0]) for _ in range(2)]
    assert seeded[0] == seeded[1] and len({tuple(r) for r in seeded[0]}) == 3


def test_seeds_and_streams(make_policy: Callable, prompt_rows: Callable, ids) -> None:
    """A wrapper's seed fixes its samples and its state resumes them; without a seed, torch's generator decides."""
    policy, other = make_policy(seed=3), make_policy(seed=3)
    first = [responses(policy(prompt_rows(*ids))) for _ in range(2)]
    assert first[0] != first[1] and [responses(other(prompt_rows(*ids))) for _ in range(2)] == first
    assert responses(make_policy(seed=4)(prompt_rows(*ids))) != first[0]
    resumed = make_policy(seed=99)
    resumed.load_sampler_state(policy.sampler_state())
    assert responses(resumed(prompt_rows(*ids))) == responses(policy(prompt_rows(*ids)))
    free, drawn = make_policy(), []
    assert free.sampler_state() == {}
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        drawn.append(responses(free(prompt_rows(*ids))))
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_seeded_policy_leaves_the_global_stream_alone(make_policy: Callable, prompt_rows: Callable, ids) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    make_policy(seed=3)(prompt_rows(*ids))
    make_policy()(prompt_rows(*ids, seed=[1, 2, 3, 4]))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_seeded_row_is_the_same_in_any_batch(make_policy: Callable, prompt_rows: Callable, ids, model) -> None:
    """Other rows, their order and limits, and the policy's random stream have no effect."""
    prompts, seeds = [p for p in ids for _ in range(3)], list(range(100, 112))
    policy = make_policy(seed=0, repetition_penalty=1.1)
    together = policy(prompt_rows(*prompts, seed=seeds))
    assert len(set(map(tuple, responses(together)))) > 6
    backwards = policy(prompt_rows(*prompts[::-1], seed=seeds[::-1]))
    alone = [policy(prompt_rows(p, seed=[s]))[0] for p, s in zip(prompts, seeds, strict=True)]
    for row, *others in zip(together.unbind(0), backwards.unbind(0)[::-1], alone, strict=True):
        for other in others:
            assert row[keys.TOKENS].tolist() == other[keys.TOKENS].tolist()
            torch.testing.assert_close(row[keys.LOG_PROBS], other[keys.LOG_PROBS], rtol=0, atol=TOLERANCE)
    shorter = policy(prompt_rows(*prompts, seed=seeds, max_new_tokens=[1, 3, 11] * 4))
    for row, cut, limit in zip(responses(together), responses(shorter), [1, 3, 11] * 4, strict=True):
        assert cut == row[:limit]
    check_scores(together, policy, model)


def test_a_later_turn_of_a_seeded_row_has_its_own_numbers(make_policy: Callable, prompt_rows: Callable, ids) -> None:
    mask = torch.arange(len(ids[0])) >= len(ids[0]) - 3
    said = [{"masks": Masks(all_assistant_mask=mask), "log_probs": LogProbs(full=torch.zeros(len(mask)))}] * 8

    def sampled(later: bool) -> list[list[int]]:
        rows = prompt_rows(*[ids[0]] * 8, seed=list(range(8)))
        for row, earlier in zip(rows.unbind(0), said, strict=True):
            row.update(earlier if later else {})
            if later and keys.ACTION_VERSIONS in policy.out_keys:
                row.set(keys.ACTION_VERSIONS, torch.zeros(3, dtype=torch.long))
        return responses(policy(rows))

    policy = make_policy(ignore_eos=True)
    first, second = sampled(later=False), sampled(later=True)
    assert second == sampled(later=True) and all(a != b for a, b in zip(first, second, strict=True))


# stops


def test_ends_of_turn_are_sampled_action_tokens(make_policy: Callable, prompt_rows: Callable, ids, bpe) -> None:
    eos, own = bpe.eos_token_id, list(range(30, 90))
    rows = prompt_rows(*ids * 4, seed=list(range(16)))
    for kwargs, stops in (
        ({}, {eos}),
        ({"stop_token_ids": own}, {eos, *own}),
        ({"stop_token_ids": own, "ignore_eos": True}, set(own)),
    ):
        out = make_policy(**kwargs)(rows.clone())
        ended = [r[-1] in stops for r in responses(out)]
        assert 0 < sum(ended) < len(ended)
        assert not any(set(r[:-1]) & stops for r in responses(out))
        assert all(len(r) == 12 for r, e in zip(responses(out), ended, strict=True) if not e)
        assert out[keys.RESPONSE_TRUNCATED].flatten().tolist() == [not e for e in ended]
        assert all(row[keys.ACTION_MASK][-1] and row[keys.LOG_PROBS][-1] < 0 for row in out.unbind(0))
        limits = [len(r) for r in responses(out)]  # an end of turn at the limit is not a truncation
        exact = make_policy(**kwargs)(prompt_rows(*ids * 4, seed=list(range(16)), max_new_tokens=limits))
        assert responses(exact) == responses(out)
        assert torch.equal(exact[keys.RESPONSE_TRUNCATED], out[keys.RESPONSE_TRUNCATED])
    without = make_policy(ignore_eos=True)(rows.clone())
    assert {len(r) for r in responses(without)} == {12} and any(eos in r[:-1] for r in responses(without))


@pytest.mark.parametrize("text", ["ab", "cc", "[INST]"])
def test_a_stop_string_ends_a_turn_and_its_ids_stay(
    text: str, make_policy: Callable, prompt_rows: Callable, ids, bpe, model
) -> None:
    """Several tokens or a special one may spell it; a stop string in the prompt is ignored."""
    policy = make_policy(stop_strings=text, max_new_tokens=60, ignore_eos=True, temperature=2.0)
    out = policy(prompt_rows(*[[*p, *bpe.encode(text)] for p in ids * 6], seed=list(range(24))))
    ended = [text in bpe.decode(r) for r in responses(out)]
    assert any(ended) and out[keys.RESPONSE_TRUNCATED].flatten().tolist() == [not e for e in ended]
    for response, end in zip(responses(out), ended, strict=True):
        assert text not in bpe.decode(response[:-1])
        assert end or len(response) == 60
    check_scores(out, policy, model)


def test_a_row_has_its_own_limit(make_policy: Callable, prompt_rows: Callable, ids) -> None:
    out = make_policy(seed=0, ignore_eos=True)(prompt_rows(*ids, max_new_tokens=[1, 3, 11, 40]))
    assert [len(r) for r in responses(out)] == [1, 3, 11, 12]
    assert out[keys.RESPONSE_TRUNCATED].all()


# turns


def test_turns_extend_what_was_sampled_before(make_policy: Callable, prompt_rows: Callable, ids, model) -> None:
    """A batch of truncated, second and first turns keeps the earlier parts of each row."""
    policy = make_policy(seed=0, temperature=0.8, top_k=50, max_new_tokens=5)
    first = list(policy(prompt_rows(*ids)).unbind(0))

    def follow(row: TensorDictBase, context: list[int]) -> TensorDictBase:
        n, carried = len(context), TensorDict({k: row[k] for k in (keys.ACTION_VERSIONS,) if k in row.keys()}, [])
        carried[keys.PROMPT_TOKENS] = torch.cat([row[keys.TOKENS], torch.tensor(context, dtype=torch.long)])
        carried[keys.ACTION_MASK] = torch.nn.functional.pad(row[keys.ACTION_MASK], (0, n))
        carried[keys.LOG_PROBS] = torch.nn.functional.pad(row[keys.LOG_PROBS], (0, n))
        return carried

    second = [follow(first[0], []), follow(first[1], [60, 61]), follow(first[3], [7])]
    given = [row.clone() for row in second]
    out = policy(stack_rows([*second, *prompt_rows(ids[2]).unbind(0)]))
    for row, before in zip(out.unbind(0), given, strict=False):
        n = len(before[keys.PROMPT_TOKENS])
        for key, old in ((keys.TOKENS, keys.PROMPT_TOKENS), (keys.ACTION_MASK,) * 2, (keys.LOG_PROBS,) * 2):
            assert torch.equal(row[key][:n], before[old])
        assert row[keys.ACTION_MASK][n:].all() and row[keys.TOKENS][n:].tolist() == row[keys.RESPONSE_TOKENS].tolist()
        if (versions := row.get(keys.ACTION_VERSIONS)) is not None:
            assert versions.tolist() == [0] * int(row[keys.ACTION_MASK].sum())
    check_scores(out, policy, model)


@pytest.mark.parametrize("input_mode", ["text", "history"])
def test_text_and_conversations(
    input_mode: str, make_policy: Callable, make_reference: Callable, bpe, user: Callable
) -> None:
    """Both wrappers encode and decode equally, and continue an unfinished turn."""
    opened = [[*user("abc")], [*user("ab"), {"role": "assistant", "content": "ca"}]]
    texts = [{"text": Text(prompt=t)} for t in ("abc cab", "b")]
    histories = [{"history": ChatHistory(prompt=to_history([m])[0])} for m in opened]
    given = texts if input_mode == "text" else histories
    out, reference = (
        make(input_mode=input_mode, temperature=0)(stack_rows([TensorDict(row, []) for row in given]))
        for make in (make_policy, make_reference)
    )
    for row, expected in zip(out.unbind(0), reference.unbind(0), strict=True):
        assert torch.equal(row[keys.TOKENS], expected[keys.TOKENS])
        said = bpe.decode(row[keys.RESPONSE_TOKENS], skip_special_tokens=True)
        if input_mode == "text":
            assert row["text", "response"] == said and row["text", "full"] == expected["text", "full"]
        else:
            assert row["history", "full"].content[1].endswith(said)
            for part in ("full", "response"):
                assert row["history", part].content == expected["history", part].content


@pytest.mark.parametrize("input_mode", keys.INPUT_MODES)
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_conversations_collected_are_rows_of_the_schema(
    temperature: float, input_mode: str, make_policy: Callable, make_reference: Callable, prompts, bpe, model
) -> None:
    """With one to three turns per row, wrappers agree at temperature 0, and else scores equal log-probs."""

    def respond(conversation, row):
        turns = sum(message["role"] == "assistant" for message in conversation)
        return [{"role": "user", "content": "again"}] if turns < row["turns"] else None

    def collect(make: Callable) -> tuple[TurnPolicy, TensorDictBase]:
        kwargs = {"repetition_penalty": 1.3, "stop_token_ids": list(range(0, 384, 2))}  # greedy turns also end
        policy = make(input_mode=input_mode, temperature=temperature, seed=1, **kwargs)
        feedback = [FeedbackTransform(respond, max_turns=3)]
        options = {"num_generations": 2, "shuffle": False, "input_mode": input_mode, "transforms": feedback}
        return policy, LLMCollector(DatasetChatEnv(prompts, bpe, prompts_per_batch=4, **options), policy).collect()

    (policy, rows), (_, reference) = collect(make_policy), collect(make_reference)
    assert set(rows[keys.NUM_TURNS].tolist()) >= {1, 2, 3}
    for row, expected in zip(rows.unbind(0), reference.unbind(0), strict=True):
        assert schema(row) == schema(expected)
        assert row[keys.PROMPT_TOKENS].tolist() == encode_prompt(bpe, row[keys.QUERY])
        assert int(row[keys.POLICY_VERSION]) == 0
        if temperature == 0:
            for key in schema(row):
                assert torch.equal(row[key], expected[key]), key
            assert row[keys.COMPLETION] == expected[keys.COMPLETION]
    if temperature:
        check_scores(rows, policy, model)


# training


@pytest.mark.parametrize("distribution", [{}, {"temperature": 1.5, "top_k": 20}], ids=str)
def test_a_batch_has_the_gradient_of_exact_log_probs(
    distribution: dict, make_policy: Callable, prompt_rows: Callable, ids, model
) -> None:
    """The sampler's log-probs give the same gradient as the scorer's, for which the ratio is exactly 1."""
    policy = make_policy(num_samples=4, seed=0, **distribution)
    rows = flat(policy(prompt_rows(*ids)))
    for row, advantage in zip(rows.unbind(0), torch.linspace(-1, 1, len(rows)), strict=True):
        row.set(keys.ADVANTAGE, advantage.reshape(1, 1))
    scorer = policy.get_new_version(generate=False, model=model)
    gradients = []
    with torch.no_grad():
        exact = scorer(rows.clone())
    for batch in (rows, exact):
        RLOOLoss(scorer)(batch).loss_objective.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        model.zero_grad()
    assert gradients[1].abs().max() > 0.1
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


# errors


def test_what_cannot_be_is_refused_by_name(make_policy: Callable, prompt_rows: Callable, ids) -> None:
    with pytest.raises(ValueError, match=r"rows \[1\] are empty"):
        make_policy()(prompt_rows([5], []))
    with pytest.raises(KeyError, match="prompt"):
        make_policy()(stack_rows([TensorDict({keys.QUERY: NonTensorData("abc")}, [])]))
    with pytest.raises(ValueError, match=r"rows of batch size \[B\], got \[4, 2\]"):
        make_policy()(make_policy(num_samples=2)(prompt_rows(*ids)))
    with pytest.raises(ValueError, match="max_new_tokens of a row is 0"):
        make_policy()(prompt_rows(*ids, max_new_tokens=[1, 0, 1, 1]))
    with pytest.raises(TypeError, match=r"unknown sampling arguments \['top_kk'\]"):
        make_policy(top_kk=3)
    with pytest.raises(ValueError, match="input_mode='txt'"):
        make_policy(input_mode="txt")
    with pytest.raises(ValueError, match="num_samples=0"):
        make_policy(num_samples=0)


def test_vllm_refuses_a_truncation_in_another_order(
    own_vllm_engine, model, bpe, prompt_rows: Callable, ids, make_reference: Callable
) -> None:
    both = {"min_p": 0.1, "top_p": 0.9, "seed": 0, "max_new_tokens": 3}
    with pytest.raises(EngineError, match=r"min_p=0.1 before top_p=0.9.*set only one of the two"):
        vLLMWrapper(own_vllm_engine, tokenizer=bpe, generate_kwargs=both)(prompt_rows(*ids))
    engine = TransformersEngine(model, bpe)
    for policy in (make_reference(**both), vLLMWrapper(engine, tokenizer=bpe, generate_kwargs=both)):
        check_scores(policy(prompt_rows(*ids)), policy, model)


def test_vllm_refuses_a_temperature_that_it_would_change(own_vllm_engine, bpe, prompt_rows: Callable, ids) -> None:
    """vLLM raises lower temperatures to 0.01, but the scorer would not."""
    policy = vLLMWrapper(own_vllm_engine, tokenizer=bpe, generate_kwargs={"max_new_tokens": 3, "temperature": 0.005})
    with pytest.raises(EngineError, match=r"temperature=0.005"):
        policy(prompt_rows(*ids))


def test_a_prompt_beyond_vllms_context(own_vllm_engine, bpe, prompt_rows: Callable, ids) -> None:
    """The policy raises with both lengths before the engine; turns are truncated at the end of the context."""
    policy = vLLMWrapper(own_vllm_engine, tokenizer=bpe, generate_kwargs={"max_new_tokens": 12, "ignore_eos": True})
    with pytest.raises(ValueError, match=f"a prompt of {MAX_MODEL_LEN + 1} tokens .* context_length={MAX_MODEL_LEN}"):
        policy(prompt_rows(ids[0], [40] * (MAX_MODEL_LEN + 1)))
    out = policy(prompt_rows(ids[0], [40] * (MAX_MODEL_LEN - 5)))
    assert [len(r) for r in responses(out)] == [12, 5] and out[keys.RESPONSE_TRUNCATED].all()
