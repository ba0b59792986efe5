"""``treenail-controller hosted release``: from files to the config of a NodePool."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.controllers.hosted.config.inputs import BASE, IMAGES, make_inputs
from treenail.cli import output
from treenail.cli.controller.main import main
from treenail.controllers.hosted.config import generator


@pytest.fixture(name="words")
def _words(tmp_path: Path) -> list[str]:
    base = tmp_path / "base"
    base.mkdir()
    for number, config in enumerate(BASE):
        (base / f"{number}.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "images.yaml").write_text(yaml.safe_dump(IMAGES))
    return ["hosted", "release", "--configs", str(base), "--images", str(tmp_path / "images.yaml")]


def run(words: list[str], capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    assert main(words) == 0
    printed = capsys.readouterr()
    assert not printed.err
    return [*yaml.safe_load_all(printed.out)]


def test_printed_release_is_the_base_of_a_pool(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    made = run(words, capsys)
    config = generator.generate_config(make_inputs(release_config_maps=made))
    assert config == generator.generate_config(make_inputs())


def test_login_of_another_cluster_is_refused_without_its_contents(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.dumps(BASE[0]).replace("/etc/base", "/var/lib/kubelet/config.json")
    (tmp_path / "base/0.yaml").write_text(config.replace("data:,base", "data:,topsecret"))
    assert main(words) == output.EXIT_FAILED
    printed = capsys.readouterr()
    assert "0.yaml, document 1, MachineConfig 00-worker: expected a MachineConfig" in printed.err
    assert "topsecret" not in printed.err + printed.out


def test_bad_files_are_errors_with_their_place(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "base/2.yaml").write_text("[]")
    assert main(words) == 1
    assert "2.yaml: expected an object" in capsys.readouterr().err
    (tmp_path / "base/2.yaml").unlink()
    (tmp_path / "images.yaml").unlink()
    assert main(words) == output.EXIT_USAGE
    assert "cannot read" in capsys.readouterr().err
