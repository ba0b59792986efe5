"""Controller ``install``: completes an installation in image mode, and is idle afterwards.

It adopts the objects of the installation, moves its images to their final registries, and asks
the nodes to drop the registry on the bootstrap host. All state is in the cluster and in the
registries: after a kill at any point the next leader goes on.

`InstallationGate` delays the first builds of a control plane whose image the bootstrap host has
built. The manifests of an installation reach the cluster before the image does, and a build of the
same inputs would be the second one.
"""

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event, Lock

from treenail import clocks, errors
from treenail.api import annotations as key
from treenail.api import (
    component_names,
    decode,
    machineconfigpool,
    machineosbuild,
    machineosconfig,
    object_meta,
)
from treenail.builder.images.copies import CopyStopped
from treenail.controllers.handover import (
    adoption,
    handover_objects,
    image_mode,
    image_mode_field,
    image_mover,
)
from treenail.controllers.pools import os_image, pool_views
from treenail.controllers.runtime import controller_metrics, informer_set, own_writes
from treenail.kube import api_client, event_recorder, resources, watch

log = logging.getLogger(__name__)


KEY = "installation"
DEFAULT_DEADLINE_S = 3600.0
IDLE_S = 60.0
"""Interval of looks for the Secret of an installation, in case its watch is forbidden."""
_BUSY_S = 5.0
_STALE_RETRY_S = 1.0
_NEEDED_KINDS = frozenset({resources.MACHINEOSCONFIGS.plural, resources.MACHINEOSBUILDS.plural})
_RESTORED_S = 60.0
"""Time after the first sign of a restored etcd in which each list may be the first of its kind."""
_THREADS = 2
_MARK_AGAIN_S = 30.0


class ImageMoveAttempts:
    """Attempts to move images on threads of their own. Thread-safe."""

    def __init__(
        self, mover: image_mover.ImageMover, clock: clocks.Clock, notify: Callable[[str], None]
    ) -> None:
        self._mover = mover
        self._clock = clock
        self._notify = notify
        self._lock = Lock()
        self._states: dict[handover_objects.HandoverImage, handover_objects.MoveState] = {}
        self._running: set[handover_objects.HandoverImage] = set()
        self._stop = Event()
        self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="install-registry")

    def find_state(
        self, image: handover_objects.HandoverImage
    ) -> handover_objects.MoveState | None:
        """Return the result of the last attempt; None before the first one has ended."""
        with self._lock:
            return self._states.get(image)

    def start_due(self, move: image_mover.ImageMove) -> float:
        """Start an attempt unless one runs or waits; return the seconds until the next look."""
        image = move.image
        with self._lock:
            state = self._states.get(image)
            if image in self._running or (state is not None and state.is_done):
                return _BUSY_S
            wait_s = 0.0 if state is None else state.retry_at - self._clock.monotonic()
            if wait_s > 0:
                return wait_s
            self._running.add(image)
        self._executor.submit(self._run_move, move)
        return _BUSY_S

    def close(self) -> None:
        """Stop running copies between two blobs."""
        self._stop.set()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _run_move(self, move: image_mover.ImageMove) -> None:
        image, failure = move.image, handover_objects.MoveState()
        try:
            warning = self._mover.move_image(move, self._stop.is_set)
            done = handover_objects.MoveState(is_done=True, message=warning)
        except CopyStopped:
            return
        except image_mover.MoveFailed as error:
            failure = handover_objects.MoveState(reason=error.reason, message=str(error))
            done = None
        except Exception:
            # A bug must not leave the image in progress forever.
            log.exception("cannot move %s", image.final_image)
            failure = handover_objects.MoveState(
                reason="InternalError", message="internal error; see the log"
            )
            done = None
        with self._lock:
            before = self._states.get(image)
            count = 1 if before is None else before.failures + 1
            self._states[image] = done or handover_objects.MoveState(
                failures=count,
                reason=failure.reason,
                message=failure.message,
                ended=self._clock.monotonic(),
            )
            self._running.discard(image)
        if done is None and (before is None or before.message != failure.message):
            log.warning("cannot hand over %s: %s", image.final_image, failure.message)
        self._notify(KEY)


