"""Tools that the policy may call, and parsers that read its calls."""

from torchrl_rloo.envs.tools.browser import Browser
from torchrl_rloo.envs.tools.calculator import calculator
from torchrl_rloo.envs.tools.mcp import MCPTools
from torchrl_rloo.envs.tools.parsers import RegexParser, ToolCall, ToolResult
from torchrl_rloo.envs.tools.python import PythonInterpreter
from torchrl_rloo.envs.tools.search import SearchTool
from torchrl_rloo.envs.tools.session import ToolSession
from torchrl_rloo.envs.tools.tool import Columns, State, Tool, ToolError, ToolRegistry, tool
from torchrl_rloo.envs.tools.workspace import FileEditTool, ShellTool, Workspace

__all__ = [
    "Browser",
    "Columns",
    "FileEditTool",
    "MCPTools",
    "PythonInterpreter",
    "RegexParser",
    "SearchTool",
    "ShellTool",
    "State",
    "Tool",
    "ToolCall",
    "ToolError",
    "ToolRegistry",
    "ToolResult",
    "ToolSession",
    "Workspace",
    "calculator",
    "tool",
]
