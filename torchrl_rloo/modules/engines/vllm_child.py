"""What runs in the worker processes of an engine with processes of its own: the weight receiver, and their end.

vLLM imports this file by the name of its worker extension, :class:`ChildReceiver`.
"""

from __future__ import annotations

import os
import select
import threading

from torchrl_rloo.modules.engines.vllm_api import TRAINER_PID
from torchrl_rloo.modules.engines.weight_worker import WeightReceiver


class ChildReceiver(WeightReceiver):
    """:class:`~torchrl_rloo.modules.engines.weight_worker.WeightReceiver` in a process that ends with the trainer's."""


def _end_with(pid: int) -> None:
    """Ends this process once process ``pid`` is gone: vLLM's would wait for ever, with all the memory of the device."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(1)
    except (AttributeError, OSError):  # not on Linux, or an old one
        return
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    poll.poll()
    os._exit(1)


if TRAINER_PID in os.environ:
    threading.Thread(
        target=_end_with, args=(int(os.environ[TRAINER_PID]),), name="end with trainer", daemon=True
    ).start()
