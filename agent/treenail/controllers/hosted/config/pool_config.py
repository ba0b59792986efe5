"""The config of a NodePool that treenail owns, with the hashes that decide about its nodes."""

from dataclasses import dataclass, field

from treenail.api import machineconfig


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """What machines and nodes of a NodePool should have."""

    config: machineconfig.MachineConfig = field(repr=False)
    """Rendered, with the files of pull secret and trust bundle, which are secret."""
    target_hash: str
    """16 hex digits over everything that a machine gets; names Secrets and desired configs."""
    rollout_hash: str
    """The same without what needs neither drain nor reboot; only its change rolls nodes."""
    version: str
    """Version of the release."""
    release_image: str = ""
