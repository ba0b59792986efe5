"""Manifests of an install directory: what is read, and which files are refused."""

import os
from pathlib import Path

import pytest

from tests.installer.directories import (
    list_texts,
    make_config,
    make_image_config,
    make_pool,
    write_manifest,
)
from tests.oracle import ROOT as ORACLE
from tests.oracle import needs_oracle
from treenail.controllers.handover.image_mode import ImageMode, ImageModePool, RegistryType
from treenail.controllers.handover.image_mode_field import (
    build_settings_configmap,
    read_settings_configmap,
)
from treenail.controllers.image_build.cluster_reader import FileObjects
from treenail.controllers.render.render import render_pools
from treenail.errors import ConfigError
from treenail.installer.directory.install_manifests import (
    FILE_LIMIT,
    collect_install_manifests,
    read_install_manifests,
)
from treenail.installer.directory.problems import (
    MAX_REPORTED,
    InstallDirectoryError,
    InstallProblem,
)

SETTINGS = ImageMode(
    registry=RegistryType.EXTERNAL,
    pools=(
        ImageModePool("master", "a/Containerfile", "registry.example.com/os/master:latest"),
        ImageModePool("worker", "", "registry.example.com/os/worker:latest"),
    ),
)


def find_problems(root: Path) -> list[str]:
    return [str(each) for each in collect_install_manifests(root)[1]]


def test_documents_of_both_directories_are_read_with_file_and_line(tmp_path: Path) -> None:
    write_manifest(tmp_path, "manifests/a.yaml", {"kind": "DNS"}, make_pool("worker"))
    listed = {"apiVersion": "v1", "kind": "List", "items": [make_config("10-a", "worker")]}
    write_manifest(tmp_path, "openshift/b.yml", listed)
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "a", "namespace": "x"}}
    write_manifest(tmp_path, "manifests/pull-secret", secret)
    found = read_install_manifests(tmp_path)
    pool = found.find("MachineConfigPool", "worker")
    assert pool.location == "manifests/a.yaml, line 6"
    assert list(found.configs) == ["10-a"]
    assert found.find("Secret", "a", "x") is not None
    rendered, errors = render_pools(found.to_input())
    assert [len(rendered), errors] == [1, []]
    assert len(FileObjects(list_texts(found)).list_image_configs()) == 0


def test_directory_without_manifests_has_no_objects(tmp_path: Path) -> None:
    assert read_install_manifests(tmp_path).objects == {}


def test_object_of_another_group_with_a_known_kind_is_ignored(tmp_path: Path) -> None:
    write_manifest(tmp_path, "manifests/a.yaml", {"apiVersion": "x.example/v1", "kind": "Secret"})
    assert read_install_manifests(tmp_path).objects == {}


@pytest.mark.parametrize("names", [("a.yaml", "b.yaml"), ("b.yaml", "a.yaml")])
def test_pool_of_the_user_replaces_a_built_in_pool(tmp_path: Path, names: tuple[str, str]) -> None:
    write_manifest(tmp_path, f"manifests/{names[0]}", make_pool("worker", is_built_in=True))
    write_manifest(tmp_path, f"manifests/{names[1]}", make_pool("worker", maxUnavailable=3))
    found = read_install_manifests(tmp_path)
    assert found.pools["worker"].max_unavailable == 3
    pool = found.find("MachineConfigPool", "worker")
    assert pool.file == f"manifests/{names[1]}"


def test_two_pools_of_the_user_with_one_name_are_a_problem_that_names_both_files(
    tmp_path: Path,
) -> None:
    write_manifest(tmp_path, "manifests/a.yaml", make_pool("worker"))
    write_manifest(tmp_path, "manifests/b.yaml", make_pool("worker"))
    (problem,) = find_problems(tmp_path)
    assert problem.startswith("manifests/b.yaml, line 2: MachineConfigPool worker: it exists twice")
    assert "manifests/a.yaml, line 2" in problem


def test_two_image_configs_for_one_pool_are_a_problem_that_names_both_files(
    tmp_path: Path,
) -> None:
    write_manifest(tmp_path, "manifests/a.yaml", make_image_config("worker"))
    write_manifest(tmp_path, "manifests/b.yaml", make_image_config("worker", name="zzz"))
    (problem,) = find_problems(tmp_path)
    assert "manifests/a.yaml, line 2" in problem
    assert problem.startswith("manifests/b.yaml, line 2: MachineOSConfig zzz: pool worker has")


