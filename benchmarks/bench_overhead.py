"""Overhead of the framework: CPU milliseconds per row outside of model, tokenizer and reward.

    python benchmarks/bench_overhead.py

One iteration collects a batch, writes it to a replay buffer with MCAdvantage, samples it and evaluates the loss. The
backward pass is the model's. Model, tokenizer and reward calls are timed separately and excluded. TorchRL's parts of
the same names run in the same process on the same prompts.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from statistics import mean
from threading import Lock, local
from typing import Any
from unittest.mock import patch

import torch
from common import ONE_THREAD, print_result, print_table
from tensordict import TensorDict, TensorDictBase, set_list_to_stack
from torchrl.collectors.llm import LLMCollector as TorchRLCollector
from torchrl.data import (
    Composite,
    LazyStackStorage,
    ReplayBuffer,
    SamplerWithoutReplacement,
    Unbounded,
)
from torchrl.envs import Transform, TransformedEnv
from torchrl.envs.llm import DatasetChatEnv as TorchRLEnv
from torchrl.modules.llm import TransformersWrapper as TorchRLWrapper
from torchrl.objectives.llm import GRPOLoss
from torchrl.objectives.llm import MCAdvantage as TorchRLAdvantage

from torchrl_rloo.collectors import LLMCollector, conversation
from torchrl_rloo.data import load_prompts, tensor_rows
from torchrl_rloo.embedded import addition_prompts, build_model, build_tokenizer
from torchrl_rloo.envs import ChatEnv, DatasetChatEnv
from torchrl_rloo.envs.stepping import RowStepper
from torchrl_rloo.modules import TransformersWrapper, policies
from torchrl_rloo.objectives import RLOOLoss
from torchrl_rloo.replay import MCAdvantage, RowStorage

YOUNG_OBJECTS = 50_000  # threshold of garbage collection in a Run
NUM_GENERATIONS = 8
MAX_NEW_TOKENS = 16
LEFT_OUT = ("model", "tokenizer", "reward")
PARTS = ("env reset", "env step", "collector", "buffer extend", "buffer sample", "loss", "garbage collection")
WRAPPER = ("policy rows", "score rows")  # work of the policy wrapper on rows, without the model
UNKNOWN = ("score rows", "sum with the wrapper")  # not measured for TorchRL


class Clock:
    """Timer of the CPU time of nested sections on each thread, without the sections inside them."""

    def __init__(self):
        self.seconds: Counter[str] = Counter()
        self._thread, self._lock = local(), Lock()

    @property
    def _open(self) -> list[str]:
        return self._thread.__dict__.setdefault("open", [])

    def _switch(self) -> None:
        now = time.thread_time()
        if self._open:
            with self._lock:
                self.seconds[self._open[-1]] += now - self._thread.since
        self._thread.since = now

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        self._switch()
        self._open.append(name)
        try:
            yield
        finally:
            self._switch()
            self._open.pop()

    @contextmanager
    def garbage_collection(self) -> Iterator[None]:
        """Count the time of Python's garbage collector separately from the section that it interrupts."""

        def charge(phase: str, info: dict[str, int]) -> None:
            self._switch()
            if phase == "start":
                self._open.append("garbage collection")
            else:
                self._open.pop()

        gc.callbacks.append(charge)
        try:
            yield
        finally:
            gc.callbacks.remove(charge)

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args, **kwargs):
            with self.section(name):
                return function(*args, **kwargs)

        return call

    def patches(self, *targets: tuple[Any, str, str]) -> ExitStack:
        """Time each target ``(owner, attribute, section)`` until the returned stack is closed."""
        stack = ExitStack()
        for owner, attribute, name in targets:
            stack.enter_context(patch.object(owner, attribute, self.timed(name, getattr(owner, attribute))))
        return stack


def reward(prompts, completions, completion_ids, **columns: Any) -> list[float]:
    """Return cheap rewards that differ within a group."""
    return [sum(ids) % 101 / 101 for ids in completion_ids]


def shared_targets(tokenizer) -> list[tuple[Any, str, str]]:
    """Return the targets of both sides: the environment's entry points and the tokenizer."""
    methods = ("__call__", "apply_chat_template", "encode", "decode", "batch_decode")
    return [
        (TransformedEnv, "reset", "env reset"),
        (TransformedEnv, "step", "env step"),
        (TransformedEnv, "step_and_maybe_reset", "env step"),
        *((type(tokenizer), method, "tokenizer") for method in methods),
    ]


