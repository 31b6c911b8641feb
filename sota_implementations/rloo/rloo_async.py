"""Train with RLOO on a Ray cluster: many workers sample without a pause, and each rank trains on rows that it fetches.

Examples:
  rloo_async.py                                          a local Ray, the built-in task and model
  rloo_async.py collector.max_staleness=0                on-policy: sampling and training alternate
  rloo_async.py collector.max_staleness=1                one step off: sample the next step while training on this one
  rloo_async.py ray.address=auto ray.num_workers=16 inference=ray_vllm inference.replicas=8       a running cluster
  torchrun --nproc-per-node=4 rloo_async.py train.parallel=fsdp ray.address=auto                  four ranks train
  ray job submit -- python rloo_async.py ray.address=auto                                         as a job
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import ClassVar

from torchrl_rloo.cli import config as c
from torchrl_rloo.cli import sampling_config as s
from torchrl_rloo.cli.check import preflight
from torchrl_rloo.cli.ray_config import RayConfig, check_on_cluster
from torchrl_rloo.cli.recipe import command_line, parse_args, run_recipe
from torchrl_rloo.cli.rloo_config import RLOOConfig


@dataclass
class Config(RLOOConfig):
    """Settings of asynchronous RLOO training."""

    on_cluster: ClassVar[bool] = True
    output_dir: str = "outputs/rloo_async/${task.name}/seed${seed}"  # directory of checkpoints, metrics, report, model
    collector: s.CollectorConfig = field(default_factory=lambda: s.CollectorConfig(max_staleness=2, audit=True))
    ray: RayConfig = field(default_factory=RayConfig)

    def __post_init__(self):
        super().__post_init__()
        check_on_cluster(self)


if __name__ == "__main__":  # parse before torch is imported, so --help and wrong settings respond at once
    CONFIG = parse_args(Config, __file__, __doc__)
    CONFIG.ray.prepare()

from contextlib import AbstractContextManager, closing, nullcontext
from functools import partial
from pathlib import Path

import rloo_sync as sync  # the parts that do not depend on where rows are sampled
import torch
from torchrl.data import ReplayBuffer, SamplerWithoutReplacement

from torchrl_rloo import diagnostics, evaluation, modules
from torchrl_rloo.collectors import GroupSource
from torchrl_rloo.data import keys, stack_rows
from torchrl_rloo.data.rows import unbind_rows
from torchrl_rloo.envs.transforms import add_reference_kl
from torchrl_rloo.modules import TurnPolicy
from torchrl_rloo.objectives import PRESETS, RLOOLoss
from torchrl_rloo.ray import RayLLMCollector, ReferencedSource, ray_session
from torchrl_rloo.replay import MCAdvantage, RowStorage, check_works_on_metadata
from torchrl_rloo.run import Run, meters, repeat_after_rollback, timings
from torchrl_rloo.runtime.ranks import Ranks
from torchrl_rloo.training import accumulate, catch_up, make_optimizer, make_schedule, minibatches, optimizer_step
from torchrl_rloo.weight_update import WeightUpdater


def main(cfg: Config) -> None:
    timeout, group = cfg.train.rank_timeout, cfg.train.parallel != "none"
    with Ranks.from_environment(cfg.model.device, timeout=timeout, group=group) as ranks, connect(cfg, ranks):
        repeat_after_rollback(lambda step: train(sync.resumed_at(cfg, step), ranks))


def connect(cfg: Config, ranks: Ranks) -> AbstractContextManager:
    """Connect all ranks to one cluster; rank 0 starts a local one if the settings name none."""
    if cfg.inference.engine is None:
        raise ValueError("inference=transformers samples in this process; use inference=ray_transformers or ray_vllm")
    return ray_session(cfg.ray.address, ranks=ranks, **cfg.ray.local(cfg.inference.replicas))


def train(cfg: Config, ranks: Ranks) -> None:
    # Task, model, rewards, method; wrong settings raise before anything samples
    problem = load_problem(cfg, ranks)
    model, rewards, method, plan = problem.model, problem.rewards, problem.method, problem.plan
    advantage = MCAdvantage(**method.advantage_arguments)
    check_works_on_metadata(advantage, plan.prompts_per_step)

    # Ranks: each has a replica or a shard of the model, and trains on rows that it fetches itself
    sampler, reference = sync.copy_model(cfg, problem, ranks)
    trainer = sync.make_trainer(cfg, problem, ranks)
    scorer = sync.make_reference(cfg, problem, ranks, trainer, reference)

    # Learning: buffer of metadata with leave-one-out advantages, loss, optimizer, schedule
    buffer = ReplayBuffer(
        storage=RowStorage(),
        sampler=SamplerWithoutReplacement(),
        transform=advantage,
        generator=torch.Generator().manual_seed(cfg.seed),
    )
    loss_fn = RLOOLoss(trainer, **method.loss_arguments)
    offloaded = "optimizer" in cfg.train.offload
    optimizer = make_optimizer(model, **c.named_arguments(cfg.optimizer), offload_states=offloaded)
    scheduler = make_schedule(optimizer, plan.optimizer_steps, **c.named_arguments(cfg.schedule))

    # Sampling in the cluster: engines that receive weights, and workers that play conversations with them
    policy, engine, updater = sync.make_policy(cfg, problem, ranks, trainer, sampler)
    source = make_source(cfg, problem, ranks, policy, updater, scorer)
    evaluations = sync.make_evaluations(cfg, problem, policy, scorer, ranks)

    # Run: resumes, checkpoints, logs and stops
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "buffer": buffer, "source": source}
    parts |= {"sampler": sampler if sampler is not model else None, "kl_coeff": method.adaptive_kl}
    parts |= {"reference": reference if cfg.reference.sync_every else None, "entropy_coeff": method.adaptive_entropy}
    settings = c.run_settings(cfg) | sync.DISPLAY | {"health": problem.health}
    run = Run(cfg.output_dir, plan.steps, parts, **settings, ranks=ranks)
    with (
        engine or nullcontext(),
        closing(rewards),
        closing(source),
        run,
    ):
        if ranks.is_main:
            diagnostics.write_launch(run.directory, command_line())
        if run.step == 0:
            source.on_main(lambda: preflight(cfg, problem, policy), "checks before the first step")
            sync.evaluate(run, cfg, source, evaluations)
        else:  # new engines start with the initial weights
            updater.initialize()
        for step in run.steps():
            ranks.place = f"step {step}"
            with run.time("collect"):  # 1. take whole groups: metadata of all rows, and this rank's rows
                sync.report_progress(run, problem, source)
                metadata, _ = source.collect()
            log_rollouts(run, cfg, problem, source, metadata)
            with run.time("train"):
                score_old_log_probs(run, cfg, problem, source, loss_fn)
                buffer.extend(metadata)  # 2. compute leave-one-out advantages, from metadata alone
                outputs, norms = [], []
                for batch in minibatches(buffer, plan.minibatches, plan.epochs_per_batch):  # 3. optimize
                    own = {"rows_of": source.rows_of, "ranks": ranks}
                    outputs += accumulate(loss_fn, batch, **own, **problem.accumulation, **problem.limits)
                    norms.append(optimizer_step(model, optimizer, scheduler, cfg.train.max_grad_norm))
                buffer.empty()
                catch_up(scheduler, step * plan.optimizer_steps // plan.steps)
            with run.time("sync"):  # 4. publish the weights; conversations in flight continue with them
                if run.is_due(cfg.sampler.sync_every):
                    source.update_policy_weights_()
                if run.is_due(cfg.reference.sync_every):
                    scorer.update()
            sync.log_update(run, method, outputs, norms, len(metadata))
            run.log({"learning_rate": scheduler.get_last_lr()[0]} | meters(advantage, engine, *source.parts))
            if run.is_due(cfg.eval.every) or run.is_last:  # 5. evaluate on held-out prompts
                sync.evaluate(run, cfg, source, evaluations)
            run.log({}, timings=timings(*source.parts))
            sync.refresh_report(run, cfg, ranks)
    if run.finished:
        sync.finish(run, cfg, problem, ranks, source)


def load_problem(cfg: Config, ranks: Ranks) -> sync.Problem:
    """Build task, rewards and method, load model and prompts, and check that all sizes fit."""
    correct_stale_tokens(cfg)
    return sync.load_problem(cfg, ranks)


def correct_stale_tokens(cfg: Config) -> None:
    """Weigh tokens of older versions by their importance, if they are trained on and the loss has no ratio for it."""
    ratio = cfg.loss.get("ratio", PRESETS[cfg.algorithm].loss.get("ratio") if cfg.algorithm in PRESETS else None)
    if cfg.collector.max_staleness and ratio == "none" and "correction" not in cfg.loss:
        cfg.loss = cfg.loss | {"correction": "tis"}


def make_source(
    cfg: Config,
    problem: sync.Problem,
    ranks: Ranks,
    policy: TurnPolicy | None,
    updater: WeightUpdater,
    reference: modules.Scorer | None,
) -> ReferencedSource:
    """Build the source of a step's rows: workers sample them, and each rank fetches its own."""
    source = finish = None
    if ranks.is_main:
        env = sync.make_env(cfg, problem, None)
        observe = getattr(env.primer.sampler, "update", None)  # a prompt sampler that learns from every batch
        source = GroupSource(make_collector(cfg, env, policy, updater), observe=observe)
    if reference is not None:
        finish = partial(add_reference_kl, ref=reference, ranks=ranks, split=False, **sync.kl_arguments(problem))
    return ReferencedSource(ranks, source, updater, finish=finish)


