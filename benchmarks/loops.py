"""One RLOO run with torchrl_rloo and with TRL: same start, prompts, rewards, optimizer and steps.

``python loops.py SIDE RUN`` executes the run that the JSON object ``RUN`` describes, and prints its figures as one line
of JSON. :mod:`bench_vs_trl` starts one such process for each figure.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import cpu_seconds, peak_memory_mb
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from torchrl_rloo.rewards import boxed_accuracy


@dataclass(frozen=True)
class Run:
    """Settings of both sides.

    Attributes:
        model: directory of the start model and its tokenizer.
        prompts: file of JSON lines with a ``"prompt"`` of chat messages and the columns of the reward, in order.
        steps: number of generations, each followed by one optimizer step over all its rows.
        num_prompts: prompts per step.
        num_generations: completions per prompt.
        max_new_tokens: maximum number of tokens in a completion.
        reward: name in ``REWARDS``.
        learning_rate: peak learning rate.
        warm_up_steps: steps until the peak. The rate then falls linearly to ``final_share`` of it.
        final_share: share of the peak rate at the end; 1 keeps the rate constant.
        seed: seed of the sampled tokens and of the rows' order.
        warm_steps: number of first steps that the speed excludes.
        held_out: file of prompts to answer greedily after the run; None skips it.
    """

    model: str
    prompts: str
    steps: int
    num_prompts: int
    num_generations: int
    max_new_tokens: int
    reward: str
    learning_rate: float
    warm_up_steps: int = 0
    final_share: float = 1.0
    seed: int = 0
    warm_steps: int = 1
    held_out: str | None = None

    @property
    def rows(self) -> int:
        """Number of rows per step."""
        return self.num_prompts * self.num_generations

    def rate(self, step: int) -> float:
        """Return the share of the peak learning rate at a step."""
        fall = (1 - self.final_share) * step / self.steps
        return min(1.0, (step + 1) / (self.warm_up_steps or 1)) * (1 - fall)


def id_sum(prompts, completions, completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
    """Return cheap rewards that differ within every group, so that no row has advantage 0."""
    return [sum(ids) % 1009 / 1009 for ids in completion_ids]


REWARDS: dict[str, Callable[..., list[float]]] = {"id_sum": id_sum, "boxed_accuracy": boxed_accuracy}


class Meter:
    """Reward function that records rewards, tokens and the CPU time at each step's end. It is called once per batch."""

    __name__ = "reward"

    def __init__(self, function: Callable[..., list[float]]):
        self.function = function
        self.rewards: list[float] = []
        self.tokens: list[int] = []
        self.cpu = [0.0]

    def __call__(self, prompts, completions, completion_ids, **columns: Any) -> list[float]:
        scores = self.function(prompts=prompts, completions=completions, completion_ids=completion_ids, **columns)
        self.rewards.append(sum(scores) / len(scores))
        self.tokens.append(sum(map(len, completion_ids)))
        return scores

    def start(self) -> None:
        self.cpu = [cpu_seconds()]

    def step(self) -> None:
        self.cpu.append(cpu_seconds())


