"""The document of a deployment's placement groups: sets of workers, each behind its own router."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from kvcustody.governance.identity.document_fields import GroupName, Identifier
from kvcustody.policies.document.yaml_document import YamlModel, read_model


class PlacementGroup(YamlModel):
    """One group: its router's address, and the names of its workers, for people.

    `taints`: those that Dynamo's router has to find at a worker of the group, where one router stands before several
    groups. They go on in `nvext.routing_constraints`.
    """

    router: Annotated[str, Field(min_length=1, pattern=r"^[^\s]+$")]
    workers: tuple[Identifier, ...] = ()
    taints: tuple[Identifier, ...] = ()


class PlacementDocument(YamlModel):
    """The groups of one deployment, by name."""

    form: Literal["kvcustody/placement@1"] = Field(alias="schema")
    groups: Annotated[dict[GroupName, PlacementGroup], Field(min_length=1, max_length=1024)]
    spread: Annotated[int, Field(ge=1)] = 1

    @model_validator(mode="after")
    def _usable(self) -> PlacementDocument:
        if self.spread > len(self.groups):
            raise ValueError(f"`spread` {self.spread} is more than there are groups")
        workers = [worker for group in self.groups.values() for worker in group.workers]
        if len(set(workers)) != len(workers):
            raise ValueError("a worker belongs to two groups")
        return self


def read_placement(path: Path) -> PlacementDocument:
    """Read the document in a file; raises `ConfigError` with one line a problem."""
    return read_model(PlacementDocument, path)
