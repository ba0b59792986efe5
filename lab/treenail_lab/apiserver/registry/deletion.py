"""Deletion: grace periods, finalizers, preconditions and propagation policies."""

from dataclasses import dataclass

from treenail.clocks import format_rfc3339
from treenail_lab.apiserver.access.authentication import ApiUser
from treenail_lab.apiserver.errors import bad_request_error, build_details, conflict_error
from treenail_lab.apiserver.objects import Json, find_value, is_deleting, read_finalizers, read_key
from treenail_lab.apiserver.registry.registry import NAMESPACES, ObjectRegistry, is_awaiting_removal
from treenail_lab.apiserver.schema.kinds import ResourceKind

FOREGROUND = "foregroundDeletion"
ORPHAN = "orphan"
_POLICY_FINALIZERS = {"Foreground": FOREGROUND, "Orphan": ORPHAN}


@dataclass(frozen=True, slots=True)
class DeleteOptions:
    """The options of a delete request; None is the default of the kind."""

    grace_s: int | None = None
    policy: str = "Background"
    uid: str = ""
    resource_version: str = ""
    is_dry_run: bool = False


def parse_delete_options(
    body: Json, *, dry_run: bool = False, default_policy: str = "Background"
) -> DeleteOptions:
    """Parse a DeleteOptions document; raise 400 for invalid values."""
    grace = body.get("gracePeriodSeconds")
    if grace is not None and not isinstance(grace, int):
        raise bad_request_error("gracePeriodSeconds: expected a number")
    policy = body.get("propagationPolicy")
    if policy is None:
        match body.get("orphanDependents"):
            case True:
                policy = "Orphan"
            case False:
                policy = "Background"
            case _:
                policy = default_policy
    if policy not in {"Background", "Foreground", "Orphan"}:
        raise bad_request_error(f'propagationPolicy: Unsupported value: "{policy}"')
    preconditions = body.get("preconditions") or {}
    return DeleteOptions(
        grace_s=grace,
        policy=policy,
        uid=preconditions.get("uid") or "",
        resource_version=preconditions.get("resourceVersion") or "",
        is_dry_run=dry_run or body.get("dryRun") == ["All"],
    )


def delete_object(
    registry: ObjectRegistry,
    kind: ResourceKind,
    namespace: str,
    name: str,
    options: DeleteOptions,
    user: ApiUser,
) -> Json:
    """Delete an object or mark it for deletion; return the body of the answer."""
    old = registry.find_object(kind, namespace, name)
    registry.restrict_write(user, kind, old, None)
    check_preconditions(kind, old, options)
    marked = _mark_for_deletion(registry, kind, old, options)
    stays = bool(read_finalizers(marked)) or is_awaiting_removal(kind, marked)
    if options.is_dry_run:
        return marked if stays else _build_answer(kind, old)
    if stays:
        return old if marked == old else registry.store.put_object(kind.storage, marked)
    gone = registry.store.remove_object(kind.storage, read_key(old))
    return _build_answer(kind, gone)


def _build_answer(kind: ResourceKind, gone: Json) -> Json:
    if kind.should_return_deleted:
        return gone
    details = build_details(kind.group, kind.plural, gone["metadata"]["name"])
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Success",
        "details": details | {"uid": gone["metadata"]["uid"]},
    }


def check_preconditions(kind: ResourceKind, obj: Json, options: DeleteOptions) -> None:
    """Raise 409 when the options name another object, or another version of it."""
    metadata = obj["metadata"]
    preconditions = (
        ("UID", options.uid, metadata["uid"]),
        ("ResourceVersion", options.resource_version, metadata["resourceVersion"]),
    )
    for field, expected, actual in preconditions:
        if expected and expected != actual:
            why = (
                f"Precondition failed: {field} in precondition: {expected}, "
                f"{field} in object meta: {actual}"
            )
            raise conflict_error(kind.group, kind.plural, metadata["name"], why)


def _mark_for_deletion(
    registry: ObjectRegistry, kind: ResourceKind, old: Json, options: DeleteOptions
) -> Json:
    """Return the object with the marks of a pending deletion."""
    grace_s = _decide_grace_s(kind, old, options)
    metadata = dict(old["metadata"])
    kept = [name for name in read_finalizers(old) if name not in _POLICY_FINALIZERS.values()]
    if not is_deleting(old) or options.policy != "Background":
        if wanted := _POLICY_FINALIZERS.get(options.policy):
            kept.append(wanted)
        metadata["finalizers"] = kept
        if not kept:
            metadata.pop("finalizers")
    if not is_deleting(old):
        now = registry.clock.now()
        metadata["deletionTimestamp"] = format_rfc3339(now + grace_s)
        metadata["deletionGracePeriodSeconds"] = grace_s
        if kind.has_generation:
            metadata["generation"] = metadata.get("generation", 0) + 1
    elif grace_s < metadata.get("deletionGracePeriodSeconds", 0):
        # A second delete can only shorten the remaining time.
        metadata["deletionTimestamp"] = format_rfc3339(registry.clock.now() + grace_s)
        metadata["deletionGracePeriodSeconds"] = grace_s
    marked = old | {"metadata": metadata}
    if kind.storage == NAMESPACES:
        marked["status"] = {**(old.get("status") or {}), "phase": "Terminating"}
    return marked


def _decide_grace_s(kind: ResourceKind, obj: Json, options: DeleteOptions) -> int:
    if kind.plural != "pods" or kind.group:
        return 0
    ended = find_value(obj, "status", "phase") in {"Succeeded", "Failed"}
    if ended or not find_value(obj, "spec", "nodeName"):
        return 0
    requested = options.grace_s
    if requested is None:
        requested = find_value(obj, "spec", "terminationGracePeriodSeconds")
    # A negative grace period counts as the shortest one.
    return 30 if requested is None else 1 if requested < 0 else int(requested)
