"""Launcher of ranks as actors of a Ray cluster, with the environment of ``torchrun``.

Ray Train's TorchTrainer does not serve: it calls a function on a thread of an actor, where no stop signal arrives, and
forms the process group itself. Here each actor starts the same process as ``torchrun`` would, and dies with it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from types import FrameType
from typing import Any, NamedTuple, Protocol

from torchrl_rloo.ray.session import require_ray
from torchrl_rloo.runtime import processes
from torchrl_rloo.runtime.ranks import EXIT_CODE, QUIET

_PLACE_S = 600.0  # for all ranks to find a place
_LOG_S = 30.0  # between messages of ranks that have none
_DRAIN_S = 2.0  # for the last output of a process that has ended
_ACTOR_LOST = 128 + signal.SIGKILL  # exit code of a rank that ended with its actor
_CHUNK = 1 << 16
_END_S = 15.0  # for the other ranks to end after the first failure, or after the end of rank 0
_POLL_S = 0.05


class Place(NamedTuple):
    """Place of an actor: Ray's id of the node, its IP address, and the ids of its GPUs."""

    node: str
    address: str
    gpus: list[str]


class RankActor:
    """Process of one rank. It is killed with the actor."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._reserved = None

    async def place(self) -> Place:
        """Return where the actor is."""
        import ray

        context = ray.get_runtime_context()
        gpus = context.get_accelerator_ids().get("GPU", [])
        return Place(context.get_node_id(), ray.util.get_node_ip_address(), [str(gpu) for gpu in gpus])

    async def reserve_port(self) -> int:
        """Return a port that stays free for the store of rank 0."""
        self._reserved = reserve_port("")
        return self._reserved.getsockname()[1]

    async def run(
        self, command: Sequence[str], variables: Mapping[str, str], folder: str
    ) -> AsyncIterator[tuple[int, bytes]]:
        """Run a command of this node's Python; yield the number and bytes of its streams, then 0 and its exit code."""
        if not Path(folder).is_dir():
            yield (
                2,
                f"error: {folder} is not a folder of this node; start the run in one that all nodes share\n".encode(),
            )
            yield 0, b"1"
            return
        # The file of helper processes is run by path, so that the process replaces it before anything is imported
        starter = [sys.executable, "-S", processes.__file__, "exec", str(os.getpid()), sys.executable]
        pipes = {
            "stdin": asyncio.subprocess.DEVNULL,
            "stdout": asyncio.subprocess.PIPE,
            "stderr": asyncio.subprocess.PIPE,
        }
        self._process = process = await asyncio.create_subprocess_exec(
            *starter, *command, env=os.environ | dict(variables), cwd=folder, start_new_session=True, **pipes
        )
        output: asyncio.Queue[tuple[int, bytes]] = asyncio.Queue()
        readers = {asyncio.ensure_future(_read(n, s, output)) for n, s in ((1, process.stdout), (2, process.stderr))}
        ended = asyncio.ensure_future(_end(process, readers))
        while not (ended.done() and output.empty()):
            taken = asyncio.ensure_future(output.get())
            await asyncio.wait({taken, ended}, return_when=asyncio.FIRST_COMPLETED)
            if taken.done():
                yield taken.result()
            else:
                taken.cancel()
        yield 0, str(ended.result()).encode()

    async def send_signal(self, number: int) -> None:
        """Send a signal to the process."""
        with suppress(ProcessLookupError):
            if self._process is not None:
                self._process.send_signal(number)


async def _read(number: int, stream: asyncio.StreamReader, output: asyncio.Queue) -> None:
    while data := await stream.read(_CHUNK):
        output.put_nowait((number, data))


async def _end(process: asyncio.subprocess.Process, readers: set[asyncio.Future]) -> int:
    """Wait for the end of a process and of its output, which its children may keep open; return its exit code."""
    code = await process.wait()
    await asyncio.wait(readers, timeout=_DRAIN_S)
    for reader in readers:
        reader.cancel()
    return code


