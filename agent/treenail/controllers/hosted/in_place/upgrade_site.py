"""Keeps the objects of an update in a hosted cluster as they should be, and removes them.

Each call may be repeated. What a process leaves that ends in between, the next one completes.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress

from treenail import clocks, errors
from treenail.api import decode, object_meta
from treenail.api.hosted import annotations as hosted_key
from treenail.controllers.hosted.in_place import upgrade_objects
from treenail.kube import api_client, resources

RECHECK_S = 10.0
"""How long a change by another account, or a removed pod, may stay unnoticed."""
_JOIN_WAIT_S = 10.0
_SERVICE_WAIT_S = 60.0
"""Time for the agent of an image to report after a boot."""
_FIND_RULES = "look there for admission webhooks, admission policies and quotas"


class UpgradeSite:
    """The objects of one pool. Raises `ClusterError`; not thread-safe."""

    def __init__(self, client: api_client.Client, clock: clocks.Clock) -> None:
        self._client = client
        self._clock = clock
        self._content: upgrade_objects.UpgradeContent | None = None
        self._checked_at = float("-inf")
        self._missing_since: dict[str, float] = {}

    def prepare(self, content: upgrade_objects.UpgradeContent) -> None:
        """Create or correct the namespace, the ConfigMap and the access to it.

        Raises `ConfigError` for a namespace of another owner, and if the hosted cluster refuses.
        """
        now = self._clock.monotonic()
        if content == self._content and now - self._checked_at < RECHECK_S:
            return
        namespace = content.mode.upgrade_namespace
        with _explain_refusal():
            for resource, wanted in upgrade_objects.build_objects(content):
                is_space = resource == resources.NAMESPACES
                stored = self._apply(resource, wanted, content, "" if is_space else namespace)
                if _has_changed(stored, wanted):
                    name = resources.get_object(wanted, "metadata")["name"]
                    raise errors.ConfigError(
                        f"another program changes {resource.kind} {name} of the hosted cluster "
                        "whenever it is written",
                        remedy=f"exclude treenail; {_FIND_RULES}",
                    )
        self._content, self._checked_at = content, now

    def _apply(
        self,
        resource: resources.Resource,
        wanted: decode.Json,
        content: upgrade_objects.UpgradeContent,
        namespace: str,
    ) -> decode.Json:
        metadata = resources.get_object(wanted, "metadata")
        name = str(metadata["name"])
        found = self._client.find(resource, name, namespace=namespace)
        if found is None:
            return self._client.create(resource, wanted, namespace=namespace)
        meta = resources.get_object(found, "metadata")
        if meta.get("deletionTimestamp"):
            raise errors.UnreachableError(f"{resource.kind} {name} is being deleted")
        if not namespace and not _is_owned(found, content.node_pool):
            raise errors.ConfigError(
                f"cannot use namespace {name} of the hosted cluster: its annotation "
                f"{hosted_key.NODE_POOL} is not {content.node_pool}",
                remedy=f"run there: kubectl delete namespace {name}",
            )
        if _has_changed(found, wanted):
            # No update may change these.
            if found.get("roleRef") != wanted.get("roleRef") or found.get("immutable"):
                self._client.delete(resource, name, namespace=namespace, uid=str(meta["uid"]))
                return self._client.create(resource, wanted, namespace=namespace)
            merged = {
                field: {
                    **resources.get_object(meta, field),
                    **resources.get_object(metadata, field),
                }
                for field in ("labels", "annotations")
            }
            body = {**found, **wanted, "metadata": {**meta, **merged}}
            # A replacement, not a patch: a key more would stay in the ConfigMap.
            return self._client.update(resource, name, body, namespace=namespace)
        return found

    def sync_installers(
        self, content: upgrade_objects.UpgradeContent, nodes: Collection[str], image: str
    ) -> None:
        """Create an installer for each of the nodes, and delete all others."""
        namespace, served = content.mode.upgrade_namespace, set()
        for pod in self._client.list(resources.PODS, namespace=namespace).items:
            meta, spec = resources.get_object(pod, "metadata"), resources.get_object(pod, "spec")
            node = str(spec.get("nodeName"))
            if meta.get("name") != upgrade_objects.name_installer(node):
                continue
            served.add(node)
            containers = spec.get("containers")
            images = (
                [one.get("image") for one in containers] if isinstance(containers, list) else []
            )
            has_ended = resources.get_object(pod, "status").get("phase") in {"Succeeded", "Failed"}
            is_wanted = node in nodes and images == [image] and not has_ended
            if not (is_wanted or meta.get("deletionTimestamp")):
                with suppress(errors.NotFoundError):
                    self._client.delete(
                        resources.PODS, str(meta["name"]), namespace=namespace, uid=str(meta["uid"])
                    )
        for node in sorted(set(nodes) - served):
            pod = upgrade_objects.build_installer(content, node, image)
            with suppress(errors.AlreadyExistsError), _explain_refusal():
                self._client.create(resources.PODS, pod, namespace=namespace)

    def is_installer_due(self, node: upgrade_objects.HostedNode) -> bool:
        """Return whether the image of a node has no treenail.

        A node that has just joined or booted has some time to say so.
        """
        if node.has_service:
            self._missing_since.pop(node.name, None)
            return False
        now = self._clock.monotonic()
        since = self._missing_since.setdefault(node.name, now)
        is_new = self._clock.now() - node.created_at < _JOIN_WAIT_S
        return now - since >= _SERVICE_WAIT_S or not (node.service_boot or is_new)

    def remove(self, content: upgrade_objects.UpgradeContent) -> None:
        """Delete everything; what another owner has stays."""
        self._content = None
        namespace = content.mode.upgrade_namespace
        space = self._client.find(resources.NAMESPACES, namespace)
        if space is None or not _is_owned(space, content.node_pool):
            return
        # Without its pods the namespace would wait for their nodes, one of which may be down.
        self.sync_installers(content, (), "")
        for resource, document in reversed(upgrade_objects.build_objects(content)):
            name = str(resources.get_object(document, "metadata")["name"])
            place = "" if resource == resources.NAMESPACES else namespace
            with suppress(errors.NotFoundError, errors.ConflictError):
                self._client.delete(resource, name, namespace=place)


@contextmanager
def _explain_refusal() -> Iterator[None]:
    """Raise `ConfigError` if the hosted cluster, where treenail may do everything, refuses it."""
    try:
        yield
    except errors.ForbiddenError as error:
        raise errors.ConfigError(
            f"the hosted cluster refuses an object of the update: {error}",
            remedy=f"let treenail write it; {_FIND_RULES}",
        ) from error


def _is_owned(document: decode.Json, node_pool: str) -> bool:
    notes = object_meta.read_metadata(document).annotations
    return notes.get(hosted_key.NODE_POOL) == node_pool


def _has_changed(found: decode.Json, wanted: decode.Json) -> bool:
    """Return whether a field of ours differs; labels and annotations of others may be there."""
    meta, own = resources.get_object(found, "metadata"), resources.get_object(wanted, "metadata")
    is_other = any(found.get(name) != wanted[name] for name in wanted.keys() - {"metadata"})
    return is_other or bool(resources.find_changes(meta, own))
