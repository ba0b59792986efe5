"""``treenail-controller run`` as the process of a Deployment."""

import argparse
import http.client
import logging
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import pytest

from tests.controllers.drain.site import Site
from tests.controllers.installed import OPTIONS, account_kubeconfig, apply
from tests.waiting import wait_until
from treenail.api.component_names import PART_OF_LABELS
from treenail.cli.controller import run
from treenail.cli.controller.main import create_parser, main
from treenail.cli.controller.run.command import ControllerProcess
from treenail.cli.controller.run.controllers import ControllerCommand, ControllerContext
from treenail.cli.output import EXIT_USAGE
from treenail.controllers.runtime.informer_set import InformerSet
from treenail.controllers.runtime.workers import ControllerSettings
from treenail.errors import NotLeaderError, UsageError
from treenail.kube.api_client import Client, Json
from treenail.kube.resources import LEASES, NODES
from treenail.log import LineFormatter
from treenail.manifests.installation import NAME, build_documents
from treenail.manifests.permissions import CONTROLLER_VERBS
from treenail_lab.apiserver.serving.server import LabServer
from treenail_lab.lifetime.fork_server import LabProcess

pytestmark = pytest.mark.integration
COMMAND = "import sys; from treenail.cli.controller.main import main; sys.exit(main())"
LIMIT_S = 30.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LabServer]:
    with LabServer(tmp_path / "api") as found:
        apply(found, build_documents(OPTIONS))
        yield found


@pytest.fixture
def site(server: LabServer) -> Iterator[Site]:
    found = Site(server)
    yield found
    found.close()


