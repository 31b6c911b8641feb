"""Parts that recipes with another loop over groups than ``rloo`` share: loading, sampling, logs and the end."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from torchrl_rloo import data, diagnostics, evaluation, modules
from torchrl_rloo.cli.held_out import EvalSet, HeldOutEvaluation, load_eval_sets, longest_conversation
from torchrl_rloo.cli.rloo_config import LoopConfig
from torchrl_rloo.collectors import GroupSource, SharedSource, StepRows
from torchrl_rloo.data import PromptDataset, keys
from torchrl_rloo.embedded import resolve_model
from torchrl_rloo.engines import Engine
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.envs.tasks import TaskBase
from torchrl_rloo.envs.transforms import RewardTransform, add_reference_kl
from torchrl_rloo.modules import TransformersWrapper, vLLMWrapper
from torchrl_rloo.modules.reference import Scorer
from torchrl_rloo.objectives import RLOOLoss
from torchrl_rloo.run import Run
from torchrl_rloo.runtime.ranks import Ranks
from torchrl_rloo.training import check_copies
from torchrl_rloo.weight_update import InProcessWeightUpdater, SequentialWeightUpdater, WeightUpdater


class Loaded(NamedTuple):
    """Task, model, prompts and sizes of a run, before the model is distributed over ranks."""

    task: TaskBase
    rewards: RewardTransform
    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    train_set: PromptDataset
    eval_sets: dict[str, EvalSet]
    plan: diagnostics.TrainingPlan
    make_transforms: Callable[[], list]
    chat: dict[str, Any]

    @classmethod
    def of(cls, cfg: LoopConfig, ranks: Ranks) -> Loaded:
        """Load the parts; wrong settings raise before the model is loaded."""
        torch.manual_seed(cfg.seed)
        torch.set_num_threads(cfg.threads or torch.get_num_threads())
        task = cfg.make_task()
        rewards = cfg.reward.make(task, quarantine=Path(cfg.output_dir) / "quarantine.jsonl")
        scorers = cfg.eval.make_scorers(task, rewards, own_rewards=cfg.reward.functions is not None)
        name = ranks.broadcast(lambda: resolve_model(cfg.model.name, cfg.seed, task.name, log=print), "start model")
        images = Path(cfg.output_dir) / "images"
        model, tokenizer = cfg.model.load(name, device=str(ranks.device), meta=cfg.train.load_shards, images=images)
        model = model if cfg.lora is None else modules.add_adapter(model, cfg.lora)
        train_set, eval_set = cfg.data.load(task, tokenizer, cfg.seed)
        context = modules.context_length(model)
        make_transforms, chat = cfg.environment.make(task, context)
        chat |= {"template_kwargs": cfg.data.template_kwargs}
        own = EvalSet(eval_set, task, scorers, make_transforms, chat, cfg.eval.num_samples, cfg.eval.ks)
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
        diagnostics.check_engine(cfg.inference.arguments, plan, cfg.lora, cfg.sampler.dtype)
        ranks.log(f"{name}: {model.num_parameters():,} parameters, {modules.count_trained(model):,} trained")
        ranks.log(f"training: {train_set}\nheld out: {eval_set}\n{plan}")
        return cls(task, rewards, str(name), model, tokenizer, train_set, eval_sets, plan, make_transforms, chat)


class Sampling(NamedTuple):
    """Engine if there is one, updater of its weights, source of rows, and held-out evaluation."""

    engine: Engine | None
    updater: WeightUpdater
    source: SharedSource
    held_out: HeldOutEvaluation

    @classmethod
    def of(
        cls,
        cfg: LoopConfig,
        ranks: Ranks,
        loaded: Loaded,
        sampler: PreTrainedModel | None,
        trainer: TransformersWrapper,
        reference: Scorer | None = None,
        **kl: Any,
    ) -> Sampling:
        """Connect the sampler: the model itself or its copy, or an engine that receives its weights.

        Collected rows get the log-probs of ``reference``; ``kl`` has arguments of :func:`add_reference_kl`.
        """
        model, tokenizer, rewards = loaded.model, loaded.tokenizer, loaded.rewards
        sampling = {"tokenizer": tokenizer, "generate_kwargs": cfg.generate.arguments(cfg.seed)}
        updater, engine = InProcessWeightUpdater(model, sampler), None
        if cfg.inference.engine is None:
            policy = None if sampler is None else TransformersWrapper(sampler, **sampling, **cfg.train.scoring)
        else:
            base = loaded.name
            if cfg.model.quantization is not None and cfg.inference.arguments.get("enable_lora"):
                base = str(modules.save_merged(model, tokenizer, Path(cfg.output_dir) / "base", adapter=False))
            longest = longest_conversation(loaded.plan, loaded.eval_sets, model)
            engine = ranks.on_main(lambda: cfg.inference.make_engine(base, longest), "start of the engine")
            policy = vLLMWrapper(engine, **sampling) if ranks.is_main else None
            if sampler is not None:
                senders = ranks if sampler is model else Ranks.single()  # a copy is on rank 0 alone
                updater = SequentialWeightUpdater(updater, cfg.inference.connect(engine, sampler, tokenizer, senders))
            checked = {"sampler_dtype": cfg.sampled_dtype, "template_kwargs": cfg.data.template_kwargs, "ranks": ranks}
            diagnostics.check_parity(policy, trainer, loaded.eval_sets[""].prompts, **checked)
        source = None
        if ranks.is_main:
            env = DatasetChatEnv(
                loaded.train_set,
                tokenizer,
                prompts_per_batch=loaded.plan.prompts_per_step,
                num_generations=loaded.plan.num_generations,
                transforms=loaded.make_transforms(),
                rewards=rewards,
                after_rewards=cfg.reward.make_after(rewards),
                sampler=loaded.task.make_sampler(loaded.train_set),
                seed=cfg.seed,
                **loaded.chat,
            )
            source = GroupSource(cfg.collector.make(env, policy, updater, seed=cfg.seed, output_dir=cfg.output_dir))
        add_kl = None if reference is None else partial(add_reference_kl, ref=reference, **kl)
        source = cfg.share(ranks, source, updater, sampler=sampler, add_kl=add_kl)
        options = {"executor": rewards.executor, "quarantine": rewards.quarantine, "batch_size": cfg.eval.batch_size}
        held_out = HeldOutEvaluation(loaded.eval_sets, policy if ranks.is_main else None, source, cfg.log, **options)
        return cls(engine, updater, source, held_out)

    def start(self, run: Run, rewards: RewardTransform) -> None:
        """Evaluate before the first step, or prepare to go on: a new engine starts with the initial weights."""
        if self.source.ranks.is_main:  # steps that run again write their failed samples again
            rewards.quarantine.rewind(run.step)
        if run.step == 0:
            self.held_out.run(run)
        elif self.engine is not None:
            self.updater.initialize()

    def collect(self, run: Run, cfg: LoopConfig, loaded: Loaded, loss_fn: RLOOLoss) -> StepRows:
        """Return the rows of the next step, with the log-probs that the loss needs; log metrics, a table and parity."""
        source, rewards, plan, done = self.source, loaded.rewards, loaded.plan, run.step - 1
        with run.time("collect"):
            rewards.report_progress(done, plan.steps, plan.epochs(done), source.num_tokens, run.logger.history)
            rows, sampled = source.collect()
        masked = cfg.loss.get("mask_truncated_completions", False)
        options = {"mask_truncated_completions": masked, "extract": loaded.task.extract_answer}
        metrics = diagnostics.completion_metrics(sampled, rewards.names, rewards.weights, **options)
        metrics |= diagnostics.staleness_metrics(sampled if rows is None else rows, source.policy_version)
        speed = metrics["completions/mean_length"] * len(sampled) / run.seconds("collect")
        run.log(metrics | {"num_tokens": source.num_tokens}, timings={"tokens_per_second": speed})
        if cfg.log.samples and run.is_due(cfg.log.samples_every) and source.ranks.is_main:
            shown = source.with_text(cfg.log.choose(sampled))
            run.log_table("training completions", evaluation.completion_table(shown))
        parity = run.is_due(cfg.inference.parity_every)
        needed = {keys.PROXIMAL_LOG_PROBS, keys.PROXIMAL_ENTROPY} & set(loss_fn.in_keys)
        if rows is not None and (needed or parity):
            limits = {"micro_batch_size": plan.micro_batch_size, "max_tokens": cfg.train.micro_batch_tokens}
            source.record_log_probs(rows, loss_fn.actor_network, current=not needed, **limits)
        if rows is not None and parity:
            run.log(diagnostics.parity_metrics(source.current_rows(rows)))
        return StepRows(rows, sampled)

    def finish(self, run: Run, report: diagnostics.RunReport, loaded: Loaded) -> None:
        """Save the trained model, write the report, and print the result as one line of JSON."""
        check_copies(loaded.model, self.source.ranks)
        folder = modules.save_model(loaded.model, loaded.tokenizer, run.directory / "model").resolve()
        if self.source.ranks.is_main:
            result = run.summary("eval/greedy", "eval/sampled")
            page = report.write(result | {"plan": str(loaded.plan)})
            print(json.dumps(result | {"report": str(page.resolve()), "model": str(folder)}))
