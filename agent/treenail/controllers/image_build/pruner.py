"""Delete images of deleted builds from their registry, at a bounded pace.

Candidates are only images that a MachineOSConfig names and that none of its builds has any longer.
An editor of a MachineOSConfig may write anything there: an image is deleted only if it is in the
own push repository, and its labels say that a build of this MachineOSConfig pushed it.
`ReferenceReader` reads from the API server, not from caches, what refers to them for each pass. If
anything cannot be read, nothing is deleted.
"""

import logging
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace

from treenail.api import annotations as key
from treenail.api import decode, machineosbuild, machineosconfig, object_meta
from treenail.builder.images.prune import (
    CheckTime,
    ImageCache,
    PruneResult,
    delete_images,
    is_lasting,
    never_late,
    read_image,
    read_stored_images,
)
from treenail.builder.registries import RegistrySettings
from treenail.clocks import Clock
from treenail.controllers.image_build import (
    build_objects,
    build_planner,
    cluster_reader,
    layer_builder,
    writer,
)
from treenail.errors import NotFoundError, TreenailError
from treenail.image.oci.documents import make_system_tag
from treenail.image.oci.prune import PrunePlan, StoredImage, collect_references, plan_pruning
from treenail.kube import api_client, resources
from treenail.registry.client import RegistryClient
from treenail.registry.errors import RegistryError
from treenail.registry.transport import TlsSettings

log = logging.getLogger(__name__)

# In the direction in which a reference spreads: an image that is assigned between two of these
# lists is found in the later one.
_LISTED = (
    resources.MACHINEOSBUILDS,
    resources.MACHINEOSCONFIGS,
    resources.MACHINECONFIGPOOLS,
    resources.ROLLOUTPOLICIES,
    resources.NODES,
    resources.MACHINECONFIGNODES,
)
_OPTIONAL = (resources.MACHINECONFIGNODES, resources.ROLLOUTPOLICIES)
PACE_S = 3600.0
"""Between two passes for one MachineOSConfig. A build that succeeds causes another one."""
REFUSED_S = 86400.0
"""Until the next try where the registry refuses deletions, unless the MachineOSConfig changes."""
_DIGEST = re.compile(r"@sha256:[0-9a-f]{64}")
_BUSY_S = 10.0
_DELETED_LIMIT = 16
"""Images of one pass."""
PASS_S = 240.0
"""Limit of one pass: shorter than pushes to the repository wait for its end."""
_CACHE_LIMIT = 5000


@dataclass(slots=True)
class ImageReferences:
    """Everything that may refer to an image."""

    digests: dict[str, str] = field(default_factory=dict)
    """The object that refers to each digest."""
    tags: dict[str, str] = field(default_factory=dict)
    """The MachineOSBuild that pushes, or may use, each tag."""
    succeeded: dict[str, set[str]] = field(default_factory=dict)
    """Digests of succeeded builds by MachineOSConfig."""
    current: dict[str, str] = field(default_factory=dict)
    """Digest of the present image by MachineOSConfig."""


class ReferenceReader:
    """Lists the objects. A kind that cannot be read makes `read` fail, so nothing is deleted."""

    def __init__(self, client: api_client.Client, reader: cluster_reader.ClusterReader) -> None:
        self._client = client
        self._reader = reader

    def read_references(self) -> ImageReferences:
        """Return the present references; raises `ClusterError`, `ConfigError`."""
        references = ImageReferences()
        configs: set[str] = set()
        for resource in _LISTED:
            for document in self._iter_objects(resource):
                meta = object_meta.read_metadata(document, resource.kind)
                name = f"{resource.kind} {meta.name}"
                for digest, why in collect_references([(name, _strip_marks(document))]).items():
                    references.digests.setdefault(digest, why)
                configs |= _find_configs(resource, document, meta)
                if resource is resources.MACHINEOSBUILDS:
                    _add_build(references, machineosbuild.MachineOSBuild.from_json(document))
                if resource is resources.MACHINEOSCONFIGS:
                    image = machineosconfig.MachineOSConfig.from_json(document).pull_spec
                    references.current[meta.name] = image.partition("@")[2]
        for name in sorted(filter(None, configs)):
            self._add_config(references, name)
        return references

    def _iter_objects(self, resource: resources.Resource) -> Iterator[decode.Json]:
        try:
            # Without a resourceVersion: the API server then reads its store, not its cache.
            for page in self._client.list_pages(resource):
                yield from page.items
        except NotFoundError:
            if resource not in _OPTIONAL:
                raise

    def _add_config(self, references: ImageReferences, name: str) -> None:
        try:
            rendered = self._reader.read_rendered_facts(name)
        except NotFoundError:
            # No node can get a config that does not exist.
            return
        images = [rendered.base_image, rendered.extensions_image]
        for digest, why in collect_references([(f"MachineConfig {name}", images)]).items():
            references.digests.setdefault(digest, why)


