"""``treenail-controller serve`` as a process, with a directory and with a cluster."""

import base64
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.client import Cluster
from tests.controllers.hosted.owning.secret_site import HASHES, PLANE, SecretSite
from tests.controllers.installed import apply
from tests.fixtures.objects import collection_of
from tests.granted_verbs import iter_granted_verbs
from tests.provisioning.process import run_server
from tests.provisioning.samples import NEW, make_config, make_file, make_large_configs, make_pool
from tests.provisioning.serving import LIMIT_S, fetch_config, write_certificate, write_json
from tests.waiting import wait_until
from treenail.api.hosted.token_secret import REACHED_CONFIGMAP
from treenail.cli.controller.main import main
from treenail.cli.output import EXIT_USAGE
from treenail.clocks import SystemClock
from treenail.kube.api_client import Client
from treenail.kube.transport.kubeconfig import read_kubeconfig
from treenail.kube.transport.native import HttpTransport
from treenail.manifests import installation
from treenail.manifests.ignition_server import (
    HOSTED_NAME,
    NAME,
    build_hosted_documents,
    build_server_documents,
)
from treenail.manifests.installation import InstallOptions
from treenail.provisioning.machines.request_log import REQUEST_CONFIGMAP
from treenail.provisioning.tokens.token_store import TokenStore
from treenail.provisioning.tokens.tokens import make_token, read_name
from treenail_lab.apiserver.access.certificates import CertificateAuthority
from treenail_lab.apiserver.serving.server import LabServer

pytestmark = pytest.mark.integration


def test_process_serves_a_directory_and_ends_at_a_signal(tmp_path: Path) -> None:
    sources = tmp_path / "sources"
    sources.mkdir()
    write_json(sources / "pool.json", make_pool())
    write_json(sources / "config.json", make_config(NEW, make_file("/etc/a")))
    with run_server(tmp_path, f"--from={sources}") as running:
        status, config = running.fetch()
        assert (status, config["ignition"]) == (200, {"version": "2.2.0"})
        assert running.fetch("infra")[0] == 404
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(LIMIT_S) == 0
        assert "served config of pool worker to 127.0.0.1" in running.log.read_text()


def create_token(server: LabServer, pool: str) -> str:
    """Create a token as the command does."""
    transport = HttpTransport(read_kubeconfig(str(server.admin_kubeconfig)), SystemClock())
    token, record = make_token(pool, expires=SystemClock().now() + 3600)
    try:
        store = TokenStore(Client(transport), NAME, SystemClock())
        store.change(lambda table: (table.put(record), None))
    finally:
        transport.close()
    return token


