"""LoopThread: whoever waits for work learns of its end."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from torchrl_rloo.modules.engines.base import EngineError
from torchrl_rloo.modules.engines.vllm_loop import LoopThread


def test_closing_ends_work_that_takes_its_time_to_end() -> None:
    thread, begun = LoopThread("test"), threading.Semaphore(0)

    async def work() -> None:
        begun.release()
        try:
            await asyncio.sleep(600)
        finally:
            time.sleep(0.2)  # as on a busy machine
            await asyncio.sleep(0)

    futures = [thread.start(work()) for _ in range(2)]
    assert all(begun.acquire(timeout=60) for _ in futures)
    thread.close(EngineError("closed"))
    for future in [*futures, thread.start(work())]:
        with pytest.raises(EngineError, match="closed"):
            future.result(5)
    assert "test" not in [t.name for t in threading.enumerate()]
