"""The machine's signature policy, read anew for each image: people change it."""

from treenail.errors import ConfigError, FileError
from treenail.host.filesystem.files import HostFiles
from treenail.update.checks.signature_policy import (
    POLICY_PATH,
    SignatureRule,
    SignatureTrust,
    find_rule,
    find_storage_rule,
)

_LIMIT = 1024 * 1024


def find_image_rule(
    files: HostFiles, image: str, *, is_stored: bool = False
) -> SignatureRule | str | None:
    """What the policy says of the image, or why it can't be read; None where there is none.

    ``is_stored``: the image is deployed from podman's storage, which may be rejected by itself.
    """
    try:
        policy = files.read_file(POLICY_PATH, limit=_LIMIT)
        if policy is None:
            return None
        found = find_rule(policy, image)
        again = find_storage_rule(policy) if is_stored else found
    except (FileError, ConfigError) as error:
        return str(error)
    return again if again.trust is SignatureTrust.REJECTED else found


def needs_signature(files: HostFiles, image: str) -> bool:
    """Whether ostree is to be asked for a verified image, as the policy wants signatures."""
    found = find_image_rule(files, image)
    return (
        isinstance(found, SignatureRule)
        and found.trust is SignatureTrust.SIGNED
        and found.is_strict
    )
