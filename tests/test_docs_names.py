"""What the pages name is there: variables, files, modules, commands and their options, and figures of kept results."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from kvcustody.console.command_table import every_command
from kvcustody.extensions import POINTS
from kvcustody.governance import settings
from kvcustody.governance.service.settings import ServiceSettings

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *(ROOT / name / "README.md" for name in ("benchmarks", "integrations", "tests/engines")),
]
ROOMS = (
    *("allocator", "audit", "benchmarks", "console", "docs", "examples", "governance", "integrations", "lab"),
    *("kernels", "migrations", "packaging", "policies", "testkit", "tests", ".ci"),
)
FILES = frozenset(path.relative_to(ROOT).as_posix() for room in ROOMS for path in (ROOT / room).rglob("*")) | frozenset(
    ROOMS
)
NOT_OURS = re.compile(
    r"verify_kvcustody\.py$"  # in an export
    r"|^_custom_ops\.py$|^tests/v1/core/"  # of vLLM
    r"|ENGINE|NAME|^_events\.py$"  # a reader's own
)
VARIABLES = (
    {settings.PREFIX + name.upper() for name in settings.Settings.model_fields}
    | {settings.SERVICE_PREFIX + name.upper() for name in ServiceSettings.model_fields}
    | settings._READ_ELSEWHERE
    | {"KVCUSTODY_SERVICE", "KVCUSTODY_SERVICE_HOST", "KVCUSTODY_PORT_8080_TCP"}  # docs/reference/settings.md
)
COMMANDS: dict[str, Any] = dict(every_command())
GROUPS = {" ".join(name.split()[:count]) for name in COMMANDS for count in range(1, len(name.split()))}


def commands(text: str) -> Iterator[str]:
    """Each call of `kvcustody` in code, without what follows it in a shell."""
    blocks = re.findall(r"^```(?:console|bash|sh|text)?\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    blocks += re.findall(r"^ {4}\S.*$", text, re.MULTILINE) + re.findall(r"`([^`\n]+)`", text)
    for block in blocks:
        for line in block.replace("\\\n", " ").splitlines():
            for call in re.findall(r"(?:^ *(?:\$ )?|/|[|&] )kvcustody ([a-z][^|;&#`]*)", line):
                yield call.strip()


def unknown_of_command(call: str) -> str:
    """What of a call is no command or option of ours; empty if all is."""
    words = re.findall(r"[^\s'\"]+", call)
    command = next((" ".join(words[:n]) for n in (3, 2, 1) if " ".join(words[:n]) in COMMANDS), None)
    if command is None:  # a group by itself, or with what is no word of a command
        deepest = [" ".join(words[:n]) for n in (2, 1) if " ".join(words[:n]) in GROUPS]
        after = words[len(deepest[0].split()) :] if deepest else words
        return "" if deepest and not (after and re.fullmatch(r"[a-z][a-z-]+", after[0])) else call
    options = {"-h", "--help"}
    options |= {one for given in COMMANDS[command].params for one in (*given.opts, *given.secondary_opts)}
    named = [re.split(r"[=,.)]", word)[0] for word in words if re.match(r"--?[a-z]", word)]
    return " ".join(one for one in named if one not in options)


def missing_files(text: str) -> list[str]:
    """Files and folders that are named and are not there. A table may say in its head where its files lie."""
    missing, base = [], ""
    for line in text.splitlines():
        head = re.match(r"\|.*shown (?:by|with) `([\w/]+/)` *\|", line)
        base = head[1] if head else base if line.startswith("|") else ""
        for name in re.findall(r"`([\w.*/-]+(?:\.py|\.sh))`", line):
            if NOT_OURS.search(name) is None and not any(_is_there(each) for each in (name, base + name)):
                missing.append(name)
        for name in re.findall(r"(?<![\w./-])((?:tests|benchmarks|testkit|integrations)/[\w./*-]*\w)", line):
            if NOT_OURS.search(name) is None and not _is_there(name):
                missing.append(name)
    return missing


def _is_there(name: str) -> bool:
    if "*" not in name and name in FILES:
        return True
    wanted = re.compile("(^|/)" + re.escape(name.rstrip("/")).replace(r"\*", "[^/]*") + r"(\.py|/|$)")
    return any(wanted.search(path) for path in FILES)


def missing_modules(text: str) -> list[str]:
    """Dotted names below `kvcustody` of which no module says anything."""
    return [
        name
        for name in re.findall(r"(?<![\w./-])kvcustody((?:\.[a-z_]\w*)+)(?=[\s`:.,'\")])", text)
        if not _is_module(name.removeprefix(".").split("."))
    ]


def _is_module(parts: list[str]) -> bool:
    folder = ROOT / "src" / "kvcustody"
    for at, part in enumerate(parts):
        if (folder / part).is_dir():
            folder = folder / part
            continue
        source = next((one for one in (folder / f"{part}.py", folder / "__init__.py") if one.exists()), None)
        words = re.findall(r"\w+", source.read_text(encoding="utf-8")) if source else []
        rest = parts[at + 1 :] if source and source.stem == part else parts[at:]
        return bool(words) and all(one in words for one in rest)
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_a_page_names_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert set(re.findall(r"KVCUSTODY_[A-Z0-9_]*[A-Z0-9]", text)) - VARIABLES == set()
    assert missing_files(text) == []
    assert [one for one in missing_modules(text) if one not in NO_MODULES] == []
    assert [call for call in commands(text) if unknown_of_command(call)] == []


def unlike_its_command(call: str) -> str:
    """What a whole call has too much or too little, by its command's arguments; empty if nothing."""
    words = call.split()
    found = next((" ".join(words[:n]) for n in (3, 2, 1) if " ".join(words[:n]) in COMMANDS), None)
    if found is None:
        return "no command"
    command, given = COMMANDS[found], words[len(found.split()) :]
    try:
        values, extra, _ = command.make_parser(click.Context(command)).parse_args(args=given)
    except click.UsageError as error:
        return str(error)
    lacks = [one.name for one in command.params if one.required and values.get(one.name) is None and not one.envvar]
    shown = {one.metavar or one.name: values[one.name] for one in command.params if one.name in values and one.required}
    other = [
        f"{value} for {name}" for name, value in shown.items() if str(value).isupper() and value not in ("WHY", name)
    ]
    return " ".join([*extra, *lacks, *other])


