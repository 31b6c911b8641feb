"""Penalties, bias, bad words, lengths and grammars of turns: the scorer computes what the sampler sampled from."""

from __future__ import annotations

import json
import re

import pytest
import regex
import torch
from tensordict import TensorDict

from support.turn_settings import SCHEMA, TURN_SETTINGS
from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import stack_rows
from torchrl_rloo.functional import SamplingDistribution
from torchrl_rloo.modules import TransformersWrapper
from torchrl_rloo.objectives import RLOOLoss

each_setting = pytest.mark.parametrize("name", TURN_SETTINGS)


def two_turns(model, tokenizer, settings: dict, size: int = 8) -> tuple[TransformersWrapper, TensorDict]:
    """Return a policy, and rows of two turns with feedback between."""
    kwargs = {"max_new_tokens": 24, "seed": 0} | settings
    policy = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs=kwargs)
    prompt = tokenizer("What is 2+3?")["input_ids"]
    rows = [TensorDict({keys.PROMPT_TOKENS: torch.tensor(prompt[: 3 + n])}) for n in range(size)]
    rows = policy(stack_rows(rows))
    feedback = torch.tensor(tokenizer("And now?")["input_ids"])
    follow = []
    for row in rows.unbind(0):
        row = row.copy()
        zeros = torch.zeros(len(feedback))
        parts = {name: torch.cat([row[key], zeros.to(row[key].dtype)]) for name, key in PARTS.items()}
        row.set(keys.PROMPT_TOKENS, torch.cat([row[keys.TOKENS], feedback]))
        row.set(keys.ACTION_MASK, parts["mask"])
        row.set(keys.LOG_PROBS, parts["log_probs"])
        follow.append(row)
    return policy, policy(stack_rows(follow))


PARTS = {"mask": keys.ACTION_MASK, "log_probs": keys.LOG_PROBS}


def turns_of(row: TensorDict) -> list[tuple[int, list[int]]]:
    """Return place and ids of each turn."""
    mask, ids, turns = row[keys.ACTION_MASK].tolist(), row[keys.TOKENS].tolist(), []
    for t, acted in enumerate(mask):
        if acted and not mask[t - 1]:
            turns.append((t, []))
        if acted:
            turns[-1][1].append(ids[t])
    return turns


@each_setting
@pytest.mark.parametrize("way", ["padded", "full logits", "packed", "shared_prefix"])
def test_the_ratio_is_one(name: str, way: str, random_model, bpe):
    policy, rows = two_turns(random_model, bpe, TURN_SETTINGS[name])
    scorer = policy.get_new_version(generate=False, **({"packing": way} if way in ("packed", "shared_prefix") else {}))
    scorer.head = None if way == "full logits" else scorer.head
    scored = scorer.score(rows)
    sampled = torch.cat([row[keys.LOG_PROBS][row[keys.ACTION_MASK]] for row in rows.unbind(0)])
    torch.testing.assert_close(scored.log_probs[scored.actions.mask], sampled, rtol=0, atol=1e-5)
    plain = TransformersWrapper(random_model, tokenizer=bpe, generate=False).score(rows)
    assert not torch.allclose(plain.log_probs, scored.log_probs, atol=3e-4), "settings without an effect"
    assert scored.entropy.isfinite().all()


def allowed_ids(tokenizer, settings: dict, earlier: list[int], stop_ids: tuple[int, ...]) -> set[int]:
    """Return the ids that may follow those of a turn, by a look at each text."""
    texts = {v: tokenizer.decode([v]) for v in range(len(tokenizer))}
    ids = set(texts)
    if len(earlier) < settings.get("min_new_tokens", 0):
        ids -= set(stop_ids)
    for word in settings.get("bad_words", ()):
        # The test's words are one or two ids, with and without a space
        for spelled in (tokenizer.encode(word.strip()), tokenizer.encode(" " + word.strip())):
            if spelled == tokenizer.encode(word.strip()) or len(spelled) == len(tokenizer.encode(word.strip())):
                ids -= {spelled[-1]} if [*earlier, spelled[-1]][-len(spelled) :] == spelled else set()
    if "structured" in settings:
        pattern, text = settings["structured"]["regex"], tokenizer.decode(earlier)
        special = set(tokenizer.all_special_ids) | set(tokenizer.get_added_vocab().values())
        ids = {v for v in ids - special if regex.fullmatch(pattern, text + texts[v], partial=True)}
        ids |= set(stop_ids) if regex.fullmatch(pattern, text) else set()
    return ids


@pytest.mark.parametrize("name", ["presence", "frequency", "bias", "min_new_tokens", "bad_words", "regex", "all"])
def test_log_probs_are_those_of_a_loop_over_tokens(name: str, random_model, bpe):
    settings = TURN_SETTINGS[name]
    policy, rows = two_turns(random_model, bpe, {"top_k": None} | settings, size=3)
    for row in rows.unbind(0):
        with torch.no_grad():
            logits = random_model(row[keys.TOKENS][None]).logits[0].double()
        for start, turn in turns_of(row):
            for n, token in enumerate(turn):
                z = logits[start + n - 1].clone()
                for v, bias in settings.get("logit_bias", {}).items():
                    z[v] += bias
                for v in set(row[keys.TOKENS][: start + n].tolist()):
                    penalty = settings.get("repetition_penalty", 1.0)
                    z[v] = z[v] / penalty if z[v] > 0 else z[v] * penalty
                for v in set(turn[:n]):
                    z[v] -= settings.get("frequency_penalty", 0.0) * turn[:n].count(v)
                    z[v] -= settings.get("presence_penalty", 0.0)
                z /= settings.get("temperature", 1.0)
                allowed = allowed_ids(bpe, settings, turn[:n], policy.stop_ids)
                z[[v for v in range(len(z)) if v not in allowed]] = -torch.inf
                p, order = z.softmax(0), z.argsort(descending=True).tolist()
                kept = [v for i, v in enumerate(order) if p[order[:i]].sum() < settings.get("top_p", 1.0)]
                expected = (p[token] / p[kept].sum()).log().item()
                assert row[keys.LOG_PROBS][start + n].item() == pytest.approx(expected, abs=2e-5)


