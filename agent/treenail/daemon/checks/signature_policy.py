"""The machine's signature policy, read again for each image because users change it."""

from treenail.errors import ConfigError, FileError
from treenail.host.filesystem.atomic_files import HostFiles
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
    """Return the policy's rule for the image, or the error as text; None without a policy.

    ``is_stored``: bootc deploys the image from podman's storage. A policy can reject the transport
    containers-storage even when it accepts the registry (containers-policy.json(5)).
    """
    try:
        policy = files.read_file(POLICY_PATH, limit=_LIMIT)
        if policy is None:
            return None
        found = find_rule(policy, image)
        storage_rule = find_storage_rule(policy) if is_stored else found
    except (FileError, ConfigError) as error:
        return str(error)
    return storage_rule if storage_rule.trust is SignatureTrust.REJECTED else found


def needs_signature(files: HostFiles, image: str) -> bool:
    """Return whether the policy demands a signature that the OS back end must verify."""
    found = find_image_rule(files, image)
    return (
        isinstance(found, SignatureRule)
        and found.trust is SignatureTrust.SIGNED
        and found.is_strict
    )
