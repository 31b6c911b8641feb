"""Parts of tests of collectors: a tool that waits, scripts of engines, updaters, and readers of rows."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable

import torch
from tensordict import TensorDictBase

from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.collectors.ledger import GroupState
from torchrl_rloo.data import keys
from torchrl_rloo.data.stop_reasons import stop_reason
from torchrl_rloo.engines.base import EngineError
from torchrl_rloo.engines.scripted import ScriptedEngine, ScriptedTurn
from torchrl_rloo.envs.turn_transform import TurnTransform
from torchrl_rloo.weight_update import WeightSyncError, WeightUpdater

G = 2  # number of members in a group


class Gate(TurnTransform):
    """Tool that holds its answer for some groups until it is released. It keeps state for each conversation."""

    def __init__(self, closed: set[int] = frozenset(), turns: int = 2):
        super().__init__()
        self.closed, self.turns = set(closed), turns
        self.waiting: set[int] = set()
        self.state: set[int] = set()

    async def step_row(self, row: TensorDictBase, next_row: TensorDictBase) -> None:
        self.state.add(int(row[keys.TRAJECTORY_ID]))
        group = int(row[keys.GROUP_ID])
        while group in self.closed:
            self.waiting.add(group)
            await asyncio.sleep(0.002)
        if int(next_row[keys.NUM_TURNS]) < self.turns:
            self.chat_env.continue_row(next_row, [{"role": "user", "content": "again"}])

    async def release(self, trajectory_id: int) -> None:
        self.state.discard(trajectory_id)


class Sessions(TurnTransform):
    """Transform that keeps a session per conversation, from its reset to its release."""

    def __init__(self):
        super().__init__()
        self.open: set[int] = set()

    async def step_row(self, row: TensorDictBase, next_row: TensorDictBase) -> None:
        pass

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        self.open |= set(tensordict_reset[keys.TRAJECTORY_ID].tolist())
        return tensordict_reset

    async def release(self, trajectory_id: int) -> None:
        self.open.discard(trajectory_id)


class Bump(WeightUpdater):
    """Updater that gives a scripted engine a new version; requests in flight continue under it.

    Args:
        engine: the engine.
        failures: errors of the next pushes, with None for one that succeeds.
    """

    def __init__(self, engine: ScriptedEngine, failures: list[Exception | None] | None = None):
        self.engine, self.failures = engine, list(failures or [])
        self.version, self.initialized = 0, 0

    @property
    def current_version(self) -> int:
        return self.engine.version

    def initialize(self) -> None:
        self.initialized += 1
        self._set(self.version)

    def resume_from(self, version: int) -> None:
        self.version = version

    def _send(self, version: int) -> None:
        if self.failures and (error := self.failures.pop(0)) is not None:
            raise WeightSyncError(f"version {version}: {error}") from error
        self._set(version)

    def _set(self, version: int) -> None:
        self.engine.pause("continue")
        self.engine.version = version
        self.engine.resume()


def failing_script(eos: int, fails: Callable[[int, int], bool]) -> Callable[..., ScriptedTurn]:
    """Return a script that fails if ``fails(turn, number)``. Requests are numbered within each turn."""
    seen: Counter[int] = Counter()
    lock = threading.Lock()

    def play(request, index) -> ScriptedTurn:
        turn = list(request.prompt).count(eos)  # a prompt has one
        with lock:
            seen[turn] += 1
            number = seen[turn]
        error = EngineError("the prompt is too long") if fails(turn, number) else None
        return ScriptedTurn([40 + index % 20, eos], [-1.0, -0.5], error=error)

    return play


def words(completions, **_) -> list[float]:
    """Reward the number of characters of each completion."""
    return [float(sum(len(m["content"]) for m in c)) for c in completions]


def groups_of(rows: TensorDictBase) -> list[int]:
    """Return the group of each row."""
    return [int(row[keys.GROUP_ID]) for row in rows.unbind(0)]


def reasons(rows: TensorDictBase) -> list[str]:
    """Return the stop reason of each row."""
    return [stop_reason(row) for row in rows.unbind(0)]


def in_state(collector: LLMCollector, *states: str) -> set[int]:
    """Return the groups of a collector's ledger that are in any of the states."""
    return {group.group_id for group in list(collector.ledger.groups.values()) if group.state.value in states}


UNDELIVERED = tuple(state.value for state in (GroupState.DRAWN, GroupState.LEASED, GroupState.COMPLETE))


def assert_same(
    ours: TensorDictBase, theirs: TensorDictBase, tolerance: float = 0.0, without: tuple = (keys.TRAJECTORY_ID,)
) -> None:
    """Assert that rows have the same entries, floats up to a tolerance, except for keys in ``without``."""
    assert len(ours) == len(theirs)
    for one, two in zip(ours.unbind(0), theirs.unbind(0), strict=True):
        assert set(one.keys(True, True)) == set(two.keys(True, True))
        for key in one.keys(True, True):
            a, b = one[key], two[key]
            if key in without:
                continue
            if isinstance(a, torch.Tensor) and a.is_floating_point():
                torch.testing.assert_close(a, b, rtol=0, atol=tolerance, equal_nan=True)
            elif isinstance(a, torch.Tensor):
                assert torch.equal(a, b), key
            else:
                assert a == b, key