def make_optimizer(model: torch.nn.Module, run: Run) -> tuple[torch.optim.Optimizer, LambdaLR]:
    """Create the optimizer and schedule of both sides."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=run.learning_rate, betas=(0.9, 0.99), weight_decay=0.0, fused=True
    )
    return optimizer, LambdaLR(optimizer, run.rate)


def train_ours(run: Run, model, tokenizer, meter: Meter, *, drop_zero: bool = False) -> None:
    """Train as a user of torchrl_rloo would write it."""
    from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement

    from torchrl_rloo.collectors import LLMCollector
    from torchrl_rloo.data import load_prompts, tensor_rows
    from torchrl_rloo.envs import DatasetChatEnv
    from torchrl_rloo.modules import TransformersWrapper
    from torchrl_rloo.objectives import RLOOLoss
    from torchrl_rloo.replay import MCAdvantage, drop_zero_advantage
    from torchrl_rloo.weight_update import InProcessWeightUpdater

    env = DatasetChatEnv(
        load_prompts(run.prompts),
        tokenizer,
        prompts_per_batch=run.num_prompts,
        num_generations=run.num_generations,
        rewards=meter,
        shuffle=False,
    )
    policy = TransformersWrapper(
        model.eval(), tokenizer=tokenizer, generate_kwargs={"max_new_tokens": run.max_new_tokens, "seed": run.seed}
    )
    collector = LLMCollector(
        env,
        policy,
        total_dialog_turns=run.steps * run.rows,
        weight_updater=InProcessWeightUpdater(model, model),
    )
    buffer = ReplayBuffer(
        storage=LazyStackStorage(run.rows),
        sampler=SamplerWithoutReplacement(),
        transform=MCAdvantage(run.num_generations),
        batch_size=run.rows,
    )
    loss_module = RLOOLoss(policy.get_new_version(generate=False))
    optimizer, schedule = make_optimizer(model, run)
    meter.start()
    for rows in collector:
        buffer.extend(tensor_rows(rows))
        for batch in buffer:
            kept = drop_zero_advantage(batch) if drop_zero else batch
            loss_module(kept, loss_module.normalizers(batch)).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        buffer.empty()
        collector.update_policy_weights_()
        meter.step()


def train_ours_without_zeros(run: Run, model, tokenizer, meter: Meter) -> None:
    """Train with ``drop_zero_advantage``, which computes the same gradient from fewer rows."""
    train_ours(run, model, tokenizer, meter, drop_zero=True)


def train_trl(run: Run, model, tokenizer, meter: Meter) -> None:
    """Train with TRL's RLOOTrainer, and its defaults wherever they match the other side."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import RLOOConfig, RLOOTrainer

    class Steps(TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            meter.start()

        def on_step_end(self, *args, **kwargs):
            meter.step()

    with tempfile.TemporaryDirectory() as output:
        config = RLOOConfig(
            output,
            max_steps=run.steps,
            per_device_train_batch_size=run.rows,
            gradient_accumulation_steps=1,
            num_generations=run.num_generations,
            max_completion_length=run.max_new_tokens,
            shuffle_dataset=False,
            beta=0.0,
            epsilon=0.2,
            max_grad_norm=1.0,
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            seed=run.seed,
        )
        RLOOTrainer(
            model,
            reward_funcs=meter,
            args=config,
            train_dataset=Dataset.from_list(read_lines(run.prompts)),
            processing_class=tokenizer,
            callbacks=[Steps()],
            optimizers=make_optimizer(model, run),
        ).train()


SIDES = {"ours": train_ours, "trl": train_trl, "ours, zero rows dropped": train_ours_without_zeros}


@torch.no_grad()
def greedy_accuracy(model, tokenizer, rows: Sequence[dict[str, Any]], max_new_tokens: int) -> float:
    """Return the share of correct answers by the model's ``generate``, for the weights of either side."""
    right = 0.0
    for start in range(0, len(rows), 256):
        part = rows[start : start + 256]
        inputs = tokenizer.apply_chat_template(
            [row["prompt"] for row in part],
            add_generation_prompt=True,
            tokenize=True,
            padding=True,
            return_tensors="pt",
            return_dict=True,
        )
        inputs = {k: inputs[k] for k in ("input_ids", "attention_mask")}
        ids = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
        texts = tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        right += sum(boxed_accuracy(part, texts, answer=[row["answer"] for row in part]))
    return right / len(rows)


def read_lines(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def main(side: str, description: str) -> None:
    run = Run(**json.loads(description))
    torch.manual_seed(run.seed)  # the buffer's sampler draws from torch's global generator
    model = AutoModelForCausalLM.from_pretrained(run.model, dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(run.model)  # AutoTokenizer would load a Qwen2Tokenizer
    meter = Meter(REWARDS[run.reward])
    loaded = peak_memory_mb()
    SIDES[side](run, model, tokenizer, meter)
    result = {"loaded_mb": loaded, "peak_mb": peak_memory_mb(), "rewards": meter.rewards}
    result["cpu_s"] = meter.cpu[-1] - meter.cpu[0]
    steady = meter.cpu[run.warm_steps :]
    result["cpu_s_per_step"] = (steady[-1] - steady[0]) / (len(steady) - 1)
    result["tokens_per_step"] = sum(meter.tokens[run.warm_steps :]) / len(meter.tokens[run.warm_steps :])
    if run.held_out is not None:
        fresh = AutoModelForCausalLM.from_pretrained(run.model, dtype=torch.float32).eval()
        fresh.load_state_dict(model.state_dict())
        result["held_out"] = greedy_accuracy(fresh, tokenizer, read_lines(run.held_out), run.max_new_tokens)
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
