"""Environments: prompts, tools and rewards. A worker loads the environments that its
configuration names."""

from headpond.environments.agent_program import ProgramResult, run_program
from headpond.environments.grading import graded
from headpond.environments.loading import LoadedEnvironment, load_environment, load_environments
from headpond.environments.protocol import (
    AgentPolicy,
    Completion,
    Environment,
    PlayedRollout,
    Policy,
    Score,
    ToolCall,
)
from headpond.environments.tools import Tool, Tools, tool
from headpond.turn import Message

__all__ = [
    "AgentPolicy",
    "Completion",
    "Environment",
    "LoadedEnvironment",
    "Message",
    "PlayedRollout",
    "Policy",
    "ProgramResult",
    "Score",
    "Tool",
    "ToolCall",
    "Tools",
    "graded",
    "load_environment",
    "load_environments",
    "run_program",
    "tool",
]
