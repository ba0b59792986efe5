"""Mirror sets and the image config become the registries.conf of the MCO, or what is wrong."""

import time
from random import Random
from typing import Any

import pytest

from tests.config.generated import runtime_objects
from tests.config.generated.runtime_objects import (
    build_entry,
    build_image_config,
    build_mirrors,
    build_runtime,
)
from treenail.config import image_mirrors
from treenail.config.generated import registries, sources
from treenail.errors import ConfigError

TAGS, POLICIES = "ImageTagMirrorSet", "ImageContentSourcePolicy"
CONF = "/etc/containers/registries.conf"
RELEASE = f"a.example/release/img@sha256:{'0' * 64}"
OS_IMAGE = f"a.example/os/img@sha256:{'1' * 64}"
FACTS = sources.ClusterFacts(release_image=RELEASE, node_images=(OS_IMAGE,))
STRANDED = "the nodes could never update again"
HEAD = """\
unqualified-search-registries = ["a.example", "docker.io"]
short-name-mode = ""
additional-layer-store-auth-helper = ""
"""


def generate(*documents: Any, facts: sources.ClusterFacts = FACTS) -> dict[str, str]:
    base = runtime_objects.build_base()
    found = runtime_objects.read(*documents)
    return {
        file.path: file.contents for file in registries.generate_registry_files(found, base, facts)
    }


def check(*documents: Any, facts: sources.ClusterFacts = FACTS) -> None:
    """Check the first object beside the others."""
    source, *others = runtime_objects.read(*documents)
    registries.check_registries(source, [source, *others], facts)


def list_entries(*documents: Any) -> list[tuple[str, bool, bool, list[str]]]:
    """List scope, insecure, blocked and mirrors with their flags."""
    conf = generate(*documents)[CONF]
    parsed = image_mirrors.RegistriesTable.from_json(
        registries.toml_writer.parse_toml(conf, CONF).values
    )
    return [
        (
            entry.scope,
            entry.is_insecure,
            entry.is_blocked,
            [
                f"{each.location} {each.pull[:-5]}{'!' if each.is_insecure else ''}"
                for each in entry.mirrors
            ],
        )
        for entry in parsed.registries
    ]


def test_mirrors_have_the_bytes_of_the_mco() -> None:
    documents = [
        build_mirrors(
            "a", build_entry("b.example/ns", "m.example/b", "n.example:5000", never=True)
        ),
        build_mirrors("b", build_entry("*.c.example", "m.example/c"), kind=TAGS),
        build_image_config(insecureRegistries=["m.example"], blockedRegistries=["b.example"]),
    ]
    assert generate(*documents) == {
        CONF: f"""\
{HEAD}
[[registry]]
  prefix = ""
  location = "b.example/ns"
  blocked = true

  [[registry.mirror]]
    location = "m.example/b"
    insecure = true
    pull-from-mirror = "digest-only"

  [[registry.mirror]]
    location = "n.example:5000"
    pull-from-mirror = "digest-only"

[[registry]]
  prefix = "*.c.example"

  [[registry.mirror]]
    location = "m.example/c"
    insecure = true
    pull-from-mirror = "tag-only"

[[registry]]
  prefix = ""
  location = "b.example"
  blocked = true

[[registry]]
  prefix = ""
  location = "m.example"
  insecure = true
"""
    }


def test_known_fields_of_the_base_stay() -> None:
    base = runtime_objects.build_base({CONF: """\
credential-helpers = []
short-name-mode = "enforcing"
unknown = 1
[aliases]
"x.y" = "z"
"del\\u007f" = "\\"quoted\\\\"
[[registry]]
location = "b.example"
mirror-by-digest-only = true
[[registry.mirror]]
location = "old.example"
insecure = true
[[registry]]
prefix = "c.example"
location = "d.example"
"""})  # fmt: skip
    found = runtime_objects.read(build_mirrors("a", build_entry("b.example", "m.example")))
    (file,) = registries.generate_registry_files(found, base, FACTS)
    assert (
        file.contents
        == """\
credential-helpers = []
short-name-mode = "enforcing"
additional-layer-store-auth-helper = ""

[[registry]]
  prefix = ""
  location = "b.example"
  mirror-by-digest-only = true

  [[registry.mirror]]
    location = "old.example"
    insecure = true

  [[registry.mirror]]
    location = "m.example"
    pull-from-mirror = "digest-only"

[[registry]]
  prefix = "c.example"
  location = "d.example"

[aliases]
  "x.y" = "z"
  "del\\u007f" = "\\"quoted\\\\"
"""
    )