def test_process_serves_hosted_clusters_with_its_role(tmp_path: Path) -> None:
    with LabServer(tmp_path / "api") as server:
        cluster = Cluster.of_kubeconfig(server.admin_kubeconfig)
        for plane in (PLANE, "clusters-two"):
            cluster.post("/api/v1/namespaces", {"metadata": {"name": plane}}).ok()
        documents = build_hosted_documents(InstallOptions(control_planes={PLANE: ""}))
        # The lab runs no pods.
        apply(server, [each for each in documents if each["kind"] != "Deployment"])
        site = SecretSite(now=SystemClock().now())
        for secret in site.run().writes:
            cluster.post(collection_of(secret), secret).ok()
        token = base64.b64encode(site.read_tokens()[0].encode()).decode()
        kubeconfig = server.write_account_kubeconfig(HOSTED_NAME, HOSTED_NAME)
        # It may not read the other namespace, which delays no other cluster.
        arguments = ("--hosted", f"--namespace={PLANE},clusters-two", f"--kubeconfig={kubeconfig}")
        with run_server(tmp_path, *arguments) as running:

            def fetch(path: str) -> int:
                headers = {"Authorization": f"Bearer {token}"}
                return fetch_config(running.port, running.ca, path, **headers)[0]

            wait_until(lambda: fetch("/ignition") == 200, limit_s=LIMIT_S)
            assert fetch("/config/np") == 404
            record = f"/api/v1/namespaces/{PLANE}/configmaps/{REACHED_CONFIGMAP}"
            reached = wait_until(lambda: cluster.get(record).ok().get("data"), limit_s=LIMIT_S)
            assert reached == {"np": HASHES[0]}
            assert "serving configs without authentication" not in running.log.read_text()
            assert token not in running.log.read_text()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--hosted", "--tokens=require"], "cannot use --hosted with --from or --tokens"),
        (["--hosted", "--from=."], "cannot use --hosted with --from or --tokens"),
        (["--from=.", "--namespace=a,b"], "cannot use several namespaces without --hosted"),
    ],
)
def test_arguments_that_do_not_belong_together_are_refused(
    arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--certificate=c", "--key=k", *arguments]) == EXIT_USAGE
    assert error in capsys.readouterr().err


def test_process_serves_a_cluster_with_its_role_and_its_cache_without_it(tmp_path: Path) -> None:
    with LabServer(tmp_path / "api") as server:
        documents = [*installation.load_crds(), *build_server_documents(InstallOptions())]
        # The lab runs no pods.
        apply(server, [each for each in documents if each["kind"] != "DaemonSet"])
        cluster = Cluster.of_kubeconfig(server.admin_kubeconfig)
        for document in (make_pool(), make_config(NEW, make_file("/etc/a"))):
            cluster.post(collection_of(document), document).ok()
        status = {**make_pool()["status"], "observedGeneration": 1}
        pools = "/apis/machineconfiguration.openshift.io/v1/machineconfigpools"
        cluster.patch(f"{pools}/worker/status", {"status": status}).ok()
        kubeconfig = server.write_account_kubeconfig(NAME, NAME)
        token, other = create_token(server, "worker"), create_token(server, "infra")
        arguments = (f"--kubeconfig={kubeconfig}", "--tokens=require", "--expect=0s")
        # The fork server has loaded PyYAML.
        with run_server(tmp_path, *arguments, TREENAIL_LAB_FORK_SERVER="no") as running:
            wait_until(lambda: running.fetch(token=token)[0] == 200, limit_s=LIMIT_S)
            assert running.fetch()[0] == 401
            assert running.fetch(token=other)[0] == 403
            assert running.fetch("infra", other)[0] == 404
            log = f"/api/v1/namespaces/{NAME}/configmaps/{REQUEST_CONFIGMAP}"
            wait_until(
                lambda: "404" in cluster.get(log).ok().get("data", {}).get("requests", ""),
                limit_s=LIMIT_S,
            )
            events = "/api/v1/namespaces/default/events"
            wait_until(
                lambda: [
                    each
                    for each in cluster.get(events).ok()["items"]
                    if each["reason"] == "NodeNotAppeared"
                    and each["involvedObject"]["name"] == "worker"
                    and f"for 127.0.0.1 (token {read_name(token)}); last known step: it received"
                    in each["message"]
                ],
                limit_s=LIMIT_S,
            )
            large = make_large_configs()
            for document in large:
                cluster.post(collection_of(document), document).ok()
            # All are delivered when the newest one is served. Then the oldest one is not in memory.
            for number in (len(large) - 1, 0):
                pool = make_pool(new=large[number]["metadata"]["name"])
                changed = cluster.patch(f"{pools}/worker", {"spec": pool["spec"]}).ok()
                generation = changed["metadata"]["generation"]
                status = {**pool["status"], "observedGeneration": generation}
                cluster.patch(f"{pools}/worker/status", {"status": status}).ok()
                file = f"/etc/large-{number}"
                wait_until(
                    lambda file=file: file in str(running.fetch(token=token)[1]),  # type: ignore[misc]  # default
                    limit_s=LIMIT_S,
                )
            # PyYAML takes 2 MiB.
            assert "_yaml" not in Path(f"/proc/{running.process.pid}/maps").read_text()
            latest = server.call_api(lambda api: api.requests.list_latest())
            counts = server.call_api(lambda api: api.requests.count_by_user())
            server.stop()
            wait_until(lambda: "watch disconnected" in running.log.read_text(), limit_s=LIMIT_S)
            assert running.fetch(token=token)[0] == 200
            wait_until(
                lambda: re.search(r"served .*; .*pools are \d+ s old", running.log.read_text()),
                limit_s=LIMIT_S,
            )
            running.process.send_signal(signal.SIGINT)
            assert running.process.wait(LIMIT_S) == 0
    account = f"system:serviceaccount:{NAME}:{NAME}"
    assert [each for each in latest if each.user == account and each.code == 403] == []
    used = {(resource, verb) for user, verb, resource in counts if user == account}
    roles = [each for each in documents if each["kind"] in ("ClusterRole", "Role")]
    granted = {
        (resource.partition(".")[0], verb)
        for role in roles
        for resource, verb in iter_granted_verbs(role["rules"])  # type: ignore[arg-type]  # JSON
    }
    # The server replaces and deletes bootstrap tokens only after another use and for a Node that is
    # Ready, and no Event happened twice.
    unused = {("secrets", verb) for verb in ("update", "delete")}
    assert used == granted - unused - {("events", "patch")}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--from=missing",), "expected a directory"),
        (("--from=.", "--kubeconfig=x"), "cannot use --from with a kubeconfig"),
        (("--from=.", "--listen=nowhere"), "invalid address"),
        (("--kubeconfig=missing",), "missing"),
        (("--registry-needs-cluster=https://x",), "expected HOST or HOST:PORT"),
        (("--from=.", "--tokens=ask"), "cannot use --tokens with --from"),
        (("--grace=1 hour",), "expected a time such as"),
        (("--cache=0",), "expected a number from 1"),
        (("--api-server=https://x:65536",), "expected https://HOST:PORT"),
        (("--api-server=https://x", "--api-server-ca=/dev/null"), "expected a certificate in PEM"),
    ],
)
def test_wrong_argument_is_a_usage_error(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    certificate = tmp_path / "serving.pem"
    write_certificate(CertificateAuthority(tmp_path), certificate)
    files = (f"--certificate={certificate}", f"--key={certificate}", "--metrics=127.0.0.1:0")
    try:
        code = main(["serve", *files, *arguments])
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else -1
    assert code == EXIT_USAGE
    assert message in capsys.readouterr().err


def test_certificate_that_does_not_exist_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = (f"--certificate={tmp_path}/x.pem", f"--key={tmp_path}/x.pem")
    assert main(["serve", f"--from={tmp_path}", *files]) == EXIT_USAGE
    assert "cannot load certificate" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "others"),
    [
        ("run", ("treenail.cli.controller.serve",)),
        ("serve", ("treenail.cli.controller.run", "treenail.controllers.image_build", "yaml")),
    ],
)
def test_long_process_loads_no_other_command(command: str, others: tuple[str, ...]) -> None:
    program = f"""
import sys
from treenail.api.hosted.token_secret import REACHED_CONFIGMAP
from treenail.cli.controller.main import main
try:
    main(["{command}", "--help"])
except SystemExit:
    pass
print(*sorted(sys.modules))
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    found = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, check=True, text=True
    )
    assert f"usage: treenail-controller {command}" in found.stdout
    loaded = set(found.stdout.splitlines()[-1].split())
    assert f"treenail.cli.controller.{command}" in loaded
    others = (
        *others,
        "treenail.builder",
        "treenail.controllers.status",
        "treenail.cli.controller.build",
    )
    found_others = [
        each
        for each in sorted(loaded)
        if each in others or each.startswith(tuple(f"{other}." for other in others))
    ]
    assert found_others == []
