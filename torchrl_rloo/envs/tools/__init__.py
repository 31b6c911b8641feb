"""Tools that the policy may call, and parsers that read its calls."""

from torchrl_rloo.envs.tools.browser import Browser
from torchrl_rloo.envs.tools.calculator import calculator
from torchrl_rloo.envs.tools.mcp import MCPTools
from torchrl_rloo.envs.tools.parsers import RegexParser
from torchrl_rloo.envs.tools.python import PythonInterpreter, RemotePython
from torchrl_rloo.envs.tools.search import SearchTool
from torchrl_rloo.envs.tools.tool import Columns, State, Tool, ToolError, ToolHostError, tool
from torchrl_rloo.envs.tools.workspace import FileEditTool, ShellTool, Workspace

__all__ = [
    "Browser",
    "Columns",
    "FileEditTool",
    "MCPTools",
    "PythonInterpreter",
    "RegexParser",
    "RemotePython",
    "SearchTool",
    "ShellTool",
    "State",
    "Tool",
    "ToolError",
    "ToolHostError",
    "Workspace",
    "calculator",
    "tool",
]