@pytest.mark.parametrize(
    ("documents", "paths"),
    [
        ([], []),
        ([build_image_config()], []),
        ([build_image_config(allowedRegistries=["a.example"])], []),
        ([build_image_config(blockedRegistries=[])], []),
        # The MCO asks whether the list is there.
        ([build_image_config(insecureRegistries=[])], [CONF]),
        ([build_image_config(insecureRegistries=None)], []),
        ([build_image_config(blockedRegistries=["b.example"])], [CONF]),
        ([build_image_config(blockedRegistries=["a.example"])], []),
        ([build_mirrors("a")], [CONF]),
        (
            [build_image_config(containerRuntimeSearchRegistries=["b.example"])],
            [registries.SEARCH_DROP_IN],
        ),
        ([build_runtime()], []),
        ([build_image_config(name="other", blockedRegistries=["b.example"])], []),
    ],
)
def test_only_files_that_differ_from_the_base_are_written(
    documents: list[Any], paths: list[str]
) -> None:
    assert list(generate(*documents)) == paths


def test_search_registries_have_their_own_file() -> None:
    document = build_image_config(containerRuntimeSearchRegistries=["b.example", "c.example:5000"])
    head = HEAD.replace('"a.example", "docker.io"', '"b.example", "c.example:5000"')
    assert generate(document) == {registries.SEARCH_DROP_IN: head}


@pytest.mark.parametrize(
    ("lists", "mirrors"),
    [
        ([["c", "d"], ["b", "c"]], ["b", "c", "d"]),
        ([["z", "b"], ["a"]], ["a", "z", "b"]),
        # A circle begins with the first name.
        ([["b", "c"], ["c", "b"]], ["b", "c"]),
        ([["s", "b"]], ["s", "b"]),
        ([["b", "s"], ["c"]], ["b", "c"]),
        ([["d", "s", "c"], ["c", "d"]], ["c", "d"]),
        ([["b", "b"]], ["b"]),
    ],
)
def test_mirrors_of_several_sets_have_one_order(lists: list[list[str]], mirrors: list[str]) -> None:
    documents = [
        build_mirrors(f"{number}", build_entry("s.example", *(f"{name}.example" for name in names)))
        for number, names in enumerate(lists)
    ]
    expected = [f"{name}.example digest" for name in mirrors]
    for each in (documents, documents[::-1]):
        assert list_entries(*each) == [("s.example", False, False, expected)]


def test_flags_and_mirrors_reach_the_entries_inside() -> None:
    assert list_entries(
        build_mirrors("a", build_entry("b.example", "m.example/x")),
        build_mirrors("b", build_entry("b.example/ns/own", "n.example"), kind=POLICIES),
        build_mirrors("c", build_entry("b.example", "t.example"), kind=TAGS),
        build_image_config(
            insecureRegistries=["*.example", "b.example:5000"],
            blockedRegistries=["b.example/ns", "x.b.example"],
        ),
    ) == [
        ("b.example", True, False, ["m.example/x digest!", "t.example tag!"]),
        ("b.example/ns/own", True, True, ["n.example digest!"]),
        ("b.example/ns", True, True, ["m.example/x/ns digest!", "t.example/ns tag!"]),
        ("x.b.example", True, True, []),
        ("*.example", True, False, []),
        ("b.example:5000", True, False, []),
    ]


