"""Worker extension for a child process, which ends when the trainer's process ends.

vLLM imports this file by the name of its worker extension, :class:`ChildWorker`.
"""

from __future__ import annotations

import os
import select
import threading

from torchrl_rloo.engines.vllm_api import TRAINER_PID
from torchrl_rloo.engines.vllm_worker import WeightWorker


class ChildWorker(WeightWorker):
    """:class:`~torchrl_rloo.engines.vllm_worker.WeightWorker` in a child process that ends with the trainer's."""


def _end_with(pid: int) -> None:
    """End this process once process ``pid`` has ended. Otherwise vLLM would wait forever and keep device memory."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(1)
    except (AttributeError, OSError):  # another system, or an old Linux
        return
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    poll.poll()
    os._exit(1)


if TRAINER_PID in os.environ:
    threading.Thread(
        target=_end_with, args=(int(os.environ[TRAINER_PID]),), name="end with trainer", daemon=True
    ).start()