def _add_build(references: ImageReferences, build: machineosbuild.MachineOSBuild) -> None:
    name = f"MachineOSBuild {build.name}"
    references.tags[build.name] = name
    for system in build_objects.read_systems(build).values():
        if system.content_key:
            references.tags[make_system_tag(system.content_key)] = name
    if build.state is machineosbuild.BuildState.SUCCEEDED:
        digest = build.pull_spec.partition("@")[2]
        references.succeeded.setdefault(build.image_config, set()).add(digest)


def _strip_marks(document: decode.Json) -> Mapping[str, object]:
    """Return the object without the annotation that names expired images."""
    metadata = document.get("metadata")
    if not isinstance(metadata, dict) or not isinstance(metadata.get("annotations"), dict):
        return document
    notes = {k: v for k, v in metadata["annotations"].items() if k != key.PUSHED_IMAGES}
    return {**document, "metadata": {**metadata, "annotations": notes}}


def _find_configs(
    resource: resources.Resource, document: decode.Json, meta: object_meta.ObjectMeta
) -> set[str]:
    """Return the rendered configs that an object names."""
    if resource is resources.NODES:
        notes = meta.annotations
        return {notes.get(key.CURRENT_CONFIG, ""), notes.get(key.DESIRED_CONFIG, "")}
    if resource is resources.MACHINECONFIGPOOLS:
        fields = decode.Fields.from_json(document, resource.kind)
        parts = (fields.get_object("spec"), fields.get_object("status"))
        return {part.get_object("configuration").get_text("name") for part in parts}
    return set()


@dataclass(slots=True)
class _PruneState:
    next_at: float = 0.0
    gone: frozenset[str] = frozenset()
    """Pull specs of images that the registry no longer has."""
    problem: str | None = None
    """Why the registry refuses deletions; empty if it does not, None before the first pass."""
    refused_generation: int = -1
    """Generation of the MachineOSConfig of the refusal."""
    cache: ImageCache = field(default_factory=dict)


class ImagePruner:
    """Runs at most one pass at a time, on a thread of the executor. Thread-safe."""

    def __init__(
        self,
        planner: build_planner.BuildPlanner,
        references: ReferenceReader,
        events: writer.BuildEvents,
        clock: Clock,
        repository_lock: layer_builder.RepositoryLock,
    ) -> None:
        self._planner = planner
        self._references = references
        self._events = events
        self._clock = clock
        self._repository_lock = repository_lock
        self._lock = threading.Lock()
        self._states: dict[str, _PruneState] = {}
        self._is_running = False
        self._executor: Executor
        self._notify: Callable[[str], None]

    def start(self, executor: Executor, notify: Callable[[str], None]) -> None:
        """Use these threads; ``notify`` gets the MachineOSConfig after each pass."""
        self._executor, self._notify = executor, notify

    def request(self, name: str) -> None:
        """Permit the next pass for a MachineOSConfig at once, unless its registry refuses it."""
        with self._lock:
            state = self._get_state(name)
            if not state.problem:
                state.next_at = 0.0

    def consider(
        self,
        config: machineosconfig.MachineOSConfig,
        candidates: Sequence[build_objects.PushedImage],
    ) -> float | None:
        """Start a pass if one is due; return the seconds until the next try."""
        if not candidates:
            return None
        with self._lock:
            state = self._get_state(config.name)
            now = self._clock.monotonic()
            is_changed = state.refused_generation != config.metadata.generation
            if state.next_at > now and not (state.problem and is_changed):
                return state.next_at - now
            if self._is_running:
                return _BUSY_S
            self._is_running = True
            state.next_at = now + PACE_S
        self._executor.submit(self._run_pass, config, tuple(candidates))
        return PACE_S

    def _postpone_pass(self, name: str) -> None:
        with self._lock:
            self._get_state(name).next_at = self._clock.monotonic() + _BUSY_S

    def get_gone_images(self, name: str) -> frozenset[str]:
        """Return the images that the annotation must no longer name."""
        with self._lock:
            return self._get_state(name).gone

    def get_problem(self, name: str) -> str | None:
        """Return why the registry refuses deletions: empty if it does not, None if unknown."""
        with self._lock:
            return self._get_state(name).problem

    def forget_images(self, name: str, gone: frozenset[str]) -> None:
        """Forget images that the annotation no longer names."""
        with self._lock:
            self._get_state(name).gone -= gone

    def _get_state(self, name: str) -> _PruneState:
        return self._states.setdefault(name, _PruneState())

    def _run_pass(
        self,
        config: machineosconfig.MachineOSConfig,
        candidates: Sequence[build_objects.PushedImage],
    ) -> None:
        gone: frozenset[str] = frozenset()
        try:
            gone = self._prune_repository(config, candidates)
        except TreenailError as error:
            log.warning("cannot prune the images of %s: %s", config.name, error)
        except Exception:
            # A bug must not end pruning forever.
            log.exception("cannot prune the images of %s", config.name)
        with self._lock:
            self._get_state(config.name).gone |= gone
            self._is_running = False
        self._notify(config.name)

    def _prune_repository(
        self, config: machineosconfig.MachineOSConfig, images: Sequence[build_objects.PushedImage]
    ) -> frozenset[str]:
        """Return the images that the repository no longer has, or that are not of this config."""
        spec = images[0].spec
        login = self._planner.read_push_login(config)
        tls = TlsSettings(ca_pem=self._planner.read_ca(spec.registry))
        settings = RegistrySettings(login, tls, self._planner.read_proxy_settings())
        with (
            settings.open_client(spec.registry, spec.repository, self._clock) as client,
            self._repository_lock.try_lock_for_prune(
                f"{spec.registry}/{spec.repository}"
            ) as is_free,
        ):
            if not is_free:
                self._postpone_pass(config.name)
                return frozenset()
            return self._delete_candidates(client, spec.repository, config, images)

    def _delete_candidates(
        self,
        client: RegistryClient,
        repository: str,
        config: machineosconfig.MachineOSConfig,
        images: Sequence[build_objects.PushedImage],
    ) -> frozenset[str]:
        by_digest = {image.spec.digest: image for image in images}
        with self._lock:
            cache = self._get_state(config.name).cache
        if len(cache) > _CACHE_LIMIT:
            cache.clear()
        check_time = make_time_check(self._clock, PASS_S)
        stored = read_candidates(client, repository, config.name, by_digest, cache, check_time)
        own = {image.digest for image in stored if image.build}
        # As late as possible: a reference that appears meanwhile must count.
        present_references = self._references.read_references()
        references = _protect_tags(present_references, stored)
        previous = _find_previous(present_references, config, images)
        plan = plan_pruning(stored, references, previous)
        result = delete_images(
            client, repository, PrunePlan(plan.deleted[:_DELETED_LIMIT], plan.kept), check_time
        )
        self._record_result(result, config, repository)
        left = {image.digest for image in plan.deleted}.difference(result.deleted)
        # A list stays known until its instances are deleted: they have tags of their own.
        gone = {
            image.digest
            for image in plan.deleted
            if left.isdisjoint({image.digest, *image.instances})
        }
        absent = (by_digest.keys() - own) | gone
        return frozenset(by_digest[digest].image for digest in absent if digest in by_digest)

    def _record_result(
        self, result: PruneResult, config: machineosconfig.MachineOSConfig, repository: str
    ) -> None:
        """Record the end of a pass; a lasting refusal is reported once."""
        begin = f"cannot delete images of {repository}: "
        if result.problem is None:
            with self._lock:
                state = self._get_state(config.name)
                # A pass that deleted nothing shows nothing about the registry.
                if result.deleted and (state.problem or begin).startswith(begin):
                    state.problem = ""
            return
        log.warning("%s: %s%s", config.name, begin, result.problem)
        if not is_lasting(result.problem):
            return
        # Without the digest, which would count as a reference where the message is stored.
        message = begin + _DIGEST.sub("", str(result.problem))
        with self._lock:
            state = self._get_state(config.name)
            is_known, state.problem = state.problem == message, message
            state.refused_generation = config.metadata.generation
            state.next_at = self._clock.monotonic() + REFUSED_S
        if not is_known:
            self._events.record_prune_problem(config, message)


