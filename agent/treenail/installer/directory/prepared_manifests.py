"""The file with all manifests that the stage ``prepare`` writes.

One file, so that a kill leaves all manifests or none. Installers read several documents per file.
"""

import base64
import hashlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from treenail import errors
from treenail.api import component_names, decode, documents, machineconfigpool, machineosconfig
from treenail.config import pullsecret
from treenail.controllers.handover import image_mode, image_mode_field
from treenail.installer.directory import (
    install_config,
    install_files,
    install_manifests,
)

FILE_NAME = "treenail-install-secrets.yaml"
"""It has Secrets: `openshift-install gather` leaves out files whose name says so."""
GENERATED_FILE = f"manifests/{FILE_NAME}"
"""Path below the install directory."""
PULL_SECRET = "treenail-install-pull"  # noqa: S105  # the name of a Secret
PUSH_SECRET = "treenail-install-push"  # noqa: S105  # likewise
FROM_OPTION = "treenail.io/from-option"
"""Annotation of a Secret whose logins an option named: a run without the option keeps them."""
BUILT_IN_POOLS = (machineconfigpool.MASTER, machineconfigpool.WORKER, machineconfigpool.ARBITER)
_HEADER = "# Written by treenail-controller install prepare; SHA-256 of the lines below: "
_ROLE = "machineconfiguration.openshift.io/role"
_OPERATOR = "operator.machineconfiguration.openshift.io/"
_CONTROL_PLANE = "node-role.kubernetes.io/control-plane"


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """A MachineOSConfig to write, from an entry of the field."""

    pool: image_mode.ImageModePool
    containerfile: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class PreparedInputs:
    """Inputs of the manifests."""

    settings: image_mode.ImageMode
    images: Sequence[PreparedImage] = ()
    pools: Sequence[str] = ()
    """Names of built-in pools that no manifest has."""
    has_namespace: bool = False
    is_openshift: bool = True
    has_pull_secret: bool = False
    """True when the manifests have the Secret for pulls."""
    pull_secret: pullsecret.PullSecret = field(default_factory=pullsecret.PullSecret, repr=False)
    push_secret: pullsecret.PullSecret = field(default_factory=pullsecret.PullSecret, repr=False)
    from_options: frozenset[str] = frozenset()
    """Names of the Secrets whose logins come from a file of an option."""


def format_manifests(inputs: PreparedInputs) -> bytes:
    """Return the content of the file; equal inputs give equal bytes."""
    body = "---\n".join(documents.dump_document(document) for document in _build_objects(inputs))
    return f"{_HEADER}{_compute_hash(body.encode())}\n{body}".encode()


def is_unchanged(content: bytes) -> bool:
    """Return whether the file is as `format_manifests` of any version wrote it."""
    header, _, body = content.partition(b"\n")
    return header == f"{_HEADER}{_compute_hash(body)}".encode()


def _compute_hash(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def _build_objects(inputs: PreparedInputs) -> list[decode.Json]:
    has_logins = bool(inputs.pull_secret.credentials)
    objects: list[decode.Json] = []
    if not inputs.has_namespace:
        objects.append(
            {
                "apiVersion": "v1",
                "kind": "Namespace",
                "metadata": {
                    "name": component_names.NAMESPACE,
                    "labels": component_names.PART_OF_LABELS,
                },
            }
        )
    if inputs.images and has_logins:
        objects.append(_build_secret(PULL_SECRET, inputs.pull_secret, inputs))
    if inputs.images and inputs.push_secret.credentials:
        objects.append(_build_secret(PUSH_SECRET, inputs.push_secret, inputs))
    objects += [build_pool(pool, is_openshift=inputs.is_openshift) for pool in inputs.pools]
    names_pull_secret = has_logins or inputs.has_pull_secret
    objects += [
        _build_image_config(image, has_pull_secret=names_pull_secret) for image in inputs.images
    ]
    return [*objects, image_mode_field.build_settings_configmap(inputs.settings)]


def build_pool(name: str, *, is_openshift: bool) -> decode.Json:
    """Return a built-in pool, as the Machine Config Operator has it.

    Nodes of the control plane have the label ``master`` in OpenShift only.
    """
    label = f"node-role.kubernetes.io/{name}"
    if name == machineconfigpool.MASTER and not is_openshift:
        label = _CONTROL_PLANE
    labels = {install_manifests.BUILT_IN_POOL: "", f"pools.{_OPERATOR}{name}": ""}
    if name == machineconfigpool.MASTER:
        labels[f"{_OPERATOR}required-for-upgrade"] = ""
    return {
        "apiVersion": machineconfigpool.API_VERSION,
        "kind": machineconfigpool.KIND,
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "machineConfigSelector": {"matchLabels": {_ROLE: name}},
            "nodeSelector": {"matchLabels": {label: ""}},
        },
    }