class InstallController:
    """A `treenail.controllers.runtime.workers.Controller` with one key."""

    name = "install"

    def __init__(
        self,
        client: api_client.Client,
        clock: clocks.Clock,
        recorder: event_recorder.EventRecorder,
        mover: image_mover.ImageMover,
        *,
        deadline_s: float = DEFAULT_DEADLINE_S,
        namespace: str = component_names.NAMESPACE,
        metrics: controller_metrics.ControllerMetrics | None = None,
    ) -> None:
        self._client = client
        self._clock = clock
        self._recorder = recorder
        self._mover = mover
        self._deadline_s = deadline_s
        self._namespace = namespace
        self._writer = AdoptionWriter(client, clock)
        self._marked_at: dict[str, float] = {}
        """Monotonic time of the annotation that requests to drop the bootstrap registry."""
        self._late: dict[str, bool] = {}
        """Whether the image of a pool is overdue."""
        self._gauge = None
        self._backoff = RepeatBackoff()
        if metrics is not None:
            self._gauge = metrics.add_gauge(
                "image_handover_overdue",
                "1 while the image of an installation is not in its final registry in time.",
                ("pool",),
            )
        self._moves: ImageMoveAttempts
        self._configs: informer_set.InformerView[machineosconfig.MachineOSConfig]
        self._builds: informer_set.InformerView[machineosbuild.MachineOSBuild]
        self._pools: informer_set.InformerView[machineconfigpool.MachineConfigPool]
        self._nodes: informer_set.InformerView[handover_objects.RegistryNode]
        self._informers: informer_set.InformerSet

    def register_watches(
        self, informers: informer_set.InformerSet, enqueue: Callable[[str], None]
    ) -> None:
        """Watch the objects that an installation concerns."""
        self._moves = ImageMoveAttempts(self._mover, self._clock, enqueue)
        self._configs, self._builds = pool_views.add_build_views(informers)
        self._pools = informers.add_view(
            watch.WatchScope(resources.MACHINECONFIGPOOLS),
            machineconfigpool.MachineConfigPool.from_json,
        )
        self._nodes = informers.add_view(
            watch.WatchScope(resources.NODES), handover_objects.RegistryNode.from_json
        )
        # Its content stays out of the cache: it has logins.
        secret = informers.add_view(
            watch.WatchScope(
                resources.SECRETS,
                self._namespace,
                field_selector=f"metadata.name={handover_objects.HANDOVER_SECRET}",
                is_optional=True,
                has_metadata_only=True,
            ),
            _read_version,
            optional=True,
        )

        self._informers = informers

        def handle_list() -> None:
            if informers.restored_s < _RESTORED_S:
                # A restore of etcd took objects away.
                self._writer.forget_writes()
                enqueue(KEY)

        def handle_config(
            _name: str, _: object, after: machineosconfig.MachineOSConfig | None
        ) -> None:
            if after is None:
                self._writer.created.clear()

        self._configs.add_handler(handle_config)
        for view in (self._configs, self._builds, self._pools, secret):
            view.add_handler(lambda *_: enqueue(KEY))
            view.add_list_handler(handle_list)
        self._nodes.add_handler(
            lambda _name, before, after: enqueue(KEY) if before != after else None
        )
        enqueue(KEY)

    def sync_key(self, key: str) -> float | None:  # noqa: ARG002  # there is one
        """Take the next steps; return the seconds until the next look."""
        if reason := self._informers.describe_staleness(_NEEDED_KINDS):
            # Otherwise the hand-over could end with objects that a restored etcd does not have.
            log.debug("install: waiting: %s", reason)
            return _STALE_RETRY_S
        result = self._read_result()
        secret = self._find_secret()
        if secret is None:
            if result is not None:
                # A machine that joined late.
                self._mark_nodes(result.registry)
            return IDLE_S
        handover, published = secret
        if handover_objects.has_result(result, handover):
            self._mark_nodes(handover.registry)
            self._delete_secret()
            return IDLE_S
        adoption_s = self._adopt_objects(handover)
        if adoption_s > 0:
            return adoption_s
        waited_s = self._clock.now() - published
        overdue = handover_objects.describe_deadline(waited_s, self._deadline_s)
        delays = [self._advance_image(handover, image, overdue) for image in handover.images]
        states = [self._moves.find_state(image) for image in handover.images]
        if all(state is not None and state.is_done for state in states):
            self._finish_handover(handover, result)
            return IDLE_S
        if not overdue:
            delays.append(max(self._deadline_s - waited_s, 1.0))
        return min(delays, default=_BUSY_S)

    def close(self) -> None:
        """Stop the threads that copy images."""
        self._moves.close()

    # Observation

    def _find_secret(self) -> tuple[handover_objects.Handover, float] | None:
        """Return the hand-over and when it was published; None without one."""
        document = self._client.find(
            resources.SECRETS, handover_objects.HANDOVER_SECRET, namespace=self._namespace
        )
        if document is None:
            return None
        meta = decode.Fields.from_json(document, "Secret").get_object("metadata")
        published = clocks.parse_rfc3339(meta.get_text("creationTimestamp")) or self._clock.now()
        return handover_objects.read_handover_secret(document), published

    def _read_result(self) -> handover_objects.HandoverResult | None:
        document = self._client.find(
            resources.CONFIGMAPS, handover_objects.RESULT_CONFIGMAP, namespace=self._namespace
        )
        try:
            return None if document is None else handover_objects.read_result_configmap(document)
        except errors.ConfigError as error:
            log.warning("%s; the images are looked up again", error)
            return None

    # Steps

    def _adopt_objects(self, handover: handover_objects.Handover) -> float:
        """Adopt what the cluster lacks; return when to look again, 0 once all of it is seen.

        A watch that is late or disconnected shows writes after minutes, and the same writes would
        be decided all the time.
        """
        actions = adoption.decide_adoption(
            handover,
            self._writer.configs.overlay(self._configs),
            self._writer.builds.overlay(self._builds),
            self._writer.created,
        )
        if not actions:
            self._backoff = RepeatBackoff()
            return 0.0
        now, names = self._clock.monotonic(), tuple(map(adoption.describe_action, actions))
        wait_s = self._backoff.compute_wait_s(names, now)
        if wait_s > 0:
            return wait_s
        self._backoff = self._backoff.record(names, now)
        for action in actions:
            # A conflict or an object that the watch does not show yet is decided again.
            self._writer.execute(action)
        return self._backoff.pause_s

    def _advance_image(
        self,
        handover: handover_objects.Handover,
        image: handover_objects.HandoverImage,
        overdue: str,
    ) -> float:
        """Continue with one image, and report it; return when to look again."""
        configs = self._writer.configs.overlay(self._configs)
        config = os_image.find_pool_owner(image.pool, configs.values())
        pool = self._pools.find(image.pool)
        if config is None or pool is None:
            missing = "MachineOSConfig" if config is None else "MachineConfigPool"
            log.debug("cannot hand over the image of pool %s yet: no %s", image.pool, missing)
            return _BUSY_S
        move = image_mover.ImageMove(handover, image, config, pool.configuration.name)
        delay_s = self._moves.start_due(move)
        state = self._moves.find_state(image)
        self._set_overdue(image.pool, is_late=bool(overdue) and not (state and state.is_done))
        self._report_condition(
            config, handover_objects.compute_condition(handover, image, state, overdue)
        )
        return delay_s

    def _set_overdue(self, pool: str, *, is_late: bool) -> None:
        if pool not in self._late and self._gauge is not None:
            self._gauge.set_function(pool, by=lambda: float(self._late.get(pool, False)))
        self._late[pool] = is_late

    def _report_condition(
        self, config: machineosconfig.MachineOSConfig, condition: object_meta.Condition
    ) -> None:
        known = next(
            (
                observed
                for observed in config.conditions
                if observed.type == handover_objects.HANDED_OVER
            ),
            None,
        )
        wanted = (condition.status, condition.reason, condition.message)
        if known is not None and (known.status, known.reason, known.message) == wanted:
            return
        self._writer.write_conditions(config, [condition])
        if known is not None and (known.status, known.reason) == wanted[:2]:
            return
        owner = event_recorder.ObjectReference(
            resources.MACHINEOSCONFIGS.kind,
            config.name,
            config.metadata.uid,
            api_version=machineosconfig.API_VERSION,
        )
        if condition.status == "True":
            self._recorder.record_normal(owner, "ImageHandedOver", condition.message)
        elif known is not None:
            self._recorder.record_warning(owner, condition.reason, condition.message)

    def _finish_handover(
        self, handover: handover_objects.Handover, before: handover_objects.HandoverResult | None
    ) -> None:
        """Ask the nodes to drop the bootstrap registry, and inform the bootstrap host."""
        self._mark_nodes(handover.registry)
        result = handover_objects.merge_results(
            before, handover, clocks.format_rfc3339(self._clock.now())
        )
        document = handover_objects.build_result_configmap(result, namespace=self._namespace)
        try:
            self._client.create(resources.CONFIGMAPS, document, namespace=self._namespace)
        except errors.AlreadyExistsError:
            # Without a resourceVersion the update replaces any version.
            self._client.update(
                resources.CONFIGMAPS,
                handover_objects.RESULT_CONFIGMAP,
                document,
                namespace=self._namespace,
            )
        log.info("handed over the images of pools %s", ", ".join(sorted(result.digests)))
        self._delete_secret()

    def _mark_nodes(self, registry: str) -> None:
        now = self._clock.monotonic()
        self._marked_at = {
            name: at for name, at in self._marked_at.items() if now - at < _MARK_AGAIN_S
        }
        for name in handover_objects.find_nodes_to_mark(self._nodes.get_all().values(), registry):
            if name in self._marked_at:
                # The watch does not show the annotation yet.
                continue
            body: decode.Json = {
                "metadata": {"annotations": {key.REMOVE_BOOTSTRAP_REGISTRY: registry}}
            }
            try:
                self._client.patch(resources.NODES, name, body)
            except errors.NotFoundError:
                continue
            self._marked_at[name] = now
            log.info("asked node %s to drop the bootstrap registry %s", name, registry)

    def _delete_secret(self) -> None:
        """Delete the logins of a registry that is no longer used."""
        try:
            self._client.delete(
                resources.SECRETS, handover_objects.HANDOVER_SECRET, namespace=self._namespace
            )
        except errors.NotFoundError:
            return
        log.info("deleted Secret %s: the hand-over is complete", handover_objects.HANDOVER_SECRET)


