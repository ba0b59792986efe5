"""Requests of image builds to registries.

`LayerBuilder` adds the config to images through registries alone, and checks images.
`RepositoryLock` excludes pushes to a repository while its images are pruned.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from treenail import __version__, clocks, errors, oci_content
from treenail.api import machineosconfig, pullspec
from treenail.builder import failures, registries
from treenail.builder.append_config import (
    AppendedImage,
    ImageDestination,
    ImageSource,
    append_config,
    append_config_to_list,
)
from treenail.builder.images import attachments
from treenail.builder.images.prune import read_image
from treenail.config import image_mirrors, pullsecret
from treenail.controllers.image_build import build_facts, build_planner
from treenail.controllers.pools.image_tags import ImageAnswer
from treenail.image import build_result, config_layer
from treenail.image.oci.attachments import BuildProvenance
from treenail.image.oci.documents import POOL, make_system_tag
from treenail.registry import authorization, transport, uploads
from treenail.registry.client import RegistryClient
from treenail.registry.images import has_complete_image, resolve_image
from treenail.registry.proxies import ProxySettings

log = logging.getLogger(__name__)

_LOCK_WAIT_S = 300.0
_MAX_PROBLEMS = 5
_REFUSALS = frozenset(
    {
        build_result.BuildReason.PUSH_LOGIN_REFUSED,
        build_result.BuildReason.PUSH_DENIED,
        build_result.BuildReason.CERTIFICATE_UNKNOWN,
    }
)
T = TypeVar("T")


class RepositoryLocked(Exception):
    """Pruning did not end within the time limit."""


class RepositoryLock:
    """Any number of pushes to a repository at the same time, or one prune. Thread-safe."""

    def __init__(self, *, wait_s: float = _LOCK_WAIT_S) -> None:
        self._wait_s = wait_s
        self._changed = threading.Condition()
        self._pushes: Counter[str] = Counter()
        self._pruned: set[str] = set()

    @contextmanager
    def lock_for_push(self, repository: str) -> Iterator[None]:
        """Push within this context; raise `RepositoryLocked` if pruning takes too long."""
        with self._changed:
            if not self._changed.wait_for(lambda: repository not in self._pruned, self._wait_s):
                raise RepositoryLocked(f"images of {repository} are being deleted")
            self._pushes[repository] += 1
        try:
            yield
        finally:
            with self._changed:
                self._pushes[repository] -= 1
                if not self._pushes[repository]:
                    del self._pushes[repository]

    @contextmanager
    def try_lock_for_prune(self, repository: str) -> Iterator[bool]:
        """Prune within this context if it yields True; False means that a push or prune runs."""
        with self._changed:
            is_free = not self._pushes[repository] and repository not in self._pruned
            if is_free:
                self._pruned.add(repository)
        try:
            yield is_free
        finally:
            if is_free:
                with self._changed:
                    self._pruned.discard(repository)
                    self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class RegistryEndpoint:
    """A registry that has a repository in place of the one that its name says."""

    host: str
    """``HOST:PORT``; the path of the repository is that of its name."""
    login: authorization.Login
    ca_pem: str = field(repr=False)


class AttemptFailed(Exception):
    """A question cannot be answered."""

    def __init__(self, failure: build_result.AttemptFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class LayerBuilder:
    """Adds the config to an image, through a registry alone. Thread-safe.

    Logins are read for each question, because they may rotate.
    """

    def __init__(
        self,
        planner: build_planner.BuildPlanner,
        clock: clocks.Clock,
        *,
        proxies: ProxySettings | None = None,
        signing_key: attachments.SigningKey | None = None,
        repository_lock: RepositoryLock | None = None,
        limits: transport.RegistryLimits | None = None,
        endpoints: Mapping[str, RegistryEndpoint] | None = None,
    ) -> None:
        """``endpoints`` are by ``REGISTRY/REPOSITORY``. Images and documents never name them.

        ``proxies`` replace those of the planner.
        """
        self._endpoints = endpoints or {}
        self._planner = planner
        self._clock = clock
        self._proxies = proxies
        self._limits = limits
        self._signing_key = signing_key
        self._repository_lock = repository_lock or RepositoryLock()

    def run_request(
        self,
        question: build_facts.CheckImage | build_facts.CheckPush | build_facts.AppendConfig,
        plan: build_planner.BuildPlan,
        config: machineosconfig.MachineOSConfig,
    ) -> ImageAnswer:
        """Do what the question requests; an error becomes part of the answer."""
        began, warning = self._clock.monotonic(), ""
        try:
            if isinstance(question, build_facts.AppendConfig):
                image, warning = self._append_config(question, plan, config)
            elif isinstance(question, build_facts.CheckPush):
                image = self._check_push(question.image, config)
            else:
                image = self._check_image(question, config)
        except AttemptFailed as error:
            return ImageAnswer(self._clock.now(), error.failure)
        seconds = {"config": self._clock.monotonic() - began}
        return ImageAnswer(self._clock.now(), pull_spec=image, seconds=seconds, warning=warning)

    def measure_base(
        self, plan: build_planner.BuildPlan, config: machineosconfig.MachineOSConfig
    ) -> int:
        """Return the compressed bytes of the base for all architectures; 0 if unknown."""
        count = 0
        try:
            with ExitStack() as stack:
                for system in plan.systems:
                    source = self._open_source(
                        stack, (system.architecture, plan.wanted.base_image), plan, config
                    )
                    count += sum(layer.size for layer in source.image.layers)
        except errors.TreenailError as error:
            log.debug("cannot measure %s: %s", plan.wanted.base_image, error)
            return 0
        return count

    def find_system_image(self, image: str, config: machineosconfig.MachineOSConfig) -> ImageAnswer:
        """Return the system part with this tag by digest, empty if the registry lacks it."""
        spec = pullspec.parse_push_spec(image, where="the system part")

        def find() -> str:
            login = self._planner.read_push_login(config)
            client = self._connect_registry(spec.registry, spec.repository, login)
            try:
                manifest = client.head_manifest(spec.repository, spec.tag)
            finally:
                client.close()
            return "" if manifest is None else spec.make_pull_spec(manifest.digest)

        try:
            pull_spec = self._run_attempt(build_result.BuildPhase.PUSH, find)
        except AttemptFailed as error:
            return ImageAnswer(self._clock.now(), error.failure)
        return ImageAnswer(self._clock.now(), pull_spec=pull_spec)

    def has_complete_image(self, image: str, config: machineosconfig.MachineOSConfig) -> bool:
        """Return whether the registry has an image with all its blobs; raise `AttemptFailed`.

        A registry that lost power may have a manifest, and lack a blob.
        """
        spec = pullspec.parse_pull_spec(image, where="image")

        def check() -> bool:
            login = self._planner.read_push_login(config)
            client = self._connect_registry(spec.registry, spec.repository, login)
            try:
                return has_complete_image(client, spec.repository, spec.digest)
            finally:
                client.close()

        return self._run_attempt(build_result.BuildPhase.PUSH, check)

    def _check_image(
        self, question: build_facts.CheckImage, config: machineosconfig.MachineOSConfig
    ) -> str:
        """Return the image, empty when the registry does not have it with the content key."""
        spec = pullspec.parse_pull_spec(question.image, where="image")

        def check() -> bool:
            client = self._connect_registry(
                spec.registry, spec.repository, self._planner.read_push_login(config)
            )
            try:
                if not has_complete_image(client, spec.repository, spec.digest):
                    return False
                key = question.content_key
                return not key or make_system_tag(key) == (
                    read_image(client, spec.repository, spec.digest, {}).build
                )
            finally:
                client.close()

        return question.image if self._run_attempt(build_result.BuildPhase.PUSH, check) else ""

    def _check_push(self, image: str, config: machineosconfig.MachineOSConfig) -> str:
        """Return the push spec; raise `AttemptFailed` if the registry refuses the login.

        Other failures may end before the Job pushes, and its builder retries them.
        """
        spec = pullspec.parse_push_spec(image, where="push spec")

        def check() -> None:
            login = self._planner.read_push_login(config)
            client = self._connect_registry(spec.registry, spec.repository, login)
            try:
                uploads.verify_push_access(client, spec.repository)
            finally:
                client.close()

        try:
            self._run_attempt(build_result.BuildPhase.PUSH, check)
        except AttemptFailed as error:
            if error.failure.reason in _REFUSALS:
                raise
            log.warning("cannot check the login for pushes: %s", error)
        return image

    def _append_config(
        self,
        question: build_facts.AppendConfig,
        plan: build_planner.BuildPlan,
        config: machineosconfig.MachineOSConfig,
    ) -> tuple[str, str]:
        """Push the image; return its pull spec, and what is missing beside it."""
        target = pullspec.parse_push_spec(question.push_spec, where="push spec")

        def read_layer() -> config_layer.ConfigLayer:
            rendered = self._planner.read_rendered(question.config)
            return config_layer.make_config_layer(
                rendered, trust_bundle=self._planner.read_trust_bundle()
            )

        layer = self._run_attempt(build_result.BuildPhase.BUILD, read_layer)
        if layer.problems:
            shown = "; ".join(
                f"{problem.path}: {problem.why}" for problem in layer.problems[:_MAX_PROBLEMS]
            )
            raise AttemptFailed(
                build_result.AttemptFailure(
                    build_result.BuildReason.CONFIG_NOT_BAKEABLE,
                    f"no image and no agent can provide parts of {question.config}: {shown}",
                )
            )
        with ExitStack() as stack:
            sources = [
                self._run_attempt(
                    build_result.BuildPhase.FETCH,
                    partial(self._open_source, stack, source, plan, config),
                )
                for source in question.sources
            ]
            pusher = self._run_attempt(
                build_result.BuildPhase.PUSH,
                lambda: self._connect_registry(
                    target.registry, target.repository, self._planner.read_push_login(config)
                ),
            )
            stack.callback(pusher.close)
            destination = ImageDestination(pusher, target.repository, target.tag)
            try:
                # Pruning must not delete an equal image between its push and its verification.
                stack.enter_context(
                    self._repository_lock.lock_for_push(f"{target.registry}/{target.repository}")
                )
            except RepositoryLocked as error:
                failure = build_result.AttemptFailure(
                    build_result.BuildReason.REGISTRY_BUSY, str(error)
                )
                raise AttemptFailed(failure) from error
            appended = self._run_attempt(
                build_result.BuildPhase.PUSH,
                partial(_push_images, sources, layer, plan.labels, destination),
            )
            # Before the rollout: nodes may require the signature. They verify that of an instance.
            for digest in (*appended.instances, appended.digest):
                if key := self._signing_key:
                    self._run_attempt(
                        build_result.BuildPhase.PUSH,
                        partial(attachments.sign_image, pusher, target.repository, digest, key),
                    )
            warning = self._attach_provenances(pusher, target, appended, question, plan)
        return target.make_pull_spec(appended.digest), warning

    def _open_source(
        self,
        stack: ExitStack,
        source: tuple[str, str],
        plan: build_planner.BuildPlan,
        config: machineosconfig.MachineOSConfig,
    ) -> ImageSource:
        """Return the image of an architecture; the stack closes its client."""
        architecture, image = source
        spec = pullspec.parse_pull_spec(image, where="base image")
        is_base = image == plan.wanted.base_image
        login = (
            self._planner.read_base_login(config)
            if is_base
            else self._planner.read_push_login(config)
        )

        def open_place(place: registries.ImageName) -> ImageSource:
            client = self._connect_registry(place.registry, place.repository, login)
            stack.callback(client.close)
            image = resolve_image(client, place.repository, place.reference, architecture)
            return ImageSource(client, image)

        name = registries.ImageName(spec.registry, spec.repository, spec.digest)
        return registries.pull_from_places(
            name, plan.mirrors if is_base else image_mirrors.NO_MIRRORS, open_place
        )

    def _attach_provenances(
        self,
        client: RegistryClient,
        target: pullspec.PushSpec,
        appended: AppendedImage,
        question: build_facts.AppendConfig,
        plan: build_planner.BuildPlan,
    ) -> str:
        """Attach how the image was built; of a list, also to the image of each architecture.

        Returns why that failed.
        """
        instances = zip(appended.instances, question.sources, strict=False)
        subjects = [
            *((digest, replace(question, sources=(source,))) for digest, source in instances),
            (appended.digest, question),
        ]
        warnings = [
            self._attach_provenance(client, target, digest, part, plan) for digest, part in subjects
        ]
        return next(filter(None, warnings), "")

    def _attach_provenance(
        self,
        client: RegistryClient,
        target: pullspec.PushSpec,
        digest: str,
        question: build_facts.AppendConfig,
        plan: build_planner.BuildPlan,
    ) -> str:
        """Attach how the image was built, and its packages; return why that failed."""
        wanted = plan.wanted
        images = tuple(image for _, image in question.sources)
        texts = plan.find_containerfiles([name for name, _ in question.sources])
        provenance = BuildProvenance(
            name=f"{target.registry}/{target.repository}",
            digest=digest,
            materials=tuple(dict.fromkeys((wanted.base_image, *images))),
            machine_config=question.config,
            pool=plan.labels.get(POOL, ""),
            build=target.tag,
            content_key=wanted.content_key,
            # The images of a list have a statement of their own, and may differ in this.
            containerfile_digest=oci_content.compute_digest(texts[0].encode())
            if len(texts) == 1
            else "",
            version=__version__,
            started="",
            finished=clocks.format_rfc3339(self._clock.now()),
        )
        problems = []
        try:
            attachments.attach_provenance(client, target.repository, provenance)
        except errors.TreenailError as error:
            problems.append(f"cannot attach the provenance of the image: {error}")
        # A list has no packages of its own: its images do.
        systems = [image for image in images if len(images) == 1 and image != wanted.base_image]
        for image in systems:
            source = pullspec.parse_pull_spec(image, where="the system part")
            if (source.registry, source.repository) != (target.registry, target.repository):
                continue
            try:
                attachments.copy_packages(client, target.repository, source.digest, digest)
            except errors.TreenailError as error:
                problems.append(f"cannot attach the packages of the image: {error}")
        for problem in problems:
            log.warning("%s: %s", wanted.name, problem)
        return "; ".join(problems)

    def _connect_registry(
        self, registry: str, repository: str, login: pullsecret.PullSecret
    ) -> RegistryClient:
        if endpoint := self._endpoints.get(f"{registry}/{repository}"):
            return RegistryClient(
                endpoint.host,
                self._clock,
                login=endpoint.login,
                tls=transport.TlsSettings(ca_pem=endpoint.ca_pem),
                limits=self._limits,
            )
        tls = transport.TlsSettings(ca_pem=self._planner.read_ca(registry))
        proxies = self._proxies or self._planner.read_proxy_settings()
        settings = registries.RegistrySettings(login, tls, proxies, self._limits)
        return settings.make_client(registry, repository, self._clock)

    def _run_attempt(self, phase: build_result.BuildPhase, call: Callable[[], T]) -> T:
        """Call, and convert errors to the reason that they have in this phase."""
        try:
            return call()
        except errors.ClusterError as error:
            # The API server, not a registry: retry as an outage.
            failure = build_result.AttemptFailure(
                build_result.BuildReason.REGISTRY_UNREACHABLE, f"{error}"
            )
            raise AttemptFailed(failure) from error
        except errors.TreenailError as error:
            failure = build_result.AttemptFailure(failures.choose_reason(error, phase), str(error))
            raise AttemptFailed(failure) from error


def _push_images(
    sources: Sequence[ImageSource],
    layer: config_layer.ConfigLayer,
    labels: Mapping[str, str],
    destination: ImageDestination,
) -> AppendedImage:
    """Push the image, or a list of manifests for several architectures."""
    if len(sources) == 1:
        return append_config(sources[0], layer, labels, destination)
    return append_config_to_list(sources, layer, labels, destination)
