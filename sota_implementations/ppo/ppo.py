"""Train a language model with PPO: a critic estimates the return at each token, and advantages come from its errors.

Examples:
  ppo.py                                   the built-in task and model, on one CPU core
  ppo.py critic.model=outputs/reward_model/seed0/model critic.warmup_steps=5    start the critic as a reward model
  ppo.py task=gsm8k model.name=my/model model.device=cuda optimizer.lr=1e-6 critic.lr=5e-6    a model from the hub
  ppo.py 'lora={r: 16, target_modules: all-linear}' critic.share_trunk=true    one adapter for policy and critic
  torchrl-rloo run --ranks 2 ppo train.parallel=fsdp    two ranks, each with a shard of policy and critic
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torchrl_rloo.cli import config as c
from torchrl_rloo.cli import rloo_sections as s
from torchrl_rloo.cli.fields import Positive, Share, Whole, non_null_fields
from torchrl_rloo.cli.recipe import command_line, parse_args, run_recipe
from torchrl_rloo.cli.rloo_config import LoopConfig, check_moves


@dataclass
class CriticConfig:
    """Critic: start, advantages and training."""

    model: str | None = None  # reward model to start from, with its head; null: the policy, and a head of zeros
    share_trunk: bool = False  # estimate with the policy's own layers, which the value loss then also trains
    lr: Positive = 1.0e-3  # peak learning rate; models of billions of weights need about 5e-6
    warmup_steps: Whole = 0  # first steps, which train only the critic
    clip_epsilon: Positive | None = 0.2  # largest change of a value in a step; null: no clip
    coeff: Positive = 1.0  # factor of the value loss, for share_trunk
    discount: Share = 1.0  # discount from one token to the next
    lam: Share = 0.95  # weight of longer returns in generalized advantages; 1: whole returns
    whiten: bool = True  # scale the advantages of a step to mean 0 and standard deviation 1


@dataclass
class Config(LoopConfig):
    """Settings of PPO training."""

    output_dir: str = "outputs/ppo/${task.name}/seed${seed}"  # directory of checkpoints, metrics, report and model
    plan: s.PlanConfig = field(default_factory=lambda: s.PlanConfig(60, 32, 4, minibatches=2, epochs_per_batch=2))
    critic: CriticConfig = field(default_factory=CriticConfig)
    kl: s.KLConfig = field(default_factory=lambda: s.KLConfig(coeff=0.02))  # by default a reward of each token
    reference: s.ReferenceConfig = field(default_factory=s.ReferenceConfig)

    common = (*LoopConfig.common, "critic.model", "critic.lr", "critic.warmup_steps", "critic.lam", "kl.coeff")

    def __post_init__(self):
        super().__post_init__()
        critic, train = self.critic, self.train
        c.check_path("critic.model", critic.model or "")
        check_moves(self)
        refused = {
            f"critic.model={critic.model}": critic.share_trunk and critic.model is not None,
            "train.parallel": critic.share_trunk and train.parallel != "none",
        }
        for name, wrong in refused.items():
            if wrong:
                raise ValueError(f"critic.share_trunk=true cannot be combined with {name}; set it to false")
        if self.kl.discount is not None:
            raise ValueError("kl.discount has no effect with a critic; set critic.discount")
        if critic.coeff != 1 and not critic.share_trunk:
            raise ValueError(f"critic.coeff={critic.coeff} has no effect without critic.share_trunk; set critic.lr")
        if critic.warmup_steps >= self.plan.steps:
            raise ValueError(f"critic.warmup_steps={critic.warmup_steps} must be below plan.steps={self.plan.steps}")
        for name in ("tensor_parallel", "context_parallel"):
            if (value := getattr(train, name)) > 1:
                raise ValueError(f"train.{name}={value} cannot split a critic; set it to 1, and train.parallel=fsdp")
        if train.load_shards or self.model.quantization and critic.model is None:
            name = "train.load_shards" if train.load_shards else "model.quantization"
            raise ValueError(f"{name} cannot be combined with a critic that copies the policy; remove it")
        if self.inference.on_ray or self.environment.on_rewrite == "split":
            name = "environment.on_rewrite=split" if not self.inference.on_ray else "engines on a Ray cluster"
            raise ValueError(f"a critic reads whole rows on each rank and cannot be combined with {name}")


if __name__ == "__main__":  # parse before torch is imported, so --help and wrong settings respond at once
    CONFIG = parse_args(Config, __file__, __doc__)

from contextlib import closing, nullcontext  # noqa: E402

import torch
from torchrl.data import ReplayBuffer, SamplerWithoutReplacement
from transformers import PreTrainedModel

from torchrl_rloo import diagnostics, modules
from torchrl_rloo.cli.loop import Loaded, Sampling
from torchrl_rloo.engines import sleeping
from torchrl_rloo.modules import TransformersWrapper, ValueHead, load_reward_model
from torchrl_rloo.objectives import RLOOLoss, ValueLoss, make_method, merge_outputs
from torchrl_rloo.replay import RowStorage, TokenGAE
from torchrl_rloo.run import Run, meters, repeat_after_rollback, timings
from torchrl_rloo.runtime.ranks import Ranks
from torchrl_rloo.training import accumulate, catch_up, minibatches, offload_activations, optimizer_step

DISPLAY = {
    "headline": ("reward", "explained_variance", "eval/greedy", "time/step"),
    "digest": diagnostics.waiting_table,
}


def main(cfg: Config) -> None:
    with cfg.train.join_ranks(cfg.model.device) as ranks:
        repeat_after_rollback(lambda step: train(cfg if step is None else replace(cfg, resume=step), ranks))


def train(cfg: Config, ranks: Ranks) -> None:
    # Method, task and model. Wrong settings raise before anything is loaded
    cfg.check_before_loading()
    health = cfg.health.make()
    gae = {name: getattr(cfg.critic, name) for name in ("discount", "lam", "whiten")}
    method = make_method("ppo", critic=True, loss=cfg.loss, advantage=gae, kl=non_null_fields(cfg.kl))
    loaded = Loaded.of(cfg, ranks)
    model, plan = loaded.model, loaded.plan

    # Policy, its frozen start, and the critic. Each rank has a copy or a shard of each
    sampler = cfg.sampler.make(model, ranks)
    initial = modules.frozen_copy(model) if method.kl is not None and cfg.lora is None else None
    critic = make_critic(cfg, model, ranks)
    for each in (model, initial, None if cfg.critic.share_trunk else critic):
        if each is not None:
            cfg.train.distribute(each, ranks, loaded.name, **cfg.model.kwargs)
    settings = {"packing": cfg.train.packing, "generate_kwargs": cfg.generate.arguments(cfg.seed)}
    trainer = TransformersWrapper(model, tokenizer=loaded.tokenizer, generate=False, **settings, **cfg.train.scoring)
    reference = None if method.kl is None else cfg.reference.make(trainer, initial)

    # Learning: generalized advantages, and a loss, an optimizer and a schedule for policy and critic
    buffer = ReplayBuffer(
        storage=RowStorage(),
        sampler=SamplerWithoutReplacement(),
        transform=TokenGAE(critic, micro_batch_size=plan.micro_batch_size, **method.advantage_arguments),
        generator=torch.Generator().manual_seed(cfg.seed),
    )
    policy_loss = RLOOLoss(trainer, **method.loss_arguments)
    masked = {"mask_truncated_completions": method.loss.get("mask_truncated_completions", False)}
    value_loss = ValueLoss(critic, clip_epsilon=cfg.critic.clip_epsilon, critic_coeff=cfg.critic.coeff, **masked)
    offload = {"offload_states": "optimizer" in cfg.train.offload}
    updates, warmup = plan.optimizer_steps // plan.steps, cfg.critic.warmup_steps
    optimizer = cfg.optimizer.make(model, **offload)
    scheduler = cfg.schedule.make(optimizer, plan.optimizer_steps - warmup * updates)
    critic_optimizer = replace(cfg.optimizer, lr=cfg.critic.lr).make(critic, **offload)
    critic_scheduler = cfg.schedule.make(critic_optimizer, plan.optimizer_steps)

    # Sampling, and the run, which resumes, checkpoints, logs and stops
    limits = {"micro_batch_size": plan.micro_batch_size, "max_tokens": cfg.train.micro_batch_tokens}
    kl = {} if method.kl is None else method.reward_kl_arguments | limits | masked
    sampling = Sampling.of(cfg, ranks, loaded, sampler, trainer, reference, **kl)
    source, engine = sampling.source, sampling.engine
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "buffer": buffer, "source": source}
    parts |= {"critic": critic, "critic_optimizer": critic_optimizer, "critic_scheduler": critic_scheduler}
    parts |= {"sampler": sampler if sampler is not model else None, "kl_coeff": method.adaptive_kl}
    parts |= {"reference": initial if cfg.reference.sync_every else None, "entropy_coeff": method.adaptive_entropy}
    run = Run(cfg.output_dir, plan.steps, parts, **cfg.run_arguments(), **DISPLAY, health=health, ranks=ranks)
    with engine or nullcontext(), closing(loaded.rewards), closing(source), run:
        report = diagnostics.RunReport(run, command_line())
        sampling.start(run, loaded.rewards)
        for step in run.steps():
            ranks.place = f"step {step}"
            rows, sampled = sampling.collect(run, cfg, loaded, policy_loss)  # 1. sample groups of finished trajectories
            policy_outputs, value_outputs, norms, critic_norms = [], [], [], []
            with run.time("train"), sleeping(engine if cfg.inference.sleep else None):
                if rows is not None:  # 2. compute advantages and targets from the values of the critic
                    buffer.extend(rows)
                for batch in minibatches(buffer, plan.minibatches, plan.epochs_per_batch):  # 3. optimize both
                    with offload_activations("activations" in cfg.train.offload):
                        value_outputs += accumulate(value_loss, batch, ranks=ranks, **limits)
                        if step > warmup:
                            policy_outputs += accumulate(policy_loss, batch, ranks=ranks, **limits)
                    critic_norms.append(
                        optimizer_step(critic, critic_optimizer, critic_scheduler, cfg.train.max_grad_norm)
                    )
                    if step > warmup:
                        norms.append(optimizer_step(model, optimizer, scheduler, cfg.train.max_grad_norm))
                    else:  # a shared trunk has a gradient
                        model.zero_grad()
                buffer.empty()
                catch_up(critic_scheduler, step * updates)
                catch_up(scheduler, max(0, step - warmup) * updates)
            with run.time("sync"):  # 4. push the weights to the sampler, and move the reference
                if step > warmup and run.is_due(cfg.sampler.sync_every):
                    source.update_policy_weights_()
                if step > warmup and run.is_due(cfg.reference.sync_every):
                    reference.update()
            run.log(merge_outputs(value_outputs, num_updates=max(1, len(critic_norms))))
            run.log(merge_outputs(policy_outputs, num_updates=max(1, len(norms))))
            for name, found in (("grad_norm", norms), ("grad_norm/critic", critic_norms)):
                run.log({name: float(torch.stack(found).mean())} if found else {})
            adapt(run, method, len(sampled))
            run.log({"learning_rate": scheduler.get_last_lr()[0]} | meters(engine, *source.parts))
            if run.is_due(cfg.eval.every) or run.is_last:  # 5. evaluate on held-out prompts
                sampling.held_out.run(run)
            run.log({}, timings=timings(*source.parts))
            report.refresh()
    if run.finished:
        sampling.finish(run, report, loaded)


def make_critic(cfg: Config, model: PreTrainedModel, ranks: Ranks) -> ValueHead:
    """Return the critic: on the policy's layers or a copy of them, or on those of a reward model."""
    if cfg.critic.model is None:
        critic = ValueHead(model, share_trunk=cfg.critic.share_trunk)
    else:
        start, _ = load_reward_model(cfg.critic.model, device=str(ranks.device))
        if start.get_input_embeddings().num_embeddings < model.get_input_embeddings().num_embeddings:
            raise ValueError(f"critic.model={cfg.critic.model} has fewer tokens than the policy; use one of its family")
        critic = ValueHead(start)
    ranks.log(f"critic: {modules.count_trained(critic):,} trained parameters")
    return critic


def adapt(run: Run, method, rows: int) -> None:
    """Log the coefficients, and adapt those that follow a target."""
    run.log({"kl_coeff": float(method.kl.coeff)} if method.kl else {})
    if method.adaptive_kl is not None:
        method.adaptive_kl.update(run.metrics["kl"], rows)
    if method.adaptive_entropy is not None:
        run.log({"entropy_coeff": float(method.adaptive_entropy)})
        method.adaptive_entropy.update(run.metrics["entropy"])


if __name__ == "__main__":
    run_recipe(main, CONFIG)
