"""Settings that all recipes of RLOO training share."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchrl_rloo.cli import config as c
from torchrl_rloo.cli import sampling_config as s
from torchrl_rloo.cli.check import CheckConfig
from torchrl_rloo.cli.eval_config import EvalConfig
from torchrl_rloo.cli.rollouts_config import RolloutsConfig, check_stored
from torchrl_rloo.cli.schema import check_settings


@dataclass
class RLOOConfig(c.RunConfig):
    """Settings of RLOO training."""

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
    reference: c.ReferenceConfig = field(default_factory=c.ReferenceConfig)
    optimizer: c.OptimizerConfig = field(default_factory=c.OptimizerConfig)
    schedule: c.ScheduleConfig = field(default_factory=c.ScheduleConfig)
    sampler: s.SamplerConfig = field(default_factory=s.SamplerConfig)
    collector: s.CollectorConfig = field(default_factory=s.CollectorConfig)
    inference: s.InferenceConfig = field(default_factory=s.InferenceConfig)
    curriculum: c.CurriculumConfig = field(default_factory=c.CurriculumConfig)
    rollouts: RolloutsConfig = field(default_factory=RolloutsConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    check: CheckConfig = field(default_factory=CheckConfig)

    def __post_init__(self):
        check_settings("lora", self.lora)
        s.check_quantization(self.model.quantization, self.lora)
        if not self.on_cluster and self.rollouts.source is None:  # engines and stored rows have their own weights
            s.check_ahead(self.collector, self.sampler)
        s.check_ranks(self.train, self.curriculum, self.inference, self.sampler)
        s.check_offload(self.sampler, self.collector, self.inference, self.model.device)
        s.check_split(self.train, self.sampler, self.inference, self.curriculum, self.lora)
        if s.is_on_ray(self.inference) and not self.on_cluster:
            raise ValueError("inference.engine=RayEngine requires a cluster; use rloo_async")
        check_stored(self)
        c.check_reference(self.reference, self.kl, lora=self.lora)
        c.check_clip_range(self.reward, self.advantage)
        c.check_trained_weights(self.model, self.train, self.lora)