def test_each_command_of_the_runbook_can_be_typed() -> None:
    text = (ROOT / "docs/how-to/fleet/answer-an-alert.md").read_text(encoding="utf-8")
    calls = [call for call in commands(text) if call != "apikey rotate"]  # named, not spelt out
    assert len(calls) > 10
    assert {call: wrong for call in calls if (wrong := unlike_its_command(call))} == {}
    mistyped = ("coverage --tenant TENANT", "scan show", "scan order WORKER", "audit sink retry NAME", "inbox more")
    assert all(unlike_its_command(call) for call in mistyped), "the control"


# Files of an operator, a plugin's own names, entry point groups.
NO_MODULES = {
    *(".db", ".toml", ".json", ".spill", ".example", ".tenant", ".frontiers"),
    *(point.group.removeprefix("kvcustody") for point in POINTS),
}


def test_what_is_not_there_is_found() -> None:
    """The control of the test above: each kind of name, misspelt."""
    assert missing_files("see `tests/engines/vllm/engine/test_nothing.py`, `tests/architecture/`") == [
        "tests/engines/vllm/engine/test_nothing.py",
        "tests/engines/vllm/engine/test_nothing.py",
    ]
    assert missing_files("| x | shown by `tests/engines/vllm/` |\n| y | `engine/test_gone.py` |") == [
        "engine/test_gone.py"
    ]
    assert missing_modules("`kvcustody.integrations.vllm.nothing`, kvcustody.errors.CustodyError.") == [
        ".integrations.vllm.nothing"
    ]
    told = list(commands("`kvcustody tier lst`\n```\nkvcustody observe --endpnt x \\\n  --policy y\n```\n"))
    assert [unknown_of_command(call) for call in told] == ["--endpnt", "tier lst"]


def anchors(text: str) -> set[str]:
    """The fragments of a page as the repository's web page makes them: ids, and a slug for each heading."""
    slugs: list[str] = []
    for heading in re.findall(
        r"^#+ +(.+)$", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE
    ):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", shown).replace(" ", "-")
        slugs.append(f"{slug}-{slugs.count(slug)}" if slug in slugs else slug)
    return {*slugs, *re.findall(r'\bid="([^"]+)"', text)}


