"""Grammar of push specs."""

import pytest

from treenail.api.pullspec import parse_pull_spec, parse_push_spec
from treenail.errors import ConfigError

DIGEST = "sha256:" + 64 * "a"


@pytest.mark.parametrize(
    "text",
    [
        "registry.example.com/os:latest",
        "registry.example.com:5000/a/b/c/d/os:v1.2_3-x",
        "localhost:5000/os:1",
        "registry:5000/os:1",
        "image-registry.openshift-image-registry.svc:5000/openshift-mco/os:latest",
    ],
)
def test_push_spec_is_also_pulled_by_digest(text: str) -> None:
    spec = parse_push_spec(text, where="renderedImagePushSpec")
    assert str(spec) == text
    pulled = parse_pull_spec(spec.make_pull_spec(DIGEST), where="image")
    assert (pulled.registry, pulled.repository) == (spec.registry, spec.repository)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it has no tag"),
        ("registry.example.com/os", "it has no tag"),
        ("registry.example.com:5000/os", "it has no tag"),
        (f"registry.example.com/os@{DIGEST}", "it names a digest"),
        (f"registry.example.com/os:v1@{DIGEST}", "it names a digest"),
        ("registry.example.com/os:", "its tag"),
        ("registry.example.com/os:-x", "its tag"),
        ("registry.example.com/os:" + 129 * "x", "its tag"),
        ("os:latest", "it does not start with a registry host and a /"),
        ("docker://registry.example.com/os:latest", "transport"),
        ("registry.example.com/OS:latest", "lower-case"),
        ("registry.example.com/os:a:b", "it has more than one tag"),
        ("registry.example.com/" + 400 * "x" + ":v1", "longer than 375 characters"),
        ("registry.example.com/" + 430 * "x" + ":v1", "longer than 447 characters"),
        ("registry.example.com/a\nb:v1", "lower-case"),
    ],
)
def test_anything_else_is_rejected_with_an_example(text: str, why: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_push_spec(text, where="spec.renderedImagePushSpec")
    message = str(raised.value)
    assert message.startswith("spec.renderedImagePushSpec is ")
    assert why in message
    assert "\n" not in message
    assert "REGISTRY/REPOSITORY:TAG" in raised.value.remedy
