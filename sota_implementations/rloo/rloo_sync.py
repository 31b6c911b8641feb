"""Train a language model with RLOO: sample completions, score them, train on them, update the sampler, repeat.

Examples:
  rloo_sync.py                                     the built-in task and model, on one CPU core
  rloo_sync.py --config rloo_tools                 the built-in model learns to call a tool
  rloo_sync.py algorithm=grpo inference=vllm       another method, sampled by vLLM
  rloo_sync.py task=gsm8k model.name=my/model model.device=cuda optimizer.lr=1e-6  a model from the hub
  rloo_sync.py task=custom data.source=mine.jsonl reward.functions=[my_rewards.graded]  your data and reward
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from torchrl_rloo.cli import config as c
from torchrl_rloo.cli import sampling_config as s
from torchrl_rloo.cli.recipe import parse_args, run_recipe
from torchrl_rloo.cli.schema import check_settings, non_null_fields


@dataclass
class Config(c.RunConfig):
    """Settings of RLOO training."""

    output_dir: str = "outputs/rloo_sync/${task.name}/seed${seed}"  # directory of checkpoints, metrics, report, model
    algorithm: str = "rloo_trl"  # method: rloo, rloo_trl, grpo, dr_grpo, dapo, gspo, cispo, ...; a wrong name lists all
    loss: dict[str, c.Any] = field(default_factory=dict)  # arguments of RLOOLoss that replace the algorithm's
    advantage: dict[str, c.Any] = field(default_factory=dict)  # arguments of MCAdvantage that replace the algorithm's
    lora: c.Any = None  # arguments of peft.LoraConfig: {r: 16, target_modules: all-linear}; null: train all weights
    task: c.TaskConfig = field(default_factory=c.TaskConfig)
    model: c.ModelConfig = field(default_factory=c.ModelConfig)
    data: c.DataConfig = field(default_factory=c.DataConfig)
    plan: c.PlanConfig = field(default_factory=c.PlanConfig)
    train: c.TrainConfig = field(default_factory=c.TrainConfig)
    generate: s.GenerateConfig = field(default_factory=s.GenerateConfig)
    environment: s.EnvironmentConfig = field(default_factory=s.EnvironmentConfig)
    reward: c.RewardConfig = field(default_factory=c.RewardConfig)
    kl: c.KLConfig = field(default_factory=c.KLConfig)
    optimizer: c.OptimizerConfig = field(default_factory=c.OptimizerConfig)
    schedule: c.ScheduleConfig = field(default_factory=c.ScheduleConfig)
    sampler: s.SamplerConfig = field(default_factory=s.SamplerConfig)
    collector: s.CollectorConfig = field(default_factory=s.CollectorConfig)
    inference: s.InferenceConfig = field(default_factory=s.InferenceConfig)
    curriculum: c.CurriculumConfig = field(default_factory=c.CurriculumConfig)
    eval: c.EvalConfig = field(default_factory=c.EvalConfig)

    def __post_init__(self):
        check_settings("lora", self.lora)
        s.check_ahead(self.collector, self.sampler)
        c.check_clip_range(self.reward, self.advantage)


if __name__ == "__main__":  # parse before torch is imported, so --help and wrong settings respond at once
    CONFIG = parse_args(Config, __file__, __doc__)

import json
from collections.abc import Callable
from contextlib import ExitStack, closing, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hydra.utils import instantiate
from tensordict import TensorDictBase
from torchrl.data import ReplayBuffer, SamplerWithoutReplacement
from transformers import PreTrainedModel

from torchrl_rloo import data, diagnostics, modules, replay
from torchrl_rloo.collectors import AdaptiveConcurrency, GroupSource, LLMCollector, RefillingCollector, StepRows
from torchrl_rloo.data import PromptDataset, keys, tensor_rows
from torchrl_rloo.embedded import resolve_model, resolve_task
from torchrl_rloo.engines import Engine, sleeping
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.envs.tasks import CUSTOM, EMBEDDED, TaskBase, conversation_settings
from torchrl_rloo.envs.transforms import KLRewardTransform, RewardTransform
from torchrl_rloo.modules import TransformersWrapper, TurnPolicy, vLLMWrapper
from torchrl_rloo.objectives import Preset, RLOOLoss, RLOOLossOutput, make_method, merge_outputs
from torchrl_rloo.replay import MCAdvantage, RowStorage
from torchrl_rloo.rewards import load_reward, make_executor
from torchrl_rloo.run import Run, check_resumable, meters
from torchrl_rloo.training import accumulate, catch_up, linear_schedule, minibatches, optimizer_step
from torchrl_rloo.weight_update import InProcessWeightUpdater, SequentialWeightUpdater, WeightUpdater

HEADLINE = ("reward", "eval/greedy", "eval/sampled", "time/step")  # metrics of the progress bar


class Problem(NamedTuple):
    """Task, prompts, model, rewards, method and sizes of a run."""

    task: TaskBase
    train_set: PromptDataset
    eval_set: PromptDataset
    model_name: str
    model: PreTrainedModel
    wrapper: dict[str, Any]  # arguments of every policy: tokenizer and sampling
    limits: dict[str, Any]  # rows and tokens of one forward and backward pass
    make_transforms: Callable[[], list]  # builds the transforms that answer the policy's turns
    chat: dict[str, Any]  # arguments of every environment: limits and template
    rewards: RewardTransform
    method: Preset
    plan: diagnostics.TrainingPlan


def main(cfg: Config) -> None:
    # Task, model, rewards, method; wrong settings raise before anything samples
    problem = load_problem(cfg)
    model, rewards, method, plan = problem.model, problem.rewards, problem.method, problem.plan

    # Environment: prompts, turns, rewards, KL to the initial model
    trainer = TransformersWrapper(model, generate=False, packing=cfg.train.packing, **problem.wrapper)
    env = make_env(cfg, problem, trainer)

    # Learning: buffer with leave-one-out advantages, loss, optimizer, schedule
    advantage = MCAdvantage(**method.advantage_arguments)
    buffer = ReplayBuffer(
        storage=RowStorage(),
        sampler=SamplerWithoutReplacement(),
        transform=advantage,
        generator=torch.Generator().manual_seed(cfg.seed),
    )
    loss_fn = RLOOLoss(trainer, **method.loss_arguments)
    optimizer = torch.optim.AdamW(model.parameters(), **asdict(cfg.optimizer))
    scheduler = linear_schedule(optimizer, plan.optimizer_steps, **asdict(cfg.schedule))

    # Sampling: by the model itself, or by an engine that receives its weights
    policy, engine, sampler, updater = make_policy(cfg, problem, trainer)
    collector = make_collector(cfg, env, policy, updater)
    source = make_source(cfg, problem, collector, advantage, trainer)
    evaluation = make_evaluation(cfg, problem, policy)

    # Run: resumes, checkpoints, logs and stops
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "buffer": buffer, "source": source}
    parts |= {"sampler": sampler if sampler is not model else None, "kl_coeff": method.adaptive_kl}
    run = Run(cfg.output_dir, plan.steps, parts, **c.run_settings(cfg), headline=HEADLINE)
    with engine or nullcontext(), closing(rewards), closing(source), run:
        rewards.quarantine.rewind(run.step)  # steps that run again write their failed samples again
        if run.step == 0:
            evaluate(run, cfg, evaluation)
        elif engine is not None:  # a new engine starts with the initial weights
            updater.initialize()
        for step in run.steps():
            with run.time("collect"):  # 1. sample whole groups of finished trajectories
                rewards.report_progress(step - 1, plan.steps, plan.epochs(step - 1), collector.num_tokens)
                rows, sampled = step_rows = source.collect()
            log_rollouts(run, cfg, problem, step_rows, collector)
            with run.time("train"), sleeping(engine if cfg.inference.sleep else None):
                if rows is not None:  # 2. compute leave-one-out advantages
                    buffer.extend(score_old_log_probs(run, cfg, problem, rows, loss_fn, collector.policy_version))
                outputs, norms = [], []
                for batch in minibatches(buffer, plan.minibatches, plan.epochs_per_batch):  # 3. optimize
                    outputs += accumulate(loss_fn, batch, merge_identical=cfg.train.merge_identical, **problem.limits)
                    norms.append(optimizer_step(model, optimizer, scheduler, cfg.train.max_grad_norm))
                buffer.empty()
                catch_up(scheduler, step * plan.optimizer_steps // plan.steps)
            with run.time("sync"):  # 4. push the weights to the sampler
                if run.is_due(cfg.sampler.sync_every):
                    collector.update_policy_weights_()
            log_update(run, method, outputs, norms, len(sampled))
            run.log({"learning_rate": scheduler.get_last_lr()[0]} | meters(advantage, engine, *source.parts))
            if run.is_due(cfg.eval.every) or run.is_last:  # 5. evaluate on held-out prompts
                evaluate(run, cfg, evaluation)
    if run.finished:
        finish(run, cfg, problem)


def load_problem(cfg: Config) -> Problem:
    """Build task, rewards and method, load model and prompts, and check that all sizes fit."""
    # Refuse to resume with other settings before anything is loaded
    check_resumable(cfg.output_dir, **c.run_settings(cfg))
    torch.manual_seed(cfg.seed)
    torch.set_num_threads(cfg.threads or torch.get_num_threads())
    # Resolve the task: the user's own prompts and rewards replace the default one
    own = cfg.data.source not in (None, EMBEDDED) and cfg.reward.functions is not None
    task = CUSTOM if own and cfg.task.name == c.TaskConfig.name else resolve_task(**non_null_fields(cfg.task))
    rewards = make_rewards(cfg, task)
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
    # Load the model, the prompts, and the turns of a conversation
    name = resolve_model(cfg.model.name, cfg.seed, task.name, log=print)
    model, tokenizer = modules.load_model(name, **non_null_fields(cfg.model, "name", "kwargs"), **cfg.model.kwargs)
    model = model if cfg.lora is None else modules.add_adapter(model, cfg.lora)
    train_set, eval_set = task.load(**non_null_fields(cfg.data), seed=cfg.seed, tokenizer=tokenizer)
    context, template = modules.context_length(model), cfg.data.template_kwargs
    limits = non_null_fields(cfg.environment, "transforms")
    make_transforms, chat = conversation_settings(task, cfg.environment.transforms, limits, context)
    # Check that prompts, completions and batches fit, and print the plan
    plan = diagnostics.TrainingPlan(
        **asdict(cfg.plan),
        train_prompts=len(train_set),
        eval_prompts=len(eval_set),
        max_prompt_tokens=data.longest_prompt(tokenizer, (train_set, eval_set), **template),
        max_new_tokens=cfg.generate.max_new_tokens,
        context_length=context,
        max_turns=chat.get("max_turns") if make_transforms() else 1,
        max_tokens=chat.get("max_tokens"),
    )
    trained = modules.count_trained(model)
    print(f"{name}: {model.num_parameters():,} parameters, {trained:,} trained")
    print(f"training: {train_set}\nheld out: {eval_set}\n{plan}", flush=True)
    diagnostics.check_engine(cfg.inference.engine, plan, cfg.lora, cfg.sampler.dtype)
    wrapper = {"tokenizer": tokenizer, "generate_kwargs": {"seed": cfg.seed} | non_null_fields(cfg.generate)}
    limits = {"micro_batch_size": plan.micro_batch_size, "max_tokens": cfg.train.micro_batch_tokens}
    chat |= {"template_kwargs": template}
    prompts = (train_set, eval_set)
    return Problem(task, *prompts, name, model, wrapper, limits, make_transforms, chat, rewards, method, plan)


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


def make_env(cfg: Config, problem: Problem, trainer: TransformersWrapper) -> DatasetChatEnv:
    """Build the environment: prompts, turns, rewards, their shaping, KL to the initial model."""
    rewards, method = problem.rewards, problem.method
    after = [instantiate(spec, rewards) for spec in cfg.reward.shaping]
    if method.kl is not None:
        reference = modules.frozen_reference(trainer) if cfg.lora is None else modules.AdapterReference(trainer)
        masked = method.loss.get("mask_truncated_completions", False)
        settings = method.reward_kl_arguments | problem.limits
        after.append(KLRewardTransform(reference, mask_truncated_completions=masked, **settings))
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
    cfg: Config, problem: Problem, trainer: TransformersWrapper
) -> tuple[TurnPolicy, Engine | None, torch.nn.Module, WeightUpdater]:
    """Build the policy, its engine, the model with the sampler's weights and their updater; verify the updates."""
    # Sample with the model itself or a copy; without an engine this is all
    shares, dtype, tokenizer = cfg.sampler.share_weights, cfg.sampler.dtype, problem.wrapper["tokenizer"]
    sampler = problem.model if shares else modules.frozen_copy(problem.model, dtype and data.parse_dtype(dtype))
    to_sampler = InProcessWeightUpdater(problem.model, sampler)
    if cfg.inference.engine is None:
        return TransformersWrapper(sampler, **problem.wrapper), None, sampler, to_sampler
    # Start the engine, then verify that weights arrive and that its log-probs match the trainer's
    engine = make_engine(cfg.inference, problem.model_name)
    to_engine = instantiate(cfg.inference.updater, sampler, engine)
    policy = vLLMWrapper(engine, **problem.wrapper)
    if cfg.inference.self_test:
        print(diagnostics.self_test(to_engine, sampler, tokenizer, engine), flush=True)
    else:
        to_engine.initialize()
    engine_dtype = cfg.inference.engine.get("dtype")
    diagnostics.check_parity(
        policy,
        trainer,
        problem.eval_set,
        sampler_dtype=(dtype or cfg.model.dtype) if engine_dtype == "float32" else engine_dtype,
        template_kwargs=cfg.data.template_kwargs,
    )
    return policy, engine, sampler, SequentialWeightUpdater(to_sampler, to_engine)


