"""The machine's signature policy, read anew for each image: people change it."""

from treenail.errors import ConfigError, FileError
from treenail.host.filesystem.files import Files
from treenail.update.checks.signature_policy import POLICY, Rule, Trust, rule, rule_of_storage

_LIMIT = 1024 * 1024


def rule_for(files: Files, image: str, *, stored: bool = False) -> Rule | str | None:
    """What the policy says of the image, or why it can't be read; None where there is none.

    ``stored``: the image is deployed from podman's storage, which may be rejected by itself.
    """
    try:
        policy = files.read(POLICY, limit=_LIMIT)
        if policy is None:
            return None
        found = rule(policy, image)
        again = rule_of_storage(policy) if stored else found
    except (FileError, ConfigError) as error:
        return str(error)
    return again if again.trust is Trust.REJECTED else found


def verifies(files: Files, image: str) -> bool:
    """Whether ostree is to be asked for a verified image, as the policy wants signatures."""
    found = rule_for(files, image)
    return isinstance(found, Rule) and found.trust is Trust.SIGNED and found.strict
