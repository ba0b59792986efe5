"""The config of a NodePool that treenail owns, with the hashes that decide about its nodes."""

from dataclasses import dataclass, field

from treenail.api import machineconfig
from treenail.api.hosted import nodepool
from treenail.config.ignition import hosted_payload
from treenail.errors import ConfigError

INVALID_CONFIG, UNSUPPORTED_KIND = "InvalidConfig", "UnsupportedConfigKind"
MISSING_CORE_CONFIG, MISSING_RELEASE = "MissingCoreConfig", "ReleaseBaseMissing"
PAYLOAD_TOO_LARGE = "PayloadTooLarge"


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """The desired config of machines and nodes of a NodePool."""

    config: machineconfig.MachineConfig = field(repr=False)
    """Rendered, with the files of pull secret and trust bundle, which are secret."""
    target_hash: str
    """16 hex digits over everything that a machine gets; names Secrets and desired configs."""
    rollout_hash: str
    """The same without what needs neither drain nor reboot; only its change rolls nodes."""
    version: str
    """Version of the release."""
    release_image: str = ""


def pack_config(config: PoolConfig, *, is_payload: bool) -> str:
    """Return the value of a Secret; raise `PoolConfigError` for a config that is too large."""
    pack = hosted_payload.build_payload if is_payload else hosted_payload.pack_config
    try:
        return pack(config.config)
    except hosted_payload.PayloadTooLargeError as error:
        raise PoolConfigError(
            str(error),
            reason=PAYLOAD_TOO_LARGE,
            remedy=error.remedy,
            condition=nodepool.NodePoolCondition.VALID_GENERATED_PAYLOAD,
        ) from error


class PoolConfigError(ConfigError):
    """The config of a NodePool cannot be made; a condition of the NodePool shows why.

    ``condition`` is its type, ``reason`` is CamelCase.
    """

    def __init__(
        self,
        message: str,
        *,
        reason: str = INVALID_CONFIG,
        remedy: str = "",
        condition: str = nodepool.NodePoolCondition.VALID_MACHINE_CONFIG,
    ) -> None:
        super().__init__(message, remedy=remedy)
        self.condition, self.reason = condition, reason
