"""Options of ``treenail-controller manifests`` that made the objects of an installation."""

from dataclasses import dataclass

from treenail.api.decode import Json
from treenail.kube import discovery
from treenail.kube.resources import get_object
from treenail.manifests import installation

SERVE = "serve"
"""Name of the Ignition server in ``--enable``."""

# The options that programs and manifests share by name.
_SAME_NAME = (
    "agent-image",
    "api-server",
    "build-cache",
    "build-cpu",
    "build-memory",
    "build-namespace",
    "build-storage",
    "builder-image",
    "ignition-ca",
    "ignition-url",
    "image-annotation",
    "registry-needs-cluster",
    "scope",
    "serve-namespace",
    "tokens",
)
# The manifests always set these.
_FIXED = ("certificate", "enable", "key", "listen", "metrics", "signing-key", "web")


@dataclass(frozen=True, slots=True)
class InstalledObjects:
    """Objects of one installation, as the API server returns them; None for absent ones."""

    deployment: Json | None
    daemonset: Json | None
    network_policy: Json | None = None
    dashboard: Json | None = None


def read_options(objects: InstalledObjects) -> tuple[list[str], list[str]]:
    """Return the options of the installation, and arguments that no option gives.

    Every option is ``--name`` or ``--name=value``. The second list has what users added to the
    arguments of containers; applying manifests removes it.
    """
    options: list[str] = []
    unknown: list[str] = []
    enabled: list[str] = []
    for workload, namespace_option in (
        (objects.deployment, "namespace"),
        (objects.daemonset, "serve-namespace"),
    ):
        if workload is None:
            continue
        # Sidecars that a webhook injected come after it.
        containers = discovery.iter_objects(_get_template(workload).get("containers"))
        container = next(containers, {})
        options.append(f"--image={container.get('image', '')}")
        namespace = get_object(workload, "metadata").get("namespace", "")
        options.append(f"--{namespace_option}={namespace}")
        for argument in _list_texts(container, "args")[1:]:
            name, _, value = argument.removeprefix("--").partition("=")
            if name in _SAME_NAME:
                options.append(argument)
            elif name == "enable":
                enabled += value.split(",")
            elif name == "web":
                options.append("--web")
            elif name not in _FIXED:
                unknown.append(argument)
    if objects.daemonset is not None:
        enabled.append(SERVE)
    options.append(f"--enable={','.join(enabled)}")
    options += [f"--signing-key-secret={name}" for name in _list_secrets(objects.deployment)]
    if readers := _list_readers(objects.network_policy):
        options.append(f"--metrics-from={','.join(readers)}")
    if objects.dashboard is not None:
        options.append("--monitoring")
    return list(dict.fromkeys(options)), unknown


def _get_template(workload: Json) -> Json:
    return get_object(get_object(get_object(workload, "spec"), "template"), "spec")


def _list_texts(document: Json, field: str) -> list[str]:
    texts = document.get(field)
    return [str(text) for text in texts] if isinstance(texts, list) else []


def _list_secrets(deployment: Json | None) -> list[str]:
    volumes = discovery.iter_objects(_get_template(deployment or {}).get("volumes"))
    return [
        str(get_object(volume, "secret").get("secretName", ""))
        for volume in volumes
        if volume.get("name") == installation.KEY_VOLUME
    ]


def _list_readers(network_policy: Json | None) -> list[str]:
    """Return the namespaces that the policy admits."""
    return [
        str(namespace)
        for rule in discovery.iter_objects(get_object(network_policy or {}, "spec").get("ingress"))
        for peer in discovery.iter_objects(rule.get("from"))
        for expression in discovery.iter_objects(
            get_object(peer, "namespaceSelector").get("matchExpressions")
        )
        for namespace in _list_texts(expression, "values")
    ]
