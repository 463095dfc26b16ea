"""Packing the driver's code: what is sent, what is left out, what is refused; and how agents unpack and find it."""

from __future__ import annotations

import asyncio
import io
import os
import sys
import tarfile
from pathlib import Path

import pytest

from holdfast.agent.code_directory import CodeDirectory, map_paths
from holdfast.control.working_dir import IgnoreRules, PackedDirectory, find_working_dir, pack_directory
from holdfast.errors import ConfigError, WireError
from holdfast.rendezvous.directory import DirectoryRendezvous
from holdfast.wire.messages import PrepareCode, PrepareFunction


def _write(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)


def _names(packed: PackedDirectory) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(packed.archive)) as archive:
        return archive.getnames()


def test_code_is_packed_without_what_tools_and_runs_leave(tmp_path: Path) -> None:
    _write(tmp_path, "train.py", "lib/__init__.py", "lib/data.json", ".git/config", "lib/__pycache__/a.pyc")
    _write(tmp_path, ".venv/bin/python", "results/run/x", "old/run.json", "old/x", "b/checkpoint_1/.manifest.json")
    packed = pack_directory(tmp_path, [], str(tmp_path / "results"))
    assert _names(packed) == ["train.py", "lib/__init__.py", "lib/data.json"]
    assert packed.root == str(tmp_path)


def test_the_hash_depends_on_the_files_alone(tmp_path: Path) -> None:
    for name in ("one", "two"):
        _write(tmp_path / name, "a.py", "b/c.py")
    os.utime(tmp_path / "one" / "a.py", (1, 1))
    one, two = (pack_directory(tmp_path / name, [], "s3://bucket") for name in ("one", "two"))
    assert one.hash == two.hash
    (tmp_path / "two" / "a.py").write_text("changed")
    assert pack_directory(tmp_path / "two", [], "s3://bucket").hash != one.hash


def test_the_hash_does_not_depend_on_logs_and_the_rendezvous_of_hosts(tmp_path: Path) -> None:
    # A driver that takes over on another host finds what the one before has written there, and agents with zygotes.
    _write(tmp_path, "train.py")
    before = pack_directory(tmp_path, [], "s3://bucket")
    _write(tmp_path, "host1.log", "logs/a.log", "nohup.out", "slurm-17.out")
    rendezvous = DirectoryRendezvous(tmp_path / "rendezvous")
    rendezvous.put("token", b"secret", rendezvous.open_session(10.0))
    assert pack_directory(tmp_path, [], "s3://bucket").hash == before.hash
    (tmp_path / ".gitignore").write_text("!a.log\n")
    assert _names(pack_directory(tmp_path, [], "s3://bucket")) == [".gitignore", "train.py", "logs/a.log"]


def test_gitignore_and_excludes_leave_files_out(tmp_path: Path) -> None:
    _write(tmp_path, "a.py", "a.bin", "keep.bin", "data/x", "sub/data/y", "sub/only.txt", "only.txt", "out/deep/z")
    (tmp_path / ".gitignore").write_text("# comment\n\n*.bin\n!keep.bin\ndata/\n/only.txt\n")
    packed = pack_directory(tmp_path, ["out/deep"], "/elsewhere")
    assert _names(packed) == [".gitignore", "a.py", "keep.bin", "sub/only.txt"]


@pytest.mark.parametrize(
    ("pattern", "path", "is_directory", "ignored"),
    [
        ("*.bin", "a/b.bin", False, True),
        ("data/", "data", False, False),
        ("data/", "x/data", True, True),
        ("a/b", "a/b", False, True),
        ("a/b", "x/a/b", False, False),
        ("/a", "a", False, True),
        ("/a", "x/a", False, False),
        ("**/a", "x/y/a", False, True),
        ("**/a/b", "a/b", False, True),
        ("#a", "#a", False, False),
        ("", "a", False, False),
    ],
)
def test_patterns_mean_what_they_mean_in_a_gitignore(
    pattern: str, path: str, is_directory: bool, ignored: bool
) -> None:
    assert IgnoreRules([pattern]).ignores(path, is_directory=is_directory) is ignored