def ours(rows: int, prompts: list[dict[str, Any]], iterations: int) -> list[Counter[str]]:
    """Return the seconds by section of each iteration of the toolkit."""
    clock, tokenizer = Clock(), build_tokenizer()
    model = build_model(tokenizer, seed=0).eval()
    env = DatasetChatEnv(
        load_prompts(prompts),
        tokenizer,
        prompts_per_batch=rows // NUM_GENERATIONS,
        num_generations=NUM_GENERATIONS,
        rewards=clock.timed("reward", reward),
        shuffle=False,
    )
    policy = TransformersWrapper(
        model, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": MAX_NEW_TOKENS, "seed": 0}
    )
    buffer = make_buffer(rows, RowStorage(), MCAdvantage())
    loss = RLOOLoss(policy.get_new_version(generate=False))
    collector = LLMCollector(env, policy)
    targets = [
        (conversation, "open_rows", "env reset"),  # the collector steps the environment row by row
        (ChatEnv, "step_row", "env step"),
        (RowStepper, "finish", "env step"),
        (TransformersWrapper, "forward", "policy rows"),
        (TransformersWrapper, "score", "score rows"),
        (policies, "generate", "model"),
        (TransformersWrapper, "_hidden_states", "model"),
        (policies, "score_positions", "model"),
    ]
    with clock.patches(*shared_targets(tokenizer), *targets):
        return run(clock, iter(collector), tensor_rows, buffer, loss, iterations)


def torchrl(rows: int, prompts: list[dict[str, Any]], iterations: int) -> list[Counter[str]]:
    """Return the seconds by section of each iteration of TorchRL.

    The parts are combined as in its GRPO scripts, with conversations as History.
    """
    clock, tokenizer = Clock(), build_tokenizer()
    model = build_model(tokenizer, seed=0).eval()
    loader = torch.utils.data.DataLoader(
        [{"query": p["query"][1]["content"], "answer": p["answer"]} for p in prompts],
        batch_size=1,
        collate_fn=lambda batch: torch.stack([TensorDict.from_dict(row) for row in batch]),
    )
    env = _SystemPrompt.from_dataloader(
        loader, repeats=NUM_GENERATIONS, batch_size=(rows,), tokenizer=tokenizer, input_mode="history"
    ).append_transform(_Reward(clock.timed("reward", reward)))
    policy = _Policy(
        model,
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
        generate_kwargs={"max_new_tokens": MAX_NEW_TOKENS, "do_sample": True},
    )
    policy.clock = clock
    buffer = make_buffer(rows, LazyStackStorage(rows), TorchRLAdvantage(NUM_GENERATIONS))
    loss = GRPOLoss(_Actor(clock), masking_strategy="rlhf", entropy_bonus=False)
    collector = TorchRLCollector(env, policy=policy, dialog_turns_per_batch=rows, flatten_data=True)
    targets = [
        (TorchRLWrapper, "forward", "policy rows"),
        (model, "generate", "model"),
        (policy, "_log_probs_generate", "model"),
    ]
    with set_list_to_stack(True), clock.patches(*shared_targets(tokenizer), *targets):  # the environment requires it
        return run(clock, iter(collector), lambda rows: rows, buffer, loss, iterations)


class _SystemPrompt(TorchRLEnv):
    SYSTEM_PROMPT = addition_prompts("train", size=1)[0]["query"][0]["content"]


class _Reward(Transform):
    """Transform that calls a reward function on the ids of a single turn, without text."""

    def __init__(self, function: Callable[..., list[float]]):
        super().__init__()
        self.function = function

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        ids = [t.tolist() for t in tensordict.get(("tokens", "response"), as_list=True)]
        scores = torch.tensor(self.function(None, None, ids))
        next_tensordict.set("reward", scores.reshape(-1, 1, 1))
        for key, value in (("done", True), ("terminated", True), ("truncated", False)):
            next_tensordict.set(key, torch.full((len(ids), 1), value))
        return next_tensordict

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        shape = self.parent.batch_size
        return Composite(reward=Unbounded(shape=(*shape, 1, 1)), shape=shape)


class _Policy(TorchRLWrapper):
    """TorchRL 0.14.1's wrapper that also writes two entries that TorchRL's loss reads. Writing them is not timed."""

    def forward(self, tensordict: TensorDictBase, **kwargs: Any) -> TensorDictBase:
        rows = super().forward(tensordict, **kwargs)
        with self.clock.section("model"):
            for row in rows.unbind(0):
                prompt, response = row["tokens", "prompt"], row["log_probs", "response"]
                full = torch.cat([torch.zeros(len(row["tokens", "full"]) - len(response)), response])
                row.set(("log_probs", "full"), full)
                row.set(("masks", "all_assistant_mask"), torch.arange(len(full)) >= len(prompt))
        return rows


