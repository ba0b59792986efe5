"""Adds the config to images through registries alone, and checks images."""

import logging
from collections.abc import Callable
from typing import TypeVar

from treenail import __version__
from treenail.api.machineosconfig import MachineOSConfig
from treenail.api.pullspec import PullSpec, parse_pull_spec
from treenail.builder.append_config import ImageDestination, append_config
from treenail.builder.images.provenance import attach_provenance
from treenail.builder.images.signatures import SigningKey, sign_image
from treenail.builder.phases.failures import choose_reason
from treenail.clock import Clock, format_rfc3339
from treenail.config.pullsecret import PullSecret
from treenail.controllers.build.facts import (
    Answer,
    AppendConfig,
    AttemptFailure,
    CheckImage,
    CheckPush,
    ResolveBase,
)
from treenail.controllers.build.planner import Planner
from treenail.controllers.build.planning import BuildPlan
from treenail.controllers.build.repository_gate import GateClosed, RepositoryGate
from treenail.errors import ClusterError, TreenailError
from treenail.image.build_reason import BuildReason
from treenail.image.build_result import BuildPhase
from treenail.image.config_layer import ConfigLayer, make_config_layer
from treenail.image.labels import POOL
from treenail.image.oci.provenance import STATEMENT_TYPE, BuildProvenance
from treenail.image.push_spec import PushSpec, parse_push_spec
from treenail.registry.client import RegistryClient
from treenail.registry.images import resolve_image
from treenail.registry.logins import select_login
from treenail.registry.names import compute_digest
from treenail.registry.proxies import ProxySettings
from treenail.registry.referrers import get_referrers
from treenail.registry.transport import RegistryLimits, TlsSettings
from treenail.registry.uploads import verify_push_access

log = logging.getLogger(__name__)

_MAX_PROBLEMS = 5
_REFUSALS = frozenset({
    BuildReason.PUSH_LOGIN_REFUSED, BuildReason.PUSH_DENIED, BuildReason.CERTIFICATE_UNKNOWN,
})  # fmt: skip

T = TypeVar("T")


