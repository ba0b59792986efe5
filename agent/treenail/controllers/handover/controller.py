"""Controller ``install``: completes an installation in image mode, and is idle afterwards.

It adopts the objects of the installation, moves its images to their final registries, and asks
the nodes to drop the registry on the bootstrap host. All state is in the cluster and in the
registries: after a kill at any point the next leader goes on.
"""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Lock

from treenail.api import annotations as key
from treenail.api.decode import Fields, Json
from treenail.api.machineconfigpool import MachineConfigPool
from treenail.api.machineosbuild import MachineOSBuild
from treenail.api.machineosconfig import API_VERSION, MachineOSConfig
from treenail.api.meta import Condition
from treenail.builder.images.copies import CopyStopped
from treenail.clock import Clock, format_rfc3339, parse_rfc3339
from treenail.controllers.handover.adoption import decide_adoption, describe_action
from treenail.controllers.handover.adoption_writer import AdoptionWriter
from treenail.controllers.handover.handover_objects import (
    HANDOVER_SECRET,
    RESULT_CONFIGMAP,
    Handover,
    HandoverImage,
    HandoverResult,
    build_result_configmap,
    read_handover_secret,
    read_result_configmap,
)
from treenail.controllers.handover.handover_state import (
    HANDED_OVER,
    MoveState,
    RegistryNode,
    compute_condition,
    describe_deadline,
    find_nodes_to_mark,
    has_result,
    merge_results,
)
from treenail.controllers.handover.image_mover import ImageMove, ImageMover, MoveFailed
from treenail.controllers.handover.repeats import Repeats
from treenail.controllers.pools.os_image import find_pool_owner
from treenail.controllers.runtime.informers import Informers, InformerView
from treenail.controllers.runtime.metrics import ControllerMetrics
from treenail.errors import AlreadyExistsError, ConfigError, NotFoundError
from treenail.installer.inputs.image_mode import NAMESPACE
from treenail.kube.client import Client
from treenail.kube.events import EventRecorder, ObjectReference
from treenail.kube.resources import (
    CONFIGMAPS,
    MACHINECONFIGPOOLS,
    MACHINEOSBUILDS,
    MACHINEOSCONFIGS,
    NODES,
    SECRETS,
)
from treenail.kube.watch import WatchScope

log = logging.getLogger(__name__)

KEY = "installation"
DEFAULT_DEADLINE_S = 3600.0
IDLE_S = 60.0
"""Interval of looks for the Secret of an installation, in case its watch is forbidden."""
_BUSY_S = 5.0
_STALE_RETRY_S = 1.0
_NEEDED_KINDS = frozenset({MACHINEOSCONFIGS.plural, MACHINEOSBUILDS.plural})
_RESTORED_S = 60.0
"""Time after the first sign of a restored etcd in which each list may be the first of its kind."""
_THREADS = 2
_MARK_AGAIN_S = 30.0


