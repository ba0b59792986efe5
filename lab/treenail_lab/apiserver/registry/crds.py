"""CustomResourceDefinitions: from a manifest to kinds that are served."""

from collections.abc import Iterator, Mapping

from treenail_lab.apiserver.errors import Cause
from treenail_lab.apiserver.objects import Json
from treenail_lab.apiserver.schema.kinds import Kind, Kinds, Path, Storage
from treenail_lab.apiserver.storage.store import Event, Store

CRDS: Storage = ("apiextensions.k8s.io", "customresourcedefinitions")


def problems(crd: Json) -> list[Cause]:
    """What is wrong with a CustomResourceDefinition."""
    spec = crd.get("spec") or {}
    names = spec.get("names") or {}
    found = [
        Cause("FieldValueRequired", "Required value", f"spec.{where}")
        for where, value in (
            ("group", spec.get("group")),
            ("scope", spec.get("scope")),
            ("versions", spec.get("versions")),
            ("names.plural", names.get("plural")),
            ("names.kind", names.get("kind")),
        )
        if not value
    ]
    if found:
        return found
    wanted = f"{names['plural']}.{spec['group']}"
    if crd["metadata"].get("name") != wanted:
        message = (
            f'Invalid value: "{crd["metadata"].get("name")}": must be '
            'spec.names.plural+"."+spec.group'
        )
        found.append(Cause("FieldValueInvalid", message, "metadata.name"))
    versions = spec["versions"]
    if sum(bool(version.get("storage")) for version in versions) != 1:
        message = "Invalid value: must have exactly one version marked as storage version"
        found.append(Cause("FieldValueInvalid", message, "spec.versions"))
    for index, version in enumerate(versions):
        if not (version.get("schema") or {}).get("openAPIV3Schema"):
            message = "Required value: schemas are required"
            where = f"spec.versions[{index}].schema.openAPIV3Schema"
            found.append(Cause("FieldValueRequired", message, where))
    return found


def established(crd: Json, now: str) -> Json:
    """The definition with names completed and the status of one that is served."""
    spec = crd["spec"]
    names = spec["names"]
    completed = {
        "singular": names["kind"].lower(),
        "listKind": f"{names['kind']}List",
    } | names
    conditions = [
        _condition("NamesAccepted", "NoConflicts", "no conflicts found", now),
        _condition("Established", "InitialNamesAccepted", "the initial names have been accepted",
                   now),
    ]  # fmt: skip
    storage = [version["name"] for version in spec["versions"] if version.get("storage")]
    status = {
        "conditions": (crd.get("status") or {}).get("conditions") or conditions,
        "acceptedNames": completed,
        "storedVersions": storage,
    }
    conversion = spec.get("conversion") or {"strategy": "None"}
    spec = spec | {"names": completed, "conversion": conversion}
    return crd | {"spec": spec, "status": status}


def _condition(name: str, reason: str, message: str, now: str) -> Json:
    return {
        "type": name,
        "status": "True",
        "lastTransitionTime": now,
        "reason": reason,
        "message": message,
    }


def kinds_of(crd: Json) -> Iterator[Kind]:
    """The kinds a definition stands for: one per version that is served."""
    spec = crd["spec"]
    names = spec["names"]
    for version in spec["versions"]:
        if not version.get("served"):
            continue
        subresources = version.get("subresources") or {}
        yield Kind(
            group=spec["group"],
            version=version["name"],
            kind=names["kind"],
            plural=names["plural"],
            namespaced=spec["scope"] == "Namespaced",
            short_names=tuple(names.get("shortNames") or ()),
            subresources=frozenset({"status"} if "status" in subresources else ()),
            fields=_selectable(version),
            generation=True,
            unconditional=False,
            custom=True,
            schema=version["schema"]["openAPIV3Schema"],
        )


def _selectable(version: Json) -> Mapping[str, Path]:
    paths = [entry["jsonPath"] for entry in version.get("selectableFields") or []]
    return {path.lstrip("."): tuple(path.lstrip(".").split(".")) for path in paths}


class Definitions:
    """Keeps the kinds that are served in step with the definitions that are stored."""

    def __init__(self, store: Store, kinds: Kinds) -> None:
        self._store = store
        self._kinds = kinds
        store.listen(self._changed)

    def reload(self) -> None:
        """Serve what the store's definitions say, after the store was loaded."""
        for kind in self._kinds:
            if kind.custom:
                self._kinds.discard(kind.storage)
        for crd in self._store.list(CRDS):
            self._serve(crd)

    def _changed(self, storage: Storage, event: Event) -> None:
        if storage != CRDS:
            return
        spec = event.object["spec"]
        custom = spec["group"], spec["names"]["plural"]
        self._kinds.discard(custom)
        if event.type != "DELETED":
            self._serve(event.object)
            return
        for obj in self._store.list(custom):
            metadata = obj["metadata"]
            self._store.remove(custom, (metadata.get("namespace", ""), metadata["name"]))

    def _serve(self, crd: Json) -> None:
        for kind in kinds_of(crd):
            self._kinds.add(kind)
