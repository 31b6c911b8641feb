"""KLRewardTransform: the penalty is a sum over action tokens, applied once, at the end."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tensordict import TensorDictBase
from torchrl.modules.llm.policies import LogProbs

from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import keys, load_prompts
from torchrl_rloo.data.rows import gather_actions, ragged
from torchrl_rloo.embedded import build_model
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.envs.transforms import FeedbackTransform, KLRewardTransform, add_reference_kl
from torchrl_rloo.functional.kl import KL_ESTIMATORS
from torchrl_rloo.modules import TransformersWrapper
from torchrl_rloo.objectives.kl import AdaptiveKLCoefficient

COEFF = 0.3


def length_reward(completions, **_) -> list[float]:
    return [float(len(c)) for c in completions]


@pytest.fixture(scope="module")
def bpe(make_tokenizer: Callable):
    return make_tokenizer(pad_is_eos=True)


@pytest.fixture(scope="module")
def policy_model(make_model: Callable, bpe):
    return make_model(bpe, seed=0, end_bias=7.0)


@pytest.fixture(scope="module")
def ref_model(make_model: Callable, bpe):
    return make_model(bpe, seed=1, end_bias=6.0)


@pytest.fixture(scope="module")
def make_ref(ref_model, bpe) -> Callable[..., TransformersWrapper]:
    return lambda **kw: TransformersWrapper(ref_model, tokenizer=bpe, generate=False, generate_kwargs=kw)


@pytest.fixture(scope="module")
def collect(policy_model, bpe, prompts) -> Callable[..., TensorDictBase]:
    """Collect rows of two groups per prompt, always with the same samples."""

    def run(*kl: KLRewardTransform, rewards=length_reward, turns: int = 1, **generate_kwargs) -> TensorDictBase:
        def respond(conversation, row):
            return [{"role": "user", "content": "again"}] if len(conversation) < 2 * turns else None

        env = DatasetChatEnv(
            prompts,
            bpe,
            prompts_per_batch=4,
            num_generations=2,
            shuffle=False,
            transforms=[FeedbackTransform(respond, max_turns=3)],
            rewards=rewards,
            after_rewards=kl,
        )
        settings = {"max_new_tokens": 8, "seed": 0, **generate_kwargs}
        return LLMCollector(env, TransformersWrapper(policy_model, tokenizer=bpe, generate_kwargs=settings)).collect()

    return run


def reference_log_probs(model, row: TensorDictBase, temperature: float = 1.0) -> torch.Tensor:
    """Compute log-probs of a row's tokens in one forward pass without padding; 0 except on actions."""
    tokens = row[keys.TOKENS]
    with torch.no_grad():
        logits = model(input_ids=tokens[None], use_cache=False).logits[0].double() / temperature
    values = logits[:-1].log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
    return torch.where(row[keys.ACTION_MASK], torch.cat([torch.zeros(1), values.float()]), 0.0)


def penalty(model, row: TensorDictBase, temperature: float = 1.0) -> torch.Tensor:
    """Sum, over action tokens, the behavior log-prob minus the reference log-prob."""
    difference = row[keys.LOG_PROBS] - reference_log_probs(model, row, temperature)
    return difference[row[keys.ACTION_MASK]].sum()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_reward_less_the_summed_kl(temperature: float, collect: Callable, make_ref: Callable, ref_model) -> None:
    kl = KLRewardTransform(make_ref(temperature=temperature), COEFF)
    rows = collect(kl, temperature=temperature)
    plain = collect(temperature=temperature)
    assert len({len(t) for t in ragged(rows, keys.TOKENS)}) > 2
    for row, before in zip(rows.unbind(0), plain.unbind(0), strict=True):
        assert torch.equal(row[keys.TOKENS], before[keys.TOKENS]), "the same samples"
        expected = before[keys.REWARD] - COEFF * penalty(ref_model, row, temperature)
        torch.testing.assert_close(row[keys.REWARD], expected, rtol=0, atol=1e-4)
        assert row[keys.REWARD].shape == (1, 1) and row[keys.REWARD].dtype == torch.float32
        ref = row[keys.REF_LOG_PROBS]
        assert ref.shape == row[keys.TOKENS].shape and ref.dtype == torch.float32
        torch.testing.assert_close(ref, reference_log_probs(ref_model, row, temperature), rtol=0, atol=2e-5)
        assert isinstance(row["next", "ref_log_probs"], LogProbs)
        assert torch.equal(row[keys.REWARDS], before[keys.REWARDS]), "what the functions gave stays as it was"


