"""``treenail-controller token``, on the lab's API server."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.objects import collection_of
from tests.provisioning.approving import Approvals, install_join_access, join
from tests.provisioning.samples import make_pool
from tests.provisioning.token_cluster import SECRET, TokenCluster, run_token_cluster
from treenail.api import component_names
from treenail.cli.controller.main import main
from treenail.cli.output import EXIT_USAGE
from treenail.manifests import ignition_server, installation
from treenail.manifests.objects import build_binding, build_role
from treenail.manifests.permissions import build_named_rules
from treenail.provisioning.tokens.token_store import TOKEN_SECRET
from treenail.provisioning.tokens.tokens import confirm_use, read_name
from treenail_lab.apiserver.access.certificates import CertificateAuthority

pytestmark = pytest.mark.integration
Run = Callable[..., tuple[int, str, str]]
SERVER = "--server=https://api-int.example.com:22623"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[TokenCluster]:
    with run_token_cluster(tmp_path) as found:
        for document in [*installation.load_crds(), make_pool()]:
            found.admin.post(collection_of(document), document).ok()
        yield found


@pytest.fixture
def run(cluster: TokenCluster, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command; return exit code, output and errors."""

    def run_command(*arguments: str) -> tuple[int, str, str]:
        kubeconfig = f"--kubeconfig={cluster.server.admin_kubeconfig}"
        code = main(["token", *arguments, *([] if arguments[0] == "user-data" else [kubeconfig])])
        return code, *capsys.readouterr()

    return run_command


def read_json(run: Run, *arguments: str) -> Any:
    code, output, _ = run(*arguments)
    assert code == 0
    return json.loads(output)


def test_namespace_is_that_of_the_manifests() -> None:
    assert component_names.IGNITION_SERVER == ignition_server.NAME


def test_created_token_is_printed_once_with_user_data(
    run: Run, cluster: TokenCluster, tmp_path: Path
) -> None:
    authority = tmp_path / "authority.crt"
    authority.write_bytes(CertificateAuthority(tmp_path).pem)
    code, output, errors = run("create", "--pool=worker", SERVER, f"--ca={authority}", "--ttl=2h")
    assert code == 0
    lines = output.splitlines()
    token = lines[0].removeprefix("token: ")
    user_data = lines[1].removeprefix("user data: ")
    assert len(user_data) < 2048
    (merge,) = json.loads(user_data)["ignition"]["config"]["merge"]
    assert merge["source"] == "https://api-int.example.com:22623/config/worker"
    assert merge["httpHeaders"] == [{"name": "Authorization", "value": f"Bearer {token}"}]
    assert f"created token {read_name(token)} for pool worker: one machine" in errors
    assert token not in errors
    assert token not in str(cluster.admin.get(SECRET).ok())
    assert cluster.make_store().load().find(token) is not None
    (listed,) = read_json(run, "list", "--json")["items"]
    assert (listed["name"], listed["state"], listed["used"]) == (read_name(token), "valid", [])


def test_token_is_printed_in_each_format(run: Run) -> None:
    code, output, _ = run("create", "--pool=worker", "-o", "token")
    assert (code, bool(read_name(output.strip()))) == (0, True)
    code, output, _ = run("create", "--pool=worker", SERVER, "-o", "user-data", "--spec=3.1")
    assert json.loads(output)["ignition"]["version"] == "3.1.0"
    found = read_json(run, "create", "--pool=worker", "--machine=w1", SERVER, "-o", "json")
    assert found["machine"] == "w1"
    assert found["token"] in found["userData"]
    assert run("create", "--pool=worker")[1].count("\n") == 1


