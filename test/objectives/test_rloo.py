from __future__ import annotations

import copy
import math

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.modules.llm.policies import LogProbs, Masks, Tokens

from support.gradients import assert_same_gradient, gradient_of
from torchrl_rloo.data import keys, stack_rows
from torchrl_rloo.embedded import build_model
from torchrl_rloo.modules import TransformersWrapper
from torchrl_rloo.objectives import RLOOLoss, SFTLoss, merge_outputs
from torchrl_rloo.replay import drop_zero_advantage

SHAPES = ["ppaa", "ppaaccaaa", "pppppapcca", "pa", "ppaaaaaaccac", "pccaap"]  # a marks the action tokens
ADVANTAGES = [1.0, -0.5, 2.0, -1.5, 0.0, 0.7]
TRUNCATED = [False, True, False, False, True, False]


@pytest.fixture(scope="module")
def model(tokenizer):
    """Separate model: the tests leave gradients on it."""
    return build_model(tokenizer, seed=0).eval()


@pytest.fixture(scope="module")
def exact_model(model):
    """Model with the same weights in float64."""
    return copy.deepcopy(model).double()


@pytest.fixture
def make_loss(model, tokenizer):
    policy = TransformersWrapper(model, tokenizer=tokenizer, generate=False)
    return lambda **settings: RLOOLoss(policy, **settings)


def exact_log_probs(exact_model, tokens: torch.Tensor) -> torch.Tensor:
    """Return log-probs ``[T, V]``: entry ``t`` predicts token ``t``; the first is NaN."""
    full = exact_model(input_ids=tokens[None], use_cache=False).logits[0].log_softmax(-1)
    return torch.cat([torch.full_like(full[:1], math.nan), full[:-1]])


@pytest.fixture(scope="module")
def rows(exact_model) -> TensorDictBase:
    """Rows sampled with the current weights: whole conversations of one to three turns."""
    generator, result = torch.Generator().manual_seed(0), []
    for i, shape in enumerate(SHAPES):
        tokens = torch.randint(3, 300, (len(shape),), generator=generator)
        action = torch.tensor([c == "a" for c in shape])
        with torch.no_grad():
            own = exact_log_probs(exact_model, tokens).gather(-1, tokens[:, None])[:, 0]
        row = TensorDict(
            {
                keys.GROUP_ID: torch.tensor(i // 2),
                keys.TRUNCATED: torch.tensor([TRUNCATED[i]]),
                keys.ADVANTAGE: torch.tensor([[ADVANTAGES[i]]]),
            }
        )
        row.set("tokens", Tokens(full=tokens))
        row.set("masks", Masks(all_assistant_mask=action, all_attention_mask=torch.ones_like(action)))
        row.set("log_probs", LogProbs(full=torch.where(action, own, 0.0).float()))
        result.append(row)
    return stack_rows(result)


def test_on_policy_the_ratio_is_one(make_loss, rows):
    out = make_loss()(rows)
    assert out.log_ratio_max.item() < 1e-5 and out.kl_approx.item() < 1e-8
    assert out.ESS.item() == pytest.approx(1, abs=1e-6)
    assert out.clip_fraction.item() == out.clip_fraction_low.item() == out.clip_fraction_high.item() == 0
    assert out.loss_objective.item() == pytest.approx(-sum(ADVANTAGES) / len(ADVANTAGES), abs=1e-4)


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 1.8, "top_k": 20},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"temperature": 0.8, "top_k": 30, "top_p": 0.9, "repetition_penalty": 1.3},
    ],
    ids=str,
)
def test_on_policy_samples_have_ratio_one(model, tokenizer, sampling):
    policy = TransformersWrapper(
        model, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 10, "seed": 3} | sampling
    )
    prompts = [torch.tensor(tokenizer(text)["input_ids"]) for text in ("What is 2+3?", "7", "Call the tool")]
    rows = policy(stack_rows([TensorDict({keys.PROMPT_TOKENS: p}) for p in prompts for _ in range(3)]))
    for row in rows.unbind(0):
        row.set(keys.ADVANTAGE, torch.ones(1, 1))
    out = RLOOLoss(policy.get_new_version(generate=False))(rows)
    assert out.log_ratio_max.item() < 1e-5
    assert out.num_action_tokens.item() == sum(int(r[keys.ACTION_MASK].sum()) for r in rows.unbind(0))


def test_a_batch_without_any_signal_has_loss_zero(make_loss, model, rows):
    dead = [row.clone() for row in rows.unbind(0)]
    for row in dead:
        row[keys.ADVANTAGE].zero_()
    kept = drop_zero_advantage(stack_rows(dead))
    assert len(kept) == 0
    loss = make_loss()
    out = loss(kept, loss.normalizers(stack_rows(dead)))
    assert out.loss_objective.item() == 0
    assert all((g == 0).all() for g in gradient_of(model, out.loss_objective))


