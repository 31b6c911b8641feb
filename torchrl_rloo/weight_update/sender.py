"""SenderThread: joins a group and sends to it, so that only this thread hangs if a member is lost."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, TimeoutError
from queue import SimpleQueue
from typing import Any

import torch

from torchrl_rloo.runtime.threads import PackageThread


class SenderThread:
    """Daemon thread that joins a group of workers, sends in order, and leaves.

    Args:
        join: function that joins the group, and may block until all workers have joined.
        send: function that sends one item to the group.
        leave: function that leaves the group, at the end or after an error.
        stop: function that makes a blocked ``join`` or ``send`` fail.
        device: current device of the thread, if it is a CUDA device.
        timeout: seconds to wait for the workers.
    """

    def __init__(
        self,
        join: Callable[[], Any],
        send: Callable[[Any, Any], None],
        leave: Callable[[Any], None],
        stop: Callable[[], None],
        *,
        device: torch.device,
        timeout: float,
    ):
        self._join, self._send, self._leave, self._stop = join, send, leave, stop
        self._timeout = timeout
        self._joined: Future[Any] = Future()
        self._failure: Exception | None = None
        self._queue: SimpleQueue[Any] = SimpleQueue()
        PackageThread(self._run, device, name="weight broadcast", stop=self.stop).start()

    def wait_joined(self) -> None:
        """Wait until all workers have joined.

        Raises:
            TimeoutError: if they have not in time.
        """
        try:
            self._joined.result(self._timeout)
        except TimeoutError as error:
            raise TimeoutError(
                f"workers have not joined the trainer's group within timeout={self._timeout:g} s; check host and port"
            ) from error

    def send(self, item: Any) -> None:
        """Send an item after the earlier ones, or raise the error of an earlier one."""
        if self._failure is not None:
            raise self._failure
        self._queue.put(item)

    def stop(self) -> None:
        """End the thread."""
        self._queue.put(None)
        self._stop()

    def _run(self, device: torch.device) -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # each thread has its own current device
            group = self._join()
        except Exception as error:
            self._joined.set_exception(error)
            return
        self._joined.set_result(None)
        # Keep an error for the next call
        try:
            while (item := self._queue.get()) is not None:
                self._send(group, item)
        except Exception as error:
            self._failure = error
        finally:
            self._leave(group)
