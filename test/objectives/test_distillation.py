"""Distillation: divergences against float64 loops and TRL, sampled tokens as in TorchRL and TRL, teachers."""

from __future__ import annotations

import math

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.objectives.llm.distillation import k3_kl_token_estimate

from torchrl_rloo.data import keys, stack_rows
from torchrl_rloo.embedded import build_model
from torchrl_rloo.engines import TransformersEngine
from torchrl_rloo.functional.kl import generalized_jsd
from torchrl_rloo.functional.sampling import SamplingDistribution
from torchrl_rloo.modules import (
    AdapterReference,
    EngineScorer,
    MovingReference,
    Teacher,
    TransformersWrapper,
    add_adapter,
    record_log_probs,
)
from torchrl_rloo.objectives import KL, DistillationLoss, RLOOLoss, merge_outputs
from torchrl_rloo.replay import MCAdvantage
from torchrl_rloo.training import accumulate

TEMPERATURE = 0.8


@pytest.fixture
def scorers(tokenizer) -> tuple[TransformersWrapper, TransformersWrapper]:
    """A student and a teacher."""
    settings = {"tokenizer": tokenizer, "generate": False, "generate_kwargs": {"temperature": TEMPERATURE}}
    return tuple(TransformersWrapper(build_model(tokenizer, seed=seed).eval(), **settings) for seed in (0, 1))


