"""Ranks of one machine: ``torchrl-rloo run --ranks N`` starts them by torch's elastic launcher, like ``torchrun``."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress

from torchrl_rloo.runtime import reaper
from torchrl_rloo.runtime.ranks_launch import EXIT_CODE, QUIET


def launch(command: Sequence[str], size: int) -> int:
    """Run arguments of Python as ranks of this machine; return the exit code of the first one that failed, or 0.

    Once a rank has failed, the others get SIGTERM, and SIGKILL 30 seconds later. This process holds the store of the
    ranks, so that they can name a rank 0 that died. They die with this process.
    """
    from torch import distributed
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, api, start_processes

    logger = logging.getLogger(api.__name__)
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
    common |= {"TORCHELASTIC_USE_AGENT_STORE": True}
    # The reaper's file is run by path, so that the process is bound to this one before anything is imported
    bound = ("-S", reaper.__file__, "exec", str(os.getpid()), sys.executable, *command)
    environments = {}
    for rank in range(size):
        variables = {"RANK": rank, "LOCAL_RANK": rank, **common, **(QUIET if rank else {})}
        environments[rank] = {name: str(value) for name, value in variables.items()}
    with tempfile.TemporaryDirectory() as folder:
        arguments = dict.fromkeys(range(size), bound)
        ranks = start_processes("rank", sys.executable, arguments, environments, DefaultLogsSpecs(log_dir=folder))
        received = []

        def pass_on(number: int, frame: object) -> None:
            """Pass a stop signal on: the first one ends the run after the step, the second aborts, the third kills.

            The launcher's own handler would kill ranks whose step takes longer than 30 seconds.
            """
            received.append(number)
            for pid in ranks.pids().values():
                with suppress(ProcessLookupError):
                    if len(received) > 2:
                        os.killpg(pid, signal.SIGKILL)
                    else:
                        os.kill(pid, number)

        handlers = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
        logger.disabled = True  # it reports a failure in many lines, after the one of the rank
        try:
            failures = ranks.wait(period=0.05).failures
        finally:  # also after SIGHUP, which raises
            ranks.close()
            logger.disabled = False
            for number, handler in handlers.items():
                signal.signal(number, handler)
    # A rank that ended because of another one has a code that tells so
    codes = sorted(((rank, found.exitcode) for rank, found in failures.items()), key=lambda pair: pair[1] == EXIT_CODE)
    if not codes:
        return 0
    rank, code = codes[0]
    if code < 0:
        print(f"error: rank {rank} was killed by {signal.Signals(-code).name}", file=sys.stderr, flush=True)
    return 128 - code if code < 0 else code
