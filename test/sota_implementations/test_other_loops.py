"""Recipes simple, ppo and distill as a user runs them: to the end, stopped and resumed, with wrong settings."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest
import torch

from support.recipes import load_recipe, run_recipe_here, settings
from support.runs import check_metric_names, read_jsonl
from torchrl_rloo.cli.main import recipe_file
from torchrl_rloo.modules import load_model, load_reward_model

SMALL = ["generate.max_new_tokens=8", "data.limit=64", "data.eval_size=8", "checkpoint.every=1", "log.samples=2"]
PLAN = ["plan.steps=3", "plan.prompts_per_step=4", "plan.num_generations=2", "plan.minibatches=2"]
PPO = ["plan.epochs_per_batch=1", "critic.warmup_steps=1", "eval.every=2"]
FULL = ["distill.divergence=full", "distill.beta=0.5", "distill.reward_coeff=1", "plan.micro_batch_size=3"]
MOVING = ["teacher.name=self", "teacher.sync_every=1", 'teacher.context="The answer is {answer}. "']
LORA = "lora={r: 2, target_modules: all-linear}"
RUNS = {
    "simple": ("simple", []),
    "ppo": ("ppo", PPO),
    "reward": ("ppo", [*PPO, "kl.where=reward", "reference.sync_every=1", "loss.old_log_probs=proximal"]),
    "adapter": ("ppo", [*PPO, LORA, "critic.share_trunk=true", "critic.coeff=0.5", "kl.coeff=0"]),
    "sampled": ("distill", ["eval.every=2"]),
    "full": ("distill", ["eval.every=2", *FULL]),
    "self": ("distill", ["eval.every=2", "distill.discount=0.5", *MOVING]),
    "hint": ("distill", ["eval.every=2", "distill.divergence=full", MOVING[0], MOVING[2], LORA]),
}


def common(model: Path, recipe: str) -> list[str]:
    teacher = [f"teacher.name={model}"] if recipe == "distill" else []
    return [f"model.name={model}", *SMALL, *PLAN, *teacher]


def results(output: Path) -> list[bytes]:
    (weights,) = (output / "model").glob("*.safetensors")  # of an adapter alone, if there is one
    return [file.read_bytes() for file in (output / "metrics.jsonl", output / "completions.jsonl", weights)]


@pytest.mark.parametrize("name", RUNS)
def test_a_stopped_run_goes_on_to_the_same_bits(name, warm_model, tmp_path, capsys):
    recipe, more = RUNS[name]
    if LORA in more:
        pytest.importorskip("peft")
    command = [*common(warm_model(), recipe), *more]
    run_recipe_here(recipe, *command, f"output_dir={tmp_path / 'whole'}")
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert Path(result["report"]).is_file() and {"eval/greedy_before", "eval/sampled_after"} <= result.keys()
    for stop in (["stop_after=2"], []):
        run_recipe_here(recipe, *command, f"output_dir={tmp_path / 'stopped'}", *stop)
    assert results(tmp_path / "stopped") == results(tmp_path / "whole")

    lines = read_jsonl(tmp_path / "whole" / "metrics.jsonl")
    check_metric_names(tmp_path / "whole")
    last = lines[-1]
    if recipe == "ppo":
        assert {"loss_critic", "explained_variance", "grad_norm/critic", "loss", "grad_norm"} <= last.keys()
        assert "grad_norm" not in lines[1] and "grad_norm/critic" in lines[1]  # the step of the critic alone
        assert ("kl" in last) == (name != "adapter")
    if recipe == "distill":
        assert last["grad_norm"] > 0 and ("kl" in last) == (name not in ("full", "hint"))
        assert ("kl_to_teacher" in last) == (name in ("full", "hint"))


@pytest.mark.parametrize(("name", "parallel"), [("ppo", "ddp"), ("full", "fsdp")])
def test_two_ranks_train_as_one(name, parallel, fork_server, warm_model, tmp_path):
    recipe, more = RUNS[name]
    changes = ["plan.steps=1", "plan.minibatches=1", "plan.micro_batch_size=3", "log.loggers=[]", "eval.every=0"]
    changes += ["critic.warmup_steps=0"] if recipe == "ppo" else []
    command = [*common(warm_model(), recipe), *more, *changes]
    run_recipe_here(recipe, *command, f"output_dir={tmp_path / 'one'}")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    address |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    arguments = [*command, f"train.parallel={parallel}", "train.rank_timeout=60", f"output_dir={tmp_path / 'two'}"]
    ranks = [
        fork_server.start(
            recipe_file(recipe), arguments, environment=os.environ | address | {"RANK": str(i), "LOCAL_RANK": str(i)}
        )
        for i in range(2)
    ]
    try:
        assert [rank.wait(300) for rank in ranks] == [0, 0], [rank.stderr[-2000:] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    one, two = (read_jsonl(tmp_path / folder / "metrics.jsonl") for folder in ("one", "two"))
    for mine, theirs in zip(one, two, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-5, nan_ok=True)


def test_a_critic_starts_as_a_reward_model_with_its_head(warm_model, tmp_path):
    judge, tokenizer = load_reward_model(warm_model())
    torch.nn.init.normal_(judge.score.weight, generator=torch.Generator().manual_seed(0))
    judge.save_pretrained(tmp_path / "judge")
    tokenizer.save_pretrained(tmp_path / "judge")
    cfg = settings("ppo", f"critic.model={tmp_path / 'judge'}")
    critic = load_recipe("ppo").make_critic(cfg, load_model(warm_model())[0], cfg.train.join_ranks("cpu"))
    assert torch.equal(critic.projection.weight, judge.score.weight)
    assert torch.equal(critic.trunk.embed_tokens.weight, judge.model.embed_tokens.weight)


@pytest.mark.parametrize(
    ("recipe", "wrong", "message"),
    [
        ("ppo", "critic.share_trunk=true train.parallel=ddp", "critic.share_trunk=true cannot be combined with train"),
        ("ppo", "critic.coeff=2", "critic.coeff=2.0 has no effect without critic.share_trunk"),
        ("ppo", "critic.warmup_steps=60", "critic.warmup_steps=60 must be below plan.steps=60"),
        ("ppo", "critic.model=/no/judge", "critic.model='/no/judge' is neither"),
        ("ppo", "train.parallel=fsdp train.tensor_parallel=2 sampler.share_weights=false", "cannot split a critic"),
        ("ppo", "train.parallel=fsdp train.load_shards=true", "train.load_shards cannot be combined with a critic"),
        ("ppo", "inference=ray_transformers", "cannot be combined with engines on a Ray cluster"),
        ("ppo", "environment.on_rewrite=split", "cannot be combined with environment.on_rewrite=split"),
        ("ppo", "kl.discount=0", "kl.discount has no effect with a critic; set critic.discount"),
        ("ppo", "reference.sync_every=2 kl.coeff=0", "reference.sync_every=2 has no effect with kl.coeff=0"),
        ("ppo", "collector.max_staleness=1", "cannot be combined with sampler.share_weights=true"),
        ("distill", "distill.beta=0.5", "distill.beta has no effect on sampled tokens"),
        ("distill", "distill.divergence=full distill.discount=1", "distill.discount has no effect"),
        ("distill", "distill.divergence=full generate.top_k=4", "distill.divergence=full requires top_p=1"),
        ("distill", "distill.divergence=full teacher.name=http://t:1", "a server returns no distributions"),
        ("distill", "teacher.name=http://t:1 generate.temperature=0.7", "scores at generate.temperature=1"),
        ("distill", "teacher.name=http://t:1 generate.top_p=0.9", "a server requires top_p=1"),
        ("distill", "teacher.name=self", "starts equal to the student"),
        ("distill", "teacher.sync_every=2", "teacher.sync_every requires teacher.name=self"),
        ("distill", "teacher.share=0.5", "teacher.share requires teacher.sync_every"),
        ("distill", "distill.reward_coeff=1", "requires plan.num_generations=2 or more"),
        ("distill", "teacher.name=/no/teacher", "teacher.name='/no/teacher' is neither"),
        ("distill", "inference=ray_transformers", "outside of a Ray cluster"),
    ],
)
def test_wrong_settings_are_refused_by_name(recipe, wrong, message):
    with pytest.raises((ValueError, OSError)) as caught:
        settings(recipe, *wrong.split())
    assert message in str(caught.value)
