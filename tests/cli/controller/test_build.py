"""``treenail-controller build``: files in, the builds of their MachineOSConfigs out."""

import base64
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.builder.base_image import ARCHITECTURE, needs_busybox
from tests.builder.builds import open_client, push_base
from tests.builder.sandboxing import needs_buildah
from tests.registry.images import push_image
from treenail.builder.build_layout import ImageLayout
from treenail.cli.controller.main import main
from treenail.registry.names import parse_descriptor
from treenail.registry.uploads import upload_bytes
from treenail_lab.registry.service import PULLER, PUSHER, RegistryService

DIGEST = "sha256:" + 64 * "a"
API = "machineconfiguration.openshift.io/v1"
TEXT = "FROM configs AS final\nCOPY motd /etc/motd\nRUN cat /etc/motd\n"


def write_manifests(directory: Path, registry: str, base: str, text: str = TEXT) -> Path:
    """Write a pool, its configs and a MachineOSConfig; return the directory."""
    worker = {"machineconfiguration.openshift.io/role": "worker"}
    documents = [
        {
            "apiVersion": API,
            "kind": "MachineConfigPool",
            "metadata": {"name": "worker"},
            "spec": {"machineConfigSelector": {"matchLabels": worker}},
        },
        {
            "apiVersion": API,
            "kind": "MachineConfig",
            "metadata": {"name": "50-worker", "labels": worker},
            "spec": {
                "osImageURL": base,
                "config": {
                    "ignition": {"version": "3.4.0"},
                    "storage": {
                        "files": [
                            {"path": "/etc/configured", "contents": {"source": "data:,yes"}},
                            {"path": "/var/state", "contents": {"source": "data:,no"}},
                        ]
                    },
                },
            },
        },
        {
            "apiVersion": API,
            "kind": "MachineOSConfig",
            "metadata": {
                "name": "worker",
                "annotations": {"treenail.io/context": "files"} if "COPY" in text else {},
            },
            "spec": {
                "machineConfigPool": {"name": "worker"},
                "imageBuilder": {"imageBuilderType": "Job"},
                "renderedImagePushSecret": {"name": "push"},
                "renderedImagePushSpec": f"{registry}/os/node:latest",
                "containerFile": [{"content": text}] if text else [],
            },
        },
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "files"},
            "data": {"motd": "welcome\n"},
        },
    ]
    directory.mkdir(exist_ok=True)
    (directory / "all.json").write_text(
        json.dumps({"apiVersion": "v1", "kind": "List", "items": documents})
    )
    return directory


def test_build_of_files_shows_key_and_containerfile_and_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = f"registry.example.com/os/base@{DIGEST}"
    manifests = write_manifests(tmp_path / "manifests", "registry.example.com", base)
    before = sorted(tmp_path.rglob("*"))
    assert main(["build", "-f", str(manifests)]) == 0
    shown = capsys.readouterr().out
    assert "content key:" in shown
    assert f"FROM {base} AS configs" in shown
    assert "COPY motd /etc/motd" in shown
    assert "registry.example.com/os/node:system-" in shown
    assert "/var/state" in shown
    assert sorted(tmp_path.rglob("*")) == before


def test_build_of_files_with_a_cache_or_another_driver_has_another_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = f"registry.example.com/os/base@{DIGEST}"
    manifests = write_manifests(tmp_path / "manifests", "registry.example.com", base)
    keys = set()
    for options in ([], ["--build-cache=registry.example.com/cache"], ["--storage-driver=vfs"]):
        assert main(["build", "-f", str(manifests), "-o", "json", *options]) == 0
        (item,) = json.loads(capsys.readouterr().out)["builds"]
        keys.add(item["contentKey"])
    assert len(keys) == 3


def test_build_of_files_with_another_context_has_another_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = f"registry.example.com/os/base@{DIGEST}"
    manifests = write_manifests(tmp_path / "manifests", "registry.example.com", base)
    keys = []
    for content in ("welcome", "goodbye"):
        path = manifests / "all.json"
        path.write_text(path.read_text().replace("welcome", content))
        assert main(["build", "-f", str(manifests), "-o", "json"]) == 0
        (item,) = json.loads(capsys.readouterr().out)["builds"]
        assert item["needsJob"]
        assert item["machineOSBuild"].startswith("worker-")
        keys.append(item["contentKey"])
    assert keys[0] != keys[1]


