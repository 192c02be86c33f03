"""The language page and the code page are complete, and their examples run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvcustody.policies.document.problem_codes import CODES
from kvcustody.policies.reading import sections
from kvcustody.policies.reading.fields import RESERVED, DocumentPart, field_names
from kvcustody.policies.reading.load_policy import load_policy
from kvcustody.policies.table.compile import compile_policy
from kvcustody.policies.workbench.prove.model import PROPERTIES
from kvcustody.policies.workbench.run_test_cases import run_cases
from kvcustody.policies.workbench.test_case_model import load_cases

DOCS = Path(__file__).parents[3] / "docs"
LANGUAGE = (DOCS / "reference" / "policy-language.md").read_text()
PROOFS = (DOCS / "concepts" / "policy" / "proofs.md").read_text()
WHOLE = re.search(r"```yaml\n(.*?)```", LANGUAGE, re.DOTALL)[1]
FRAGMENTS = re.findall(r"```yaml fragment\n(.*?)```", LANGUAGE, re.DOTALL)


def split(text):
    return {part.split(":", 1)[0]: part for part in re.split(r"^(?=[a-z_]+:)", text, flags=re.MULTILINE) if part}


def test_the_whole_example_loads():
    compile_policy(load_policy(WHOLE, name="example.yaml"), revision=1)


@pytest.mark.parametrize("fragment", FRAGMENTS, ids=lambda text: text.split(":")[0])
def test_every_fragment_loads_in_the_whole_example(fragment):
    merged = split(WHOLE) | split(fragment)
    if "tenants" in split(fragment):
        merged.pop("groups", None)
    compile_policy(load_policy("".join(merged.values()), name="fragment.yaml"), revision=1)


def test_every_field_is_documented():
    """The fields by which the reader reads a policy."""
    parts = [part for part in vars(sections).values() if isinstance(part, type) and issubclass(part, DocumentPart)]
    known = {name for part in parts if part is not DocumentPart for name in field_names(part)[0]}
    assert len(known) > 45
    missing = {name for name in known if not re.search(rf"[`.{{ ]{name}[`: ]", LANGUAGE)}
    assert not missing


def test_every_reserved_word_is_documented():
    assert {word for word in RESERVED if f"`{word}`" not in LANGUAGE} == set()


def test_every_code_has_its_row():
    rows = re.findall(
        r"^\| <a id=\"kvp\d+\"></a>(KVP\d+) \| (.*?) \| (.*?) \|$",
        (DOCS / "reference" / "policy-codes.md").read_text(),
        re.MULTILINE,
    )
    assert rows == [(code, entry.title, entry.advice) for code, entry in CODES.items()]


def test_the_cases_of_the_page_pass_on_its_policy():
    table = compile_policy(load_policy(WHOLE, name="example.yaml"), revision=1)
    text = re.search(r"```yaml cases\n(.*?)```", LANGUAGE, re.DOTALL)[1]
    report = run_cases(table, load_cases(text, name="cases.yaml", policy=table.policy))
    assert report.passed, [str(failure) for failure in report.failures]


def test_every_property_has_its_row():
    assert dict(re.findall(r"^\| (ISO-\d+) \| (.*?) \|$", PROOFS, re.MULTILINE)) == PROPERTIES
