"""`kvcustody policy segment add`: what it declares is what a worker recognises, and the text stays where it was."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from kvcustody.clock import SystemClock
from kvcustody.console.main import app
from kvcustody.governance.decisions.segment_matcher import Candidate, SegmentMatcher
from kvcustody.governance.identity.domain_spec import tenant_owner
from kvcustody.governance.keys.keyring import Keyring
from kvcustody.governance.keys.root_key_wrapping import create_root_key, open_wrapping
from kvcustody.governance.keys.wrapped_key_store import FileKeyStore
from kvcustody.lab.replay.run.model_identity import replay_model
from kvcustody.policies import library
from kvcustody.policies.reading.load_policy import load_policy

MODEL = "5f" * 32
IDS = list(range(7_000_001, 7_000_081))
COMMON = ["--id", "agent", "--owner", "acme", "-c", "internal", "--issuer", "apikey"]
SIZED = ["--model", MODEL, "--block-tokens", "16"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    create_root_key(tmp_path / "root.key")
    monkeypatch.setenv("KVCUSTODY_ROOT_KEY_PATH", str(tmp_path / "root.key"))
    monkeypatch.setenv("KVCUSTODY_KEYRING_PATH", str(tmp_path / "keys.json"))
    Path("p.yaml").write_text(library.source("regulated-saas"))
    Path("ids.json").write_text(json.dumps(IDS))
    return tmp_path


def add(*arguments, code=0):
    result = CliRunner().invoke(app, ["policy", "segment", "add", "p.yaml", *map(str, arguments)])
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


def matched(segment, prompt, model=MODEL, block_tokens=16):
    """How many blocks a worker with the same root key and keyring recognises at the start of a prompt."""
    port = open_wrapping("file", Path("root.key"))
    with closing(Keyring(FileKeyStore(Path("keys.json")), port, SystemClock())) as keyring:
        candidate = Candidate(
            segment.id,
            tenant_owner("apikey", segment.owner),
            segment.digest.removeprefix("hmac:"),
            segment.tokens,
        )
        matcher = SegmentMatcher(keyring, [candidate], model=bytes.fromhex(model), block_tokens=block_tokens)
        found = matcher.match(np.asarray(prompt, dtype="<i4").tobytes())
        return 0 if found is None else found.blocks


def the_segment():
    return next(s for s in load_policy(Path("p.yaml").read_text(), name="p").segments if s.id == "agent")


def test_a_worker_recognises_what_was_declared(folder):
    shown = add(*COMMON, *SIZED, "--tokens", "ids.json", "--write")
    assert "covers 64 of 80 tokens, 4 blocks, under key epoch" in shown
    segment = the_segment()
    assert segment.tenants == ("acme",) and segment.expires_us is None
    assert matched(segment, [*IDS, 1, 2, 3]) == 4
    assert matched(segment, [IDS[0] + 1, *IDS[1:]]) == 0
    assert matched(segment, IDS, model="60" * 32) == 0
    content = Path("p.yaml").read_text() + shown
    assert not any(str(id_) in content for id_ in IDS)
    assert content.count("#") >= library.source("regulated-saas").count("#"), "comments stay"


def test_without_write_the_entry_is_printed_and_nothing_changes(folder):
    before = Path("p.yaml").read_text()
    shown = add(*COMMON, *SIZED, "--tokens", "ids.json", "--to", "acme-labs", "--until", "2027-03-31")
    assert Path("p.yaml").read_text() == before and "not written: add --write" in shown
    entry = "\n".join(line for line in shown.splitlines() if line.startswith("  "))
    Path("p.yaml").write_text(before.replace("segments:\n", f"segments:\n{entry}\n", 1))
    assert the_segment().tenants == ("acme", "acme-labs") and matched(the_segment(), IDS) == 4


def test_a_text_with_its_tokenizer(folder):
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[UNK]": 0} | {f"secret{i}": i + 1 for i in range(60)}
    fast = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    fast.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast.save("tokenizer.json")
    Path("prompt.txt").write_text(" ".join(words).replace("[UNK] ", ""))
    identity = {k: v for k, v in asdict_of(replay_model(16)).items() if v is not None}
    Path("model.json").write_text(json.dumps(identity))
    declared = json.loads(
        add(
            *COMMON,
            "--text",
            "prompt.txt",
            "--tokenizer",
            "tokenizer.json",
            "--model",
            "model.json",
            "--to-all",
            "--until",
            "2027-03-31",
            "--write",
            "--json",
        )
    )
    assert declared["segment"]["tenants"] == "*" and declared["written"] and "secret" not in json.dumps(declared)
    model = replay_model(16)
    assert matched(the_segment(), range(1, 61), model.digest.hex(), model.block_tokens) == declared["blocks"] > 0
    assert "secret" not in Path("p.yaml").read_text()


def asdict_of(identity):
    return {
        name: dict(getattr(identity, name)) if name in ("rope", "attention") else getattr(identity, name)
        for name in identity.__dataclass_fields__
        if name != "digest"
    }


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([*COMMON, *SIZED, "--tokens", "short.json"], "too short"),
        ([*COMMON, *SIZED, "--tokens", "words.json"], "is not a JSON list of token ids"),
        ([*COMMON, *SIZED], "give `--text` with `--tokenizer`, or `--tokens`"),
        ([*COMMON, *SIZED, "--text", "ids.json"], "give `--text` with `--tokenizer`, or `--tokens`"),
        ([*COMMON, "--model", MODEL, "--tokens", "ids.json"], "`--block-tokens` is missing"),
        ([*COMMON, "--model", "ids.json", "--tokens", "ids.json"], "is not a model identity"),
        ([*COMMON, *SIZED, "--tokens", "ids.json", "--to", "acme-labs"], "KVP412"),
        ([*COMMON, *SIZED, "--tokens", "ids.json", "--to", "nobody", "--until", "2027-01-01"], "KVP401"),
        ([*COMMON, *SIZED, "--tokens", "ids.json", "--to", "acme-labs", "--to-all"], "not both"),
        (["--id", "x", "--owner", "nobody", "-c", "internal", "--issuer", "a", *SIZED, "--tokens", "ids.json"],
         "is not in policy"),
    ],
)  # fmt: skip
def test_what_is_refused_changes_nothing_and_tells_no_content(folder, arguments, said):
    Path("short.json").write_text(json.dumps(IDS[:23]))
    Path("words.json").write_text(json.dumps(["secret words"]))
    before = Path("p.yaml").read_text()
    shown = add(*arguments, "--write", code=2)
    assert said in shown and "secret" not in shown and "7000001" not in shown
    assert Path("p.yaml").read_text() == before


def test_an_id_is_used_once_and_no_root_key_is_made(folder, monkeypatch):
    add(*COMMON, *SIZED, "--tokens", "ids.json", "--write")
    assert "exists; give the new one another id" in add(*COMMON, *SIZED, "--tokens", "ids.json", code=2)
    monkeypatch.setenv("KVCUSTODY_ROOT_KEY_PATH", "absent.key")
    monkeypatch.setenv("KVCUSTODY_ROOT_KEY_SOURCE", "generated")
    other = [word if word != "agent" else "other" for word in COMMON]
    add(*other, *SIZED, "--tokens", "ids.json", code=2)
    assert not Path("absent.key").exists()
