"""``treenail-controller ignition``: the config of the server, without a server."""

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.installer.test_certificate_checks import make_certificate
from tests.provisioning.samples import (
    CLUSTER_IMAGE,
    NEW,
    make_config,
    make_controller_config,
    make_file,
    make_pool,
)
from tests.provisioning.serving import IGNITION, Serving, serve, write_json
from treenail.api.ignition.parser import parse_ignition
from treenail.cli.controller.main import main
from treenail.cli.output import EXIT_USAGE
from treenail.config import node_paths
from treenail.config.ignition.emit import VERSIONS_SERVED
from treenail.provisioning.tokens.tokens import make_token
from treenail_lab.apiserver.access.certificates import CertificateAuthority

Json = dict[str, Any]
Run = Callable[..., tuple[int, str, str]]

SERVER = "https://api-int.example.com:22623"
KUBECONFIG = {"kind": "Config", "clusters": [{"name": "a"}], "users": [{"name": "canary-secret"}]}


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    with serve(tmp_path) as found:
        write_sources(found.sources)
        yield found


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    directory = tmp_path / "sources"
    directory.mkdir()
    write_sources(directory)
    return directory


def write_sources(directory: Path, **ignition: Any) -> None:
    """Write a pool, its rendered config and a ControllerConfig."""
    secret = make_file("/etc/secret", "canary-secret", mode=0o600)
    config = make_config(NEW, make_file("/etc/a", "shown"), secret, **ignition)
    write_json(directory / "pool.json", make_pool())
    write_json(directory / "config.json", config)
    write_json(directory / "controllerconfig.json", make_controller_config())


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command; return exit code, output and errors."""

    def run_command(*words: object) -> tuple[int, str, str]:
        try:
            code = main(["ignition", *map(str, words)])
        except SystemExit as exit_code:
            code = int(exit_code.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run_command


@pytest.mark.parametrize("version", VERSIONS_SERVED)
def test_printed_config_is_the_one_that_the_server_serves(
    serving: Serving, run: Run, version: str
) -> None:
    served = serving.get("/config/worker", f"Accept: {IGNITION.format(version)}")
    words = ("--from", serving.sources, "--pool", "worker", "--spec", version)
    code, out, err = run(*words)
    assert (code, err) == (0, "")
    assert out == served.body.decode() + "\n"
    assert run(*words[:-1], version.removesuffix(".0")) == (0, out, "")


def test_printed_config_has_the_newest_version_by_default(sources: Path, run: Run) -> None:
    out = run("--from", sources, "--pool", "worker")[1]
    assert json.loads(out)["ignition"] == {"version": VERSIONS_SERVED[-1]}


def test_kubeconfig_for_the_kubelet_is_added(sources: Path, tmp_path: Path, run: Run) -> None:
    write_json(tmp_path / "kubeconfig", KUBECONFIG)
    words = ("--from", sources, "--pool", "worker")
    code, out, _ = run(*words, "--bootstrap-kubeconfig", tmp_path / "kubeconfig")
    assert code == 0
    files = {file.path: file for file in parse_ignition(json.loads(out)).files}
    found = files[node_paths.KUBECONFIG]
    assert found.contents.decode_bytes() == (tmp_path / "kubeconfig").read_bytes()
    assert found.mode == 0o600
    assert node_paths.KUBECONFIG not in run(*words)[1]


def test_config_for_review_has_no_secrets(sources: Path, tmp_path: Path, run: Run) -> None:
    user = {"name": "core", "passwordHash": "canary-secret", "sshAuthorizedKeys": ["key"]}
    write_sources(sources, passwd={"users": [user]})
    write_json(tmp_path / "kubeconfig", KUBECONFIG)
    words = ("--from", sources, "--pool", "worker", "--without-secrets")
    code, out, _ = run(*words, "--bootstrap-kubeconfig", tmp_path / "kubeconfig")
    assert code == 0
    texts = {
        file.path: file.contents.decode_bytes() for file in parse_ignition(json.loads(out)).files
    }
    size = (tmp_path / "kubeconfig").stat().st_size
    assert texts["/etc/a"] == b"shown"
    assert texts["/etc/secret"] == b"withheld, 13 bytes"
    assert texts[node_paths.KUBECONFIG] == f"withheld, {size} bytes".encode()
    assert texts[node_paths.SERVED_CONFIG].startswith(b"withheld, ")
    assert b"MachineConfig" in texts[node_paths.ENCAPSULATED_CONFIG]
    readable = out.encode() + b"".join(texts.values())
    assert b"canary" not in readable
    assert json.loads(out)["passwd"]["users"][0]["sshAuthorizedKeys"] == ["key"]
    assert out.count("\n") > 20


def test_image_that_needs_the_cluster_is_a_warning(sources: Path, run: Run) -> None:
    write_json(sources / "pool.json", make_pool(osImage=CLUSTER_IMAGE))
    words = ("--from", sources, "--pool", "worker", "--registry-needs-cluster")
    code, _, err = run(*words, "registry.internal:5000")
    assert code == 0
    assert err == (
        "treenail-controller: warning: the config names no image of pool worker: machines reach "
        "its registry only after they join\n"
    )
    assert run(*words, "other.example")[2] == ""


def test_pointer_is_printed_without_sources(tmp_path: Path, run: Run) -> None:
    (tmp_path / "ca").mkdir()
    authority = CertificateAuthority(tmp_path / "ca")
    words = ("--pool", "worker", "--pointer", "--server", SERVER, "--spec", "3.2")
    code, out, err = run(*words, "--ca", authority.file)
    assert (code, err) == (0, "")
    found = json.loads(out)["ignition"]
    assert found["version"] == "3.2.0"
    assert found["config"] == {"merge": [{"source": f"{SERVER}/config/worker"}]}
    assert len(found["security"]["tls"]["certificateAuthorities"]) == 1
    assert "security" not in json.loads(run(*words)[1])["ignition"]


@pytest.mark.parametrize("command", ["ignition --pointer", "token user-data --token-file TOKEN"])
def test_pointer_needs_one_authority_that_has_not_expired(
    command: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    token = tmp_path / "token"
    token.write_text(make_token("worker", expires=0.0)[0])
    old, _ = make_certificate(datetime(2020, 1, 1, tzinfo=UTC), datetime(2021, 1, 1, tzinfo=UTC))
    (tmp_path / "ca").mkdir()
    new = CertificateAuthority(tmp_path / "ca").pem
    bundle = tmp_path / "bundle.pem"
    words = [
        *command.replace("TOKEN", str(token)).split(),
        "--pool=worker",
        f"--server={SERVER}",
        f"--ca={bundle}",
    ]
    codes = []
    for content in (old, old + new, new):
        bundle.write_bytes(content)
        codes.append(main(words))
    assert codes == [EXIT_USAGE, 0, 0]
    message = f"cannot use the CA {bundle}: it expired at 2021-01-01T"
    assert message in capsys.readouterr().err


def test_pointer_to_a_missing_pool_is_refused(sources: Path, run: Run) -> None:
    words = ("--pointer", "--server", SERVER, "--from", sources, "--pool")
    assert run(*words, "worker")[0] == 0
    code, out, err = run(*words, "infra")
    assert (code, out) == (1, "")
    assert err == "treenail-controller: no MachineConfigPool has the name infra\n"


def test_field_that_the_version_lacks_is_refused(sources: Path, run: Run) -> None:
    config = make_config(NEW)
    config["spec"]["config"]["storage"] = {"luks": [{"name": "root", "device": "/dev/sda"}]}
    write_json(sources / "config.json", config)
    code, out, err = run("--from", sources, "--pool", "worker", "--spec", "3.1")
    assert (code, out) == (1, "")
    assert "Ignition 3.1.0: storage.luks[0] needs Ignition 3.2.0 or later" in err
    assert run("--from", sources, "--pool", "worker", "--spec", "3.2")[0] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "no directory is given"),
        (("--pointer",), "the URL of the config server is missing"),
        (("--pointer", "--server", "x"), "expected https://HOST:PORT"),
        (("--pointer", "--server", SERVER, "--ca", "/none"), "cannot read /none"),
        (("--pointer", "--server", SERVER, "--bootstrap-kubeconfig", "x"), "has no files"),
        (("--server", SERVER), "without --pointer"),
        (("--ca", "x"), "without --pointer"),
        (("--from", "/none"), "cannot read /none"),
        (("--spec", "3.6"), "expected one of 2.2, 3.0, 3.1, 3.2, 3.3, 3.4, 3.5, found '3.6'"),
        (("--registry-needs-cluster", "https://a"), "expected HOST or HOST:PORT"),
    ],
)
def test_wrong_arguments_are_refused(words: tuple[str, ...], message: str, run: Run) -> None:
    code, out, err = run("--pool", "worker", *words)
    assert code in {1, 64}
    assert out == ""
    assert message in err


@pytest.mark.parametrize("document", [{}, {"kind": "Config"}, {"kind": "Pod", "clusters": [1]}])
def test_file_that_is_no_kubeconfig_is_refused(
    document: Json, sources: Path, tmp_path: Path, run: Run
) -> None:
    write_json(tmp_path / "kubeconfig", document | {"x": "canary-secret"})
    words = ("--from", sources, "--pool", "worker")
    code, out, err = run(*words, "--bootstrap-kubeconfig", tmp_path / "kubeconfig")
    assert (code, out) == (1, "")
    assert "expected a kubeconfig" in err
    assert "canary" not in err


@pytest.mark.process
@pytest.mark.skipif(
    shutil.which("ignition-validate") is None,
    reason="no ignition-validate: install Debian's ignition",
)
@pytest.mark.parametrize("version", ["3.0", "3.1", "3.2", "3.3"])
def test_ignition_reads_config_and_pointer_without_a_warning(
    sources: Path, tmp_path: Path, run: Run, version: str
) -> None:
    pointer = ("--pointer", "--server", SERVER)
    for words in (("--from", sources), ("--from", sources, "--without-secrets"), pointer):
        place = tmp_path / "config.ign"
        place.write_text(run(*words, "--pool", "worker", "--spec", version)[1])
        done = subprocess.run(
            ["ignition-validate", str(place)],
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        assert (done.returncode, done.stdout + done.stderr) == (0, "")
