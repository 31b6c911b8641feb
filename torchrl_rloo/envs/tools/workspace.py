"""Workspace of a conversation, and the tools ``shell`` and ``edit`` that work on its folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torchrl_rloo.envs.tools.tool import Tool, ToolError, ToolTimeoutError
from torchrl_rloo.runtime.lookup import import_room

if TYPE_CHECKING:
    import os

    from torchrl_rloo.sandbox import WorkspaceSession

_MESSAGES = {
    "timed_out": "The command ran for longer than {timeout:g} s and was stopped, with all its processes.",
    "memory": "The command exceeded the memory limit of {megabytes} MB and was stopped.",
    "processes": "The command started more than {processes} processes and was stopped.",
    "output": "The command printed more than 1 MB and was stopped.",
    "unavailable": "The command could not be started.",
}
_ARGUMENTS = {  # of the file operations: those that must be given, and the others
    "view": (("path",), ("first", "last")),
    "create": (("path", "content"), ()),
    "replace": (("path", "old", "new"), ()),
}


class Workspace:
    """Settings of the folders in which the tools of conversations work.

    :class:`~torchrl_rloo.envs.tools.ShellTool` and :class:`~torchrl_rloo.envs.tools.FileEditTool` with the same
    workspace share one folder in each conversation. It begins with the files of the conversation's row and is removed
    with the conversation. The module :mod:`torchrl_rloo.sandbox` describes the sandbox.

    Args:
        files: column of the first files, a mapping of paths in the folder to texts. A row without it begins empty.
        readable: folders of the machine that commands can read in addition to the system's and Python's, at the same
            paths, such as a virtual environment. Their folders ``bin`` come first in ``PATH``.
        timeout: limit of a command in seconds.
        memory: limit in bytes on the address space of a process, and on the memory of all processes of a command.
        disk: limit in bytes on the files of a conversation.
        processes: limit of processes at a time.
        max_output: bytes of a command's output that are shown.
        allow_weaker: True to also work where the system has no namespaces. Commands then run as your user, with your
            files and network, in a temporary folder without a limit on its size. Their processes still end.

    Attributes:
        sandbox: :class:`~torchrl_rloo.sandbox.Sandbox` that opens the folders; its ``missing`` lists what the system
            lacks.

    Raises:
        ValueError: if a limit is not positive, ``memory`` is below 64 MB, or a readable folder does not exist.
        SandboxUnavailableError: if the system has no namespaces and ``allow_weaker`` is False, or is not Linux.

    Example:
        >>> with Workspace().open({"hello.txt": "hello"}) as folder:
        ...     folder.run("cat hello.txt; ls /home").output
        "hellols: cannot access '/home': No such file or directory\\n"
    """

    def __init__(
        self,
        *,
        files: str = "files",
        readable: Sequence[str | os.PathLike] = (),
        timeout: float = 20.0,
        memory: int = 512 << 20,
        disk: int = 64 << 20,
        processes: int = 64,
        max_output: int = 5_000,
        allow_weaker: bool = False,
    ):
        if disk < 1 or max_output < 1:
            raise ValueError(f"disk={disk} must be at least 1, and max_output={max_output}")
        self.files, self.timeout = files, timeout
        self.sandbox = import_room("sandbox", "Workspace").Sandbox(
            timeout=timeout,
            memory=memory,
            disk=disk,
            processes=processes,
            shown=max_output,
            readable=tuple(map(str, readable)),
            allow_weaker=allow_weaker,
        )

    def open(self, files: Mapping[str, str] | None = None) -> WorkspaceSession:
        """Open a folder with its first files, a mapping of paths in it to texts."""
        return self.sandbox.open(files)


class _WorkspaceTool(Tool):
    """Tool with the folder of the conversation as its state, which the tools of a workspace share."""

    def __init__(self, workspace: Workspace, name: str, description: str, properties: dict, required: list[str]):
        self.workspace = workspace
        parameters = {"type": "object", "properties": properties, "required": required}
        super().__init__(name, description, parameters, timeout=workspace.sandbox.policy.patience)
        self.state_key = workspace

    def open(self, columns: Mapping[str, Any]) -> WorkspaceSession:
        """Open the folder with the row's first files."""
        return self.workspace.open(columns.get(self.workspace.files))

    def close(self, state: WorkspaceSession) -> None:
        """Remove the folder and end its processes."""
        state.close()


