"""``treenail-controller render``: files in, rendered MachineConfigs or one sentence out."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import treenail
from tests.oracle import ROOT, needs_oracle
from treenail.api import documents
from treenail.cli.controller.main import main

API = "machineconfiguration.openshift.io/v1"
ROLE = "machineconfiguration.openshift.io/role"


def pool(name: str, *roles: str) -> dict[str, Any]:
    values = [*roles, name]
    selector = {"matchExpressions": [{"key": ROLE, "operator": "In", "values": values}]}
    return {
        "apiVersion": API,
        "kind": "MachineConfigPool",
        "metadata": {"name": name},
        "spec": {"machineConfigSelector": selector},
    }


def machine_config(name: str, role: str, **spec: Any) -> dict[str, Any]:
    meta = {"name": name, "labels": {ROLE: role}}
    return {"apiVersion": API, "kind": "MachineConfig", "metadata": meta, "spec": spec}


CLUSTER = {
    "apiVersion": API,
    "kind": "ControllerConfig",
    "metadata": {"name": "machine-config-controller"},
    "spec": {"baseOSContainerImage": "base", "baseOSExtensionsContainerImage": "more"},
}
SECRET = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}, "data": {"a": "Yg=="}}
POOLS = [pool("worker"), pool("infra", "worker")]
CONFIGS = [machine_config("00", "worker", kernelArguments=["a"]), machine_config("50", "infra")]


def write(path: Path, *found: dict[str, Any]) -> str:
    path.write_text("---\n".join(documents.dump_document(each) for each in found))
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["render", *arguments])
    return (code, *capsys.readouterr())


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    write(tmp_path / "pools.yaml", *POOLS, SECRET)
    write(tmp_path / "configs.yml", *CONFIGS)
    (tmp_path / "cluster.json").write_text(json.dumps(CLUSTER))
    (tmp_path / "README.md").write_text("# Not a document: {")
    (tmp_path / "nested.yaml").mkdir()
    return tmp_path


def test_render_directory_prints_every_pool(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, "-f", str(repository))
    assert (code, err) == (0, "")
    infra, worker = documents.load_documents(out, where="output")
    assert infra["metadata"]["name"] == "rendered-infra-38e72c6154dac67840eadbc0772e00d1"
    assert worker["metadata"]["name"].startswith("rendered-worker-")
    assert infra["spec"] == worker["spec"]
    assert infra["spec"] == {
        "baseOSExtensionsContainerImage": "more",
        "config": {"ignition": {"version": "3.5.0"}},
        "extensions": [],
        "fips": False,
        "kernelArguments": ["a"],
        "kernelType": "default",
        "osImageURL": "base",
    }
    assert "ownerReferences" not in infra["metadata"]


MISSPELT = machine_config(
    "60",
    "worker",
    config={"ignition": {"version": "3.2.0"}, "kernelArguments": {}, "systemd": {"unit": []}},
    kernelArgument=["a"],
)
WARNINGS = """\
treenail-controller: warning: {0}, document 1, MachineConfig 60: spec.kernelArgument: ignored: unknown field; did you mean kernelArguments?
treenail-controller: warning: {0}, document 1, MachineConfig 60: spec.config.kernelArguments: ignored: this field needs Ignition 3.3.0 or later; set ignition.version to it
treenail-controller: warning: {0}, document 1, MachineConfig 60: spec.config.systemd.unit: ignored: unknown field; did you mean units?
"""  # noqa: E501  # as the command prints them


def test_render_misspelt_field_prints_warning(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(repository / "misspelt.yaml", MISSPELT)
    code, out, err = run(capsys, "-f", str(repository), "--pool", "worker")
    assert (code, err) == (0, WARNINGS.format(path))
    assert "rendered-worker-" in out


def test_render_strict_misspelt_field_returns_1(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, "-f", str(repository), "--strict")[0] == 0
    path = write(repository / "misspelt.yaml", MISSPELT)
    assert run(capsys, "-f", str(repository), "--strict") == (1, "", WARNINGS.format(path))


UNREAD = {"apiVersion": API, "kind": "InternalReleaseImage", "metadata": {"name": "cluster"}}
TYPO = {**machine_config("50", "worker"), "kind": "MachineConfg"}
OLD_VERSION = {**machine_config("50", "worker"), "apiVersion": "v1"}


@pytest.mark.parametrize(
    ("unread", "text"),
    [
        (
            UNREAD,
            "InternalReleaseImage cluster: ignored: treenail reads no InternalReleaseImage; rem",
        ),
        (TYPO, "MachineConfg 50: unknown kind 'MachineConfg'; did you mean MachineConfig?"),
        (OLD_VERSION, f"MachineConfig 50: expected apiVersion {API}, found v1; set apiVersion: "),
    ],
)
def test_object_that_is_not_read_is_a_warning_and_an_error_with_strict(
    repository: Path, capsys: pytest.CaptureFixture[str], unread: dict[str, Any], text: str
) -> None:
    path = write(repository / "unread.yaml", unread)
    code, out, err = run(capsys, "-f", str(repository), "--pool", "worker")
    assert (code, "rendered-worker-" in out) == (0, True)
    assert err.startswith(f"treenail-controller: warning: {path}, document 1, {text}")
    assert run(capsys, "-f", str(repository), "--strict") == (1, "", err)


@pytest.mark.parametrize(
    ("documents", "actual"),
    [
        ((), "found no object\n"),
        ((TYPO,), "found 1 MachineConfg\n"),
        ((OLD_VERSION,), "found 1 MachineConfig\n"),
        ((UNREAD, SECRET, SECRET), "found 2 Secret, 1 InternalReleaseImage\n"),
        (({"a": 1},), "found 1 object without a kind\n"),
    ],
)
def test_plan_of_files_without_an_object_that_is_read_returns_1(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    documents: tuple[dict[str, Any], ...],
    actual: str,
) -> None:
    path = write(tmp_path / "a.yaml", *documents)
    assert main(["plan", "-f", path]) == 1
    assert (
        "cannot plan: expected one of MachineConfig, MachineConfigPool, MachineOSConfig, Contr"
        in (err := capsys.readouterr().err)
    )
    assert actual in err


@pytest.mark.parametrize("command", ["plan", "render"])
def test_directory_without_documents_returns_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    write(tmp_path / "a.yaml", *POOLS, *CONFIGS)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/a.txt").touch()
    assert main([command, "-f", str(tmp_path / "a.yaml"), "-f", str(tmp_path / "empty")]) == 1
    assert f"cannot read {tmp_path}/empty: the directory has no file" in capsys.readouterr().err


def test_render_with_current_config_rejects_irreconcilable_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    disks = machine_config("70", "worker", config=with_disk("/dev/sda"))
    owner = {"kind": "MachineConfigPool", "name": "worker", "uid": "u", "controller": True}
    current = machine_config("rendered-worker-1", "none", config=with_disk("/dev/sdb"))
    current["metadata"]["ownerReferences"] = [{**owner, "apiVersion": API}]
    found = pool("worker")
    found["spec"]["configuration"] = {"name": "rendered-worker-1"}
    assert run(capsys, "-f", write(tmp_path / "a.yaml", found, disks))[0] == 0
    code, out, err = run(capsys, "-f", write(tmp_path / "a.yaml", found, disks, current))
    assert (code, out) == (1, "")
    assert "MachineConfig 70: ignition disks section contains changes" in err


def with_disk(device: str) -> dict[str, Any]:
    return {"ignition": {"version": "3.5.0"}, "storage": {"disks": [{"device": device}]}}


def test_render_json_prints_document_or_list(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = run(capsys, "-f", str(repository), "-o", "json")
    listed = json.loads(out)
    assert listed["kind"] == "List"
    assert [each["kind"] for each in listed["items"]] == ["MachineConfig", "MachineConfig"]
    code, out, _ = run(capsys, "-f", str(repository), "-o", "json", "--pool", "infra")
    assert (code, json.loads(out)) == (0, listed["items"][0])


@pytest.mark.process
def test_render_reads_lists_files_and_stdin(tmp_path: Path) -> None:
    listed = {"apiVersion": "v1", "kind": "List", "items": [*POOLS, CLUSTER]}
    configs = write(tmp_path / "c.yaml", *CONFIGS)
    command = "import sys; from treenail.cli.controller.main import main; sys.exit(main())"
    ran = subprocess.run(
        [sys.executable, "-c", command, "render", "-f", "-", "-f", configs, "--pool", "infra"],
        input=documents.dump_document(listed).encode(),
        capture_output=True,
        timeout=30,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(treenail.__file__).parent.parent)},
    )
    assert (ran.returncode, ran.stderr) == (0, b"")
    assert b"name: rendered-infra-38e72c6154dac67840eadbc0772e00d1\n" in ran.stdout


def test_render_error_hides_secret_of_other_document(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, err = run(capsys, "-f", str(repository))
    assert "Yg==" not in out + err


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (
            [pool("worker"), machine_config("00", "worker", kernelType="rt")],
            (
                "FILE, document 2, MachineConfig 00: spec.kernelType: expected one of default, "
                "realtime, 64k-pages, found 'rt'\n"
            ),
        ),
        (
            [pool("worker"), machine_config("00", "worker", fips="yes")],
            (
                "FILE, document 2, MachineConfig 00: spec.fips: expected true or false, "
                "found a string\n"
            ),
        ),
        (
            [{**pool("worker"), "spec": {"maxUnavailable": []}}],
            (
                "FILE, document 1, MachineConfigPool worker: spec.maxUnavailable: expected a "
                "count or a percentage, found a list\n"
            ),
        ),
        (
            [pool("worker"), machine_config("00", "other")],
            (
                "FILE, document 1: couldn't find any MachineConfigs for pool: worker\n"
                "  give a MachineConfig the labels that the pool's machineConfigSelector names\n"
            ),
        ),
        (
            [
                pool("worker"),
                machine_config("00", "worker", extensions=["kernel-devel"]),
                machine_config("01", "worker", kernelType="realtime"),
            ],
            (
                "FILE, document 2: MachineConfig 00: the extension kernel-devel needs the default "
                "kernel, but MachineConfig 01 sets kernelType realtime\n"
                "  remove one of the two from the pool\n"
            ),
        ),
        (
            [pool("worker"), pool("worker")],
            (
                "FILE, document 2: MachineConfigPool worker is a duplicate of the one in FILE, "
                "document 1\n"
            ),
        ),
        (
            [{"apiVersion": API, "kind": "MachineConfig", "metadata": {}}],
            "FILE, document 1: the MachineConfig has no metadata.name\n",
        ),
        ([SECRET], "cannot render: the input contains no MachineConfigPool\n"),
        (
            [pool("worker"), CLUSTER, {**CLUSTER, "metadata": {"name": "b"}}],
            "expected one ControllerConfig, found b, machine-config-controller\n",
        ),
        (
            [{"kind": "List", "items": [pool("worker"), 1]}],
            "FILE, document 1.items[1]: expected an object, found 1\n",
        ),
    ],
)  # fmt: skip
def test_render_invalid_input_prints_cause_and_returns_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], found: list[dict[str, Any]], sentence: str
) -> None:
    path = write(tmp_path / "a.yaml", *found)
    code, out, err = run(capsys, "-f", path)
    assert (code, out) == (1, "")
    assert err == f"treenail-controller: {sentence}".replace("FILE", path)


def test_render_one_invalid_pool_prints_no_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "a.yaml", pool("a"), pool("b"), pool("c"), machine_config("1", "b"))
    code, out, err = run(capsys, "-f", path)
    assert (code, out) == (1, "")
    causes = [line for line in err.splitlines() if not line.startswith("  ")]
    assert [line.split(": ")[-1].split(" ")[0] for line in causes] == ["a", "c"]


def test_render_invalid_yaml_names_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("kind: MachineConfig\n  metadata: {\n")
    code, _, err = run(capsys, "-f", str(path))
    assert code == 1
    assert err.startswith(f"treenail-controller: {path}, line 2, column ")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["-f", "/nowhere.yaml"], "cannot read /nowhere.yaml: No such file or directory"),
        (
            ["--pool", "gpu"],
            "cannot render MachineConfigPool gpu: the input contains only: infra, worker",
        ),
    ],
)
def test_render_invalid_argument_prints_one_line_and_returns_64(
    repository: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    sentence: str,
) -> None:
    code, out, err = run(capsys, "-f", str(repository), *arguments)
    assert (code, out, err) == (64, "", f"treenail-controller: {sentence}\n")


def test_render_missing_argument_returns_64(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["render"])
    assert raised.value.code == 64
    assert "-f" in capsys.readouterr().err


@needs_oracle
def test_render_reads_bootstrap_manifests(
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = str(ROOT / "bootstrap" / "input")
    code, out, _ = run(capsys, "-f", folder, "--pool", "worker")
    assert code == 0
    (found,) = documents.load_documents(out, where="output")
    # Without the MachineConfigs that templates make, this is the part that the inputs hold.
    config = found["spec"]["config"]
    assert config["passwd"] == {
        "users": [{"name": "core", "sshAuthorizedKeys": ["ssh-rsa SSH-AUTHORIZED-KEY"]}]
    }
    paths = [file["path"] for file in config["storage"]["files"]]
    assert paths[:2] == ["/etc/containers/registries.conf", "/etc/containers/policy.json"]
    code, out, err = run(capsys, "-f", folder)
    assert (code, out) == (1, "")
    assert "couldn't find any MachineConfigs for pool: layered-worker" in err


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("", "cannot read a file without a name"),
        ("a\0b", "embedded null byte"),
        ("/dev/zero", "it has more than 128 MiB"),
    ],
)
def test_unreadable_name_is_rejected_in_one_sentence(
    name: str, cause: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, printed, error = run(capsys, "-f", name)
    assert (code, printed) == (64, "")
    assert cause in error