def test_several_turns_are_one_sum_taken_once(collect: Callable, make_ref: Callable, ref_model, bpe) -> None:
    one_token = {"max_new_tokens": 1, "stop_token_ids": list(range(len(bpe)))}
    rows = collect(KLRewardTransform(make_ref(), COEFF), turns=3, **one_token)
    plain = collect(turns=3, **one_token)
    assert rows[keys.NUM_TURNS].tolist() == [3] * 8
    for row, before in zip(rows.unbind(0), plain.unbind(0), strict=True):
        assert int(row[keys.ACTION_MASK].sum()) == 3
        expected = before[keys.REWARD] - COEFF * penalty(ref_model, row)
        torch.testing.assert_close(row[keys.REWARD], expected, rtol=0, atol=1e-4)
        ref = reference_log_probs(ref_model, row)
        torch.testing.assert_close(row[keys.REF_LOG_PROBS], ref, rtol=0, atol=2e-5)


def test_a_coefficient_of_zero_only_records(collect: Callable, make_ref: Callable) -> None:
    rows, plain = collect(KLRewardTransform(make_ref(), 0.0)), collect()
    assert torch.equal(rows[keys.REWARD], plain[keys.REWARD])
    assert all((r != 0).any() for r in ragged(rows, keys.REF_LOG_PROBS))


