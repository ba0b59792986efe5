"""Deployments in the format of rpm-ostree's D-Bus properties."""

from typing import Any

from gi.repository import GLib

from treenail_lab.machine.ostree.sysroot import SysrootDeployment
from treenail_lab.machine.rpmostree.operations import SysrootInterface

_EMPTY_PROPERTIES = {
    "requested-local-packages": "as",
    "requested-local-fileoverride-packages": "as",
    "requested-base-local-replacements": "as",
    "base-local-replacements": "a(vv)",
    "base-remote-replacements": "a{sv}",
}


def build_deployment_values(
    deployment: SysrootDeployment, sysroot: SysrootInterface
) -> dict[str, Any]:
    """Return the ``a{sv}`` of a deployment, with every key of a container deployment."""
    staged = deployment == sysroot.read_staged()
    booted = not staged and deployment == sysroot.find_booted()
    values = {
        "id": GLib.Variant("s", deployment.id),
        "osname": GLib.Variant("s", deployment.osname),
        "checksum": GLib.Variant("s", deployment.checksum),
        "serial": GLib.Variant("i", deployment.serial),
        "booted": GLib.Variant("b", booted),
        "staged": GLib.Variant("b", staged),
        "pinned": GLib.Variant("b", deployment.pinned),
        "unlocked": GLib.Variant("s", "none"),
        "regenerate-initramfs": GLib.Variant("b", False),  # noqa: FBT003  gi's own signature
        "timestamp": GLib.Variant("t", deployment.timestamp),
        "version": GLib.Variant("s", deployment.version),
        "container-image-reference": GLib.Variant("s", deployment.refspec),
        "container-image-reference-digest": GLib.Variant("s", deployment.digest),
        "base-commit-meta": GLib.Variant("a{sv}", _build_commit_metadata(deployment)),
    }
    for key, names in {
        "packages": deployment.packages,
        "requested-packages": deployment.packages,
        "requested-base-removals": deployment.removals,
    }.items():
        values[key] = GLib.Variant("as", names)
    removed = [GLib.Variant("s", name) for name in deployment.removals]
    values["base-removals"] = GLib.Variant("av", removed)
    if deployment.base:
        values["base-checksum"] = GLib.Variant("s", deployment.base)
        values["base-version"] = values["version"]
        values["base-timestamp"] = values["timestamp"]
        values["layered-commit-meta"] = GLib.Variant("a{sv}", {})
    for key, signature in _EMPTY_PROPERTIES.items():
        values[key] = GLib.Variant(signature, {} if signature == "a{sv}" else [])
    # No finalization-locked: rpm-ostreed 2026.2 looks for a file that libostree no longer writes.
    if deployment.custom_origin is not None:
        values["custom-origin"] = GLib.Variant("(ss)", deployment.custom_origin)
    return values


def _build_commit_metadata(deployment: SysrootDeployment) -> dict[str, Any]:
    return {
        "version": GLib.Variant("s", deployment.version),
        "ostree.manifest": GLib.Variant("s", deployment.manifest),
        "ostree.manifest-digest": GLib.Variant("s", deployment.digest),
        "ostree.container.image-config": GLib.Variant("s", deployment.configuration),
    }
