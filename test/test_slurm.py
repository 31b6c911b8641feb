"""Slurm script of the recipe: its shell syntax, and the command that it would run."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from torch.distributed.run import get_args_parser

from support.recipes import settings
from torchrl_rloo.cli.main import recipe_file

SCRIPT = Path(__file__).resolve().parents[1] / "sota_implementations/rloo/slurm/rloo.sbatch"
NODE = {"SLURM_NNODES": "2", "SLURM_GPUS_PER_NODE": "8", "SLURM_CPUS_PER_TASK": "64", "SLURM_JOB_ID": "123456"}
STUBS = """
scontrol() {{ printf 'node1\\nnode2\\n'; }}
python() {{ echo {recipe}; }}
srun() {{ printf '%s\\0' "$@"; }}
"""


def test_the_script_runs_the_recipe_by_torchrun(tmp_path):
    recipe = recipe_file("rloo")
    text = STUBS.format(recipe=recipe) + SCRIPT.read_text()
    given = ["model.name=my/model", "inference.engine.url=http://node9:8000"]
    environment = os.environ | NODE | {"SLURM_JOB_NODELIST": "node[1-2]"}
    command = ["bash", "-c", text, "rloo.sbatch", *given]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    srun, torchrun, *arguments = done.stdout.split("\0")[:-1]
    assert (srun, torchrun) == ("--kill-on-bad-exit=1", "torchrun")
    parsed = get_args_parser().parse_args(arguments)
    assert (parsed.nnodes, parsed.nproc_per_node, parsed.max_restarts) == ("2", "8", 0)
    assert parsed.rdzv_backend == "c10d" and parsed.rdzv_endpoint == f"node1:{20000 + 123456 % 20000}"
    assert parsed.training_script == str(recipe)
    cfg = settings("rloo", *parsed.training_script_args)
    assert (cfg.train.parallel, cfg.train.shard_size, cfg.model.device) == ("fsdp", 8, "cuda")
    assert cfg.model.name == "my/model" and cfg.inference.engine["url"] == "http://node9:8000"


def test_the_script_is_valid_shell_with_one_task_per_node():
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)
    assert "#SBATCH --ntasks-per-node=1\n" in SCRIPT.read_text()