def test_build_for_several_architectures_shows_each_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = f"registry.example.com/os/base@{DIGEST}"
    manifests = write_manifests(tmp_path / "manifests", "registry.example.com", base)
    documents = json.loads((manifests / "all.json").read_text())
    for each in documents["items"]:
        if each["kind"] == "MachineOSConfig":
            each["spec"]["containerFile"] = [
                {"containerfileArch": name, "content": f"FROM configs AS final\nRUN echo {name}\n"}
                for name in ("AMD64", "ARM64")
            ]
    (manifests / "all.json").write_text(json.dumps(documents))
    arguments = ["build", "-f", str(manifests), "--architecture=arm64", "--architecture=amd64"]
    assert main([*arguments, "-o", "json"]) == 0, capsys.readouterr().err
    (item,) = json.loads(capsys.readouterr().out)["builds"]
    amd64, arm64 = item["systems"]
    assert (amd64["architecture"], arm64["architecture"]) == ("amd64", "arm64")
    assert len({amd64["contentKey"], arm64["contentKey"], item["contentKey"]}) == 3
    assert "RUN echo ARM64" in arm64["containerfile"]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "a list of manifests" in shown
    assert shown.index("RUN echo AMD64") < shown.index("RUN echo ARM64")
    assert arm64["image"] in shown
    assert main([*arguments, "--local"]) == 64
    assert "cannot build for amd64, arm64 on this host" in capsys.readouterr().err


def test_build_of_two_machineosconfigs_for_a_pool_names_the_one_that_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = f"registry.example.com/os/base@{DIGEST}"
    manifests = write_manifests(tmp_path / "manifests", "registry.example.com", base)
    documents = json.loads((manifests / "all.json").read_text())
    (one,) = [each for each in documents["items"] if each["kind"] == "MachineOSConfig"]
    documents["items"].append({**one, "metadata": {"name": "other"}})
    (manifests / "all.json").write_text(json.dumps(documents))
    assert main(["build", "-f", str(manifests)]) == 1
    shown = capsys.readouterr().err
    assert "MachineOSConfig other: spec.machineConfigPool.name: " in shown
    assert "MachineOSConfig worker" in shown


def test_build_without_the_files_for_copy_says_how_to_add_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = f"registry.example.com/os/base@{DIGEST}"
    manifests = write_manifests(tmp_path / "manifests", "registry.example.com", base)
    documents = json.loads((manifests / "all.json").read_text())
    documents["items"] = [each for each in documents["items"] if each["kind"] != "ConfigMap"]
    (manifests / "all.json").write_text(json.dumps(documents))
    assert main(["build", "-f", str(manifests)]) == 1
    shown = capsys.readouterr().err
    assert "found ConfigMap files, which does not exist; add the ConfigMap to the files" in shown


