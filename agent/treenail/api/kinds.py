"""Kinds of the objects in a user's files: those that are read, and those that must be named.

kubectl refuses a misspelt kind or apiVersion. It accepts an InternalReleaseImage, which treenail
does not read. All other kinds belong to other programs.
"""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from treenail.api import decode, machineconfig, machineconfigpool, machineosconfig

GROUP = "machineconfiguration.openshift.io"
GENERATOR_KINDS = {
    "KubeletConfig": machineconfig.API_VERSION,
    "ContainerRuntimeConfig": machineconfig.API_VERSION,
    "ImageDigestMirrorSet": "config.openshift.io/v1",
    "ImageTagMirrorSet": "config.openshift.io/v1",
    "ImageContentSourcePolicy": "operator.openshift.io/v1alpha1",
    "ClusterImagePolicy": "config.openshift.io/v1",
    "ImagePolicy": "config.openshift.io/v1",
    "Image": "config.openshift.io/v1",
}
"""The apiVersion of each kind that becomes a part of a MachineConfig."""
READ_KINDS = {
    machineconfig.KIND: machineconfig.API_VERSION,
    machineconfigpool.KIND: machineconfigpool.API_VERSION,
    machineosconfig.KIND: machineosconfig.API_VERSION,
    "ControllerConfig": machineconfig.API_VERSION,
    "RolloutPolicy": "treenail.io/v1alpha1",
    "OSImageStream": machineconfig.API_VERSION,
    "PinnedImageSet": machineconfig.API_VERSION,
    **GENERATOR_KINDS,
}
_GROUPS = (GROUP, "treenail.io")
_LIVE_KINDS = frozenset({"MachineConfigNode", "MachineOSBuild"})
"""No config depends on them; a dump of a cluster has them."""
_UNREAD_KINDS = {
    "InternalReleaseImage": (GROUP, "remove it"),
}
"""The MCO reads these, by group and what to do instead."""
_SIMILAR_GROUP, _SIMILAR_KIND = 0.8, 0.9


@dataclass(frozen=True, slots=True)
class UnreadObject:
    """Why an object has no effect."""

    text: str
    remedy: str
    is_mistake: bool
    """An API server refuses the object."""

    def __str__(self) -> str:
        return f"{self.text}; {self.remedy}"


def find_unread_object(
    kind: str, api_version: str, known: Mapping[str, str] = READ_KINDS
) -> UnreadObject | None:
    """Return why an object is not read; None for a known one, and for those of other programs."""
    expected = known.get(kind)
    if api_version == expected:
        return None
    group = api_version.rpartition("/")[0]
    is_own = bool(difflib.get_close_matches(group, _GROUPS, 1, _SIMILAR_GROUP))
    if expected and (is_own or not group):
        actual = f"{api_version:.80}" or "nothing"
        text = f"expected apiVersion {expected}, found {actual}"
        return UnreadObject(text, f"set apiVersion: {expected}", is_mistake=True)
    unread_group, remedy = _UNREAD_KINDS.get(kind, ("", ""))
    if unread_group and group == unread_group:
        return UnreadObject(f"ignored: treenail reads no {kind}", remedy, is_mistake=False)
    if kind in _LIVE_KINDS or (group and not is_own):
        return None
    names = {name.casefold(): name for name in (*known, *_UNREAD_KINDS)}
    cutoff = 0.6 if is_own else _SIMILAR_KIND
    close = difflib.get_close_matches(kind.casefold(), names, 1, cutoff)
    if not is_own and not close:
        return None
    remedy = f"did you mean {names[close[0]]}?" if close else f"use one of: {', '.join(known)}"
    return UnreadObject(f"unknown kind {kind!r:.80}", remedy, is_mistake=True)


def list_items(fields: decode.Fields) -> Iterator[decode.Fields] | None:
    """Return the items of a list, with the kind that an API server leaves out; None for no list."""
    kind = fields.get_text("kind")
    if not kind.endswith("List") or "items" not in fields.values:
        return None
    inherited = {"apiVersion": fields.values.get("apiVersion"), "kind": kind.removesuffix("List")}
    return (
        decode.Fields({**(inherited if kind != "List" else {}), **item.values}, item.path)
        for item in fields.iter_objects("items")
    )