def test_old_versions_have_the_token_in_the_url(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(run("create", "--pool=worker", "-o", "token")[1])
    for spec, key in (("2.2", "append"), ("3.0", "merge")):
        code, output, errors = run(
            "user-data", "--pool=worker", SERVER, f"--spec={spec}", f"--token-file={file}"
        )
        assert code == 0
        found = json.loads(output)["ignition"]["config"][key]
        assert found[0]["source"].endswith(f"/config/worker?token={file.read_text().strip()}")
        assert "which proxies may log" in errors
    file.write_text("tn_short")
    code, _, errors = run("user-data", "--pool=worker", SERVER, f"--token-file={file}")
    assert (code, "expected tn_NAME_SECRET" in errors) == (EXIT_USAGE, True)


def test_list_shows_states_and_machines(run: Run, cluster: TokenCluster) -> None:
    names = []
    for _ in range(3):
        token = run("create", "--pool=worker", "-o", "token")[1].strip()
        names.append(read_name(token))

    def use(table: Any) -> Any:
        first, second = table.tokens[names[0]], table.tokens[names[1]]
        first = confirm_use(first, "10.0.0.1", 1e9)
        second = confirm_use(confirm_use(second, "10.0.0.2", 1e9), "10.0.0.3", 1e9)
        return table.put(first).put(second), None

    cluster.make_store().change(use)
    code, output, _ = run("list")
    assert code == 0
    rows = [line.split() for line in output.splitlines()]
    assert rows[0][:4] == ["NAME", "POOL", "STATE", "USES"]
    assert [row[2:4] for row in rows[1:]] == [
        ["used", "1/1"],
        ["overused", "2/1"],
        ["valid", "0/1"],
    ]
    assert "10.0.0.2, 10.0.0.3" in output
    listed = read_json(run, "list", "--json", "--pool=worker")["items"]
    assert listed[0]["used"] == [
        {"address": "10.0.0.1", "time": "2001-09-09T01:46:40Z", "state": "sent"}
    ]
    assert read_json(run, "list", "--json", "--pool=infra")["items"] == []


def test_revoked_tokens_are_gone(run: Run, cluster: TokenCluster) -> None:
    token = run("create", "--pool=worker", "-o", "token")[1].strip()
    _, expired = cluster.create_token()
    assert run("revoke", read_name(token))[1] == f"revoked token {read_name(token)}\n"
    assert run("revoke", "--expired")[1] == f"revoked token {expired.name}\n"
    assert cluster.make_store().load().tokens == {}
    code, _, errors = run("revoke", read_name(token))
    assert code == EXIT_USAGE
    assert "no token has this name" in errors


def test_revoked_token_is_printed_although_its_bootstrap_token_stays(
    run: Run, cluster: TokenCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    name = read_name(run("create", "--pool=worker", "-o", "token")[1].strip())
    used = confirm_use(cluster.read_record(name), "10.0.0.1", 0.0)
    cluster.make_store().change(lambda table: (table.put(used), None))
    place = {"name": "guest", "namespace": component_names.IGNITION_SERVER}
    accounts = f"/api/v1/namespaces/{component_names.IGNITION_SERVER}/serviceaccounts"
    account = cluster.admin.post(accounts, {"metadata": place}).ok()
    rules = build_named_rules({"secrets": TOKEN_SECRET}, ("get", "patch"))
    for document in (
        build_role("Role", place, rules),
        build_binding("RoleBinding", place, {"kind": "ServiceAccount", **place}),
    ):
        cluster.admin.post(collection_of(document), document).ok()
    kubeconfig = cluster.server.write_account_kubeconfig(
        component_names.IGNITION_SERVER, account["metadata"]["name"]
    )
    assert main(["token", "revoke", name, f"--kubeconfig={kubeconfig}"]) == 1
    output, errors = capsys.readouterr()
    assert output == f"revoked token {name}\n"
    assert "cannot delete resource" in errors
    assert cluster.make_store().load().tokens == {}


def test_list_shows_refused_requests_and_what_to_do(run: Run, cluster: TokenCluster) -> None:
    token, record = cluster.create_token()
    install_join_access(cluster)
    for number in range(4):
        join(cluster, token, f"csr-{number}", "localhost")
    approvals = Approvals(cluster)
    for number in range(4):
        assert approvals.decide(f"csr-{number}") == ["Denied"]
    _, output, _ = run("list")
    text = " ".join(output.split())
    assert (
        "csr-0 of its kubelet, for node localhost, was refused: localhost is a placeholder" in text
    )
    assert "--machine localhost" in text
    assert "kubectl delete csr csr-0" in text
    assert "certificate approve" not in text
    (found,) = read_json(run, "list", "--json")["items"]
    # Its machine can create any number of them.
    assert (found["name"], len(found["refusals"])) == (record.name, 3)


def test_list_without_tokens_names_the_secret(run: Run) -> None:
    code, output, errors = run("list", "--namespace=other")
    assert (code, output) == (0, "")
    assert "no access token in Secret other/treenail-ignition-tokens" in errors


def test_token_in_a_missing_namespace_names_it(run: Run) -> None:
    code, _, errors = run("create", "--pool=worker", "--namespace=other")
    assert code == 1
    assert "namespace other does not exist" in errors
    assert "--namespace" in errors


def test_user_without_access_gets_a_remedy(
    cluster: TokenCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    accounts = f"/api/v1/namespaces/{component_names.IGNITION_SERVER}/serviceaccounts"
    cluster.admin.post(accounts, {"metadata": {"name": "guest"}}).ok()
    kubeconfig = cluster.server.write_account_kubeconfig(component_names.IGNITION_SERVER, "guest")
    assert main(["token", "list", f"--kubeconfig={kubeconfig}"]) == 1
    errors = capsys.readouterr().err
    assert 'cannot get resource "secrets"' in errors
    assert "kubectl auth can-i --list" in errors


def test_damaged_secret_is_one_error_with_a_remedy(run: Run, cluster: TokenCluster) -> None:
    run("create", "--pool=worker")
    cluster.admin.patch(SECRET, {"data": {"tokens": "e2Jyb2tlbg=="}}).ok()
    for arguments in (("list",), ("create", "--pool=worker"), ("revoke", "a")):
        code, output, errors = run(*arguments)
        assert (code, output) == (1, "")
        assert errors.count("cannot read the access tokens") == 1
        assert "restore the Secret from a backup" in errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("create", "--pool=infra"), "MachineConfigPool infra does not exist"),
        (("create", "--pool=worker", "-o", "user-data"), "the URL of the config server is missing"),
        (("create", "--pool="), "expected a name of at most 247"),
        (("create", "--pool=.."), "expected a name of at most 247"),
        (("create", "--pool=a b"), "expected a name of at most 247"),
        (("create", f"--pool={'a' * 248}"), "expected a name of at most 247"),
        (("create", "--pool=worker", f"--machine={'a' * 240}"), "expected a name of at most 239"),
        (("create", "--pool=worker", "--server=http://x"), "expected https://HOST:PORT"),
        (("create", "--pool=worker", "--server=https://x:65536"), "expected https://HOST:PORT"),
        (("create", "--pool=worker", "--uses=1001"), "expected at most 1000"),
        (("create", "--pool=worker", "--uses=2", "--machine=a"), "cannot use --machine"),
        (("create", "--pool=worker", "--machine=A_b"), "found 'A_b'"),
        (("create", "--pool=worker", "--ttl=0s"), "expected a --ttl from"),
        (("create", "--pool=worker", "--ttl=1 day"), "expected a time such as"),
        (("create", "--pool=worker", SERVER, "--ca=missing"), "cannot read missing"),
        (("revoke",), "expected the names of tokens"),
    ],
)
def test_wrong_arguments_create_nothing(
    run: Run,
    cluster: TokenCluster,
    arguments: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    try:
        code, _, errors = run(*arguments)
    except SystemExit as ended:
        code, errors = ended.code, capsys.readouterr().err
    assert code == EXIT_USAGE
    assert message in errors
    assert cluster.make_store().load().tokens == {}


def test_user_data_have_the_version_that_each_newer_ignition_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ignition refuses a config of a version that it does not know, whatever its fields are."""
    (tmp_path / "token").write_text("tn_ab2cd3_" + "s" * 43)
    words = ["user-data", "--pool=worker", f"--token-file={tmp_path / 'token'}", SERVER]
    assert main(["token", *words]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["ignition"]["version"] == "3.1.0"
