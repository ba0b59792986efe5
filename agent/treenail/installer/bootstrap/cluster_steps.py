"""The steps after the first machines boot: connect, publish, hand over, and wait for nodes.

After the last one the nodes have joined, and none pulls from the bootstrap host.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

from treenail import errors
from treenail.api import component_names, decode
from treenail.controllers.handover import handover_objects
from treenail.installer import install_steps
from treenail.installer.bootstrap import image_steps
from treenail.installer.directory.install_state import compute_checksum
from treenail.kube import api_client, resources

log = logging.getLogger(__name__)

_POLL_S = 2.0

ConnectCluster = Callable[[], api_client.Client]
"""Returns a client; raises `UsageError` while there is no kubeconfig."""


class FirstBootStep:
    """Waits until the first machine of the control plane runs an API server."""

    name = "first-boot"
    title = "wait for the API server of the first machine"

    def __init__(
        self,
        connect: ConnectCluster,
        limit: install_steps.StepLimit,
        describe_machines: Callable[[], str],
    ) -> None:
        """``describe_machines`` says how far the machines have come."""
        self._connect = connect
        self._describe_machines = describe_machines
        self.limit = limit

    def compute_inputs(self) -> install_steps.StepInputs:
        """Return nothing: the API server answers, or not."""
        return {}

    def resume(self, result: install_steps.StepResult) -> bool:  # noqa: ARG002  # of the interface
        """Return True: the next step waits for an API server that is gone again."""
        return True

    def run(self, context: install_steps.StepContext) -> install_steps.StepResult:
        """Wait for an answer to an authorized request."""
        wait_until_complete(context, self._find_missing)
        return {}

    def _find_missing(self) -> str:
        try:
            self._connect().get(resources.NAMESPACES, "default")
        except (errors.ClusterError, errors.UsageError) as error:
            return f"{self._describe_machines()}; waiting for the API server: {error}"
        return ""


class PublishStep:
    """Publishes the Secret with images and objects that the controller ``install`` adopts."""

    name = "publish"
    title = "publish the images and their builds to the cluster"

    def __init__(
        self,
        connect: ConnectCluster,
        handover: Callable[[], handover_objects.Handover],
        limit: install_steps.StepLimit,
    ) -> None:
        """``handover`` returns what is handed over, as soon as all images exist."""
        self._connect = connect
        self._handover = handover
        self.limit = limit

    def compute_inputs(self) -> install_steps.StepInputs:
        """Compute the digest of the Secret, which has logins."""
        return {
            "images and objects": compute_checksum(
                handover_objects.build_handover_secret(self._handover())
            )
        }

    def resume(self, result: install_steps.StepResult) -> bool:  # noqa: ARG002  # of the interface
        """Return True: the controller keeps what it has adopted."""
        return True

    def run(self, context: install_steps.StepContext) -> install_steps.StepResult:
        """Create or replace the Secret; retry while the API server is not ready."""
        secret = handover_objects.build_handover_secret(self._handover())

        def find_missing() -> str:
            try:
                self._publish_secret(self._connect(), secret)
            except (errors.ClusterError, errors.UsageError) as error:
                return f"cannot publish yet: {error}"
            return ""

        wait_until_complete(context, find_missing)
        context.report(
            f"published Secret {component_names.NAMESPACE}/{handover_objects.HANDOVER_SECRET}"
        )
        return {}

    def _publish_secret(self, client: api_client.Client, secret: decode.Json) -> None:
        with suppress(errors.AlreadyExistsError):
            metadata = {"name": component_names.NAMESPACE, "labels": component_names.PART_OF_LABELS}
            client.create(resources.NAMESPACES, {"metadata": metadata})
        try:
            client.create(resources.SECRETS, secret, namespace=component_names.NAMESPACE)
        except errors.AlreadyExistsError:
            # Without a resourceVersion the update replaces any version.
            client.update(
                resources.SECRETS,
                handover_objects.HANDOVER_SECRET,
                secret,
                namespace=component_names.NAMESPACE,
            )


class HandoverStep:
    """Waits until the final registries have all images."""

    name = "hand-over"
    title = "hand the images over to their final registry"

    def __init__(
        self,
        connect: ConnectCluster,
        images: Sequence[image_steps.PoolImage],
        limit: install_steps.StepLimit,
        export_images: Callable[[], str],
    ) -> None:
        """``export_images`` saves the images when the limit passes, and says where."""
        self._connect = connect
        self._images = {image.pool: image.digest for image in images}
        self._export_images = export_images
        self.limit = limit

    def compute_inputs(self) -> install_steps.StepInputs:
        """Return the digest of each pool's image."""
        return {f"image of pool {pool}": digest for pool, digest in self._images.items()}

    def resume(self, result: install_steps.StepResult) -> bool:  # noqa: ARG002  # of the interface
        """Return True: a completed hand-over stays complete."""
        return True

    def run(self, context: install_steps.StepContext) -> install_steps.StepResult:
        """Wait for the result of the controller."""
        try:
            wait_until_complete(context, self._find_missing)
        except install_steps.StepOverdueError as error:
            raise self._add_image_location(error) from error
        return {}

    def _find_missing(self) -> str:
        """Return why the hand-over is not complete; empty when it is."""
        try:
            return describe_missing_handover(self._connect(), self._images)
        except (errors.ClusterError, errors.UsageError) as error:
            return f"cannot read the result of the hand-over: {error}"

    def _add_image_location(
        self, error: install_steps.StepOverdueError
    ) -> install_steps.StepOverdueError:
        try:
            location = f"the images are kept in {self._export_images()}"
        except errors.TreenailError as another:
            location = f"the images cannot be kept as OCI directories: {another}"
        return install_steps.StepOverdueError(f"{error}; {location}", remedy=error.remedy)