class Running:
    """The process and its metrics port."""

    def __init__(self, kubeconfig: Path, log: Path, *arguments: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.log = log
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "POD_NAMESPACE": OPTIONS.namespace,
            "POD_NAME": log.stem,
        }
        with log.open("wb") as output:
            self.process = LabProcess(
                [
                    *(sys.executable, "-c", COMMAND, "run", "--kubeconfig", str(kubeconfig)),
                    *("--metrics", f"127.0.0.1:{self.port}", *arguments),
                ],
                env=environment,
                stdout=output,
                stderr=output,
            )

    def get(self, path: str) -> str:
        """Return the page, or an empty text before the server listens."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            body = response.read().decode()
        except OSError:
            return ""
        finally:
            connection.close()
        return body if response.status == 200 else ""

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(LIMIT_S)


@contextmanager
def running(kubeconfig: Path, log: Path, *arguments: str) -> Iterator[Running]:
    found = Running(kubeconfig, log, *arguments)
    try:
        yield found
    except BaseException:
        sys.stdout.write(log.read_text())
        raise
    finally:
        if found.process.poll() is None:
            found.process.kill()
        found.process.wait(LIMIT_S)


def test_process_drains_a_node_and_exits_cleanly(
    server: LabServer, site: Site, tmp_path: Path
) -> None:
    site.node("a")
    site.pod("a", "web")
    site.request_drain("a", "drain-b")
    kubeconfig = account_kubeconfig(server)
    with running(kubeconfig, tmp_path / "one.log", "--enable", "drain") as process:
        wait_until(lambda: site.applied("a") == "drain-b", limit_s=LIMIT_S)
        assert process.get("/healthz") == "ok\n"
        assert process.get("/readyz") == "ok\n"
        metrics = process.get("/metrics")
        assert "treenail_controller_leader 1.0\n" in metrics
        assert "treenail_controller_drain_duration_seconds_count 1.0\n" in metrics
        assert process.end() == 0

    lease = site.client.get(LEASES, NAME, namespace=OPTIONS.namespace)
    assert lease["spec"]["holderIdentity"] == ""  # type: ignore[index]  # a dict
    assert lease["metadata"]["labels"] == PART_OF_LABELS  # type: ignore[index]  # a dict
    node: Any = site.client.get(NODES, "a")
    assert "treenail-drain" in [each["manager"] for each in node["metadata"]["managedFields"]]
    log = process.log.read_text()
    assert " INFO    drained a for drain-b in " in log
    assert "Traceback" not in log


def test_standby_process_takes_over_from_a_killed_leader(
    server: LabServer, site: Site, tmp_path: Path
) -> None:
    site.node("a")
    site.pod("a", "web")
    site.budget("keep-web", "web")
    kubeconfig = account_kubeconfig(server)
    with running(kubeconfig, tmp_path / "one.log", "--enable=drain") as first:
        wait_until(lambda: "controller_leader 1.0\n" in first.get("/metrics"), limit_s=LIMIT_S)
        with running(kubeconfig, tmp_path / "two.log", "--enable=drain") as second:
            wait_until(lambda: second.get("/readyz"), limit_s=LIMIT_S)
            assert "controller_leader 0.0\n" in second.get("/metrics")
            site.request_drain("a", "drain-b")
            wait_until(lambda: site.cordoned("a"))
            began = site.record("a")
            first.end(signal.SIGKILL)
            # The Lease would expire after a minute.
            spec: Json = {"spec": {"holderIdentity": ""}}
            site.client.patch(LEASES, NAME, spec, namespace=OPTIONS.namespace)
            site.drop_budget("keep-web")
            wait_until(lambda: site.applied("a") == "drain-b", limit_s=LIMIT_S)
            assert site.record("a") == began
            assert second.end() == 0


def test_process_with_lost_lease_fails(server: LabServer, tmp_path: Path, site: Site) -> None:
    kubeconfig = account_kubeconfig(server)
    with running(kubeconfig, tmp_path / "one.log", "--enable", "drain,render,rollout") as process:
        wait_until(lambda: "controller_leader 1.0\n" in process.get("/metrics"), limit_s=LIMIT_S)
        spec: Json = {"spec": {"holderIdentity": "them"}}
        site.client.patch(LEASES, NAME, spec, namespace=OPTIONS.namespace)
        assert process.process.wait(LIMIT_S) == 1
    log = process.log.read_text()
    assert "waiting for lease treenail/treenail-controller, held by them" in log
    assert "lost lease treenail-controller; exiting" in log


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--enable", "drain"], "cannot use the service account"),
        (["--enable", "drain", "--kubeconfig", "/nowhere"], "cannot read kubeconfig /nowhere"),
        (["--enable", "drain", "--metrics", "8080"], "invalid address '8080'"),
    ],
)
def test_bad_argument_is_rejected_in_one_sentence(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *arguments]) == EXIT_USAGE
    error = capsys.readouterr().err
    assert said in error
    # A second line has the remedy, if there is one.
    assert error.count("\n") <= 2


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--enable", "reboot"],
        ["--enable", "drain", "--drains", "0"],
        ["--enable", "drain", "--image-annotation", "image"],
        ["--enable", "drain", "--namespace", ".."],
    ],
)
def test_unknown_argument_shows_the_usage(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", *arguments])
    assert ended.value.code == EXIT_USAGE
    assert "usage: treenail-controller run" in capsys.readouterr().err


def test_logged_text_from_the_cluster_begins_no_line() -> None:
    record = logging.LogRecord(
        "a", logging.INFO, "", 0, "bad: %s", ("a\nINFO forged \x1b[2J",), None
    )
    text = LineFormatter().format(record)
    assert text.endswith(r"INFO    bad: a\nINFO forged \u001b[2J")


def test_unknown_lease_namespace_is_rejected(
    server: LabServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kubeconfig = str(account_kubeconfig(server))
    assert main(["run", "--enable=drain", "--kubeconfig", kubeconfig]) == EXIT_USAGE
    assert "the namespace of the Lease is not set" in capsys.readouterr().err


class EagerController:
    """Writes before the election, and then ends the process."""

    name = "drain"

    def __init__(self, context: ControllerContext) -> None:
        self._client = Client(context.transport)
        self.refusals: list[str] = []

    def register_watches(self, informers: InformerSet, enqueue: Callable[[str], None]) -> None:
        try:
            self._client.patch(NODES, "a", {"spec": {"unschedulable": True}})
        except NotLeaderError as error:
            self.refusals.append(str(error))
        signal.raise_signal(signal.SIGTERM)

    def sync_key(self, key: str) -> float | None:
        return None

    def close(self) -> None:
        """Do nothing."""


@pytest.fixture
def restored_handlers() -> Iterator[None]:
    """Restore what a process of controllers sets for its whole life."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    handlers, hook = {number: signal.getsignal(number) for number in numbers}, threading.excepthook
    yield
    threading.excepthook = hook
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("restored_handlers")
def test_controller_without_the_lead_writes_nothing(server: LabServer, site: Site) -> None:
    site.node("a")
    made: list[EagerController] = []

    def build(
        context: ControllerContext, _arguments: argparse.Namespace
    ) -> tuple[ControllerSettings, ...]:
        made.append(EagerController(context))
        return (ControllerSettings(made[0]),)

    options = ("--namespace", OPTIONS.namespace, "--metrics", "127.0.0.1:0")
    kubeconfig = str(account_kubeconfig(server))
    arguments = ("run", "--enable=drain", "--kubeconfig", kubeconfig, *options)
    command = ControllerCommand(lambda _: None, build)
    process = ControllerProcess(create_parser().parse_args(arguments), lambda _: command)
    assert process.run() == 0
    assert made[0].refusals == ["PATCH /api/v1/nodes/a was not sent: this process no longer leads"]
    assert not site.cordoned("a")


def test_every_controller_has_its_permissions() -> None:
    modules = {each.name for each in iter_modules(run.__path__)}
    assert modules - {"command", "controllers"} == CONTROLLER_VERBS.keys()


def test_page_needs_the_rollout_controller(server: LabServer) -> None:
    kubeconfig = str(account_kubeconfig(server))
    options = ("--metrics", "127.0.0.1:0", "--no-leader-election", "--web")
    arguments = ("run", "--enable=drain", "--kubeconfig", kubeconfig, *options)
    with pytest.raises(UsageError, match="only it may read rollout policies"):
        ControllerProcess(create_parser().parse_args(arguments))


def test_page_of_a_process_shows_pools_with_its_permissions(
    server: LabServer, site: Site, tmp_path: Path
) -> None:
    site.node("a")
    log = tmp_path / "page.log"
    options = ("--enable=render,rollout,drain", "--web=127.0.0.1:0")
    with running(account_kubeconfig(server), log, *options):

        def read_page() -> str:
            found = re.search(r"http://127\.0\.0\.1:([0-9]+)/", log.read_text())
            if found is None:
                return ""
            connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=LIMIT_S)
            connection.request("GET", "/status.json")
            return connection.getresponse().read().decode()

        wait_until(lambda: '"problem":""' in read_page(), limit_s=LIMIT_S)
