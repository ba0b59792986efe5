"""How many machines of the control plane an installation has, where its files say it."""

from collections.abc import Iterator, Mapping

from treenail.api import documents
from treenail.api.decode import Json
from treenail.errors import ConfigError
from treenail.installer.inputs.install_directory import (
    INSTALL_CONFIG,
    OWN_INSTALL_CONFIG,
    InstallDirectory,
)
from treenail.installer.inputs.install_files import InstallFiles
from treenail.installer.inputs.install_manifests import InstallManifests

CONTROL_PLANE, ARBITER = "controlPlane", "arbiter"
"""Fields of an install configuration with the numbers of machines."""

_CONFIGMAP, _NAMESPACE, _KEY = "cluster-config-v1", "kube-system", "install-config"
"""The OpenShift installer consumes install-config.yaml, and keeps it in this ConfigMap."""
_REPLICAS = "replicas"
_LIMIT = 100


def read_install_config(directory: InstallDirectory) -> bytes | None:
    """Return the content of the install configuration; None without one. Raises `FileError`."""
    for name in (INSTALL_CONFIG, OWN_INSTALL_CONFIG):
        content = InstallFiles().read(directory.root / name)
        if content is not None:
            return content
    return None


def find_machine_count(manifests: InstallManifests, install_config: bytes | None) -> int | None:
    """Return the machines of the pools master and arbiter; None if no file says it.

    ``install_config`` is the content of the install configuration; None without the file.
    """
    manifest = manifests.find("ConfigMap", _CONFIGMAP, _NAMESPACE)
    data = None if manifest is None else manifest.document.get("data")
    text = data.get(_KEY) if isinstance(data, Mapping) else None
    found = text.encode("utf-8", "replace") if isinstance(text, str) else install_config
    if found is None:
        return None
    try:
        document = documents.load_document(documents.decode_text(found, _KEY), where=_KEY)
    except ConfigError:
        # The OpenShift installer reports the problems of its own file.
        return None
    return count_machines(document)


def count_machines(document: Json) -> int | None:
    """Return the machines that an install configuration names; None without a number."""
    counts = [_find_replicas(document, name) for name in (CONTROL_PLANE, ARBITER)]
    known = [each for each in counts if each is not None]
    # Without an own number the control plane's size is a default of the installer's release.
    return None if counts[0] is None else sum(known)


def find_count_problems(document: Json) -> Iterator[tuple[str, str]]:
    """Yield field and text for each wrong number of machines."""
    for name in (CONTROL_PLANE, ARBITER):
        if name not in document:
            continue
        machines = document[name]
        has_others = not isinstance(machines, Mapping) or [*machines] != [_REPLICAS]
        if has_others or _find_replicas(document, name) is None:
            yield name, f"{name}: expected {_REPLICAS}, a number from 1 to {_LIMIT}, alone"


def _find_replicas(document: Json, name: str) -> int | None:
    machines = document.get(name)
    count = machines.get(_REPLICAS) if isinstance(machines, Mapping) else None
    if not isinstance(count, int) or isinstance(count, bool):
        return None
    return count if 0 < count <= _LIMIT else None
