"""The base of everything that crosses processes as JSON."""

from pydantic import BaseModel, ConfigDict

from headpond.ids import LeaseId


class WireModel(BaseModel):
    # Validation errors appear in logs and in Flower: they show what is wrong, without the content.
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class Result(WireModel):
    """The result of a job: numbers and blob references, never tokens."""

    def names_only_files_of(self, execution: LeaseId) -> bool:
        """Whether `execution` wrote every file that the result names: replies are not authenticated."""
        return True
