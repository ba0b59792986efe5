"""``treenail-controller build``: files in, the builds of their MachineOSConfigs out."""

import base64
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.builder.base_image import ARCHITECTURE, needs_busybox
from tests.builder.builds import open_client, push_base
from tests.builder.sandboxing import needs_buildah
from tests.fixtures.objects import Json, make_config, make_file, make_object
from tests.registry.images import push_image
from treenail.builder.build_layout import ImageLayout
from treenail.cli.controller.main import main
from treenail.kube.resources import CONFIGMAPS, MACHINECONFIGPOOLS, MACHINEOSCONFIGS, SECRETS
from treenail.registry.names import parse_descriptor
from treenail.registry.uploads import upload_bytes
from treenail_lab.registry.service import PULLER, PUSHER, RegistryService

DIGEST = "sha256:" + 64 * "a"
BASE = f"registry.example.com/os/base@{DIGEST}"
TEXT = "FROM configs AS final\nCOPY motd /etc/motd\nRUN cat /etc/motd\n"


class BuildInput:
    """A pool, its configs and a MachineOSConfig in a file, and the command that reads it."""

    def __init__(self, top: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.top = top
        self.directory = top / "manifests"
        self._capsys = capsys

    def write(
        self, text: str = TEXT, *, host: str = "registry.example.com", base: str = BASE
    ) -> None:
        worker = {"machineconfiguration.openshift.io/role": "worker"}
        files = [make_file("/etc/configured", "yes"), make_file("/var/state", "no")]
        spec = {"machineConfigSelector": {"matchLabels": worker}}
        built = {
            "machineConfigPool": {"name": "worker"},
            "imageBuilder": {"imageBuilderType": "Job"},
            "renderedImagePushSecret": {"name": "push"},
            "renderedImagePushSpec": f"{host}/os/node:latest",
            "containerFile": [{"content": text}] if text else [],
        }
        notes = {"treenail.io/context": "files"} if "COPY" in text else {}
        self._save([
            make_object(MACHINECONFIGPOOLS, "worker", spec),
            make_config("50-worker", *files, role="worker", osImageURL=base),
            make_object(MACHINEOSCONFIGS, "worker", built, annotations=notes),
            make_object(CONFIGMAPS, "files", top={"data": {"motd": "welcome\n"}}),
        ])  # fmt: skip

    def _save(self, documents: list[Json]) -> None:
        self.directory.mkdir(exist_ok=True)
        found = {"apiVersion": "v1", "kind": "List", "items": documents}
        (self.directory / "all.json").write_text(json.dumps(found))

    def edit(self, change: Callable[[dict[str, Json]], object]) -> None:
        """Change the documents, which are by kind."""
        documents = json.loads((self.directory / "all.json").read_text())["items"]
        by_kind = {each["kind"]: each for each in documents}
        change(by_kind)
        self._save(list(by_kind.values()))

    def annotate(self, **notes: str) -> None:
        """Annotate the MachineOSConfig."""
        named = {f"treenail.io/{name.replace('_', '-')}": text for name, text in notes.items()}
        self.edit(lambda found: found["MachineOSConfig"]["metadata"]["annotations"].update(named))

    def run(self, *arguments: str, code: int = 0) -> str:
        """Run the command; return its output, or its errors if it fails."""
        found = main(["build", "-f", str(self.directory), *arguments])
        shown = self._capsys.readouterr()
        assert found == code, shown.err
        return shown.err if code else shown.out

    def read_build(self, *arguments: str) -> Json:
        """Run the command; return its only build."""
        (item,) = json.loads(self.run(*arguments, "-o", "json"))["builds"]
        return item

    def write_login(self, name: str, content: bytes) -> str:
        (self.top / name).write_bytes(content)
        return str(self.top / name)


@pytest.fixture
def given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> BuildInput:
    found = BuildInput(tmp_path, capsys)
    found.write()
    return found


def test_build_of_files_shows_key_and_containerfile_and_changes_nothing(given: BuildInput) -> None:
    before = sorted(given.top.rglob("*"))
    shown = given.run()
    assert "content key:" in shown
    assert f"FROM {BASE} AS configs" in shown
    assert "COPY motd /etc/motd" in shown
    assert "registry.example.com/os/node:system-" in shown
    assert "/var/state" in shown
    assert sorted(given.top.rglob("*")) == before


def test_build_of_files_with_another_input_has_another_key(given: BuildInput) -> None:
    options = ([], ["--build-cache=registry.example.com/cache"], ["--storage-driver=vfs"])
    builds = [given.read_build(*each) for each in options]
    given.edit(lambda found: found["ConfigMap"]["data"].update(motd="goodbye"))
    builds.append(given.read_build())
    assert len({each["contentKey"] for each in builds}) == 4
    for each in builds:
        assert each["needsJob"]
        assert each["machineOSBuild"].startswith("worker-")


def test_build_for_several_architectures_shows_each_of_them(given: BuildInput) -> None:
    files = [
        {"containerfileArch": name, "content": f"FROM configs AS final\nRUN echo {name}\n"}
        for name in ("AMD64", "ARM64")
    ]
    given.edit(lambda found: found["MachineOSConfig"]["spec"].update(containerFile=files))
    arguments = ["--architecture=arm64", "--architecture=amd64"]
    item = given.read_build(*arguments)
    amd64, arm64 = item["systems"]
    assert (amd64["architecture"], arm64["architecture"]) == ("amd64", "arm64")
    assert len({amd64["contentKey"], arm64["contentKey"], item["contentKey"]}) == 3
    assert "RUN echo ARM64" in arm64["containerfile"]
    shown = given.run(*arguments)
    assert "a list of manifests" in shown
    assert shown.index("RUN echo AMD64") < shown.index("RUN echo ARM64")
    assert arm64["image"] in shown
    assert "cannot build for amd64, arm64 on this host" in given.run(*arguments, "--local", code=64)


def add_second(found: dict[str, Json]) -> None:
    found["another"] = {**found["MachineOSConfig"], "metadata": {"name": "other"}}


@pytest.mark.parametrize(
    ("change", "code", "sentences"),
    [
        (add_second, 1,
         ["MachineOSConfig other: spec.machineConfigPool.name: ", "MachineOSConfig worker"]),
        (lambda found: found.pop("ConfigMap"), 1,
         ["found ConfigMap files, which does not exist; add the ConfigMap to the files"]),
        (lambda found: found.pop("MachineConfigPool"), 64,
         ["the input has no MachineConfigPool worker, found: none",
          "kubectl get machineconfigpool worker -o yaml"]),
    ],
    ids=["two for a pool", "no files for COPY", "no pool"],
)  # fmt: skip
def test_build_of_incomplete_files_names_the_remedy(
    given: BuildInput,
    change: Callable[[dict[str, Json]], object],
    code: int,
    sentences: list[str],
) -> None:
    given.edit(change)
    shown = given.run(code=code)
    assert [each for each in sentences if each not in shown] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--push"], "--push without --local"),
        (["--output", "oci:image"], "--output without --local"),
        (["--local", "--output", "image"], "expected oci:DIR"),
        (["--pool", "infra"], "no MachineOSConfig for pool infra"),
        (["--local", "--timeout", "0"], "expected seconds above 0"),
    ],
)
def test_build_with_wrong_arguments_names_the_remedy(
    given: BuildInput, arguments: list[str], message: str
) -> None:
    assert message in given.run(*arguments, code=64)


