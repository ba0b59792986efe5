"""Attach signatures, provenance and packages to images, and verify signatures.

A key is an ECDSA key of the package cryptography.
"""

from typing import TYPE_CHECKING

from treenail.errors import ConfigError
from treenail.image.oci import attachments
from treenail.oci_content import OCI_MANIFEST
from treenail.registry import images, names, referrers, uploads
from treenail.registry.client import RegistryClient
from treenail.registry.errors import NotFound, RegistryError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import (
        EllipticCurvePrivateKey,
        EllipticCurvePublicKey,
    )


def attach_provenance(
    client: RegistryClient, repository: str, provenance: attachments.BuildProvenance
) -> None:
    """Attach the statement to the image, unless the image has one; raise `RegistryError`."""
    statement = attachments.make_statement(provenance)
    _attach_once(client, repository, provenance.digest, attachments.STATEMENT_TYPE, statement)


def attach_packages(client: RegistryClient, repository: str, digest: str, document: bytes) -> None:
    """Attach an SPDX document to the image, unless the image has one; raise `RegistryError`."""
    _attach_once(client, repository, digest, attachments.SPDX_TYPE, document)


def copy_packages(client: RegistryClient, repository: str, source: str, target: str) -> bool:
    """Attach the SPDX document of the image ``source`` to ``target``; False if it has none.

    Both are digests of images of the repository.
    """
    documents = read_documents(client, repository, source, attachments.SPDX_TYPE)
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


_KEY_REMEDY = (
    "make a key with: openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out FILE"
)


class SignatureMissing(RegistryError):
    """An image has no valid signature of the expected key."""


class SigningKey:
    """A private key. Its repr shows nothing of it."""

    def __init__(self, key: "EllipticCurvePrivateKey") -> None:
        self._key = key

    @property
    def public_key(self) -> "VerificationKey":
        return VerificationKey(self._key.public_key())

    def sign(self, payload: bytes) -> bytes:
        """Return the ECDSA signature of the SHA-256 of the payload."""
        # Imported late: few controllers sign.
        from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415 - as above
        from cryptography.hazmat.primitives.hashes import SHA256  # noqa: PLC0415 - as above

        return self._key.sign(payload, ec.ECDSA(SHA256()))


class VerificationKey:
    """A public key."""

    def __init__(self, key: "EllipticCurvePublicKey") -> None:
        self._key = key

    def to_pem(self) -> bytes:
        """Return the key as nodes need it."""
        from cryptography.hazmat.primitives import serialization  # noqa: PLC0415 - as above

        return self._key.public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )

    def verifies(self, signature: bytes, payload: bytes) -> bool:
        """Return whether the signature is of this key and payload."""
        from cryptography.exceptions import InvalidSignature  # noqa: PLC0415 - as above
        from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415 - as above
        from cryptography.hazmat.primitives.hashes import SHA256  # noqa: PLC0415 - as above

        try:
            self._key.verify(signature, payload, ec.ECDSA(SHA256()))
        except InvalidSignature:
            return False
        return True


def load_signing_key(pem: bytes) -> SigningKey:
    """Load a private key without a password; the error contains nothing of it."""
    from cryptography.exceptions import UnsupportedAlgorithm  # noqa: PLC0415 - as above
    from cryptography.hazmat.primitives import serialization  # noqa: PLC0415 - as above
    from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415 - as above

    try:
        key = serialization.load_pem_private_key(pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise ConfigError(
            "cannot use the signing key: expected a PEM file with an EC key without a password",
            remedy=_KEY_REMEDY,
        ) from None
    # cosign makes keys of this curve, and containers/image verifies its signatures with SHA-256
    # only (signature/internal/sigstore_payload.go).
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.curve.name != "secp256r1":
        raise ConfigError(
            "cannot use the signing key: expected the curve P-256", remedy=_KEY_REMEDY
        )
    return SigningKey(key)


def sign_image(client: RegistryClient, repository: str, digest: str, key: SigningKey) -> str:
    """Attach a signature to an image unless it has one of this key; return the tag.

    Signatures of other keys stay. The new one is read from the registry and verified.
    """
    tag = attachments.make_signature_tag(digest)
    verifier = key.public_key
    present = _read_stored(client, repository, digest)
    if any(
        not _find_problem(client, repository, digest, signature, verifier) for signature in present
    ):
        return tag
    payload = attachments.make_payload(f"{client.host}/{repository}", digest)
    layer = attachments.make_signature_layer(payload, key.sign(payload))
    manifest, config = attachments.make_signature_manifest(
        [*(signature.layer for signature in present), layer]
    )
    uploads.upload_bytes(client, repository, attachments.PAYLOAD_TYPE, payload)
    uploads.upload_bytes(client, repository, attachments.CONFIG_TYPE, config)
    client.put_manifest(repository, tag, OCI_MANIFEST, manifest)
    verify_image(client, repository, digest, verifier)
    return tag


def verify_image(
    client: RegistryClient, repository: str, digest: str, key: VerificationKey
) -> None:
    """Raise `SignatureMissing` unless the image has a signature of this key."""
    problems = []
    for stored in _read_stored(client, repository, digest):
        problem = _find_problem(client, repository, digest, stored, key)
        if not problem:
            return
        problems.append(problem)
    why = "; ".join(dict.fromkeys(problems)) or "it has no signature"
    raise SignatureMissing(
        f"cannot verify {client.format_image(repository, digest)}: {why}",
        remedy="sign the image, or use the key that signed it",
    )


def _read_stored(
    client: RegistryClient, repository: str, digest: str
) -> tuple[attachments.StoredSignature, ...]:
    try:
        manifest = client.get_manifest(repository, attachments.make_signature_tag(digest))
    except NotFound:
        return ()
    return tuple(attachments.read_signatures(manifest.content))


def _find_problem(
    client: RegistryClient,
    repository: str,
    digest: str,
    stored: attachments.StoredSignature,
    key: VerificationKey,
) -> str:
    """Return why a signature does not count; empty if it is valid."""
    blob = names.Descriptor(attachments.PAYLOAD_TYPE, stored.payload_digest, stored.payload_size)
    payload = client.read_small_blob(repository, blob)
    # The payload is read only after its signature is valid.
    if not key.verifies(stored.signature, payload):
        return "its signature is of another key"
    return attachments.find_payload_problem(payload, f"{client.host}/{repository}", digest)
