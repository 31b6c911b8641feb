"""Parts that fail on purpose, for bench_chaos.py: a pool whose engines die, hang and refuse, and flaky transforms."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any

from torchrl.envs import Transform

from torchrl_rloo.data import keys
from torchrl_rloo.embedded import build_tokenizer
from torchrl_rloo.engines import EnginePool, Request, ScriptedEngine, ScriptedTurn
from torchrl_rloo.engines.base import EngineError
from torchrl_rloo.envs.tools import calculator
from torchrl_rloo.envs.tools.parsers import RegexParser
from torchrl_rloo.envs.transforms import ToolTransform

ENGINE_FAULTS = ("kill", "hang", "kill in a push", "hang in a push", "refused push")
STALL_S = 1.0  # duration of a tool's stall


class FaultLog:
    """File of faults and changes of state, one JSON object per line, shared by all processes of a run.

    Args:
        path: path of the file.
    """

    _lock = Lock()

    def __init__(self, path: str):
        self.path = Path(path)

    def write(self, kind: str, **values: Any) -> None:
        with self._lock, self.path.open("a") as file:
            file.write(json.dumps({"time": time.time(), "kind": kind} | values) + "\n")

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []

    def count(self, *kinds: str) -> int:
        return sum(record["kind"] in kinds for record in self.records())


class ChaoticPool(EnginePool):
    """Pool that kills, stops and refuses at random instants, until it has done so often enough.

    Args:
        engines: engines of AsyncVLLMEngine or ScriptedEngine.
        log: path of the fault log.
        faults: number of faults over all processes of the run; 0 injects none.
        mean_gap: mean seconds between two faults.
        seed: seed of kinds, members and times; each process of a run adds the number of faults before it.
        **kwargs: arguments of :class:`EnginePool`.
    """

    def __init__(self, engines, *, log: str, faults: int, mean_gap: float, seed: int, **kwargs: Any):
        self.log, self._ended = FaultLog(log), Event()
        super().__init__(engines, **kwargs)
        self._armed: dict[int, str] = {}
        for member in self.members:
            member.target.update_weights = self._sabotaged(member, member.target.update_weights)
        if faults:
            Thread(target=self._inject, args=(faults, mean_gap, seed), daemon=True).start()

    def close(self) -> None:
        self._ended.set()
        super().close()

    def _set_state(self, member, state, cause=None) -> None:
        if hasattr(self, "_armed"):
            self.log.write("state", member=member.number, state=state, cause=str(cause or "")[:80])
        super()._set_state(member, state, cause)

    def _inject(self, faults: int, mean_gap: float, seed: int) -> None:
        rng = random.Random(seed + 1000 * self.log.count(*ENGINE_FAULTS))
        while not self._ended.wait(rng.expovariate(1 / mean_gap)):
            done = self.log.count(*ENGINE_FAULTS)
            if done >= faults:
                return
            ready = [member for member in self.members if member.state == "ready"]
            kind = rng.choice(ENGINE_FAULTS)
            if not ready:
                continue
            member = rng.choice(ready)
            if kind in ("kill", "hang"):
                self._harm(member, kind, kind)
            else:  # strikes at the member's next weight update
                self._armed[member.number] = kind

    def _harm(self, member, how: str, kind: str) -> None:
        engine = member.target
        self.log.write(kind, member=member.number, inside=len(member.inside), version=engine.version)
        if isinstance(engine, ScriptedEngine):
            engine.kill() if how == "kill" else engine.hang()
        else:
            os.kill(engine._core._processes[0].pid, signal.SIGKILL if how == "kill" else signal.SIGSTOP)

    def _sabotaged(self, member, update_weights: Callable) -> Callable:
        rng = random.Random(member.number)

        def sabotaged(step, info=None, *, timeout):
            if step in ("start", "bucket", "finish") and (kind := self._armed.get(member.number)) is not None:
                if step == "finish" or rng.random() < 0.3:
                    del self._armed[member.number]
                    if kind == "refused push":
                        self.log.write(kind, member=member.number, step=step, version=member.version)
                        raise EngineError(f"refused {step} on purpose")
                    self._harm(member, kind.split()[0], kind)
            return update_weights(step, info, timeout=timeout)

        return sabotaged


class FlakyTools(ToolTransform):
    """Calculator of the task, whose calls stall now and then.

    Args:
        log: path of the fault log.
        faults: number of stalls over all processes of the run.
        rate: probability that a call stalls.
    """

    def __init__(self, *, log: str, faults: int, rate: float = 0.01):
        tools, parser = [calculator], RegexParser(r"<tool>(?P<expression>[^<]*)</tool>", tool="calculator")
        super().__init__(tools, parser, show_schemas=False)
        self.log, self.faults, self.rate, self.rng = FaultLog(log), faults, rate, random.Random(os.getpid())

    async def step_row(self, row, next_row) -> None:
        if self.faults and self.rng.random() < self.rate and self.log.count("tool stalls") < self.faults:
            self.log.write("tool stalls", seconds=STALL_S)
            await asyncio.sleep(STALL_S)
        await super().step_row(row, next_row)


class FlakyReset(Transform):
    """Transform whose reset raises now and then, which ends the run with an error.

    Args:
        log: path of the fault log.
        faults: number of errors over all processes of the run.
        rate: probability that a reset raises.
    """

    def __init__(self, *, log: str, faults: int, rate: float = 0.002):
        super().__init__()
        self.log, self.faults, self.rate, self.rng = FaultLog(log), faults, rate, random.Random(os.getpid())

    def _reset(self, tensordict, tensordict_reset):
        if self.faults and self.rng.random() < self.rate and self.log.count("reset fails") < self.faults:
            self.log.write("reset fails")
            raise RuntimeError("a reset failed on purpose")
        return tensordict_reset


class RecordTokens(Transform):
    """Transform that writes the action tokens of every scored row to a file; it comes after the rewards.

    Args:
        rewards: the environment's rewards, which are not used.
        path: path of the file.
    """

    scores_outcomes = True

    def __init__(self, rewards: Any, path: str):
        super().__init__()
        self.path = Path(path)

    def _step(self, tensordict, next_tensordict):
        with FaultLog._lock, self.path.open("a") as file:
            for member, (row, after) in enumerate(zip(tensordict.unbind(0), next_tensordict.unbind(0), strict=True)):
                if after["done"].any():
                    tokens = after[keys.PROMPT_TOKENS].tolist()
                    record = {"group": int(row[keys.GROUP_ID]), "member": member, "tokens": tokens}
                    file.write(json.dumps(record) + "\n")
        return next_tensordict


class CalculatorScript(ScriptedEngine):
    """Scripted engine that plays a mediocre solver of the calculator task; turns depend on the request only.

    Args:
        latency: mean seconds of a turn.
        request_timeout: seconds of sampling that a request may take.
        **vllm: arguments of the engine that it replaces, which are ignored.
    """

    def __init__(self, *, latency: float = 0.02, request_timeout: float = 20.0, **vllm: Any):
        tokenizer = build_tokenizer()

        def script(request: Request, index: int) -> ScriptedTurn:
            rng, text = random.Random(request.seed), tokenizer.decode(list(request.prompt))
            problem = re.search(r"What is ([-+*\d]+)\?", text)[1]
            result = re.findall(r"tool\W+(-?\d+)", text)
            reply = f"<tool>{problem}</tool>" if not result else f"\\boxed{{{result[-1]}}}"
            if rng.random() < 0.3:
                reply = f"\\boxed{{{rng.randint(10, 99)}}}"
            tokens = [*tokenizer(reply)["input_ids"], tokenizer.eos_token_id]
            log_probs = [-rng.random() for _ in tokens]
            return ScriptedTurn(tokens, log_probs, latency=2 * latency * rng.random())

        super().__init__(script, request_timeout=request_timeout)
