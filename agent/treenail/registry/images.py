"""Images: the instance of an architecture, its config, and copies of blobs."""

import json
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field
from threading import Event
from typing import Self, TypeVar

from treenail.registry import errors, names, uploads
from treenail.registry.client import RegistryClient

C = TypeVar("C")
T = TypeVar("T")

_LAYERS_LIMIT = 500
_INSTANCES_LIMIT = 200
_CONNECTIONS = 4


@dataclass(frozen=True, slots=True)
class ResolvedImage:
    """An image of one architecture. ``index_digest`` is empty if no list of manifests names it."""

    repository: str
    index_digest: str
    manifest: names.Manifest
    config: bytes = field(repr=False)
    architecture: str
    config_blob: names.Descriptor
    layers: tuple[names.Descriptor, ...]

    @property
    def digest(self) -> str:
        """The digest of the manifest, not of the list."""
        return self.manifest.digest


def resolve_image(
    client: RegistryClient, repository: str, reference: str, architecture: str
) -> ResolvedImage:
    """Return the image of a tag or digest; of a list of manifests, that of the architecture.

    ``architecture`` is Go's name, such as ``amd64``. Raises `NotFound` if a list lacks it.
    """
    manifest = client.get_manifest(repository, reference)
    index_digest = ""
    if manifest.is_index:
        index_digest = manifest.digest
        where = client.format_image(repository, index_digest)
        instance = find_instance(manifest.content, architecture, where=where)
        manifest = client.get_manifest(repository, instance.digest)
        if manifest.is_index:
            raise errors.AnswerInvalid(
                f"cannot use {where}: its instance is a list of manifests again"
            )
    return _read_image(client, repository, index_digest, manifest, architecture)


def resolve_digest(
    client: RegistryClient, repository: str, reference: str, architectures: Iterable[str]
) -> str:
    """Return the digest of an image, or of its list of manifests, that has each architecture.

    Raises `NotFound` if it lacks one.
    """
    digest = reference
    for architecture in sorted(architectures):
        # The second by digest: the tag may move between two requests.
        image = resolve_image(client, repository, digest, architecture)
        digest = image.index_digest or image.digest
    return digest


def has_complete_image(
    client: RegistryClient, repository: str, digest: str, *, is_instance: bool = False
) -> bool:
    """Return whether a registry has the image or list of manifests with everything that it names.

    ``is_instance`` refuses a list. Raises `RegistryError`.
    """
    where = client.format_image(repository, digest)
    try:
        manifest = client.get_manifest(repository, digest)
    except (errors.NotFound, errors.DigestMismatch):
        return False
    document = json.loads(manifest.content)
    if manifest.is_index and is_instance:
        raise errors.AnswerInvalid(f"cannot use {where}: its instance is a list of manifests again")
    entries = document.get("manifests" if manifest.is_index else "layers")
    if not isinstance(entries, list) or len(entries) > _LAYERS_LIMIT:
        raise errors.AnswerInvalid(f"cannot use {where}: expected at most {_LAYERS_LIMIT} entries")
    digests = {names.parse_descriptor(entry, where=where).digest for entry in entries}
    if manifest.is_index:
        return all(
            has_complete_image(client, repository, member, is_instance=True) for member in digests
        )
    config = names.parse_descriptor(document.get("config"), where=where).digest
    return all(client.has_blob(repository, member) for member in (config, *digests))


def find_instance(content: bytes, architecture: str, *, where: str) -> names.Descriptor:
    """Return the manifest of an architecture in a list; raise `NotFound` if the list lacks it."""
    entries = json.loads(content).get("manifests")
    present: set[str] = set()
    for entry in entries[:_INSTANCES_LIMIT] if isinstance(entries, list) else ():
        platform = entry.get("platform") if isinstance(entry, dict) else None
        # BuildKit lists attestations beside the images, with the platform unknown/unknown.
        if not isinstance(platform, dict) or platform.get("os") != "linux":
            continue
        if platform.get("architecture") == architecture:
            return names.parse_descriptor(entry, where=where)
        present.add(str(platform.get("architecture"))[:20])
    listed = ", ".join(sorted(present)) or "none"
    raise errors.NotFound(
        f"cannot use {where}: it has no image for linux/{architecture}; it has: {listed}",
        status=404,
    )


def copy_blobs(
    blobs: Iterable[names.Descriptor],
    source: RegistryClient,
    source_repository: str,
    target: RegistryClient,
    repository: str,
) -> int:
    """Make the target repository have these blobs; return the number of bytes that were moved."""
    is_same = source.host == target.host
    if is_same and source_repository == repository:
        return 0
    left = list({blob.digest: blob for blob in blobs}.values())
    # A mount needs both repositories in one registry (OCI distribution API, Mounting a blob).
    if is_same:
        left = _mount_blobs(target, repository, left, source_repository)

    return copy_new_blobs(left, source, source_repository, target, repository)


def copy_new_blobs(
    blobs: Iterable[names.Descriptor],
    source: RegistryClient,
    source_repository: str,
    target: RegistryClient,
    repository: str,
    check_stop: Callable[[], None] = lambda: None,
) -> int:
    """Copy different blobs that the target lacks; return the number of bytes that were moved.

    ``check_stop`` is called before each blob, and may raise.
    """

    @contextmanager
    def open_clients() -> Iterator[tuple[RegistryClient, RegistryClient]]:
        with closing(source.clone()) as own_source, closing(target.clone()) as own_target:
            yield own_source, own_target

    def copy(
        clients: tuple[RegistryClient, RegistryClient], blob: names.Descriptor, _failed: Event
    ) -> int:
        check_stop()
        own_source, own_target = clients
        if own_target.has_blob(repository, blob.digest):
            return 0
        remote = RemoteBlob(own_source, source_repository, blob)
        uploads.upload_blob(own_target, repository, blob, remote.reopen)
        return blob.size

    return sum(transfer_blobs(blobs, open_clients, copy))


