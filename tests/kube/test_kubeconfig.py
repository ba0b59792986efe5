"""Kubeconfigs are read, or rejected in one sentence."""

import base64
import json
from pathlib import Path

import pytest
import yaml

from treenail.errors import UsageError
from treenail.kube.transport.kubeconfig import (
    ApiServerConfig,
    find_current_context,
    read_kubeconfig,
    read_kubeconfigs,
    read_service_account,
)

PEM = b"-----BEGIN CERTIFICATE-----\nc2VjcmV0\n-----END CERTIFICATE-----\n"
KUBELET_PEM = "/var/lib/kubelet/pki/kubelet-client-current.pem"


def encoded(content: bytes) -> str:
    return base64.b64encode(content).decode()


def kubeconfig(
    cluster: dict[str, object] | None = None, user: dict[str, object] | None = None
) -> dict[str, object]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {
                "name": "local",
                "cluster": {
                    "server": "https://api-int.example.com:6443",
                    "certificate-authority-data": encoded(PEM),
                    **(cluster or {}),
                },
            }
        ],
        "users": [
            {
                "name": "kubelet",
                "user": {"client-certificate": KUBELET_PEM, "client-key": KUBELET_PEM}
                if user is None
                else user,
            }
        ],
        "contexts": [
            {"name": "kubelet", "context": {"cluster": "local", "user": "kubelet"}},
            {
                "name": "other",
                "context": {"cluster": "local", "user": "kubelet", "namespace": "openshift-mco"},
            },
        ],
        "current-context": "kubelet",
    }


def written(path: Path, document: object) -> str:
    path.write_text(yaml.safe_dump(document) if not isinstance(document, str) else document)
    return str(path)


def fault(path: Path, document: object) -> str:
    with pytest.raises(UsageError) as caught:
        read_kubeconfig(written(path, document))
    return str(caught.value).replace(str(path), "FILE")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "kubeconfig"


def test_kubeconfig_of_a_kubelet_is_read(file: Path) -> None:
    found = read_kubeconfig(written(file, kubeconfig()))

    assert found == ApiServerConfig(
        server="https://api-int.example.com:6443",
        ca=PEM,
        certificate=KUBELET_PEM,
        key=KUBELET_PEM,
        source=f"kubeconfig {file}",
    )


def test_kubeconfig_in_json_and_yaml_are_equal(file: Path) -> None:
    from_yaml = read_kubeconfig(written(file, kubeconfig()))
    from_json = read_kubeconfig(written(file, json.dumps(kubeconfig())))

    assert from_json == from_yaml


def test_yaml_kubeconfig_with_a_brace_is_read(file: Path) -> None:
    flow = yaml.safe_dump(kubeconfig(), default_flow_style=True)

    assert flow.startswith("{")
    assert read_kubeconfig(written(file, flow)).certificate == KUBELET_PEM


@pytest.mark.parametrize("name", ["2020-01-01", "12:30:45"])
def test_unquoted_name_is_the_text_that_kubectl_reads(file: Path, name: str) -> None:
    text = yaml.safe_dump(kubeconfig()).replace(": kubelet", f": {name}")
    found = read_kubeconfig(written(file, text))
    assert found.certificate == KUBELET_PEM


def test_named_context_sets_its_namespace(file: Path) -> None:
    found = read_kubeconfig(written(file, kubeconfig()), context="other")

    assert found.namespace == "openshift-mco"


def test_relative_paths_are_resolved_against_the_kubeconfig(file: Path) -> None:
    user = {"client-certificate": "pki/a.pem", "client-key": "pki/a.key"}

    found = read_kubeconfig(written(file, kubeconfig(user=user)))

    assert (found.certificate, found.key) == (
        f"{file.parent}/pki/a.pem",
        f"{file.parent}/pki/a.key",
    )


