"""The plan of an installation, and the checks of the bootstrap host."""

import json
import os
import socket
from pathlib import Path

import pytest

from tests.fakes.clock import FakeClock
from tests.installer.directories import (
    BASE,
    list_texts,
    make_config,
    make_image_config,
    make_pool,
    write_manifest,
)
from treenail.api import annotations as key
from treenail.cli.controller.main import main
from treenail.controllers.handover.image_mode import ImageMode, RegistryType, WorkerMode
from treenail.controllers.handover.image_mode_field import build_settings_configmap
from treenail.controllers.image_build.build_planner import plan_builds
from treenail.controllers.render.render import render_pools
from treenail.installer.bootstrap.host_checks import HostChecker
from treenail.installer.directory.install_files import InstallDirectory
from treenail.installer.directory.install_manifests import read_install_manifests
from treenail.installer.install_plan import (
    InstallImageSource,
    PlanFacts,
    PoolInstallPlan,
    estimate_build,
    plan_install,
)

TEXT = "FROM configs AS final\nRUN dnf install -y httpd\nRUN x\n"


def write_directory(root: Path, settings: ImageMode | None = None) -> None:
    """Write pools master with a Containerfile, worker without, and storage without an image."""
    master = make_image_config("master")
    master["spec"]["containerFile"] = [{"containerfileArch": "NoArch", "content": TEXT}]  # type: ignore[index]
    for pool in ("master", "worker", "storage"):
        config = make_config(f"10-{pool}", pool, osImageURL=BASE)
        write_manifest(root, f"manifests/{pool}.yaml", make_pool(pool), config)
    objects = [master, make_image_config("worker")]
    objects += [build_settings_configmap(settings)] if settings else []
    write_manifest(root, "manifests/images.yaml", *objects)


def plan(root: Path, facts: PlanFacts | None = None) -> dict[str, PoolInstallPlan]:
    found = plan_install(read_install_manifests(root), facts or PlanFacts(), FakeClock())
    return {each.name: each for each in found}


def test_plan_names_images_hosts_and_rendered_configs(tmp_path: Path) -> None:
    write_directory(tmp_path)
    plans = plan(tmp_path, PlanFacts(base_sizes={BASE: 800_000_000}))
    assert list(plans) == ["master", "storage", "worker"]
    master, worker, storage = plans["master"], plans["worker"], plans["storage"]
    assert (master.source, master.host) == (InstallImageSource.BUILD, "bootstrap host")
    assert (worker.source, worker.host) == (InstallImageSource.LAYER, "the new control plane")
    assert (storage.source, storage.reboots) == (InstallImageSource.NONE, 0)
    assert master.estimate.seconds == 10 + 2 * 45 + 40
    assert not any(each.problems for each in plans.values())


def test_plan_has_the_names_of_render_and_build(tmp_path: Path) -> None:
    write_directory(tmp_path)
    found = read_install_manifests(tmp_path)
    plans = plan(tmp_path)
    rendered, _ = render_pools(found.to_input())
    assert {each.name for each in rendered} == {each.rendered for each in plans.values()}
    builds = plan_builds(
        list_texts(found),
        FakeClock(),
        architectures=frozenset({"amd64"}),
        only=None,
        resolve_tag=lambda *_: "",
    )
    for build in builds:
        assert build.plan.wanted.content_key == plans[build.pool].content_key


def test_directory_without_machine_configs_has_notes_instead_of_names(tmp_path: Path) -> None:
    write_manifest(tmp_path, "manifests/a.yaml", make_pool("master"), make_image_config("master"))
    master = plan(tmp_path)["master"]
    assert (master.rendered, master.problems) == ("", ())
    assert "the installer adds them" in master.notes[0]


@pytest.mark.parametrize(
    ("settings", "pool", "expected"),
    [
        (ImageMode(), "master", "the bootstrap registry, a mirror of the push spec by digest"),
        (
            ImageMode(registry=RegistryType.EXTERNAL),
            "master",
            "the registry that registry.example.com/os/master:latest names",
        ),
        (ImageMode(), "worker", "until the image exists, for at most 60 min, it answers 503"),
        (ImageMode(workers=WorkerMode.FOLLOW), "worker", "boot the stock image"),
    ],
)
def test_first_boot_depends_on_the_settings(
    tmp_path: Path, settings: ImageMode, pool: str, expected: str
) -> None:
    write_directory(tmp_path, settings)
    assert any(expected in each for each in plan(tmp_path)[pool].first_boot)


def test_prebuilt_image_is_not_built(tmp_path: Path) -> None:
    config = make_image_config("layered", annotations={key.PRE_BUILT_IMAGE: BASE})
    write_manifest(tmp_path, "manifests/a.yaml", make_pool("layered"), config)
    found = plan(tmp_path)["layered"]
    assert (found.source, found.image, found.host) == (InstallImageSource.PREBUILT, BASE, "")


def test_registry_of_the_cluster_makes_workers_boot_the_stock_image(tmp_path: Path) -> None:
    write_directory(tmp_path)
    path = tmp_path / "manifests/images.yaml"
    spec = "registry.example.com/os/worker"
    path.write_text(path.read_text().replace(spec, "registry.openshift.svc:5000/os/worker"))
    assert "is not reachable before the machine joins" in plan(tmp_path)["worker"].first_boot[1]


def test_files_that_no_image_carries_are_named(tmp_path: Path) -> None:
    write_directory(tmp_path)
    files = [{"path": "/var/lib/x", "contents": {"source": "data:,x"}}]
    config = {"ignition": {"version": "3.5.0"}, "storage": {"files": files}}
    write_manifest(tmp_path, "manifests/a.yaml", make_config("20-x", "master", config=config))
    assert "/var/lib/x" in plan(tmp_path)["master"].first_boot[-1]