def transfer_blobs(
    blobs: Iterable[names.Descriptor],
    open_client: Callable[[], AbstractContextManager[C]],
    transfer: Callable[[C, names.Descriptor, Event], T],
    *,
    connections: int = _CONNECTIONS,
) -> list[T]:
    """Call ``transfer`` for each blob over several connections, the largest first.

    ``transfer`` gets a client of its thread, and an event that is set when another transfer has
    failed. Raises the first error, after the current blobs.
    """
    left = sorted(blobs, key=lambda blob: -blob.size)
    # The threads take the next blob each: one of them may be as large as all others.
    waiting = iter(left)
    has_failed = Event()

    def transfer_some() -> list[T]:
        results: list[T] = []
        with open_client() as client:
            # next() of a list's iterator is atomic.
            while not has_failed.is_set() and (blob := next(waiting, None)) is not None:
                try:
                    results.append(transfer(client, blob, has_failed))
                except BaseException:
                    has_failed.set()
                    raise
        return results

    count = min(connections, len(left))
    if not count:
        return []
    with ThreadPoolExecutor(count, thread_name_prefix="transfer") as pool:
        try:
            futures = [pool.submit(transfer_some) for _ in range(count)]
            return [result for future in futures for result in future.result()]
        except BaseException:
            # SIGTERM too: the pool waits for its threads.
            has_failed.set()
            raise


def read_artifact(client: RegistryClient, repository: str, digest: str) -> bytes:
    """Return the content of an artifact with one layer."""
    where = client.format_image(repository, digest)
    layers = json.loads(client.get_manifest(repository, digest).content).get("layers")
    if not isinstance(layers, list) or len(layers) != 1:
        raise errors.AnswerInvalid(f"cannot use {where}: expected an artifact with one layer")
    return client.read_small_blob(repository, names.parse_descriptor(layers[0], where=where))


class RemoteBlob:
    """A blob of a registry as a file that is read from any position.

    The registry that receives it verifies the digest.
    """

    def __init__(
        self, client: RegistryClient, repository: str, descriptor: names.Descriptor
    ) -> None:
        self._client = client
        self._repository = repository
        self._blob = descriptor
        self._position = 0
        self._pieces: Iterator[bytes] | None = None
        self._rest = b""

    def reopen(self) -> Self:
        """Begin again, without a connection until the first read."""
        self.close()
        self._position = 0
        return self

    def seek(self, position: int) -> None:
        if position != self._position:
            self.close()
            self._position = position

    def read(self, limit: int) -> bytes:
        """Return at most ``limit`` bytes, none at the end; raise `RegistryError`."""
        if not self._rest:
            self._rest = self._client.retry(self._read_piece)
        piece, self._rest = self._rest[:limit], self._rest[limit:]
        self._position += len(piece)
        return piece

    def close(self) -> None:
        pieces, self._pieces, self._rest = self._pieces, None, b""
        if isinstance(pieces, Generator):
            pieces.close()

    def _read_piece(self) -> bytes:
        if self._pieces is None:
            self._pieces = self._client.iter_blob(self._repository, self._blob, self._position)
        try:
            return next(self._pieces, b"")
        except errors.RegistryError:
            self._pieces = None
            raise


def _mount_blobs(
    client: RegistryClient, repository: str, blobs: list[names.Descriptor], source: str
) -> list[names.Descriptor]:
    """Mount blobs over several connections; return those that are not mounted."""
    # A base has dozens of layers, and each mount waits for one answer.
    results = transfer_blobs(
        blobs,
        lambda: closing(client.clone()),
        lambda own, blob, _failed: None if _try_mount(own, repository, blob, source) else blob,
    )
    return [blob for blob in results if blob is not None]


def _try_mount(
    client: RegistryClient, repository: str, blob: names.Descriptor, source: str
) -> bool:
    """Mount a blob; False where the registry or the login cannot."""
    try:
        return uploads.mount_blob(client, repository, blob.digest, source)
    except (errors.Denied, errors.LoginRefused, errors.NotFound, errors.Unsupported):
        # The login for pushes may not read the source: another client does.
        return False


def _read_image(
    client: RegistryClient,
    repository: str,
    index_digest: str,
    manifest: names.Manifest,
    architecture: str,
) -> ResolvedImage:
    where = client.format_image(repository, manifest.digest)
    document = json.loads(manifest.content)
    layers = document.get("layers")
    if not isinstance(layers, list) or len(layers) > _LAYERS_LIMIT:
        raise errors.AnswerInvalid(f"cannot use {where}: expected at most {_LAYERS_LIMIT} layers")
    config_blob = names.parse_descriptor(document.get("config"), where=where)
    layer_blobs = tuple(names.parse_descriptor(layer, where=where) for layer in layers)
    config = client.read_small_blob(repository, config_blob)
    try:
        described = json.loads(config)
    except (ValueError, RecursionError):
        described = None
    if not isinstance(described, dict):
        raise errors.AnswerInvalid(f"cannot use {where}: its config is no JSON object")
    # A manifest without a list has no platform: only the config names the architecture (image-spec,
    # config.md).
    actual = described.get("architecture")
    if actual != architecture:
        raise errors.NotFound(
            f"cannot use {where}: expected an image for linux/{architecture}, found "
            f"{str(actual)[:20]!r}",
            status=404,
        )
    return ResolvedImage(
        repository, index_digest, manifest, config, architecture, config_blob, layer_blobs
    )