def _read_version(document: decode.Json) -> str:
    return (
        decode.Fields.from_json(document, "Secret")
        .get_object("metadata")
        .get_text("resourceVersion")
    )


class AdoptionWriter:
    """Writes objects; a write to a changed object fails with `ConflictError`."""

    def __init__(self, client: api_client.Client, clock: clocks.Clock) -> None:
        self._client = client
        self._clock = clock
        self.configs: own_writes.OwnWrites[machineosconfig.MachineOSConfig] = own_writes.OwnWrites(
            clock
        )
        self.builds: own_writes.OwnWrites[machineosbuild.MachineOSBuild] = own_writes.OwnWrites(
            clock
        )
        self.created: set[tuple[str, str, str, str]] = set()
        """Keys of objects that exist, as attempts to create them found."""

    def forget_writes(self) -> None:
        """Forget what was written: a restored etcd may lack it."""
        self.created.clear()
        self.configs.forget_writes()
        self.builds.forget_writes()

    def execute(self, action: adoption.AdoptionAction) -> None:
        """Execute one action; raise `ClusterError`."""
        match action:
            case adoption.CreateObject():
                self._create_object(action)
            case adoption.DeleteFailedBuild(build):
                try:
                    self._client.delete(
                        resources.MACHINEOSBUILDS, build.name, uid=build.metadata.uid
                    )
                except errors.NotFoundError:
                    return
                self.builds.record_deletion(build.name, build.metadata.uid)
                log.info("deleted %s, which has no image: the installation built it", build.name)
            case adoption.FinishBuild(build, status):
                body: decode.Json = {
                    "metadata": {"resourceVersion": build.metadata.resource_version},
                    "status": status,
                }
                written = self._client.patch(
                    resources.MACHINEOSBUILDS, build.name, body, subresource="status"
                )
                self.builds.record_write(build, machineosbuild.MachineOSBuild.from_json(written))
                log.info("adopted the image of MachineOSBuild %s", build.name)
            case adoption.AnnotateConfig(config, annotations):
                meta: decode.Json = {
                    "resourceVersion": config.metadata.resource_version,
                    "annotations": dict(annotations),
                }
                written = self._client.patch(
                    resources.MACHINEOSCONFIGS, config.name, {"metadata": meta}
                )
                self.configs.record_write(
                    config, machineosconfig.MachineOSConfig.from_json(written)
                )
            case adoption.ServeImage(config, build, conditions):
                self.write_conditions(
                    config,
                    conditions,
                    {
                        "currentImagePullSpec": build.pull_spec,
                        "machineOSBuild": {
                            "group": resources.MACHINEOSBUILDS.group,
                            "resource": resources.MACHINEOSBUILDS.plural,
                            "name": build.name,
                        },
                        "observedGeneration": config.metadata.generation,
                    },
                )
                log.info("pool %s has the image %s", config.pool, build.pull_spec)

    def write_conditions(
        self,
        config: machineosconfig.MachineOSConfig,
        conditions: Iterable[object_meta.Condition],
        status: decode.Json | None = None,
    ) -> None:
        """Write conditions of a MachineOSConfig beside those of other writers."""
        now = clocks.format_rfc3339(self._clock.now())
        merged = object_meta.merge_conditions(config.conditions, list(conditions), now=now)
        body: decode.Json = {
            # A merge patch replaces the whole list, so it must fail if another writer changed it.
            "metadata": {"resourceVersion": config.metadata.resource_version},
            "status": {
                **(status or {}),
                "conditions": [condition.to_json() for condition in merged],
            },
        }
        written = self._client.patch(
            resources.MACHINEOSCONFIGS, config.name, body, subresource="status"
        )
        self.configs.record_write(config, machineosconfig.MachineOSConfig.from_json(written))

    def _create_object(self, action: adoption.CreateObject) -> None:
        kind, resource = action.resource.kind, action.resource
        place = action.namespace or (component_names.NAMESPACE if resource.namespaced else "")
        try:
            created = self._client.create(resource, action.document, namespace=place)
        except errors.AlreadyExistsError:
            log.debug("%s %s exists", kind, action.name)
            if resource == resources.SECRETS:
                self._replace_secret(action, place)
        except errors.ForbiddenError as error:
            if action.resource != resources.SECRETS:
                raise
            # In a namespace that is not that of builds. The installer creates it there, too.
            log.warning("did not adopt Secret %s/%s: %s", place, action.name, error)
        else:
            if resource == resources.MACHINEOSCONFIGS:
                self.configs.record_write(None, machineosconfig.MachineOSConfig.from_json(created))
            elif resource == resources.MACHINEOSBUILDS:
                self.builds.record_write(None, machineosbuild.MachineOSBuild.from_json(created))
            log.info("created %s %s of the installation", kind, action.name)
        self.created.add(action.key)

    def _replace_secret(self, action: adoption.CreateObject, place: str) -> None:
        """Replace a Secret of an earlier hand-over: the user has corrected its login."""
        present = self._client.get(resources.SECRETS, action.name, namespace=place)
        if not adoption.can_replace(present, action.document):
            return
        version = resources.get_object(present, "metadata").get("resourceVersion")
        metadata = {**resources.get_object(action.document, "metadata"), "resourceVersion": version}
        body: decode.Json = {**action.document, "metadata": metadata}
        self._client.update(resources.SECRETS, action.name, body, namespace=place)
        log.info("replaced Secret %s by that of the newest installation", action.name)