class AttemptFailed(Exception):
    """A question cannot be answered."""

    def __init__(self, failure: AttemptFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class LayerBuilder:
    """A `treenail.controllers.build.builders.ConfigLayerBuilder`. Thread-safe.

    Logins are read for each question, because they may rotate.
    """

    def __init__(
        self,
        planner: Planner,
        clock: Clock,
        *,
        proxies: ProxySettings | None = None,
        signing_key: SigningKey | None = None,
        gate: RepositoryGate | None = None,
        limits: RegistryLimits | None = None,
    ) -> None:
        self._planner = planner
        self._clock = clock
        self._proxies = proxies
        self._limits = limits
        self._signing_key = signing_key
        self._gate = gate or RepositoryGate()

    def answer_question(
        self,
        question: CheckImage | CheckPush | AppendConfig,
        plan: BuildPlan,
        config: MachineOSConfig,
    ) -> Answer:
        """Do what the question requests; an error becomes part of the answer."""
        began, warning = self._clock.monotonic(), ""
        try:
            if isinstance(question, AppendConfig):
                image, warning = self._append_config(question, plan, config)
            elif isinstance(question, CheckPush):
                image = self._check_push(question.image, config)
            else:
                image = self._check_image(question.image, config)
        except AttemptFailed as error:
            return Answer(self._clock.now(), error.failure)
        seconds = {"config": self._clock.monotonic() - began}
        return Answer(self._clock.now(), pull_spec=image, seconds=seconds, warning=warning)

    def resolve_base(
        self, question: ResolveBase, architecture: str, config: MachineOSConfig
    ) -> Answer:
        """Return the image of a tag by digest: that of its list of manifests, if it is one."""
        spec = parse_push_spec(question.image, where="base image")

        def resolve() -> str:
            login = self._planner.read_base_login(config)
            client = self._connect(spec.registry, spec.repository, login)
            try:
                found = resolve_image(client, spec.repository, spec.tag, architecture)
            finally:
                client.close()
            return spec.make_pull_spec(found.index_digest or found.digest)

        try:
            image = self._attempt(BuildPhase.FETCH, resolve)
        except AttemptFailed as error:
            return Answer(self._clock.now(), error.failure)
        return Answer(self._clock.now(), pull_spec=image)

    def _check_image(self, image: str, config: MachineOSConfig) -> str:
        """Return the image, empty when the registry does not have it."""
        spec = parse_pull_spec(image, where="image")

        def check() -> bool:
            client = self._connect(
                spec.registry, spec.repository, self._planner.read_push_login(config)
            )
            try:
                return client.head_manifest(spec.repository, spec.digest) is not None
            finally:
                client.close()

        return image if self._attempt(BuildPhase.PUSH, check) else ""

    def _check_push(self, image: str, config: MachineOSConfig) -> str:
        """Return the push spec; raise `AttemptFailed` if the registry refuses the login.

        Other failures may end before the Job pushes, and its builder retries them.
        """
        spec = parse_push_spec(image, where="push spec")

        def check() -> None:
            login = self._planner.read_push_login(config)
            client = self._connect(spec.registry, spec.repository, login)
            try:
                verify_push_access(client, spec.repository)
            finally:
                client.close()

        try:
            self._attempt(BuildPhase.PUSH, check)
        except AttemptFailed as error:
            if error.failure.reason in _REFUSALS:
                raise
            log.warning("cannot check the login for pushes: %s", error)
        return image

    def _append_config(
        self, question: AppendConfig, plan: BuildPlan, config: MachineOSConfig
    ) -> tuple[str, str]:
        """Push the image; return its pull spec, and what is missing beside it."""
        source = parse_pull_spec(question.source, where="base image")
        target = parse_push_spec(question.push_spec, where="push spec")

        def read_layer() -> ConfigLayer:
            rendered = self._planner.read_rendered(question.config)
            return make_config_layer(rendered, trust_bundle=self._planner.read_trust_bundle())

        layer = self._attempt(BuildPhase.BUILD, read_layer)
        if layer.problems:
            shown = "; ".join(f"{each.path}: {each.why}" for each in layer.problems[:_MAX_PROBLEMS])
            raise AttemptFailed(
                AttemptFailure(
                    BuildReason.CONFIG_NOT_BAKEABLE,
                    f"no image and no agent can provide parts of {question.config}: {shown}",
                )
            )
        is_base = question.source == plan.wanted.base_image
        puller = self._attempt(
            BuildPhase.FETCH, lambda: self._connect_source(source, config, is_base=is_base)
        )
        pusher = self._attempt(
            BuildPhase.PUSH,
            lambda: self._connect(
                target.registry, target.repository, self._planner.read_push_login(config)
            ),
        )
        try:
            image = self._attempt(
                BuildPhase.FETCH,
                lambda: resolve_image(puller, source.repository, source.digest, plan.architecture),
            )
            destination = ImageDestination(pusher, target.repository, target.tag)
            # Pruning must not delete an equal image between its push and its verification.
            with self._gate.enter(f"{target.registry}/{target.repository}"):
                appended = self._attempt(
                    BuildPhase.PUSH,
                    lambda: append_config(puller, image, layer, plan.labels, destination),
                )
                if key := self._signing_key:
                    # Before the rollout: nodes may require the signature.
                    self._attempt(
                        BuildPhase.PUSH,
                        lambda: sign_image(pusher, target.repository, appended.digest, key),
                    )
                warning = self._attach_provenance(pusher, target, appended.digest, question, plan)
        except GateClosed as error:
            raise AttemptFailed(AttemptFailure(BuildReason.REGISTRY_BUSY, str(error))) from error
        finally:
            puller.close()
            pusher.close()
        return target.make_pull_spec(appended.digest), warning

    def _attach_provenance(
        self,
        client: RegistryClient,
        target: PushSpec,
        digest: str,
        question: AppendConfig,
        plan: BuildPlan,
    ) -> str:
        """Attach how the image was built, once; return why that failed. The image is complete."""
        wanted, text = plan.wanted, plan.containerfile.encode()
        provenance = BuildProvenance(
            name=f"{target.registry}/{target.repository}",
            digest=digest,
            materials=tuple(dict.fromkeys((wanted.base_image, question.source))),
            machine_config=question.config,
            pool=plan.labels.get(POOL, ""),
            build=target.tag,
            content_key=wanted.content_key,
            containerfile_digest=compute_digest(text) if wanted.needs_job else "",
            version=__version__,
            started="",
            finished=format_rfc3339(self._clock.now()),
        )
        try:
            # The same image may have been pushed before the controller ended.
            if not get_referrers(client, target.repository, digest, STATEMENT_TYPE):
                attach_provenance(client, target.repository, provenance)
        except TreenailError as error:
            warning = f"cannot attach the provenance of the image: {error}"
            log.warning("%s: %s", wanted.name, warning)
            return warning
        return ""

    def _connect_source(
        self, source: PullSpec, config: MachineOSConfig, *, is_base: bool
    ) -> RegistryClient:
        login = (
            self._planner.read_base_login(config)
            if is_base
            else self._planner.read_push_login(config)
        )
        return self._connect(source.registry, source.repository, login)

    def _connect(self, registry: str, repository: str, login: PullSecret) -> RegistryClient:
        return RegistryClient(
            registry,
            self._clock,
            login=select_login(login.credentials, registry, repository),
            tls=TlsSettings(ca_pem=self._planner.read_ca(registry)),
            proxies=self._proxies,
            limits=self._limits,
        )

    def _attempt(self, phase: BuildPhase, call: Callable[[], T]) -> T:
        """Call, and convert errors to the reason that they have in this phase."""
        try:
            return call()
        except ClusterError as error:
            # The API server, not a registry: retry as an outage.
            failure = AttemptFailure(BuildReason.REGISTRY_UNREACHABLE, f"{error}")
            raise AttemptFailed(failure) from error
        except TreenailError as error:
            failure = AttemptFailure(choose_reason(error, phase), str(error))
            raise AttemptFailed(failure) from error