def test_links_are_followed_to_files_only_and_what_is_no_file_is_left_out(tmp_path: Path) -> None:
    _write(tmp_path, "elsewhere/a.py")
    root = tmp_path / "root"
    root.mkdir()
    (root / "link.py").symlink_to(tmp_path / "elsewhere" / "a.py")
    (root / "dangling").symlink_to("nowhere")
    (root / "directory").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(root / "pipe")
    assert _names(pack_directory(root, [], "")) == ["link.py"]


def test_a_directory_above_the_limit_is_refused_with_what_is_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_WORKING_DIR_LIMIT_BYTES", str(1 << 20))
    _write(tmp_path, "a.py")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "large").write_bytes(bytes(2 << 20))
    with pytest.raises(ConfigError, match=r"has 2\.0 MiB, more than the 1\.0 MiB .* the most in data \(2\.0 MiB\)"):
        pack_directory(tmp_path, [], "")
    assert _names(pack_directory(tmp_path, ["data/"], "")) == ["a.py"]
    monkeypatch.setenv("HOLDFAST_WORKING_DIR_LIMIT_BYTES", "much")
    with pytest.raises(ConfigError, match="must be a whole number of bytes, not 'much'"):
        pack_directory(tmp_path, [], "")


def test_which_directory_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_working_dir("") is None
    assert find_working_dir(str(tmp_path)) == tmp_path
    with pytest.raises(ConfigError, match=r'"working_dir"\] must be a directory of this machine'):
        find_working_dir(str(tmp_path / "missing"))
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__file__", str(tmp_path / "script.py"), raising=False)
    monkeypatch.setattr(main, "__spec__", None)
    assert find_working_dir(None) == tmp_path
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(main, "__file__", pytest.__file__)
    assert find_working_dir(None) == tmp_path, "a command runs the user's code"
    monkeypatch.setattr(main, "__file__", str(tmp_path / "other" / "site-packages" / "command" / "__main__.py"))
    assert find_working_dir(None) == tmp_path, "a command of an environment that this one is layered on"
    monkeypatch.delattr(main, "__file__")
    assert find_working_dir(None) == tmp_path


def test_the_driver_of_a_package_sends_what_the_package_lies_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Spec:
        name = "package.train"

    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__file__", str(tmp_path / "package" / "train.py"), raising=False)
    monkeypatch.setattr(main, "__spec__", Spec)
    assert find_working_dir(None) == tmp_path


@pytest.mark.parametrize("filters", [True, False], ids=["tarfile has filters", "Python before 3.11.4"])
def test_code_is_unpacked_and_first_on_the_search_path(
    tmp_path: Path, filters: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not filters:
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
    _write(tmp_path / "driver", "train.py", "lib/module.py")
    packed = pack_directory(tmp_path / "driver", [], "")

    async def receive() -> CodeDirectory:
        order = PrepareCode(hash=packed.hash, size_bytes=len(packed.archive), root=packed.root)
        code = CodeDirectory(order, tmp_path / "code")
        half = len(packed.archive) // 2
        code.add(packed.archive[:half])
        assert not code.is_whole
        code.add(packed.archive[half:])
        await code.whole
        code.add(b"again")
        return code

    code = asyncio.run(receive())
    assert (tmp_path / "code" / "lib" / "module.py").read_text() == "lib/module.py"
    order = PrepareFunction(
        key="k", function=b"", sys_path=[str(tmp_path / "driver")], environment={"DIRECTORY": str(tmp_path / "driver")}
    )
    localized = code.localize(order)
    assert (localized.sys_path, localized.environment) == ([str(code.path)], {"DIRECTORY": str(code.path)})


def test_code_that_arrives_damaged_is_refused(tmp_path: Path) -> None:
    async def receive() -> None:
        code = CodeDirectory(PrepareCode(hash="0" * 64, size_bytes=3, root="/r"), tmp_path / "code")
        code.add(b"abc")
        with pytest.raises(WireError, match="could not be unpacked: its hash"):
            await code.whole

    asyncio.run(receive())
    assert not (tmp_path / "code").exists()


def test_paths_of_the_driver_are_mapped_or_left_out(tmp_path: Path) -> None:
    paths = ["/driver/project/src", "/driver/project", "/driver/projects", "/nowhere/at/all", str(tmp_path)]
    mapped = map_paths(paths, "/driver/project", Path("/here"))
    assert mapped == ["/here", "/here/src", str(tmp_path)]
