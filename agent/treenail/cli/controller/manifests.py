"""``treenail-controller manifests``: print the manifests of an installation."""

import argparse
import re
import sys
from collections.abc import Mapping
from dataclasses import replace

from treenail.api import annotations as key
from treenail.api import documents, object_meta
from treenail.api.component_names import PART_OF_LABELS
from treenail.api.hosted import annotations as hosted_key
from treenail.cli import argument_parser, terminal
from treenail.cli.controller import connect, serve
from treenail.cli.controller.run import build, controllers, hosted, nodepools
from treenail.errors import TreenailError, UsageError
from treenail.kube import api_client, resources
from treenail.manifests import (
    ignition_server,
    installation,
    installed_options,
    monitoring,
    permissions,
    removal,
)

_SECRET_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_NAME_LIMIT = 253
SERVE = installed_options.SERVE
_HOSTED_PARTS = ("hosted", "nodepools", "hosted,nodepools")
_PARTIAL_SCHEMA = key.OWN_PREFIX + "partial-schema"
"""Annotation of the definitions that are printed with ``--hosted``."""
_MONITORING_NAMESPACE = "monitoring"
"""Where kube-prometheus installs Prometheus."""
_NETWORKPOLICIES = resources.Resource(
    "networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy", namespaced=True
)


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the arguments of the command."""
    parser = commands.add_parser(
        "manifests",
        help="print the manifests that install the controllers",
        description="Print custom resource definitions, permissions of agents and controllers, and "
        "the Deployment of the controllers, for kubectl apply -f -.",
        epilog=terminal.format_examples(
            (
                "install the controllers",
                "treenail-controller manifests --image IMAGE | kubectl apply -f -",
            ),
            (
                "upgrade, with the options of the installation in the cluster",
                "treenail-controller manifests --like-installed --image IMAGE | kubectl apply -f -",
            ),
            (
                "build OS images in the cluster too",
                "treenail-controller manifests --enable CONTROLLERS,build | kubectl apply -f -",
            ),
            (
                "serve Ignition configs to new machines, and nothing else",
                "treenail-controller manifests --enable serve | kubectl apply -f -",
            ),
            (
                "permit the controller hosted to work for one hosted cluster",
                "treenail-controller manifests --only hosted --control-plane clusters-example",
            ),
            (
                "own the NodePools of hosted clusters",
                "treenail-controller manifests --enable hosted,nodepools --ignition-url https://…",
            ),
            (
                "permit agents to work under the Machine Config Operator",
                "treenail-controller manifests --only agent | kubectl apply -f -",
            ),
        ),
        formatter_class=terminal.HelpFormatter,
    )
    defaults = installation.InstallOptions()
    parser.add_argument(
        "--like-installed",
        action="store_true",
        help="begin with the options of the installation in the cluster, and print them and what "
        "changes to standard error; other options of this command replace them. To drop an option, "
        "give the printed ones instead of this one",
    )
    connect.add_connection_arguments(parser)
    parser.add_argument(
        "--enable",
        type=_parse_parts,
        default=permissions.DEFAULT_CONTROLLERS,
        metavar="NAME,...",
        help=f"parts to install: the controllers {', '.join(controllers.CONTROLLERS)}, and "
        f"{SERVE}, the server of Ignition configs (default: "
        f"{','.join(permissions.DEFAULT_CONTROLLERS)})",
    )
    parser.add_argument(
        "-n",
        "--namespace",
        type=connect.parse_namespace,
        default=defaults.namespace,
        help="namespace of the Deployment (default: %(default)s)",
    )
    parser.add_argument(
        "--serve-namespace",
        type=connect.parse_namespace,
        default=ignition_server.NAME,
        metavar="NAME",
        help=f"namespace of the DaemonSet of {SERVE} and of its access tokens (default: "
        "%(default)s)",
    )
    parser.add_argument(
        "--image",
        default=defaults.image,
        help=f"image of the Deployment and of the DaemonSet of {SERVE} (default: %(default)s)",
    )
    parser.add_argument(
        "--api-server",
        type=argument_parser.parse_server_url,
        metavar="URL",
        help=f"let {SERVE} issue bootstrap tokens for the API server at this address, which new "
        "machines reach (default: no bootstrap tokens)",
    )
    argument_parser.add_image_annotation_argument(parser)
    parser.add_argument(
        "--tokens", choices=serve.MODES,
        help=f"access tokens of new machines, see {SERVE} --help (default: require)",
    )  # fmt: skip
    parser.add_argument(
        "--registry-needs-cluster", metavar="HOST", action="append", default=[],
        type=serve.parse_registry,
        help=f"let {SERVE} name no image of this registry, HOST or HOST:PORT, to machines: they "
        "cannot reach it before they join; repeatable",
    )  # fmt: skip
    parser.add_argument(
        "--only",
        choices=("agent", *_HOSTED_PARTS, SERVE),
        help="print only the permissions and the admission policy of agents, for a cluster that "
        "the Machine Config Operator controls, or only those of these controllers for hosted "
        f"clusters, or only the Ignition server of hosted clusters, {SERVE} --hosted (default: "
        "everything)",
    )
    parser.add_argument(
        "--control-plane",
        action="append",
        default=[],
        type=_parse_control_plane,
        metavar="NAMESPACE[,INFRA-ID]",
        help="permit the controllers hosted and nodepools, or with --only "
        f"{SERVE} the Ignition server, to work in this namespace of a control plane; with its "
        "infrastructure ID hosted also reads the kubeconfig of Cluster API; repeatable",
    )
    parser.add_argument(
        "--node-pools", action="append", default=[], type=connect.parse_namespace,
        metavar="NAMESPACE",
        help="permit the controller nodepools to work in this namespace of NodePools; repeatable",
    )  # fmt: skip
    parser.add_argument(
        "--hosted", action="store_true",
        help="print also small definitions of NodePool and HostedCluster, unless the cluster has "
        "those of HyperShift",
    )  # fmt: skip
    hosted.add_arguments(parser)
    nodepools.add_arguments(parser)
    parser.add_argument(
        "--monitoring",
        action="store_true",
        help="print also a Service, a PodMonitor and a PrometheusRule for the Prometheus "
        "operator, and a ConfigMap with a dashboard for Grafana",
    )
    parser.add_argument(
        "--skip-generator-kinds",
        action="store_true",
        help="print no custom resource definitions of the kinds that generate reads. OpenShift has "
        "its own, and applying others would replace them (default: print them; with "
        "--like-installed, unless the cluster has its own)",
    )
    parser.add_argument(
        "--metrics-from",
        type=_parse_namespaces,
        metavar="NAMESPACE,...",
        help="let the NetworkPolicy admit the pods of these namespaces to the metrics (default: "
        f"{_MONITORING_NAMESPACE} with --monitoring, else none)",
    )
    parser.add_argument(
        "--web",
        action="store_true",
        help="serve the read-only page on the loopback interface of the pods; see it with: kubectl "
        f"port-forward -n NAMESPACE deployment/{installation.NAME} {installation.WEB_PORT}",
    )
    build.add_job_arguments(parser)
    parser.add_argument(
        "--signing-key-secret",
        metavar="NAME",
        type=_parse_secret_name,
        help=f"sign built images with the EC key in {installation.SIGNING_KEY} of this Secret in "
        "the namespace of the Deployment (default: no signatures)",
    )
    parser.set_defaults(run=lambda arguments: _run(parser, arguments))


def _run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    if arguments.like_installed:
        arguments = _merge_installed(parser, arguments)
    return print_manifests(arguments)


def _merge_installed(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace
) -> argparse.Namespace:
    """Return the options of the installation with those of the command line over them."""
    if arguments.only:
        raise UsageError("cannot use --like-installed with --only: agents have no options")
    with connect.connect_cluster(arguments) as client:
        objects = _read_installation(client, parser, arguments)
        has_other_kinds = _has_other_kinds(client)
    options, unknown = installed_options.read_options(objects)
    terminal.print_error(parser.prog, f"options of the installation: {' '.join(options)}")
    for text in unknown:
        terminal.print_error(
            parser.prog,
            f"warning: applying these manifests removes the argument {text}: no option gives it",
            "add it again after the upgrade",
        )
    installed = parser.parse_args(options)
    merged = parser.parse_args([*options, *arguments.words[1:]])
    merged.skip_generator_kinds |= has_other_kinds
    for name, value in vars(merged).items():
        old = getattr(installed, name)
        if value != old and name not in {"like_installed", "kubeconfig", "context"}:
            option = f"--{name.replace('_', '-')}"
            terminal.print_error(
                parser.prog, f"changes {option}: {_format(old)} to {_format(value)}"
            )
    return merged


def _has_other_kinds(client: api_client.Client) -> bool:
    """Return whether the cluster has a kind of ``generate`` that treenail did not define."""
    for document in installation.load_crds("crds/generate"):
        name = str(resources.get_object(document, "metadata").get("name"))
        found = client.find(resources.CUSTOMRESOURCEDEFINITIONS, name)
        metadata = object_meta.read_metadata(found or document)
        is_labelled = PART_OF_LABELS.items() <= metadata.labels.items()
        if not is_labelled or removal.find_release(metadata):
            return True
    return False


def _format(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value or "none")


def _read_installation(
    client: api_client.Client, parser: argparse.ArgumentParser, arguments: argparse.Namespace
) -> installed_options.InstalledObjects:
    """Read the objects; raise `TreenailError` without one installation."""
    deployment = _find_workload(
        client, resources.DEPLOYMENTS, installation.SELECTOR, arguments.namespace
    )
    daemonset = _find_workload(
        client, resources.DAEMONSETS, ignition_server.SELECTOR, arguments.serve_namespace
    )
    if deployment is None and daemonset is None:
        raise TreenailError(
            f"cannot read the options of the installation: the cluster has no Deployment "
            f"{installation.NAME} and no DaemonSet {ignition_server.NAME}",
            remedy=f"choose its cluster with --context, or install it: {parser.prog} --help",
        )
    namespace = resources.get_object(deployment or {}, "metadata").get("namespace")
    if not namespace:
        return installed_options.InstalledObjects(deployment, daemonset)
    policy, dashboard = (
        client.find(resource, name, namespace=str(namespace))
        for resource, name in (
            (_NETWORKPOLICIES, installation.NAME),
            (resources.CONFIGMAPS, monitoring.DASHBOARD),
        )
    )
    return installed_options.InstalledObjects(deployment, daemonset, policy, dashboard)


def _find_workload(
    client: api_client.Client,
    resource: resources.Resource,
    labels: Mapping[str, object],
    namespace: str,
) -> dict[str, object] | None:
    """Return the only workload with the labels, or that of the namespace if there are several."""
    selector = ",".join(f"{name}={value}" for name, value in labels.items())
    items = client.list(resource, params={"labelSelector": selector}).items
    places = [str(resources.get_object(item, "metadata").get("namespace")) for item in items]
    if len(items) > 1 and namespace not in places:
        raise TreenailError(
            f"cannot read the options of the installation: {resource.plural} of treenail are in "
            f"the namespaces {', '.join(places)}",
            remedy="name one with --namespace or --serve-namespace",
        )
    return items[places.index(namespace) if len(items) > 1 else 0] if items else None


def _parse_secret_name(text: str) -> str:
    if len(text) > _NAME_LIMIT or not _SECRET_NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"expected the name of a Secret, found {text!r:.40}")
    return text


def _parse_parts(text: str) -> tuple[str, ...]:
    names = text.split(",")
    others = ",".join(name for name in names if name != SERVE)
    if SERVE not in names:
        return controllers.parse_controllers(others)
    return (*(controllers.parse_controllers(others) if others.strip(",") else ()), SERVE)


def _parse_control_plane(text: str) -> tuple[str, str]:
    namespace, _, infra_id = text.partition(",")
    return connect.parse_namespace(namespace), infra_id and _parse_secret_name(infra_id)


def _check_no_server_arguments(arguments: argparse.Namespace) -> None:
    for option in ("tokens", "registry_needs_cluster"):
        if getattr(arguments, option):
            raise UsageError(
                f"cannot use --{option.replace('_', '-')} without the Ignition server: only the "
                "server has this option",
                remedy=f"add {SERVE} to --enable, and leave --only out",
            )


def _parse_namespaces(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(map(connect.parse_namespace, text.split(","))))


def _check_install_namespaces(arguments: argparse.Namespace) -> None:
    """Raise `UsageError` for namespaces in which nothing of an installation would be found."""
    if "install" not in arguments.enable or arguments.only:
        return
    from treenail.api.component_names import NAMESPACE
    from treenail.installer.directory.manifest_checks import NAMESPACES

    for option, namespace, expected in (
        ("--namespace", arguments.namespace, (NAMESPACE,)),
        ("--build-namespace", arguments.build_namespace or NAMESPACE, NAMESPACES),
    ):
        if namespace not in expected:
            raise UsageError(
                f"cannot enable install with {option} {namespace}: the objects of an installation "
                f"are in the namespace {' or '.join(expected)}",
                remedy=f"leave {option} out, or leave install out of --enable",
            )


def _check_arguments(arguments: argparse.Namespace, enabled: tuple[str, ...]) -> None:
    """Raise `UsageError` for options that do not belong together."""
    if arguments.monitoring and not enabled:
        raise UsageError(
            "cannot use --monitoring without a controller", remedy="add one to --enable"
        )
    if arguments.only and arguments.web:
        raise UsageError("cannot use --web with --only: agents serve no page")
    if arguments.web and "rollout" not in arguments.enable:
        # The controllers would refuse --web at their start, and the pods restart forever.
        raise UsageError(
            "cannot use --web without the rollout controller: only it may read rollout policies",
            remedy="add rollout to --enable, or leave --web out",
        )
    if arguments.signing_key_secret and (arguments.only or "build" not in arguments.enable):
        raise UsageError(
            "cannot use --signing-key-secret without the build controller: only it signs images",
            remedy="add build to --enable, or leave --signing-key-secret out",
        )
    _check_install_namespaces(arguments)
    parts = arguments.only.split(",") if arguments.only else arguments.enable
    has_output = arguments.control_plane or arguments.node_pools or arguments.hosted
    is_hosted = not {"hosted", "nodepools", SERVE}.isdisjoint(parts)
    if arguments.only and is_hosted and not has_output:
        raise UsageError(
            f"cannot use --only {arguments.only} without --control-plane: it permits work there",
            remedy="name the namespace of each control plane: --control-plane NAMESPACE",
        )
    if arguments.control_plane and not is_hosted:
        raise UsageError(
            "cannot use --control-plane without the controller hosted",
            remedy="add hosted to --enable, or use --only hosted",
        )
    if arguments.node_pools and "nodepools" not in parts:
        raise UsageError(
            "cannot use --node-pools without the controller nodepools",
            remedy="add nodepools to --enable, or use --only hosted,nodepools",
        )
    if "nodepools" in parts and not arguments.only:
        nodepools.check_arguments(arguments)
    if SERVE not in arguments.enable or arguments.only:
        _check_no_server_arguments(arguments)
    if arguments.only and arguments.monitoring:
        raise UsageError("cannot use --monitoring with --only: agents have no Service")
    if arguments.only and arguments.metrics_from is not None:
        raise UsageError("cannot use --metrics-from with --only: agents have no NetworkPolicy")


def _list_owning_arguments(arguments: argparse.Namespace) -> list[str]:
    names = ["scope", "agent_image"] if "hosted" in arguments.enable else []
    names += ["ignition_url", "ignition_ca"] if "nodepools" in arguments.enable else []
    found = {name: getattr(arguments, name) for name in names}
    found = {name: text for name, text in found.items() if text != hosted_key.OWN_SCOPE}
    return [f"--{name.replace('_', '-')}={text}" for name, text in found.items() if text]


def _load_hosted_kinds(arguments: argparse.Namespace) -> list[dict[str, object]]:
    """Return the definitions that may be applied; raise `TreenailError` without the cluster.

    Applying them over those of HyperShift would remove fields of its objects.
    """
    with connect.connect_cluster(arguments) as client:
        found = []
        for document in installation.load_crds("crds/hosted"):
            name = object_meta.read_metadata(document).name
            present = client.find(resources.CUSTOMRESOURCEDEFINITIONS, name)
            if _PARTIAL_SCHEMA in object_meta.read_metadata(present or document).annotations:
                found.append(document)
        return found


def print_manifests(arguments: argparse.Namespace) -> int:
    """Print the manifests."""
    enabled = tuple(name for name in arguments.enable if name != SERVE)
    _check_arguments(arguments, enabled)
    readers = arguments.metrics_from
    if readers is None:
        readers = (_MONITORING_NAMESPACE,) if arguments.monitoring else ()
    serve_namespace: str = arguments.serve_namespace
    options = installation.InstallOptions(
        enabled,
        arguments.namespace,
        arguments.image,
        has_generator_kinds=not arguments.skip_generator_kinds,
        has_web_page=arguments.web,
        metrics_namespaces=readers,
        builds=build.read_job_settings(arguments, arguments.build_namespace or ""),
        signing_key_secret=arguments.signing_key_secret or "",
        image_annotation=key.PREFIX + arguments.image_annotation,
        serve_namespace=serve_namespace if serve_namespace != ignition_server.NAME else "",
        control_planes=dict(arguments.control_plane),
        node_pool_namespaces=arguments.node_pools,
        owning_arguments=_list_owning_arguments(arguments),
    )
    if arguments.only == "agent":
        objects = installation.build_node_access()
    elif arguments.only == SERVE:
        objects = ignition_server.build_hosted_documents(options)
    elif arguments.only:
        parts = tuple(arguments.only.split(","))
        objects = installation.build_hosted_access(replace(options, controllers=parts))
    else:
        objects = installation.build_documents(options)
    if arguments.hosted:
        objects = [*_load_hosted_kinds(arguments), *objects]
    if SERVE in arguments.enable and arguments.only is None:
        server = ignition_server.ServerOptions(
            arguments.tokens or ignition_server.ServerOptions().tokens,
            arguments.registry_needs_cluster,
            arguments.api_server or "",
        )
        objects = [
            *objects,
            *ignition_server.build_server_documents(options, arguments.serve_namespace, server),
        ]
        if enabled:
            objects += ignition_server.build_settings_access(options, arguments.serve_namespace)
        objects += ignition_server.build_approval_access(options, serve_namespace)
    if arguments.monitoring:
        namespace = arguments.serve_namespace if SERVE in arguments.enable else ""
        objects = [*objects, *monitoring.build_monitoring(options, namespace)]
    sys.stdout.write("---\n".join(map(documents.dump_document, objects)))
    sys.stdout.flush()
    return 0
