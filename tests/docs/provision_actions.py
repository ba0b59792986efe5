"""Actions of the lab between the commands of a guide to new machines.

Guides call the address of the control plane api-int.example.com. It is the loopback interface here.
The kubelet of a new machine joins with what the server gave it.
The server runs beside the lab, with the arguments of the DaemonSet, the certificate of the Secret
and the permissions of the ServiceAccount that a guide created.
"""

import base64
from collections.abc import Callable, Mapping, Sequence

from tests.docs.lab_shell import CLUSTER, LabShells
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail.api.decode import Fields
from treenail.errors import NotFoundError
from treenail.kube.resources import DAEMONSETS, SECRETS
from treenail.manifests.ignition_server import CERTIFICATE_SECRET, NAME
from treenail.provisioning.machines.logged_requests import LoggedRequest, RequestOutcome
from treenail.provisioning.machines.request_log import REQUEST_CONFIGMAP, RequestStore
from treenail_lab.apiserver.access.certificates import write_private_file
from treenail_lab.cluster import POOL, Lab
from treenail_lab.controllers import ALL_CONTROLLERS, ControllerReplicas
from treenail_lab.provision import STOCK, ConfigServer, install_new_machine, is_pool_updated

HOST, PORT = "api-int.example.com", 22623
_LIMIT_S = 300.0
_OWN_OPTIONS = ("--listen=", "--certificate=", "--key=", "--metrics=")


class ProvisionActions:
    """The actions on a lab to which machines are added."""

    def __init__(self, lab: Lab, shells: LabShells, controllers: ControllerReplicas) -> None:
        self._lab = lab
        self._installed = controllers
        self._with_approval = ControllerReplicas(lab, enable=(*ALL_CONTROLLERS, "approve"))
        self._shells = shells
        self._server: ConfigServer | None = None
        shells.names[HOST] = "localhost"
        lab.add_image(STOCK)

    def list_actions(self) -> Mapping[str, Callable[..., None]]:
        """Return the actions by the text of their comments."""
        return {
            "the Deployment and the DaemonSet are rolled out": self._start_programs,
            r"(\S+) boots for the first time with (\S+)": self._boot_machine,
            r"(\S+) joins": self._wait_for_node,
            r"the log has (\d+) kinds of refused requests": self._wait_for_refusals,
        }

    def stop(self) -> None:
        """Stop the server, and the controllers that an action started."""
        self._with_approval.stop()
        if self._server is not None:
            self._server.stop()

    def _start_programs(self) -> None:
        """Replace the controllers and start the server: the lab runs no pods of them."""
        self._installed.stop()
        self._with_approval.start_replica()
        self._start_server()

    def _start_server(self) -> None:
        wait_until(lambda: is_pool_updated(self._lab), limit_s=_LIMIT_S)
        client = self._lab.client
        secret = Fields.from_json(client.get(SECRETS, CERTIFICATE_SECRET, namespace=NAME), "Secret")
        data = secret.get_object("data")
        parts = [base64.b64decode(data.get_text(name)) for name in ("tls.key", "tls.crt")]
        certificate = self._lab.directory / "guide-serving.pem"
        write_private_file(certificate, b"".join(parts))
        arguments = self._read_arguments()
        self._server = ConfigServer(self._lab, certificate=certificate, arguments=arguments)
        self._server.start()
        # The names are replaced in this order.
        self._shells.names = {f"{HOST}:{PORT}": f"localhost:{self._server.port}", HOST: "localhost"}
        wait_until(self._is_ready, limit_s=_LIMIT_S)

    def _is_ready(self) -> bool:
        """Return whether the server has listed the cluster, as the rollout waits for it."""
        url = f"https://{HOST}:{PORT}/config/{POOL}"
        format_code = "--output /dev/null --write-out '%{http_code}'"
        done = self._shells.run(CLUSTER, f"curl --silent {format_code} --cacert ca.crt {url}")
        return done.stdout == "401"

    def _read_arguments(self) -> list[str]:
        """Return the arguments of the DaemonSet without those that belong to its pod."""
        found = Fields.from_json(
            self._lab.client.get(DAEMONSETS, NAME, namespace=NAME), "DaemonSet"
        )
        pod = found.get_object("spec").get_object("template").get_object("spec")
        (container,) = pod.iter_objects("containers")
        command, *arguments = container.get_text_list("args")
        assert command == "serve"
        kept = [each for each in arguments if not each.startswith(_OWN_OPTIONS)]
        # The API server of the lab has another port.
        url = f"--api-server={self._lab.server.url}"
        return [url if each.startswith("--api-server=") else each for each in kept]

    def _boot_machine(self, name: str, user_data: str) -> None:
        assert self._server is not None
        content = (self._shells.workstation / user_data).read_bytes()
        install_new_machine(self._lab, name, STOCK, self._server, content).start()

    def _wait_for_node(self, name: str) -> None:
        """Wait until the Node is updated, and the server has logged what its machine received."""

        def is_done() -> bool:
            try:
                return self._lab.read_annotations(name).get(key.STATE) == "Done"
            except NotFoundError:
                return False

        def is_logged() -> bool:
            outcomes = {logged.row.outcome for logged in self._read_log()}
            return RequestOutcome.SERVED in outcomes

        wait_until(is_done, limit_s=_LIMIT_S)
        wait_until(is_logged, limit_s=_LIMIT_S)

    def _wait_for_refusals(self, count: str) -> None:
        """Wait until the server has written its log."""

        def is_logged() -> bool:
            rows = [logged.row for logged in self._read_log()]
            refused = {row.reason for row in rows if row.outcome is RequestOutcome.REFUSED}
            return len(refused) >= int(count)

        wait_until(is_logged, limit_s=_LIMIT_S)

    def _read_log(self) -> Sequence[LoggedRequest]:
        return RequestStore(self._lab.client, NAME, REQUEST_CONFIGMAP).read_rows()
