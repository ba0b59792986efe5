"""The machine's signature policy, read anew for each image: people change it."""

from treenail.errors import ConfigError, FileError
from treenail.host.files import Files
from treenail.update.signatures import POLICY, Rule, Trust, rule

_LIMIT = 1024 * 1024


def rule_for(files: Files, image: str) -> Rule | str | None:
    """What the policy says of the image, or why it can't be read; None where there is none."""
    try:
        policy = files.read(POLICY, limit=_LIMIT)
        return None if policy is None else rule(policy, image)
    except (FileError, ConfigError) as error:
        return str(error)


def verifies(files: Files, image: str) -> bool:
    """Whether ostree is to be asked for a verified image, as the policy wants signatures."""
    found = rule_for(files, image)
    return isinstance(found, Rule) and found.trust is Trust.SIGNED and found.strict