def _build_secret(name: str, secret: pullsecret.PullSecret, inputs: PreparedInputs) -> decode.Json:
    content = base64.b64encode(pullsecret.encode_pull_secret(secret)).decode()
    metadata: decode.Json = {
        "name": name,
        "namespace": component_names.NAMESPACE,
        "labels": component_names.PART_OF_LABELS,
    }
    if name in inputs.from_options:
        metadata["annotations"] = {FROM_OPTION: "true"}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata,
        "type": "kubernetes.io/dockerconfigjson",
        "data": {".dockerconfigjson": content},
    }


def _build_image_config(image: PreparedImage, *, has_pull_secret: bool) -> decode.Json:
    spec: decode.Json = {
        "machineConfigPool": {"name": image.pool.name},
        "imageBuilder": {"imageBuilderType": "Job"},
        "renderedImagePushSecret": {"name": PUSH_SECRET},
        "renderedImagePushSpec": image.pool.push_spec,
    }
    if has_pull_secret:
        spec["baseImagePullSecret"] = {"name": PULL_SECRET}
    if image.containerfile:
        entry = {
            "containerfileArch": machineosconfig.ContainerfileArch.NO_ARCH.value,
            "content": image.containerfile,
        }
        spec["containerFile"] = [entry]
    return {
        "apiVersion": machineosconfig.API_VERSION,
        "kind": machineosconfig.KIND,
        "metadata": {"name": image.pool.name},
        "spec": spec,
    }


def require_prepared(directory: install_files.InstallDirectory) -> None:
    """Raise `UsageError` for a directory from which no installation can begin; write nothing.

    A directory with invalid manifests, and one whose installation began, pass: the stage
    ``bootstrap`` reports what is wrong with them where programs wait for it. Raises `FileError`.
    """
    if install_files.InstallFiles().read(directory.state) is not None:
        return
    cause = _find_unprepared_field(directory)
    if not cause:
        manifests, problems = install_manifests.collect_install_manifests(directory.root)
        if not manifests.pools and not problems:
            cause = "its manifests have no MachineConfigPool"
    if cause:
        raise errors.UsageError(
            f"cannot install from {directory.root}: {cause}",
            remedy="complete the directory: treenail-controller install prepare --dir "
            f"{directory.root}",
        )


def _find_unprepared_field(directory: install_files.InstallDirectory) -> str:
    # Without this file the stage would install stock images, and ignore the field.
    files = install_files.InstallFiles()
    limit = install_files.CONFIG_LIMIT
    if files.read(directory.root / GENERATED_FILE, limit=limit) is not None:
        return ""
    for name in (install_files.OWN_INSTALL_CONFIG, install_files.INSTALL_CONFIG):
        content = files.read(directory.root / name, limit=limit)
        if content is None:
            continue
        with suppress(errors.ConfigError):
            settings = install_config.parse_install_config(content, name).mode.settings
            if settings is not None and settings.is_enabled:
                return (
                    f"{name} has the field {image_mode_field.FIELD}, and there is no "
                    f"{GENERATED_FILE}"
                )
    return ""
