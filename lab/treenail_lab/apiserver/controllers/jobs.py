"""The Job controller and the TTL controller of finished Jobs.

Pods without a controller are not adopted.
"""

from treenail.clocks import parse_rfc3339
from treenail_lab.apiserver.access.authentication import MASTERS, ApiUser
from treenail_lab.apiserver.controllers.job_decision import (
    POD_BACKOFF_S,
    TRACKING_FINALIZER,
    JobStep,
    PodBackoff,
    decide_step,
    find_condition,
    is_finished,
)
from treenail_lab.apiserver.errors import ApiError
from treenail_lab.apiserver.objects import (
    Json,
    ObjectKey,
    copy_json,
    is_deleting,
    is_equal,
    read_finalizers,
    read_key,
    read_owner_references,
    read_uid,
)
from treenail_lab.apiserver.registry.deletion import DeleteOptions, delete_object
from treenail_lab.apiserver.registry.disruption_budgets import PODS
from treenail_lab.apiserver.registry.registry import ObjectRegistry, WriteContext
from treenail_lab.apiserver.schema.kinds import ResourceKind, StorageKey
from treenail_lab.apiserver.store import StoreEvent

JOBS: StorageKey = ("batch", "jobs")
_API_VERSION = "batch/v1"
_WRITE_CONTEXT = WriteContext(
    ApiUser("system:serviceaccount:kube-system:job-controller", (MASTERS,)),
    "kube-controller-manager",
)
_RETRY_S = 1.0
"""After a refused write, for example of a pod that the namespace's policy forbids."""