@pytest.fixture
def rows(scorers) -> TensorDictBase:
    """Ragged rows of one or two turns, of random tokens, with the student's log-probs and two groups."""
    generator, made = torch.Generator().manual_seed(0), []
    for i, shape in enumerate(["ppaa", "pppaaaa", "ppaapaa", "pa"]):
        entries = {
            keys.TOKENS: torch.randint(3, 90, (len(shape),), generator=generator),
            keys.ACTION_MASK: torch.tensor([c == "a" for c in shape]),
            keys.GROUP_ID: torch.tensor(i // 2),
            keys.GROUP_SIZE: torch.tensor(2),
            keys.PROMPT_ID: torch.tensor(i // 2),
            keys.REWARD: torch.tensor([[float(i % 3)]]),
        }
        made.append(TensorDict(entries, []))
    return record_log_probs(scorers[0], stack_rows(made), log_probs=keys.LOG_PROBS)


def log_distributions(scorer: TransformersWrapper, row: TensorDictBase, prompt: list[int] | None = None) -> list:
    """Return the float64 log-probs of all tokens at each action of one row, one row at a time."""
    tokens, start = row[keys.TOKENS], int(row[keys.ACTION_MASK].long().argmax())
    mask = row[keys.ACTION_MASK]
    if prompt is not None:
        tokens, mask = (
            torch.cat([torch.tensor(prompt), tokens[start:]]),
            torch.cat([torch.zeros(len(prompt), dtype=torch.bool), mask[start:]]),
        )
    with torch.no_grad():
        logits = scorer.model(input_ids=tokens[None], use_cache=False).logits[0].double() / TEMPERATURE
    return [logits[t - 1].log_softmax(-1) for t in mask.nonzero()[:, 0].tolist()]


def slow_divergence(q: torch.Tensor, p: torch.Tensor, beta: float) -> float:
    """Return equation 1 of arXiv 2306.13649, token by token."""
    total = 0.0
    for a, b in zip(q.tolist(), p.tolist(), strict=True):
        mixed = math.log(beta * math.exp(b) + (1 - beta) * math.exp(a)) if 0 < beta < 1 else (a if beta == 0 else b)
        if beta == 0:
            total += math.exp(b) * (b - a)
        elif beta == 1:
            total += math.exp(a) * (a - b)
        else:
            total += beta * math.exp(b) * (b - mixed) + (1 - beta) * math.exp(a) * (a - mixed)
    return total


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("prompts", [None, [[5, 6, 7, 8], [9]]])
def test_the_loss_equals_a_slow_loop(beta, prompts, scorers, rows):
    """Also if the teacher sees another prompt, and however a step is cut up."""
    student, teacher = scorers
    expected = []
    for row in rows.unbind(0):
        seen = None if prompts is None else prompts[int(row[keys.PROMPT_ID])]
        pairs = zip(log_distributions(student, row), log_distributions(teacher, row, seen), strict=True)
        expected += [slow_divergence(q, p, beta) for q, p in pairs]
    loss = DistillationLoss(student, Teacher(teacher, prompts), beta=beta, coeff=2.0)
    outputs = accumulate(loss, rows, micro_batch_size=3)
    merged = merge_outputs(outputs)
    assert merged["kl_to_teacher"] == pytest.approx(sum(expected) / len(expected), abs=1e-5)
    assert merged["loss"] == pytest.approx(2 * sum(expected) / len(expected), abs=1e-5)
    gradient = [p.grad.clone() for p in student.model.parameters()]
    student.model.zero_grad()
    loss(rows).loss.backward()
    for whole, cut in zip(student.model.parameters(), gradient, strict=True):
        torch.testing.assert_close(whole.grad, cut, atol=1e-6, rtol=1e-4)
    assert all(p.grad is None for p in teacher.model.parameters())
    empty = loss(rows[:0])
    assert float(empty.loss) == 0 and empty.loss.requires_grad


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_the_loss_is_that_of_trl(beta, scorers, rows):
    """``DistillationTrainer`` takes hidden states, and ``GKDTrainer`` logits."""
    trainer = pytest.importorskip("trl.trainer.distillation_trainer")
    gkd = pytest.importorskip("trl.experimental.gkd.gkd_trainer")

    def states(scorer: TransformersWrapper) -> torch.Tensor:
        parts = []
        for row in rows.unbind(0):
            hidden = scorer.model.model(input_ids=row[keys.TOKENS][None], use_cache=False).last_hidden_state[0]
            parts.append(hidden[:-1][row[keys.ACTION_MASK][1:]])
        return torch.cat(parts)[None]

    found = float(DistillationLoss(scorers[0], Teacher(scorers[1]), beta=beta)(rows).loss)
    hidden, heads = [states(s).detach() for s in scorers], [s.model.lm_head.weight.detach() for s in scorers]
    number = hidden[0].shape[1]
    theirs = trainer._chunked_divergence_loss(*hidden, *heads, torch.ones(1, number), beta, temperature=TEMPERATURE)[0]
    assert found == pytest.approx(float(theirs), abs=1e-5)
    logits = [h @ w.T for h, w in zip(hidden, heads, strict=True)]
    settings = {"temperature": TEMPERATURE, "num_items_in_batch": number}
    assert found == pytest.approx(float(gkd.GKDTrainer.generalized_jsd_loss(*logits, beta=beta, **settings)), abs=1e-5)


def test_sampled_tokens_are_the_loss_of_torchrl_and_the_gradient_of_trl(scorers, rows):
    """TorchRL's reverse KL is the k3 of RLOOLoss; TRL's sampled tokens have the gradient of a KL per token."""
    student, teacher = scorers
    rows = record_log_probs(Teacher(teacher), rows, log_probs=keys.REF_LOG_PROBS)
    for row in rows.unbind(0):
        row.set(keys.ADVANTAGE, torch.zeros(1, 1))
    loss = RLOOLoss(student, kl_to_ref_coeff=1.0, kl_estimator="k3", aggregation="sequence_mean")
    scored = student.score(rows)
    theirs = [
        k3_kl_token_estimate(
            row[keys.REF_LOG_PROBS][row[keys.ACTION_MASK]], scored.log_probs[i][scored.actions.mask[i]]
        )
        for i, row in enumerate(rows.unbind(0))
    ]
    expected = torch.stack([kl.sum() / len(kl) for kl in theirs]).mean()  # its normalize_by_seq_length and mean
    assert float(loss(rows).loss) == pytest.approx(float(expected), abs=1e-5)

    # advantages -KL without later tokens
    advantage = MCAdvantage(2, kl=KL("token", 1.0, discount=0.0))
    written = advantage.inv(rows)
    for row in written.unbind(0):
        mask, own = row[keys.ACTION_MASK], row[keys.LOG_PROBS] - row[keys.REF_LOG_PROBS]
        spread = (row[keys.ADVANTAGE].flatten() + own)[mask]  # what is left is the advantage of the whole row
        torch.testing.assert_close(spread, spread[:1].expand_as(spread), atol=1e-5, rtol=0)
    log_ratio = torch.cat([s[m] for s, m in zip(scored.log_probs, scored.actions.mask, strict=True)])
    kl = torch.cat([(r[keys.LOG_PROBS] - r[keys.REF_LOG_PROBS])[r[keys.ACTION_MASK]] for r in rows.unbind(0)])
    trl = torch.autograd.grad((kl.detach() * log_ratio).mean(), list(student.model.parameters()))
    for row in written.unbind(0):
        row.set(keys.ADVANTAGE, (row[keys.REF_LOG_PROBS] - row[keys.LOG_PROBS])[:, None])
    policy = RLOOLoss(student, ratio="token", aggregation="token_mean")
    ours = torch.autograd.grad(policy(written).loss, list(student.model.parameters()))
    for mine, other in zip(ours, trl, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("prompts", [None, [[5, 6, 7, 8], [9]]])
def test_an_engine_scores_as_the_model_does(prompts, scorers, rows):
    engine, student = TransformersEngine(scorers[1].model), scorers[0]
    served = Teacher(EngineScorer(engine, student.distribution), prompts)
    rows = record_log_probs(served, rows, log_probs=keys.REF_LOG_PROBS)
    rows = record_log_probs(Teacher(scorers[1], prompts), rows, log_probs=keys.PROXIMAL_LOG_PROBS)
    for row in rows.unbind(0):
        torch.testing.assert_close(row[keys.REF_LOG_PROBS], row[keys.PROXIMAL_LOG_PROBS], atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="cannot be scored by an engine"):
        EngineScorer(engine, SamplingDistribution(top_k=3))


def test_an_adapter_or_a_moving_reference_is_a_teacher(scorers, rows):
    student, teacher = scorers
    start = Teacher(student).logits(rows)
    moving = MovingReference(teacher, student.model, share=1.0)
    assert torch.equal(Teacher(moving).logits(rows), Teacher(teacher).logits(rows))
    moving.update()
    torch.testing.assert_close(Teacher(moving).logits(rows), start)
    pytest.importorskip("peft")
    adapted = student.get_new_version(
        model=add_adapter(student.model, {"r": 2, "target_modules": "all-linear", "init_lora_weights": False})
    )
    torch.testing.assert_close(Teacher(AdapterReference(adapted)).logits(rows), start)
    assert not torch.allclose(Teacher(adapted).logits(rows), start)


def test_a_moving_reference_mixes_as_trl_does(scorers):
    callbacks = pytest.importorskip("trl.trainer.callbacks")
    student, reference = scorers
    theirs = build_model(reference.tokenizer, seed=1)
    callbacks.SyncRefModelCallback._sync_target_model(student.model, theirs, 0.6)
    MovingReference(reference, student.model, share=0.6).update()
    for mine, other in zip(reference.model.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda s, t: DistillationLoss(s, Teacher(t), beta=1.5), "beta=1.5 must be in"),
        (lambda s, t: DistillationLoss(s, Teacher(t), coeff=0.0), "coeff=0.0 a number above 0"),
        (
            lambda s, t: DistillationLoss(s.get_new_version(generate_kwargs={"top_k": 3}), Teacher(t)),
            "cannot be compared over the vocabulary",
        ),
        (lambda s, t: KL("loss", 1.0, discount=0.5), "kl.discount=0.5 has no effect with kl.where='loss'"),
        (lambda s, t: KL("token", 1.0, discount=2.0), r"kl.discount=2.0 must be None or in \[0, 1\]"),
    ],
)
def test_wrong_arguments_are_refused(make, message, scorers):
    with pytest.raises(ValueError, match=message):
        make(*scorers)


def test_a_token_without_probability_adds_nothing():
    q = torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64).log()
    p = torch.tensor([[0.25, 0.75, 0.0]], dtype=torch.float64).log()
    for beta in (0.0, 0.5, 1.0):
        assert float(generalized_jsd(q, p, beta)) == pytest.approx(slow_divergence(q[0, :2], p[0, :2], beta), abs=1e-12)
