"""Agents for the ``calculator`` task, as their users write them: the client of OpenAI, a framework, a command.

They are examples of what :class:`~torchrl_rloo.agents.AgentTransform` trains. All three make the same calls.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from torchrl_rloo.agents import AgentContext, CommandAgent
from torchrl_rloo.embedded.calculator import SYSTEM_PROMPT
from torchrl_rloo.envs.tools.calculator import calculator
from torchrl_rloo.envs.tools.tool import ToolError

CALLS = 2  # of the policy, for each question


async def openai_agent(context: AgentContext, row: dict[str, Any]) -> None:
    """Answer a question with the client of OpenAI; the agent itself reads the calls of the tool in the text.

    Args:
        context: access to the policy.
        row: row of the task.
    """
    messages = list(row["query"])
    async with context.openai() as client:
        for _ in range(CALLS):
            reply = await client.chat.completions.create(model=context.model, messages=messages)
            choice = reply.choices[0]
            said = choice.message.content or ""
            expressions = re.findall("<tool>([^<]*)</tool>", said)
            if choice.finish_reason == "length" or not expressions:
                return
            messages.append({"role": "assistant", "content": said})
            messages += [{"role": "tool", "content": calculate(expression)} for expression in expressions]


async def framework_agent(context: AgentContext, row: dict[str, Any]) -> None:
    """Answer a question with the Agents SDK of OpenAI, which calls the tool itself.

    The endpoint needs a parser, since the SDK expects calls of tools apart from the text.

    Args:
        context: access to the policy.
        row: row of the task.

    Raises:
        ImportError: if ``openai-agents`` is not installed.
    """
    from agents import Agent, OpenAIChatCompletionsModel, RunConfig, Runner, function_tool
    from agents.exceptions import MaxTurnsExceeded, ModelBehaviorError

    tool = function_tool(calculate, name_override=calculator.name)
    async with context.openai() as client:
        model = OpenAIChatCompletionsModel(context.model, client)
        agent = Agent("calculator", instructions=SYSTEM_PROMPT, tools=[tool], model=model)
        try:
            await Runner.run(
                agent, row["query"][1]["content"], max_turns=CALLS, run_config=RunConfig(tracing_disabled=True)
            )
        except (MaxTurnsExceeded, ModelBehaviorError):
            pass  # the policy's fault, for which it earns nothing


def calculate(expression: str) -> str:
    """Evaluate an arithmetic expression.

    Args:
        expression: such as 47*38.
    """
    try:
        return calculator.call(None, expression)
    except ToolError as error:
        return f"Error: {error}"


command_agent = CommandAgent([sys.executable, "-I", str(Path(__file__).with_name("agent_command.py"))])