def make_time_check(clock: Clock, limit_s: float) -> CheckTime:
    """Return a function that raises `RegistryError` when more than ``limit_s`` have passed."""
    deadline = clock.monotonic() + limit_s

    def check() -> None:
        if clock.monotonic() > deadline:
            raise RegistryError(f"the registry did not answer all requests within {limit_s:g} s")

    return check


def read_candidates(
    client: RegistryClient,
    repository: str,
    owner: str,
    candidates: Iterable[str],
    cache: ImageCache,
    check_time: CheckTime = never_late,
) -> tuple[StoredImage, ...]:
    """Return all images; only candidates that builds of the owner pushed have a build."""
    tagged = read_stored_images(client, repository, cache, check_time)
    images = {stored.digest: stored for stored in tagged}
    own: set[str] = set()
    for digest in candidates:
        check_time()
        is_known = digest in images or digest in cache
        if not is_known and client.head_manifest(repository, digest) is None:
            continue
        if digest not in images:
            # Its tag names a newer image, or an interrupted pass left instances of the list.
            images[digest] = read_image(client, repository, digest, cache)
        if images[digest].owner == owner:
            # Only lists name their instances; the plan keeps those of lists that stay.
            own |= {digest, *images[digest].instances}
    return tuple(
        image if image.digest in own else replace(image, build="") for image in images.values()
    )


def _protect_tags(references: ImageReferences, images: Iterable[StoredImage]) -> Mapping[str, str]:
    """Return the references by digest; builds refer to the tags that they push, too."""
    by_tag = {
        image.digest: references.tags[image.build]
        for image in images
        if image.build in references.tags
    }
    return {**by_tag, **references.digests}


def _find_previous(
    references: ImageReferences,
    config: machineosconfig.MachineOSConfig,
    images: Sequence[build_objects.PushedImage],
) -> list[str]:
    """Return the image before the present one, unless a build names one."""
    current = references.current.get(config.name, "")
    if references.succeeded.get(config.name, set()) - {current}:
        return []
    complete = [image.spec.digest for image in images if image.is_complete]
    return [digest for digest in complete if digest != current][-1:]
