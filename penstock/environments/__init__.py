"""Environments: what the policy is asked and how it is scored. The worker's own configuration says which there are."""

from penstock.environments.grading import graded
from penstock.environments.loading import LoadedEnvironment, load_environment, load_environments
from penstock.environments.programs import Finished, run_program
from penstock.environments.protocol import AgentPolicy, Completion, Environment, Message, Played, Policy, ToolCall
from penstock.environments.scores import Score
from penstock.environments.tools import Tool, Tools, tool

__all__ = [
    "AgentPolicy",
    "Completion",
    "Environment",
    "Finished",
    "LoadedEnvironment",
    "Message",
    "Played",
    "Policy",
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
