"""Attach documents to images: the provenance of a build, and the list of packages."""

from treenail.errors import ConfigError
from treenail.image.oci.packages import SPDX_TYPE
from treenail.image.oci.provenance import STATEMENT_TYPE, BuildProvenance, make_statement
from treenail.registry import images, referrers
from treenail.registry.client import RegistryClient


def attach_provenance(client: RegistryClient, repository: str, provenance: BuildProvenance) -> None:
    """Attach the statement to the image, unless the image has one; raise `RegistryError`."""
    statement = make_statement(provenance)
    _attach_once(client, repository, provenance.digest, STATEMENT_TYPE, statement)


def attach_packages(client: RegistryClient, repository: str, digest: str, document: bytes) -> None:
    """Attach an SPDX document to the image, unless the image has one; raise `RegistryError`."""
    _attach_once(client, repository, digest, SPDX_TYPE, document)


def copy_packages(client: RegistryClient, repository: str, source: str, target: str) -> bool:
    """Attach the SPDX document of the image ``source`` to ``target``; False if it has none.

    Both are digests of images of the repository.
    """
    documents = read_documents(client, repository, source, SPDX_TYPE)
    for document in documents[:1]:
        attach_packages(client, repository, target, document)
    return bool(documents)


def read_documents(
    client: RegistryClient, repository: str, digest: str, kind: str
) -> tuple[bytes, ...]:
    """Return the attached documents of a type."""
    artifacts = referrers.get_referrers(client, repository, digest, kind)
    return tuple(
        images.read_artifact(client, repository, referrer.digest) for referrer in artifacts
    )


def _attach_once(
    client: RegistryClient, repository: str, digest: str, kind: str, content: bytes
) -> None:
    # The same image may have been pushed before the process ended.
    if referrers.get_referrers(client, repository, digest, kind):
        return
    subject = client.head_manifest(repository, digest)
    if subject is None:
        raise ConfigError(
            f"cannot attach a document to {digest}: {client.host}/{repository} does not have the "
            "image"
        )
    artifact = referrers.attach(
        client, repository, subject, artifact_type=kind, media_type=kind, content=content
    )
    if all(
        referrer.digest != artifact.digest
        for referrer in referrers.get_referrers(client, repository, digest)
    ):
        raise ConfigError(
            f"cannot attach a document to {client.format_image(repository, digest)}: the registry "
            "does not list it"
        )
