"""The machine's signature policy, read again for each image because users change it."""

from treenail import errors
from treenail.host.filesystem.atomic_files import HostFiles
from treenail.update.checks import signature_policy

_LIMIT = 1024 * 1024


def find_image_rule(
    files: HostFiles, image: str, *, is_stored: bool = False
) -> signature_policy.SignatureRule | str | None:
    """Return the policy's rule for the image, or the error as text; None without a policy.

    ``is_stored``: bootc deploys the image from podman's storage. A policy can reject the transport
    containers-storage even when it accepts the registry (containers-policy.json(5)).
    """
    try:
        policy = files.read_file(signature_policy.POLICY_PATH, limit=_LIMIT)
        if policy is None:
            return None
        rule = signature_policy.find_rule(policy, image)
        storage_rule = signature_policy.find_storage_rule(policy) if is_stored else rule
    except (errors.FileError, errors.ConfigError) as error:
        return str(error)
    return storage_rule if storage_rule.trust is signature_policy.SignatureTrust.REJECTED else rule


def needs_signature(files: HostFiles, image: str) -> bool:
    """Return whether the policy demands a signature that the OS back end must verify."""
    rule = find_image_rule(files, image)
    return (
        isinstance(rule, signature_policy.SignatureRule)
        and rule.trust is signature_policy.SignatureTrust.SIGNED
        and rule.is_strict
    )
