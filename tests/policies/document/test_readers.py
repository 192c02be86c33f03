"""Policies, identity documents, key files, settings and salts use one reader, which refuses the same YAML in each."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from kvcustody.errors import CustodyError
from kvcustody.governance.credentials.api_key_file import read_keys
from kvcustody.governance.service.settings import load_service_settings
from kvcustody.governance.settings import load_settings
from kvcustody.integrations.events.command import read_salts
from kvcustody.integrations.identity.identity_document import load_identity
from kvcustody.policies import library
from kvcustody.policies.reading.load_policy import load_policy

POLICY = library.source("single-org")
IDENTITY = "schema: kvcustody/identity@1\napi_keys: {path: keys.yaml}\n"
KEYS = f"schema: kvcustody/api-keys@1\nsalt: '{'0a' * 32}'\n"
SETTINGS = "worker_name: w\n"


def _policy(path: Path) -> object:
    return load_policy(path.read_bytes(), name=str(path))


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "policy": (POLICY, _policy),
    "identity": (IDENTITY, load_identity),
    "keys": (KEYS, read_keys),
    "settings": (SETTINGS, load_settings),
    "service": ("", load_service_settings),
    "salts": ("acme: [s]\n", read_salts),
}
BOMB = "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\nd: &d [*c, *c]\n"
ODD: dict[str, tuple[str, str]] = {
    "off": ("odd: off\n", "KVP201"),
    "yes": ("odd: Yes\n", "KVP201"),
    "octal": ("odd: 010\n", "KVP204"),
    "sexagesimal": ("odd: 1:30\n", "KVP202"),
    "hexadecimal": ("odd: 0x10\n", "KVP204"),
    "infinite": ("odd: .inf\n", "KVP203"),
    "repeated": ("odd: 1\nodd: 2\n", "KVP111"),
    "merge key": ("odd: {<<: {a: 1}}\n", "KVP110"),
    "anchors and aliases": (BOMB, "KVP107"),
    "tag": ("odd: !!python/object/apply:os.system [ls]\n", "KVP109"),
    "tab": ("odd:\n\t- 1\n", "KVP103"),
    "second document": ("---\nodd: 1\n", "KVP105"),
    "hidden": ("odd: 'a\u202eb'\n", "KVP104"),
    "deep": ("odd: " + "[" * 100 + "]" * 100 + "\n", "KVP113"),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("odd", ODD)
def test_every_reader_refuses_it_with_its_place(tmp_path: Path, reader: str, odd: str) -> None:
    head, read = READERS[reader]
    if not head and odd == "second document":
        head = "listen: 'unix:a'\n"
    text, code = ODD[odd]
    path = tmp_path / "odd.yaml"
    path.write_text(head + text, encoding="utf-8")
    path.chmod(0o600)
    with pytest.raises(CustodyError) as caught:
        read(path)
    message = str(caught.value)
    assert code in message
    place = rf"{re.escape(str(path))}:(\d+):\d+: {code} " if reader != "salts" else r"line (\d+): .*KVP"
    found = re.search(place, message)
    assert found is not None, message
    assert int(found[1]) > head.count("\n")
    if reader != "salts":  # its messages quote nothing
        assert message.count("; ") >= 1, "what to do is said"


@pytest.mark.parametrize("reader", [name for name, (head, _) in READERS.items() if head])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_every_reader_takes_its_own_document_with_a_byte_order_mark_or_without(
    tmp_path: Path, reader: str, mark: str
) -> None:
    head, read = READERS[reader]
    path = tmp_path / "sound.yaml"
    path.write_text(mark + head, encoding="utf-8")
    path.chmod(0o600)
    assert read(path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("worker_name: w\nblock_tokens: 0\n", "2:1: `block_tokens` input should be greater"),
        ("worker_name: w\nblock_token: 16\n", "2:1: `block_token` unknown setting"),
    ],
)
def test_a_settings_value_of_the_wrong_type_is_named_with_its_place(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    with pytest.raises(CustodyError) as caught:
        load_settings(path)
    assert f"{path}:{says}" in str(caught.value)
    with pytest.raises(CustodyError) as caught:
        load_settings(path, block_tokens=-1)
    assert f"{path}:2:1: `block_tokens`" not in str(caught.value), "the argument is wrong, not the file"
