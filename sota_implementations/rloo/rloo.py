"""Train a language model with RLOO: sample completions, score them, train on them, update the sampler, repeat.

Examples:
  rloo.py                                  the built-in task and model, on one CPU core
  rloo.py --config rloo_tools              the built-in model learns to call a tool
  rloo.py --config rloo_agent              the same, by an agent that calls an OpenAI-compatible endpoint
  rloo.py algorithm=grpo inference=vllm    another method, sampled by vLLM
  rloo.py task=gsm8k model.name=my/model model.device=cuda optimizer.lr=1e-6    a model from the hub
  rloo.py task=custom data.source=mine.jsonl reward.functions=[my_rewards.graded]    your data and reward
  rloo.py inference=vllm_process sampler.share_weights=false collector.max_staleness=1    sample while training
  rloo.py inference=ray_vllm inference.replicas=8 ray.address=auto    sample on a Ray cluster
  rloo.py rollouts.path=rows rollouts.train=false    only sample, and keep all rows as files
  rloo.py rollouts.source=rows             only train, on stored rows
  torchrl-rloo run --ranks 2 rloo train.parallel=fsdp    two ranks of this machine, each with a shard
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torchrl_rloo.cli.check import preflight
from torchrl_rloo.cli.recipe import command_line, parse_args, run_recipe
from torchrl_rloo.cli.rloo_config import RLOOConfig


@dataclass
class Config(RLOOConfig):
    """Settings of RLOO training."""

    output_dir: str = "outputs/rloo/${task.name}/seed${seed}"  # directory of checkpoints, metrics, report and model


if __name__ == "__main__":  # parse before torch is imported, so --help and wrong settings respond at once
    CONFIG = parse_args(Config, __file__, __doc__)
    if CONFIG.inference.on_ray:
        CONFIG.ray.prepare()

import json
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path

import torch
from torchrl.data import ReplayBuffer, SamplerWithoutReplacement

from torchrl_rloo import data, diagnostics, evaluation, modules
from torchrl_rloo.cli.config import keeps_copy
from torchrl_rloo.cli.held_out import EvalSet, HeldOutEvaluation, load_eval_sets, longest_conversation
from torchrl_rloo.collectors import SharedSource, StepRows, add_missing_kl
from torchrl_rloo.data import keys
from torchrl_rloo.embedded import resolve_model
from torchrl_rloo.engines import sleeping
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.envs.transforms import KLRewardTransform, RewardTransform, add_reference_kl
from torchrl_rloo.modules import TransformersWrapper, vLLMWrapper
from torchrl_rloo.objectives import Preset, RLOOLoss, RLOOLossOutput, merge_outputs
from torchrl_rloo.replay import MCAdvantage, RowStorage, merge_groups
from torchrl_rloo.replay.gae import check_works_on_metadata
from torchrl_rloo.run import Run, meters, repeat_after_rollback, timings
from torchrl_rloo.runtime.ranks import Ranks
from torchrl_rloo.training import accumulate, catch_up, check_copies, minibatches, offload_activations, optimizer_step
from torchrl_rloo.weight_update import InProcessWeightUpdater, SequentialWeightUpdater

# Metrics of the progress bar, and the table of waits
DISPLAY = {"headline": ("reward", "eval/greedy", "eval/sampled", "time/step"), "digest": diagnostics.waiting_table}


def main(cfg: Config) -> None:
    with cfg.train.join_ranks(cfg.model.device) as ranks, cfg.connect(ranks):
        repeat_after_rollback(lambda step: train(cfg if step is None else replace(cfg, resume=step), ranks))


def train(cfg: Config, ranks: Ranks) -> None:
    # What is learned: task, rewards, method. Wrong settings raise before anything is loaded
    cfg.check_before_loading()
    health = cfg.health.make()
    torch.manual_seed(cfg.seed)
    torch.set_num_threads(cfg.threads or torch.get_num_threads())
    task = cfg.make_task()
    rewards = cfg.reward.make(task, quarantine=Path(cfg.output_dir) / "quarantine.jsonl")
    scorers = cfg.eval.make_scorers(task, rewards, own_rewards=cfg.reward.functions is not None)
    method = cfg.make_method(rewards.weights)

    # Model, prompts and conversations, whose sizes must fit
    name = ranks.broadcast(lambda: resolve_model(cfg.model.name, cfg.seed, task.name, log=print), "start model")
    images = Path(cfg.output_dir) / "images"
    model, tokenizer = cfg.model.load(name, device=str(ranks.device), meta=cfg.train.load_shards, images=images)
    model = model if cfg.lora is None else modules.add_adapter(model, cfg.lora)
    train_set, eval_set = cfg.data.load(task, tokenizer, cfg.seed)
    context, template = modules.context_length(model), {"template_kwargs": cfg.data.template_kwargs}
    make_transforms, chat = cfg.environment.make(task, context)
    own = EvalSet(eval_set, task, scorers, make_transforms, chat | template, cfg.eval.num_samples, cfg.eval.ks)
    eval_sets = load_eval_sets(cfg, own, train_set, tokenizer, context)
    all_prompts = (train_set, *(each.prompts for each in eval_sets.values()))
    plan = cfg.plan.make(
        train_prompts=len(train_set),
        eval_prompts=len(eval_set),
        max_prompt_tokens=data.longest_prompt(tokenizer, all_prompts, **cfg.data.template_kwargs),
        max_new_tokens=cfg.generate.max_new_tokens,
        context_length=context,
        max_turns=chat.get("max_turns") if make_transforms() else 1,
        max_tokens=chat.get("max_tokens"),
    )
    lora = cfg.lora and {"r": model.peft_config["default"].r}  # also of a saved adapter
    diagnostics.check_engine(cfg.inference.arguments, plan, lora, cfg.sampler.dtype)
    ranks.log(f"{name}: {model.num_parameters():,} parameters, {modules.count_trained(model):,} trained")
    held_out = "\n".join(f"held out{n and f', {n}'}: {each.prompts}" for n, each in eval_sets.items())
    ranks.log(f"training: {train_set}\n{held_out}\n{plan}")

    # Ranks: each has a replica or a shard of the model. It may sample itself, and score as its own reference
    limits = {"micro_batch_size": plan.micro_batch_size, "max_tokens": cfg.train.micro_batch_tokens}
    sampling = {"tokenizer": tokenizer, "generate_kwargs": cfg.generate.arguments(cfg.seed)}
    sampler = cfg.sampler.make(model, ranks)
    initial = modules.frozen_copy(model) if method.kl is not None and keeps_copy(cfg.lora) else None
    for each in (model, initial):
        if each is not None:
            cfg.train.distribute(each, ranks, name, **cfg.model.kwargs)
    trainer = TransformersWrapper(model, generate=False, packing=cfg.train.packing, **sampling, **cfg.train.scoring)
    reference = None if method.kl is None else cfg.reference.make(trainer, initial)

    # Learning: buffer with leave-one-out advantages, loss, optimizer, schedule
    advantage = MCAdvantage(**method.advantage_arguments)
    sharp = None  # scorer at half the temperature, for the optimal baseline
    if keys.SHARP_LOG_PROBS in advantage.credit.reads:
        if cfg.generate.top_p < 1 or cfg.generate.min_p:
            raise ValueError("advantage.credit=optimal_token requires generate.top_p=1 and generate.min_p=0")
        halved = sampling["generate_kwargs"] | {"temperature": cfg.generate.temperature / 2}
        sharp = trainer.get_new_version(generate_kwargs=halved)
    if cfg.inference.on_ray:  # each rank has only its own rows, and all have their metadata
        check_works_on_metadata(advantage, plan.prompts_per_step)
    buffer = ReplayBuffer(
        storage=RowStorage(),
        sampler=SamplerWithoutReplacement(),
        transform=advantage,
        generator=torch.Generator().manual_seed(cfg.seed),
    )
    loss_fn = RLOOLoss(trainer, **method.loss_arguments)
    optimizer = cfg.optimizer.make(model, offload_states="optimizer" in cfg.train.offload)
    scheduler = cfg.schedule.make(optimizer, plan.optimizer_steps)

    # Sampling on rank 0: by the model itself or its copy, or by an engine that receives its weights
    updater, engine = InProcessWeightUpdater(model, sampler), None
    if cfg.inference.engine is None:
        policy = None if sampler is None else TransformersWrapper(sampler, **sampling, **cfg.train.scoring)
    else:
        base = str(name)
        if cfg.model.quantization is not None and cfg.inference.arguments.get("enable_lora"):
            base = str(modules.save_merged(model, tokenizer, Path(cfg.output_dir) / "base", adapter=False))
        longest = longest_conversation(plan, eval_sets, model)
        engine = ranks.on_main(lambda: cfg.inference.make_engine(base, longest), "start of the engine")
        policy = vLLMWrapper(engine, **sampling) if ranks.is_main else None
        if sampler is not None:
            senders = ranks if sampler is model else Ranks.single()  # a copy is on rank 0 alone
            updater = SequentialWeightUpdater(updater, cfg.inference.connect(engine, sampler, tokenizer, senders))
        diagnostics.check_parity(policy, trainer, eval_set, sampler_dtype=cfg.sampled_dtype, **template, ranks=ranks)

    # Rows of a step: environment and collector of rank 0, or stored ones. The reference of several ranks scores later
    kl = {} if method.kl is None else method.reward_kl_arguments | limits
    kl |= {"mask_truncated_completions": method.loss.get("mask_truncated_completions", False)} if kl else {}
    alone, stored = ranks.size == 1 and not cfg.inference.on_ray, cfg.rollouts.source is not None
    source = writer = None
    if ranks.is_main and stored:
        sizes = {"num_generations": plan.num_generations, "prompts_per_step": plan.prompts_per_step}
        sizes["steps"] = min(plan.steps, cfg.stop_after or plan.steps) if cfg.curriculum.refill is None else None
        collector = cfg.rollouts.make_stored(tokenizer, rewards, cfg.collector, weight_updater=updater, **sizes)
    elif ranks.is_main:
        scored = [KLRewardTransform(reference, **kl)] if reference is not None and alone else []
        env = DatasetChatEnv(
            train_set,
            tokenizer,
            prompts_per_batch=cfg.curriculum.groups_per_batch(plan.prompts_per_step),
            num_generations=plan.num_generations,
            transforms=make_transforms(),
            rewards=rewards,
            after_rewards=cfg.reward.make_after(rewards, per_token=advantage.credit.per_token) + scored,
            sampler=cfg.curriculum.make_sampler(task, train_set, rewards, plan),
            greedy_member=getattr(advantage.estimator, "wants_greedy", False),
            demonstrations=cfg.curriculum.demonstrations,
            seed=cfg.seed,
            **chat,
            **template,
        )
        writer = cfg.rollouts.make_writer(tokenizer, cfg.output_dir, cfg.model.name, **cfg.note_rewards(rewards))
        workers = cfg.ray if cfg.inference.on_ray else None
        where = {"seed": cfg.seed, "output_dir": cfg.output_dir, "writer": writer, "workers": workers}
        collector = cfg.collector.make(env, policy, updater, **where)
        if cfg.curriculum.adaptive_prompts is not None:
            collector.postproc = partial(merge_and_write, writer=writer)
    if ranks.is_main:
        step_size = plan.prompts_per_step
        source = cfg.curriculum.make_source(collector, advantage, rewards, step_size, scorer=trainer, **limits)
    add_kl = partial(add_missing_kl if stored else add_reference_kl, ref=reference, **kl)
    add_kl = None if reference is None or (alone and not stored) else add_kl
    source = cfg.share(ranks, source, updater, sampler=sampler, add_kl=add_kl)
    options = {"executor": rewards.executor, "quarantine": rewards.quarantine, "score_limits": limits}
    options |= {"batch_size": cfg.eval.batch_size, "reference": reference if ranks.size == 1 else None}
    evaluation_of_sets = HeldOutEvaluation(eval_sets, policy if ranks.is_main else None, source, cfg.log, **options)

    # Run: resumes, checkpoints, logs and stops
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "buffer": buffer, "source": source}
    parts |= {"sampler": sampler if sampler is not model else None, "kl_coeff": method.adaptive_kl}
    parts |= {"reference": initial if cfg.reference.sync_every else None, "entropy_coeff": method.adaptive_entropy}
    shown = DISPLAY | {"health": health, "ranks": ranks}
    run = Run(cfg.output_dir, plan.steps, parts, **cfg.run_arguments(), **shown)
    with engine or nullcontext(), closing(rewards), closing(source), run:
        report = diagnostics.RunReport(run, command_line())
        if ranks.is_main:  # steps that run again write their failed samples and rows again
            rewards.quarantine.rewind(run.step)
        if writer is not None:
            writer.rewind(run.step)
        if run.step == 0:
            checked = {"model": model, "plan": plan, "method": method, "rewards": rewards, "chat": chat | template}
            checked |= {"train_set": train_set, "eval_set": eval_set, "make_transforms": make_transforms}
            source.on_main(partial(preflight, cfg, policy, **checked), "checks before the first step")
        if run.step == 0 and cfg.rollouts.train:
            evaluation_of_sets.run(run)
        elif cfg.inference.engine is not None:  # a new engine starts with the initial weights
            updater.initialize()
        for step in run.steps():
            ranks.place = f"step {step}"
            with run.time("collect"):  # 1. sample whole groups of finished trajectories
                report_progress(run, rewards, source, plan, writer)
                rows, sampled = step_rows = source.collect()
            log_rollouts(run, cfg, step_rows, source, rewards, method, task.extract_answer)
            if not cfg.rollouts.train:  # only collect
                run.log(meters(engine, *source.parts))
                continue
            with run.time("train"), sleeping(engine if cfg.inference.sleep else None):
                if rows is not None:  # 2. compute leave-one-out advantages
                    if sharp is not None:
                        source.record_log_probs(rows, sharp, log_probs=keys.SHARP_LOG_PROBS, **limits)
                    record_old_log_probs(run, cfg, rows, source, loss_fn, limits)
                    buffer.extend(rows)
                outputs, norms, skipped = [], [], 0
                for batch in minibatches(buffer, plan.minibatches, plan.epochs_per_batch):  # 3. optimize
                    with offload_activations("activations" in cfg.train.offload):
                        parts_of_batch = accumulate(loss_fn, batch, ranks=ranks, rows_of=source.rows_of, **limits)
                    outputs += parts_of_batch
                    skipped += all(part.is_empty() for part in parts_of_batch)
                    norms.append(optimizer_step(model, optimizer, scheduler, cfg.train.max_grad_norm))
                buffer.empty()
                catch_up(scheduler, step * plan.optimizer_steps // plan.steps)
            with run.time("sync"):  # 4. push the weights to the sampler, and move the reference
                if run.is_due(cfg.sampler.sync_every):
                    source.update_policy_weights_()
                if run.is_due(cfg.reference.sync_every):
                    reference.update()
            log_update(run, method, outputs, norms, len(sampled))
            run.log({"skipped_zero_adv_batches": skipped})
            run.log({"learning_rate": scheduler.get_last_lr()[0]} | meters(advantage, engine, *source.parts))
            if run.is_due(cfg.eval.every) or run.is_last:  # 5. evaluate on held-out prompts
                evaluation_of_sets.run(run)
            run.log({}, timings=timings(*source.parts))
            report.refresh()
    if run.finished:
        finish(run, cfg, model, tokenizer, source, report, str(plan))


def merge_and_write(rows, writer):
    """Make one group of all rows of a prompt, and keep them if rows are kept."""
    rows = merge_groups(rows)
    return rows if writer is None else writer(rows)


def report_progress(run: Run, rewards: RewardTransform, source: SharedSource, plan, writer) -> None:
    """Tell the reward functions, and the writer of rows, how far the run is."""
    done = run.step - 1
    rewards.report_progress(done, plan.steps, plan.epochs(done), source.num_tokens, run.logger.history)
    if writer is not None:
        writer.step = run.step


def log_rollouts(
    run: Run, cfg: Config, step_rows: StepRows, source: SharedSource, rewards: RewardTransform, method: Preset, extract
) -> None:
    """Log metrics of a step's rows and, at intervals, a table of some of them."""
    rows, sampled = step_rows[0], data.outcomes.sampled_rows(step_rows[1])
    masked = method.loss.get("mask_truncated_completions", False)
    options = {"mask_truncated_completions": masked, "extract": extract}
    metrics = diagnostics.completion_metrics(sampled, rewards.names, rewards.weights, **options)
    metrics |= diagnostics.staleness_metrics(sampled if rows is None else rows, source.policy_version)
    metrics["num_tokens"] = source.num_tokens
    speed = metrics["completions/mean_length"] * len(sampled) / run.seconds("collect")
    run.log(metrics, timings={"tokens_per_second": speed})
    if cfg.log.samples and run.is_due(cfg.log.samples_every) and source.ranks.is_main:
        shown = source.with_text(cfg.log.choose(sampled))
        run.log_table("training completions", evaluation.completion_table(shown))


