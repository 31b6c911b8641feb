"""Train a language model with RLOO: sample completions, score them, train on them, update the sampler, repeat.

Examples:
  rloo_sync.py                                     the built-in task and model, on one CPU core
  rloo_sync.py --config rloo_tools                 the built-in model learns to call a tool
  rloo_sync.py --config rloo_agent                 the same, by an agent that calls an OpenAI-compatible endpoint
  rloo_sync.py algorithm=grpo inference=vllm       another method, sampled by vLLM
  rloo_sync.py task=gsm8k model.name=my/model model.device=cuda optimizer.lr=1e-6  a model from the hub
  rloo_sync.py task=custom data.source=mine.jsonl reward.functions=[my_rewards.graded]  your data and reward
  rloo_sync.py rollouts.path=rows rollouts.train=false      only sample, and keep all rows as files
  rloo_sync.py rollouts.source=rows                         only train, on stored rows
  torchrun --nproc-per-node=2 rloo_sync.py train.parallel=fsdp                           two ranks, each with a shard
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from torchrl_rloo.cli import config as c
from torchrl_rloo.cli import sampling_config as s
from torchrl_rloo.cli.check import load_own_checks, preflight
from torchrl_rloo.cli.recipe import command_line, parse_args, run_recipe
from torchrl_rloo.cli.rloo_config import RLOOConfig
from torchrl_rloo.cli.schema import non_null_fields


@dataclass
class Config(RLOOConfig):
    """Settings of RLOO training."""

    output_dir: str = "outputs/rloo_sync/${task.name}/seed${seed}"  # directory of checkpoints, metrics, report, model


if __name__ == "__main__":  # parse before torch is imported, so --help and wrong settings respond at once
    CONFIG = parse_args(Config, __file__, __doc__)

import json
from collections.abc import Callable
from contextlib import ExitStack, closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hydra.utils import instantiate
from tensordict import TensorDictBase
from torchrl.data import ReplayBuffer, SamplerWithoutReplacement
from transformers import PreTrainedModel

from torchrl_rloo import data, diagnostics, evaluation, modules, replay
from torchrl_rloo.cli import held_out
from torchrl_rloo.collectors import (
    AdaptiveConcurrency,
    GroupSource,
    LLMCollector,
    RefillingCollector,
    SharedSource,
    StepRows,
    StoredRollouts,
    add_missing_kl,
    check_stored_groups,
)
from torchrl_rloo.data import PromptDataset, keys, tensor_rows
from torchrl_rloo.embedded import resolve_model, resolve_task
from torchrl_rloo.engines import Engine, sleeping
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.envs.tasks import CUSTOM, EMBEDDED, TaskBase, conversation_settings
from torchrl_rloo.envs.transforms import KLRewardTransform, RewardTransform, add_reference_kl
from torchrl_rloo.modules import TransformersWrapper, TurnPolicy, vLLMWrapper
from torchrl_rloo.objectives import Preset, RLOOLoss, RLOOLossOutput, make_method, merge_outputs
from torchrl_rloo.replay import MCAdvantage, RolloutFiles, RolloutWriter, RowStorage, run_id
from torchrl_rloo.rewards import load_reward, make_executor
from torchrl_rloo.run import Run, check_resumable, meters, repeat_after_rollback, timings
from torchrl_rloo.runtime.ranks import Ranks
from torchrl_rloo.training import (
    accumulate,
    catch_up,
    check_copies,
    check_optimizer,
    make_optimizer,
    make_schedule,
    minibatches,
    offload_activations,
    optimizer_step,
    shard_model,
)
from torchrl_rloo.weight_update import InProcessWeightUpdater, SequentialWeightUpdater, WeightUpdater

# Metrics of the progress bar, and the table of waits
DISPLAY = {"headline": ("reward", "eval/greedy", "eval/sampled", "time/step"), "digest": diagnostics.waiting_table}


class Problem(NamedTuple):
    """Task, prompts, model, rewards, method and sizes of a run."""

    task: TaskBase
    train_set: PromptDataset
    eval_set: PromptDataset
    model_name: str
    model: PreTrainedModel
    wrapper: dict[str, Any]  # arguments of every policy of Transformers: tokenizer, sampling, precision
    limits: dict[str, Any]  # rows and tokens of one forward and backward pass
    accumulation: dict[str, Any]  # further arguments of an optimizer step's passes
    make_transforms: Callable[[], list]  # builds the transforms that answer the policy's turns
    chat: dict[str, Any]  # arguments of every environment: limits and template
    rewards: RewardTransform
    method: Preset
    plan: diagnostics.TrainingPlan
    health: diagnostics.health.Health
    eval_sets: dict[str, held_out.EvalSet]  # the held-out prompts as "", then further sets by name


def main(cfg: Config) -> None:
    split = {"tensor_parallel": cfg.train.tensor_parallel, "context_parallel": cfg.train.context_parallel}
    timeout, group = cfg.train.rank_timeout, cfg.train.parallel != "none"
    with Ranks.from_environment(cfg.model.device, timeout=timeout, group=group, **split) as ranks:
        repeat_after_rollback(lambda step: train(resumed_at(cfg, step), ranks))


def resumed_at(cfg: Config, step: int | None) -> Config:
    """Return the settings of a run that continues from a step; None changes nothing."""
    return cfg if step is None else replace(cfg, resume=step)


def train(cfg: Config, ranks: Ranks) -> None:
    # Task, model, rewards, method; wrong settings raise before anything samples
    problem = load_problem(cfg, ranks)
    model, rewards, method, plan = problem.model, problem.rewards, problem.method, problem.plan

    # Ranks: each has a replica or a shard of the model, and trains on its share of the rows that rank 0 samples
    sampler, reference = copy_model(cfg, problem, ranks)
    trainer = make_trainer(cfg, problem, ranks)
    scorer = make_reference(cfg, problem, ranks, trainer, reference)

    # Learning: buffer with leave-one-out advantages, loss, optimizer, schedule
    advantage = MCAdvantage(**method.advantage_arguments)
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

    # Sampling on rank 0: by the model itself, or by an engine that receives its weights
    policy, engine, updater = make_policy(cfg, problem, ranks, trainer, sampler)
    writer = make_writer(cfg, problem, ranks)
    source = make_source(cfg, problem, ranks, policy, updater, advantage, trainer, scorer, writer)
    evaluations = make_evaluations(cfg, problem, policy, scorer, ranks)

    # Run: resumes, checkpoints, logs and stops
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "buffer": buffer, "source": source}
    parts |= {"sampler": sampler if sampler is not model else None, "kl_coeff": method.adaptive_kl}
    parts |= {"reference": reference if cfg.reference.sync_every else None, "entropy_coeff": method.adaptive_entropy}
    settings = c.run_settings(cfg) | DISPLAY | {"health": problem.health}
    run = Run(cfg.output_dir, plan.steps, parts, **settings, ranks=ranks)
    with (
        engine or nullcontext(),
        closing(rewards),
        closing(source),
        run,
    ):
        if ranks.is_main:  # steps that run again write their failed samples again
            diagnostics.write_launch(run.directory, command_line())
            rewards.quarantine.rewind(run.step)
        if writer is not None:  # and their rows
            writer.rewind(run.step)
        if run.step == 0:
            source.on_main(lambda: preflight(cfg, problem, policy), "checks before the first step")
        if run.step == 0 and cfg.rollouts.train:
            evaluate(run, cfg, source, evaluations)
        elif cfg.inference.engine is not None:  # a new engine starts with the initial weights
            updater.initialize()
        for step in run.steps():
            ranks.place = f"step {step}"
            with run.time("collect"):  # 1. sample whole groups of finished trajectories
                report_progress(run, problem, source, writer)
                rows, sampled = step_rows = source.collect()
            log_rollouts(run, cfg, problem, step_rows, source)
            if not cfg.rollouts.train:  # only collect
                run.log(meters(engine, *source.parts))
                continue
            with run.time("train"), sleeping(engine if cfg.inference.sleep else None):
                if rows is not None:  # 2. compute leave-one-out advantages
                    buffer.extend(score_old_log_probs(run, cfg, problem, rows, loss_fn, source))
                outputs, norms = [], []
                for batch in minibatches(buffer, plan.minibatches, plan.epochs_per_batch):  # 3. optimize
                    with offload_activations("activations" in cfg.train.offload):
                        outputs += accumulate(loss_fn, batch, ranks=ranks, **problem.accumulation, **problem.limits)
                    norms.append(optimizer_step(model, optimizer, scheduler, cfg.train.max_grad_norm))
                buffer.empty()
                catch_up(scheduler, step * plan.optimizer_steps // plan.steps)
            with run.time("sync"):  # 4. push the weights to the sampler, and move the reference
                if run.is_due(cfg.sampler.sync_every):
                    source.update_policy_weights_()
                if run.is_due(cfg.reference.sync_every):
                    scorer.update()
            log_update(run, method, outputs, norms, len(sampled))
            run.log({"learning_rate": scheduler.get_last_lr()[0]} | meters(advantage, engine, *source.parts))
            if run.is_due(cfg.eval.every) or run.is_last:  # 5. evaluate on held-out prompts
                evaluate(run, cfg, source, evaluations)
            run.log({}, timings=timings(*source.parts))
            refresh_report(run, cfg, ranks)
    if run.finished:
        finish(run, cfg, problem, ranks, source)


def load_problem(cfg: Config, ranks: Ranks) -> Problem:
    """Build task, rewards and method, load model and prompts, and check that all sizes fit."""
    # Refuse to resume with other settings before anything is loaded
    check_resumable(cfg.output_dir, **c.run_settings(cfg))
    s.check_transport(cfg.inference)
    load_own_checks(cfg.check)
    health = diagnostics.make_health(**asdict(cfg.health))
    check_optimizer(c.named_arguments(cfg.optimizer), c.named_arguments(cfg.schedule), c.optimizer_steps(cfg.plan))
    torch.manual_seed(cfg.seed)
    torch.set_num_threads(cfg.threads or torch.get_num_threads())
    # Resolve the task: the user's own prompts and rewards replace the default one
    own = cfg.data.source not in (None, EMBEDDED) and cfg.reward.functions is not None
    task = CUSTOM if own and cfg.task.name == c.TaskConfig.name else resolve_task(**non_null_fields(cfg.task))
    rewards = make_rewards(cfg, task)
    scorers = held_out.make_scorers(cfg, task, rewards)
    method = make_method(
        cfg.algorithm,
        loss=cfg.loss,
        advantage=cfg.advantage,
        kl=non_null_fields(cfg.kl),
        max_new_tokens=cfg.generate.max_new_tokens,
        prompts_per_step=cfg.plan.prompts_per_step,
        num_generations=cfg.plan.num_generations,
        reward_weights=rewards.weights,
    )
    if cfg.reference.sync_every and method.kl is None:
        raise ValueError(
            f"reference.sync_every={cfg.reference.sync_every} has no effect: {cfg.algorithm} has no KL; set kl.coeff"
        )
    # Load the model, the prompts, and the turns of a conversation
    name = ranks.broadcast(lambda: resolve_model(cfg.model.name, cfg.seed, task.name, log=print), "start model")
    settings = non_null_fields(cfg.model, "name", "kwargs") | {"device": str(ranks.device)}
    model, tokenizer = modules.load_model(name, **settings, **cfg.model.kwargs, meta=cfg.train.load_shards)
    model = model if cfg.lora is None else modules.add_adapter(model, cfg.lora)
    train_set, eval_set = task.load(**non_null_fields(cfg.data), seed=cfg.seed, tokenizer=tokenizer)
    context, template = modules.context_length(model), cfg.data.template_kwargs
    limits = non_null_fields(cfg.environment, "transforms")
    make_transforms, chat = conversation_settings(task, cfg.environment.transforms, limits, context)
    own_set = held_out.EvalSet(eval_set, task, scorers, make_transforms, chat, cfg.eval.num_samples, cfg.eval.ks)
    eval_sets = held_out.load_eval_sets(cfg, own_set, train_set, tokenizer, context)
    # Check that prompts, completions and batches fit, and print the plan
    all_prompts = (train_set, *(each.prompts for each in eval_sets.values()))
    plan = diagnostics.TrainingPlan(
        **asdict(cfg.plan),
        train_prompts=len(train_set),
        eval_prompts=len(eval_set),
        max_prompt_tokens=data.longest_prompt(tokenizer, all_prompts, **template),
        max_new_tokens=cfg.generate.max_new_tokens,
        context_length=context,
        max_turns=chat.get("max_turns") if make_transforms() else 1,
        max_tokens=chat.get("max_tokens"),
    )
    trained = modules.count_trained(model)
    ranks.log(f"{name}: {model.num_parameters():,} parameters, {trained:,} trained")
    further = "".join(f"\nheld out, {n}: {each.prompts}" for n, each in eval_sets.items() if n)
    ranks.log(f"training: {train_set}\nheld out: {eval_set}{further}\n{plan}")
    diagnostics.check_engine(s.engine_arguments(cfg.inference), plan, cfg.lora, cfg.sampler.dtype)
    wrapper = {"tokenizer": tokenizer, "generate_kwargs": {"seed": cfg.seed} | non_null_fields(cfg.generate)}
    limits = {"micro_batch_size": plan.micro_batch_size, "max_tokens": cfg.train.micro_batch_tokens}
    autocast = cfg.train.parallel != "fsdp"  # FSDP itself casts the weights that it gathers
    scoring = {"precision": cfg.train.precision, "float32_head": cfg.train.float32_head} if autocast else {}
    accumulation = {"merge_identical": cfg.train.merge_identical, "reduce": cfg.train.reduce}
    for each in eval_sets.values():
        each.chat["template_kwargs"] = template
    return Problem(
        task=task,
        train_set=train_set,
        eval_set=eval_set,
        model_name=name,
        model=model,
        wrapper=wrapper | scoring,
        limits=limits,
        accumulation=accumulation,
        make_transforms=make_transforms,
        chat=chat,
        rewards=rewards,
        method=method,
        plan=plan,
        health=health,
        eval_sets=eval_sets,
    )


def make_rewards(cfg: Config, task: TaskBase) -> RewardTransform:
    """Build the reward functions: the user's, or the task's."""
    reward, own = cfg.reward, cfg.reward.functions is not None
    if reward.functions == [] and (task is CUSTOM or task.make_rewards()):
        raise ValueError("reward.functions=[] leaves nothing to learn from; name one, or use null for the task's")
    return RewardTransform(
        [load_reward(spec) for spec in reward.functions] if own else task.make_rewards(),
        weights=reward.weights if own or reward.weights else task.reward_weights,
        clip_range=reward.clip_range,
        executor=make_executor(**asdict(reward.executor)),
        max_consecutive_failures=reward.max_consecutive_failures,
        deduplicate=reward.deduplicate,
        quarantine=Path(cfg.output_dir) / "quarantine.jsonl",
    )


def copy_model(cfg: Config, problem: Problem, ranks: Ranks) -> tuple[PreTrainedModel | None, PreTrainedModel | None]:
    """Return the sampler (the model itself, or a copy on rank 0) and the copy for the KL; both may be None."""
    shares, dtype = cfg.sampler.share_weights, cfg.sampler.dtype
    sampler = problem.model if shares else None
    if not shares and ranks.is_main:
        sampler = modules.frozen_copy(problem.model, dtype and data.parse_dtype(dtype))
    needs_reference = problem.method.kl is not None and cfg.lora is None
    return sampler, modules.frozen_copy(problem.model) if needs_reference else None


def make_trainer(cfg: Config, problem: Problem, ranks: Ranks) -> TransformersWrapper:
    """Distribute the model over the ranks and build its scorer."""
    distribute(cfg, problem, ranks, problem.model)
    return TransformersWrapper(problem.model, generate=False, packing=cfg.train.packing, **problem.wrapper)


def make_reference(
    cfg: Config, problem: Problem, ranks: Ranks, trainer: TransformersWrapper, model: PreTrainedModel | None
) -> TransformersWrapper | modules.AdapterReference | modules.MovingReference | None:
    """Build the scorer of the initial model: a copy, sharded like the model, or the model without its adapter.

    The copy may move towards the model.
    """
    if problem.method.kl is None:
        return None
    if model is None:
        return modules.AdapterReference(trainer)
    distribute(cfg, problem, ranks, model)
    scorer = trainer.get_new_version(model=model)
    return modules.MovingReference(scorer, problem.model, cfg.reference.share) if cfg.reference.sync_every else scorer


def distribute(cfg: Config, problem: Problem, ranks: Ranks, model: PreTrainedModel) -> None:
    """Distribute a model over the ranks and, if they read only their shards, load its weights."""
    shard_model(model, ranks, cfg.train.parallel, **sharding(cfg))
    if cfg.train.load_shards:
        modules.load_shards(model, problem.model_name, device=ranks.device, **cfg.model.kwargs)


def sharding(cfg: Config) -> dict[str, Any]:
    """Return the arguments of ``shard_model``."""
    if cfg.train.parallel != "fsdp":
        return {}
    settings = {name: getattr(cfg.train, name) for name in ("precision", "float32_head", "shard_size")}
    return settings | {"offload_parameters": "parameters" in cfg.train.offload}


def kl_arguments(problem: Problem) -> dict[str, Any]:
    """Return the arguments of the KL to the initial model."""
    masked = problem.method.loss.get("mask_truncated_completions", False)
    return problem.method.reward_kl_arguments | problem.limits | {"mask_truncated_completions": masked}


def make_env(cfg: Config, problem: Problem, reference: modules.Scorer | None) -> DatasetChatEnv:
    """Build the environment: prompts, turns, rewards, their shaping, KL to the initial model if it has a reference."""
    rewards = problem.rewards
    after = [instantiate(spec, rewards) for spec in cfg.reward.shaping]
    if reference is not None:
        after.append(KLRewardTransform(reference, **kl_arguments(problem)))
    return DatasetChatEnv(
        problem.train_set,
        problem.wrapper["tokenizer"],
        prompts_per_batch=problem.plan.prompts_per_step,
        num_generations=problem.plan.num_generations,
        transforms=problem.make_transforms(),
        rewards=rewards,
        after_rewards=after,
        sampler=make_prompt_sampler(cfg.curriculum, problem),
        seed=cfg.seed,
        **problem.chat,
    )


def make_prompt_sampler(curriculum: c.CurriculumConfig, problem: Problem) -> data.PromptSampler | None:
    """Build the prompt sampler: shuffled epochs (None), shares of a mixture, or by pass rate."""
    sampler, size = problem.task.make_sampler(problem.train_set), len(problem.train_set)
    returns = problem.rewards.returns(raw=True)  # shaping does not change whether a prompt is solved
    if curriculum.pass_rate is not None:
        if sampler is not None:
            raise ValueError("curriculum.pass_rate cannot be combined with a mixture's weights; set it to null")
        sampler = data.PassRatePool(size, returns=returns, **non_null_fields(curriculum.pass_rate))
    if curriculum.rerolls is not None:
        settings = {"delay": 10 * problem.plan.prompts_per_step} | non_null_fields(curriculum.rerolls)
        sampler = data.DeferredRerolls(sampler or data.MixtureSampler([size]), returns=returns, **settings)
    return sampler


def make_policy(
    cfg: Config, problem: Problem, ranks: Ranks, trainer: TransformersWrapper, sampler: PreTrainedModel | None
) -> tuple[TurnPolicy | None, Engine | None, WeightUpdater]:
    """Build the policy and the engine of rank 0, and the updater of each rank; verify the updates."""
    # Sample with the model itself or a copy; without an engine this is all
    to_sampler = InProcessWeightUpdater(problem.model, sampler)
    if cfg.inference.engine is None:
        policy = None if sampler is None else TransformersWrapper(sampler, **problem.wrapper)
        return policy, None, to_sampler
    # Start the engine, then verify that weights arrive and that its log-probs match the trainer's
    model_name, arguments = problem.model_name, s.engine_arguments(cfg.inference)
    if cfg.model.quantization is not None and arguments.get("enable_lora"):  # the base that adapters fit
        tokenizer = problem.wrapper["tokenizer"]
        model_name = modules.save_merged(problem.model, tokenizer, Path(cfg.output_dir) / "base", adapter=False)
    engine = ranks.on_main(lambda: make_engine(cfg.inference, str(model_name)), "start of the engine")
    sampling = {name: problem.wrapper[name] for name in ("tokenizer", "generate_kwargs")}
    policy, updater = None, to_sampler
    senders = ranks if sampler is problem.model else Ranks.single()  # rank 0 alone has a copy
    if sampler is not None:
        to_engine = instantiate(cfg.inference.updater, sampler, engine if ranks.is_main else [])
        updater = SequentialWeightUpdater(to_sampler, to_engine)
        if cfg.inference.self_test:
            result = diagnostics.self_test(to_engine, sampler, sampling["tokenizer"], engine, ranks=senders)
            ranks.log(str(result))
        else:
            to_engine.initialize()
    policy = vLLMWrapper(engine, **sampling) if ranks.is_main else None
    dtype, engine_dtype = cfg.sampler.dtype, arguments.get("dtype")
    diagnostics.check_parity(
        policy,
        trainer,
        problem.eval_set,
        sampler_dtype=(dtype or cfg.model.dtype) if engine_dtype == "float32" else engine_dtype,
        template_kwargs=cfg.data.template_kwargs,
        ranks=ranks,
    )
    return policy, engine, updater


def make_engine(inference: s.InferenceConfig, model_name: str) -> Engine:
    """Start the engines, in a supervised pool if the settings have one."""
    arguments, nested = dict(inference.engine), s.engine_arguments(inference)
    if "model" in nested:
        nested = nested | {"model": nested["model"] or model_name}
        arguments = arguments | {"make_engine": nested} if "make_engine" in arguments else nested
    starts = [
        partial(instantiate, arguments | {k: v[i] for k, v in inference.per_replica.items()})
        for i in range(inference.replicas)
    ]
    with ExitStack() as started:  # close the first engines if a later one does not start
        together = (start() for start in starts)
        if s.is_on_ray(inference):
            from torchrl_rloo.ray import start_together

            together = start_together(starts)
        engines = [started.enter_context(engine) for engine in together]
        engine = engines[0] if inference.pool is None else instantiate(inference.pool, engines)
        started.pop_all()
    return engine


def make_writer(cfg: Config, problem: Problem, ranks: Ranks) -> RolloutWriter | None:
    """Build the writer of all sampled rows on rank 0, if the settings name a folder."""
    if cfg.rollouts.path is None or not ranks.is_main:
        return None
    return RolloutWriter(
        cfg.rollouts.path,
        model=cfg.model.name,
        tokenizer=problem.wrapper["tokenizer"],
        notes=note_rewards(cfg, problem),
        max_bytes=cfg.rollouts.max_bytes,
        writer=run_id(cfg.output_dir),
    )


def note_rewards(cfg: Config, problem: Problem) -> dict[str, Any]:
    """Return what describes stored rows: their rewards, and the distribution of their log-probs."""
    rewards = problem.rewards
    notes = {"rewards": rewards.names, "functions": cfg.reward.functions, "weights": rewards.weights}
    return notes | {"clip_range": rewards.clip_range, "generate": non_null_fields(cfg.generate)}


def make_stored(cfg: Config, problem: Problem, updater: WeightUpdater) -> StoredRollouts:
    """Build the source of stored rows, in place of environment and collector."""
    files, plan = RolloutFiles(cfg.rollouts.source, tokenizer=problem.wrapper["tokenizer"]), problem.plan
    check_stored_groups(
        files,
        rewards=problem.rewards.names,
        num_generations=plan.num_generations,
        prompts_per_step=plan.prompts_per_step,
        steps=min(plan.steps, cfg.stop_after or plan.steps) if cfg.curriculum.refill is None else None,
    )
    return StoredRollouts(
        files,
        groups_per_batch=plan.prompts_per_step,
        max_staleness=cfg.collector.max_staleness,
        on_stale=cfg.collector.on_stale,
        weight_updater=updater,
    )


def make_collector(
    cfg: Config, env: DatasetChatEnv, policy: TurnPolicy, updater: WeightUpdater, writer: RolloutWriter | None
) -> LLMCollector:
    """Build the collector: nothing ahead by default, so that every batch has the current weights."""
    settings = asdict(cfg.collector)
    if isinstance(limits := settings["max_in_flight"], dict):
        settings["max_in_flight"] = AdaptiveConcurrency(**limits)
    settings["audit"] = Path(cfg.output_dir) / "ledger.jsonl" if cfg.collector.audit else None
    return LLMCollector(env, policy, weight_updater=updater, seed=cfg.seed, postproc=writer, **settings)


def make_source(
    cfg: Config,
    problem: Problem,
    ranks: Ranks,
    policy: TurnPolicy | None,
    updater: WeightUpdater,
    advantage: MCAdvantage,
    trainer: TransformersWrapper,
    reference: modules.Scorer | None,
    writer: RolloutWriter | None,
) -> SharedSource:
    """Build the source of a step's rows, which environment and collector of rank 0 sample, or a folder holds."""
    source, finish, stored = None, None, cfg.rollouts.source is not None
    if ranks.is_main and stored:
        source = make_group_source(cfg, problem, make_stored(cfg, problem, updater), advantage, trainer)
    elif ranks.is_main:
        env = make_env(cfg, problem, reference if ranks.size == 1 else None)
        collector = make_collector(cfg, env, policy, updater, writer)
        source = make_group_source(cfg, problem, collector, advantage, trainer)
    # The reference of several ranks scores on all of them, after the rows are collected
    if reference is not None and (stored or ranks.size > 1):
        add_kl = add_missing_kl if stored else add_reference_kl
        finish = partial(add_kl, ref=reference, ranks=ranks, **kl_arguments(problem))
    samples_itself = cfg.inference.engine is None and cfg.sampler.share_weights
    sampler = problem.model if samples_itself else None
    offloaded = policy.model if cfg.sampler.offload and ranks.is_main else None
    return SharedSource(ranks, source, updater, sampler=sampler, offloaded=offloaded, finish=finish)