class _Actor(torch.nn.Module):
    """Substitute for the training model, which gives GRPOLoss its distribution at no cost."""

    in_keys = [("tokens", "full")]

    def __init__(self, clock: Clock):
        super().__init__()
        self.clock, self.shift = clock, torch.nn.Parameter(torch.zeros(()))

    def get_dist(self, tensordict: TensorDictBase, **kwargs: Any) -> _Distribution:
        with self.clock.section("model"):
            padding = {"as_padded_tensor": True, "padding_side": "left"}
            old = tensordict.get(("log_probs", "full"), padding_value=0.0, **padding)
            mask = tensordict.get(("masks", "all_assistant_mask"), padding_value=False, **padding)
            return _Distribution(old + self.shift, mask)


class _Distribution:
    def __init__(self, log_probs: torch.Tensor, mask: torch.Tensor):
        self.log_probs, self.mask = log_probs, mask

    def log_prob(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.log_probs


def make_buffer(rows: int, storage: LazyStackStorage, transform: Transform) -> ReplayBuffer:
    return ReplayBuffer(storage=storage, sampler=SamplerWithoutReplacement(), transform=transform, batch_size=rows)


def run(
    clock: Clock,
    batches: Iterator[TensorDictBase],
    stored: Callable[[TensorDictBase], TensorDictBase],
    buffer: ReplayBuffer,
    loss: torch.nn.Module,
    iterations: int,
) -> list[Counter[str]]:
    """Run the loop of either side with garbage collected as in a ``Run``. The first iteration warms up."""
    results, thresholds = [], gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)
    for _ in range(iterations + 1):
        clock.seconds = Counter()
        began = time.process_time()
        with clock.garbage_collection():
            iterate(clock, batches, stored, buffer, loss)
            gc.collect(1)
        # The collector's share is what no other section took, on any thread
        clock.seconds["collector"] = time.process_time() - began - clock.seconds.total()
        results.append(clock.seconds)
    gc.unfreeze()
    gc.set_threshold(*thresholds)
    return results[1:]


def iterate(clock: Clock, batches, stored, buffer: ReplayBuffer, loss: torch.nn.Module) -> None:
    """Collect, store and sample one batch, and evaluate its loss."""
    rows = next(batches)
    with clock.section("buffer extend"):
        buffer.extend(stored(rows))
    with clock.section("buffer sample"):
        batch = buffer.sample()
    with clock.section("loss"):
        value = loss(batch).loss_objective
    if not (value.isfinite() and value.requires_grad and len(batch) == len(rows)):
        raise RuntimeError(
            f"loss={value} of {len(batch)} rows must be finite, have a gradient and be of all {len(rows)} rows"
        )
    buffer.empty()


def per_row(results: list[Counter[str]], rows: int) -> dict[str, float]:
    """Return the mean milliseconds per row of each section, and their sums.

    Medians would leave out full garbage collections, which few iterations have.
    """
    values = {name: 1e3 * mean(r[name] for r in results) / rows for name in (*PARTS, *WRAPPER, *LEFT_OUT)}
    if idle := [name for name in PARTS if not values[name] and name != "garbage collection"]:
        raise RuntimeError(f"sections {idle} have no time: their functions are not called, so others include it")
    values["sum of these"] = sum(values[name] for name in PARTS)
    values["sum with the wrapper"] = sum(values[name] for name in (*PARTS, *WRAPPER))
    return values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 128, 512])
    parser.add_argument("--iterations", type=int, default=8, help="measured iterations per side")
    parser.add_argument("--sides", nargs="+", choices=("ours", "TorchRL"), default=["ours", "TorchRL"])
    args = parser.parse_args()
    os.environ.update(ONE_THREAD)  # only the tokenizer reads it now, since torch is imported
    torch.set_num_threads(1)
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for rows in args.rows:
        prompts = addition_prompts("train", size=rows // NUM_GENERATIONS * (args.iterations + 2))
        sides = {"ours": ours, "TorchRL": torchrl}
        figures[str(rows)] = {name: per_row(sides[name](rows, prompts, args.iterations), rows) for name in args.sides}
        report(rows, figures[str(rows)])
    print_result(figures)


def report(rows: int, sides: dict[str, dict[str, float]]) -> None:
    for name in UNKNOWN:  # _Actor replaces TorchRL's scoring
        sides.get("TorchRL", {}).pop(name, None)
    names = (*PARTS, "sum of these", *WRAPPER, "sum with the wrapper", *LEFT_OUT)
    title = f"{rows} rows: CPU ms per row. Sums exclude the last three parts."
    if len(sides) > 1:
        ratio = sides["TorchRL"]["sum of these"] / sides["ours"]["sum of these"]
        title += f" TorchRL / ours in the first sum: {ratio:.1f}"
    print_table(
        title,
        [{"part": name} | {side: values.get(name) for side, values in sides.items()} for name in names],
    )


if __name__ == "__main__":
    main()