def broken_links(text: str, place: Path) -> list[str]:
    """The links of a page at `place` that lead to no file, or to no anchor of a page."""
    broken = []
    for link in re.findall(r"\]\((?!https?:|mailto:)([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", text)):
        name, _, fragment = link.partition("#")
        target = (place.parent / name).resolve() if name else place
        is_page = target.suffix == ".md" and target.exists()
        if not target.exists() or (
            fragment and is_page and fragment not in anchors(target.read_text(encoding="utf-8"))
        ):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere_in_the_repository(page: Path) -> None:
    """`make docs` checks the site alone: README.md is no page of it, and its anchors differ from the web page's."""
    assert broken_links(page.read_text(encoding="utf-8"), page) == []


def test_a_broken_link_is_found() -> None:
    text = (
        "# One\n[a](how-to/upgrade.md) [b](how-to/gone.md) [c](#kvcustody) [d](#two) "
        "[e](how-to/upgrade.md#gone) `[f](g.md)`\n"
    )
    assert broken_links(text, ROOT / "docs" / "index.md") == ["how-to/gone.md", "#two", "how-to/upgrade.md#gone"]


def kept(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def interval(ratio: dict[str, float]) -> str:
    return f"{ratio['value']:.2f} ({ratio['low']:.2f}–{ratio['high']:.2f})"


def page(name: str) -> str:
    """A page of measurements, as one line: where a line is broken says nothing."""
    text = (ROOT / "docs" / "reference" / "measurements" / f"{name}.md").read_text(encoding="utf-8")
    return " ".join(text.split())


def test_the_page_of_sglang_says_what_was_measured() -> None:
    rows = {"16": "page16", "1": "page1", "1, a model of six million weights": "page1-wide"}
    for row, name in rows.items():
        result = kept(f"sglang-cpu-{name}")
        measures = (result[each] for each in ("scheduler_cpu", "scheduler_cpu_without_scrubs", "tokens_per_second"))
        assert f"| {row} | {' | '.join(map(interval, measures))} |" in page("engines")
    assert f"({kept('sglang-cpu-page1')['scheduler_cpu']['value']:.3f})" in page("engines")


def test_the_page_of_vllm_says_what_was_measured() -> None:
    result, text = kept("vllm-cpu"), page("engines")
    for work in ("churny", "decode"):
        for each in ("ratio", "with_waiting"):
            ratio = result[work][each]
            told = rf"{ratio['value']:.2f} \([^)]*{ratio['low']:.2f}–{ratio['high']:.2f}\)"
            assert re.search(told, text), (work, each)
    ratio = result["throughput"]["ratio"]
    told = f"{ratio['value']:.2f} of plain ({ratio['low']:.2f}–{ratio['high']:.2f}"
    assert told in text and f"{result['throughput']['pairs']} pairs)" in text


def test_the_page_of_lmcache_says_what_was_measured() -> None:
    tuned = kept("lmcache-serde-cpu")["allocators"]["tuned"]
    sealing, opening = (
        [f"{tuned[size][way]:.1f}" for size in ("262144", "1048576", "4194304")] for way in ("seal_ratio", "open_ratio")
    )
    told = f"sealing {sealing[0]}, {sealing[1]} and {sealing[2]} times as fast at 256 KiB, 1 and 4 MiB"
    assert f"{told}, opening {opening[0]}, {opening[1]} and {opening[2]}." in page("engines")


def test_the_page_of_transformers_says_what_was_measured() -> None:
    text = page("engines")
    for work in kept("transformers-cpu")["workloads"].values():
        ratio = work["tokens_per_second"]["ratio"]
        told = rf"{ratio['value']:.2f}\s+\((?:95 %: )?{ratio['low']:.2f}–{ratio['high']:.2f}\)"
        assert re.search(told, text), told
        assert f"{work['control_cpu_per_step']['total_ratio']:.2f}" in text
    for device in ("h200", "h100"):
        lines = kept(f"gpu-{device}")["stages"]["transformers_engine"]["lines"]
        ratios = [f"{line['figures']['ratio']:.2f}" for line in lines if "ratio" in line.get("figures", {})]
        assert f"| {device.upper()} | {' | '.join(ratios)} |" in text
    results = kept("classic-caches-cpu")["results"]
    for kind, made in results["generate"].items():
        bare = results["cache"][kind]
        low, high = made["interval_95"]
        first = f"| `{kind}` | {made['governed_over_plain']:.2f} ({low:.2f}–{high:.2f}) | "
        low, high = bare["interval_95"]
        second = f"{bare['governed_over_plain']:.2f} ({low:.2f}–{high:.2f}) | "
        assert f"{first}{second}{made['open_ms']:.1f} / {made['end_ms']:.1f} |" in text