def make_engine(inference: s.InferenceConfig, model_name: str) -> Engine:
    """Start the engines, in a supervised pool if the settings have one."""
    arguments = dict(inference.engine)
    if "model" in arguments:
        arguments["model"] = arguments["model"] or model_name
    with ExitStack() as started:  # close the first engines if a later one does not start
        engines = [
            started.enter_context(instantiate(arguments | {k: v[i] for k, v in inference.per_replica.items()}))
            for i in range(inference.replicas)
        ]
        engine = engines[0] if inference.pool is None else instantiate(inference.pool, engines)
        started.pop_all()
    return engine


def make_collector(cfg: Config, env: DatasetChatEnv, policy: TurnPolicy, updater: WeightUpdater) -> LLMCollector:
    """Build the collector: nothing ahead by default, so that every batch has the current weights."""
    settings = asdict(cfg.collector)
    if isinstance(limits := settings["max_in_flight"], dict):
        settings["max_in_flight"] = AdaptiveConcurrency(**limits)
    settings["audit"] = Path(cfg.output_dir) / "ledger.jsonl" if cfg.collector.audit else None
    return LLMCollector(env, policy, weight_updater=updater, seed=cfg.seed, **settings)


def make_source(
    cfg: Config, problem: Problem, collector: LLMCollector, advantage: MCAdvantage, trainer: TransformersWrapper
) -> GroupSource:
    """Build the source of a step's rows: all groups, or only those with a signal."""
    refill, cache = cfg.curriculum.refill, cfg.curriculum.cache
    observe = getattr(collector.env.primer.sampler, "update", None)  # a prompt sampler that learns from every batch
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


