"""The two hashes of a NodePool's config, and which changes roll its nodes. Pure."""

from treenail.api import machineconfig


def needs_rollout(old: machineconfig.MachineConfig, new: machineconfig.MachineConfig) -> bool:
    """Return whether nodes must drain or reboot, or be replaced, to get from one to the other."""
    raise NotImplementedError


def is_hypershift_hash(text: str) -> bool:
    """Return whether a hash in an annotation or a name is one of HyperShift: 8 hex digits."""
    raise NotImplementedError
