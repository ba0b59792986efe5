"""Moves an image from the bootstrap host to its final registry, and looks it up as a node does."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from treenail.api import annotations as key
from treenail.api.machineosbuild import MachineOSBuild
from treenail.api.machineosconfig import MachineOSConfig
from treenail.builder.failures import choose_reason
from treenail.builder.images.copies import ImageCopier, Place
from treenail.builder.registries import RegistrySettings
from treenail.clocks import Clock
from treenail.config.pullsecret import PullSecret, merge_pull_secrets, parse_pull_secret
from treenail.config.wanted_state import read_wanted_state
from treenail.controllers.handover.handover_objects import Handover, HandoverImage
from treenail.controllers.image_build.build_objects import find_pushed_images
from treenail.controllers.image_build.cluster_reader import ClusterReader
from treenail.errors import ClusterError, TreenailError
from treenail.image.build_result import REMEDIES, BuildPhase, BuildReason
from treenail.kube.resources import MACHINEOSBUILDS
from treenail.registry.authorization import Login
from treenail.registry.client import RegistryClient
from treenail.registry.errors import Denied, LoginRefused, RegistryError
from treenail.registry.proxies import ProxySettings
from treenail.registry.transport import RegistryLimits, TlsSettings

log = logging.getLogger(__name__)

KUBELET_LOGIN = "/var/lib/kubelet/config.json"
"""The pull secret of the nodes, as the rendered config has it."""
SOURCE_UNREACHABLE, IMAGE_MISSING = "BootstrapRegistryUnreachable", "ImageMissing"
PULL_LOGIN_REFUSED, CLUSTER_UNREADABLE = "PullLoginRefused", "ClusterUnreadable"
_MESSAGE_LIMIT = 1500


class MoveFailed(Exception):
    """The image is not in its final registry; ``reason`` is CamelCase."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class ImageMove:
    """One image, with the objects of the cluster that describe its way."""

    handover: Handover
    image: HandoverImage
    config: MachineOSConfig
    rendered: str
    """The pool's rendered config, whose login the nodes have."""