def test_build_without_containerfile_needs_no_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = f"registry.example.com/os/base@{DIGEST}"
    manifests = write_manifests(tmp_path / "manifests", "registry.example.com", base, text="")
    assert main(["build", "-f", str(manifests)]) == 0
    assert "the build needs no Job" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--push"], 64, "--push without --local"),
        (["--output", "oci:image"], 64, "--output without --local"),
        (["--local", "--output", "image"], 64, "expected oci:DIR"),
        (["--pool", "infra"], 64, "no MachineOSConfig for pool infra"),
        (["--local", "--timeout", "0"], 64, "expected seconds above 0"),
    ],
)
def test_build_with_wrong_arguments_names_the_remedy(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    base = f"registry.example.com/os/base@{DIGEST}"
    manifests = write_manifests(tmp_path / "manifests", "registry.example.com", base)
    assert main(["build", "-f", str(manifests), *arguments]) == code
    assert message in capsys.readouterr().err


def test_build_without_the_pool_says_how_to_add_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = f"registry.example.com/os/base@{DIGEST}"
    manifests = write_manifests(tmp_path / "manifests", "registry.example.com", base) / "all.json"
    documents = json.loads(manifests.read_text())
    documents["items"] = [
        each for each in documents["items"] if each["kind"] != "MachineConfigPool"
    ]
    manifests.write_text(json.dumps(documents))
    assert main(["build", "-f", str(manifests)]) == 64
    shown = capsys.readouterr().err
    assert "the input has no MachineConfigPool worker, found: none" in shown
    assert "kubectl get machineconfigpool worker -o yaml" in shown


def test_build_of_a_wrong_containerfile_names_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = f"registry.example.com/os/base@{DIGEST}"
    text = "FROM configs AS final\nADMIRE me\n"
    manifests = write_manifests(tmp_path / "manifests", "registry.example.com", base, text=text)
    assert main(["build", "-f", str(manifests)]) == 1
    assert "line 2" in capsys.readouterr().err


@pytest.fixture(scope="module")
def registry() -> Iterator[RegistryService]:
    with RegistryService() as service:
        yield service


def write_tagged(directory: Path, registry: RegistryService, tag: str) -> Path:
    """Write manifests with a base by tag; return their directory."""
    base = f"{registry.host}/os/base@{DIGEST}"
    manifests = write_manifests(directory, registry.host, base) / "all.json"
    documents = json.loads(manifests.read_text())
    for each in documents["items"]:
        if each["kind"] == "MachineOSConfig":
            each["metadata"]["annotations"]["treenail.io/base-image"] = tag
    manifests.write_text(json.dumps(documents))
    return directory


def add_login(directory: Path, content: bytes, **encoding: bool) -> None:
    """Add the cluster's pull secret to manifests."""
    secret: dict[str, object] = {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "kubernetes.io/dockerconfigjson",
        "metadata": {"name": "global-pull-secret-copy"},
    }
    if encoding.get("is_plain"):
        secret["stringData"] = {".dockerconfigjson": content.decode()}
    else:
        secret["data"] = {".dockerconfigjson": base64.b64encode(content).decode()}
    (directory / "login.json").write_text(json.dumps(secret))


@pytest.mark.process
@pytest.mark.parametrize("login", ["--pull-secret", "--authfile", "data", "stringData"])
def test_build_of_files_resolves_the_tag_of_the_base(
    registry: RegistryService, tmp_path: Path, capsys: pytest.CaptureFixture[str], login: str
) -> None:
    with open_client(registry) as client:
        pushed = push_image(client, "os/base", "stable", architecture=ARCHITECTURE)
    tag = f"{registry.host}/os/base:stable"
    manifests = write_tagged(tmp_path / "manifests", registry, tag)
    arguments = ["build", "-f", str(manifests), "--ca", str(registry.ca_file)]
    content = registry.make_auth_json(PULLER)
    if login.startswith("--"):
        (tmp_path / "pull.json").write_bytes(content)
        arguments += [login, str(tmp_path / "pull.json")]
    else:
        add_login(manifests, content, is_plain=login == "stringData")
    assert main([*arguments, "-o", "json"]) == 0, capsys.readouterr().err
    (item,) = json.loads(capsys.readouterr().out)["builds"]
    assert item["baseImage"] == f"{registry.host}/os/base@{pushed.digest}"
    assert item["baseTag"] == tag
    assert main(arguments) == 0
    assert f"base tag:     {tag}, resolved now" in capsys.readouterr().out


@pytest.mark.process
def test_build_of_files_with_an_unresolved_tag_names_the_remedy(
    registry: RegistryService, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tag = f"{registry.host}/os/base:absent"
    manifests = write_tagged(tmp_path / "manifests", registry, tag)
    assert main(["build", "-f", str(manifests), "--ca", str(registry.ca_file)]) == 1
    shown = capsys.readouterr().err
    assert f"cannot resolve the base image {tag}: " in shown
    assert "--pull-secret FILE" in shown


def test_build_of_files_uses_the_digest_that_a_cluster_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tag, image = "registry.example.com/os/base:stable", f"registry.example.com/os/base@{DIGEST}"
    manifests = write_manifests(tmp_path / "manifests", "registry.example.com", image)
    documents = json.loads((manifests / "all.json").read_text())
    for each in documents["items"]:
        if each["kind"] == "MachineOSConfig":
            record = {"tag": tag, "image": image, "resolvedAt": "2026-01-01T00:00:00Z"}
            each["metadata"]["annotations"] |= {
                "treenail.io/base-image": tag,
                "treenail.io/resolved-base": json.dumps(record),
            }
    (manifests / "all.json").write_text(json.dumps(documents))
    assert main(["build", "-f", str(manifests), "-o", "json"]) == 0
    (item,) = json.loads(capsys.readouterr().out)["builds"]
    assert (item["baseImage"], item["baseTag"]) == (image, tag)


@needs_buildah
@needs_busybox
@pytest.mark.process
def test_local_build_writes_and_pushes_the_image_with_the_config(
    registry: RegistryService, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = push_base(registry, tmp_path)
    manifests = write_manifests(tmp_path / "manifests", registry.host, base)
    (tmp_path / "pull.json").write_bytes(registry.make_auth_json(PULLER))
    (tmp_path / "push.json").write_bytes(registry.make_auth_json(PUSHER))
    arguments = [
        "build", "-f", str(manifests), "--local", "--push", "-o", "json",
        "--output", f"oci:{tmp_path}/image", "--work-dir", str(tmp_path / "work"),
        "--pull-secret", str(tmp_path / "pull.json"),
        "--push-secret", str(tmp_path / "push.json"), "--ca", str(registry.ca_file),
    ]  # fmt: skip
    assert main(arguments) == 0, capsys.readouterr().err
    (item,) = json.loads(capsys.readouterr().out)["builds"]
    digest, spec = item["image"]["digest"], item["image"]["pullSpec"]
    assert spec == f"{registry.host}/os/node@{digest}"
    assert [each["architecture"] for each in item["systems"]] == [ARCHITECTURE]
    with open_client(registry) as client:
        found = client.head_manifest("os/node", item["machineOSBuild"])
        assert found is not None
        assert found.digest == digest
    layout = ImageLayout(tmp_path / "image")
    image = layout.read_named(item["machineOSBuild"])
    assert image is not None
    assert image.digest == digest
    layers = json.loads(image.content)["layers"]
    assert layers[-1]["digest"] == item["configLayer"]["digest"]
    path = layout.find_blob(layers[-1]["digest"])
    assert path is not None
    with tarfile.open(path) as archive:
        names = archive.getnames()
    assert "etc/configured" in names
    assert "var/state" not in names
    assert list((tmp_path / "work").iterdir()) == []


@needs_buildah
@needs_busybox
@pytest.mark.process
def test_local_build_reuses_the_system_part_of_the_registry(
    registry: RegistryService, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = push_base(registry, tmp_path)
    text = "FROM configs AS final\nRUN echo reused > /etc/reused\n"
    manifests = write_manifests(tmp_path / "manifests", registry.host, base, text=text)
    (tmp_path / "pull.json").write_bytes(registry.make_auth_json(PULLER))
    (tmp_path / "push.json").write_bytes(registry.make_auth_json(PUSHER))
    own = ["--ca", str(registry.ca_file), "--push-secret", str(tmp_path / "push.json")]
    arguments = [
        "build", "-f", str(manifests), "--local", "--push", *own, "-o", "json",
        "--work-dir", str(tmp_path / "work"), "--pull-secret", str(tmp_path / "pull.json"),
    ]  # fmt: skip
    assert main(arguments) == 0, capsys.readouterr().err
    shown = capsys.readouterr()
    (first,) = json.loads(shown.out)["builds"]
    assert "STEP" in shown.err
    # The cluster pushes the system part under this tag.
    with open_client(registry) as client:
        built = client.get_manifest("os/node", first["image"]["digest"])
        document = json.loads(built.content)
        descriptor = parse_descriptor(document["config"], where="config")
        config = json.loads(client.read_small_blob("os/node", descriptor))
        for parts in (document["layers"], config["rootfs"]["diff_ids"], config["history"]):
            parts.pop()
        content = json.dumps(config).encode()
        uploaded = upload_bytes(client, "os/node", descriptor.media_type, content)
        document["config"] |= {"digest": uploaded.digest, "size": uploaded.size}
        tag = first["systems"][0]["image"].rpartition(":")[2]
        client.put_manifest("os/node", tag, built.media_type, json.dumps(document).encode())
    # A login for the base is no longer needed.
    arguments[arguments.index("--pull-secret") + 1] = str(tmp_path / "push.json")
    assert main(["build", "-f", str(manifests), *own]) == 0
    assert "found in the registry: --local reuses it" in capsys.readouterr().out
    assert main(arguments) == 0, capsys.readouterr().err
    shown = capsys.readouterr()
    (second,) = json.loads(shown.out)["builds"]
    assert "STEP" not in shown.err
    assert second["systems"][0]["imageExists"]
    with open_client(registry) as client:
        found = client.get_manifest("os/node", second["image"]["digest"])
    assert [each["digest"] for each in json.loads(found.content)["layers"]] == [
        each["digest"] for each in json.loads(built.content)["layers"]
    ]


@needs_buildah
@needs_busybox
@pytest.mark.process
def test_local_build_that_fails_names_line_reason_and_remedy(
    registry: RegistryService, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = push_base(registry, tmp_path)
    text = "FROM configs AS final\nRUN cat /missing\n"
    manifests = write_manifests(tmp_path / "manifests", registry.host, base, text=text)
    (tmp_path / "pull.json").write_bytes(registry.make_auth_json(PULLER))
    arguments = [
        "build", "-f", str(manifests), "--local", "--work-dir", str(tmp_path / "work"),
        "--pull-secret", str(tmp_path / "pull.json"), "--ca", str(registry.ca_file),
    ]  # fmt: skip
    assert main(arguments) == 1
    shown = capsys.readouterr().err
    assert "InstructionFailed: line 2: RUN cat /missing: exit status 1" in shown
    assert shown.count("can't open '/missing'") <= 1, "the output is shown twice"
    assert shown.count("STEP 2/2: RUN cat /missing") == 1, "the output is shown twice"
    assert "spec.containerFile" in shown
    assert list((tmp_path / "work").iterdir()) == []