class RayRank:
    """Rank in an actor, with the methods of a ``subprocess.Popen``."""

    def __init__(self, rank: int, actor: Any, command: Sequence[str], variables: Mapping[str, str]):
        self.rank, self.returncode, self._actor = rank, None, actor
        stream = actor.run.options(num_returns="streaming").remote(list(command), dict(variables), os.getcwd())
        self._thread = Thread(target=self._read, args=(stream,), daemon=True)
        self._thread.start()

    def poll(self) -> int | None:
        """Return the exit code, or None."""
        return self.returncode

    def wait(self) -> int | None:
        """Wait for the end."""
        self._thread.join()
        return self.returncode

    def kill(self) -> None:
        """Kill the actor with its process."""
        import ray

        ray.kill(self._actor, no_restart=True)

    def send_signal(self, number: int) -> None:
        """Send a signal to the process."""
        self._actor.send_signal.remote(number)

    def _read(self, stream: Any) -> None:
        """Print the output of rank 0 as it is, and the errors of the others by lines."""
        import ray

        rest, code = b"", _ACTOR_LOST
        try:
            for reference in stream:
                number, data = ray.get(reference)
                if number == 0:
                    code = int(data)
                elif self.rank == 0:
                    file = (sys.stdout if number == 1 else sys.stderr).buffer
                    file.write(data)
                    file.flush()
                elif number == 2:
                    *lines, rest = (rest + data).split(b"\n")
                    write_lines(self.rank, lines)
        except ray.exceptions.RayError as error:
            sys.stderr.write(f"error: the actor of rank {self.rank} died: {str(error).strip().splitlines()[0]}\n")
        write_lines(self.rank, [rest] if rest else [])
        self.returncode = code


def launch_on_ray(
    command: Sequence[str], size: int, *, address: str | None = None, resources: Mapping[str, float] | None = None
) -> int:
    """Run a command as ranks in actors of a running Ray cluster, and wait for all of them.

    Ranks of one node have consecutive numbers. Each has the variables of its node, ``PYTHONPATH`` of this process, the
    variables of ``torchrun`` and ``RAY_ADDRESS``. Output, signals and ends are those of
    :func:`~torchrl_rloo.cli.ranks.launch`.

    Each rank reserves ``resources``, such as ``{"CPU": 1, "GPU": 1}``; None is a CPU. ``address`` None takes
    ``RAY_ADDRESS``, or the cluster of this machine. The result is the exit code of the rank that failed first, 128 + N
    after signal N; 0 if none failed. TimeoutError is raised if the ranks find no place.
    """
    if size < 1:
        raise ValueError(f"ranks={size} must be at least 1")
    ray = _connect(address)
    ranks: list[RayRank] = []
    signals = Signals(ranks)
    try:
        with signals:
            actors = _place(size, dict(resources or {"CPU": 1.0}))
            places = ray.get([actor.place.remote() for actor in actors])
            order = sorted(range(size), key=lambda i: [place.node for place in places].index(places[i].node))
            actors, places = [actors[i] for i in order], [places[i] for i in order]
            common = {"MASTER_ADDR": places[0].address, "MASTER_PORT": ray.get(actors[0].reserve_port.remote())}
            common |= {"RAY_ADDRESS": ray.get_runtime_context().gcs_address, "PYTHONUNBUFFERED": 1}
            common |= {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
            for rank, variables in enumerate(rank_variables(places)):
                quiet = QUIET if rank else {}
                found = {name: str(value) for name, value in (common | variables | quiet).items()}
                ranks.append(RayRank(rank, actors[rank], command, found))
            return wait_for_ranks(ranks)
    finally:
        kill_ranks(ranks)
        ray.shutdown()


def rank_variables(places: Sequence[Place]) -> list[dict[str, Any]]:
    """Return the variables of each rank, by the place of its actor; those of a node see all of the node's GPUs."""
    sizes, seen, variables = Counter(place.node for place in places), Counter(), []
    for rank, place in enumerate(places):
        found = {"RANK": rank, "WORLD_SIZE": len(places)}
        found |= {"LOCAL_RANK": seen[place.node], "LOCAL_WORLD_SIZE": sizes[place.node]}
        gpus = [gpu for other in places if other.node == place.node for gpu in other.gpus]
        variables.append(found | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}))
        seen[place.node] += 1
    return variables


