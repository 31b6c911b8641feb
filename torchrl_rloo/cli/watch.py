"""Command ``torchrl-rloo watch``: runs in a browser, live or as a file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress

_PORTS = 65_535


def add_watch_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``torchrl-rloo watch`` to its parser."""
    parser.add_argument("folders", nargs="+", metavar="DIR", help="output_dir of a run, or a folder with some below")
    parser.add_argument("--port", type=int, default=0, help="port on this machine; default: a free one")
    parser.add_argument("--output", metavar="FILE", help="write the page to this HTML file and exit")


def watch(folders: Sequence[str], port: int, output: str | None) -> None:
    """Serve the live page of runs until it is interrupted, or write it to a file.

    Args:
        folders: folders of runs.
        port: port to listen on; 0 takes a free one.
        output: HTML file to write. None serves the page.
    """
    try:
        if not 0 <= port <= _PORTS:
            raise ValueError(f"--port {port} must be from 0 to {_PORTS}")
        if output is not None and port:
            raise ValueError("--port has no effect with --output; remove one")
        if output is not None and not output.endswith((".html", ".htm")):
            raise ValueError(f"--output {output} must end in .html")
        _watch(folders, port, output)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None


def _watch(folders: Sequence[str], port: int, output: str | None) -> None:
    if output is not None:
        from torchrl_rloo.diagnostics.watch_page import write_live_page

        return print(f"page in {write_live_page(output, folders).resolve()}")
    from torchrl_rloo.diagnostics.watch import LiveServer

    with LiveServer(folders, port) as server, suppress(KeyboardInterrupt):
        names = ", ".join(run.name for run in server.page.runs)
        print(f"watching {names}\n{server.url}\nopen this address on this machine; Ctrl+C stops", flush=True)
        server.serve_forever()
