"""Roles with different adapters of one model: samples, scores, gradients and training."""

from __future__ import annotations

import pytest
import torch

from torchrl_rloo.agents import agent_env
from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import Role, concatenate, keys, load_prompts, tensor_rows
from torchrl_rloo.embedded import build_model
from torchrl_rloo.modules import RoleAdapters, TransformersWrapper, add_adapter, frozen_copy, save_model
from torchrl_rloo.objectives import RLOOLoss
from torchrl_rloo.replay import MCAdvantage
from torchrl_rloo.training import accumulate
from torchrl_rloo.weight_update import InProcessWeightUpdater

LORA = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False}
ROLES = ["white", "black", Role("judge", frozen=True)]


@pytest.fixture
def model(tokenizer):
    torch.manual_seed(0)
    base = build_model(tokenizer, seed=0)
    return add_adapter(add_adapter(base, LORA, "first"), LORA, "second")


def policy_of(model, tokenizer, **settings) -> RoleAdapters:
    generate = {"max_new_tokens": 6, "seed": 0}
    return RoleAdapters(model, ["first", "second", None], tokenizer=tokenizer, generate_kwargs=generate, **settings)


async def game(context, row):
    query = [{"role": "user", "content": f"{row['place']}: abc?"}]
    async with context.openai("white") as white, context.openai("black") as black, context.openai("judge") as judge:
        said = [await client.chat.completions.create(model="m", messages=query) for client in (white, black, judge)]
    texts = [reply.choices[0].message.content or "" for reply in said]
    return {"rewards": {"white": float(len(texts[0])), "black": float(len(texts[1]))}, "metrics": {"judge": texts[2]}}


def collector_of(policy, tokenizer, updater=None) -> LLMCollector:
    rows = load_prompts([{"query": [{"role": "user", "content": f"{i}: abc?"}], "place": i} for i in range(2)])
    env = agent_env(game, tokenizer, dataset=rows, prompts_per_batch=2, num_generations=3, roles=ROLES, shuffle=False)
    return LLMCollector(env, policy, weight_updater=updater)


def alone(model, tokenizer, name, rows):
    """Return the log-probs of rows under one adapter, with peft's own switch."""
    scorer = TransformersWrapper(model, tokenizer=tokenizer, generate=False)
    active = model.active_adapter
    try:
        if name is None:
            with model.disable_adapter(), torch.no_grad():
                return scorer.score(rows).log_probs
        model.set_adapter(name)
        with torch.no_grad():
            return scorer.score(rows).log_probs
    finally:
        model.set_adapter(active)


@pytest.mark.parametrize("packing", ["none", "shared_prefix"])
def test_each_role_has_the_numbers_of_its_adapter(model, tokenizer, packing):
    policy = policy_of(model, tokenizer)
    collector = collector_of(policy, tokenizer)
    rows = collector.collect()
    collector.shutdown()
    assert [row["role"] for row in rows.unbind(0)] == (["white"] * 3 + ["black"] * 3) * 2
    mixed = rows[torch.tensor([3, 0, 4, 9, 1, 6])]
    with torch.no_grad():
        scored = policy.get_new_version(generate=False, packing=packing).score(mixed)
    for i, row in enumerate(mixed.unbind(0)):
        found = scored.log_probs[i][scored.actions.mask[i]]
        torch.testing.assert_close(found, row[keys.LOG_PROBS][row[keys.ACTION_MASK]], rtol=0, atol=1e-5)
        name, other = ("first", "second") if row["role"] == "white" else ("second", "first")
        torch.testing.assert_close(found, alone(model, tokenizer, name, mixed[i : i + 1])[0], rtol=0, atol=1e-5)
        assert (found - alone(model, tokenizer, other, mixed[i : i + 1])[0]).abs().max() > 1e-2
        assert not scored.entropy[i][~scored.actions.mask[i]].any()
    # The frozen role speaks with the base model
    judge = mixed[:1].clone()
    judge[0].set(keys.ROLE_ID, torch.tensor(2))
    with torch.no_grad():
        found = policy.get_new_version(generate=False, packing=packing).score(judge).log_probs
    torch.testing.assert_close(found, alone(model, tokenizer, None, judge), rtol=0, atol=1e-5)


def test_the_gradient_of_a_role_is_that_of_its_adapter(model, tokenizer):
    collector = collector_of(policy_of(model, tokenizer), tokenizer)
    rows = MCAdvantage().inv(tensor_rows(collector.collect()))
    collector.shutdown()
    loss_fn = RLOOLoss(policy_of(model, tokenizer).get_new_version(generate=False))
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    whole = [row for row in rows.unbind(0) if int(row[keys.ROLE_ID]) == 0]
    accumulate(loss_fn, concatenate([row[None] for row in whole]))
    moved = {n for n, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert moved and all(".first." in n for n in moved)
    accumulate(loss_fn, rows)
    moved = {n for n, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert {n.split(".")[-2] for n in moved} == {"first", "second"}
    assert {n for n, p in model.named_parameters() if p.requires_grad} == trained and model.active_adapter == "first"


def test_a_copy_of_the_sampler_gets_both_adapters(model, tokenizer, tmp_path):
    policy = policy_of(model, tokenizer)
    sampler = policy.get_new_version(model=frozen_copy(model))
    collector = collector_of(sampler, tokenizer, InProcessWeightUpdater(model, sampler.model))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    loss_fn = RLOOLoss(policy.get_new_version(generate=False))
    for _ in range(2):
        rows = MCAdvantage().inv(tensor_rows(collector.collect()))
        assert float(loss_fn(rows).kl_approx) < 1e-9  # ratios are 1 after the update as well
        accumulate(loss_fn, rows)
        optimizer.step()
        optimizer.zero_grad()
        collector.update_policy_weights_()
    collector.shutdown()
    save_model(model, tokenizer, tmp_path)
    assert {path.parent.name for path in tmp_path.glob("*/adapter_model.safetensors")} == {"first", "second"}


def test_what_cannot_work_is_refused(model, tokenizer):
    with pytest.raises(TypeError, match="model=.* must be a peft PeftModel"):
        RoleAdapters(build_model(tokenizer, seed=0), ["first"], tokenizer=tokenizer)
    with pytest.raises(ValueError, match=r"adapters=\['frist'\] must be among those .*'first'"):
        RoleAdapters(model, ["frist"], tokenizer=tokenizer)
    with pytest.raises(ValueError, match="name='first' must differ"):
        add_adapter(model, LORA, "first")
    scorer = policy_of(model, tokenizer).get_new_version(generate=False)
    collector = collector_of(policy_of(model, tokenizer), tokenizer)
    rows = collector.collect()
    collector.shutdown()
    with pytest.raises(KeyError, match="row 0 has no 'role_id'"):
        scorer.score(rows.exclude(keys.ROLE_ID))
    with pytest.raises(IndexError, match="role_id=1, but adapters"):
        RoleAdapters(model, ["first"], tokenizer=tokenizer, generate=False).score(rows)
    model.gradient_checkpointing_enable()
    with pytest.raises(NotImplementedError, match="gradient checkpointing; disable it"):
        scorer.score(rows)
