"""The stage ``prepare``: what it writes, what it leaves, and what it refuses."""

import base64
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.installer.directories import (
    BASE,
    DIGEST,
    list_texts,
    make_config,
    make_image_config,
    make_pool,
    write_manifest,
)
from tests.oracle import ROOT as ORACLE
from tests.oracle import needs_oracle
from treenail.api import annotations as key
from treenail.api.component_names import MCO_NAMESPACE, PART_OF_LABELS
from treenail.cli.controller.main import main
from treenail.clocks import SystemClock
from treenail.controllers.handover.image_mode import WorkerMode
from treenail.controllers.image_build.build_planner import plan_builds
from treenail.errors import FileError, TreenailError, UsageError
from treenail.installer.directory.install_files import InstallFiles
from treenail.installer.directory.install_manifests import read_install_manifests
from treenail.installer.directory.prepare import PrepareOptions, prepare_directory
from treenail.installer.directory.prepared_manifests import FILE_NAME
from treenail.installer.directory.problems import InstallDirectoryError

LOGINS = json.dumps({
    "auths": {"registry.example.com": {"auth": "dTpwdw=="}, "quay.io": {"auth": "eDp5"}}
})  # fmt: skip
HEAD = "apiVersion: v1\nbaseDomain: example.com  # kept\n"
FIELD = """\
imageMode:
  enabled: true
  workers: Follow
  pools:
  - name: master
    containerFile: Containerfile
    renderedImagePushSpec: registry.example.com/os/master:latest
  - name: worker
    renderedImagePushSpec: registry.example.com/os/worker:latest
"""
TAIL = f"# the installer's\npullSecret: '{LOGINS}'\n"
CONTAINERFILE = "FROM configs AS final\nRUN dnf install -y httpd\n"
GENERATED = f"manifests/{FILE_NAME}"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An install directory with the field."""
    root = tmp_path / "cluster"
    root.mkdir()
    (root / "install-config.yaml").write_text(HEAD + FIELD + TAIL)
    (root / "Containerfile").write_text(CONTAINERFILE)
    return root


def prepare(root: Path, **options: object) -> list[str]:
    return prepare_directory(root, PrepareOptions(**options), InstallFiles())  # type: ignore[arg-type]


def find_problems(root: Path) -> list[str]:
    before = read_all(root)
    with pytest.raises(InstallDirectoryError) as info:
        prepare(root)
    assert read_all(root) == before
    return [str(each) for each in info.value.problems]


def read_all(root: Path) -> dict[str, bytes]:
    return {str(each): each.read_bytes() for each in root.rglob("*") if each.is_file()}


def write_config(root: Path, field: str) -> None:
    (root / "install-config.yaml").write_text(HEAD + field + TAIL)


def make_secret(name: str, namespace: str = "treenail", **fields: object) -> dict[str, object]:
    content = base64.b64encode(LOGINS.encode()).decode()
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "namespace": namespace},
        "type": "kubernetes.io/dockerconfigjson",
        "data": {".dockerconfigjson": content},
        **fields,
    }


def test_prepare_writes_manifests_and_removes_the_field(root: Path) -> None:
    lines = prepare(root)
    assert lines[:2] == [
        f"wrote {GENERATED}",
        "removed the field imageMode from install-config.yaml",
    ]
    assert (root / "install-config.yaml").read_text() == HEAD + TAIL
    assert (root / GENERATED).stat().st_mode & 0o777 == 0o600
    found = read_install_manifests(root)
    assert sorted(found.pools) == ["master", "worker"]
    assert found.settings.workers is WorkerMode.FOLLOW
    master = found.image_configs["master"]
    assert master.containerfiles[0].content == CONTAINERFILE
    assert master.push_spec == "registry.example.com/os/master:latest"
    assert found.image_configs["worker"].containerfiles == ()
    namespace = found.find("Namespace", "treenail")
    push = found.find("Secret", "treenail-install-push", "treenail")
    for created in (namespace, push):
        assert created.document["metadata"]["labels"] == PART_OF_LABELS  # type: ignore[index]
    text = base64.b64decode(push.document["data"][".dockerconfigjson"]).decode()  # type: ignore[index]
    assert "registry.example.com" in text
    assert "quay.io" not in text


def test_prepared_directory_can_be_built(root: Path) -> None:
    prepare(root)
    write_manifest(root, "manifests/10.yaml", make_config("10-a", "master", osImageURL=BASE))
    found = read_install_manifests(root)
    builds = plan_builds(
        list_texts(found),
        SystemClock(),
        architectures=frozenset({"amd64"}),
        only="master",
        resolve_tag=lambda *_: "",
    )
    assert builds[0].plan.wanted.needs_job
    assert "dnf install" in builds[0].plan.systems[0].containerfile


def test_second_run_changes_nothing(root: Path) -> None:
    prepare(root)
    before = {path: (root / path).stat().st_mtime_ns for path in ("install-config.yaml", GENERATED)}
    content = read_all(root)
    assert len(prepare(root)) == 1
    assert read_all(root) == content
    after = {path: (root / path).stat().st_mtime_ns for path in before}
    assert before == after


def test_run_without_the_install_config_checks_the_manifests_again(root: Path) -> None:
    prepare(root)
    (root / "install-config.yaml").unlink()
    prepare(root)
    write_manifest(root, "manifests/a.yaml", make_image_config("master"))
    assert any("exists twice" in each for each in find_problems(root))


def test_changed_field_writes_the_manifests_again(root: Path) -> None:
    prepare(root)
    write_config(root, FIELD.replace("os/master", "os/control-plane"))
    prepare(root)
    found = read_install_manifests(root)
    assert found.image_configs["master"].push_spec.endswith("os/control-plane:latest")


def test_edited_manifests_are_not_overwritten(root: Path) -> None:
    prepare(root)
    path = root / GENERATED
    path.write_text(path.read_text().replace("httpd", "nginx"))
    prepare(root)
    write_config(root, FIELD)
    assert "it was edited" in find_problems(root)[0]


def test_disabled_field_removes_the_manifests(root: Path) -> None:
    prepare(root)
    write_config(root, FIELD.replace("enabled: true", "enabled: false"))
    assert "installs without image mode" in prepare(root)[-1]
    assert not (root / GENERATED).exists()
    assert (root / "install-config.yaml").read_text() == HEAD + TAIL


def test_own_install_config_is_kept_and_has_pools_of_kubeadm(root: Path) -> None:
    (root / "install-config.yaml").unlink()
    own = root / "treenail-install.yaml"
    text = f"{FIELD}{TAIL}controlPlane: {{replicas: 3}}\n"
    own.write_text(text)
    for pool in ("master", "worker"):
        config = make_config(f"10-{pool}", pool, osImageURL=BASE)
        write_manifest(root, f"manifests/{pool}.yaml", config)
    assert not any("how many machines" in each for each in prepare(root))
    assert own.read_text() == text
    selector = read_install_manifests(root).pools["master"].node_selector
    assert selector.matches({"node-role.kubernetes.io/control-plane": ""})
    assert len(prepare(root)) == 1
    own.write_text(FIELD + TAIL)
    note = "treenail-install.yaml does not say how many machines the control plane has: "
    assert any(each.startswith(note) for each in prepare(root))


def test_own_install_config_needs_machine_configs_and_a_base_image(root: Path) -> None:
    (root / "install-config.yaml").rename(root / "treenail-install.yaml")
    (root / "treenail-install.yaml").write_text(FIELD + TAIL)
    write_manifest(root, "manifests/a.yaml", make_config("10-a", "master"))
    found = find_problems(root)
    assert len(found) == 2
    assert any("pool master has no base image" in each for each in found)
    assert any("couldn't find any MachineConfigs for pool: worker" in each for each in found)


def test_unknown_field_of_the_own_install_config_is_a_problem(root: Path) -> None:
    (root / "install-config.yaml").unlink()
    (root / "treenail-install.yaml").write_text(f"{FIELD}{TAIL}baseDomain: x\n")
    assert find_problems(root)[0].startswith(
        "treenail-install.yaml, line 12: unknown field baseDomain"
    )


def test_field_in_both_install_configs_is_an_error(root: Path) -> None:
    (root / "treenail-install.yaml").write_text(FIELD)
    with pytest.raises(UsageError, match="both have the field"):
        prepare(root)


@pytest.mark.parametrize("text", ["apiVersion: v1\n", None])
def test_directory_without_image_mode_is_an_error(tmp_path: Path, text: str | None) -> None:
    if text:
        (tmp_path / "install-config.yaml").write_text(text)
    with pytest.raises(UsageError, match="no field imageMode"):
        prepare(tmp_path)


def test_missing_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="it does not exist"):
        prepare(tmp_path / "none")


def test_image_config_of_the_user_takes_precedence(root: Path) -> None:
    mine = make_image_config("master")
    write_manifest(root, "manifests/mine.yaml", mine, make_secret("push"))
    (root / "Containerfile").unlink()
    lines = prepare(root)
    assert lines[0].startswith("manifests/mine.yaml, line 2: MachineOSConfig master takes preced")
    found = read_install_manifests(root)
    assert found.image_configs["master"].push_secret == "push"
    manifest = found.find("MachineOSConfig", "master")
    assert manifest.file == "manifests/mine.yaml"


def test_custom_pool_of_a_manifest_gets_an_image(root: Path) -> None:
    write_manifest(root, "manifests/pool.yaml", make_pool("gpu"))
    write_config(
        root, f"{FIELD}  - name: gpu\n    renderedImagePushSpec: registry.example.com/os/gpu:1\n"
    )
    prepare(root)
    assert "gpu" in read_install_manifests(root).image_configs


def test_pool_of_the_user_is_not_written_again(root: Path) -> None:
    write_manifest(root, "openshift/pool.yaml", make_pool("worker", maxUnavailable=2))
    prepare(root)
    assert read_install_manifests(root).pools["worker"].max_unavailable == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to others")
def test_files_that_root_writes_belong_to_the_owner_of_the_directory(root: Path) -> None:
    (root / "install-config.yaml").chmod(0o640)
    for path in (root, root / "install-config.yaml"):
        os.chown(path, 1234, 1234)
    prepare(root)
    for name in ("install-config.yaml", "manifests", GENERATED):
        assert (root / name).stat().st_uid == 1234
    assert (root / "install-config.yaml").stat().st_mode & 0o777 == 0o640


def test_push_login_of_a_file_is_used(root: Path) -> None:
    write_config(root, FIELD.replace("registry.example.com", "other.example.com"))
    assert len(find_problems(root)) == 2
    secret = root.parent / "push.json"
    secret.write_text(LOGINS.replace("registry.example.com", "other.example.com/os"))
    prepare(root, push_secret=secret)


def test_secrets_of_the_user_take_precedence(root: Path) -> None:
    names = ("treenail-install-push", "treenail-install-pull")
    write_manifest(root, "manifests/mine.yaml", *map(make_secret, names))
    (root / "install-config.yaml").write_text(HEAD + FIELD)
    prepare(root)
    found = read_install_manifests(root)
    for name in names:
        secret = found.find("Secret", name, "treenail")
        assert secret.file == "manifests/mine.yaml"
    assert found.image_configs["master"].base_pull_secret == names[1]


def test_login_of_the_cluster_registry_is_a_note(root: Path) -> None:
    host = "image-registry.openshift-image-registry.svc:5000"
    write_config(root, FIELD.replace("registry.example.com/os/worker", f"{host}/os/worker"))
    assert any("create Secret treenail/treenail-install-push" in each for each in prepare(root))


class DyingFiles(InstallFiles):
    """Files of a process that is killed before its Nth write."""

    def __init__(self, writes: int) -> None:
        self.left = writes

    def write(self, path: Path, content: bytes, *, mode: int = 0o600) -> bool:
        if not self.left:
            raise KeyboardInterrupt
        self.left -= 1
        return super().write(path, content, mode=mode)


@pytest.mark.parametrize("writes", range(3))
def test_kill_before_each_write_leaves_a_directory_that_the_next_run_completes(
    root: Path, writes: int
) -> None:
    expected = root.parent / "expected"
    shutil.copytree(root, expected)
    prepare(expected)
    for _ in range(2):
        try:
            prepare_directory(root, PrepareOptions(), DyingFiles(writes))
        except KeyboardInterrupt:
            has_field = "imageMode" in (root / "install-config.yaml").read_text()
            assert has_field
    prepare(root)
    for name in ("install-config.yaml", GENERATED):
        assert (root / name).read_bytes() == (expected / name).read_bytes()


def iter_mistakes() -> Iterator[tuple[str, str]]:
    yield FIELD.replace("enabled", "enabeld"), "line 4: unknown field imageMode.enabeld"
    yield FIELD.replace("name: worker", "name: wroker"), "line 10: unknown pool wroker"
    yield (
        FIELD.partition("  - name: worker")[0],
        "line 3: imageMode.pools has no entry for pool worker",
    )
    yield "imageMode: {enabled: true}\n", "line 3: imageMode.pools has no entry for pool master"
    yield FIELD.replace("os/worker:latest", f"os/worker@{DIGEST}"), "line 11: renderedImagePushSpec"
    yield FIELD.replace("os/master:latest", "os/master"), "line 9: renderedImagePushSpec is"
    yield FIELD.replace("example.com/os/master", "test/os/master"), "line 7: pool master: there is"
    for name in ("missing", "../x", "/etc/passwd", ".", "a\\0b"):
        field = FIELD.replace("containerFile: Containerfile", f'containerFile: "{name}"')
        yield field, "install-config.yaml, line 7: containerFile"
    yield f"{FIELD}  registry: {{type: External}}\n  port: 3\n", "line 13: unknown field"


@pytest.mark.parametrize(("field", "expected"), [*iter_mistakes()])
def test_mistake_in_the_field_is_a_problem_with_its_line(
    root: Path, field: str, expected: str
) -> None:
    write_config(root, field)
    (root.parent / "x").write_text(CONTAINERFILE)
    assert any(expected in each for each in find_problems(root))


def test_external_registry_without_a_push_spec_is_a_problem(root: Path) -> None:
    text = (
        "imageMode:\n  registry: {type: External}\n  pools:\n  - name: master\n  - name: worker\n"
    )
    write_config(root, text)
    found = [each for each in find_problems(root) if "has no renderedImagePushSpec" in each]
    assert [each.partition(":")[0] for each in found] == [
        "install-config.yaml, line 6",
        "install-config.yaml, line 7",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("FROM configs\nRNU x\n", "Containerfile, line 2: "),
        ("RUN x\n", "Containerfile"),
        ("", "the file is empty"),
        ("FROM configs\n" + "# x\n" * 5000, "Containerfile: "),
        (b"FROM configs\n# \xff\n", "Containerfile, line 2: expected UTF-8"),
        (
            "FROM configs\nRUN x\nCOPY a.conf /etc/\n",
            "Containerfile, line 3: COPY a.conf",
        ),
    ],
)
def test_containerfile_that_cannot_be_built_is_a_problem_with_its_line(
    root: Path, text: str | bytes, expected: str
) -> None:
    (root / "Containerfile").write_bytes(text.encode() if isinstance(text, str) else text)
    assert any(expected in each for each in find_problems(root))


def test_containerfile_on_another_base_is_a_note(root: Path) -> None:
    (root / "Containerfile").write_text("FROM quay.io/x/y:1 AS final\nRUN x\n")
    assert any("not based on the OS image" in each for each in prepare(root))


def test_image_config_that_copies_a_file_needs_it_in_its_context(root: Path) -> None:
    config = make_image_config("master", annotations={key.BUILD_CONTEXT: "files"})
    text = "FROM configs\nCOPY a.conf *.repo b.conf /etc/\n"
    config["spec"]["containerFile"] = [{"containerfileArch": "NoArch", "content": text}]  # type: ignore[index]
    meta = {"name": "files", "namespace": "treenail"}
    files = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta,
             "data": {"a.conf": "x", "c.repo": "x"}}  # fmt: skip
    write_manifest(root, "manifests/a.yaml", config, make_secret("push"), files)
    (problem,) = find_problems(root)
    assert "spec.containerFile, NoArch, line 2: COPY b.conf" in problem


def test_containerfile_behind_a_link_out_of_the_directory_is_a_problem(root: Path) -> None:
    shutil.move(root / "Containerfile", root.parent / "Containerfile")
    (root / "Containerfile").symlink_to(root.parent / "Containerfile")
    assert "outside of the install directory" in find_problems(root)[0]


def test_mistakes_of_field_manifests_and_containerfile_are_one_message(root: Path) -> None:
    write_config(root, FIELD.replace("workers: Follow", "workers: Never"))
    (root / "Containerfile").write_text("FORM configs\n")
    write_manifest(root, "manifests/a.yaml", make_pool("x", nodeSelectr={}))
    write_manifest(root, "manifests/b.yaml", make_image_config("nonesuch"), make_secret("push"))
    files = [each.partition(",")[0].partition(":")[0] for each in find_problems(root)]
    assert {"Containerfile", "install-config.yaml", "manifests/a.yaml", "manifests/b.yaml"} <= {
        *files
    }


@pytest.mark.parametrize(
    ("secret", "expected"),
    [
        (make_secret("push", "default"), "expected namespace treenail or openshift-machine-config"),
        (make_secret("push", type="Opaque"), "expected type kubernetes.io/dockerconfigjson"),
        (make_secret("push", data={}), "it has no key .dockerconfigjson"),
        (make_secret("push", data={".dockerconfigjson": "!"}), "is not base64"),
        (make_secret("push", data={".dockerconfigjson": "e30="}), "it has no login"),
        (
            make_secret(
                "push", data={}, stringData={".dockerconfigjson": LOGINS.replace("reg", "r")}
            ),
            "expected a login for registry.example.com",
        ),
        (make_secret("other"), "names Secret push, which no manifest has; add it: kubectl create"),
    ],
)
def test_secret_that_cannot_be_used_is_a_problem_with_file_and_line(
    root: Path, secret: dict[str, object], expected: str
) -> None:
    write_manifest(root, "manifests/a.yaml", make_image_config("master"), secret)
    (problem,) = find_problems(root)
    assert problem.startswith("manifests/a.yaml, line ")
    assert expected in problem
    assert "dTpw" not in problem


def test_secret_in_the_namespace_of_the_mco_is_used(root: Path) -> None:
    secret = make_secret("push", MCO_NAMESPACE)
    write_manifest(root, "manifests/a.yaml", make_image_config("master"), secret)
    prepare(root)


def test_invalid_pull_secret_is_a_problem_without_its_content(root: Path) -> None:
    (root / "install-config.yaml").write_text(f"{FIELD}pullSecret: '{{\"hunter2\": 1}}'\n")
    found = find_problems(root)
    assert any("pullSecret" in each for each in found)
    assert not any("hunter2" in each for each in found)


def test_machine_config_that_cannot_be_rendered_is_a_problem(root: Path) -> None:
    write_manifest(root, "manifests/a.yaml", make_config("10-a", "worker", kernelType="x"))
    assert "manifests/a.yaml" in find_problems(root)[0]


@pytest.mark.parametrize(("mode", "is_problem"), [("Bootstrap", True), ("External", False)])
def test_base_image_in_the_repository_of_the_push_spec_is_a_problem(
    root: Path, mode: str, *, is_problem: bool
) -> None:
    base = f"registry.example.com/os/master@{DIGEST}"
    write_manifest(root, "manifests/a.yaml", make_config("10-a", "master", osImageURL=base))
    write_config(root, f"{FIELD}  registry: {{type: {mode}}}\n")
    if is_problem:
        assert "is in this repository, which the bootstrap" in find_problems(root)[0]
    else:
        prepare(root)


def test_missing_context_is_a_problem(root: Path) -> None:
    config = make_image_config("master", annotations={key.BUILD_CONTEXT: "files"})
    write_manifest(root, "manifests/a.yaml", config, make_secret("push"))
    assert "add the ConfigMap to the manifests" in find_problems(root)[0]


def test_pipe_in_place_of_a_file_is_an_error_and_blocks_nothing(root: Path) -> None:
    (root / "install-config.yaml").unlink()
    os.mkfifo(root / "install-config.yaml")
    with pytest.raises(FileError, match="not a regular file"):
        prepare(root)


@pytest.mark.parametrize("text", ["a: [", "a: 1\n---\nb: 1\n", "\x00"])
def test_install_config_that_is_no_yaml_is_an_error(root: Path, text: str) -> None:
    (root / "install-config.yaml").write_text(text)
    with pytest.raises(TreenailError, match=r"install-config\.yaml"):
        prepare(root)


def make_prebuilt(image: str) -> dict[str, object]:
    return make_image_config("layered", annotations={key.PRE_BUILT_IMAGE: image})


def test_directory_of_the_mco_with_a_prebuilt_image_needs_no_field(tmp_path: Path) -> None:
    write_manifest(tmp_path, "manifests/a.yaml", make_pool("layered"), make_prebuilt(BASE))
    before = read_all(tmp_path)
    assert prepare(tmp_path) == [f"{tmp_path} is prepared; pools with an image: layered"]
    assert read_all(tmp_path) == before


def test_tag_beside_the_digest_of_a_prebuilt_image_is_removed(tmp_path: Path) -> None:
    """Gap (a): the MCO accepts it here, and its API refuses it when the cluster runs."""
    path = write_manifest(
        tmp_path,
        "manifests/a.yaml",
        make_pool("layered"),
        make_prebuilt(f"r.example/os:v1@{DIGEST}"),
    )
    before = path.read_text()
    assert "removed the tag" in prepare(tmp_path)[0]
    assert path.read_text() == before.replace("os:v1@", "os@")
    assert len(prepare(tmp_path)) == 1


@pytest.mark.parametrize(
    "image",
    [
        "r.example/os:v1",
        "r.example/os",
        f"r.example/os@md5:{'0' * 32}",
        f"r.example/os@{DIGEST.upper()}",
        f"r.example/os@{DIGEST[:-1]}",
        f"os@{DIGEST}",
        f"docker://r.example/os@{DIGEST}",
        "",
    ],
)
def test_prebuilt_image_without_a_sha256_digest_is_a_problem(tmp_path: Path, image: str) -> None:
    write_manifest(tmp_path, "manifests/a.yaml", make_pool("layered"), make_prebuilt(image))
    (problem,) = find_problems(tmp_path)
    assert problem.startswith("manifests/a.yaml, line ")
    assert "pre-built-image" in problem


@needs_oracle
def test_recorded_install_directory_of_the_mco_loses_only_the_tag(tmp_path: Path) -> None:
    (tmp_path / "manifests").mkdir()
    recorded = {each.name: each.read_bytes() for each in (ORACLE / "bootstrap/input").iterdir()}
    for name, content in recorded.items():
        (tmp_path / "manifests" / name).write_bytes(content)
    assert len(prepare(tmp_path)) == 2
    assert sorted(each.name for each in tmp_path.iterdir()) == ["manifests"]
    for name, content in recorded.items():
        expected = content.replace(b"rhcos:latest@sha256", b"rhcos@sha256")
        assert (tmp_path / "manifests" / name).read_bytes() == expected


def test_commands_of_the_readme_prepare_and_plan_an_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (Path(__file__).parents[2] / "README.md").read_text()
    section = text.partition("## Install in image mode\n")[2].partition("\n## ")[0]
    lines = section.partition("```\n")[2].partition("```")[0].splitlines()
    commands = [each.partition("#")[0].split()[1:] for each in lines]
    root = tmp_path / "cluster"
    root.mkdir()
    (root / "treenail-install.yaml").write_text(FIELD + TAIL)
    (root / "Containerfile").write_text(CONTAINERFILE)
    for pool in ("master", "worker"):
        config = make_config(f"10-{pool}", pool, osImageURL=BASE)
        write_manifest(root, f"manifests/{pool}.yaml", config)
    monkeypatch.chdir(tmp_path)
    assert [each[1] for each in commands] == ["prepare", "plan", "bootstrap"]
    for command in commands[:2]:
        assert main([*command, "--offline"]) == 0
    assert f"wrote {GENERATED}" in capsys.readouterr().out
