"""Exits of the interpreter during work: soon, with the script's exit code, without an abort.

One interpreter imports everything and forks a child for each case, so that each child ends as a script does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import atexit, os, signal, sys, threading, time
atexit.register(lambda: print([thread.name for thread in threading.enumerate()], file=sys.stderr))  # the last at exit
import json
import torch
from torch import nn
from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import load_prompts
from torchrl_rloo.embedded import addition_prompts, build_model, build_tokenizer
from torchrl_rloo.engines import ScriptedEngine, ScriptedTurn
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.envs.transforms import FeedbackTransform
from torchrl_rloo.modules import TransformersWrapper, vLLMWrapper
from torchrl_rloo.weight_update import WeightPublisher, WeightSyncError


def collector():
    tokenizer, prompts = build_tokenizer(), load_prompts(addition_prompts("train", size=64))
    transforms = [FeedbackTransform(lambda c, row: [{"role": "user", "content": "again"}], max_turns=3)]
    env = DatasetChatEnv(prompts, tokenizer, prompts_per_batch=1, num_generations=4, transforms=transforms)
    kwargs = {"max_new_tokens": 2, "ignore_eos": True, "stop_token_ids": list(range(320))}
    policy = TransformersWrapper(build_model(tokenizer, seed=0), tokenizer=tokenizer, generate_kwargs=kwargs)
    collector = LLMCollector(env, policy, ahead=24)
    print(len(collector.collect()), len(collector.ledger.groups))
    return collector  # alive at the exit


def engine():
    class Hung(ScriptedEngine):
        def update_weights(self, step, info=None, *, timeout):
            threading.Event().wait()

    try:
        WeightPublisher(nn.Linear(2, 2), Hung([]), timeout=0.2).push_weights()
    except WeightSyncError:
        print("failed in time")


def conversations(respond):  # begun, with a function that answers their turns in threads
    tokenizer, prompts = build_tokenizer(), load_prompts(addition_prompts("train", size=64))
    transforms = [FeedbackTransform(respond)]
    env = DatasetChatEnv(prompts, tokenizer, prompts_per_batch=4, num_generations=4, transforms=transforms)
    policy = vLLMWrapper(ScriptedEngine(lambda r, i: ScriptedTurn([30, tokenizer.eos_token_id])), tokenizer=tokenizer)
    collector = LLMCollector(env, policy)
    collector._call_on_loop(collector.scheduler.admit)
    return collector


def compute(seconds=None):  # answers after torch operations of a few milliseconds each
    def respond(conversation, row):
        x, until = torch.randn(300, 300), time.monotonic() + (seconds or 1000.0)
        while time.monotonic() < until:
            try:
                x = (x @ x).clamp(-1, 1)
            except BaseException:
                if seconds is None:
                    raise  # otherwise a user's function that catches everything
        return [{"role": "user", "content": "again"}]
    return respond


def raises():
    global alive
    alive = conversations(compute())
    time.sleep(0.2)
    raise ValueError("the script fails")


def exits():
    global alive
    alive = conversations(compute())
    time.sleep(0.2)
    sys.exit(3)


def catches():
    alive = conversations(compute(1.5))
    time.sleep(0.2)
    return alive


def interrupted():
    global alive
    alive = conversations(compute())
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    alive.collect()


def interrupted_idle():
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    while True:
        time.sleep(0.1)


def sleeps():
    alive = conversations(lambda conversation, row: time.sleep(1000.0))
    time.sleep(0.2)
    return alive


for case in (collector, engine, raises, exits, catches, interrupted, interrupted_idle, sleeps):
    sys.stdout.flush()
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.dup2(write, 1), os.dup2(write, 2), os.close(write), os.close(read)
        alive = case()
        break
    os.close(write)
    output = open(read).read()
    print(json.dumps([case.__name__, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), output]))
"""


@pytest.fixture(scope="module")
def exits() -> dict[str, tuple[int, str]]:
    """Exit codes and output of each child."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    return {name: (code, output) for name, code, output in lines}


@pytest.mark.parametrize(("case", "printed"), [("collector", "4 25"), ("engine", "failed in time")])
def test_a_script_ends_in_the_middle_of(case: str, printed: str, exits: dict[str, tuple[int, str]]) -> None:
    code, output = exits[case]
    assert code == 0 and printed in output.splitlines(), output


@pytest.mark.parametrize(("case", "code"), [("raises", 1), ("exits", 3), ("catches", 0), ("interrupted", None)])
def test_threads_inside_torch_end_before_the_exit(case: str, code: int | None, exits: dict) -> None:
    """Python would kill them inside C++, which aborts the process."""
    got, output = exits[case]
    assert got == (exits["interrupted_idle"][0] if code is None else code), output
    assert "torchrl_rloo call" not in output.splitlines()[-1] and "ProcessExit" not in output, output


def test_a_function_that_sleeps_does_not_hold_up_the_exit(exits: dict) -> None:
    assert exits["sleeps"][0] == 0
    assert "torchrl_rloo call" in exits["sleeps"][1], "its thread is left, since killing it is harmless"


def test_an_exit_leaves_no_thread_of_a_collector(exits: dict[str, tuple[int, str]]) -> None:
    """A collector stops its threads: a thread killed inside torch at exit aborts the process."""
    assert exits["collector"][1].splitlines()[-1] == "['MainThread']"