def test_finished_turns_follow_their_grammar(random_model, bpe):
    checks = {
        "regex": lambda text: re.fullmatch("[0-9]{3,6}(a|b)+", text),
        "choice": TURN_SETTINGS["choice"]["structured"]["choice"].__contains__,
        "json": lambda text: json.loads(text)["a"] in SCHEMA["properties"]["a"]["enum"],
        "grammar": lambda text: re.fullmatch("x*y", text),
    }
    for name, check in checks.items():
        _, rows = two_turns(random_model, bpe, TURN_SETTINGS[name] | {"max_new_tokens": 80})
        turns = [turn for row in rows.unbind(0) for _, turn in turns_of(row)]
        finished = [bpe.decode(turn[:-1]) for turn in turns if turn[-1] == bpe.eos_token_id]
        assert finished and all(check(text) for text in finished), name


def test_gradients_are_those_of_autograd(random_model, bpe):
    """The tiles' own gradient equals that of full logits, whose operations autograd differentiates."""
    policy, rows = two_turns(random_model, bpe, TURN_SETTINGS["all"] | {"top_p": 1.0}, size=4)
    found = []
    for with_head in (True, False):
        scorer = policy.get_new_version(generate=False)
        scorer.head = scorer.head if with_head else None
        scored = scorer.score(rows)
        (scored.log_probs.sum() + 0.3 * scored.entropy.sum()).backward()
        found.append(random_model.lm_head.weight.grad.clone())
        random_model.zero_grad()
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_recorded_supports_are_within_the_grammar(random_model, bpe):
    settings = TURN_SETTINGS["regex"] | {"top_k": 80}
    prompt = torch.tensor(bpe("What is 2+3?")["input_ids"])
    policy = TransformersWrapper(random_model, tokenizer=bpe, generate_kwargs=settings, record_support=True)
    (row,) = policy(TensorDict({keys.PROMPT_TOKENS: prompt[None]}, [1])).unbind(0)
    assert max(row[keys.SUPPORT_SIZES]) < 80


def test_a_token_outside_of_the_rules_is_refused(random_model, bpe):
    _, rows = two_turns(random_model, bpe, {}, size=2)
    scorer = TransformersWrapper(random_model, tokenizer=bpe, generate=False, generate_kwargs=TURN_SETTINGS["regex"])
    with pytest.raises(ValueError, match="is not allowed by min_new_tokens, bad_words or structured"):
        scorer.score(rows)


@each_setting
def test_a_rank_or_a_step_without_rows_has_a_gradient_of_zeros(name: str, random_model, bpe):
    scorer = TransformersWrapper(random_model, tokenizer=bpe, generate=False, generate_kwargs=TURN_SETTINGS[name])
    loss = RLOOLoss(scorer)(stack_rows([])).loss
    loss.backward()
    assert loss == 0 and all(p.grad is None or not p.grad.any() for p in random_model.parameters())
    random_model.zero_grad()


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"presence_penalty": 3}, "presence_penalty=3 must be in"),
        ({"frequency_penalty": -3}, "frequency_penalty=-3 must be in"),
        ({"min_new_tokens": -1}, "min_new_tokens=-1 must be at least 0"),
        ({"bad_words": [" "]}, "none of them blank"),
        ({"logit_bias": {1: 1.0}, "repetition_penalty": 1.1}, "logit_bias cannot be combined"),
        ({"structured": {"regex": "a"}, "min_new_tokens": 1}, "min_new_tokens cannot be combined with structured"),
        ({"structured": {"regex": "a"}, "ignore_eos": True}, "ignore_eos=True cannot be combined"),
        ({"structured": {"regex": "(a"}}, "structured=.regex: .a. is invalid"),
        ({"structured": {"json": "{"}}, "structured=.json: .. is invalid"),
        ({"structured": {"lark": "a"}}, "must be one of .regex: text., "),
        ({"structured": "a+"}, "structured='a.' must be one of .regex: text., "),
        ({"structured": {}}, "must be one of .regex: text., "),
        ({"structured": {"choice": "yes"}}, "must be one of .regex: text., "),
        ({"structured": {"choice": []}}, "must be one of .regex: text., "),
        ({"structured": {"grammar": "start: a"}}, "must be one of .regex: text., "),
        ({"penalty_alpha": 0.6}, "unknown sampling arguments .'penalty_alpha'.; valid: "),
    ],
    ids=str,
)
def test_settings_that_cannot_be_followed_are_refused(settings: dict, message: str, random_model, bpe):
    with pytest.raises((TypeError, ValueError), match=message):
        TransformersWrapper(random_model, tokenizer=bpe, generate_kwargs=settings)


def test_equal_distributions_are_equal_however_they_are_written():
    written = SamplingDistribution(logit_bias={7: 1, 3: 2}, bad_words=["a"], structured={"choice": ["x"]})
    same = SamplingDistribution(logit_bias=((3, 2.0), (7, 1.0)), bad_words=("a",), structured={"choice": ("x",)})
    assert written == same and hash(written) == hash(same) and SamplingDistribution(bad_words="a").bad_words == ("a",)