def make_evaluation(cfg: Config, problem: Problem, policy: TurnPolicy) -> diagnostics.Evaluation:
    """Build the evaluation on held-out prompts."""
    own = None if cfg.reward.functions is None else problem.rewards.functions
    return diagnostics.Evaluation(
        policy,
        problem.eval_set,
        load_reward(cfg.eval.scorer) if cfg.eval.scorer is not None else problem.task.make_scorer(own),
        num_samples=cfg.eval.num_samples,
        ks=cfg.eval.ks,
        batch_size=cfg.eval.batch_size,
        extract=problem.task.extract_answer,
        executor=problem.rewards.executor,
        make_transforms=problem.make_transforms,
        env_kwargs=problem.chat,
    )


def score_old_log_probs(
    run: Run, cfg: Config, problem: Problem, rows: TensorDictBase, loss_fn: RLOOLoss, version: int
) -> TensorDictBase:
    """Score rows with the training model before its first update, if the loss or parity metrics need it."""
    rows = tensor_rows(rows)
    whole = not any(keys.PREVIOUS_SEGMENTS in row.keys() for row in rows.unbind(0))
    parity = run.is_due(cfg.inference.parity_every) and whole
    if parity or {keys.PROXIMAL_LOG_PROBS, keys.PROXIMAL_ENTROPY} & set(loss_fn.in_keys):
        rows = modules.record_log_probs(loss_fn.actor_network, rows, entropy=keys.PROXIMAL_ENTROPY, **problem.limits)
    if parity:  # only rows of the current weights; the log-probs of cached rows are already the trainer's
        fresh = (rows[keys.POLICY_VERSION] == version) & (rows[keys.GROUP_ID] < replay.FIRST_CACHED_GROUP)
        run.log(diagnostics.parity_metrics(rows[fresh]) if fresh.any() else {})
    return rows


