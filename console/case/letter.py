"""The letter to the data subject, as text, HTML and PDF, from a case and a template.

    letter = write_letter(case, LetterDetails("answer", addressee, sender, "2026-11-26"))
    render(letter, "pdf")

1. Whom it is addressed to is given for this letter alone: no name is in the case, and none is kept. The digest of what
   was sent is the step `answer`'s.
2. The same case, details and template give the same bytes.
3. A template is Jinja2 in a sandbox: a line that begins with `# ` is a heading, a blank line divides paragraphs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import SandboxedEnvironment

from kvcustody.errors import ConfigError

LETTER_KINDS = ("answer", "extension", "identity")
LETTER_FORMS = {"text": "letter.txt", "html": "letter.html", "pdf": "letter.pdf"}
GROUNDS = {
    "11(2)": "we cannot tell that it is about you",
    "12(2)": "we cannot tell that it is about you",
    "12(5)": "the request is manifestly unfounded or excessive",
    "15(4)": "a copy would affect the rights and freedoms of others",
    "17(3)": "the law lets us keep it",
    "17(3)(a)": "it is needed for the freedom of expression and information",
    "17(3)(b)": "the law obliges us to keep it, or a public task needs it",
    "17(3)(c)": "it is needed in the public interest of public health",
    "17(3)(d)": "it is needed for archiving, research or statistics that erasure would seriously impair",
    "17(3)(e)": "it is needed for legal claims",
}


class LetterDetails(NamedTuple):
    """The details of a letter that its case lacks; `addressee` and `sender` may have several lines."""

    kind: str
    addressee: str
    sender: str
    date: str
    template: str = ""


class LetterSection(NamedTuple):
    """A heading and the paragraphs under it."""

    title: str
    paragraphs: tuple[str, ...]


class Letter(NamedTuple):
    """A letter's content, whatever its format."""

    title: str
    subtitle: str
    sections: tuple[LetterSection, ...]
    footer: str

    def text(self) -> bytes:
        """Return the letter as plain text: headings underlined, paragraphs separated."""
        parts = [self.title, self.subtitle]
        for section in self.sections:
            parts += [f"{section.title}\n{'-' * len(section.title)}", *section.paragraphs]
        return "\n\n".join((*parts, self.footer, "")).encode()


def write_letter(case: dict[str, Any], details: LetterDetails) -> Letter:
    """Return a case's letter.

    Raises:
        ConfigError: the case is not ready for this letter, or the template is wrong.
    """
    sections = _sections(_rendered(case, details))
    subtitle = f"{details.date}. Reference {case['case_id'][:12]}."
    head = LetterSection("From and to", tuple(_lines(details)))
    footer = "What this letter says of our records can be checked against their signed ledger."
    return Letter("About your request", subtitle, (head, *sections), footer)


def _lines(details: LetterDetails) -> list[str]:
    return [", ".join(text.split("\n")) for text in (details.sender.strip(), details.addressee.strip()) if text]


def _rendered(case: dict[str, Any], details: LetterDetails) -> str:
    counted = [step for step in case["steps"] if not step["void"]]
    last = {step["step"]: step for step in counted}
    needed = {"answer": "decide", "extension": "extend", "identity": "identity"}.get(details.kind)
    if needed is None:
        raise ConfigError(f"a letter is one of: {', '.join(LETTER_KINDS)}")
    if needed not in last:
        raise ConfigError(f"the case has no step `{needed}` yet for this letter to report")
    source = details.template or (Path(__file__).parent / "letter.txt").read_text(encoding="utf-8")
    environment = SandboxedEnvironment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    try:
        return environment.from_string(source).render(
            case=case,
            kind=details.kind,
            reason=last[needed]["reason"],
            ground=last[needed]["ground"] if needed == "decide" else "",
            grounds=GROUNDS,
            exemptions=[step for step in counted if step["step"] == "exempt"],
            exports=[step for step in counted if step["step"] == "export"],
            told=[step for step in counted if step["step"] == "recipient"],
        )
    except (TemplateError, KeyError) as problem:
        raise ConfigError(f"the letter's template: {problem}") from None


def _sections(text: str) -> tuple[LetterSection, ...]:
    sections: list[tuple[str, list[str]]] = []
    for line in text.split("\n"):
        if line.startswith("# "):
            sections.append((line[2:].strip(), [""]))
        elif not sections:
            if line.strip():
                raise ConfigError("the letter's template: it begins with a heading (`# `)")
        elif line.strip():
            sections[-1][1][-1] = f"{sections[-1][1][-1]} {line.strip()}".strip()
        elif sections[-1][1][-1]:
            sections[-1][1].append("")
    return tuple(LetterSection(title, tuple(text for text in paragraphs if text)) for title, paragraphs in sections)
