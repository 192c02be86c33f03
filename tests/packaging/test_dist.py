"""What `make dist` writes: the same commit gives the same bytes, with an SBOM and checksums that fit."""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest

from standins.packaging_script import packaging_script


@pytest.fixture(scope="module")
def dist() -> ModuleType:
    return packaging_script("dist")


def test_the_sbom_names_what_all_needs_and_nothing_of_tests(dist: ModuleType) -> None:
    document = dist.sbom("1700000000")
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.6")
    assert document["metadata"]["timestamp"] == "2023-11-14T22:13:20Z"
    components = {component["name"]: component for component in document["components"]}
    assert {"pydantic", "sqlalchemy", "cryptography", "fastapi", "torch", "weasyprint"} <= components.keys()
    assert not {"pytest", "hypothesis", "mypy", "ruff", "kvcustody"} & components.keys()
    for name, component in components.items():
        assert component["version"] == version(name)
        assert component["purl"] == f"pkg:pypi/{name}@{component['version']}"
    assert document["dependencies"][0]["dependsOn"] == sorted(components)


@pytest.mark.system("a build differs from the one before it, or a checksum does not fit")
def test_two_builds_of_a_commit_are_equal(dist: ModuleType, tmp_path: Path) -> None:
    """The second build goes into the folder of the first and replaces its files."""
    first, second = ({path.name: path.read_bytes() for path in dist.build(tmp_path)} for _ in range(2))
    assert first.keys() == second.keys() and len(first) == 5
    assert {name for name in first if first[name] != second[name]} == set()
    sums = dict(reversed(line.split("  ")) for line in first.pop("SHA256SUMS").decode().splitlines())
    assert sums == {name: hashlib.sha256(content).hexdigest() for name, content in first.items()}
    assert json.loads(first["kvcustody.cdx.json"]) == json.loads(second["kvcustody.cdx.json"])
