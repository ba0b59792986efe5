"""Objects of an install directory, read as from the API server of the future cluster."""

from collections.abc import Mapping

from treenail.api.decode import Json
from treenail.controllers.image_build.cluster_reader import GLOBAL_PULL_SECRET, encode_strings
from treenail.errors import NotFoundError
from treenail.installer.checks.manifest_checks import NAMESPACES
from treenail.installer.inputs.install_manifests import InstallManifests
from treenail.kube.resources import MACHINECONFIGS, SECRETS, Resource

_INSTALLER_PULL_SECRET = ("openshift-config", "pull-secret")
"""Namespace and name of the cluster's pull secret among the manifests of the installer."""


class InstallObjects:
    """A `treenail.controllers.image_build.cluster_reader.ObjectGetter` over manifests.

    Objects of builds may be in the namespace of treenail or in that of the Machine Config Operator.
    One without a namespace is in every namespace: ``kubectl apply -n`` chooses it.
    """

    def __init__(self, manifests: InstallManifests, rendered: Mapping[str, Json]) -> None:
        """``rendered`` are the rendered MachineConfigs by name."""
        self._manifests = manifests
        self._rendered = rendered

    def get(self, resource: Resource, name: str, *, namespace: str = "") -> Json:
        """Return an object; raise `NotFoundError`."""
        if resource is MACHINECONFIGS and name in self._rendered:
            return self._rendered[name]
        places = [(each, name) for each in dict.fromkeys((namespace, *NAMESPACES, ""))]
        if (resource, name) == (SECRETS, GLOBAL_PULL_SECRET):
            places.append(_INSTALLER_PULL_SECRET)
        for where, each in places:
            found = self._manifests.find(resource.kind, each, where)
            if found is not None:
                return encode_strings(found.document)
        place = f"{namespace}/" if namespace else ""
        raise NotFoundError(f"the manifests have no {resource.kind} {place}{name}")
