"""The kubeconfig of a hosted cluster, from the namespace of its control plane."""

from contextlib import suppress

from treenail import errors
from treenail.api import decode
from treenail.api.hosted import nodepool
from treenail.encoding import json_text
from treenail.kube import api_client, resources
from treenail.kube.transport import kubeconfig


def load_guest_config(
    client: api_client.Client,
    namespace: str,
    control_plane: nodepool.HostedControlPlane | None,
    cluster_name: str = "",
) -> kubeconfig.ApiServerConfig:
    """Read the kubeconfig that the HostedControlPlane names, else the one of Cluster API.

    ``cluster_name`` is the Cluster of the Machines, for another provider of control planes. Raises
    `ClusterError` and `UsageError`.
    """
    named = None
    if control_plane is not None:
        named, cluster_name = control_plane.kubeconfig, control_plane.infra_id or cluster_name
    elif not cluster_name:
        raise errors.NotFoundError(f"namespace {namespace} has no HostedControlPlane")
    named = named or nodepool.KubeconfigReference(f"{cluster_name}-kubeconfig", "value")
    where = f"kubeconfig in Secret {named.name} in namespace {namespace}"
    secret = client.get(resources.SECRETS, named.name, namespace=namespace)
    encoded = decode.Fields.from_json(secret, where).get_object("data").get_text(named.key)
    with suppress(ValueError):  # Its text would quote a part of the Secret.
        return kubeconfig.read_kubeconfig_text(json_text.decode_base64(encoded).decode(), where)
    raise errors.UsageError(
        f"cannot use the {where}: its key {named.key} is not base64 of a text",
        remedy="delete the Secret: its owner creates it again",
    )
