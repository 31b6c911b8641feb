"""Agents that call the policy at an endpoint of OpenAI's or Anthropic's format."""

from torchrl_rloo.envs.agents.agents import AgentContext, CommandAgent
from torchrl_rloo.envs.agents.containers import ContainerAgent
from torchrl_rloo.envs.agents.transform import AgentTransform, agent_env

__all__ = ["AgentContext", "AgentTransform", "CommandAgent", "ContainerAgent", "agent_env"]
