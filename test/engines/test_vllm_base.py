"""Tests of the loops of vLLM engines: callers learn of their end, and a restart keeps nothing of the old engine."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from types import SimpleNamespace

import pytest

from support.waiting import PATIENCE, in_thread, wait_until
from torchrl_rloo.engines import vllm_async
from torchrl_rloo.engines.base import EngineError
from torchrl_rloo.engines.vllm_async import AsyncVLLMEngine
from torchrl_rloo.engines.vllm_base import LoopThread


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


def test_closing_ends_a_restart_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    class Core:
        """Engine core whose second start lasts until it is closed."""

        starts = 0

        def __init__(self, *arguments) -> None:
            config = SimpleNamespace(max_model_len=8, get_vocab_size=lambda: 9, try_get_generation_config=dict)
            self.loop, self.llm = LoopThread("core"), SimpleNamespace(model_config=config)
            self.closed = threading.Event()

        def start(self) -> None:
            Core.starts += 1
            if Core.starts == 2:
                self.closed.wait(PATIENCE)
                raise EngineError("this engine is closed")

        def close(self, error: EngineError, grace: float = 1.0) -> None:
            self.closed.set()
            self.loop.close(error)

    monkeypatch.setattr(vllm_async, "Core", Core)
    monkeypatch.setattr(AsyncVLLMEngine, "_stamp", lambda *args, **kwargs: None)
    engine = AsyncVLLMEngine("model")
    restarting = in_thread(engine.restart)
    wait_until(lambda: Core.starts == 2)
    engine.close()
    for call in (lambda: restarting.result(PATIENCE), engine.restart):
        with pytest.raises(EngineError, match="closed"):
            call()
    assert Core.starts == 2 and not [t for t in threading.enumerate() if t.name == "core"]


def test_a_restart_keeps_nothing_of_the_core_before(monkeypatch: pytest.MonkeyPatch) -> None:
    class Core:
        """Engine core without vLLM."""

        alive: weakref.WeakSet = weakref.WeakSet()

        def __init__(self, *arguments) -> None:
            config = SimpleNamespace(max_model_len=8, get_vocab_size=lambda: 9, try_get_generation_config=dict)
            self.loop, self.llm = LoopThread("core"), SimpleNamespace(model_config=config)
            self.alive.add(self)

        def start(self) -> None:
            pass

        def close(self, error: EngineError, grace: float = 1.0) -> None:
            self.loop.close(error)

    monkeypatch.setattr(vllm_async, "Core", Core)
    monkeypatch.setattr(AsyncVLLMEngine, "_stamp", lambda *args, **kwargs: None)
    with AsyncVLLMEngine("model") as engine:
        for _ in range(2):
            engine.restart()
        gc.collect()
        assert list(Core.alive) == [engine._core]
    with pytest.raises(EngineError, match="closed"):
        engine.resume()
