"""The pods of a node that is drained, and the DaemonSets that create pods again.

A Pod has 5 kB or more, its metadata a third. The watch therefore omits spec and status. The few
pods that need them, such as one that does not end, are read whole.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from treenail import clocks, errors
from treenail.kube import api_client, informer, resources, watch

log = logging.getLogger(__name__)

# The kubelet sets it on the mirror pods of static pods and recreates those after a deletion.
_MIRROR_ANNOTATION = "kubernetes.io/config.mirror"
# A field selector has no OR: ended is what is in none of the other phases.
_ENDED_PHASES = "status.phase!=Pending,status.phase!=Running,status.phase!=Unknown"
_DAEMONSET = "DaemonSet "
_DAEMONSET_LIFETIME_S = 30.0
_WATCH_DURATION_S = 3.0
"""Short, because the connection of a finished drain serves another one after twice this time."""


@dataclass(frozen=True, slots=True)
class Pod:
    """One pod as the API server reports it.

    ``terminates_at`` is the end of the grace period of a deleted pod, in seconds since the epoch.
    ``is_running`` is True until all containers are known to have ended. ``claims`` are its
    PersistentVolumeClaims.
    """

    namespace: str
    name: str
    uid: str
    labels: Mapping[str, str] = field(default_factory=dict)
    owner: str = ""
    """Kind and name of its controller; empty for a bare pod."""
    is_mirror: bool = False
    is_finished: bool = False
    is_running: bool = False
    terminates_at: float | None = None
    grace_s: int = 0
    finalizers: tuple[str, ...] = ()
    claims: tuple[str, ...] = ()
    resource_version: str = field(default="", compare=False)

    @property
    def key(self) -> str:
        """``namespace/name``."""
        return f"{self.namespace}/{self.name}"

    @property
    def daemonset(self) -> str:
        """Name of the DaemonSet that controls the pod; empty without one."""
        return self.owner.removeprefix(_DAEMONSET) if self.owner.startswith(_DAEMONSET) else ""

    @property
    def group(self) -> str:
        """Pods that the same owner creates; bare pods of a namespace are one group."""
        return f"{self.namespace}/{self.owner or 'pods without a controller'}"


def parse_pod(document: api_client.Json) -> Pod:
    """Read the pod in an API object; malformed fields count as absent."""
    metadata, spec, status = (
        resources.get_object(document, name) for name in ("metadata", "spec", "status")
    )
    grace_s = metadata.get("deletionGracePeriodSeconds")
    return Pod(
        namespace=str(metadata.get("namespace") or ""),
        name=str(metadata.get("name") or ""),
        uid=str(metadata.get("uid") or ""),
        labels={key: str(value) for key, value in resources.get_object(metadata, "labels").items()},
        owner=_find_owner(metadata),
        is_mirror=_MIRROR_ANNOTATION in resources.get_object(metadata, "annotations"),
        is_finished=str(status.get("phase")) in {"Succeeded", "Failed"},
        is_running=_is_running(status),
        # The end of the grace period, not the time of the request (ObjectMeta in meta/v1).
        terminates_at=clocks.parse_rfc3339(metadata.get("deletionTimestamp")),
        grace_s=grace_s if isinstance(grace_s, int) else 0,
        finalizers=tuple(str(one) for one in _as_list(metadata.get("finalizers"))),
        claims=tuple(
            str(claim["claimName"])
            for volume in _as_objects(spec.get("volumes"))
            if "claimName" in (claim := resources.get_object(volume, "persistentVolumeClaim"))
        ),
        resource_version=str(metadata.get("resourceVersion") or ""),
    )


def _is_running(status: api_client.Json) -> bool:
    """Return True until every container is known to have ended."""
    containers = _as_objects(status.get("containerStatuses"))
    ended = containers and all(
        "terminated" in resources.get_object(one, "state") for one in containers
    )
    return status.get("phase") == "Running" and not ended


def _find_owner(metadata: api_client.Json) -> str:
    for owner in _as_objects(metadata.get("ownerReferences")):
        # At most one owner is the controller (OwnerReference in meta/v1).
        if owner.get("controller") is True:
            return f"{owner.get('kind')} {owner.get('name')}"
    return ""


def _as_list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _as_objects(value: object) -> list[api_client.Json]:
    return [one for one in _as_list(value) if isinstance(one, dict)]


class NodePods:
    """Watches the pods of a node.

    ``notify`` runs on another thread when a pod is new, and when the last pod of `await_removal` is
    removed. A drain looks at all pods then, so it must not do that for each change. One thread
    calls the other methods.
    """

    def __init__(
        self,
        client: api_client.Client,
        node: str,
        clock: clocks.Clock,
        *,
        notify: Callable[[], None],
    ) -> None:
        self._client = client
        self._node = node
        # kube-apiserver has an index for this field (registry/core/pod/strategy.go).
        self._selector = f"spec.nodeName={node}"
        self._last_error: errors.ClusterError | None = None
        self._informer = informer.Informer(
            client,
            watch.WatchScope(
                resources.PODS,
                field_selector=self._selector,
                has_metadata_only=True,
                duration_s=_WATCH_DURATION_S,
            ),
            clock,
            parse_pod,
            on_lost=self._record_error,
        )
        self._notify = notify
        self._lock = threading.Lock()
        self._awaited: set[str] = set()
        self._informer.add_handler(self._handle_change)
        self._ended_uids: frozenset[str] | None = None
        self._details: dict[str, Pod] = {}
        self._has_fresh_details = False

    def start(self) -> None:
        """Start to list and watch."""
        self._informer.start()

    def stop(self) -> None:
        """Stop to notify; the watch ends a few seconds later."""
        self._informer.retire()

    def read_pods(self, limit_s: float) -> Sequence[Pod]:
        """Return all pods; ``is_running`` and ``claims`` are known to `read_details` only.

        Waits up to ``limit_s`` for the first list. Raises ClusterError without it.
        """
        if not self._informer.wait_until_synced(limit_s):
            raise self._last_error or errors.UnreachableError(
                f"cannot drain {self._node}: its pods are not listed yet"
            )
        self._has_fresh_details = False
        pods = list(self._informer.get_all().values())
        if self._ended_uids is None and any(pod.daemonset for pod in pods):
            self._ended_uids = self._list_ended_uids()
        ended = self._ended_uids or frozenset()
        return [replace(pod, is_finished=True) if pod.uid in ended else pod for pod in pods]

    def await_removal(self, keys: Iterable[str]) -> None:
        """Call ``notify`` when none of these pods (``namespace/name``) exists any longer."""
        awaited = set(keys)
        with self._lock:
            self._awaited = awaited & self._informer.get_all().keys()
            is_over = bool(awaited) and not self._awaited
        if is_over:
            self._notify()

    def read_details(self, pod: Pod) -> Pod:
        """Return the pod with all fields; one list serves all pods until `read_pods`."""
        known = self._details.get(pod.uid)
        is_current = known is not None and known.resource_version == pod.resource_version
        if not (is_current or self._has_fresh_details):
            pages = self._client.list_pages(
                resources.PODS, params={"fieldSelector": self._selector}
            )
            listed_pods = (parse_pod(item) for page in pages for item in page.items)
            self._details = {listed.uid: listed for listed in listed_pods}
            self._has_fresh_details = True
        return self._details.get(pod.uid, pod)

    def _list_ended_uids(self) -> frozenset[str]:
        """List the ended pods: a DaemonSet creates its pods again, but not on a cordoned node."""
        params = {"fieldSelector": f"{self._selector},{_ENDED_PHASES}"}
        pages = self._client.list_pages(resources.PODS, params=params, has_metadata_only=True)
        return frozenset(parse_pod(item).uid for page in pages for item in page.items)

    def _handle_change(self, key: str, before: Pod | None, after: Pod | None) -> None:
        if before is not None and after is not None and before.uid == after.uid:
            return
        with self._lock:
            self._awaited.discard(key)
            is_over = not self._awaited
        if after is not None or is_over:
            self._notify()

    def _record_error(self, error: errors.ClusterError) -> None:
        self._last_error = error


class DaemonSetCache:
    """Remembers for half a minute which DaemonSets exist, for all nodes. Thread-safe."""

    def __init__(self, client: api_client.Client, clock: clocks.Clock) -> None:
        self._client = client
        self._clock = clock
        self._lock = threading.Lock()
        self._known: dict[tuple[str, str], tuple[float, bool]] = {}

    def has_daemonset(self, namespace: str, name: str) -> bool:
        """Return True when it exists, or when the API server forbids to read it."""
        now = self._clock.monotonic()
        with self._lock:
            read_at, exists = self._known.get((namespace, name), (float("-inf"), False))
        if now - read_at < _DAEMONSET_LIFETIME_S:
            return exists
        exists = self._read_daemonset(namespace, name)
        with self._lock:
            self._known = {
                key: answer
                for key, answer in self._known.items()
                if now - answer[0] < _DAEMONSET_LIFETIME_S
            }
            self._known[namespace, name] = (now, exists)
        return exists

    def _read_daemonset(self, namespace: str, name: str) -> bool:
        try:
            return self._client.find(resources.DAEMONSETS, name, namespace=namespace) is not None
        except errors.ForbiddenError as error:
            log.warning("assuming that DaemonSet %s/%s exists: %s", namespace, name, error)
        return True
