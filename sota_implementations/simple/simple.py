"""Train a language model with RLOO in a loop of one screen: sample, compare, optimize, repeat. Copy it, and edit it.

Examples:
  simple.py task=gsm8k model.name=my/model model.device=cuda optimizer.lr=1e-6
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torchrl_rloo.cli import config as c
from torchrl_rloo.cli.fields import Whole
from torchrl_rloo.cli.recipe import command_line, parse_args, run_recipe
from torchrl_rloo.cli.rloo_sections import PlanConfig


@dataclass
class Config(c.RunConfig):
    """Settings of the loop; add your own."""

    output_dir: str = "outputs/simple/${task.name}/seed${seed}"  # directory of checkpoints, metrics, report and model
    eval_every: Whole = 20  # steps between evaluations; 0: only before the first and after the last step
    task: c.TaskConfig = field(default_factory=c.TaskConfig)
    model: c.ModelConfig = field(default_factory=c.ModelConfig)
    data: c.DataConfig = field(default_factory=c.DataConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    generate: c.GenerateConfig = field(default_factory=c.GenerateConfig)
    environment: c.EnvironmentConfig = field(default_factory=c.EnvironmentConfig)
    optimizer: c.OptimizerConfig = field(default_factory=c.OptimizerConfig)
    log: c.LoggerConfig = field(default_factory=c.LoggerConfig)
    unused = ("plan.epochs",)  # settings of these sections that the loop does not read


if __name__ == "__main__":  # parse before torch is imported, so --help and wrong settings respond at once
    CONFIG = parse_args(Config, __file__, __doc__)

import json  # noqa: E402

import torch
from torchrl.data import ReplayBuffer, SamplerWithoutReplacement

from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import tensor_rows
from torchrl_rloo.diagnostics import RunReport, completion_metrics
from torchrl_rloo.embedded import resolve_model
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.envs.transforms import RewardTransform
from torchrl_rloo.evaluation import Evaluation
from torchrl_rloo.modules import TransformersWrapper, context_length, save_model
from torchrl_rloo.objectives import RLOOLoss, merge_outputs
from torchrl_rloo.replay import MCAdvantage, RowStorage
from torchrl_rloo.run import Run
from torchrl_rloo.training import accumulate, minibatches, optimizer_step
from torchrl_rloo.weight_update import InProcessWeightUpdater


def main(cfg: Config) -> None:
    torch.manual_seed(cfg.seed)
    torch.set_num_threads(cfg.threads or torch.get_num_threads())
    task, plan = cfg.task.make(), cfg.plan
    model, tokenizer = cfg.model.load(resolve_model(cfg.model.name, cfg.seed, task.name, log=print))
    train_set, eval_set = cfg.data.load(task, tokenizer, cfg.seed)
    policy = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs=cfg.generate.arguments(cfg.seed))
    rewards = RewardTransform(task.make_rewards(), weights=task.reward_weights)  # or your own functions
    make_transforms, chat = cfg.environment.make(task, context_length(model))
    chat |= {"template_kwargs": cfg.data.template_kwargs}
    sizes = {"prompts_per_batch": plan.prompts_per_step, "num_generations": plan.num_generations, "seed": cfg.seed}
    env = DatasetChatEnv(train_set, tokenizer, rewards=rewards, transforms=make_transforms(), **sizes, **chat)
    collector = LLMCollector(env, policy, weight_updater=InProcessWeightUpdater(model, model), seed=cfg.seed)
    scoring = {"extract": task.extract_answer, "make_transforms": make_transforms, "env_kwargs": chat}
    evaluation = Evaluation(policy, eval_set, task.make_scorer(), **scoring)
    buffer = ReplayBuffer(storage=RowStorage(), sampler=SamplerWithoutReplacement(), transform=MCAdvantage())
    loss_fn, optimizer = RLOOLoss(policy.get_new_version(generate=False)), cfg.optimizer.make(model)
    parts = {"model": model, "optimizer": optimizer, "collector": collector, "buffer": buffer}
    with Run(cfg.output_dir, plan.steps, parts, health=cfg.health.make(), **cfg.run_arguments()) as run:
        report = RunReport(run, command_line())
        if run.step == 0:
            run.log(evaluation.run().metrics)
        for _ in run.steps():  # a stopped or killed run continues here, with the same bits
            rows = collector.collect()  # 1. sample whole groups
            buffer.extend(tensor_rows(rows))  # 2. compute leave-one-out advantages
            for batch in minibatches(buffer, plan.minibatches, plan.epochs_per_batch):  # 3. optimize
                outputs = accumulate(loss_fn, batch, micro_batch_size=plan.micro_batch_size)
                norm = optimizer_step(model, optimizer, max_grad_norm=1.0)
            buffer.empty()
            collector.update_policy_weights_()  # 4. send the weights to the sampler
            run.log(completion_metrics(rows, rewards.names, rewards.weights))
            run.log(merge_outputs(outputs) | {"grad_norm": float(norm)})
            if run.is_due(cfg.eval_every) or run.is_last:  # 5. evaluate on held-out prompts
                result = evaluation.run()
                run.log(result.metrics)
                run.log_table("held-out completions", result.table(cfg.log.samples))
    if run.finished:
        save_model(model, tokenizer, run.directory / "model")
        result = run.summary("eval/greedy", "eval/sampled")
        print(json.dumps(result | {"report": str(report.write(result))}))


if __name__ == "__main__":
    run_recipe(main, CONFIG)