_SETTLE_S = 30.0
"""Time for which the watch of builds may be behind the result of the hand-over."""


class InstallationGate:
    """Says which pools wait for the installation. Thread-safe."""

    def __init__(
        self,
        client: api_client.Client,
        clock: clocks.Clock,
        *,
        namespace: str = component_names.NAMESPACE,
    ) -> None:
        self._client = client
        self._clock = clock
        self._namespace = namespace

    def find_hold_reason(self, pool: str) -> str:
        """Return why the first build of a pool must wait; empty if it can begin.

        Raises `ClusterError`.
        """
        if pool not in machineconfigpool.CONTROL_PLANE_POOLS:
            return ""
        settings = self._find_configmap(image_mode.CONFIGMAP)
        if settings is None or self._is_complete():
            return ""
        try:
            if not image_mode_field.read_settings_configmap(
                settings, where=f"ConfigMap {image_mode.CONFIGMAP}"
            ).is_enabled:
                return ""
        except errors.ConfigError as error:
            log.warning("%s; pool %s does not wait for the installation", error, pool)
            return ""
        return (
            "waiting for the image that the bootstrap host built; to build it in the cluster "
            f"instead, run: kubectl delete configmap -n {self._namespace} {image_mode.CONFIGMAP}"
        )

    def _is_complete(self) -> bool:
        """Return whether the images were handed over, and the caches show the adopted builds."""
        document = self._find_configmap(handover_objects.RESULT_CONFIGMAP)
        if document is None:
            return False
        try:
            completed = clocks.parse_rfc3339(
                handover_objects.read_result_configmap(document).completed
            )
        except errors.ConfigError as error:
            log.warning("%s; the control plane does not wait for the installation", error)
            return True
        return completed is None or self._clock.now() - completed > _SETTLE_S

    def _find_configmap(self, name: str) -> decode.Json | None:
        try:
            return self._client.get(resources.CONFIGMAPS, name, namespace=self._namespace)
        except (errors.NotFoundError, errors.ForbiddenError):
            # A role of an older version does not permit it.
            return None


_FIRST_S, _MAX_S = 0.1, 30.0


@dataclass(frozen=True, slots=True)
class RepeatBackoff:
    """The last writes, and the pause before equal ones: it doubles each time."""

    names: tuple[str, ...] = ()
    written_at: float = 0.0
    """Monotonic."""
    pause_s: float = _FIRST_S

    def compute_wait_s(self, names: tuple[str, ...], now: float) -> float:
        """Return the seconds before these writes may be sent; 0 for other ones than the last."""
        return max(self.written_at + self.pause_s - now, 0.0) if names == self.names else 0.0

    def record(self, names: tuple[str, ...], now: float) -> "RepeatBackoff":
        """Return the record after these writes."""
        is_equal = names == self.names
        return RepeatBackoff(names, now, min(2 * self.pause_s, _MAX_S) if is_equal else _FIRST_S)
