"""Tokens in, tokens out: sampled, stored and scored ids are equal, under one distribution."""

from __future__ import annotations

import copy
import itertools
from collections import defaultdict
from collections.abc import Callable

import pytest
import torch
from tensordict import TensorDictBase

from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import encode_prompt, keys, tensor_rows
from torchrl_rloo.data.rows import ragged, stack_rows
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.envs.transforms import FeedbackTransform
from torchrl_rloo.modules import TransformersWrapper
from torchrl_rloo.objectives import RLOOLoss

TEMPERATURES = (0.5, 1.0, 1.5)
PROCESSING = {
    "plain": {},
    "top_k": {"top_k": 12},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.05},
    "repetition_penalty": {"repetition_penalty": 1.4},
    "all": {"top_k": 40, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 0.8},
}
CASES = {  # tokenizer, bias of the end of turn, tokens per turn, largest number of turns (None: column "turns")
    "non_canonical": ({}, 0.0, 10, 1),
    "one_token": ({"pad_is_eos": True}, 6.0, 1, 1),
    "empty": ({"pad_is_eos": True}, 12.0, 4, 1),
    "turns": ({"pad_is_eos": True}, 9.0, 8, None),
}
PAIRWISE = [  # every pair of temperature and processing, temperature and case, processing and case
    pytest.param(case, {"temperature": TEMPERATURES[(i + j) % 3], **PROCESSING[name]}, id=f"{case}-{name}")
    for (i, case), (j, name) in itertools.product(enumerate(CASES), enumerate(PROCESSING))
]
ANSWER = "[again]"


class Recorder:
    """Policy that records every sampled turn, under a number per row."""

    def __init__(self, policy: TransformersWrapper):
        self.policy = policy
        self.turns: dict[int, list[list[int]]] = defaultdict(list)

    def __call__(self, rows: TensorDictBase) -> TensorDictBase:
        for row in rows.unbind(0):
            if "row_id" not in row.keys():
                row.set("row_id", torch.tensor(len(self.turns)))
                self.turns[len(self.turns)] = []
        rows = self.policy(rows)
        for row in rows.unbind(0):
            self.turns[int(row["row_id"])].append(row[keys.RESPONSE_TOKENS].tolist())
        return rows


def reference_log_probs(model, row: TensorDictBase, *, temperature, top_k=None, top_p=1.0, min_p=0.0, penalty=1.0):
    """Compute log-probs of a row's action tokens in one float64 forward pass without padding or cache."""
    tokens, mask = row[keys.TOKENS], row[keys.ACTION_MASK]
    with torch.no_grad():
        logits = model(input_ids=tokens[None], use_cache=False).logits[0].double()
    values = []
    for t in mask.nonzero()[:, 0].tolist():
        z = logits[t - 1].clone()
        for v in set(tokens[:t].tolist()):
            z[v] = z[v] / penalty if z[v] > 0 else z[v] * penalty
        z, order = (z / temperature).sort(descending=True)
        if top_k is not None:
            z[top_k:] = -torch.inf
        if top_p < 1:
            needed = int((z.softmax(0).cumsum(0) < top_p).sum()) + 1
            z[needed:] = -torch.inf
        z[z < z[0] + torch.tensor(min_p).double().log()] = -torch.inf
        values.append(z.log_softmax(0)[(order == tokens[t]).nonzero()[0, 0]])
    return torch.stack(values).float()


def collect(model, tokenizer, prompts, settings: dict, turns: int | None = 1, generations: int = 2):
    """Collect finished trajectories; return the rows, the policy and its samples."""

    def respond(conversation, row):
        taken = sum(m["role"] == "assistant" for m in conversation)
        return [{"role": "user", "content": ANSWER}] if taken < (turns or row["turns"]) else None

    policy = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs={"seed": 1, **settings})
    recorder = Recorder(policy)
    env = DatasetChatEnv(
        prompts,
        tokenizer,
        prompts_per_batch=len(prompts),
        num_generations=generations,
        shuffle=False,
        transforms=[FeedbackTransform(respond, max_turns=4)],
    )
    return LLMCollector(env, recorder, seed=1).collect(), policy, recorder.turns


def check_ids(rows: TensorDictBase, sampled: dict[int, list[list[int]]], tokenizer) -> None:
    """Check that every row is its prompt, the sampled turns and the feedback between, bit for bit."""
    between = f"\n<|im_start|>user\n{ANSWER}<|im_end|>\n<|im_start|>assistant\n"
    feedback = tokenizer(between, add_special_tokens=False)["input_ids"]
    for row in rows.unbind(0):
        turns = sampled[int(row["row_id"])]
        prompt = encode_prompt(tokenizer, row[keys.QUERY])
        ids, mask = list(prompt), [False] * len(prompt)
        for k, turn in enumerate(turns):
            if k:
                ids, mask = ids + feedback, mask + [False] * len(feedback)
            ids, mask = ids + turn, mask + [True] * len(turn)
        assert row[keys.TOKENS].tolist() == ids
        assert row[keys.ACTION_MASK].tolist() == mask
        assert row[keys.PROMPT_TOKENS].tolist() == prompt
        assert row[keys.ATTENTION_MASK].tolist() == [True] * len(ids)
        assert int(row[keys.NUM_TURNS]) == len(turns)
        ended = [turn[-1] == tokenizer.eos_token_id for turn in turns]
        assert all(ended[:-1]), "only a turn that ended may be answered"
        assert bool(row[keys.TERMINATED]) == ended[-1] and bool(row[keys.TRUNCATED]) != ended[-1]
        assert all(tokenizer.eos_token_id not in turn[:-1] for turn in turns)
        log_probs = row[keys.LOG_PROBS]
        assert log_probs.dtype == torch.float32 and (log_probs[~row[keys.ACTION_MASK]] == 0).all()


