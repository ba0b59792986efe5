"""Paths on a node that mean more than their contents."""

FORCE_FILE = "/run/machine-config-daemon-force"
"""Present: the node is brought to its config whatever it is like, and rebooted."""

KUBELET_CA = "/etc/kubernetes/kubelet-ca.crt"
CLOUD_CA = "/etc/kubernetes/static-pod-resources/configmaps/cloud-config/ca-bundle.pem"
USER_CA_BUNDLE = "/etc/pki/ca-trust/source/anchors/openshift-config-user-ca-bundle.crt"
REGISTRY_CAS = "/etc/docker/certs.d"
REGISTRY_PULL_SECRET = "/etc/mco/internal-registry-pull-secret.json"  # noqa: S105  # where it is
REGISTRIES_CONF = "/etc/containers/registries.conf"

CORE_USER = "core"
"""The one user whose keys and password a config may set."""
AUTHORIZED_KEYS = "/home/core/.ssh/authorized_keys.d/ignition"

UNIT_DIRECTORY = "/etc/systemd/system"

# Renewed on a way of their own, at any time, and therefore never as a config says.
CREDENTIALS = frozenset({KUBELET_CA, CLOUD_CA, REGISTRY_PULL_SECRET})


def unit_path(name: str) -> str:
    """Where the contents of a unit are written."""
    return f"{UNIT_DIRECTORY}/{name}"


def dropin_path(unit: str, name: str) -> str:
    """Where a drop-in of a unit is written."""
    return f"{UNIT_DIRECTORY}/{unit}.d/{name}"


def should_outlive_config(path: str) -> bool:
    """Whether the file stays when a config lets go of it: what is trusted is not forgotten."""
    return path in (KUBELET_CA, CLOUD_CA, USER_CA_BUNDLE) or path.startswith(REGISTRY_CAS + "/")