def test_image_config_with_a_name_unlike_its_pool_is_a_problem(tmp_path: Path) -> None:
    write_manifest(tmp_path, "manifests/a.yaml", make_image_config("worker", name="zzz"))
    (problem,) = find_problems(tmp_path)
    assert "rename it to worker" in problem


def test_file_name_in_both_directories_is_a_problem(tmp_path: Path) -> None:
    write_manifest(tmp_path, "manifests/a.yaml", make_pool("worker"))
    write_manifest(tmp_path, "openshift/a.yaml", make_pool("master"))
    (problem,) = find_problems(tmp_path)
    assert problem.startswith("openshift/a.yaml: the file name exists twice, also as manifests/a")


def test_link_out_of_the_directory_is_a_problem_and_one_inside_is_read(tmp_path: Path) -> None:
    root = tmp_path / "dir"
    outside = write_manifest(tmp_path, "outside.yaml", make_pool("worker"))
    inside = write_manifest(root, "kept/pool.yaml", make_pool("master"))
    (root / "manifests").mkdir()
    (root / "manifests/a.yaml").symlink_to(outside)
    (root / "manifests/b.yaml").symlink_to(inside)
    found, problems = collect_install_manifests(root)
    assert [each.file for each in problems] == ["manifests/a.yaml"]
    assert "leads out of the install directory" in problems[0].text
    assert list(found.pools) == ["master"]


def test_directory_of_manifests_elsewhere_is_a_problem(tmp_path: Path) -> None:
    root = tmp_path / "dir"
    root.mkdir()
    write_manifest(tmp_path, "outside/a.yaml", make_pool("worker"))
    (root / "manifests").symlink_to(tmp_path / "outside")
    (problem,) = find_problems(root)
    assert problem.startswith("manifests: it is a link that leads out")


def test_link_to_itself_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "manifests").mkdir()
    (tmp_path / "manifests/a.yaml").symlink_to("a.yaml")
    (problem,) = find_problems(tmp_path)
    assert problem.startswith("manifests/a.yaml: cannot read it")


def test_pipe_is_a_problem_and_blocks_nothing(tmp_path: Path) -> None:
    (tmp_path / "manifests").mkdir()
    os.mkfifo(tmp_path / "manifests/a.yaml")
    (problem,) = find_problems(tmp_path)
    assert "it is a pipe, a socket or a device" in problem


def test_other_files_backups_and_directories_are_ignored(tmp_path: Path) -> None:
    for name in ("README.md", ".a.yaml.swp", "a.yaml~", "sub/b.yaml"):
        write_manifest(tmp_path, f"manifests/{name}", "[")
    found, problems = collect_install_manifests(tmp_path)
    assert problems == []
    assert found.notes == [
        "manifests/README.md: ignored: no manifest",
        "manifests/sub: ignored: no manifest",
    ]


def test_objects_and_fields_without_effect_are_notes_and_mistakes_are_problems(
    tmp_path: Path,
) -> None:
    own = "machineconfiguration.openshift.io/v1"
    unread = {"apiVersion": own, "kind": "InternalReleaseImage", "metadata": {"name": "cluster"}}
    config = make_config("50-a", "worker")
    write_manifest(tmp_path, "manifests/a.yaml", unread, {**config, "kind": "MachineConfg"})
    write_manifest(tmp_path, "manifests/b.yaml", {**config, "kinds": "MachineConfig"})
    write_manifest(tmp_path, "manifests/c.yaml", {**config, "apiVersion": "v1"})
    found, problems = collect_install_manifests(tmp_path)
    unread_note, field_note = found.notes
    assert unread_note.startswith(
        "manifests/a.yaml, line 2, InternalReleaseImage: ignored: treenail reads"
    )
    assert field_note.startswith(
        "manifests/b.yaml, line 2, MachineConfig 50-a: kinds: ignored: unk"
    )
    texts = [problem.text for problem in problems]
    assert texts == ["unknown kind 'MachineConfg'", f"expected apiVersion {own}, found v1"]


def test_manifest_of_64_mb_is_a_problem_with_its_size(tmp_path: Path) -> None:
    (tmp_path / "manifests").mkdir()
    with (tmp_path / "manifests/a.yaml").open("wb") as stream:
        stream.truncate(64 * 1000 * 1000)
    (problem,) = find_problems(tmp_path)
    assert "it has 61 MiB, more than the limit of 16 MiB" in problem


