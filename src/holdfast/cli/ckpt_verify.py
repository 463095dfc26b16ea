"""`holdfast ckpt verify [--repair]`: is every committed byte what was committed, and what lies around besides?"""

from __future__ import annotations

import re
from typing import Any

import click

from holdfast.checkpoint.catalog import Catalog, Leftover
from holdfast.checkpoint.digest import check_files
from holdfast.checkpoint.process_identity import describe, is_dead
from holdfast.checkpoint.verify import VerifyReport
from holdfast.checkpoint.verify import repair as repair_run
from holdfast.checkpoint.verify import verify as verify_run
from holdfast.cli import exit_codes
from holdfast.cli.output import json_option, print_json, print_line
from holdfast.cli.progress import Meter
from holdfast.cli.uri_args import find, nothing_text
from holdfast.errors import NotFound
from holdfast.storage.store import Store
from holdfast.views.formatting import count_text, iso_time, rough_duration, size_text

__all__ = ["verify"]

_AGE = re.compile(r"([0-9]+(?:\.[0-9]+)?)(s|m|min|h|d)\Z")
_UNIT_S = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


def _age_s(context: click.Context, option: click.Parameter, value: str) -> float:
    """`90s`, `30m`, `24h`, `7d` as seconds."""
    found = _AGE.match(value)
    if found is None:
        raise click.BadParameter(f"{value!r} is no age: write a number with s, m, h or d, such as 24h.")
    return float(found[1]) * _UNIT_S[found[2]]


@click.command(short_help="Check every committed byte; find what crashed writers left.")
@click.argument("uri", metavar="RUN|CHECKPOINT")
@click.option("--shallow", is_flag=True, help="Compare presence and sizes only; do not read the files.")
@click.option("--repair", is_flag=True, help="Remove what crashed writers left, and only that.")
@click.option(
    "--older-than",
    "older_than_s",
    callback=_age_s,
    metavar="AGE",
    default="24h",
    show_default=True,
    help="With --repair: from this age on, a writer that cannot be asked counts as gone.",
)
@json_option
def verify(uri: str, shallow: bool, repair: bool, older_than_s: float, as_json: bool) -> int:
    """Re-hash every file of every committed checkpoint of RUN, or of one CHECKPOINT.

    Exits with 1 if anything is damaged. Leftovers of crashed writers are invisible to readers and do no harm; --repair
    removes those whose writer is certainly gone. Damaged checkpoints and your own files are never touched: `rm` removes
    a damaged checkpoint.
    """
    store, name = find(uri)
    if name is None and not Catalog(store).names() and (store.local_root is None or not store.local_root.is_dir()):
        raise NotFound(f"{store.uri} holds no checkpoints: check the path.")
    with Meter("Verifying") as meter:
        if meter.shown and not shallow:
            meter.expect(_total_bytes(store, name))
        report = _check(store, name, not shallow, meter)
        elapsed_s = meter.elapsed_s
    removed = repair_run(store, report, older_than_s) if repair else []
    if as_json:
        print_json({"uri": store.uri, "deep": not shallow, **_as_json(report), "removed": removed})
    elif name is None and not (report.ok or report.damaged or report.leftovers or report.void):
        print_line(nothing_text(store))
    else:
        _print_findings(report, removed, repair)
        _print_summary(report, meter.done_bytes, elapsed_s, shallow)
    return exit_codes.OK if report.intact else exit_codes.FAILED


def _check(store: Store, name: str | None, deep: bool, meter: Meter) -> VerifyReport:
    found = None if name is None else Catalog(store).read_manifest(name).manifest
    if name is None or found is None or found.void or found.name == name:
        return verify_run(store, None if name is None else [name], deep=deep, on_bytes=meter)
    # Somebody's copy of a checkpoint under another name: no part of any run, but it can be checked all the same.
    problems = check_files(store, found, name=name, deep=deep, on_bytes=meter)
    return VerifyReport(damaged={name: problems}) if problems else VerifyReport(ok=[found])


def _total_bytes(store: Store, name: str | None) -> int:
    return sum(one.size_bytes for one in Catalog(store).committed() if name in (None, one.name))


def _as_json(report: VerifyReport) -> dict[str, Any]:
    return {
        "intact": report.intact,
        "ok": [{"name": one.name, "size_bytes": one.size_bytes, "file_count": len(one.files)} for one in report.ok],
        "damaged": [{"name": name, "problems": problems} for name, problems in report.damaged.items()],
        "leftovers": [
            {
                "name": one.name,
                "size_bytes": one.size_bytes,
                "writer": describe(one.owner.writer) if one.owner else None,
                "created_at": one.owner.created_at if one.owner else None,
                "writer_gone": is_dead(one.owner.writer) if one.owner else None,
            }
            for one in report.leftovers
        ],
        "void": [one.name for one in report.void],
    }


def _print_findings(report: VerifyReport, removed: list[str], repair: bool) -> None:
    lines: list[tuple[str, str, str]] = []
    for one in report.ok:
        lines.append(
            ("ok", one.name, f"{count_text(len(one.files), 'file', grouped=True)}, {size_text(one.size_bytes)}")
        )
    for name, problems in report.damaged.items():
        lines += [("damaged", name, problem) for problem in problems]
    for leftover in report.leftovers:
        if leftover.name not in removed:
            lines.append(("leftover", leftover.name, _leftover_text(leftover, repair)))
    for void in report.void:
        if void.name not in removed:
            lines.append(("void", void.name, "shut before it was committed; no reader sees it"))
    lines += [("removed", name, "") for name in removed]
    width = max((len(name) for _, name, _ in lines), default=0)
    for state, name, details in lines:
        print_line(f"{state:10}{name:{width}}  {details}".rstrip())


def _leftover_text(leftover: Leftover, repair: bool) -> str:
    size = size_text(leftover.size_bytes)
    owner = leftover.owner
    if owner is None:
        return f"{size}, its reservation cannot be read"
    who = f"{size} by {describe(owner.writer)} since {iso_time(owner.created_at)}"
    if repair:
        return f"{who}; kept, since its writer may be at work (--older-than sets from when on it counts as gone)"
    states = {
        True: "its writer is gone; --repair removes it",
        False: "its writer is at work",
        None: "its writer cannot be asked from here",
    }
    return f"{who}; {states[is_dead(owner.writer)]}"


def _print_summary(report: VerifyReport, read_bytes: int, elapsed_s: float, shallow: bool) -> None:
    how = "sizes only" if shallow else f"{size_text(read_bytes)} hashed in {rough_duration(elapsed_s)}"
    parts = [f"{len(report.ok)} ok", f"{len(report.damaged)} damaged"]
    if report.leftovers:
        parts.append(count_text(len(report.leftovers), "leftover", grouped=True))
    print_line(f"{', '.join(parts)} ({how}).")
