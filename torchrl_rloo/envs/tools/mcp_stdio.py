"""Transport of an MCP server that is a process of this machine."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from torchrl_rloo.envs.tools import mcp_relay
from torchrl_rloo.runtime.processes import reaped_command


def open_stdio(
    command: str, args: Sequence[str], env: Mapping[str, str] | None, cwd: str | os.PathLike | None
) -> AbstractAsyncContextManager[Any]:
    """Return the SDK's transport to a program behind :mod:`torchrl_rloo.envs.tools.mcp_relay`, below a reaper.

    Args:
        command: program to start.
        args: arguments of the program.
        env: environment variables in addition to the few that are safe to inherit.
        cwd: working directory of the process. None is this process's.

    Raises:
        FileNotFoundError: if there is no such program; the relay that starts it could not tell.
    """
    from mcp.client.stdio import StdioServerParameters, stdio_client

    # Find the program as its process would: its directory and its PATH count
    place = os.path.join(cwd or "", command) if os.sep in command else command
    if (found := shutil.which(place, path=(env or {}).get("PATH"))) is None:
        raise FileNotFoundError(f"command={command!r} is no program; correct the path")
    relay = [sys.executable, "-I", "-S", mcp_relay.__file__, str(mcp_relay.MAX_LINE_BYTES), os.path.abspath(found)]
    program, *words = reaped_command([*relay, *args])
    options = {"env": None if env is None else dict(env), "cwd": cwd and os.fspath(cwd)}
    server = StdioServerParameters(command=program, args=words, **options)
    return stdio_client(server, errlog=sys.__stderr__ or sys.stderr)