def make_group_source(
    cfg: Config,
    problem: Problem,
    collector: LLMCollector | StoredRollouts,
    advantage: MCAdvantage,
    trainer: TransformersWrapper,
) -> GroupSource:
    """Build the source of groups: all of them, or only those with a signal."""
    refill, cache = cfg.curriculum.refill, cfg.curriculum.cache
    prompts = None if collector.env is None else collector.env.primer.sampler
    observe = getattr(prompts, "update", None)  # a prompt sampler that learns from every batch
    if refill is not None:
        if advantage.depends_on_other_groups:
            raise ValueError(
                "curriculum.refill drops groups without signal and cannot be combined with advantages that compare "
                "groups; set curriculum.refill=null, or use an algorithm that compares rows of a group (rloo, grpo)"
            )
        settings = {"tolerance": 0.0, "observers": [observe] if observe else []} | non_null_fields(refill)
        returns = problem.rewards.returns(per_function=isinstance(advantage.credit, replay.NormalizeThenSum))
        signal = replay.ZeroSignalFilter(settings.pop("tolerance"), returns=returns)
        refill = RefillingCollector(collector, signal, cfg.plan.prompts_per_step, **settings)
    if cache is not None:
        cache = replay.GroupCache(scorer=trainer, **problem.limits, **non_null_fields(cache))
    return GroupSource(collector, refill, cache, observe)


