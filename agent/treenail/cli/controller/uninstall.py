"""``treenail-controller uninstall``: delete everything that treenail created in a cluster."""

import argparse

from treenail import clocks, errors
from treenail.api import component_names, object_meta
from treenail.cli import argument_parser, output, terminal
from treenail.cli.controller import connect
from treenail.kube import api_client, discovery, resources
from treenail.manifests import ignition_server, installation, removal

_PROGRAM = "treenail-controller"
_PAUSE_S = 1.0
_PODS = f"{removal.SELECTOR},app.kubernetes.io/name in ({installation.NAME},{ignition_server.NAME})"
_FORBIDDEN = (
    "use a cluster administrator (--kubeconfig FILE), or change the webhook or policy that refuses"
)


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the arguments of the command."""
    parser = commands.add_parser(
        "uninstall",
        help="delete everything that treenail created in the cluster",
        description="Revoke access tokens and bootstrap tokens, delete everything else that "
        "treenail created in the cluster, and print what stays. Exit code 0: nothing is left that "
        "must go, 1: something is left; the message says what to do.",
        epilog=terminal.format_examples(
            ("show what would go, and what stays", "treenail-controller uninstall --dry-run"),
        ),
        formatter_class=terminal.HelpFormatter,
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print what would be deleted, in order, and stop"
    )
    parser.add_argument(
        "--delete-crds", action="store_true",
        help="delete the custom resource definitions too, and with them all MachineConfigs, pools "
        "and policies (default: they stay)",
    )  # fmt: skip
    parser.add_argument(
        "--timeout", type=argument_parser.parse_duration, default=120.0, metavar="DURATION",
        help="wait this long for pods to end, and for deleted objects to vanish (default: 2m)",
    )  # fmt: skip
    connect.add_connection_arguments(parser)
    parser.set_defaults(run=uninstall)


def uninstall(arguments: argparse.Namespace) -> int:
    """Delete the objects; return 1 when one of them is left."""
    if arguments.delete_crds:
        terminal.print_error(
            _PROGRAM,
            "warning: the custom resource definitions go with all MachineConfigs, "
            "MachineConfigPools, policies and image configurations",
        )
    with connect.connect_cluster(arguments) as client:
        remover = _Remover(client, arguments.timeout, deletes_crds=arguments.delete_crds)
        deleted, kept = remover.plan()
        is_empty = not (deleted or kept or remover.problems)
        if arguments.dry_run:
            terminal.print_lines(f"would delete {item.title}" for item in deleted)
        elif not is_empty:
            kept = remover.remove(deleted)
    if is_empty:
        print(f"nothing to remove: no object of the cluster has the label {removal.SELECTOR}")
        return 0
    kept.append("agents, and what they wrote: files on machines, annotations of Nodes, and Events")
    terminal.print_lines(f"stays: {line}" for line in kept)
    for problem, error in remover.problems.items():
        is_forbidden = isinstance(error, errors.ForbiddenError)
        remedy = error.remedy or (_FORBIDDEN if is_forbidden else "repair what the message names")
        terminal.print_error(
            _PROGRAM, f"cannot {problem}: {error}", f"{remedy}; then run this command again"
        )
    return output.EXIT_FAILED if remover.problems else 0


class _Remover:
    """Deletes what a plan names, and plans again until nothing is left.

    All decisions come from the cluster, so that a later run continues one that was killed.
    """

    def __init__(self, client: api_client.Client, limit_s: float, *, deletes_crds: bool) -> None:
        self._client = client
        self._clock = clocks.SystemClock()
        self._limit_s = limit_s
        self._deletes_crds = deletes_crds
        self._has_waited = False
        self._failures: dict[str, errors.ClusterError] = {}
        self.problems: dict[str, errors.ClusterError] = {}
        """Why something is left, by what failed."""

    def plan(self) -> tuple[list[removal.FoundObject], list[str]]:
        """Plan the removal from the cluster; raise `ClusterError` without discovery."""
        self.problems = {}
        served, failed = discovery.discover_resources(self._client)
        names = removal.list_written_names()
        found: list[removal.FoundObject] = []
        for resource in served:
            if (resource.group, resource.kind) in names:
                found.extend(self._list(resource, selector=removal.SELECTOR) or ())
        contents: dict[str, list[removal.FoundObject] | None] = {}
        for item in found:
            if item.resource == resources.NAMESPACES and removal.is_written(item, names):
                content = self._list_content(item.metadata.name, served)
                contents[item.metadata.name] = None if failed else content
        for version, error in failed.items():
            if contents or version.rpartition("/")[0] in {group for group, _ in names}:
                self.problems[f"read the resources of {version}"] = error
        return removal.plan_removal(found, contents, crd_keeper=self._find_crd_keeper())

    def remove(self, objects: list[removal.FoundObject]) -> list[str]:
        """Delete until nothing is left or the time is over; return what stays."""
        self._delete_objects(objects)
        deadline = self._clock.monotonic() + self._limit_s
        while True:
            objects, kept = self.plan()
            is_done = all(self._is_refused(item) for item in objects)
            if is_done or self._clock.monotonic() >= deadline:
                break
            self._delete_objects(objects)
            self._clock.sleep(_PAUSE_S)
        for item in objects:
            failure = self._failures.get(item.metadata.uid)
            self.problems[f"delete {item.title}"] = failure or _describe_waiting(item)
        for pod in self._list_pods():
            self.problems[f"stop {pod.title}"] = errors.ClusterError(
                "it still runs, and may create objects again", remedy="delete the pod"
            )
        return kept

    def _delete_objects(self, objects: list[removal.FoundObject]) -> None:
        for item in objects:
            if item.metadata.is_deleting or self._is_refused(item):
                continue
            if item.stage > removal.WORKLOAD_STAGE and not self._has_waited:
                self._has_waited = True
                deadline = self._clock.monotonic() + self._limit_s
                while self._list_pods() and self._clock.monotonic() < deadline:
                    self._clock.sleep(_PAUSE_S)
            # Another program may have created objects in the namespace since it was listed.
            if item.resource != resources.NAMESPACES or any(
                item.title == present.title for present in self.plan()[0]
            ):
                self._delete_object(item)

    def _delete_object(self, item: removal.FoundObject) -> None:
        meta = item.metadata
        try:
            # The UID: another program may have created an object of this name meanwhile.
            self._client.delete(item.resource, meta.name, namespace=meta.namespace, uid=meta.uid,
                                propagation="Background")  # fmt: skip
        except errors.NotFoundError:
            print(f"deleted {item.title}")  # with its owner or its namespace
        except errors.ConflictError:
            return
        except errors.ClusterError as error:
            self._failures[meta.uid] = error
        else:
            self._failures.pop(meta.uid, None)
            print(f"deleted {item.title}", flush=True)

    def _is_refused(self, item: removal.FoundObject) -> bool:
        """Return whether another attempt has no chance; other failures may pass."""
        error = self._failures.get(item.metadata.uid)
        return isinstance(error, (errors.ForbiddenError, errors.InvalidError))

    def _list_pods(self) -> list[removal.FoundObject]:
        """Return the pods of the workloads."""
        pods = self._list(resources.PODS, selector=_PODS) or ()
        return [pod for pod in pods if pod.metadata.owner_references]

    def _list_content(
        self, namespace: str, served: list[resources.Resource]
    ) -> list[removal.FoundObject] | None:
        """List all objects in a namespace; None when one kind cannot be listed."""
        lists = [self._list(kind, namespace=namespace) for kind in served if kind.namespaced]
        return None if None in lists else [item for items in lists for item in items or ()]

    def _list(
        self, resource: resources.Resource, *, namespace: str = "", selector: str = ""
    ) -> list[removal.FoundObject] | None:
        """List objects without spec and status; record a problem and return None for an error."""
        params = {"labelSelector": selector} if selector else {}
        try:
            pages = self._client.list_pages(resource, namespace=namespace, params=params,
                                            has_metadata_only=True)  # fmt: skip
            return [
                removal.FoundObject(resource, object_meta.read_metadata(item, resource.kind))
                for page in pages
                for item in page.items
            ]
        except errors.NotFoundError:
            return []  # the definition of the kind was deleted meanwhile
        except errors.ClusterError as error:
            self.problems[f"list {resource.plural}{f' in {namespace}' * bool(namespace)}"] = error
            return None

    def _find_crd_keeper(self) -> str:
        if not self._deletes_crds:
            return "--delete-crds deletes them"
        # The definitions have the names of those of the Machine Config Operator.
        operator = self._list(resources.DEPLOYMENTS, namespace=component_names.MCO_NAMESPACE)
        return "" if operator == [] else "the Machine Config Operator may use them"


def _describe_waiting(item: removal.FoundObject) -> errors.ClusterError:
    finalizers = item.metadata.others.get("finalizers")
    place = f" -n {item.metadata.namespace}" if item.metadata.namespace else ""
    return errors.ClusterError(
        f"it still exists; its finalizers are {finalizers or 'none'}",
        remedy="start what must finish the deletion, or remove the finalizer; see: kubectl get "
        f"{item.resource.plural}{place} {item.metadata.name} -o yaml",
    )
