"""Scripts that run on several ranks, each in a process of the fork server.

A script is started as ``SCRIPT RANK SIZE FOLDER [ARGUMENTS]``. Its last line is :func:`become_rank`, with a function
that runs checks (:func:`run_checks`) or returns a result. The test then asks :class:`EndedRanks`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import distributed

from support.fork_server import ForkServer
from torchrl_rloo.runtime.ranks import Ranks

WAIT_S = 300.0  # for all ranks of a script, on a busy machine


class EndedRanks(NamedTuple):
    """Ranks of a script that have ended.

    Attributes:
        folder: folder of the ranks.
        codes: exit code of each rank; None if it did not end in time.
        output: what all ranks printed.
    """

    folder: Path
    codes: list[int | None]
    output: str

    def results(self) -> list[Any]:
        """Return the result of each rank; fail with the output if there are not all."""
        paths = [_result(self.folder, rank) for rank in range(len(self.codes))]
        assert all(path.exists() for path in paths), f"exit codes {self.codes}:\n{self.output}"
        return [torch.load(path, weights_only=False) for path in paths]

    def assert_passed(self, check: Callable) -> None:
        """Fail with the output unless all ranks passed a check."""
        failed = [rank for rank in range(len(self.codes)) if not _mark(self.folder, check, rank).exists()]
        assert not failed, f"ranks {failed} did not pass {check.__name__}:\n{self.output}"


def run_ranks(server: ForkServer, script: str, folder: Path, size: int, *arguments: Any) -> EndedRanks:
    """Run a script on all ranks to their end; kill those that do not end in time.

    Args:
        server: server that starts the processes.
        script: file of the script.
        folder: folder of the ranks, which may not have another run's results.
        size: number of ranks.
        *arguments: further arguments of the script.
    """
    ranks = [server.start(Path(script), [rank, size, folder, *arguments]) for rank in range(size)]
    try:
        for rank in ranks:
            rank.wait(WAIT_S)
    except subprocess.TimeoutExpired:  # the test fails with the output
        pass
    finally:
        for rank in ranks:
            rank.kill()
    return EndedRanks(folder, [rank.returncode for rank in ranks], "\n".join(r.stdout + r.stderr for r in ranks))


def become_rank(function: Callable[[Ranks, Path], Any]) -> NoReturn:
    """Join the other ranks of this script, call a function, save its result, and end the process.

    Args:
        function: function of the ranks and their folder. Its result is for :meth:`EndedRanks.results`.
    """
    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    settings = {"rank": rank, "world_size": size, "timeout": timedelta(seconds=WAIT_S)}
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", **settings)
    world = distributed.group.WORLD
    torch.save(function(Ranks(rank, size, group=world, control=world), folder), _result(folder, rank))
    sys.stdout.flush()
    os._exit(0)  # at a normal exit a gloo thread of a sharded model may abort the process


def run_checks(checks: Iterable[Callable], folder: Path, *arguments: Any) -> None:
    """Call functions with the same arguments on all ranks, and mark each one that this rank passed."""
    for check in checks:
        distributed.barrier()
        check(*arguments)
        mark_passed(check, folder)


def mark_passed(check: Callable, folder: Path) -> None:
    """Mark a check that this rank passed; only one that ends the process calls it."""
    _mark(folder, check, distributed.get_rank()).touch()


def _result(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.pt"


def _mark(folder: Path, check: Callable, rank: int) -> Path:
    return folder / f"{check.__name__}-{rank}"
