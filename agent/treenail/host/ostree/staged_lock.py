"""Whether the shutdown finalizes the staged deployment, as libostree recorded it."""

from treenail.errors import HostError
from treenail.host.filesystem.root import Root
from treenail.host.ostree.gvariant import find_boolean

_STAGED = "/run/ostree/staged-deployment"
_FORMER_LOCK = "/run/ostree/staged-deployment-locked"
_MAX_BYTES = 16 << 20
_REMEDY = "see: ostree admin status"


def is_staged_locked(root: Root) -> bool:
    """Return whether the staged deployment is locked; False without a staged deployment.

    Since 2023.8 libostree records the lock in the ``a{sv}`` of the staged deployment, before that
    in a file of its own, and it obeys both (ostree-sysroot-deploy.c). rpm-ostreed up to 2026.2
    looks for the file alone, so that its ``Deployments`` do not show a lock of today.

    Raises HostError when the record exists and cannot be read.
    """
    if root.resolve_path(_FORMER_LOCK).exists():
        return True
    try:
        with root.resolve_path(_STAGED).open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise HostError(f"cannot read {_STAGED}: {error.strerror}", remedy=_REMEDY) from None
    if len(content) > _MAX_BYTES:
        raise HostError(f"cannot read {_STAGED}: it is over {_MAX_BYTES >> 20} MiB", remedy=_REMEDY)
    return find_boolean(content, "locked") is True
