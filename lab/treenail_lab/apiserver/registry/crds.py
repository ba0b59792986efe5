"""CustomResourceDefinitions: validation, status and the kinds that they define."""

from collections.abc import Iterator, Mapping

from treenail_lab.apiserver.errors import StatusCause
from treenail_lab.apiserver.objects import Json
from treenail_lab.apiserver.schema.kinds import JsonPath, KindRegistry, ResourceKind, StorageKey
from treenail_lab.apiserver.store import Store, StoreEvent

CRDS: StorageKey = ("apiextensions.k8s.io", "customresourcedefinitions")


def find_problems(crd: Json) -> list[StatusCause]:
    """Return the causes for which a CustomResourceDefinition is invalid."""
    spec = crd.get("spec") or {}
    names = spec.get("names") or {}
    problems = [
        StatusCause("FieldValueRequired", "Required value", f"spec.{where}")
        for where, value in (
            ("group", spec.get("group")),
            ("scope", spec.get("scope")),
            ("versions", spec.get("versions")),
            ("names.plural", names.get("plural")),
            ("names.kind", names.get("kind")),
        )
        if not value
    ]
    if problems:
        return problems
    wanted = f"{names['plural']}.{spec['group']}"
    if crd["metadata"].get("name") != wanted:
        message = (
            f'Invalid value: "{crd["metadata"].get("name")}": must be '
            'spec.names.plural+"."+spec.group'
        )
        problems.append(StatusCause("FieldValueInvalid", message, "metadata.name"))
    versions = spec["versions"]
    if sum(bool(version.get("storage")) for version in versions) != 1:
        message = "Invalid value: must have exactly one version marked as storage version"
        problems.append(StatusCause("FieldValueInvalid", message, "spec.versions"))
    for index, version in enumerate(versions):
        if not (version.get("schema") or {}).get("openAPIV3Schema"):
            message = "Required value: schemas are required"
            where = f"spec.versions[{index}].schema.openAPIV3Schema"
            problems.append(StatusCause("FieldValueRequired", message, where))
    return problems


def establish_crd(crd: Json, now: str) -> Json:
    """Return the definition with completed names and the status of a served one."""
    spec = crd["spec"]
    names = spec["names"]
    completed = {
        "singular": names["kind"].lower(),
        "listKind": f"{names['kind']}List",
    } | names
    conditions = [
        _build_condition("NamesAccepted", "NoConflicts", "no conflicts found", now),
        _build_condition(
            "Established", "InitialNamesAccepted", "the initial names have been accepted", now
        ),
    ]
    storage = [version["name"] for version in spec["versions"] if version.get("storage")]
    status = {
        "conditions": (crd.get("status") or {}).get("conditions") or conditions,
        "acceptedNames": completed,
        "storedVersions": storage,
    }
    conversion = spec.get("conversion") or {"strategy": "None"}
    spec = spec | {"names": completed, "conversion": conversion}
    return crd | {"spec": spec, "status": status}


def _build_condition(name: str, reason: str, message: str, now: str) -> Json:
    return {
        "type": name,
        "status": "True",
        "lastTransitionTime": now,
        "reason": reason,
        "message": message,
    }


def list_kinds(crd: Json) -> Iterator[ResourceKind]:
    """Yield the kinds of a definition, one for each served version."""
    spec = crd["spec"]
    names = spec["names"]
    for version in spec["versions"]:
        if not version.get("served"):
            continue
        subresources = version.get("subresources") or {}
        yield ResourceKind(
            group=spec["group"],
            version=version["name"],
            kind=names["kind"],
            plural=names["plural"],
            is_namespaced=spec["scope"] == "Namespaced",
            short_names=tuple(names.get("shortNames") or ()),
            subresources=frozenset({"status"} if "status" in subresources else ()),
            fields=_parse_selectable_fields(version),
            has_generation=True,
            can_update_unconditionally=False,
            is_custom=True,
            schema=version["schema"]["openAPIV3Schema"],
        )


def _parse_selectable_fields(version: Json) -> Mapping[str, JsonPath]:
    paths = [entry["jsonPath"] for entry in version.get("selectableFields") or []]
    return {path.lstrip("."): tuple(path.lstrip(".").split(".")) for path in paths}


class CustomKinds:
    """Serves the kinds of the stored definitions."""

    def __init__(self, store: Store, kinds: KindRegistry) -> None:
        self._store = store
        self._kinds = kinds
        store.add_listener(self._on_change)

    def reload_kinds(self) -> None:
        """Serve the kinds of all definitions, after the store was loaded."""
        for kind in self._kinds:
            if kind.is_custom:
                self._kinds.discard_kinds(kind.storage)
        for crd in self._store.list_objects(CRDS):
            self._serve_kinds(crd)

    def _on_change(self, storage: StorageKey, event: StoreEvent) -> None:
        if storage != CRDS:
            return
        spec = event.object["spec"]
        custom = spec["group"], spec["names"]["plural"]
        self._kinds.discard_kinds(custom)
        if event.type != "DELETED":
            self._serve_kinds(event.object)
            return
        for obj in self._store.list_objects(custom):
            metadata = obj["metadata"]
            self._store.remove_object(custom, (metadata.get("namespace", ""), metadata["name"]))

    def _serve_kinds(self, crd: Json) -> None:
        for kind in list_kinds(crd):
            self._kinds.add_kind(kind)