@pytest.mark.parametrize(
    ("scope", "outer", "expected"),
    [
        ("a.example", "a.example", True), ("a.example/ns", "a.example", True),
        ("a.example:5000", "a.example", False), ("a.example", "a.example/ns", False),
        ("a.example/nsx", "a.example/ns", False), ("b.a.example", "*.a.example", True),
        ("a.example", "*.a.example", False), ("*.b.example", "*.example", True),
        ("b.example:5000/ns", "*.example", True), ("b.other/x.example", "*.example", False),
        ("b.other/x.example:v1", "*.example", False),
    ],
)  # fmt: skip
def test_scope_is_inside_another(scope: str, outer: str, *, expected: bool) -> None:
    assert registries.is_inside(scope, outer) is expected


MIRRORED = build_mirrors("m", build_entry("a.example/release", "m.example/r"))


@pytest.mark.parametrize(
    ("documents", "facts", "lists"),
    [
        # Blocked, blocked by policy, allowed.
        ([], FACTS, (None, None, None)),
        ([MIRRORED], FACTS, (("a.example",), ("a.example",), ("a.example/release/img",))),
        ([build_mirrors("m", build_entry("a.example", "a.example/x"))], FACTS, (None, None, None)),
        (
            [build_mirrors("m", build_entry("a.example/release", "m.example/r"), kind=TAGS)],
            FACTS,
            (None, None, None),
        ),
        (
            [MIRRORED],
            sources.ClusterFacts(release_image="a.example/release/img:v1"),
            (None, None, None),
        ),
        (
            [build_mirrors("m", build_entry("a.example/release", "m.example/r"), kind=TAGS)],
            sources.ClusterFacts(release_image="a.example/release/img:v1"),
            (None, None, None),
        ),
        ([], sources.EMPTY_FACTS, (("a.example",), ("a.example",), None)),
    ],
)
def test_release_is_blocked_only_with_a_mirror(
    documents: list[Any], facts: sources.ClusterFacts, lists: Any
) -> None:
    image = build_image_config(blockedRegistries=["a.example"])
    found = registries.read_registry_lists(runtime_objects.read(image, *documents), facts)
    assert (found.blocked, found.policy_blocked, found.allowed) == lists


def test_wildcard_wins_over_a_mirrored_host_of_the_same_length() -> None:
    image = build_image_config(blockedRegistries=["*.example"])
    documents = runtime_objects.read(image, build_mirrors("m", build_entry("a.example", "m.other")))
    assert registries.read_registry_lists(documents, FACTS).blocked is None
    facts = sources.ClusterFacts(release_image=RELEASE.replace("a.", "abc."))
    documents = runtime_objects.read(image, build_mirrors("m", build_entry("abc.example", "m.o")))
    assert registries.read_registry_lists(documents, facts).blocked == ("*.example",)


def test_blocked_release_repository_stays_allowed_by_policy() -> None:
    image = build_image_config(blockedRegistries=["a.example/release/img", "b.example"])
    found = registries.read_registry_lists(runtime_objects.read(image, MIRRORED), FACTS)
    assert found.blocked == ("a.example/release/img", "b.example")
    assert found.policy_blocked == ("b.example",)


def test_list_has_location_and_pull_of_each_mirror() -> None:
    documents = runtime_objects.read(build_mirrors("a", build_entry("b.example", "m.example")))
    (entry,) = registries.list_registries(documents, "")
    assert (entry.scope, entry.location) == ("b.example", "b.example")
    assert [(each.location, each.pull) for each in entry.mirrors] == [("m.example", "digest-only")]


NEVER = build_mirrors("n", build_entry("b.example", "m.example", never=True))


