"""The manifest of `deploy/kuberay` against the fields that RayJob, Pod and the GCSFuse driver have.

No published schema is here to validate with: the definition of RayJob alone has 1.2 MB. `_RAY_JOB` is written after it,
for the fields that the manifest uses and those nearest to them, and refuses all others. It comes from
- ray-project/kuberay, helm-chart/kuberay-operator/crds/ray.io_rayjobs.yaml at 037e91b, and the types that it is made
  from: ray-operator/apis/ray/v1/rayjob_types.go at 0057210 and raycluster_types.go at 026f143;
- the types Pod, Container and Volume of Kubernetes' core/v1;
- GoogleCloudPlatform/gcs-fuse-csi-driver, pkg/webhook/config.go at 01870a9, for the annotations.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

_DEPLOY = Path(__file__).parents[2] / "deploy" / "kuberay"
_MANIFEST = _DEPLOY / "ray-job.pytorch-image-classifier.yaml"
_SCRIPT = _DEPLOY / "fine-tune-pytorch-resnet-image-classifier.py"
_QUANTITY = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?\d+)?")


class Fields(dict[str, Any]):
    """A mapping with these fields and no others; a name that ends with ! is required."""


class Each:
    """A list of such values, or a mapping from any string to them."""

    def __init__(self, kind: type, value: Any) -> None:
        self.kind, self.value = kind, value


def _quantity(value: object) -> bool:
    return type(value) is int or (isinstance(value, str) and _QUANTITY.fullmatch(value) is not None)


def _one_of(*values: str) -> Callable[[object], bool]:
    return lambda value: value in values


_STRINGS = Each(dict, str)
_QUANTITIES = Each(dict, _quantity)
_CONTAINER = Fields(
    {
        "name!": str,
        "image": str,
        "imagePullPolicy": _one_of("Always", "IfNotPresent", "Never"),
        "command": Each(list, str),
        "args": Each(list, str),
        "env": Each(list, Fields({"name!": str, "value": str, "valueFrom": dict})),
        "ports": Each(list, Fields({"containerPort!": int, "name": str, "protocol": _one_of("TCP", "UDP", "SCTP")})),
        "resources": Fields({"limits": _QUANTITIES, "requests": _QUANTITIES}),
        "volumeMounts": Each(list, Fields({"name!": str, "mountPath!": str, "readOnly": bool, "subPath": str})),
        "lifecycle": dict,
        "securityContext": dict,
    }
)
_CSI = Fields({"driver!": str, "readOnly": bool, "fsType": str, "volumeAttributes": _STRINGS})
_POD_TEMPLATE = Fields(
    {
        "metadata": Fields({"annotations": _STRINGS, "labels": _STRINGS, "name": str, "namespace": str}),
        "spec": Fields(
            {
                "containers!": Each(list, _CONTAINER),
                "serviceAccountName": str,
                "nodeSelector": _STRINGS,
                "tolerations": Each(
                    list,
                    Fields(
                        {
                            "key": str,
                            "operator": _one_of("Exists", "Equal"),
                            "value": str,
                            "effect": _one_of("NoSchedule", "PreferNoSchedule", "NoExecute"),
                            "tolerationSeconds": int,
                        }
                    ),
                ),
                "volumes": Each(
                    list,
                    Fields({"name!": str, "csi": _CSI, "emptyDir": Fields({"medium": str, "sizeLimit": _quantity})}),
                ),
                "terminationGracePeriodSeconds": int,
            }
        ),
    }
)
_GROUP = {"rayStartParams!": _STRINGS, "template!": _POD_TEMPLATE}
_COUNTS = {"replicas": int, "minReplicas": int, "maxReplicas": int, "numOfHosts": int}
_RAY_JOB = Fields(
    {
        "apiVersion!": _one_of("ray.io/v1"),
        "kind!": _one_of("RayJob"),
        "metadata!": Fields({"name": str, "generateName": str, "namespace": str, "labels": _STRINGS}),
        "spec!": Fields(
            {
                "activeDeadlineSeconds": int,
                "backoffLimit": int,
                "entrypoint": str,
                "runtimeEnvYAML": str,
                "shutdownAfterJobFinishes": bool,
                "submissionMode": _one_of("K8sJobMode", "HTTPMode", "InteractiveMode"),
                "suspend": bool,
                "ttlSecondsAfterFinished": int,
                "submitterPodTemplate": _POD_TEMPLATE,
                "rayClusterSpec": Fields(
                    {
                        "rayVersion": str,
                        "enableInTreeAutoscaling": bool,
                        "headGroupSpec!": Fields({"serviceType": str, **_GROUP}),
                        "workerGroupSpecs": Each(list, Fields({"groupName!": str, **_COUNTS, **_GROUP})),
                    }
                ),
            }
        ),
    }
)
_ANNOTATIONS = {"gke-gcsfuse/volumes": _one_of("true")} | {
    f"gke-gcsfuse/{resource}-{bound}": _quantity
    for resource in ("cpu", "memory", "ephemeral-storage")
    for bound in ("request", "limit")
}


def _faults(value: Any, schema: Any, path: str = "") -> Iterator[str]:
    """What the API server would refuse or drop, by its path."""
    if isinstance(schema, Fields):
        names = {name.rstrip("!"): inner for name, inner in schema.items()}
        if not isinstance(value, dict):
            yield f"{path} is no mapping"
            return
        yield from (f"{path}.{name} is unknown" for name in value.keys() - names.keys())
        yield from (f"{path}.{name[:-1]} is missing" for name in schema if name[-1] == "!" and name[:-1] not in value)
        for name in value.keys() & names.keys():
            yield from _faults(value[name], names[name], f"{path}.{name}")
    elif isinstance(schema, Each):
        if not isinstance(value, schema.kind):
            yield f"{path} is no {schema.kind.__name__}"
            return
        found: Any = value
        items: Iterable[tuple[Any, Any]] = found.items() if schema.kind is dict else enumerate(found)
        for key, inner in items:
            yield from _faults(inner, schema.value, f"{path}.{key}")
    elif not (type(value) is schema if isinstance(schema, type) else schema(value)):
        yield f"{path} is {value!r}"


def _manifest() -> dict[str, Any]:
    # Through a copy: parts that the file names twice are one object here.
    found: dict[str, Any] = copy.deepcopy(yaml.safe_load(_MANIFEST.read_text()))
    return found


def _pods(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = manifest["spec"]["rayClusterSpec"]
    return [cluster["headGroupSpec"]["template"], *(group["template"] for group in cluster["workerGroupSpecs"])]


def _gcsfuse_faults(pod: dict[str, Any]) -> Iterator[str]:
    """Why the bucket would not be mounted at the script's storage path, with the rights that Ray's user needs."""
    annotations = {key: one for key, one in pod["metadata"]["annotations"].items() if key.startswith("gke-gcsfuse/")}
    if "gke-gcsfuse/volumes" not in annotations:
        yield "no sidecar is asked for"
    for key, value in annotations.items():
        if key not in _ANNOTATIONS or not _ANNOTATIONS[key](value):
            yield f"{key}: {value}"
    (volume,) = (one for one in pod["spec"]["volumes"] if "csi" in one)
    if volume["csi"]["driver"] != "gcsfuse.csi.storage.gke.io":
        yield "driver"
    if volume["csi"]["volumeAttributes"]["bucketName"] != "GCS_BUCKET":
        yield "bucketName"
    options = volume["csi"]["volumeAttributes"]["mountOptions"].split(",")
    if not {"implicit-dirs", "uid=1000", "gid=100", "metadata-cache:ttl-secs:1"} <= set(options):
        yield "mountOptions"
    (storage_path,) = re.findall(r'^STORAGE_PATH = "(.+)"$', _SCRIPT.read_text(), re.M)
    for container in pod["spec"]["containers"]:
        if {"name": volume["name"], "mountPath": storage_path} not in container["volumeMounts"]:
            yield "volumeMounts"
    if pod["spec"].get("serviceAccountName") != "pytorch-distributed-training":
        yield "serviceAccountName"


def test_the_manifest_has_only_fields_of_a_ray_job() -> None:
    assert list(_faults(_manifest(), _RAY_JOB)) == []


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("spec.entryPoint", "python x.py", ".spec.entryPoint is unknown"),
        ("spec.backoffLimit", "3", ".spec.backoffLimit is '3'"),
        ("spec.rayClusterSpec.headGroupSpec.rayStartParams.num-cpus", 0, "rayStartParams.num-cpus is 0"),
        ("spec.rayClusterSpec.headGroupSpec.template.metadata.annotations.gke-gcsfuse/volumes", True, "is True"),
        ("spec.rayClusterSpec.headGroupSpec.template.spec.serviceAccount_name", "x", "serviceAccount_name is unknown"),
        ("spec.rayClusterSpec.headGroupSpec", {"template": {}}, ".headGroupSpec.rayStartParams is missing"),
    ],
)
def test_a_wrong_field_of_the_manifest_is_found(path: str, value: object, told: str) -> None:
    manifest = _manifest()
    *parents, last = path.split(".")
    inner = manifest
    for name in parents:
        inner = inner[name]
    inner[last] = value
    assert any(one.endswith(told) for one in _faults(manifest, _RAY_JOB))


def test_every_pod_mounts_the_bucket_where_the_script_stores() -> None:
    assert [list(_gcsfuse_faults(pod)) for pod in _pods(_manifest())] == [[], []]


@pytest.mark.parametrize("name", ["gke-gcsfuse/volume", "gke-gcsfuse/cpu-limits", "gke-gcsfuse/memory-limit"])
def test_a_wrong_annotation_is_found(name: str) -> None:
    pod = _pods(_manifest())[0]
    pod["metadata"]["annotations"][name] = "much"
    assert list(_gcsfuse_faults(pod)) == [f"{name}: much"]


def test_the_entrypoint_is_the_script_where_the_image_has_it() -> None:
    manifest = _manifest()
    (directory,) = re.findall(
        rf"^COPY deploy/kuberay/{_SCRIPT.name} (\S+/)$", (_DEPLOY / "Dockerfile").read_text(), re.M
    )
    assert manifest["spec"]["entrypoint"] == f"python {directory}{_SCRIPT.name}"
    (version,) = re.findall(r"^FROM rayproject/ray:([\d.]+)-", (_DEPLOY / "Dockerfile").read_text(), re.M)
    assert manifest["spec"]["rayClusterSpec"]["rayVersion"] == version
    assert {one["image"] for pod in _pods(manifest) for one in pod["spec"]["containers"]} == {"HOLDFAST_IMAGE"}


def test_there_is_a_node_with_a_gpu_for_every_worker() -> None:
    cluster = _manifest()["spec"]["rayClusterSpec"]
    (group,) = cluster["workerGroupSpecs"]
    (container,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    settings = {one["name"]: one["value"] for one in container["env"]}
    assert group["replicas"] == int(settings["NUM_WORKERS"])
    assert group["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == settings["USE_GPU"]
