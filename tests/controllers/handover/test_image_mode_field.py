"""The field ``imageMode`` of an install configuration, and what users write into it by mistake."""

import pytest

from treenail.controllers.handover.image_mode import (
    ImageMode,
    ImageModePool,
    RegistryType,
    WorkerMode,
)
from treenail.controllers.handover.image_mode_field import ParsedImageMode, parse_image_mode
from treenail.errors import ConfigError

VALID = """\
apiVersion: v1  # the installer's
imageMode:
  enabled: true
  registry: {type: External}
  workers: Follow
  pools:
  - name: master
    containerFile: Containerfile.master
    renderedImagePushSpec: registry.example.com/os/master:latest
  - name: worker
    renderedImagePushSpec: registry.example.com/os/worker:latest
metadata:
  name: demo
"""


def parse(text: str) -> ParsedImageMode:
    return parse_image_mode(text, where="install-config.yaml")


def find_problems(field: str) -> list[str]:
    problems = parse(f"apiVersion: v1\nimageMode:{field}").problems
    return [f"{problem}; {problem.remedy}" for problem in problems]


def test_field_with_all_settings_is_read() -> None:
    parsed = parse(VALID)
    assert parsed.problems == ()
    assert parsed.settings == ImageMode(
        registry=RegistryType.EXTERNAL,
        workers=WorkerMode.FOLLOW,
        pools=(
            ImageModePool(
                "master", "Containerfile.master", "registry.example.com/os/master:latest"
            ),
            ImageModePool("worker", "", "registry.example.com/os/worker:latest"),
        ),
    )
    assert parsed.pool_lines == (7, 10)


def test_file_without_the_field_has_no_settings() -> None:
    assert parse("apiVersion: v1\n").settings is None


def test_json_file_is_read() -> None:
    assert parse('{"imageMode": {"enabled": false}}').settings == ImageMode(is_enabled=False)


def test_field_behind_an_anchor_is_read_with_the_line_of_its_alias() -> None:
    text = "x: &x\n  enabled: 3\nimageMode: *x\n"
    assert [each.line for each in parse(text).problems] == [3]


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        (" 3", "line 2: expected an object"),
        ("", "line 2: expected an object"),
        ("\n  enabled: maybe", "line 3: imageMode.enabled: expected true or false, found 'maybe'"),
        ("\n  regisrty: {}", "line 3: unknown field imageMode.regisrty"),
        ("\n  regisrty: {}", "rename it to registry"),
        ("\n  registry:\n    type: Foo", "line 4: imageMode.registry.type: expected Bootstrap or"),
        ("\n  registry:\n    port: 1", "line 4: unknown field imageMode.registry.port"),
        ("\n  workers: 3", "line 3: imageMode.workers: expected Wait or Follow, found 3"),
        ("\n  pools: {}", "line 3: expected a list of pools"),
        ("\n  pools:\n  - 3", "line 4: expected an object"),
        ("\n  pools:\n  - containerFile: x", "line 4: the pool has no name"),
        ("\n  pools:\n  - name: [x]", "line 4: imageMode.pools[0].name: expected a string"),
        ("\n  pools:\n  - name: a\n", "line 4: pool a has no renderedImagePushSpec"),
        (
            "\n  pools:\n  - name: a\n    renderedImagePushSpec: a.b/c@sha256:00",
            "line 5: renderedImagePushSpec is 'a.b/c@sha256:00', but it names a digest",
        ),
        ("\n  pools:\n  - name: a\n    renderedImagePushSpec: a.b/c", "but it has no tag"),
        ("\n  pools:\n  - name: a\n  - name: a\n", "line 5: pool a is listed a second time, first"),
    ],
)
def test_wrong_field_is_a_problem_with_its_line(field: str, expected: str) -> None:
    assert any(expected in each for each in find_problems(field))


def test_several_mistakes_are_all_found() -> None:
    found = find_problems("\n  enabled: 3\n  workers: x\n  pools:\n  - name: a\n  other: 1")
    assert len(found) == 4


def test_long_name_is_cut_in_the_message() -> None:
    assert all(
        len(each) < 500 for each in find_problems(f"\n  {'x' * 900}: 1\n  workers: {'y' * 9000}")
    )


@pytest.mark.parametrize("text", ["a: [", "a: 1\n---\nb: 2\n", "- 1\n", "a: 1\na: 2\n", "\xff"])
def test_file_that_is_no_yaml_object_is_an_error_with_its_name(text: str) -> None:
    with pytest.raises(ConfigError, match=r"install-config\.yaml"):
        parse_image_mode(text.encode("latin-1"), where="install-config.yaml")


def test_yaml_bomb_is_an_error() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    with pytest.raises(ConfigError, match="too large"):
        parse("\n".join([*lines, "imageMode: *a9\n"]))