@pytest.mark.parametrize(
    "documents",
    [
        [NEVER],
        [NEVER, build_mirrors("o", build_entry("c.example", "m.example"))],
        # No runtime asks the mirrors of a mirror.
        [
            build_mirrors("a", build_entry("b.example", "c.example")),
            build_mirrors("b", build_entry("c.example", "b.example")),
        ],
        [
            build_mirrors("a", build_entry("b.example", "c.example", "d.example")),
            build_mirrors("b", build_entry("b.example", "d.example", "c.example")),
        ],
        # The source before a mirror.
        [build_mirrors("a", build_entry("b.example", "b.example", "c.example"))],
        [build_mirrors("a", build_entry("b.example"))],
        [build_mirrors("a", build_entry("*.b.example", "localhost/ns", "A.example"))],
        [build_image_config(insecureRegistries=["b.example"], blockedRegistries=["b.example"])],
        [build_image_config(blockedRegistries=["a.example/release"])],
        [build_image_config(blockedRegistries=["b.example"]), NEVER],
        [build_mirrors("a", build_entry("a.example/os", "m.example/os", never=True))],
        [build_image_config(allowedRegistries=["a.example/os", "*.other"])],
        [build_image_config() | {"spec": {"additionalTrustedCA": {"name": "ca"}}}],
        [build_runtime(unknown=1)],
        # Wrong objects of others are reported there.
        [NEVER, build_mirrors("w", build_entry("b.example:v1", "m"))],
        [
            NEVER,
            build_mirrors("w", build_entry("*.z.example", "m.example")),
            build_image_config(blockedRegistries=["y.z.example"]),
        ],
        [
            build_mirrors("a", build_entry("b.example", "m.example")),
            build_image_config(blockedRegistries=["a.example/os"]),
        ],
    ],
)
def test_what_works_is_accepted(documents: list[Any]) -> None:
    check(*documents)


def test_image_that_a_pool_names_by_tag_is_pulled_by_digest() -> None:
    facts = sources.ClusterFacts(node_images=("a.example/os/img:stable",))
    entry = build_entry("a.example/os", "m.example/os", never=True)
    check(build_mirrors("a", entry), facts=facts)
    with pytest.raises(ConfigError, match=STRANDED):
        check(build_mirrors("a", entry, kind=TAGS), facts=facts)