def report_progress(run: Run, problem: Problem, source: SharedSource, writer: RolloutWriter | None = None) -> None:
    """Tell the reward functions, and the writer of rows, how far the run is."""
    done, plan = run.step - 1, problem.plan
    if writer is not None:
        writer.step = run.step
    problem.rewards.report_progress(done, plan.steps, plan.epochs(done), source.num_tokens, run.logger.history)


def score_old_log_probs(
    run: Run, cfg: Config, problem: Problem, rows: TensorDictBase, loss_fn: RLOOLoss, source: SharedSource
) -> TensorDictBase:
    """Score rows with the training model before its first update, if the loss or parity metrics need it."""
    rows = tensor_rows(rows)
    whole = not any(keys.PREVIOUS_SEGMENTS in row.keys() for row in rows.unbind(0))
    parity = run.is_due(cfg.inference.parity_every) and whole
    if parity or {keys.PROXIMAL_LOG_PROBS, keys.PROXIMAL_ENTROPY} & set(loss_fn.in_keys):
        settings = {"entropy": keys.PROXIMAL_ENTROPY, "ranks": source.ranks} | problem.limits
        rows = modules.record_log_probs(loss_fn.actor_network, rows, **settings)
    if parity:  # only rows of the current weights; the log-probs of cached rows are already the trainer's
        current = rows[keys.POLICY_VERSION] == source.policy_version
        fresh = current & (rows[keys.GROUP_ID] < replay.FIRST_CACHED_GROUP)
        run.log(diagnostics.parity_metrics(rows[fresh]) if fresh.any() else {})
    return rows