def test_kubeconfig_is_found_below_an_installed_root(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    written(tmp_path / "etc/kubeconfig", kubeconfig())

    found = read_kubeconfig("/etc/kubeconfig", locate=lambda path: tmp_path / path.lstrip("/"))

    assert (found.source, found.certificate) == ("kubeconfig /etc/kubeconfig", KUBELET_PEM)
    assert found.locate("/a") == tmp_path / "a"


def test_secrets_are_not_in_the_repr(file: Path) -> None:
    user = {
        "token": "t0ps3cret",
        "client-certificate-data": encoded(PEM),
        "client-key-data": encoded(PEM),
    }

    shown = repr(read_kubeconfig(written(file, kubeconfig(user=user))))

    assert "t0ps3cret" not in shown
    assert "c2VjcmV0" not in shown


@pytest.mark.parametrize(
    ("user", "sentence"),
    [
        ({"exec": {"command": "aws"}}, "exec is not supported"),
        ({"auth-provider": {"name": "oidc"}}, "auth-provider is not supported"),
        ({"username": "joe", "password": "t0ps3cret"}, "username is not supported"),
        ({"token": "a", "as": "system:admin"}, "as is not supported"),
        ({"token": "two\nlines"}, "token is not one line of printable ASCII"),
        ({"token": 12}, "token is not text but int"),
        (
            {"client-certificate": "/a"},
            "client-key is missing although client-certificate is there",
        ),
        ({"client-key": "/a"}, "client-certificate is missing although client-key is there"),
        ({"client-key-data": "t0ps3cret!"}, "client-key-data is not base64"),
        ({"client-key-data": "dDBwczNjcmV0"}, "client-key-data contains no PEM block"),
    ],
)
def test_unusable_user_is_rejected_in_one_sentence(
    file: Path, user: dict[str, object], sentence: str
) -> None:
    assert fault(file, kubeconfig(user=user)) == f"kubeconfig FILE: users[kubelet]: {sentence}"


@pytest.mark.parametrize(
    ("cluster", "sentence"),
    [
        ({"server": ""}, "server is missing"),
        ({"server": "http://a:1"}, "server is not an https:// address"),
        ({"server": "https://a:b"}, "server is not an https:// address"),
        ({"server": "https://joe:pw@a"}, "server is not an https:// address"),
        ({"server": "https://a..b:6443"}, "server is not an https:// address"),
        ({"server": f"https://{'a' * 64}.b:6443"}, "server is not an https:// address"),
        ({"server": "https://b\u00fccher:6443"}, "server is not an https:// address"),
        ({"server": "https://a:6443/pre fix"}, "server is not an https:// address"),
        ({"tls-server-name": "a..b"}, "tls-server-name is not a host name"),
        ({"tls-server-name": ".b"}, "tls-server-name is not a host name"),
        ({"tls-server-name": "a\0"}, "tls-server-name is not a host name"),
        ({"certificate-authority-data": "%"}, "certificate-authority-data is not base64"),
        ({"proxy-url": "http://proxy"}, "proxy-url is not supported"),
        ({"insecure-skip-tls-verify": "yes"}, "insecure-skip-tls-verify is neither true nor false"),
        (
            {"insecure-skip-tls-verify": True},
            "insecure-skip-tls-verify contradicts certificate-authority",
        ),
    ],
)
def test_unusable_cluster_is_rejected_in_one_sentence(
    file: Path, cluster: dict[str, object], sentence: str
) -> None:
    assert fault(file, kubeconfig(cluster)) == f"kubeconfig FILE: clusters[local]: {sentence}"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"current-context": ""}, ": current-context is not set, contexts: kubelet, other"),
        ({"current-context": "x"}, ": contexts has no 'x', only: kubelet, other"),
        ({"clusters": []}, ": clusters has no 'local', only: nothing"),
        ({"users": "kubelet"}, ": users is not a list"),
    ],
)
def test_incomplete_kubeconfig_is_rejected_in_one_sentence(
    file: Path, change: dict[str, object], sentence: str
) -> None:
    assert fault(file, kubeconfig() | change) == f"kubeconfig FILE{sentence}"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("- a", " is not a mapping of keys to values"),
        ("token: t0ps3cret\n  bad: [", " is neither JSON nor YAML at line 2"),
        ("", ": current-context is not set, contexts: nothing"),
        ('{"token": "t0ps3cret", ]', " is neither JSON nor YAML at line 1"),
        ("token: \x01", " is neither JSON nor YAML"),
    ],
)
def test_invalid_kubeconfig_text_is_rejected_in_one_sentence(
    file: Path, text: str, sentence: str
) -> None:
    assert fault(file, text) == f"kubeconfig FILE{sentence}"