@pytest.mark.parametrize("micro_batch_size", [1, 3, 8, 100])
def test_micro_batches_change_nothing(micro_batch_size: int, collect: Callable, make_ref: Callable) -> None:
    whole = collect(KLRewardTransform(make_ref(), COEFF))
    parts = collect(KLRewardTransform(make_ref(), COEFF, micro_batch_size=micro_batch_size))
    torch.testing.assert_close(parts[keys.REWARD], whole[keys.REWARD], rtol=0, atol=1e-5)
    for ours, theirs in zip(ragged(parts, keys.REF_LOG_PROBS), ragged(whole, keys.REF_LOG_PROBS), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_truncated_rows_can_be_left_out(collect: Callable, make_ref: Callable) -> None:
    masked = collect(KLRewardTransform(make_ref(), COEFF, mask_truncated_completions=True))
    penalised, plain = collect(KLRewardTransform(make_ref(), COEFF)), collect()
    truncated = masked[keys.TRUNCATED].flatten()
    assert 0 < truncated.sum() < len(truncated)
    assert torch.equal(masked[keys.REWARD][truncated], plain[keys.REWARD][truncated])
    assert torch.equal(masked[keys.REWARD][~truncated], penalised[keys.REWARD][~truncated])
    assert all((r != 0).any() for r in ragged(masked, keys.REF_LOG_PROBS)), "log-probs are recorded all the same"


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_another_estimator(estimator: str, collect: Callable, make_ref: Callable, ref_model) -> None:
    rows, plain = collect(KLRewardTransform(make_ref(), COEFF, estimator=estimator)), collect()
    for row, before in zip(rows.unbind(0), plain.unbind(0), strict=True):
        kl = KL_ESTIMATORS[estimator](row[keys.LOG_PROBS], reference_log_probs(ref_model, row))
        expected = before[keys.REWARD] - COEFF * kl[row[keys.ACTION_MASK]].sum()
        torch.testing.assert_close(row[keys.REWARD], expected, rtol=1e-4, atol=1e-4)


def test_an_adaptive_coefficient_is_read_at_each_use(collect: Callable, make_ref: Callable) -> None:
    coefficient = AdaptiveKLCoefficient(COEFF, target=1.0, horizon=10)
    transform = KLRewardTransform(make_ref(), coefficient)
    coefficient.update(1000.0, num_samples=10)
    rows, expected = collect(transform), collect(KLRewardTransform(make_ref(), 1.2 * COEFF))
    torch.testing.assert_close(rows[keys.REWARD], expected[keys.REWARD])


def test_an_abstention_stays_one(collect: Callable, make_ref: Callable) -> None:
    def abstain(completions, **_):
        return [None if i % 2 else 1.0 for i in range(len(completions))]

    rewards = collect(KLRewardTransform(make_ref(), COEFF), rewards=abstain)[keys.REWARD].flatten()
    assert rewards[1::2].isnan().all() and rewards[::2].isfinite().all()


@pytest.mark.parametrize("settings", [{}, {"mask_truncated_completions": True, "estimator": "k3"}])
def test_collected_rows_get_the_penalty_of_the_transform(settings, collect: Callable, make_ref: Callable) -> None:
    def abstain(completions, **_):
        return [None if i % 4 == 1 else float(i) for i in range(len(completions))]

    expected = collect(KLRewardTransform(make_ref(), COEFF, **settings), rewards=abstain)
    rows = add_reference_kl(collect(rewards=abstain), make_ref(), COEFF, **settings)
    assert 0 < rows[keys.REWARD].isnan().sum() < len(rows) and 0 < rows[keys.TRUNCATED].sum() < len(rows)
    torch.testing.assert_close(rows[keys.REWARD], expected[keys.REWARD], rtol=0, atol=1e-4, equal_nan=True)
    for row, other in zip(rows.unbind(0), expected.unbind(0), strict=True):
        wanted = row[keys.LOG_PROBS] if row[keys.REWARD].isnan() else other[keys.REF_LOG_PROBS]
        torch.testing.assert_close(row[keys.REF_LOG_PROBS], wanted, rtol=0, atol=1e-5)


def test_a_turn_that_continues_is_not_penalized(bpe, prompts, policy_model, make_ref: Callable) -> None:
    """Expect no reward, and a zero log-prob per token, until the row ends."""
    env = DatasetChatEnv(
        prompts,
        bpe,
        prompts_per_batch=4,
        transforms=[FeedbackTransform(lambda c, row: [{"role": "user", "content": "again"}], max_turns=3)],
        rewards=length_reward,
        after_rewards=[KLRewardTransform(make_ref(), COEFF)],
    )
    kwargs = {"max_new_tokens": 1, "stop_token_ids": list(range(len(bpe)))}
    policy = TransformersWrapper(policy_model, tokenizer=bpe, generate_kwargs=kwargs)
    reset = env.reset()
    assert all((row["ref_log_probs", "full"] == 0).all() for row in reset.unbind(0))
    for row in env.step(policy(reset)).unbind(0):
        assert not row[keys.DONE].any() and float(row[keys.REWARD]) == 0
        assert row[keys.REF_LOG_PROBS].tolist() == [0.0] * len(row["next", keys.PROMPT_TOKENS])


def test_the_references_weights_are_not_the_environments(bpe, prompts, make_ref: Callable, ref_model) -> None:
    kl = KLRewardTransform(make_ref(), COEFF)
    env = DatasetChatEnv(prompts, bpe, prompts_per_batch=1, rewards=length_reward, after_rewards=[kl])
    assert list(env.parameters()) == [] and not any("weight" in k for k in env.state_dict())
    assert not any(p.requires_grad and p.grad is not None for p in ref_model.parameters())


def test_arguments_are_checked(policy_model, bpe, make_ref: Callable) -> None:
    with pytest.raises(ValueError, match="generate=False"):
        KLRewardTransform(TransformersWrapper(policy_model, tokenizer=bpe), 0.1)
    with pytest.raises(ValueError, match="kl_to_ref_coeff=-0.1"):
        KLRewardTransform(make_ref(), -0.1)
    with pytest.raises(ValueError, match="kl_to_ref_coeff=nan"):
        KLRewardTransform(make_ref(), float("nan"))
    with pytest.raises(ValueError, match="'k4' is unknown"):
        KLRewardTransform(make_ref(), 0.1, estimator="k4")
    with pytest.raises(ValueError, match="Linear has none"):
        KLRewardTransform(torch.nn.Linear(1, 1), 0.1)


def test_the_reference_is_scored_over_the_tokens_that_the_sampler_could_draw(tokenizer, model):
    settings = {"top_p": 0.8}
    policy = TransformersWrapper(
        model,
        tokenizer=tokenizer,
        generate_kwargs=settings | {"max_new_tokens": 6, "seed": 0},
        record_support=True,
    )
    other = TransformersWrapper(
        build_model(tokenizer, seed=1).eval(), tokenizer=tokenizer, generate=False, generate_kwargs=settings
    )
    env = DatasetChatEnv(
        load_prompts([{"prompt": f"What is {i}?"} for i in range(4)]),
        tokenizer,
        prompts_per_batch=2,
        num_generations=2,
        rewards=lambda completions, **columns: [0.0] * len(completions),
        after_rewards=[KLRewardTransform(other, 0.1)],
    )
    rows = LLMCollector(env, policy).collect()
    over_support = other.score(rows)
    recorded = gather_actions(ragged(rows, keys.REF_LOG_PROBS), over_support.actions)
    torch.testing.assert_close(recorded, over_support.log_probs.detach(), atol=0, rtol=0)
    anew = other.score(rows.exclude("support")).log_probs
    assert (anew - recorded).abs().max() > 0.01
