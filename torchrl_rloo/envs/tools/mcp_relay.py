"""Program between an MCP server's process and its client: it forwards the server's output up to a limit of a line.

The client reads a whole line before it parses it, so a line without an end would fill the trainer's memory. The relay
ends the server instead. It drops lines that are no JSON object, since servers print other text by mistake. It imports
the standard library only: each session over stdio starts one.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

MAX_LINE_BYTES = 8 << 20
_CHUNK_BYTES = 1 << 16
_LINES = re.compile(rb"[^\n]*\n|[^\n]+")


def main(arguments: list[str]) -> int:
    """Run the command in ``arguments`` after the limit, forward its output, and return its exit status."""
    limit, command = int(arguments[0]), arguments[1:]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0)
    try:
        forward(server.stdout.fileno(), sys.stdout.fileno(), limit)
    except (OSError, ValueError) as error:
        print(f"MCP server {command[0]!r} was ended: {error}", file=sys.stderr)
        server.kill()
        return server.wait() or 1  # it may have ended by itself
    return server.wait()


def forward(source: int, target: int, limit: int) -> None:
    """Copy the lines of JSON objects from one file descriptor to another."""
    length, wanted = 0, True
    while chunk := os.read(source, _CHUNK_BYTES):
        for piece in _LINES.findall(chunk):
            if not length:
                wanted = piece.lstrip()[:1] == b"{"
            length += len(piece)
            if length > limit:
                raise ValueError(f"a line of its output has more than the limit of {limit} bytes; send less")
            if wanted:
                write_all(target, piece)
            if piece.endswith(b"\n"):
                length = 0


def write_all(target: int, data: bytes) -> None:
    """Write all bytes to a file descriptor."""
    while data:
        data = data[os.write(target, data) :]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
