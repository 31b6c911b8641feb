"""Supervisor of an EnginePool: probes members, restarts and refills dead ones."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from threading import Event, Thread
from time import monotonic
from typing import TYPE_CHECKING

from torchrl_rloo.engines.base import EngineDeadError, EngineError, EngineTimeoutError
from torchrl_rloo.engines.member import Member

if TYPE_CHECKING:
    from torchrl_rloo.engines.pool import EnginePool

_LOGGER = logging.getLogger(__name__)
_HOUR = 3600.0
_MAX_MISSES = 2  # unanswered calls in a row until a member counts as dead


class Supervisor:
    """Thread that keeps the members of one pool alive.

    It calls every member regularly and looks at its progress. A member counts as dead if it neither answered two calls
    in a row nor sampled during them. It also does if it sampled nothing for long with requests inside. The supervisor
    restarts and refills dead members. It cares for different members at the same time. In a pool that follows another
    process's, it only looks after waiting requests.

    Args:
        probe_every: seconds between two calls of a member.
        probe_timeout: seconds that a member may take to answer.
        stall_timeout: seconds without a token, with requests inside and no pause, after which a member counts as dead.
            Members that do not count the tokens of running requests are exempt.
        max_restarts: number of restarts and failed fills of a member in an hour. A member that needs more stays dead.
        backoff: seconds before the second restart of a member in an hour. Each further wait is twice as long.
        max_backoff: maximum seconds before a restart.

    Raises:
        ValueError: if an argument is out of range.
    """

    def __init__(
        self,
        *,
        probe_every: float = 5.0,
        probe_timeout: float = 10.0,
        stall_timeout: float = 120.0,
        max_restarts: int = 5,
        backoff: float = 1.0,
        max_backoff: float = 60.0,
    ):
        times = {"probe_every": probe_every, "probe_timeout": probe_timeout, "stall_timeout": stall_timeout}
        for name, seconds in times.items():
            if not seconds > 0:
                raise ValueError(f"{name}={seconds} must be above 0 seconds")
        if max_restarts < 0:
            raise ValueError(f"max_restarts={max_restarts} must be at least 0")
        if not 0 <= backoff <= max_backoff:
            raise ValueError(f"backoff={backoff} must be from 0 to max_backoff={max_backoff} seconds")
        self.probe_every, self.probe_timeout, self.stall_timeout = probe_every, probe_timeout, stall_timeout
        self.max_restarts, self.backoff, self.max_backoff = max_restarts, backoff, max_backoff
        self._stopped, self._news = Event(), Event()
        self._thread: Thread | None = None

    def watch(self, pool: EnginePool) -> None:
        """Start the thread, which ends with the pool; a supervisor watches one."""
        if self._thread is not None:
            raise ValueError("this Supervisor watches another pool; make one per pool")
        self._thread = Thread(target=self._run, args=(weakref.ref(pool),), name="pool-supervisor", daemon=True)
        self._thread.start()
        weakref.finalize(pool, self.stop)  # also runs at exit, before restarts could begin

    def wake(self) -> None:
        """Look at all members now."""
        self._news.set()

    def stop(self) -> None:
        """End the thread, and start no further restart. Running ones end by themselves."""
        self._stopped.set()
        self._news.set()

    def admit(self, pool: EnginePool, member: Member) -> None:
        """Bring a started engine into the pool's pause and sleep, and let it wait for weights."""
        if pool.paused:
            member.engine.pause("abort")
        if pool.asleep:
            member.engine.sleep()
        if pool.closed:
            member.engine.close()
        with pool.lock:
            member.start_count = member.target.start_count
            member.filled = pool.fill is None
            member.needs_fill = not member.filled
            if not pool.change(member, "ready" if member.filled else "empty", sources=("starting",)):
                return
        pool.route_waiting()

    def _run(self, reference: weakref.ref[EnginePool]) -> None:
        while not self._stopped.is_set() and (pool := reference()) is not None:
            delay = self._look(pool)
            del pool
            self._news.wait(delay)
            self._news.clear()

    def _look(self, pool: EnginePool) -> float:
        """Start the jobs that are due, and return the seconds until the next one."""
        now = monotonic()
        delay = min(self.probe_every, pool.check_waiting(now))
        for member in () if pool.follows else pool.members:
            if member.job is not None or member.exhausted or member.state in ("starting", "closed"):
                continue
            wants_fill = _wants_fill(pool, member)
            # Wait before a restart in its own thread; wait before a fill or a probe here
            if member.state == "dead":
                self._start(pool, member, self._revive)
            elif wants_fill and now >= member.fill_at:
                self._start(pool, member, self._fill)
            elif now >= member.probe_at:
                self._start(pool, member, self._probe)
            else:
                delay = min(delay, member.probe_at - now, member.fill_at - now if wants_fill else delay)
        return max(delay, 0.0)

    def _start(self, pool: EnginePool, member: Member, job: Callable[[EnginePool, Member], None]) -> None:
        def run() -> None:
            try:
                job(pool, member)
            finally:
                member.job = None
                self.wake()

        member.job = Thread(target=run, name=f"{member.name}: {job.__name__.strip('_')}", daemon=True)
        member.job.start()

    def _probe(self, pool: EnginePool, member: Member) -> None:
        """Call a member and look at its progress."""
        member.probe_at = monotonic() + self.probe_every
        if member.engine.occupied:  # no answer now means nothing; the current call has a time limit
            return
        before = _progress(member)
        try:
            member.engine.check_health(self.probe_timeout)
        except Exception as error:
            # On a busy machine an engine may answer late and still sample
            if not _is_unanswered(error) or _progress(member) == before:
                self._judge(pool, member, error)
                return
        member.misses = 0
        if pool.change(member, "ready" if member.filled else "empty", sources=("suspect",)):
            pool.route_waiting()
        # Compare the progress with that at the last probe
        now, progress = monotonic(), _progress(member)
        busy = member.inside and not member.engine.paused and member.engine.counts_running_tokens
        if not busy or progress != member.progress:
            member.progress, member.progress_at = progress, now
        elif now - member.progress_at > self.stall_timeout:
            idle, n = f"sampled nothing for stall_timeout={self.stall_timeout:g} s", len(member.inside)
            pool.lose(member, EngineDeadError(f"{member.name} {idle} with {n} requests inside"))

    def _judge(self, pool: EnginePool, member: Member, error: Exception) -> None:
        """Decide on a member whose call failed."""
        if member.target.closed:
            pool.lose(member, error, "closed")
            return
        member.misses += 1
        if _is_unanswered(error) and member.misses < _MAX_MISSES:
            pool.suspect(member, error)
            member.probe_at = 0.0  # call it again at once
        else:
            pool.lose(member, error)

    def _revive(self, pool: EnginePool, member: Member) -> None:
        """Restart and fill a dead member, after a wait that grows with its failures."""
        delay = self._delay(pool, member)
        if delay is None or self._stopped.wait(delay) or not pool.change(member, "starting", sources=("dead",)):
            return
        pool.counts["pool/restarts"] += 1
        member.failures.append(monotonic())
        try:
            member.engine.restart()
            self.admit(pool, member)
            _LOGGER.warning("%s was restarted", member.name)
        except Exception as error:
            if member.target.closed:
                pool.lose(member, error, "closed")
                return
            _LOGGER.warning("%s did not restart: %s: %s", member.name, type(error).__name__, error)
            pool.counts["pool/failed_restarts"] += 1
            pool.lose(member, error)
            return
        member.misses, member.probe_at = 0, monotonic() + self.probe_every
        member.progress_at = monotonic()
        if _wants_fill(pool, member):
            self._fill(pool, member)

    def _fill(self, pool: EnginePool, member: Member) -> None:
        """Fill a member with weights. After a failure the next look tries again, or restarts the member."""
        try:
            pool.fill(member.target)
            if member.target.failed_version is not None:
                raise EngineError(f"the fill left parts of version {member.target.failed_version} in {member.name}")
        except Exception as error:
            _LOGGER.warning("%s was not filled: %s: %s", member.name, type(error).__name__, error)
            pool.counts["pool/failed_fills"] += 1
            member.failures.append(monotonic())
            member.cause = error
            # A fill that had no answer counts as a call without one
            member.misses += _is_unanswered(error)
            if member.misses >= _MAX_MISSES:
                pool.lose(member, error)
            elif (delay := self._delay(pool, member)) is not None:
                member.fill_at = monotonic() + delay
                self._probe(pool, member)  # a dead engine is restarted instead
            return
        pool.mark_filled(member.target, member.target.version)

    def _delay(self, pool: EnginePool, member: Member) -> float | None:
        """Return the seconds to wait before the next attempt; if the budget is spent, leave the member dead."""
        while member.failures and member.failures[0] < monotonic() - _HOUR:
            member.failures.popleft()
        n = len(member.failures)
        if n < self.max_restarts:
            return min(self.backoff * 2.0 ** (n - 1), self.max_backoff) if n else 0.0
        # Leave it dead for good
        last = f"{type(member.cause).__name__}: {member.cause}"
        error = EngineDeadError(
            f"it failed max_restarts={self.max_restarts} times in an hour; the last failure was {last}"
        )
        with pool.lock:
            member.exhausted = True
            pool.counts["pool/abandoned"] += 1
            pool.change(member, "dead", error, sources=("empty", "suspect", "ready"))
            member.cause = error
        _LOGGER.error("%s stays dead: %s", member.name, error)
        pool.fail_hopeless()
        return None


def _wants_fill(pool: EnginePool, member: Member) -> bool:
    return member.state == "empty" and member.needs_fill and not pool.asleep


def _progress(member: Member) -> tuple[int, int]:
    """Return the tokens that a member sampled, and the requests that it finished; no tokens if it cannot tell."""
    try:
        return member.engine.load().tokens, member.finished
    except EngineError:
        return 0, member.finished


def _is_unanswered(error: BaseException | None) -> bool:
    """Return whether an error says that a member did not answer in time."""
    while error is not None and not isinstance(error, EngineTimeoutError):
        error = error.__cause__
    return error is not None