def test_invalid_kubeconfig_text_is_not_quoted_in_errors(file: Path) -> None:
    with pytest.raises(UsageError) as caught:
        read_kubeconfig(written(file, "token: t0ps3cret\n  bad: ["))

    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


@pytest.mark.parametrize("level", ['{"a":', "["])
def test_deeply_nested_kubeconfig_is_rejected_in_one_sentence(file: Path, level: str) -> None:
    file.write_text(level * 200_000)
    with pytest.raises(UsageError, match="nested too deeply"):
        read_kubeconfig(str(file))


def test_missing_kubeconfig_is_rejected_in_one_sentence(file: Path) -> None:
    with pytest.raises(UsageError) as caught:
        read_kubeconfig(str(file))

    assert str(caught.value) == f"cannot read kubeconfig {file}: No such file or directory"


def test_service_account_of_a_pod_is_read(tmp_path: Path) -> None:
    (tmp_path / "namespace").write_text("treenail\n")
    environment = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}

    found = read_service_account(environment, folder=str(tmp_path))

    assert found == ApiServerConfig(
        server="https://[fd00::1]:443",
        ca=f"{tmp_path}/ca.crt",
        token_file=f"{tmp_path}/token",
        namespace="treenail",
        source="service account",
    )


def test_service_account_outside_a_pod_is_rejected_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a pod"):
        read_service_account({}, folder=str(tmp_path))


@pytest.mark.parametrize(
    ("name", "cause", "remedy"),
    [
        ("missing", "No such file or directory", "or name another kubeconfig"),
        (".", "Is a directory", "name a readable kubeconfig"),
        ("a\0b", "embedded null byte", "name a readable kubeconfig"),
    ],
)
def test_unreadable_kubeconfig_is_rejected_with_a_remedy(
    tmp_path: Path, name: str, cause: str, remedy: str
) -> None:
    with pytest.raises(UsageError, match=cause) as raised:
        read_kubeconfig(f"{tmp_path}/{name}")
    assert remedy in (raised.value.remedy or "")


def test_list_takes_each_entry_whole_from_the_first_file_that_has_it(tmp_path: Path) -> None:
    paths = []
    for name, server in (("a", "https://first:1"), ("b", "https://second:2")):
        folder = tmp_path / name
        folder.mkdir()
        user: dict[str, object] = {"client-certificate": "cert.pem", "client-key": "key.pem"}
        if name == "a":
            user = {"token": "from-a"}
        document = kubeconfig({"server": server}, user)
        if name == "a":
            document["contexts"] = []
        paths.append(written(folder / "config", document))
    paths.insert(0, written(tmp_path / "empty", ""))
    found = read_kubeconfigs(paths)
    # The context is in the second file only, and refers to entries of the first.
    assert (found.server, found.token, found.certificate) == ("https://first:1", "from-a", "")
    assert find_current_context(paths) == "kubelet"
    assert read_kubeconfigs(paths[::-1]).certificate == f"{tmp_path}/b/cert.pem"


def test_context_missing_from_a_list_is_rejected_with_the_known_ones(tmp_path: Path) -> None:
    other = written(tmp_path / "other", {"contexts": [{"name": "lab", "context": {}}]})
    paths = [written(tmp_path / "config", kubeconfig()), other]
    with pytest.raises(UsageError) as raised:
        read_kubeconfigs(paths, context="prod")
    assert str(raised.value) == (
        f"kubeconfig {paths[0]}:{other}: contexts has no 'prod', only: kubelet, lab, other"
    )


def test_invalid_file_of_a_list_is_named(tmp_path: Path) -> None:
    paths = [written(tmp_path / "config", kubeconfig()), written(tmp_path / "broken", "{")]
    with pytest.raises(UsageError, match=f"{tmp_path}/broken is neither JSON nor YAML"):
        read_kubeconfigs(paths)
