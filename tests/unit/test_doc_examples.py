"""What README.md and docs/ show is run: Python blocks, and the commands of console blocks with the output they show.

A page is one story: its blocks run in order, in one empty directory, its Python blocks in one interpreter.

- A `python` block is executed. After `<!-- file: NAME -->` it is written to that file instead, for a command to use.
- In a `console` or `bash` block, lines that begin with `$ ` are commands (`> ` continues one). The lines after one
  are its output, standard error included; a command without any may print what it likes. `...` stands for anything.
  Times, durations, hashes and process numbers may differ, and the page's directory is shown as /home/me. A command may
  fail only where an `error: ` is shown.
- `<!-- not run: reason -->` above a block leaves it out.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
SHOWN_HOME = "/home/me"

_BLOCK = re.compile(
    r"^(?:<!-- (?P<order>not run|file): (?P<what>[^\n]*?) -->\n)?```(?P<language>\w+)\n(?P<text>.*?)^```$", re.M | re.S
)
_ANSWER = re.compile(r"\n?\x1e(\d+)\x1e\n")
_VARYING = (
    (re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d+)?Z?"), "<time>"),
    (re.compile(r"\b\d+(\.\d+)? (s|min)\b"), "<duration>"),
    (re.compile(r"\b[0-9a-f]{64}\b"), "<hash>"),
    (re.compile(r"\bby [\w.-]+:\d+"), "by <process>"),
    (re.compile(r" +"), " "),
)
_INTERPRETER = """
import sys
for line in sys.stdin:
    path = line.strip()
    with open(path) as file:
        exec(compile(file.read(), path, "exec"))
    print("\\x1e", end="", flush=True)
"""


@dataclass(frozen=True)
class Block:
    """One fenced block of a page, and the line on which it stands."""

    line: int
    language: str
    order: str | None
    what: str
    text: str


def blocks_of(page: str) -> list[Block]:
    return [
        Block(page.count("\n", 0, found.start("text")), found["language"], found["order"], found["what"], found["text"])
        for found in _BLOCK.finditer(page)
    ]


class Session:
    """Runs the blocks of one page."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        outside = {key: value for key, value in os.environ.items() if not key.startswith(("HOLDFAST_", "RAY_", "AWS_"))}
        self.environment = {**outside, "HOME": str(directory), "TMPDIR": str(directory), "PATH": paths, "COLUMNS": "80"}
        self._interpreter: subprocess.Popen[str] | None = None

    def run(self, block: Block) -> None:
        if block.order == "not run":
            assert block.what, f"line {block.line}: say why it is not run"
        elif block.order == "file":
            (self.directory / block.what).write_text(block.text)
        elif block.language == "python":
            self._run_python(block)
        elif block.language in ("console", "bash"):
            self._run_shell(block)

    def close(self) -> None:
        if self._interpreter is not None:
            self._interpreter.kill()
            self._interpreter.communicate()

    def _run_python(self, block: Block) -> None:
        if self._interpreter is None:
            self._interpreter = subprocess.Popen(
                [sys.executable, "-c", _INTERPRETER],
                cwd=self.directory,
                env=self.environment,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        assert self._interpreter.stdin is not None and self._interpreter.stdout is not None
        source = self.directory / f".block_{block.line}.py"
        source.write_text(block.text)
        self._interpreter.stdin.write(f"{source}\n")
        self._interpreter.stdin.flush()
        printed = ""
        while not printed.endswith("\x1e"):
            character = self._interpreter.stdout.read(1)
            assert character, f"line {block.line}: the example failed:\n{printed}"
            printed += character

    def _run_shell(self, block: Block) -> None:
        steps = list(commands_of(block.text))
        assert steps, f"line {block.line}: no line begins with `$ `"
        script = "".join(
            f"{command}\n__code=$?\nprintf '\\n\\x1e%d\\x1e\\n' $__code\n(exit $__code)\n" for command, _ in steps
        )
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=self.directory,
            env=self.environment,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        answers = _ANSWER.split(done.stdout.replace(str(self.directory), SHOWN_HOME))
        for (command, shown), printed, code in zip(steps, answers[::2], answers[1::2], strict=False):
            where = f"line {block.line}: $ {command}"
            fails = any(line.startswith("error: ") for line in shown)
            assert fails == (code != "0"), f"{where}\nended with {code}:\n{printed}"
            assert not shown or fits(shown, printed), (
                f"{where}\nshould print:\n{chr(10).join(shown)}\nprinted:\n{printed}"
            )
        assert len(answers) == 2 * len(steps) + 1, f"line {block.line}: the shell stopped early:\n{done.stdout}"


def commands_of(text: str) -> Iterator[tuple[str, list[str]]]:
    """Each command of a console block with the output that is shown for it."""
    command = ""
    shown: list[str] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            if command:
                yield command, shown
            command, shown = line[2:], []
        elif line.startswith("> ") and not shown:
            command += "\n" + line[2:]
        else:
            shown.append(line)
    if command:
        yield command, shown


def fits(shown: list[str], printed: str) -> bool:
    """Whether what was printed is what is shown, but for what must differ from one machine to another."""
    lines = [re.escape(_constant(line)).replace(r"\.\.\.", ".*") for line in shown]
    pattern = "".join("(?:.*\n)*" if line == ".*" else f"{line}\n" for line in lines)
    found = "".join(_constant(line) + "\n" for line in printed.splitlines())
    return re.fullmatch(pattern, found) is not None


def _constant(line: str) -> str:
    for varying, name in _VARYING:
        line = varying.sub(name, line)
    return line.strip()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_blocks_of_the_docs_work(page: Path, tmp_path: Path) -> None:
    session = Session(tmp_path)
    try:
        for block in blocks_of(page.read_text()):
            session.run(block)
    finally:
        session.close()


def test_the_doc_runner_reports_wrong_output(tmp_path: Path) -> None:
    def run(text: str) -> None:
        session = Session(tmp_path)
        try:
            for block in blocks_of(text):
                session.run(block)
        finally:
            session.close()

    run("```python\nx = 1\n```\n\nthen\n\n```python\nassert x == 1\n```\n")
    run("```console\n$ echo one; false || echo 3.25 s\none\n0.1 s\n$ echo\n```\n")
    run("<!-- not run: it fails -->\n```python\n1 / 0\n```\n")
    run("<!-- file: a.py -->\n```python\nprint('from a file')\n```\n\n```bash\n$ python a.py\nfrom a ...\n```\n")
    run("```console\n$ echo 'error: refused'; (exit 4)\nerror: refused\n$ echo $?\n4\n```\n")
    for wrong in (
        "```python\n1 / 0\n```\n",
        "```console\n$ false\n```\n",
        "```console\n$ echo one\ntwo\n```\n",
        "```console\n$ echo one\n```\n```console\n$ echo fine\nerror: never\n```\n",
        "```console\n$ exit 0\n$ echo unreached\n```\n",
        "```console\nno command\n```\n",
    ):
        with pytest.raises(AssertionError):
            run(wrong)
