"""The stage ``prepare``: one run at a time, links, and the places that its problems name."""

import json
import multiprocessing
import os
import shutil
from pathlib import Path

import pytest

from tests.installer.directories import (
    DIGEST,
    make_config,
    make_image_config,
    make_pool,
    write_manifest,
)
from tests.installer.test_prepare import (
    FIELD,
    GENERATED,
    HEAD,
    TAIL,
    find_problems,
    make_secret,
    prepare,
    read_all,
    root,
    write_config,
)
from treenail.cli.controller.main import main
from treenail.errors import HostError
from treenail.installer.directory.install_files import InstallFiles
from treenail.installer.directory.install_manifests import read_install_manifests
from treenail.installer.directory.prepare import PrepareOptions, prepare_directory
from treenail.installer.directory.problems import InstallDirectoryError

__all__ = ["root"]


class WaitingFiles(InstallFiles):
    """Files whose first write tries to prepare the directory a second time."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.found: list[str] = []

    def write(self, path: Path, content: bytes, *, mode: int = 0o600) -> bool:
        if not self.found:
            context = multiprocessing.get_context("fork")
            reader, writer = context.Pipe(duplex=False)
            child = context.Process(target=prepare_again, args=(self.root, writer))
            child.start()
            self.found.append(reader.recv())
            child.join(10)
        return super().write(path, content, mode=mode)


def prepare_again(root: Path, writer: "multiprocessing.connection.Connection") -> None:
    try:
        prepare(root)
        writer.send("prepared")
    except HostError as error:
        writer.send(f"{error}; {error.remedy}")


@pytest.mark.process
def test_second_run_at_the_same_time_is_refused(root: Path) -> None:
    files = WaitingFiles(root)
    prepare_directory(root, PrepareOptions(), files)
    (answer,) = files.found
    assert answer == (
        f"cannot prepare {root}: another process prepares it; wait until it has ended, and run the "
        "command again"
    )
    assert sorted(each.name for each in root.iterdir()) == [
        "Containerfile", "install-config.yaml", "manifests",
    ]  # fmt: skip
    assert len(prepare(root)) == 1


def test_link_to_an_install_config_in_the_directory_stays_a_link(root: Path) -> None:
    (root / "install-config.yaml").rename(root / "mine.yaml")
    (root / "install-config.yaml").symlink_to("mine.yaml")
    prepare(root)
    assert (root / "install-config.yaml").is_symlink()
    assert (root / "mine.yaml").read_text() == HEAD + TAIL


@pytest.mark.parametrize("name", ["install-config.yaml", GENERATED])
def test_link_that_leads_out_of_the_directory_is_a_problem(root: Path, name: str) -> None:
    target = root.parent / "template.yaml"
    (root / "manifests").mkdir()
    if (root / name).exists():
        shutil.move(root / name, target)
    else:
        target.write_text("")
    (root / name).symlink_to(target)
    found = find_problems(root)
    assert any(f"{name}: it is a link that leads out of the install dir" in each for each in found)
    assert any("cp --remove-destination" in each for each in found)


def test_link_to_a_missing_file_is_a_problem(root: Path) -> None:
    (root / "install-config.yaml").unlink()
    (root / "install-config.yaml").symlink_to("none.yaml")
    assert "it is a link to a file that does not exist" in find_problems(root)[0]


def test_link_among_the_manifests_stays_a_link_when_its_tag_is_removed(tmp_path: Path) -> None:
    note = {"machineconfiguration.openshift.io/pre-built-image": f"r.example/os:v1@{DIGEST}"}
    config = make_image_config("layered", annotations=note)
    write_manifest(tmp_path, "sources/a.yaml", make_pool("layered"), config)
    (tmp_path / "manifests").mkdir()
    (tmp_path / "manifests/a.yaml").symlink_to("../sources/a.yaml")
    prepare(tmp_path)
    assert (tmp_path / "manifests/a.yaml").is_symlink()
    assert f"r.example/os@{DIGEST}" in (tmp_path / "sources/a.yaml").read_text()


@pytest.mark.parametrize(
    ("change", "name", "remedy"),
    [
        ({"containerfile": []}, "spec.containerfile", "did you mean containerFile?"),
        (
            {"containerFile": [{"content": "FROM configs", "arch": "NoArch"}]},
            "spec.containerFile[0].arch",
            "use one of: containerfileArch, content",
        ),
        ({"machineConfigPool": {"name": "master", "nam": 1}}, "spec.machineConfigPool.nam", ""),
        ({"buildInputs": {}}, "spec.buildInputs", "use one of: "),
    ],
)
def test_unknown_field_of_a_machineosconfig_is_a_problem_with_its_line(
    root: Path, change: dict[str, object], name: str, remedy: str
) -> None:
    config = make_image_config("master")
    config["spec"] |= change  # type: ignore[operator]
    path = write_manifest(root, "manifests/a.yaml", make_secret("push"), config)
    found = find_problems(root)
    field = name.rpartition(".")[2]
    lines = path.read_text().splitlines()
    line = max(number for number, text in enumerate(lines, 1) if f'"{field}":' in text)
    expected = f"manifests/a.yaml, line {line}: MachineOSConfig master: {name}: unknown field"
    assert any(each.startswith(expected) and remedy in each for each in found), found


def test_problem_of_an_item_of_a_list_has_the_line_of_its_field(root: Path) -> None:
    config = make_image_config("master")
    config["spec"]["imageBuilder"]["imageBuilderType"] = "Pod"  # type: ignore[index]
    items = {"apiVersion": "v1", "kind": "List", "items": [make_secret("push"), config]}
    path = write_manifest(root, "manifests/a.yaml", items)
    line = next(
        number
        for number, text in enumerate(path.read_text().splitlines(), 1)
        if '"imageBuilderType"' in text
    )
    (problem,) = find_problems(root)
    assert problem.startswith(f"manifests/a.yaml, line {line}: MachineOSConfig master: spec.imageB")


def test_problem_of_an_annotation_has_its_line(root: Path) -> None:
    config = make_image_config("master", annotations={"treenail.io/build-deadline": "1"})
    path = write_manifest(root, "manifests/a.yaml", config, make_secret("push"))
    lines = path.read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if "build-deadline" in text)
    (problem,) = find_problems(root)
    assert problem.startswith(f"manifests/a.yaml, line {line}: MachineOSConfig master: annotation")


def test_problem_of_a_generated_object_names_the_line_of_the_field(root: Path) -> None:
    base = f"registry.example.com/os/worker@{DIGEST}"
    write_manifest(root, "manifests/a.yaml", make_config("10-a", "master", osImageURL=base))
    write_config(root, FIELD.replace("os/master", "os/worker"))
    (problem,) = find_problems(root)
    assert problem.startswith("install-config.yaml, line 9: MachineOSConfig master: spec.rendered")
    assert "is in this repository, which the bootstrap" in problem


def test_problem_of_a_login_names_no_file_that_does_not_exist(root: Path) -> None:
    login = json.dumps({"auths": {"registry.example.com": {"auth": "dQ=="}}})
    (root / "install-config.yaml").write_text(f"{HEAD}{FIELD}pullSecret: '{login}'\n")
    found = find_problems(root)
    assert found
    assert not any(GENERATED in each for each in found)


def test_two_pools_may_push_to_one_repository(root: Path) -> None:
    """Each image has a tag of its own: the tag of the push spec is replaced."""
    write_config(root, FIELD.replace("os/worker", "os/master"))
    prepare(root)
    found = read_install_manifests(root).image_configs
    assert found["master"].push_spec == found["worker"].push_spec


@pytest.mark.parametrize("kind", ["pipe", "directory", "large"])
def test_containerfile_that_is_no_text_file_is_a_problem(root: Path, kind: str) -> None:
    path = root / "Containerfile"
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        with path.open("wb") as file:
            file.truncate(27_000_000)
    expected = {
        "pipe": "line 7: containerFile 'Containerfile': it is a pipe, a socket or a device",
        "directory": "line 7: containerFile 'Containerfile': it is a directory",
        "large": "Containerfile: expected at most 4096 characters, found 27000000 bytes",
    }
    with pytest.raises(InstallDirectoryError) as info:
        prepare(root)
    assert expected[kind] in str(info.value)


def test_pipe_among_the_manifests_is_a_problem(root: Path) -> None:
    (root / "manifests").mkdir()
    os.mkfifo(root / "manifests/a.yaml")
    with pytest.raises(InstallDirectoryError, match="it is a pipe, a socket or a device"):
        prepare(root)


def test_pipe_as_ca_is_an_error_and_blocks_nothing(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(root.parent / "ca")
    before = read_all(root)
    assert main(["install", "prepare", "--dir", str(root), "--ca", str(root.parent / "ca")]) != 0
    assert "it is not a regular file" in capsys.readouterr().err
    assert read_all(root) == before


def test_install_config_of_many_values_is_a_problem(root: Path) -> None:
    with (root / "install-config.yaml").open("a") as file:
        file.write("list:\n" + "- 1\n" * 100_001)
    assert "more than 100000 keys and values" in find_problems(root)[0]
