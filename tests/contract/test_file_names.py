"""File names that break tools: each is committed, listed and restored with its bytes, on files and on S3 servers."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from tests.contract.servers import Server

from holdfast.checkpoint.catalog import Catalog
from holdfast.checkpoint.commit import commit_directory
from holdfast.checkpoint.restore import fetch
from holdfast.checkpoint.verify import verify
from holdfast.errors import StorageError
from holdfast.storage.locate import open_store
from holdfast.storage.store import Store

_ODD = "".join(map(chr, range(0x20, 0x7F))).replace("/", "")
_WORDS = """
 a b  two  blanks
-rf --help -
..x ...  x. x.. .x .hidden x..y
%20 %2F %00 100% %
a?b ?query=1 a#b #frag a&b=c
a+b a=b a:b a;b a,b a@b a~b a!b a$b a*b a|b a^b a`b
'quoted' "quoted" it's (a) [b] {c} <d> \\back\\slash
$(reboot) ${HOME} `id` ;ls &&true
CON nul.txt aux. COM1
.manifest.json.bak .reserved.jsonx manifest.json .tmp .tmp- .nfs0001 .DS_Store .git
checkpoint_000000 epochs journal run.json
ünïcödé 日本語 العربية עברית 한국어 ภาษาไทย Ελληνικά
😀 👩‍👩‍👧 🏳️‍🌈 é ﬁ ß İ Å
0 00 -1 1e5 NaN null true None __init__.py __pycache__
a.tar.gz a.b.c.d UPPER upper Upper
"""
NAMES = sorted(
    {
        *_WORDS.split(),
        *(f"x{one}y" for one in _ODD),
        " leading",
        "trailing ",
        "two  blanks",
        unicodedata.normalize("NFC", "café"),
        unicodedata.normalize("NFD", "café"),
        "dotless\u0131",
        "script\U0001d4b3",
        "right\u202eleft",
        "zero\u200bwidth",
        "\ufeffbom",
        "private\ue000use",
        "last\U0010ffff",
        "long" + "x" * 240,
        "wide" + "語" * 80,
        "/".join(["deep"] * 12 + ["file"]),
        "dir with blank/..x/%2e%2e/file?",
        "ends in dot./file.",
    }
)
CONTROLS = ["tab\tbed", "line\nfeed", "carriage\rreturn", "escape\x1b[31mred", "bell\x07", "delete\x7f"]
"""Object stores do not take these, or cannot list them: their listings are XML."""


@pytest.fixture(params=["posix", "moto", "rclone"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    if request.param == "posix":
        yield open_store(tmp_path / "store")
        return
    server: Server = request.getfixturevalue(request.param)
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    found = open_store(server.uri(server.new_bucket(), "runs"))
    yield found
    found.close()


def test_odd_file_names_are_committed_listed_and_restored(store: Store, tmp_path: Path) -> None:
    assert len(NAMES) > 150
    names = sorted(NAMES + CONTROLS) if store.local_root is not None else NAMES
    _write(tmp_path / "source", names)
    committed = commit_directory(store, tmp_path / "source")
    assert [file.path for file in committed.files] == names
    assert Catalog(store).committed() == [committed]
    assert {entry.key.partition("/")[2] for entry in store.list(committed.name)} >= set(names)
    assert verify(store, deep=True).intact
    fetch(store, committed, tmp_path / "restored")
    for name in names:
        assert (tmp_path / "restored" / name).read_bytes() == name.encode(), name


@pytest.mark.parametrize("name", CONTROLS)
def test_control_characters_are_refused_by_object_stores_in_one_sentence(
    moto: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for variable, value in moto.environment.items():
        monkeypatch.setenv(variable, value)
    store = open_store(moto.uri(moto.new_bucket(), "runs"))
    _write(tmp_path / "source", [name, *NAMES[:20]])
    with pytest.raises(StorageError, match=r"no name that object stores take .*: rename the file") as caught:
        commit_directory(store, tmp_path / "source")
    assert quote(name, safe="[") in str(caught.value) or quote(name) in str(caught.value)
    assert str(caught.value).isprintable()
    assert Catalog(store).committed() == []


def _write(directory: Path, names: list[str]) -> None:
    for name in names:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
