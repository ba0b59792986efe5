"""Resolution of tags: the registry's client and the fake of other tests have one contract."""

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from tests.controllers.image_build.site import BuildSite, open_site
from tests.fakes.tag_source import FakeTagSource
from tests.fixtures.controllers import CLOCK
from tests.registry.images import make_client, push_image, push_index
from tests.registry.real_registry import RegistryService
from treenail.controllers.image_build.cluster_reader import ClusterReader
from treenail.controllers.image_build.tag_resolver import TagResolver
from treenail.controllers.pools.registry_requests import TagSource
from treenail.image.build_result import BuildReason

pytestmark = pytest.mark.integration

AMD64 = frozenset({"amd64"})


class Place(Protocol):
    """A registry, and what resolves its tags."""

    source: TagSource

    def move_tag(self, content: str) -> tuple[str, str]:
        """Let the tag stand for an image of amd64; return the tag and the image."""

    def change_login(self) -> None:
        """Change the Secret of the login."""


class FakePlace:
    def __init__(self) -> None:
        self.registry = FakeTagSource()
        self.source: TagSource = self.registry

    def move_tag(self, content: str) -> tuple[str, str]:
        tag = "registry.example.com/os/node:stable"
        image = f"registry.example.com/os/node@sha256:{content * 64}"
        self.registry.images[tag] = image
        return tag, image

    def change_login(self) -> None:
        self.registry.version += "x"


class RealPlace:
    def __init__(self, site: BuildSite) -> None:
        self.site = site
        self.source: TagSource = make_resolver(site)

    def move_tag(self, content: str) -> tuple[str, str]:
        image = self.site.move_tag("stable", content, "os/node")
        return f"{self.site.registry.host}/os/node:stable", image

    def change_login(self) -> None:
        self.site.put_secret("login", host="other.example.com")


def make_resolver(site: BuildSite) -> TagResolver:
    return TagResolver(ClusterReader(site.client, CLOCK, namespace=site.namespace), CLOCK)


@pytest.fixture
def site(tmp_path: Path, lab_registry: RegistryService) -> Iterator[BuildSite]:
    with open_site(tmp_path, lab_registry) as found:
        found.put_secret("login")
        yield found


@pytest.fixture(params=["fake", "real"])
def place(request: pytest.FixtureRequest) -> Place:
    if request.param == "fake":
        return FakePlace()
    return RealPlace(request.getfixturevalue("site"))


def test_tag_is_resolved_to_the_digest_that_it_has_now(place: Place) -> None:
    for content in ("a", "b", "a"):
        tag, image = place.move_tag(content)
        for secret in ("", "login"):
            found = place.source.resolve_tag(tag, AMD64, secret)
            assert (found.pull_spec, found.failure) == (image, None)


def test_absent_tag_and_absent_architecture_are_not_found(place: Place) -> None:
    tag, _ = place.move_tag("a")
    for name, architectures in ((f"{tag}-2", AMD64), (tag, frozenset({"amd64", "s390x"}))):
        found = place.source.resolve_tag(name, architectures, "")
        assert found.pull_spec == ""
        assert found.failure is not None
        assert found.failure.reason is BuildReason.BASE_NOT_FOUND
        assert found.failure.message


def test_changed_login_has_another_version(place: Place) -> None:
    before = place.source.compute_access_version("login")
    assert place.source.compute_access_version("login") == before
    place.change_login()
    assert place.source.compute_access_version("login") != before


def test_list_of_manifests_is_resolved_to_its_own_digest(site: BuildSite) -> None:
    client = make_client(site.registry)
    instances = {each: push_image(client, architecture=each) for each in ("amd64", "arm64")}
    index = push_index(client, instances, tag="list")
    client.close()
    tag = f"{site.registry.host}/os/node:list"
    both = frozenset({"amd64", "arm64"})
    found = make_resolver(site).resolve_tag(tag, both, "")
    assert found.pull_spec == f"{site.registry.host}/os/node@{index}"
    missing = make_resolver(site).resolve_tag(tag, both | {"s390x"}, "")
    assert missing.failure is not None
    assert missing.failure.reason is BuildReason.BASE_NOT_FOUND
    assert "linux/s390x" in missing.failure.message


def test_login_for_another_registry_and_absent_secret_are_refused(site: BuildSite) -> None:
    tag = f"{site.registry.host}/os/base:latest"
    site.put_secret("other", host="other.example.com")
    for secret in ("other", "absent"):
        found = make_resolver(site).resolve_tag(tag, AMD64, secret)
        assert found.failure is not None
        assert found.failure.reason is BuildReason.BASE_LOGIN_REFUSED
        assert "password" not in found.failure.message