def wait_until_complete(
    context: install_steps.StepContext, find_missing: Callable[[], str]
) -> None:
    """Wait until nothing is missing, and report each change of the sentence that says what is.

    Raises `StepOverdueError` with the last sentence.
    """
    reported = ""
    while missing := find_missing():
        if missing != reported:
            context.report(missing)
            reported = missing
        try:
            context.wait(_POLL_S)
        except install_steps.StepOverdueError as error:
            raise install_steps.StepOverdueError(
                f"{error}: {reported}", remedy=error.remedy
            ) from error


def describe_missing_handover(client: api_client.Client, images: Mapping[str, str] | None) -> str:
    """Return what the final registries still lack; empty when they have all images.

    ``images`` are the digests by pool; None for those of any installation. Raises `ClusterError`.
    """
    try:
        document = client.get(
            resources.CONFIGMAPS,
            handover_objects.RESULT_CONFIGMAP,
            namespace=component_names.NAMESPACE,
        )
    except errors.NotFoundError:
        return _describe_conditions(client, images)
    try:
        result = handover_objects.read_result_configmap(document)
    except errors.ConfigError as error:
        return f"cannot read the result of the hand-over: {error}"
    missing = [
        pool for pool, digest in (images or {}).items() if result.digests.get(pool) != digest
    ]
    return f"waiting for the image of pool {', '.join(sorted(missing))}" if missing else ""


def _describe_conditions(client: api_client.Client, images: Mapping[str, str] | None) -> str:
    """Return what the controller says about images that are not handed over."""
    try:
        listed = client.list(resources.MACHINEOSCONFIGS).items
        texts = [text for document in listed if (text := _read_condition(document, images))]
    except (errors.NotFoundError, errors.ConfigError) as error:
        return f"waiting for controller install: {error}"
    return "; ".join(texts) or "waiting for controller install, which has not reported yet"


def _read_condition(document: decode.Json, pools: Mapping[str, str] | None) -> str:
    """Return the message of the condition of an image; empty without the condition."""
    fields = decode.Fields.from_json(document, "MachineOSConfig")
    pool = fields.get_object("spec").get_object("machineConfigPool").get_text("name")
    if pools is not None and pool not in pools:
        return ""
    for condition in fields.get_object("status").iter_objects("conditions"):
        if condition.get_text("type") == handover_objects.HANDED_OVER:
            return f"pool {pool}: {condition.get_text('message') or condition.get_text('reason')}"
    return ""


class NodesStep:
    """Waits until the bootstrap host is not needed by any machine of the control plane."""

    name = "nodes"
    title = "release the control plane from the bootstrap host"

    def __init__(
        self,
        connect: ConnectCluster,
        registry: str,
        machines: int | None,
        limit: install_steps.StepLimit,
    ) -> None:
        """``registry`` is ``HOST:PORT``, empty without one; ``machines`` None if unknown."""
        self._connect = connect
        self._registry = registry
        self._machines = machines
        self.limit = limit

    def compute_inputs(self) -> install_steps.StepInputs:
        """Return what machines may still need."""
        count = "unknown" if self._machines is None else str(self._machines)
        return {"bootstrap registry": self._registry, "machines of the control plane": count}

    def resume(self, result: install_steps.StepResult) -> bool:  # noqa: ARG002  # of the interface
        """Return True: a machine that joins later does not make the installation incomplete."""
        return True

    def run(self, context: install_steps.StepContext) -> install_steps.StepResult:
        """Wait for the nodes."""
        if self._machines is None:
            log.warning(
                "the number of control-plane machines is unknown: boot all of them before this "
                "host stops, or name it with --control-plane-machines"
            )
        try:
            wait_until_complete(context, self._find_missing)
        except install_steps.StepOverdueError as error:
            raise install_steps.StepOverdueError(
                str(error),
                remedy="see why with: journalctl -u treenail on the node, or with: "
                f"treenail-controller machines; {error.remedy}",
            ) from error
        return {}

    def _find_missing(self) -> str:
        try:
            return find_missing_nodes(self._connect(), self._registry, self._machines)
        except (errors.ClusterError, errors.UsageError) as error:
            return f"cannot list the nodes: {error}"


def find_missing_nodes(client: api_client.Client, registry: str, machines: int | None) -> str:
    """Return which nodes still need the bootstrap host; empty when none does.

    Raises `ClusterError`.
    """
    return handover_objects.describe_missing_nodes(
        _read_nodes(client.list(resources.NODES).items), registry, machines
    )


def read_registry(client: api_client.Client) -> str:
    """Return the bootstrap registry of a complete hand-over; empty without one.

    Raises `ClusterError`.
    """
    document = client.get(
        resources.CONFIGMAPS, handover_objects.RESULT_CONFIGMAP, namespace=component_names.NAMESPACE
    )
    try:
        return handover_objects.read_result_configmap(document).registry
    except errors.ConfigError as error:
        raise errors.ClusterError(str(error)) from error


def _read_nodes(documents: Iterable[decode.Json]) -> list[handover_objects.RegistryNode]:
    nodes = []
    for document in documents:
        try:
            nodes.append(handover_objects.RegistryNode.from_json(document))
        except errors.ConfigError as error:
            # An API server accepts any annotation and any label, but no such Node.
            log.warning("ignored a Node: %s", error)
    return nodes
