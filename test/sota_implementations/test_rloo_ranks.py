"""Recipe on two ranks: killed at random instants it resumes to the same weights, and it stops on a signal."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import socket
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from safetensors.torch import load_file

from support.fork_server import ForkedProcess
from support.waiting import wait_until
from torchrl_rloo.cli.main import recipe_file
from torchrl_rloo.run.checkpoint import saved_steps
from torchrl_rloo.runtime.ranks import EXIT_CODE

KILLS = int(os.environ.get("RANK_KILLS", "1"))  # raise it for a longer test
STEPS = 8
LOGS, WEIGHTS = ("metrics.jsonl", "completions.jsonl"), "model/model.safetensors"
END_S = 120.0  # for the other rank to end, on a busy machine


@pytest.fixture(scope="module")
def overrides(warm_model) -> list[str]:
    return [
        f"model.name={warm_model()}",
        "train.rank_timeout=60",
        f"plan.steps={STEPS}",
        "plan.prompts_per_step=4",
        "plan.num_generations=4",
        "plan.minibatches=2",
        "plan.micro_batch_size=3",
        "generate.max_new_tokens=12",
        "data.limit=64",
        "data.eval_size=8",
        "eval.every=0",
        "reward.functions=[own_rewards.distinct]",
        "checkpoint.every=1",
        "log.loggers=[]",
    ]


@pytest.fixture
def start(fork_server, own, overrides) -> Iterator:
    """``start(output)``: start the recipe on two ranks; they are killed after the test."""
    started: list[ForkedProcess] = []

    def start(output: Path, *more: str, parallel: str = "ddp") -> list[ForkedProcess]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
        common |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        ranks = [
            fork_server.start(
                recipe_file("rloo"),
                [*overrides, *more, f"train.parallel={parallel}", f"output_dir={output}"],
                cwd=own,
                environment=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(2)
        ]
        started.extend(ranks)
        return ranks

    yield start
    for process in started:
        process.kill()


def finish(ranks: list[ForkedProcess]) -> None:
    codes = [rank.wait(300) for rank in ranks]
    assert codes == [0, 0], [rank.stderr[-3000:] for rank in ranks]
    assert not ranks[1].stdout


def differences(output: Path, expected: Path) -> list[str]:
    """Return the first line that differs of each log, and the weights that differ."""
    found = []
    for name in LOGS:
        lines = [
            [json.loads(line) for line in (folder / name).read_text().splitlines()] for folder in (output, expected)
        ]
        for number, (ours, theirs) in enumerate(itertools.zip_longest(*lines, fillvalue={}), 1):
            if changed := [key for key in ours | theirs if ours.get(key) != theirs.get(key)]:
                values = {key: (ours.get(key), theirs.get(key)) for key in changed}
                found.append(f"line {number} of {name}: {values}")
                break
    ours, theirs = (load_file(folder / WEIGHTS) for folder in (output, expected))
    assert ours.keys() == theirs.keys()
    errors = {name: float((ours[name] - theirs[name]).abs().max()) for name in ours}
    found += [f"{name} by {error:.1e}" for name, error in errors.items() if error != 0]
    if not found:  # the rest of a file, such as its header, and the sign of 0
        found = [n for n in (*LOGS, WEIGHTS) if (output / n).read_bytes() != (expected / n).read_bytes()]
    return found


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_killed_ranks_end_the_other_one_and_the_run_resumes(start, tmp_path, parallel):
    start, output = partial(start, parallel=parallel), tmp_path / "killed"
    rng, kills = random.Random(parallel), []
    finish(start(tmp_path / "finished"))
    for victims in itertools.islice(itertools.cycle([(1,), (0,), (0, 1)]), KILLS):
        # Kill at a random instant after the first checkpoint of this start, from which the next one resumes
        ranks, before = start(output), saved_steps(output / "checkpoints")
        wait_until(
            lambda rank=ranks[0], before=before: (
                rank.poll() is not None or saved_steps(output / "checkpoints")[-1:] > before[-1:]
            )
        )
        time.sleep(rng.uniform(0.0, 0.5))
        if any(rank.poll() is not None for rank in ranks):
            break
        for victim in victims:
            ranks[victim].send_signal(signal.SIGKILL)
        killed = time.monotonic()
        assert [ranks[victim].wait(END_S) for victim in victims] == [-signal.SIGKILL] * len(victims)
        for other in (rank for number, rank in enumerate(ranks) if number not in victims):
            assert other.wait(END_S) != 0, other.stderr
            errors = [line for line in other.stderr.splitlines() if line.startswith("error: ")]
            assert len(errors) == 1 and "Traceback" not in other.stderr, other.stderr
        kills.append((victims, saved_steps(output / "checkpoints"), round(time.monotonic() - killed, 1)))
    print("kills: ranks, checkpoints, seconds until the end", *kills, sep="\n")
    assert kills and all(saved for _, saved, _ in kills)
    ranks = start(output)
    finish(ranks)
    assert "resumed after step" in ranks[0].stdout
    assert not differences(output, tmp_path / "finished")


def test_a_stop_signal_to_rank_0_stops_both_after_the_step(start, tmp_path):
    ranks = start(tmp_path, "plan.steps=1000")
    wait_until(lambda: (tmp_path / "metrics.jsonl").exists() and len((tmp_path / "metrics.jsonl").read_text()) > 10)
    ranks[0].send_signal(signal.SIGTERM)
    finish(ranks)
    assert "stopped after step" in ranks[0].stdout and list((tmp_path / "checkpoints").glob("step_*"))


def test_an_error_of_the_recipe_is_reported_once(start, tmp_path):
    """One rank reports a fault that all ranks find, and the other one names it."""
    ranks = start(tmp_path, "plan.micro_batch_size=1000000", "generate.max_new_tokens=100000")
    codes = sorted(rank.wait(END_S) for rank in ranks)
    texts = [[line for line in rank.stderr.splitlines() if line.startswith("error: ")] for rank in ranks]
    assert [len(lines) for lines in texts] == [1, 1] and "Traceback" not in ranks[0].stderr + ranks[1].stderr
    assert codes in ([1, EXIT_CODE], [1, 1])  # the latter if rank 0, which holds their store, has ended before
    first = [rank.returncode for rank in ranks].index(1)
    assert "traceback in" in texts[first][0]
    if codes[1] == EXIT_CODE:
        assert f"error: rank {first} failed after start model" in texts[1 - first][0]
