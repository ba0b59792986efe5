"""Attaches the provenance of a build to its image, and reads it."""

from treenail.errors import ConfigError
from treenail.image.oci.provenance import STATEMENT_TYPE, BuildProvenance, make_statement
from treenail.registry.client import RegistryClient
from treenail.registry.images import read_artifact
from treenail.registry.referrers import attach, get_referrers


def attach_provenance(client: RegistryClient, repository: str, provenance: BuildProvenance) -> str:
    """Attach the statement to the image, once; return the digest of its manifest."""
    subject = client.head_manifest(repository, provenance.digest)
    if subject is None:
        raise ConfigError(
            f"cannot attach the provenance of {provenance.digest}: {client.host}/{repository} "
            "does not have the image"
        )
    artifact = attach(
        client,
        repository,
        subject,
        artifact_type=STATEMENT_TYPE,
        media_type=STATEMENT_TYPE,
        content=make_statement(provenance),
    )
    return artifact.digest


def read_provenance(client: RegistryClient, repository: str, digest: str) -> tuple[bytes, ...]:
    """Return the statements that are attached to an image."""
    found = get_referrers(client, repository, digest, STATEMENT_TYPE)
    return tuple(read_artifact(client, repository, each.digest) for each in found)