def _connect(address: str | None) -> Any:
    """Connect to a running cluster."""
    ray = require_ray()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = address or os.environ.get("RAY_ADDRESS") or "auto"
    try:
        ray.init(address, logging_level="warning", log_to_driver=False)
    except ConnectionError as error:
        reason = str(error).strip().splitlines()[0]
        raise ConnectionError(
            f"no Ray cluster was found at address={address}; start one by `ray start --head`: {reason}"
        ) from error
    return ray


def _place(size: int, resources: dict[str, float]) -> list[Any]:
    """Return an actor per rank, on as few nodes as possible."""
    import ray
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group, deadline = placement_group([resources] * size, strategy="PACK"), time.monotonic() + _PLACE_S
    while not group.wait(_LOG_S):
        free = {name: value for name, value in ray.available_resources().items() if name in {"CPU", "GPU", *resources}}
        text = f"{size} ranks wait for a place, each with {resources}; the cluster has {free} free"
        if time.monotonic() > deadline:
            raise TimeoutError(f"{text}; see `ray status`")
        print(text, file=sys.stderr, flush=True)
    # By value: an actor that imported this package would import torch, which only its process needs
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    own = {name: value for name, value in resources.items() if name not in ("CPU", "GPU")}
    options = {"num_cpus": resources.get("CPU", 0), "num_gpus": resources.get("GPU", 0), "resources": own}
    return [
        ray.remote(RankActor)
        .options(**options, scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i))
        .remote()
        for i in range(size)
    ]


class Process(Protocol):
    """Process of a rank, with the interface of ``subprocess.Popen``.

    Attributes:
        returncode: exit code, or minus the number of the signal that ended it. None while it runs.
    """

    returncode: int | None

    def poll(self) -> int | None:
        """Return the exit code, or None."""

    def wait(self) -> int | None:
        """Wait for the end."""

    def kill(self) -> None:
        """Kill the process."""

    def send_signal(self, number: int) -> None:
        """Send a signal to the process."""


def reserve_port(address: str = "127.0.0.1") -> socket.socket:
    """Return a socket that keeps its port free for the store of rank 0, which may still listen on it."""
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((address, 0))
    return reserved


def write_lines(rank: int, lines: Iterable[bytes]) -> None:
    """Print lines of a rank's standard error, except progress bars."""
    for line in lines:
        if b"\r" not in line:
            sys.stderr.write(f"[rank {rank}] {line.decode(errors='replace')}\n")
            sys.stderr.flush()


class Signals:
    """Context manager that passes stop signals on to rank 0."""

    def __init__(self, ranks: Sequence[Process]):
        self.ranks, self.count = ranks, 0

    def __enter__(self) -> None:
        self.previous = {number: signal.signal(number, self._pass_on) for number in (signal.SIGINT, signal.SIGTERM)}

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count > 2:
            kill_ranks(self.ranks)
        elif self.ranks:
            self.ranks[0].send_signal(number)


def wait_for_ranks(ranks: Sequence[Process]) -> int:
    """Wait for all ranks; once one has failed, or rank 0 has ended, kill those that continue."""
    codes: dict[int, int] = {}  # in the order of their ends
    deadline = float("inf")
    while len(codes) < len(ranks):
        for rank, process in enumerate(ranks):
            if rank not in codes and process.poll() is not None:
                codes[rank] = process.returncode
                if process.returncode or rank == 0:
                    deadline = min(deadline, time.monotonic() + _END_S)
        if time.monotonic() > deadline:
            break
        time.sleep(_POLL_S)
    # Ranks that ended because of another one have a code that tells so
    failed = sorted((code for code in codes.values() if code), key=lambda code: code == EXIT_CODE)
    if not failed and len(codes) < len(ranks):
        left = sorted(set(range(len(ranks))) - set(codes))
        print(f"error: ranks {left} did not end within {_END_S:g} s after rank 0", file=sys.stderr, flush=True)
        return EXIT_CODE
    code = failed[0] if failed else 0
    return 128 - code if code < 0 else code


def kill_ranks(ranks: Sequence[Process]) -> None:
    """Kill the ranks that continue."""
    for process in ranks:
        if process.poll() is None:
            process.kill()
            process.wait()
