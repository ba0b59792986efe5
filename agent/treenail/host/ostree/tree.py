"""The trees of deployments on disk: /ostree/deploy/NAME/deploy/CHECKSUM.SERIAL, see ostree(1)."""

from treenail.errors import HostError
from treenail.host.filesystem.root import Root
from treenail.host.ostree.deployments import OstreeDeployment

_DEPLOYMENTS = "/sysroot/ostree/deploy"


def open_deployment_tree(root: Root, deployment: OstreeDeployment) -> Root:
    """Return the tree of a deployment of rpm-ostree that was never booted.

    Its /etc is /usr/etc, because ostree merges the /etc of the host at the shutdown. Raises
    `HostError` without the tree.
    """
    name, _, serial = deployment.id.partition(f"-{deployment.checksum}.")
    path = f"{_DEPLOYMENTS}/{name}/deploy/{deployment.checksum}.{serial}"
    place = root.resolve_path(path)
    if not serial or not (place / "usr").is_dir():
        raise HostError(
            f"cannot read the content of {deployment.image or deployment.id}: its deployment has "
            f"no tree at {path}",
            remedy="see: ostree admin status",
        )
    return Root(place, has_usr_etc=True)