def log_rollouts(run: Run, cfg: Config, problem: Problem, step_rows: StepRows, source: SharedSource) -> None:
    """Log metrics of a step's rows and, at intervals, a table of some of them."""
    rows, sampled = step_rows
    rewards, masked = problem.rewards, problem.method.loss.get("mask_truncated_completions", False)
    settings = {"mask_truncated_completions": masked, "extract": problem.task.extract_answer}
    metrics = diagnostics.completion_metrics(sampled, rewards.names, rewards.weights, **settings)
    metrics |= diagnostics.staleness_metrics(sampled if rows is None else rows, source.policy_version)
    metrics["num_tokens"] = source.num_tokens
    speed = metrics["completions/mean_length"] * len(sampled) / run.seconds("collect")
    run.log(metrics, timings={"tokens_per_second": speed})
    if cfg.log.samples and run.is_due(cfg.log.samples_every) and source.ranks.is_main:
        run.log_table("training completions", evaluation.completion_table(sampled, cfg.log.samples))


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


def make_evaluations(
    cfg: Config, problem: Problem, policy: TurnPolicy | None, reference: modules.Scorer | None, ranks: Ranks
) -> dict[str, evaluation.Evaluation]:
    """Build the evaluation of the held-out prompts, as "", and of each further set; other ranks have none."""
    if not ranks.is_main:
        return {}
    reference = reference if ranks.size == 1 else None  # one rank alone may hold a part of it
    options = {"batch_size": cfg.eval.batch_size, "reference": reference, "score_limits": problem.limits}
    options |= {"executor": problem.rewards.executor, "quarantine": problem.rewards.quarantine}
    return held_out.make_evaluations(problem.eval_sets, policy, **options)