def make_collector(cfg: Config, env, policy: TurnPolicy, updater: WeightUpdater) -> RayLLMCollector:
    """Build the collector of the cluster's workers."""
    settings = asdict(cfg.collector) | cfg.ray.workers()
    settings["audit"] = Path(cfg.output_dir) / "ledger.jsonl" if cfg.collector.audit else None
    return RayLLMCollector(env, policy, weight_updater=updater, seed=cfg.seed, **settings)


def score_old_log_probs(
    run: Run, cfg: Config, problem: sync.Problem, source: ReferencedSource, loss_fn: RLOOLoss
) -> None:
    """Score this rank's rows with the training model before its update, if the loss or parity metrics need it."""
    rows, ranks = source.own.rows, source.ranks
    parity = run.is_due(cfg.inference.parity_every) and cfg.environment.on_rewrite != "split"
    if parity or {keys.PROXIMAL_LOG_PROBS, keys.PROXIMAL_ENTROPY} & set(loss_fn.in_keys):
        settings = {"entropy": keys.PROXIMAL_ENTROPY, "ranks": ranks, "split": False} | problem.limits
        modules.record_log_probs(loss_fn.actor_network, rows, **settings)
    if parity:  # only rows of the current weights, of which a rank may have none
        fresh = [row for row in unbind_rows(rows) if int(row[keys.POLICY_VERSION]) == source.policy_version]
        run.log(diagnostics.parity_metrics(stack_rows(fresh), ranks=ranks))


def log_rollouts(run: Run, cfg: Config, problem: sync.Problem, source: ReferencedSource, metadata) -> None:
    """Log metrics of a step's rows, from their metadata, and at intervals a table of some of them."""
    rewards, masked = problem.rewards, problem.method.loss.get("mask_truncated_completions", False)
    metrics = diagnostics.completion_metrics(
        metadata, rewards.names, rewards.weights, mask_truncated_completions=masked
    )
    metrics |= diagnostics.staleness_metrics(metadata, source.policy_version)
    metrics["num_tokens"] = source.num_tokens
    speed = metrics["completions/mean_length"] * len(metadata) / run.seconds("collect")
    run.log(metrics, timings={"tokens_per_second": speed})
    if cfg.log.samples and run.is_due(cfg.log.samples_every) and source.ranks.is_main:
        rows = source.with_text(metadata[: cfg.log.samples])
        run.log_table("training completions", evaluation.completion_table(rows, cfg.log.samples))


if __name__ == "__main__":
    run_recipe(main, CONFIG)