def test_build_without_containerfile_needs_no_job(given: BuildInput) -> None:
    given.write("")
    assert "the build needs no Job" in given.run()


def test_build_warns_about_what_has_no_effect(
    given: BuildInput, capsys: pytest.CaptureFixture[str]
) -> None:
    given.write()
    given.edit(lambda found: found["MachineConfig"]["spec"].update(kernelArgument=["a"]))
    assert main(["build", "-f", str(given.directory), "--architecture", "amd64"]) == 0
    assert "warning: " in (err := capsys.readouterr().err)
    assert "spec.kernelArgument: ignored: unknown field; did you mean kernelArguments?" in err


def test_build_of_a_wrong_containerfile_names_its_line(given: BuildInput) -> None:
    given.write("FROM configs AS final\nADMIRE me\n")
    assert "line 2" in given.run(code=1)


@pytest.fixture(scope="module")
def registry() -> Iterator[RegistryService]:
    with RegistryService() as service:
        yield service


@pytest.mark.process
@pytest.mark.parametrize("login", ["--pull-secret", "--authfile", "data", "stringData"])
def test_build_of_files_resolves_the_tag_of_the_base(
    registry: RegistryService, given: BuildInput, login: str
) -> None:
    with open_client(registry) as client:
        pushed = push_image(client, "os/base", "stable", architecture=ARCHITECTURE)
    tag = f"{registry.host}/os/base:stable"
    given.write(host=registry.host)
    given.annotate(base_image=tag)
    arguments = ["--ca", str(registry.ca_file)]
    content = registry.make_auth_json(PULLER)
    if login.startswith("--"):
        arguments += [login, given.write_login("pull.json", content)]
    else:
        # The cluster's pull secret in the files.
        text = (content if login == "stringData" else base64.b64encode(content)).decode()
        top = {"type": "kubernetes.io/dockerconfigjson", login: {".dockerconfigjson": text}}
        secret = make_object(SECRETS, "global-pull-secret-copy", top=top)
        (given.directory / "login.json").write_text(json.dumps(secret))
    item = given.read_build(*arguments)
    assert item["baseImage"] == f"{registry.host}/os/base@{pushed.digest}"
    assert item["baseTag"] == tag
    assert f"base tag:     {tag}, resolved now" in given.run(*arguments)


@pytest.mark.process
def test_build_of_files_with_an_unresolved_tag_names_the_remedy(
    registry: RegistryService, given: BuildInput
) -> None:
    tag = f"{registry.host}/os/base:absent"
    given.annotate(base_image=tag)
    shown = given.run("--ca", str(registry.ca_file), code=1)
    assert f"cannot resolve the base image {tag}: " in shown
    assert "--pull-secret FILE" in shown