class ShellTool(_WorkspaceTool):
    """Tool ``shell``, which runs commands in the folder of the conversation.

    The policy reads what the command printed and its exit code, if that is not 0. Files persist between calls, other
    state of the shell does not. All processes of a command end with it.

    Args:
        workspace: folders and limits; tools with the same workspace share them.

    Example:
        >>> shell = ShellTool(Workspace())
        >>> shell.name, shell.parameters["required"]
        ('shell', ['command'])
    """

    def __init__(self, workspace: Workspace):
        super().__init__(
            workspace,
            "shell",
            "Runs a command of bash in the working folder and returns what it prints. Files persist between calls; "
            "the current folder, variables and background processes do not. There is no network.",
            {"command": {"type": "string", "description": "Command, such as: ls; python3 -m unittest"}},
            ["command"],
        )

    async def call(self, state: WorkspaceSession, /, command: str) -> str:
        """Run a command and return what the policy reads."""
        result, space = await state.call(command), self.workspace.sandbox.policy
        output = result.output.rstrip("\n")
        if result.reason == "exit":
            code = f"[exit code {result.code}]" if result.code else ""
            return "\n".join(part for part in (output, code) if part) or "(no output)"
        limits = {"timeout": space.timeout, "megabytes": space.memory >> 20, "processes": space.processes}
        text = _MESSAGES[result.reason].format(**limits)
        text = f"{text}\nBefore that it had printed:\n{output}" if output else text
        raise ToolTimeoutError(text) if result.reason == "timed_out" else ToolError(text)


class FileEditTool(_WorkspaceTool):
    """Tool ``edit``, which shows and changes text files in the folder of the conversation.

    ``view`` shows numbered lines of a file, or the entries of a folder. ``create`` writes a whole file. ``replace``
    replaces a text that occurs exactly once. No path leads out of the folder, also not through links. Errors tell the
    policy what to do.

    Args:
        workspace: folders and limits; tools with the same workspace share them.

    Example:
        >>> edit = FileEditTool(Workspace())
        >>> edit.name, edit.parameters["required"]
        ('edit', ['action', 'path'])
    """

    def __init__(self, workspace: Workspace):
        super().__init__(
            workspace,
            "edit",
            "Shows and changes text files in the working folder. Action view shows a file with line numbers, or the "
            "entries of a folder; create writes a whole file; replace replaces old, which must occur exactly once in "
            "the file, by new.",
            {
                "action": {"type": "string", "enum": list(_ARGUMENTS), "description": "What to do."},
                "path": {"type": "string", "description": "Path in the working folder, such as src/main.py."},
                "content": {"type": "string", "description": "For create: text of the whole file."},
                "old": {"type": "string", "description": "For replace: text to replace, without line numbers."},
                "new": {"type": "string", "description": "For replace: text to put there."},
                "first": {"type": "integer", "description": "For view: first line, from 1."},
                "last": {"type": "integer", "description": "For view: last line."},
            },
            ["action", "path"],
        )

    async def call(self, state: WorkspaceSession, /, action: str, **arguments: Any) -> str:
        """Do a file operation and return what the policy reads."""
        required, optional = _ARGUMENTS[action]
        if missing := [name for name in required if name not in arguments]:
            raise ToolError(f"action {action} requires {', '.join(missing)}: add what is missing")
        if other := [name for name in arguments if name not in required + optional]:
            raise ToolError(f"action {action} takes no {', '.join(other)}: leave it out, or use another action")
        done, text = await state.edit(action, **arguments)
        if not done:
            raise ToolError(text)
        return text