def record_old_log_probs(
    run: Run, cfg: Config, rows, source: SharedSource, loss_fn: RLOOLoss, limits: dict[str, int | None]
) -> None:
    """Score rows with the training model before its first update, if the loss or parity metrics need it."""
    needed = {keys.PROXIMAL_LOG_PROBS, keys.PROXIMAL_ENTROPY} & set(loss_fn.in_keys)
    parity = run.is_due(cfg.inference.parity_every)
    if needed or parity:
        source.record_log_probs(rows, loss_fn.actor_network, current=not needed, **limits)
    if parity:
        ranks = None if source.own is None else source.ranks  # with references, each rank has its own rows
        run.log(diagnostics.parity_metrics(source.current_rows(rows), ranks=ranks))


def log_update(run: Run, method: Preset, outputs: list[RLOOLossOutput], norms: list[torch.Tensor], rows: int) -> None:
    """Log metrics of loss and optimizer, if the step had a signal, and adapt the coefficients."""
    run.log(merge_outputs(outputs, num_updates=len(norms)))
    run.log({"grad_norm": float(torch.stack(norms).mean())} if norms else {})
    run.log({"kl_coeff": float(method.kl.coeff)} if method.kl else {})
    if method.adaptive_kl is not None:
        method.adaptive_kl.update(run.metrics["kl"], rows)
    if method.adaptive_entropy is not None:
        run.log({"entropy_coeff": float(method.adaptive_entropy)})
        method.adaptive_entropy.update(run.metrics["entropy"])


def finish(
    run: Run, cfg: Config, model, tokenizer, source: SharedSource, report: diagnostics.RunReport, plan: str
) -> None:
    """Save the model if it was trained, write the report, and print the result as one line of JSON."""
    written = {} if cfg.rollouts.path is None else {"rollouts": str(Path(cfg.rollouts.path).resolve())}
    if cfg.rollouts.train:
        checksums = check_copies(model, source.ranks)
        if source.ranks.size > 1:
            source.ranks.log(f"checksums of the ranks' weights: {', '.join(checksums.values())}")
        written["model"] = str(modules.save_model(model, tokenizer, run.directory / "model").resolve())
    if not source.ranks.is_main:
        return
    result = run.summary("eval/greedy", "eval/sampled") if cfg.rollouts.train else run.summary("reward")
    page = report.write(result | {"plan": plan})
    print(json.dumps(result | {"report": str(page.resolve())} | written))


if __name__ == "__main__":
    run_recipe(main, CONFIG)