def test_build_of_files_uses_the_digest_that_a_cluster_recorded(given: BuildInput) -> None:
    tag = "registry.example.com/os/base:stable"
    record = {"tag": tag, "image": BASE, "resolvedAt": "2026-01-01T00:00:00Z"}
    given.annotate(base_image=tag, resolved_base=json.dumps(record))
    item = given.read_build()
    assert (item["baseImage"], item["baseTag"]) == (BASE, tag)


class LocalBuilds:
    """Local builds of files whose base a registry has."""

    def __init__(self, given: BuildInput, registry: RegistryService, text: str = TEXT) -> None:
        self.given = given
        self.registry = registry
        given.write(text, host=registry.host, base=push_base(registry, given.top))
        self.pull = given.write_login("pull.json", registry.make_auth_json(PULLER))
        self.push = given.write_login("push.json", registry.make_auth_json(PUSHER))
        self.work = given.top / "work"

    def make_arguments(self, *more: str, pull: str = "") -> list[str]:
        return [
            "--local", "--work-dir", str(self.work), "--pull-secret", pull or self.pull,
            "--ca", str(self.registry.ca_file), *more,
        ]  # fmt: skip


@needs_buildah
@needs_busybox
@pytest.mark.process
def test_local_build_writes_and_pushes_the_image_with_the_config(
    registry: RegistryService, given: BuildInput
) -> None:
    local = LocalBuilds(given, registry)
    image = given.top / "image"
    arguments = local.make_arguments("--push", "--push-secret", local.push)
    item = given.read_build(*arguments, "--output", f"oci:{image}")
    digest, spec = item["image"]["digest"], item["image"]["pullSpec"]
    assert spec == f"{registry.host}/os/node@{digest}"
    assert [each["architecture"] for each in item["systems"]] == [ARCHITECTURE]
    with open_client(registry) as client:
        found = client.head_manifest("os/node", item["machineOSBuild"])
        assert found.digest == digest
    layout = ImageLayout(image)
    named = layout.read_named(item["machineOSBuild"])
    assert named.digest == digest
    layers = json.loads(named.content)["layers"]
    assert layers[-1]["digest"] == item["configLayer"]["digest"]
    path = layout.find_blob(layers[-1]["digest"])
    assert path is not None
    with tarfile.open(path) as archive:
        names = archive.getnames()
    assert "etc/configured" in names
    assert "var/state" not in names
    assert list(local.work.iterdir()) == []


@needs_buildah
@needs_busybox
@pytest.mark.process
def test_local_build_reuses_the_system_part_of_the_registry(
    registry: RegistryService, given: BuildInput, capsys: pytest.CaptureFixture[str]
) -> None:
    local = LocalBuilds(given, registry, "FROM configs AS final\nRUN echo reused > /etc/reused\n")
    own = ["--push-secret", local.push]
    command = ["build", "-f", str(given.directory), "-o", "json"]
    assert main([*command, *local.make_arguments("--push", *own)]) == 0, capsys.readouterr().err
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
    shown = given.run("--ca", str(registry.ca_file), *own)
    assert "found in the registry: --local reuses it" in shown
    again = local.make_arguments("--push", *own, pull=local.push)
    assert main([*command, *again]) == 0, capsys.readouterr().err
    shown = capsys.readouterr()
    (second,) = json.loads(shown.out)["builds"]
    assert "STEP" not in shown.err
    assert second["systems"][0]["imageExists"]
    with open_client(registry) as client:
        found = client.get_manifest("os/node", second["image"]["digest"])
    assert [each["digest"] for each in json.loads(found.content)["layers"]] == [
        each["digest"] for each in json.loads(built.content)["layers"]
    ]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.process
def test_local_build_without_ids_for_instructions_is_refused(given: BuildInput) -> None:
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", sys.executable, "-c",
         "from treenail.cli.entry import run_controller; run_controller()",
         "build", "--local", f"--filename={given.directory}"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "cannot build as root: expected 65536 IDs in /proc/self/uid_map, found 1" in done.stderr
    assert "podman run --uidmap 0:100000:65536" in done.stderr


@needs_buildah
@needs_busybox
@pytest.mark.process
def test_local_build_that_fails_names_line_reason_and_remedy(
    registry: RegistryService, given: BuildInput
) -> None:
    local = LocalBuilds(given, registry, "FROM configs AS final\nRUN cat /missing\n")
    shown = given.run(*local.make_arguments(), code=1)
    assert "InstructionFailed: line 2: RUN cat /missing: exit status 1" in shown
    assert shown.count("can't open '/missing'") <= 1, "the output is shown twice"
    assert shown.count("STEP 2/2: RUN cat /missing") == 1, "the output is shown twice"
    assert "spec.containerFile" in shown
    assert list(local.work.iterdir()) == []