def test_outputs_print_their_loss_and_merge_with_their_kind_only(make_loss, model, tokenizer, rows):
    loss = make_loss()
    out = loss(rows)
    assert f"RLOOLossOutput(loss={out.loss.item():.6g}, loss_objective=" in str(out) and "ESS=1" in str(out)
    with pytest.raises(TypeError, match="RLOOLossOutput.mean would average the loss with its metrics; use .loss"):
        out.mean(reduce=True)
    sft = SFTLoss(TransformersWrapper(model, tokenizer=tokenizer, generate=False))(rows)
    with pytest.raises(TypeError, match="outputs are of RLOOLossOutput and of .*SFTLossOutput"):
        merge_outputs([out, sft])
    nothing = loss(rows[:0], loss.normalizers(rows))
    for outputs in ([nothing, out], [out, nothing]):
        assert merge_outputs(outputs) == pytest.approx(merge_outputs([out]), abs=1e-6)
    assert merge_outputs([]) == {}


def test_only_positions_that_predict_action_tokens_carry_gradient(make_loss, model, rows):
    hidden = []

    def keep(module, args, output):
        output.last_hidden_state.retain_grad()
        hidden.append(output.last_hidden_state)

    hook = model.get_decoder().register_forward_hook(keep)
    try:
        make_loss(surrogate="unclipped")(rows).loss_objective.backward()
    finally:
        hook.remove()
    carries = hidden[-1].grad.abs().sum(-1) > 0
    for i, row in enumerate(rows.unbind(0)):
        action = row[keys.ACTION_MASK]
        predicts = torch.cat([action[1:], action.new_zeros(1)])
        expected = predicts if ADVANTAGES[i] else torch.zeros_like(predicts)
        assert carries[i, : len(action)].tolist() == expected.tolist()
        assert not carries[i, len(action) :].any()


def test_log_probs_of_other_tokens_are_never_read(make_loss, model, rows):
    poisoned = [row.clone() for row in rows.unbind(0)]
    for row in poisoned:
        row[keys.LOG_PROBS][~row[keys.ACTION_MASK]] = math.nan
    loss = make_loss()
    out, expected = loss(stack_rows(poisoned)), loss(rows)
    for name in loss.out_keys:
        torch.testing.assert_close(getattr(out, name), getattr(expected, name), rtol=0, atol=0, equal_nan=True)
    assert all(g.isfinite().all() for g in gradient_of(model, out.loss_objective))


def test_unknown_behavior_log_probs_do_not_change_plain_reinforce(make_loss, model, rows):
    unknown = [row.clone() for row in rows.unbind(0)]
    for row in unknown:
        row[keys.LOG_PROBS][row[keys.ACTION_MASK]] = math.nan
    loss = make_loss(ratio="none")
    out = loss(stack_rows(unknown))
    assert_same_gradient(
        gradient_of(model, out.loss_objective), gradient_of(model, loss(rows).loss_objective), tolerance=0
    )


def test_rows_without_action_tokens_count_and_add_no_gradient(make_loss, model, rows):
    silent = rows[3].clone()
    silent[keys.ACTION_MASK].zero_()
    loss = make_loss()
    out = loss(stack_rows([rows[0], silent]))
    expected = loss(stack_rows([rows[0]]), loss.normalizers(stack_rows([rows[0], silent])))
    assert_same_gradient(
        gradient_of(model, out.loss_objective), gradient_of(model, expected.loss_objective), tolerance=1e-6
    )
    assert out.log_ratio.tolist()[1] == 0
    alone = loss(stack_rows([silent]))
    assert alone.loss_objective.item() == 0 and alone.entropy.item() == 0
    assert all((g == 0).all() for g in gradient_of(model, alone.loss_objective))


def test_a_dense_batch_is_the_same_as_a_ragged_one(make_loss, rows):
    same_length = stack_rows([rows[0].clone(), rows[0].clone()])
    dense = TensorDict(
        {
            key: torch.stack([row[key] for row in same_length.unbind(0)])
            for key in (keys.TOKENS, keys.ACTION_MASK, keys.LOG_PROBS, keys.ADVANTAGE)
        },
        [2],
    )
    loss = make_loss()
    assert torch.equal(loss(dense).loss_objective, loss(same_length).loss_objective)


def test_the_loss_alone_carries_gradient_and_the_rows_stay_as_they_are(make_loss, model, rows):
    before = rows.clone()
    loss = make_loss()
    out = loss(rows)
    assert out.loss_objective.requires_grad
    values = {n: value for n in loss.out_keys if (value := getattr(out, n)) is not None}
    assert [n for n, value in values.items() if value.requires_grad] == ["loss_objective"]
    assert {id(p) for p in loss.parameters()} == {id(p) for p in model.parameters()}
    for row, old in zip(rows.unbind(0), before.unbind(0), strict=True):
        assert set(row.keys(True, True)) == set(old.keys(True, True))
        assert all(torch.equal(row[key], old[key]) for key in row.keys(True, True))


def test_bad_arguments_are_refused(make_loss, model, tokenizer):
    with pytest.raises(ValueError, match="ratio='tokens' is unknown.*did you mean 'token'"):
        make_loss(ratio="tokens")
    with pytest.raises(ValueError, match="Linear.*score"):
        RLOOLoss(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="generate=False"):
        RLOOLoss(TransformersWrapper(model, tokenizer=tokenizer))
    with pytest.raises(TypeError, match="clip_eps"):
        make_loss(clip_eps=0.2)