class ImageMover:
    """Copies and looks up. Thread-safe. Logins are read for each attempt, because they may rotate.

    Every call can be repeated.
    """

    def __init__(
        self,
        reader: ClusterReader,
        clock: Clock,
        *,
        proxies: ProxySettings | None = None,
        limits: RegistryLimits | None = None,
    ) -> None:
        self._reader = reader
        self._clock = clock
        self._proxies = proxies
        self._limits = limits

    def move_image(self, move: ImageMove, should_stop: Callable[[], bool]) -> str:
        """Make the final registry have the image, and verify that nodes can pull it.

        Returns what is not verified; empty for nothing. Raises `MoveFailed`, and `CopyStopped`.
        """
        try:
            warning = self._copy(move, should_stop) if move.handover.registry else ""
            self._look_up(move)
        except ClusterError as error:
            raise MoveFailed(CLUSTER_UNREADABLE, str(error)) from error
        return warning

    def _copy(self, move: ImageMove, should_stop: Callable[[], bool]) -> str:
        spec, handover = move.image.push_spec, move.handover
        source = Place(
            RegistryClient(
                handover.registry,
                self._clock,
                login=Login(handover.username, handover.password),
                tls=TlsSettings(handover.ca_pem),
                limits=self._limits,
            ),
            spec.repository,
        )
        try:
            pusher = self._connect(move, self._reader.read_login(move.config.push_secret))
        except ClusterError:
            raise
        except TreenailError as error:
            raise _make_failure(choose_reason(error, BuildPhase.PUSH), error) from error
        target = Place(pusher, spec.repository)
        try:
            copier = ImageCopier(source, target, should_stop)
            for digest in list_digests(move):
                copied = copier.copy_image(digest)
                log.info(
                    "copied %s@%s to %s: %d manifests, %d attachments, %d bytes",
                    spec.repository, digest, spec.registry,
                    copied.manifests, copied.attachments, copied.moved_bytes,
                )  # fmt: skip
        except RegistryError as error:
            return self._explain_failure(move, source, target, error)
        finally:
            source.client.close()
            target.client.close()
        return ""

    def _explain_failure(
        self, move: ImageMove, source: Place, target: Place, error: RegistryError
    ) -> str:
        """Raise `MoveFailed` with the side that failed.

        Returns what is not verified when the bootstrap registry is gone and the final one has the
        image already.
        """
        digest = move.image.digest
        try:
            has_source = source.client.head_manifest(source.repository, digest) is not None
            problem = "" if has_source else f"{move.handover.registry} does not have {digest}"
        except RegistryError as another:
            problem = str(another)
        if not problem:
            raise _make_failure(choose_reason(error, BuildPhase.PUSH), error) from error
        try:
            if target.client.head_manifest(target.repository, digest) is not None:
                warning = f"provenance and list of packages were not verified: {problem}"
                log.warning("%s: %s", move.image.final_image, warning)
                return warning
        except RegistryError as another:
            raise _make_failure(choose_reason(another, BuildPhase.PUSH), another) from another
        raise MoveFailed(
            SOURCE_UNREACHABLE,
            f"{problem}; start the bootstrap host again, or push the image by hand from its "
            "install directory: skopeo copy --all --preserve-digests "
            f"oci:.treenail/images/{move.image.pool}:{_find_name(move)} "
            f"docker://{move.image.push_spec}",
        ) from error

    def _look_up(self, move: ImageMove) -> None:
        """Raise `MoveFailed` unless the login of the nodes finds the image."""
        image, spec = move.image.final_image, move.image.push_spec
        if not move.rendered:
            raise MoveFailed(
                CLUSTER_UNREADABLE,
                f"pool {move.image.pool} has no rendered config yet, which has the login of the "
                "nodes: controller render writes it",
            )
        try:
            client = self._connect(move, self._read_node_login(move.rendered))
            try:
                found = client.head_manifest(spec.repository, move.image.digest)
            finally:
                client.close()
        except ClusterError:
            raise
        except (LoginRefused, Denied) as error:
            raise MoveFailed(
                PULL_LOGIN_REFUSED,
                f"nodes cannot pull {image}: {error}; allow the login of the cluster's pull secret "
                f"to pull from {spec.registry}/{spec.repository}",
            ) from error
        except TreenailError as error:
            raise _make_failure(choose_reason(error, BuildPhase.FETCH), error) from error
        if found is None:
            raise MoveFailed(
                IMAGE_MISSING,
                f"the login of the nodes does not find {image}; allow it to pull from the "
                "repository, or push the image",
            )

    def _read_node_login(self, rendered: str) -> PullSecret:
        """Return the logins of nodes with a rendered config, or else the cluster's pull secret."""
        file = read_wanted_state(self._reader.read_rendered(rendered)).files.get(KUBELET_LOGIN)
        if file is None:
            return self._reader.read_base_login("")
        cluster = parse_pull_secret(file.contents.decode_bytes(), where=f"{rendered}")
        content = self._reader.read_trust().pull_secret
        internal = parse_pull_secret(content, where="internalRegistryPullSecret")
        return merge_pull_secrets(internal, cluster)

    def _connect(self, move: ImageMove, login: PullSecret) -> RegistryClient:
        spec = move.image.push_spec
        tls = TlsSettings(ca_pem=self._reader.read_ca(spec.registry))
        settings = RegistrySettings(login, tls, self._proxies, self._limits)
        return settings.make_client(spec.registry, spec.repository, self._clock)


def list_digests(move: ImageMove) -> tuple[str, ...]:
    """Return the digests to copy: the image's, and those of parts that later builds use again."""
    repository = f"{move.image.push_spec.registry}/{move.image.push_spec.repository}"
    found = [move.image.digest]
    for build in _iter_builds(move):
        images = (each.image.partition("@") for each in find_pushed_images(build))
        found += [digest for name, _, digest in images if name == repository]
    return tuple(dict.fromkeys(found))


def _find_name(move: ImageMove) -> str:
    """Return the name of the image in the OCI directory of the bootstrap host."""
    return next((each.name for each in _iter_builds(move)), "NAME")


def _iter_builds(move: ImageMove) -> Iterable[MachineOSBuild]:
    for document in move.handover.objects:
        if document.get("kind") == MACHINEOSBUILDS.kind:
            build = MachineOSBuild.from_json(document)
            if build.metadata.labels.get(key.TARGET_POOL) == move.image.pool:
                yield build


def _make_failure(reason: BuildReason, error: TreenailError) -> MoveFailed:
    remedy = REMEDIES.get(reason) or error.remedy
    text = str(error)[:_MESSAGE_LIMIT]
    return MoveFailed(reason, f"{text}; {remedy}" if remedy else text)
