"""`holdfast launch`: the same command on every host, which find each other through etcd or a shared directory."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import click

from holdfast.cli import exit_codes
from holdfast.errors import ConfigError
from holdfast.launch.options import LaunchOptions, parse_range
from holdfast.linux.network import outward_address
from holdfast.rendezvous.uri import RendezvousUri, parse_rendezvous_uri
from holdfast.wire.join_string import is_loopback_name

__all__ = ["launch"]

_HELP = """Run a script on many hosts.

Start the same command on every host:

\b
  holdfast launch --rdzv 'etcd://etcd:2379/imagenet?min_workers=1&max_workers=3' train.py --epochs 10
  srun holdfast launch --rdzv file:///shared/imagenet train.py

A script that calls fit() is run on every host: one of them is elected to lead, all run workers, another takes over when
the leader dies, and fit() returns the same result everywhere. A script that imports nothing of holdfast is run by
--nproc-per-node workers a host, with torchrun's variables, and again when a host comes or goes.

SCRIPT is a file, or a URI such as s3://bucket/main.py.
"""


@click.command(
    help=_HELP,
    short_help="Run a script on many hosts.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option(
    "--rdzv", "rdzv", required=True, metavar="URI", envvar="HOLDFAST_RDZV", help="etcd://HOST:2379/JOB or file:///DIR."
)
@click.option("--nnodes", metavar="MIN:MAX", help="How many hosts; otherwise min_workers and max_workers of the URI.")
@click.option(
    "--nproc-per-node", "--nproc_per_node", "workers", type=click.IntRange(1), default=1, help="Workers a host; 1."
)
@click.option(
    "--max-restarts",
    "--max_restarts",
    type=click.IntRange(0),
    default=0,
    help="How often workers of a plain script may fail; 0.",
)
@click.option("-m", "--module", "is_module", is_flag=True, help="SCRIPT is a module's name.")
@click.option(
    "--fit", "kind", flag_value="fit", help="The script calls fit(), though its own text imports no holdfast."
)
@click.option(
    "--torchrun", "kind", flag_value="torchrun", help="The script is a plain one, though it imports holdfast."
)
@click.option("--host-id", help="A name unlike any other host's; the host's name.")
@click.option("--advertise", metavar="ADDRESS", help="Where other hosts reach this one; found out otherwise.")
@click.option(
    "--join-timeout",
    type=click.FloatRange(0, min_open=True),
    default=600.0,
    help="Seconds for which a plain script waits for enough hosts; 600.",
)
@click.option(
    "--token-file", type=click.Path(path_type=Path), help="A file with the run secret, of mode 0600, on every host."
)
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def launch(
    rdzv: str,
    nnodes: str | None,
    workers: int,
    max_restarts: int,
    is_module: bool,
    kind: str | None,
    host_id: str | None,
    advertise: str | None,
    join_timeout: float,
    token_file: Path | None,
    script: str,
    arguments: tuple[str, ...],
) -> int:
    from holdfast.launch.command import launch as run

    uri = parse_rendezvous_uri(rdzv)
    min_hosts, max_hosts = _host_range(uri, nnodes)
    options = LaunchOptions(
        rendezvous=uri,
        script=script,
        arguments=arguments,
        is_module=is_module,
        kind=kind,
        host_id=_checked_host_id(host_id),
        address=advertise or _own_address(uri),
        workers_per_host=workers,
        min_hosts=min_hosts,
        max_hosts=max_hosts,
        has_bounds=nnodes is not None or uri.min_workers is not None or uri.max_workers is not None,
        max_restarts=max_restarts,
        join_timeout_s=join_timeout,
        token_file=token_file,
    )
    try:
        return run(options)
    except asyncio.CancelledError:
        return exit_codes.INTERRUPTED


def _host_range(uri: RendezvousUri, nnodes: str | None) -> tuple[int, int]:
    given = uri.min_workers is not None or uri.max_workers is not None
    if nnodes is not None:
        if given:
            raise ConfigError(
                "--nnodes and the URI's min_workers and max_workers say the same thing: give one of them."
            )
        return parse_range(nnodes)
    least = uri.min_workers or 1
    return least, uri.max_workers or max(least, 1)


def _checked_host_id(given: str | None) -> str:
    found = given or socket.gethostname()
    if not found.isprintable() or "/" in found or not found.strip():
        raise ConfigError(f"--host-id {found!r} must be a printable name without a slash.")
    return found


def _own_address(uri: RendezvousUri) -> str:
    """The address from which this host reaches etcd, unless that is on this host."""
    for host, port in uri.endpoints:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        except OSError:
            continue
        for family, kind, _, _, address in found:
            try:
                with socket.socket(family, kind) as probe:
                    probe.connect(address)
                    own = str(probe.getsockname()[0])
            except OSError:
                continue
            if not is_loopback_name(own):
                return own
    return outward_address()