def build_raw(**entry: Any) -> Any:
    return build_mirrors("a", entry)


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([build_raw(mirrors=["m.example"])], r"Mirrors\[0\].source: expected HOST"),
        ([build_raw(source="b.example/ns:v1")], r"source: expected HOST.*found 'b.example/ns:v1'"),
        ([build_raw(source="b.example/ns@sha256:00")], "source: expected HOST"),
        ([build_raw(source="https://b.example")], "source: expected HOST"),
        ([build_raw(source="b.*.example")], "source: expected HOST"),
        ([build_raw(source="b.example/NS")], "source: expected HOST"),
        ([build_raw(source="b.example\n")], "source: expected HOST"),
        ([build_raw(source="b.example", mirrors=["*.m.example"])], r"mirrors\[0\]: expected HOST"),
        ([build_raw(source="b.example", mirrors=["m.example:v1"])], r"mirrors\[0\]: expected HOST"),
        ([build_raw(source="b.example", mirrors=["m/ns"])], "with a dot or port.*found 'm/ns'"),
        ([build_raw(source="b.example", mirrors="m.example")], "mirrors: expected a list"),
        ([build_raw(source="b.example", mirror=[])], "mirror: unknown field"),
        (
            [build_raw(source="b.example", mirrorSourcePolicy="Never")],
            "expected NeverContactSource",
        ),
        (
            [build_mirrors("a", build_entry("b.example", "c.d", never=True), kind=POLICIES)],
            "mirrorSourcePolicy: unknown field",
        ),
        ([build_mirrors("a") | {"spec": {"imageTagMirrors": []}}], "did you mean"),
        ([build_mirrors("a", build_entry("b.example", "b.example"))], "mirrors beside the source"),
        (
            [build_mirrors("a", build_entry("b.example", "b.example", "m.example", never=True))],
            "mirrors beside the source, found 'b.example'",
        ),
        (
            [NEVER, build_mirrors("b", build_entry("b.example", "c.example"), kind=TAGS)],
            "expected NeverContactSource everywhere, found AllowContactingSource in ImageTag",
        ),
        (
            [
                build_mirrors(
                    "a",
                    build_entry("b.example", "m.example", never=True),
                    build_entry("b.example", "n.example"),
                )
            ],
            "found NeverContactSource in ImageDigestMirrorSet a",
        ),
        # A loop that nothing leaves.
        (
            [NEVER, build_mirrors("b", build_entry("m.example", "b.example", never=True))],
            "mirrors of b.example: expected one that is not blocked, found .*: m.example",
        ),
        (
            [NEVER, build_image_config(blockedRegistries=["m.example"])],
            "mirrors of b.example: expected one that is not blocked",
        ),
        (
            [
                build_mirrors("w", build_entry("*.z.example", "m.example")),
                build_image_config(blockedRegistries=["y.z.example"]),
            ],
            r"source \*.z.example: expected mirrors for y.z.example",
        ),
        ([build_image_config(blockedRegistries=["b.example:v1"])], r"Registries\[0\]: expected HO"),
        ([build_image_config(insecureRegistries=["b.*"])], r"insecureRegistries\[0\]: expected HO"),
        ([build_image_config(allowedRegistries=[""])], "found ''"),
        ([build_image_config(blockedRegistries=["b.example"] * 1025)], "at most 1024 entries"),
        (
            [build_image_config(containerRuntimeSearchRegistries=["b.example/ns"])],
            r"containerRuntimeSearchRegistries\[0\]: expected HOST\[:PORT\]",
        ),
        ([build_image_config(blockedRegistry=[])], "did you mean blockedRegistries"),
        ([build_image_config(name="mine")], "metadata.name: expected cluster, found mine"),
        (
            [build_image_config(allowedRegistries=["a.example"], blockedRegistries=["b.example"])],
            "allowedRegistries: expected none beside blockedRegistries, found a.example",
        ),
        ([build_image_config(blockedRegistries=["a.example/os"])], STRANDED),
        ([build_image_config(blockedRegistries=["a.example/os/img"])], STRANDED),
        (
            [
                build_image_config(blockedRegistries=["a.example/os", "m.example"]),
                build_mirrors("a", build_entry("a.example/os", "m.example/os")),
            ],
            STRANDED,
        ),
        (
            [
                build_image_config(blockedRegistries=["a.example/os"]),
                build_mirrors("a", build_entry("a.example/os", "m.example/os"), kind=TAGS),
            ],
            STRANDED,
        ),
        ([build_mirrors("a", build_entry("a.example/os/img", "m.example"))], STRANDED),
        ([build_mirrors("a", build_entry("a.example/release/img", "m.example"))], STRANDED),
        (
            [build_image_config(allowedRegistries=["a.example/release"])],
            f"expected a.example/os/img, .* found a.example/release: {STRANDED}",
        ),
    ],
)
def test_what_is_wrong_is_refused(documents: list[Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(*documents)
    error = caught.value
    if message.startswith("did you mean"):
        assert message in error.remedy
    else:
        with pytest.raises(ConfigError, match=message):
            raise error


def test_base_that_is_no_toml_is_refused() -> None:
    base = runtime_objects.build_base({CONF: "[[registry"})
    with pytest.raises(ConfigError, match="expected TOML"):
        registries.generate_registry_files(
            runtime_objects.read(build_mirrors("a")), base, sources.EMPTY_FACTS
        )


def test_long_names_cost_no_backtracking() -> None:
    began = time.process_time()
    for name in ("a" * 50_000 + "!", "a-" * 50_000, "a.b/" + "a_" * 50_000, "a.b/a" + "-" * 50_000):
        with pytest.raises(ConfigError):
            check(build_mirrors("a", build_entry("b.example", name)))
    assert time.process_time() - began < 5


def test_many_sources_take_no_quadratic_time() -> None:
    entries = [build_entry(f"a.example/{n}", f"b.example/{n}") for n in range(3000)]
    began = time.process_time()
    assert (
        len(registries.list_registries(runtime_objects.read(build_mirrors("a", *entries)), ""))
        == 3000
    )
    assert time.process_time() - began < 3


@pytest.mark.parametrize("seed", range(40))
def test_order_of_objects_changes_nothing(seed: int) -> None:
    documents = runtime_objects.make_cluster(seed)
    shuffled = Random(seed).sample(documents, len(documents))
    try:
        expected = generate(*documents)
    except ConfigError:
        return
    assert generate(*shuffled) == expected
