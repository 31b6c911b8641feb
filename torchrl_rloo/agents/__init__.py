"""Agents that call the policy at an endpoint of OpenAI's or Anthropic's format."""

from torchrl_rloo.agents.agents import AgentContext, CommandAgent, ContainerAgent
from torchrl_rloo.agents.policy_endpoint import PolicyEndpoint
from torchrl_rloo.agents.transform import AgentTransform, agent_env

__all__ = [
    "AgentContext",
    "AgentTransform",
    "CommandAgent",
    "ContainerAgent",
    "PolicyEndpoint",
    "agent_env",
]
