"""Mirrors of registries: which places an image is pulled from, and what rules are read from."""

import pytest

from treenail.api.decode import Json
from treenail.api.machineconfig import MachineConfig
from treenail.config.image_mirrors import (
    DIGEST_ONLY,
    NO_MIRRORS,
    TAG_ONLY,
    ImageMirrors,
    MirrorLocation,
    MirrorRule,
    MirrorsField,
    encode_mirrors,
    parse_registries_conf,
    read_config_mirrors,
    read_mirror_object,
)
from treenail.encoding.codec import read_value
from treenail.errors import ConfigError

CONF = b"""
unqualified-search-registries = []
[[registry]]
location = "quay.io"
[[registry.mirror]]
location = "all.example:5000/quay"
[[registry.mirror]]
location = "digests.example"
pull-from-mirror = "digest-only"
[[registry.mirror]]
location = "tags.example"
pull-from-mirror = "tag-only"
[[registry]]
prefix = "quay.io/release"
location = "source.example/release"
blocked = true
mirror-by-digest-only = true
[[registry.mirror]]
location = "mirror.example/openshift/release"
[[registry]]
prefix = "*.wild.example"
[[registry.mirror]]
location = "mirror.example/wild"
[[registry]]
prefix = "moved.example"
location = "new.example/old"
"""


def parse(content: bytes) -> ImageMirrors:
    return ImageMirrors(parse_registries_conf(content, where="registries.conf"))


@pytest.mark.parametrize(
    ("name", "is_digest", "places"),
    [
        ("quay.io/os/base", True,
         ("all.example:5000/quay/os/base", "digests.example/os/base", "quay.io/os/base")),
        ("quay.io/os/base", False,
         ("all.example:5000/quay/os/base", "tags.example/os/base", "quay.io/os/base")),
        ("quay.io/release/os", True, ("mirror.example/openshift/release/os",)),
        ("quay.io/release", True, ("mirror.example/openshift/release",)),
        ("quay.io/release", False, ()),
        ("quay.io/released/os", False,
         ("all.example:5000/quay/released/os", "tags.example/released/os", "quay.io/released/os")),
        ("a.b.wild.example:8443/os", True, ("mirror.example/wild/os", "a.b.wild.example:8443/os")),
        ("wild.example/os", True, ("wild.example/os",)),
        ("moved.example/os", True, ("new.example/old/os",)),
        ("quay.io.example/os", True, ("quay.io.example/os",)),
    ],
)  # fmt: skip
def test_places_of_an_image_are_those_of_the_longest_prefix(
    name: str, is_digest: bool, places: tuple[str, ...]
) -> None:
    assert parse(CONF).list_places(name, is_digest=is_digest) == places


def test_rules_survive_the_json_of_a_build() -> None:
    mirrors = parse(CONF)
    assert read_value(MirrorsField, encode_mirrors(mirrors), "mirrors") == mirrors
    assert mirrors.list_registries() == (
        "all.example:5000", "digests.example", "mirror.example", "tags.example",
    )  # fmt: skip


@pytest.mark.parametrize(
    "content",
    [
        b"[[registry]]\n",
        b'[[registry]]\nlocation = "a"\n[[registry.mirror]]\n',
        b'[[registry]]\nlocation = "a"\n[[registry.mirror]]\nlocation="b"\npull-from-mirror="x"\n',
        b"registry = 1\n",
        b"[[",
        b"\xff",
    ],
)
def test_invalid_file_is_an_error_that_names_it(content: bytes) -> None:
    with pytest.raises(ConfigError, match=r"registries\.conf"):
        parse(content)


@pytest.mark.parametrize(
    ("kind", "spec", "rule"),
    [
        (
            "ImageDigestMirrorSet",
            {"imageDigestMirrors": [
                {"source": "quay.io/os", "mirrors": ["m.example/os"],
                 "mirrorSourcePolicy": "NeverContactSource"}]},
            MirrorRule("quay.io/os", is_blocked=True,
                       mirrors=(MirrorLocation("m.example/os", pull=DIGEST_ONLY),)),
        ),
        (
            "ImageTagMirrorSet",
            {"imageTagMirrors": [{"source": "quay.io", "mirrors": ["m.example"]}]},
            MirrorRule("quay.io", mirrors=(MirrorLocation("m.example", pull=TAG_ONLY),)),
        ),
        (
            "ImageContentSourcePolicy",
            {"repositoryDigestMirrors": [{"source": "quay.io", "mirrors": ["m.example"]}]},
            MirrorRule("quay.io", mirrors=(MirrorLocation("m.example", pull=DIGEST_ONLY),)),
        ),
    ],
)  # fmt: skip
def test_objects_of_openshift_are_rules(kind: str, spec: Json, rule: MirrorRule) -> None:
    assert list(read_mirror_object({"kind": kind, "spec": spec}, where=kind)) == [rule]


def test_added_rules_extend_those_of_the_same_prefix() -> None:
    first = MirrorRule("quay.io", mirrors=(MirrorLocation("one.example"),))
    second = MirrorRule(
        "quay.io", mirrors=(MirrorLocation("two.example"), MirrorLocation("one.example"))
    )
    third = MirrorRule("ghcr.io", mirrors=(MirrorLocation("two.example"),), is_blocked=True)
    mirrors = ImageMirrors((first,)).add_rules((second, third))
    assert mirrors.list_places("quay.io/a", is_digest=True) == (
        "one.example/a", "two.example/a", "quay.io/a",
    )  # fmt: skip
    assert mirrors.list_places("ghcr.io/a", is_digest=False) == ("two.example/a",)
    assert NO_MIRRORS.add_rules(()) == NO_MIRRORS


def make_config(**files: str) -> MachineConfig:
    listed = [
        {"path": f"/etc/containers/{path}", "contents": {"source": f"data:,{text}"}}
        for path, text in files.items()
    ]
    ignition = {"ignition": {"version": "3.5.0"}, "storage": {"files": listed}}
    document = {"metadata": {"name": "rendered"}, "spec": {"config": ignition}}
    return MachineConfig.from_json(document)


def make_entry(prefix: str, mirror: str) -> str:
    text = f'[[registry]]\nlocation="{prefix}"\n[[registry.mirror]]\nlocation="{mirror}"\n'
    return "".join(f"%{ord(each):02x}" if not each.isalnum() else each for each in text)


def test_drop_in_of_a_config_replaces_an_earlier_entry() -> None:
    config = make_config(**{
        "registries.conf": make_entry("quay.io", "first.example") + make_entry("a.io", "b.io"),
        "registries.conf.d/20.conf": make_entry("quay.io", "third.example"),
        "registries.conf.d/10.conf": make_entry("quay.io", "second.example"),
        "registries.conf.d/30.conf.bak": make_entry("quay.io", "fourth.example"),
        "registries.conf.d/sub/40.conf": make_entry("quay.io", "fifth.example"),
    })  # fmt: skip
    mirrors = read_config_mirrors(config)
    assert mirrors.list_places("quay.io/os", is_digest=True) == ("third.example/os", "quay.io/os")
    assert mirrors.list_places("a.io/os", is_digest=True) == ("b.io/os", "a.io/os")
    assert read_config_mirrors(make_config(other="x")) == NO_MIRRORS