def test_base_by_tag_and_conflicting_configs_are_problems_of_the_pool(tmp_path: Path) -> None:
    write_directory(tmp_path)
    write_manifest(
        tmp_path, "manifests/a.yaml", make_config("20-x", "master", osImageURL="r.example/os:tag")
    )
    (problem,) = plan(tmp_path)["master"].problems
    assert "osImageURL" in problem


@pytest.mark.parametrize(
    ("texts", "size", "measured", "expected"),
    [
        ([], None, None, 2),
        (["FROM a\n"], 400_000_000, None, 30),
        (["FROM a\nRUN x\n"], None, None, 115),
        (["FROM a\nRUN x\n"], None, 33.4, 33),
        ([], None, 0.1, 1),
    ],
)
def test_estimate_counts_instructions_and_bytes(
    texts: list[str], size: int | None, measured: float | None, expected: int
) -> None:
    assert estimate_build(texts, base_size=size, measured_s=measured).seconds == expected


def check_host(root: Path, settings: ImageMode | None = None, **options: object) -> list[str]:
    checker = HostChecker(FakeClock(), ports=(), architecture="amd64", **options)  # type: ignore[arg-type]
    plans = [PoolInstallPlan("master", source=InstallImageSource.BUILD)]
    return checker.find_problems(InstallDirectory(root), settings or ImageMode(), plans, 0)


def test_missing_programs_of_the_bootstrap_host_are_problems(tmp_path: Path) -> None:
    found = check_host(tmp_path, find_program=lambda _: None)
    assert any("buildah is not installed" in each for each in found)
    assert any("docker-registry" in each for each in found)
    external = check_host(
        tmp_path, ImageMode(registry=RegistryType.EXTERNAL), find_program=lambda _: None
    )
    assert not any("docker-registry" in each for each in external)


def test_too_little_space_is_a_problem(tmp_path: Path) -> None:
    checker = HostChecker(FakeClock(), ports=(), find_program=lambda name: name)
    plans = [PoolInstallPlan("master", source=InstallImageSource.BUILD)]
    found = checker.find_problems(InstallDirectory(tmp_path), ImageMode(), plans, 10**15)
    assert any("the build needs about 4000000.0 GB" in each for each in found)


def test_port_in_use_is_a_problem(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        checker = HostChecker(FakeClock(), ports=(port, port), find_program=lambda name: name)
        found = checker.find_problems(InstallDirectory(tmp_path), ImageMode(), [], 0)
    assert any(f"port {port} is in use" in each for each in found)


def test_clock_that_is_a_day_behind_is_a_problem_about_certificates(tmp_path: Path) -> None:
    write_directory(tmp_path)
    clock = FakeClock()
    for each in (tmp_path / "manifests").iterdir():
        os.utime(each, (clock.now() + 86400, clock.now() + 86400))
    assert any("refuse the certificates" in each for each in check_host(tmp_path))


def test_host_of_another_architecture_cannot_build() -> None:
    checker = HostChecker(FakeClock(), architecture="amd64")
    (problem,) = checker.check_architectures({"master": "arm64", "arbiter": "amd64"})
    assert "image of pool master for arm64 on this host, which is amd64" in problem


def test_command_prints_plan_and_reasons(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_directory(tmp_path)
    arguments = ["install", "plan", "--dir", str(tmp_path), "--offline"]
    assert main(arguments) == 1
    text = capsys.readouterr().out
    assert "pool master\n  config:     rendered-master-" in text
    assert "the installation would fail, 2 reasons:" in text
    assert "names Secret push, which no manifest has" in text
    assert main([*arguments, "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["pools"][0]["expectedSeconds"] == 160
    assert len(document["problems"]) == 2


def test_command_shows_the_seconds_of_the_last_build(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_directory(tmp_path)
    step = {"name": "build:master", "state": "done", "began": "2026-01-01T00:00:00Z",
            "ended": "2026-01-01T00:01:17Z"}  # fmt: skip
    path = InstallDirectory(tmp_path).state
    path.parent.mkdir()
    path.write_text(json.dumps({"steps": [step]}))
    main(["install", "plan", "--dir", str(tmp_path), "--offline", "--json"])
    assert json.loads(capsys.readouterr().out)["pools"][0]["expectedSeconds"] == 77
    path.write_text('{"steps": [3]}')
    main(["install", "plan", "--dir", str(tmp_path), "--offline", "--json"])
    assert json.loads(capsys.readouterr().out)["pools"][0]["expectedSeconds"] == 160


def test_command_plans_a_directory_that_is_not_prepared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pools = "".join(
        f"  - name: {each}\n    renderedImagePushSpec: r.example/os/{each}:1\n"
        for each in ("master", "worker")
    )
    logins = json.dumps({"auths": {"r.example": {"auth": "dTpw"}}})
    text = f"imageMode:\n  pools:\n{pools}pullSecret: '{logins}'\n"
    (tmp_path / "install-config.yaml").write_text(text)
    assert main(["install", "plan", "--dir", str(tmp_path), "--offline"]) == 0
    command = f"treenail-controller install prepare --dir {tmp_path}"
    assert f"note: this is the plan after: {command}" in capsys.readouterr().out
    assert not (tmp_path / "manifests").exists()
    assert main(["install", "prepare", "--dir", str(tmp_path), "--offline"]) == 0
    capsys.readouterr()
    assert main(["install", "plan", "--dir", str(tmp_path), "--offline", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["isPrepared"]