def check_scores(rows: TensorDictBase, policy: TransformersWrapper) -> None:
    """Check that the ratio is 1 with unchanged weights, up to rounding of logits over the temperature."""
    tolerance = 1e-5 / min(1.0, policy.distribution.temperature)
    scorer = policy.get_new_version(generate=False)
    rows = tensor_rows(rows)
    scored = scorer.score(rows)
    tokens, mask = ragged(rows, keys.TOKENS), ragged(rows, keys.ACTION_MASK)
    assert scored.actions.tokens[scored.actions.action_mask].tolist() == torch.cat(tokens)[torch.cat(mask)].tolist()
    behaviour = torch.cat(ragged(rows, keys.LOG_PROBS))[torch.cat(mask)]
    torch.testing.assert_close(scored.log_probs[scored.actions.mask], behaviour, rtol=0, atol=tolerance)
    for row in rows.unbind(0):
        row.set(keys.ADVANTAGE, torch.ones(1, 1))
    out = RLOOLoss(scorer)(rows)
    assert out.ESS.item() == pytest.approx(1, abs=1e-5)
    assert out.log_ratio_max.item() <= tolerance and out.clip_fraction.item() == 0
    for row, log_probs in zip(rows.unbind(0), scored.log_probs, strict=True):
        difference = log_probs.sum() - row[keys.LOG_PROBS].sum()
        assert difference.exp().item() == pytest.approx(1, abs=1e-5 * int(row[keys.ACTION_MASK].sum()))


def check_reference(rows: TensorDictBase, model, settings: dict) -> None:
    """Check behavior log-probs against a separate forward pass of each row."""
    distribution = {k: v for k, v in settings.items() if k not in ("max_new_tokens", "seed")}
    distribution["penalty"] = distribution.pop("repetition_penalty", 1.0)
    exact = copy.deepcopy(model).double()
    for row in rows.unbind(0):
        expected = reference_log_probs(exact, row, **distribution)
        torch.testing.assert_close(row[keys.LOG_PROBS][row[keys.ACTION_MASK]], expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize(("case", "distribution"), PAIRWISE)
def test_sampled_stored_and_scored_are_the_same(
    case: str, distribution: dict, make_tokenizer: Callable, make_model: Callable, prompts
) -> None:
    tokenizer_kwargs, end_bias, max_new_tokens, turns = CASES[case]
    tokenizer = make_tokenizer("chatml", **tokenizer_kwargs)
    model = make_model(tokenizer, end_bias=end_bias)
    settings = {"max_new_tokens": max_new_tokens, **distribution}
    rows, policy, sampled = collect(model, tokenizer, prompts, settings, turns)
    check_ids(rows, sampled, tokenizer)
    check_scores(rows, policy)
    check_reference(rows, model, settings)
    # The rows are those that the case names
    turns = [turn for turns in sampled.values() for turn in turns]
    if case == "non_canonical":
        again = tokenizer([tokenizer.decode(turn) for turn in turns], add_special_tokens=False)["input_ids"]
        assert sum(ids != turn for ids, turn in zip(again, turns, strict=True)) >= 0.5 * len(turns)
    elif case == "turns":
        assert int(rows[keys.NUM_TURNS].max()) > 1
    elif case == "one_token":
        assert {len(turn) for turn in turns} == {1}


def generated(policy: TransformersWrapper, rows: TensorDictBase) -> list[tuple[list[int], torch.Tensor]]:
    """Return sampled ids and their log-probs of each row."""
    out = policy(rows)
    return [(r[keys.RESPONSE_TOKENS].tolist(), r[keys.LOG_PROBS][r[keys.ACTION_MASK]]) for r in out.unbind(0)]


def check_equal(ours: list[tuple[list[int], torch.Tensor]], theirs: list[tuple[list[int], torch.Tensor]]) -> None:
    for (ids, log_probs), (other_ids, other_log_probs) in zip(ours, theirs, strict=True):
        assert ids == other_ids
        torch.testing.assert_close(log_probs, other_log_probs, rtol=0, atol=1e-5)


def test_samples_that_share_a_prefill_equal_separate_runs(
    make_tokenizer: Callable, make_model: Callable, prompt_rows: Callable, prompts
) -> None:
    """``num_samples`` draws the same random numbers as a batch of repeated prompts."""
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, end_bias=6.0)
    ids = [encode_prompt(tokenizer, row[keys.QUERY]) for row in prompts]
    kwargs = {"max_new_tokens": 9, "seed": 5}
    grouped = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs=kwargs, num_samples=3)(prompt_rows(*ids))
    assert grouped.batch_size == (len(ids), 3)
    flat = stack_rows([row for group in grouped.unbind(0) for row in group.unbind(0)])
    ours = [(r[keys.RESPONSE_TOKENS].tolist(), r[keys.LOG_PROBS][r[keys.ACTION_MASK]]) for r in flat.unbind(0)]
    policy = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs=kwargs)
    check_equal(ours, generated(policy, prompt_rows(*[i for i in ids for _ in range(3)])))
    check_scores(flat, policy)
    check_reference(flat, model, {"temperature": 1.0})