class ImageMoves:
    """Attempts to move images on threads of their own. Thread-safe."""

    def __init__(self, mover: ImageMover, clock: Clock, notify: Callable[[str], None]) -> None:
        self._mover = mover
        self._clock = clock
        self._notify = notify
        self._lock = Lock()
        self._states: dict[HandoverImage, MoveState] = {}
        self._running: set[HandoverImage] = set()
        self._stop = Event()
        self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="install-registry")

    def find_state(self, image: HandoverImage) -> MoveState | None:
        """Return the result of the last attempt; None before the first one has ended."""
        with self._lock:
            return self._states.get(image)

    def start_due(self, move: ImageMove) -> float:
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
        self._executor.submit(self._run, move)
        return _BUSY_S

    def close(self) -> None:
        """Stop running copies between two blobs."""
        self._stop.set()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _run(self, move: ImageMove) -> None:
        image, failure = move.image, MoveState()
        try:
            warning = self._mover.move_image(move, self._stop.is_set)
            done = MoveState(is_done=True, message=warning)
        except CopyStopped:
            return
        except MoveFailed as error:
            failure = MoveState(reason=error.reason, message=str(error))
            done = None
        except Exception:
            # A bug must not leave the image in progress forever.
            log.exception("cannot move %s", image.final_image)
            failure = MoveState(reason="InternalError", message="internal error; see the log")
            done = None
        with self._lock:
            before = self._states.get(image)
            count = 1 if before is None else before.failures + 1
            self._states[image] = done or MoveState(
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
        client: Client,
        clock: Clock,
        recorder: EventRecorder,
        mover: ImageMover,
        *,
        deadline_s: float = DEFAULT_DEADLINE_S,
        namespace: str = NAMESPACE,
        metrics: ControllerMetrics | None = None,
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
        self._repeats = Repeats()
        if metrics is not None:
            self._gauge = metrics.add_gauge(
                "image_handover_overdue",
                "1 while the image of an installation is not in its final registry in time.",
                ("pool",),
            )
        self._moves: ImageMoves
        self._configs: InformerView[MachineOSConfig]
        self._builds: InformerView[MachineOSBuild]
        self._pools: InformerView[MachineConfigPool]
        self._nodes: InformerView[RegistryNode]
        self._informers: Informers

    def register_watches(self, informers: Informers, enqueue: Callable[[str], None]) -> None:
        """Watch the objects that an installation concerns."""
        self._moves = ImageMoves(self._mover, self._clock, enqueue)
        self._configs = informers.add_view(
            WatchScope(MACHINEOSCONFIGS), MachineOSConfig.from_json, optional=True
        )
        self._builds = informers.add_view(
            WatchScope(MACHINEOSBUILDS), MachineOSBuild.from_json, optional=True
        )
        self._pools = informers.add_view(
            WatchScope(MACHINECONFIGPOOLS), MachineConfigPool.from_json
        )
        self._nodes = informers.add_view(WatchScope(NODES), RegistryNode.from_json)
        # Its content stays out of the cache: it has logins.
        secret = informers.add_view(
            WatchScope(
                SECRETS,
                self._namespace,
                field_selector=f"metadata.name={HANDOVER_SECRET}",
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

        def handle_config(_name: str, _: object, after: MachineOSConfig | None) -> None:
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
        found = self._find_secret()
        if found is None:
            if result is not None:
                # A machine that joined late.
                self._mark_nodes(result.registry)
            return IDLE_S
        handover, published = found
        if has_result(result, handover):
            self._mark_nodes(handover.registry)
            self._delete_secret()
            return IDLE_S
        adoption_s = self._adopt(handover)
        if adoption_s > 0:
            return adoption_s
        waited_s = self._clock.now() - published
        overdue = describe_deadline(waited_s, self._deadline_s)
        delays = [self._advance(handover, image, overdue) for image in handover.images]
        states = [self._moves.find_state(image) for image in handover.images]
        if all(state is not None and state.is_done for state in states):
            self._finish(handover, result)
            return IDLE_S
        if not overdue:
            delays.append(max(self._deadline_s - waited_s, 1.0))
        return min(delays, default=_BUSY_S)

    def close(self) -> None:
        """Stop the threads that copy images."""
        self._moves.close()

    # Observation

    def _find_secret(self) -> tuple[Handover, float] | None:
        """Return the hand-over and when it was published; None without one."""
        try:
            document = self._client.get(SECRETS, HANDOVER_SECRET, namespace=self._namespace)
        except NotFoundError:
            return None
        meta = Fields.from_json(document, "Secret").get_object("metadata")
        published = parse_rfc3339(meta.get_text("creationTimestamp")) or self._clock.now()
        return read_handover_secret(document), published

    def _read_result(self) -> HandoverResult | None:
        try:
            document = self._client.get(CONFIGMAPS, RESULT_CONFIGMAP, namespace=self._namespace)
            return read_result_configmap(document)
        except NotFoundError:
            return None
        except ConfigError as error:
            log.warning("%s; the images are looked up again", error)
            return None

    # Steps

    def _adopt(self, handover: Handover) -> float:
        """Adopt what the cluster lacks; return when to look again, 0 once all of it is seen.

        A watch that is late or disconnected shows writes after minutes, and the same writes would
        be decided all the time.
        """
        actions = decide_adoption(
            handover,
            self._writer.configs.overlay(self._configs),
            self._writer.builds.overlay(self._builds),
            self._writer.created,
        )
        if not actions:
            self._repeats = Repeats()
            return 0.0
        now, names = self._clock.monotonic(), tuple(map(describe_action, actions))
        wait_s = self._repeats.compute_wait_s(names, now)
        if wait_s > 0:
            return wait_s
        self._repeats = self._repeats.follow(names, now)
        for action in actions:
            # A conflict or an object that the watch does not show yet is decided again.
            self._writer.execute(action)
        return self._repeats.pause_s

    def _advance(self, handover: Handover, image: HandoverImage, overdue: str) -> float:
        """Continue with one image, and report it; return when to look again."""
        configs = self._writer.configs.overlay(self._configs)
        config = find_pool_owner(image.pool, configs.values())
        pool = self._pools.find(image.pool)
        if config is None or pool is None:
            missing = "MachineOSConfig" if config is None else "MachineConfigPool"
            log.debug("cannot hand over the image of pool %s yet: no %s", image.pool, missing)
            return _BUSY_S
        move = ImageMove(handover, image, config, pool.configuration.name)
        delay_s = self._moves.start_due(move)
        state = self._moves.find_state(image)
        self._measure(image.pool, is_late=bool(overdue) and not (state and state.is_done))
        self._report(config, compute_condition(handover, image, state, overdue))
        return delay_s

    def _measure(self, pool: str, *, is_late: bool) -> None:
        if pool not in self._late and self._gauge is not None:
            self._gauge.set_function(pool, by=lambda: float(self._late.get(pool, False)))
        self._late[pool] = is_late

    def _report(self, config: MachineOSConfig, condition: Condition) -> None:
        known = next((each for each in config.conditions if each.type == HANDED_OVER), None)
        wanted = (condition.status, condition.reason, condition.message)
        if known is not None and (known.status, known.reason, known.message) == wanted:
            return
        self._writer.write_conditions(config, [condition])
        if known is not None and (known.status, known.reason) == wanted[:2]:
            return
        owner = ObjectReference(
            MACHINEOSCONFIGS.kind, config.name, config.metadata.uid, api_version=API_VERSION
        )
        if condition.status == "True":
            self._recorder.record_normal(owner, "ImageHandedOver", condition.message)
        elif known is not None:
            self._recorder.record_warning(owner, condition.reason, condition.message)

    def _finish(self, handover: Handover, before: HandoverResult | None) -> None:
        """Ask the nodes to drop the bootstrap registry, and inform the bootstrap host."""
        self._mark_nodes(handover.registry)
        result = merge_results(before, handover, format_rfc3339(self._clock.now()))
        document = build_result_configmap(result, namespace=self._namespace)
        try:
            self._client.create(CONFIGMAPS, document, namespace=self._namespace)
        except AlreadyExistsError:
            # Without a resourceVersion the update replaces any version.
            self._client.update(CONFIGMAPS, RESULT_CONFIGMAP, document, namespace=self._namespace)
        log.info("handed over the images of pools %s", ", ".join(sorted(result.digests)))
        self._delete_secret()

    def _mark_nodes(self, registry: str) -> None:
        now = self._clock.monotonic()
        self._marked_at = {
            name: at for name, at in self._marked_at.items() if now - at < _MARK_AGAIN_S
        }
        for name in find_nodes_to_mark(self._nodes.get_all().values(), registry):
            if name in self._marked_at:
                # The watch does not show the annotation yet.
                continue
            body: Json = {"metadata": {"annotations": {key.REMOVE_BOOTSTRAP_REGISTRY: registry}}}
            try:
                self._client.patch(NODES, name, body)
            except NotFoundError:
                continue
            self._marked_at[name] = now
            log.info("asked node %s to drop the bootstrap registry %s", name, registry)

    def _delete_secret(self) -> None:
        """Delete the logins of a registry that is no longer used."""
        try:
            self._client.delete(SECRETS, HANDOVER_SECRET, namespace=self._namespace)
        except NotFoundError:
            return
        log.info("deleted Secret %s: the hand-over is complete", HANDOVER_SECRET)


def _read_version(document: Json) -> str:
    return Fields.from_json(document, "Secret").get_object("metadata").get_text("resourceVersion")
