"""Move an image from the bootstrap host to its final registry, and look it up as a node does."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from treenail.api import annotations as key
from treenail.api import machineosbuild, machineosconfig
from treenail.builder import failures, registries
from treenail.builder.images import copies
from treenail.clocks import Clock
from treenail.config import pullsecret, wanted_state
from treenail.controllers.handover import handover_objects
from treenail.controllers.image_build import build_objects, cluster_reader
from treenail.errors import ClusterError, TreenailError
from treenail.image import build_result
from treenail.kube.resources import MACHINEOSBUILDS
from treenail.registry import authorization, transport
from treenail.registry.client import RegistryClient
from treenail.registry.errors import Denied, LoginRefused, RegistryError

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

    handover: handover_objects.Handover
    image: handover_objects.HandoverImage
    config: machineosconfig.MachineOSConfig
    rendered: str
    """The pool's rendered config, whose login the nodes have."""


class ImageMover:
    """Copies and looks up. Thread-safe. Logins are read for each attempt, because they may rotate.

    Every call can be repeated.
    """

    def __init__(self, reader: cluster_reader.ClusterReader, clock: Clock) -> None:
        self._reader = reader
        self._clock = clock

    def move_image(self, move: ImageMove, should_stop: Callable[[], bool]) -> str:
        """Make the final registry have the image, and verify that nodes can pull it.

        Returns what is not verified; empty for nothing. Raises `MoveFailed`, and `CopyStopped`.
        """
        try:
            warning = self._copy_image(move, should_stop) if move.handover.registry else ""
            self._look_up_image(move)
        except ClusterError as error:
            raise MoveFailed(CLUSTER_UNREADABLE, str(error)) from error
        return warning

    def _copy_image(self, move: ImageMove, should_stop: Callable[[], bool]) -> str:
        spec, handover = move.image.push_spec, move.handover
        source = copies.Place(
            RegistryClient(
                handover.registry,
                self._clock,
                login=authorization.Login(handover.username, handover.password),
                tls=transport.TlsSettings(handover.ca_pem),
            ),
            spec.repository,
        )
        try:
            pusher = self._connect_registry(move, self._reader.read_login(move.config.push_secret))
        except ClusterError:
            raise
        except TreenailError as error:
            raise _make_failure(
                failures.choose_reason(error, build_result.BuildPhase.PUSH), error
            ) from error
        target = copies.Place(pusher, spec.repository)
        try:
            copier = copies.ImageCopier(source, target, should_stop)
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
        self, move: ImageMove, source: copies.Place, target: copies.Place, error: RegistryError
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
            raise _make_failure(
                failures.choose_reason(error, build_result.BuildPhase.PUSH), error
            ) from error
        try:
            if target.client.head_manifest(target.repository, digest) is not None:
                warning = f"provenance and list of packages were not verified: {problem}"
                log.warning("%s: %s", move.image.final_image, warning)
                return warning
        except RegistryError as another:
            raise _make_failure(
                failures.choose_reason(another, build_result.BuildPhase.PUSH), another
            ) from another
        raise MoveFailed(
            SOURCE_UNREACHABLE,
            f"{problem}; start the bootstrap host again, or push the image by hand from its "
            "install directory: skopeo copy --all --preserve-digests "
            f"oci:.treenail/images/{move.image.pool}:{_find_name(move)} "
            f"docker://{move.image.push_spec}",
        ) from error

    def _look_up_image(self, move: ImageMove) -> None:
        """Raise `MoveFailed` unless the login of the nodes finds the image."""
        image, spec = move.image.final_image, move.image.push_spec
        if not move.rendered:
            raise MoveFailed(
                CLUSTER_UNREADABLE,
                f"pool {move.image.pool} has no rendered config yet, which has the login of the "
                "nodes: controller render writes it",
            )
        try:
            client = self._connect_registry(move, self._read_node_login(move.rendered))
            try:
                manifest = client.head_manifest(spec.repository, move.image.digest)
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
            raise _make_failure(
                failures.choose_reason(error, build_result.BuildPhase.FETCH), error
            ) from error
        if manifest is None:
            raise MoveFailed(
                IMAGE_MISSING,
                f"the login of the nodes does not find {image}; allow it to pull from the "
                "repository, or push the image",
            )

    def _read_node_login(self, rendered: str) -> pullsecret.PullSecret:
        """Return the logins of nodes with a rendered config, or else the cluster's pull secret."""
        file = wanted_state.read_wanted_state(self._reader.read_rendered(rendered)).files.get(
            KUBELET_LOGIN
        )
        if file is None:
            return self._reader.read_base_login("")
        cluster = pullsecret.parse_pull_secret(file.contents.decode_bytes(), where=f"{rendered}")
        content = self._reader.read_trust().pull_secret
        internal = pullsecret.parse_pull_secret(content, where="internalRegistryPullSecret")
        return pullsecret.merge_pull_secrets(internal, cluster)

    def _connect_registry(self, move: ImageMove, login: pullsecret.PullSecret) -> RegistryClient:
        spec = move.image.push_spec
        tls = transport.TlsSettings(ca_pem=self._reader.read_ca(spec.registry))
        proxies = self._reader.read_proxy_settings()
        settings = registries.RegistrySettings(login, tls, proxies)
        return settings.make_client(spec.registry, spec.repository, self._clock)


def list_digests(move: ImageMove) -> tuple[str, ...]:
    """Return the digests to copy: the image's, and those of parts that later builds use again."""
    repository = f"{move.image.push_spec.registry}/{move.image.push_spec.repository}"
    digests = [move.image.digest]
    for build in _iter_builds(move):
        images = (pushed.image.partition("@") for pushed in build_objects.find_pushed_images(build))
        digests += [digest for name, _, digest in images if name == repository]
    return tuple(dict.fromkeys(digests))


def _find_name(move: ImageMove) -> str:
    """Return the name of the image in the OCI directory of the bootstrap host."""
    return next((build.name for build in _iter_builds(move)), "NAME")


def _iter_builds(move: ImageMove) -> Iterable[machineosbuild.MachineOSBuild]:
    for document in move.handover.objects:
        if document.get("kind") == MACHINEOSBUILDS.kind:
            build = machineosbuild.MachineOSBuild.from_json(document)
            if build.metadata.labels.get(key.TARGET_POOL) == move.image.pool:
                yield build


def _make_failure(reason: build_result.BuildReason, error: TreenailError) -> MoveFailed:
    remedy = build_result.REMEDIES.get(reason) or error.remedy
    text = str(error)[:_MESSAGE_LIMIT]
    return MoveFailed(reason, f"{text}; {remedy}" if remedy else text)