class JobController:
    """Runs the pods of every Job: `note_event` records changes, `sync` acts on them."""

    def __init__(self, registry: ObjectRegistry) -> None:
        self.first_backoff_s = POD_BACKOFF_S
        self._registry = registry
        self._dirty: dict[ObjectKey, None] = {}
        self._orphans: dict[ObjectKey, None] = {}
        # Monotonic time at which a Job must be processed without a change.
        self._deadlines: dict[ObjectKey, float] = {}
        self._backoffs: dict[str, PodBackoff] = {}

    def note_event(self, storage: StorageKey, event: StoreEvent) -> bool:
        """Record the Jobs that a change affects; return whether there are any."""
        if storage == JOBS:
            self._dirty[read_key(event.object)] = None
            return True
        if storage == PODS:
            self._note_pod(event.object)
        return bool(self._dirty or self._orphans)

    def reload(self) -> None:
        """Process all Jobs, after the store was loaded."""
        self._backoffs.clear()
        self._deadlines.clear()
        for job in self._registry.store.list_objects(JOBS):
            self._dirty[read_key(job)] = None
        for pod in self._registry.store.list_objects(PODS):
            self._note_pod(pod)

    def sync(self) -> float | None:
        """Process the recorded Jobs; return the seconds until the next one is due."""
        now = self._registry.clock.monotonic()
        for where in [where for where, due in self._deadlines.items() if due <= now]:
            del self._deadlines[where]
            self._dirty[where] = None
        while self._dirty or self._orphans:
            if self._orphans:
                self._release_orphan(self._orphans.popitem()[0])
                continue
            where = next(iter(self._dirty))
            del self._dirty[where]
            try:
                wait_s = self._sync_job(where)
            except ApiError:
                wait_s = _RETRY_S
            if wait_s is None:
                self._deadlines.pop(where, None)
            else:
                self._deadlines[where] = now + wait_s
        return max(min(self._deadlines.values()) - now, 0.0) if self._deadlines else None

    def _note_pod(self, pod: Json) -> None:
        owner = _find_job_reference(pod)
        if owner is not None:
            self._dirty[pod["metadata"]["namespace"], owner["name"]] = None
        if TRACKING_FINALIZER in read_finalizers(pod):
            self._orphans[read_key(pod)] = None

    def _release_orphan(self, where: ObjectKey) -> None:
        """Remove the finalizer of a pod whose Job no longer exists."""
        pod = self._registry.store.find_object(PODS, where)
        if pod is None:
            return
        owner = _find_job_reference(pod) or {"name": "", "uid": ""}
        job = self._registry.store.find_object(JOBS, (where[0], owner["name"]))
        if job is None or read_uid(job) != owner["uid"]:
            self._release_pod(pod)

    def _sync_job(self, where: ObjectKey) -> float | None:
        """Carry out one step; return the seconds after which the Job is due again."""
        job = self._registry.store.find_object(JOBS, where)
        if job is None:
            for pod in self._registry.store.list_objects(PODS, where[0]):
                if TRACKING_FINALIZER in read_finalizers(pod):
                    self._orphans[read_key(pod)] = None
            return None
        pods = self._list_pods(job)
        if is_finished(job):
            self._backoffs.pop(read_uid(job), None)
            for pod in pods:
                self._release_pod(pod)
            return self._expire_job(job)
        if job["spec"].get("managedBy"):
            return None
        backoff = self._backoffs.get(read_uid(job), PodBackoff())
        step = decide_step(
            job,
            pods,
            backoff,
            self._registry.clock.now(),
            first_backoff_s=self.first_backoff_s,
        )
        return self._take_step(job, step)

    def _take_step(self, job: Json, step: JobStep) -> float | None:
        """Write the step in the order of its fields, so that a watch sees no pod counted twice."""
        namespace, name = read_key(job)
        if not is_equal(job.get("status") or {}, step.status):
            self._registry.update_object(
                self._find_kind(JOBS),
                namespace,
                name,
                lambda old: old | {"status": step.status},
                _WRITE_CONTEXT,
                "status",
            )
        self._backoffs[read_uid(job)] = step.backoff
        for pod in step.deleted_pods:
            self._delete_pod(pod)
        for pod in step.released_pods:
            self._release_pod(pod)
        for _ in range(step.created_pods):
            self._create_pod(job)
        return step.wait_s

    def _list_pods(self, job: Json) -> list[Json]:
        return [
            pod
            for pod in self._registry.store.list_objects(PODS, job["metadata"]["namespace"])
            if (owner := _find_job_reference(pod)) and owner["uid"] == read_uid(job)
        ]

    def _create_pod(self, job: Json) -> None:
        template = copy_json(job["spec"]["template"])
        metadata = template.get("metadata") or {}
        body = {
            "metadata": {
                "generateName": f"{job['metadata']['name']}-",
                "labels": metadata.get("labels") or {},
                "annotations": metadata.get("annotations") or {},
                "finalizers": [*(metadata.get("finalizers") or []), TRACKING_FINALIZER],
                "ownerReferences": [
                    {
                        "apiVersion": _API_VERSION,
                        "kind": "Job",
                        "name": job["metadata"]["name"],
                        "uid": read_uid(job),
                        "controller": True,
                        "blockOwnerDeletion": True,
                    }
                ],
            },
            "spec": template.get("spec") or {},
        }
        namespace = job["metadata"]["namespace"]
        self._registry.create_object(self._find_kind(PODS), namespace, body, _WRITE_CONTEXT)

    def _delete_pod(self, pod: Json) -> None:
        kind, user = self._find_kind(PODS), _WRITE_CONTEXT.user
        delete_object(self._registry, kind, *read_key(pod), DeleteOptions(), user)

    def _release_pod(self, pod: Json) -> None:
        """Remove the tracking finalizer of a pod, if it exists and has it."""
        stored = self._registry.store.find_object(PODS, read_key(pod))
        if stored is None or read_uid(stored) != read_uid(pod):
            return
        kept = [name for name in read_finalizers(stored) if name != TRACKING_FINALIZER]
        if len(kept) == len(read_finalizers(stored)):
            return
        self._registry.update_object(
            self._find_kind(PODS),
            *read_key(stored),
            lambda old: old | {"metadata": old["metadata"] | {"finalizers": kept}},
            _WRITE_CONTEXT,
        )

    def _expire_job(self, job: Json) -> float | None:
        """Delete a Job whose time to live is over; return the seconds until it is."""
        ttl_s = job["spec"].get("ttlSecondsAfterFinished")
        end = find_condition(job, "Complete") or find_condition(job, "Failed")
        if ttl_s is None or end is None or is_deleting(job):
            return None
        now = self._registry.clock.now()
        left_s = (parse_rfc3339(end.get("lastTransitionTime")) or now) + float(ttl_s) - now
        if left_s > 0:
            return left_s
        options = DeleteOptions(policy="Foreground")
        kind, user = self._find_kind(JOBS), _WRITE_CONTEXT.user
        delete_object(self._registry, kind, *read_key(job), options, user)
        return None

    def _find_kind(self, storage: StorageKey) -> ResourceKind:
        return self._registry.kinds.find_kind(storage[0], "v1", storage[1])


def _find_job_reference(pod: Json) -> Json | None:
    """Return the owner reference of the Job that controls a pod; None if there is none."""
    controllers = (
        reference for reference in read_owner_references(pod) if reference.get("controller")
    )
    owner = next(controllers, None)
    is_job = owner is not None and (owner["apiVersion"], owner["kind"]) == (_API_VERSION, "Job")
    return owner if is_job else None
