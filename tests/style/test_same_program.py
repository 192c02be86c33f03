"""The script that shows that a rename changed no program sees what a rename may break."""

from __future__ import annotations

import pytest

from standins.architecture import same_program

BEFORE = '''
"""Old words."""
def f(x, found):
    """Old words."""
    other = x
    for one in found:
        other += one
    return other, "text"
'''


def test_names_docstrings_and_comments_may_differ() -> None:
    after = BEFORE.replace("found", "blocks").replace("one", "block").replace("Old", "New") + "# a comment\n"
    assert same_program.compare(BEFORE, after) == ([], [])


def test_a_text_is_listed() -> None:
    assert same_program.compare(BEFORE, BEFORE.replace('"text"', '"words"')) == ([("text", "words")], [])


@pytest.mark.parametrize(
    ("old", "new"), [("rows.append(1)", "rows.extend(1)"), ("min(rows)", "max(rows)"), ("f(key=1)", "f(name=1)")]
)
def test_a_name_that_is_no_local_variable_is_listed(old: str, new: str) -> None:
    assert same_program.compare(old, new).names and not same_program.compare(old, old).names


def test_control_a_closure_sees_another_variable() -> None:
    before = "def f(a, b):\n    def g():\n        return a, b\n    return g\n"
    assert same_program.compare(before, before.replace("b", "c")) == ([], [])
    with pytest.raises(same_program.Difference):
        same_program.compare(before, before.replace("return a, b", "return b, b"))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("found", "x"),  # two arguments of one name
        ("for one in found", "for x in found"),
        ("other += one", "other += x"),
        ("other += one", "other -= one"),
        ("return other,", "return x,"),
        ('"text"', '"text", 1'),
        ("other = x\n", "other = x\n    other = x\n"),
    ],
)
def test_control_another_program_is_a_difference(old: str, new: str) -> None:
    with pytest.raises(same_program.Difference):
        same_program.compare(BEFORE, BEFORE.replace(old, new))