def log_rollouts(run: Run, cfg: Config, problem: Problem, step_rows: StepRows, collector: LLMCollector) -> None:
    """Log metrics of a step's rows and, at intervals, a table of some of them."""
    rows, sampled = step_rows
    rewards, masked = problem.rewards, problem.method.loss.get("mask_truncated_completions", False)
    metrics = diagnostics.completion_metrics(sampled, rewards.names, rewards.weights, mask_truncated_completions=masked)
    trained = sampled if rows is None else rows
    metrics["staleness"] = collector.policy_version - float(trained[keys.POLICY_VERSION].float().mean())
    metrics["num_tokens"] = collector.num_tokens
    speed = metrics["completions/mean_length"] * len(sampled) / run.seconds("collect")
    run.log(metrics, timings=rewards.timings() | {"tokens_per_second": speed})
    if cfg.log.samples and run.is_due(cfg.log.samples_every):
        run.log_table("training completions", diagnostics.completion_table(sampled, cfg.log.samples))


def log_update(run: Run, method: Preset, outputs: list[RLOOLossOutput], norms: list[torch.Tensor], rows: int) -> None:
    """Log metrics of loss and optimizer, if the step had a signal, and adapt the KL coefficient."""
    run.log(merge_outputs(outputs, num_updates=len(norms)))
    run.log({"grad_norm": float(torch.stack(norms).mean())} if norms else {})
    run.log({"kl_coeff": float(method.kl.coeff)} if method.kl else {})
    if method.adaptive_kl is not None:
        method.adaptive_kl.update(run.metrics["kl"], rows)