def folder_of_pages(cfg: Config) -> Path | None:
    """Return the folder of the transcripts of evaluations; None if the settings want none."""
    return Path(cfg.output_dir) / "transcripts" if cfg.log.transcripts else None


def evaluate(run: Run, cfg: Config, source: SharedSource, evaluations: dict[str, evaluation.Evaluation]) -> None:
    """Evaluate on the held-out prompts."""
    with run.time("eval"):
        results = source.on_main(partial(evaluate_now, cfg, run.step, source, evaluations), "evaluation")
        held_out.log_evaluation(run, results or {}, cfg.log)  # none on the other ranks


def evaluate_now(
    cfg: Config, step: int, source: SharedSource, evaluations: dict[str, evaluation.Evaluation]
) -> dict[str, evaluation.EvaluationResult]:
    """Evaluate each held-out set with the current weights."""
    version = source.source.collector.policy_version
    return held_out.run_evaluations(evaluations, step, pages=folder_of_pages(cfg), policy_version=version)


def refresh_report(run: Run, cfg: Config, ranks: Ranks) -> None:
    """Rewrite the report of an unfinished run, less often as it gets longer."""
    if ranks.is_main and run.logger.history and run.is_due(max(5, run.step // 50)):
        write_report(run, cfg, {}, finished=False)


def write_report(run: Run, cfg: Config, summary: dict[str, Any], **options: Any) -> Path:
    """Write the report of the run."""
    return diagnostics.write_report(
        run.directory,
        history=run.logger.history,
        timings=run.logger.timings,
        summary=summary,
        tables=run.logger.tables,
        definitions=diagnostics.DEFINITIONS,
        settings=asdict(cfg),
        command=command_line(),
        **options,
    )


def finish(run: Run, cfg: Config, problem: Problem, ranks: Ranks, source: SharedSource) -> None:
    """Save the model if it was trained, write the report, and print the result as one line of JSON."""
    written = {} if cfg.rollouts.path is None else {"rollouts": str(Path(cfg.rollouts.path).resolve())}
    if cfg.rollouts.train:
        checksums = check_copies(problem.model, ranks)
        if ranks.size > 1:
            ranks.log(f"checksums of the ranks' weights: {', '.join(checksums.values())}")
        folder = modules.save_model(problem.model, problem.wrapper["tokenizer"], run.directory / "model")
        written["model"] = str(folder.resolve())
    if not ranks.is_main:
        return
    result = run.summary("eval/greedy", "eval/sampled") if cfg.rollouts.train else run.summary("reward")
    report = write_report(run, cfg, result | {"plan": str(problem.plan)})
    print(json.dumps(result | {"report": str(report.resolve())} | written))


if __name__ == "__main__":
    run_recipe(main, CONFIG)
