"""Paths on a node with a special meaning, among them those of files that contain secrets."""

import re
from fnmatch import fnmatchcase, translate
from functools import cache

from treenail.units import unit_install

FORCE_FILE = "/run/machine-config-daemon-force"
"""While this file exists, the agent applies the config in any state of the node, and reboots."""

KUBELET_CA = "/etc/kubernetes/kubelet-ca.crt"
CLOUD_CA = "/etc/kubernetes/static-pod-resources/configmaps/cloud-config/ca-bundle.pem"
USER_CA_BUNDLE = "/etc/pki/ca-trust/source/anchors/openshift-config-user-ca-bundle.crt"
REGISTRY_CAS = "/etc/docker/certs.d"
PULL_SECRET = "/var/lib/kubelet/config.json"  # noqa: S105  # a path
REGISTRY_PULL_SECRET = "/etc/mco/internal-registry-pull-secret.json"  # noqa: S105  # a path
KUBECONFIG = "/etc/kubernetes/kubeconfig"
"""The bootstrap kubeconfig, with which any machine could join the cluster as a node."""
FIRST_BOOT_ANNOTATIONS = "/etc/machine-config-daemon/node-annotations.json"
"""Annotations for the Node of a new machine."""
SERVED_CONFIG = "/etc/mcs-machine-config-content.json"
"""The rendered MachineConfig that a new machine was served."""
ENCAPSULATED_CONFIG = "/etc/ignition-machine-config-encapsulated.json"
"""The MachineConfig without its Ignition config, for the first boot of the agent."""
IGNITION_FILES = ("/boot/ignition/config.ign", "/run/ignition.json")
"""User data that coreos-installer wrote, and the config that Ignition applied.

Ignition leaves both, with the access token. User data of a cloud or hypervisor is no file.
"""
REGISTRIES_CONF = "/etc/containers/registries.conf"

CORE_USER = "core"
"""The only user whose keys and password a config may set."""
AUTHORIZED_KEYS = "/home/core/.ssh/authorized_keys.d/ignition"

UNIT_DIRECTORY = unit_install.UNIT_DIRECTORY

# Rotated separately from configs, at any time, and therefore never compared with a config.
CREDENTIALS = frozenset({KUBELET_CA, CLOUD_CA, REGISTRY_PULL_SECRET})


def unit_path(name: str) -> str:
    """Return the path for the contents of a unit."""
    return f"{UNIT_DIRECTORY}/{name}"


def dropin_path(unit: str, name: str) -> str:
    """Return the path for a drop-in of a unit."""
    return f"{UNIT_DIRECTORY}/{unit}.d/{name}"


BOOTSTRAP_REGISTRY = "/etc/treenail/bootstrap-registry.json"
"""Record of the registry that the installation runs on the bootstrap host."""

PINNED_IMAGES = "/var/lib/treenail/pinned-images"
"""The images that the agent pinned, one a line; it exists while there are any, or sets."""

OWN_PATHS = ("/etc/treenail/agent.toml", BOOTSTRAP_REGISTRY, "/run/treenail", "/var/lib/treenail")
"""The agent's settings and state: a config that changed them would change its own update."""


def belongs_to_agent(path: str) -> bool:
    """Return whether the path is one of `OWN_PATHS`, or below one."""
    return any(path == own or path.startswith(f"{own}/") for own in OWN_PATHS)


SYSTEM_DIRECTORIES = ("/dev", "/ostree", "/proc", "/sys", "/sysroot")
"""The directories of the kernel and of OSTree, where no file can be written."""


def belongs_to_system(path: str) -> bool:
    """Return whether the path is one of `SYSTEM_DIRECTORIES`, or below one."""
    return any(
        path == directory or path.startswith(f"{directory}/") for directory in SYSTEM_DIRECTORIES
    )


def is_read_only(path: str) -> bool:
    """Return whether the path is below /usr, which only an image can change.

    /usr/local is a link into /var on many systems.
    """
    return path.startswith("/usr/") and not path.startswith("/usr/local/")


def should_outlive_config(path: str) -> bool:
    """Return whether the file stays when a config drops it.

    Trusted CA certificates do, and the kubelet's pull secret, which another program may then write.
    """
    stays = (KUBELET_CA, CLOUD_CA, USER_CA_BUNDLE, PULL_SECRET)
    return path in stays or path.startswith(REGISTRY_CAS + "/")


_LOGIN_PATHS = (
    "/etc/ostree/auth.json", "/etc/containers/auth.json", "/var/lib/kubelet/config.json",
    "*/.docker/config.json", "*/.dockercfg", "*kubeconfig*", BOOTSTRAP_REGISTRY,
)  # fmt: skip


def holds_logins(path: str) -> bool:
    """Return whether the file is a pull secret or a kubeconfig: no image may contain it."""
    return path in CREDENTIALS or any(fnmatchcase(path, pattern) for pattern in _LOGIN_PATHS)


WITHHELD = "<withheld>"

_OTHERS_READ = 0o004
_SECRET_PATHS = (
    "/var/lib/kubelet/config.json", "/etc/ostree/auth.json", "/run/ostree/auth.json",
    "/etc/containers/auth.json", "*/.docker/config.json", "*/.dockercfg", "*/.netrc",
    "/etc/shadow*", "/etc/gshadow*", "*kubeconfig*", "*/ipsec.secrets", "/etc/ipsec.d/*.secrets",
    "/etc/NetworkManager/system-connections/*", "/etc/wireguard/*", "*.key", "*-key.pem",
    "*/ssh_host_*_key", "*/id_rsa", "*/id_ecdsa", "*/id_ed25519", "*.p12", "*.pfx", "*.jks",
    "*.keytab", "/var/lib/treenail/auth.json",
)  # fmt: skip


def is_secret_file(path: str, mode: int) -> bool:
    """Return whether the file is not world-readable, or its path is a known place of secrets."""
    return (
        not mode & _OTHERS_READ
        or path in CREDENTIALS
        or _compile_secret_paths().match(path) is not None
    )


@cache
def _compile_secret_paths() -> re.Pattern[str]:
    # One pattern: a config with thousands of files has each path compared.
    return re.compile("|".join(map(translate, _SECRET_PATHS)))