def test_many_large_manifests_are_a_problem(tmp_path: Path) -> None:
    (tmp_path / "manifests").mkdir()
    for number in range(12):
        path = tmp_path / f"manifests/{number}.yaml"
        path.write_bytes(b"#" * (FILE_LIMIT - 1))
    assert any("128 MiB" in each for each in find_problems(tmp_path))


def test_manifests_of_millions_of_values_are_one_problem(tmp_path: Path) -> None:
    """A file of 15 MB took the parser half a minute."""
    (tmp_path / "manifests").mkdir()
    for name in ("a.yaml", "b.yaml", "c.yaml"):
        (tmp_path / "manifests" / name).write_text("a:\n" + "- 1\n" * 500)
    _, problems = collect_install_manifests(tmp_path, value_limit=1000)
    (problem,) = problems
    assert str(problem) == (
        "manifests/b.yaml, line 496: the manifests have more than 1000 keys and values; remove the "
        "manifests that are not needed"
    )


def test_yaml_bomb_and_broken_files_are_problems_and_the_rest_is_read(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    write_manifest(tmp_path, "manifests/z.yaml", make_pool("worker"))
    (tmp_path / "manifests/bomb.yaml").write_text("\n".join(lines))
    (tmp_path / "manifests/broken.yaml").write_text("a: [\n")
    (tmp_path / "manifests/latin.yaml").write_bytes(b"a: \xff\n")
    (tmp_path / "manifests/text.yaml").write_text("hello\n")
    found, problems = collect_install_manifests(tmp_path)
    names = ["bomb", "broken", "latin", "text"]
    assert [each.file for each in problems] == [f"manifests/{name}.yaml" for name in names]
    assert list(found.pools) == ["worker"]


def test_invalid_objects_are_all_problems(tmp_path: Path) -> None:
    wrong: list[dict[str, object]] = [
        {**make_pool("a"), "apiVersion": "machineconfiguration.openshift.io/v1alpha1"},
        {**make_pool("b"), "metadata": {}},
        make_pool("c", maxUnavailabel=1),
        make_config("d", "worker", osImageURL=3),
        {**make_image_config("e"), "spec": {"containerFile": 3}},
    ]
    write_manifest(tmp_path, "manifests/a.yaml", *wrong)
    found, problems = collect_install_manifests(tmp_path)
    assert len(problems) == len(wrong)
    assert "maxUnavailabel" in problems[2].text
    assert found.image_configs == {}


def test_message_has_a_limited_number_of_problems() -> None:
    problems = [InstallProblem("a", "x", "y", number) for number in range(1, 9999)]
    error = InstallDirectoryError("cannot prepare DIR", problems)
    assert len(error.list_lines()) == MAX_REPORTED + 2
    assert error.list_lines()[0] == "cannot prepare DIR: 9998 problems"
    assert len(str(error)) < 5000


def test_settings_survive_the_configmap(tmp_path: Path) -> None:
    document = build_settings_configmap(SETTINGS)
    assert read_settings_configmap(document, where="x") == SETTINGS
    write_manifest(tmp_path, "manifests/a.yaml", document)
    assert read_install_manifests(tmp_path).settings == SETTINGS


@pytest.mark.parametrize("text", ["", "{", "3", '{"a": 1}', '{"pools": 3}', "{}\nx: 1"])
def test_invalid_settings_in_the_configmap_are_an_error(text: str) -> None:
    with pytest.raises(ConfigError):
        read_settings_configmap(
            {**build_settings_configmap(SETTINGS), "data": {"imageMode": text}}, where="x"
        )


@needs_oracle
def test_recorded_install_directory_of_the_mco_is_read(tmp_path: Path) -> None:
    (tmp_path / "manifests").mkdir()
    for path in (ORACLE / "bootstrap/input").iterdir():
        (tmp_path / "manifests" / path.name).write_bytes(path.read_bytes())
    found = read_install_manifests(tmp_path)
    assert sorted(found.pools) == ["layered-worker", "master", "worker"]
    assert sorted(found.image_configs) == ["layered-worker"]
    assert found.find("Secret", "pull-secret", "openshift-config") is not None
    assert list(found.controller_configs) == ["machine-config-controller"]
