"""Ranks of one machine: ``torchrl-rloo run --ranks N`` starts them by torch's elastic launcher, like ``torchrun``."""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from torchrl_rloo.runtime import processes
from torchrl_rloo.runtime.ranks import EXIT_CODE, QUIET

_GRACE_S = 5.0  # between the failure of a rank and the end of the others


def launch(command: Sequence[str], size: int) -> int:
    """Run arguments of Python as ranks of this machine; return the exit code of the first one that failed, or 0.

    Five seconds after a rank has failed, the others get SIGTERM, and SIGKILL after 30 more. This process holds the
    store of the ranks, so that they can name a rank 0 that died. They die with this process.
    """
    from torch import distributed
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, api, start_processes

    logger = logging.getLogger(api.__name__)
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
    common |= {"TORCHELASTIC_USE_AGENT_STORE": True}
    # The file of helper processes is run by path, so that the process is bound to this one before anything is imported
    bound = ("-S", processes.__file__, "exec", str(os.getpid()), sys.executable, *command)
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
            _wait_for_one(ranks)
            failures = ranks.wait(period=0.05).failures
        finally:  # also after SIGHUP, which raises
            ranks.close()
            logger.disabled = False
            for number, handler in handlers.items():
                signal.signal(number, handler)
    # A rank that ended because of another one has a code that tells so, or got the launcher's SIGTERM
    codes = [(rank, failure.exitcode) for rank, failure in failures.items()]
    codes.sort(key=lambda pair: pair[1] in (EXIT_CODE, -signal.SIGTERM))
    if not codes:
        return 0
    rank, code = codes[0]
    if code < 0:
        print(f"error: rank {rank} was killed by {signal.Signals(-code).name}", file=sys.stderr, flush=True)
    return 128 - code if code < 0 else code


def _wait_for_one(ranks: Any) -> None:
    """Wait until a rank fails or all have ended; then give the others time to say why they end.

    The elastic launcher would stop them at once: rank 0, which alone reports a wrong command, before it has said so.
    """
    processes = [handler.proc for handler in ranks.subprocess_handlers.values()]
    deadline = math.inf
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        if deadline == math.inf and any(process.poll() for process in processes):
            deadline = time.monotonic() + _GRACE_S
        time.sleep(0.05)
