"""Environments: prompts, tools and rewards. A worker loads the ones that its configuration names."""

from penstock.environments.agent_program import ProgramResult, run_program
from penstock.environments.grading import graded
from penstock.environments.loading import LoadedEnvironment, load_environment, load_environments
from penstock.environments.protocol import (
    AgentPolicy,
    Completion,
    Environment,
    PlayedRollout,
    Policy,
    ToolCall,
)
from penstock.environments.scores import Score
from penstock.environments.tools import Tool, Tools, tool
from penstock.turn import Message

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