def evaluate(run: Run, cfg: Config, evaluation: diagnostics.Evaluation) -> None:
    """Log metrics of the held-out prompts, a table of their greedy completions and, if set, transcripts."""
    with run.time("eval"):
        result = evaluation.run(keep_rows=cfg.log.transcripts)
    run.log(result.metrics)
    if cfg.log.samples:
        run.log_table("held-out completions", result.table()[: cfg.log.samples])
    if cfg.log.transcripts:
        page = run.directory / "transcripts" / f"step_{run.step:06d}.html"
        title = f"Evaluation after step {run.step}"
        diagnostics.write_evaluation_transcripts(page, result, evaluation.policy.tokenizer, title=title)


def finish(run: Run, cfg: Config, problem: Problem) -> None:
    """Save the model, write the report, and print the result as one line of JSON."""
    folder = modules.save_model(problem.model, problem.wrapper["tokenizer"], run.directory / "model")
    result = run.summary("eval/greedy", "eval/sampled")
    report = diagnostics.write_report(
        run.directory,
        history=run.logger.history,
        summary=result | {"plan": str(problem.plan)},
        tables=run.logger.tables,
        definitions=diagnostics.DEFINITIONS,
        settings=asdict(cfg),
    )
    print(json.dumps(result | {"report": str(report.resolve()), "model": str(folder.resolve())}))


if __name__ == "__main__":
    run_recipe(main, CONFIG)
