"""Exits of the interpreter during work: immediate, without an abort or threads left inside torch.

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
import atexit, os, sys, threading, time
atexit.register(lambda: print([thread.name for thread in threading.enumerate()], file=sys.stderr))  # the last at exit
import json
from torch import nn
from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import load_prompts
from torchrl_rloo.embedded import addition_prompts, build_model, build_tokenizer
from torchrl_rloo.engines import EnginePool, Request, ScriptedEngine, ScriptedTurn
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.envs.transforms import FeedbackTransform
from torchrl_rloo.modules import TransformersWrapper
from torchrl_rloo.weight_update import Collective, WeightPublisher, WeightSyncError


def collector():
    tokenizer, prompts = build_tokenizer(), load_prompts(addition_prompts("train", size=64))
    transforms = [FeedbackTransform(lambda c, row: [{"role": "user", "content": "again"}], max_turns=3)]
    env = DatasetChatEnv(prompts, tokenizer, prompts_per_batch=1, num_generations=4, transforms=transforms)
    kwargs = {"max_new_tokens": 2, "ignore_eos": True, "stop_token_ids": list(range(320))}
    policy = TransformersWrapper(build_model(tokenizer, seed=0), tokenizer=tokenizer, generate_kwargs=kwargs)
    collector = LLMCollector(env, policy, ahead=24)
    print(len(collector.collect()), len(collector.ledger.groups))
    return collector  # alive at the exit


def collective():
    transport = Collective()
    link = transport.connect(1, 300.0)  # nobody joins
    print("waiting")
    return link


def engine():
    class Hung(ScriptedEngine):
        def update_weights(self, step, info=None, *, timeout):
            threading.Event().wait()

    try:
        WeightPublisher(nn.Linear(2, 2), Hung([]), timeout=0.2).push_weights()
    except WeightSyncError:
        print("failed in time")


def pool():
    class Restarting(ScriptedEngine):
        def restart(self):
            print("restarting", flush=True)
            threading.Event().wait()

    turn = ScriptedTurn([1], latency=1e6)
    pool = EnginePool([Restarting(lambda request, index: turn) for _ in range(2)])
    future = pool.submit(Request([1], 1, 0))
    pool.members[1].target.kill()
    while not pool.counts["pool/restarts"]:
        time.sleep(0.01)
    return pool, future


for case in (collector, collective, engine, pool):
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


@pytest.mark.parametrize(
    ("case", "printed"),
    [("collector", "4 24"), ("collective", "waiting"), ("engine", "failed in time"), ("pool", "restarting")],
)
def test_a_script_ends_in_the_middle_of(case: str, printed: str, exits: dict[str, tuple[int, str]]) -> None:
    code, output = exits[case]
    assert code == 0 and printed in output.splitlines(), output


def test_an_exit_leaves_no_thread_of_a_collector(exits: dict[str, tuple[int, str]]) -> None:
    """A collector stops its threads: a thread killed inside torch at exit aborts the process."""
    assert exits["collector"][1].splitlines()[-1] == "['MainThread']"
