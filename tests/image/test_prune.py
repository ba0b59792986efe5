"""Pruning: nothing that anything refers to by digest is ever deleted."""

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from treenail.image.oci.prune import (
    StoredImage,
    collect_references,
    find_digests,
    plan_pruning,
)


def digest(name: object) -> str:
    return f"sha256:{hashlib.sha256(str(name).encode()).hexdigest()}"


def built(name: str, *tags: str, instances: tuple[str, ...] = ()) -> StoredImage:
    return StoredImage(digest(name), tags or (name,), name, instances)


OLD, NEW, CURRENT = built("build-1"), built("build-2"), built("build-3")


def test_image_without_a_reference_is_deleted() -> None:
    references = collect_references([("Node worker-0", {"a": f"quay.io/os@{CURRENT.digest}"})])
    plan = plan_pruning([OLD, NEW, CURRENT], references, [NEW.digest])
    assert plan.deleted == (OLD,)
    assert plan.kept == {
        NEW.digest: "it is a previous image",
        CURRENT.digest: "Node worker-0 refers to it",
    }


def test_digest_in_any_text_of_an_object_is_a_reference() -> None:
    document = {
        "metadata": {"annotations": {"x": f"a@{digest(1)},b@{digest(2)}"}},
        "status": {"conditions": [{"message": f"pulling {digest(3)}"}]},
        digest(4): 5,
    }
    assert set(find_digests(document)) == {digest(number) for number in (1, 2, 3, 4)}
    assert set(find_digests({"a": "sha256:12", "b": None})) == set()


def test_digest_that_two_builds_share_is_counted_once() -> None:
    # Equal inputs give equal digests: one manifest with the tags of both builds.
    shared = StoredImage(digest("same"), ("build-1", "build-2"), "build-2")
    assert plan_pruning([shared], {}, []).kept == {shared.digest: "it has the tag build-1"}


def test_image_of_another_builder_and_tagged_image_stay() -> None:
    foreign = StoredImage(digest("foreign"), ("latest",))
    tagged = built("build-1", "build-1", "release")
    plan = plan_pruning([foreign, tagged], {}, [])
    assert plan.deleted == ()
    assert plan.kept == {
        foreign.digest: "treenail did not build it",
        tagged.digest: "it has the tag release",
    }


def test_list_stays_while_a_node_has_one_of_its_instances() -> None:
    amd = StoredImage(digest("amd"), (), "build-1")
    arm = StoredImage(digest("arm"), (), "build-1")
    listed = built("build-1", instances=(amd.digest, arm.digest))
    plan = plan_pruning([listed, amd, arm], {arm.digest: "Node worker-0"}, [])
    assert plan.deleted == ()
    assert plan_pruning([amd, listed, arm], {}, []).deleted[0] == listed
    assert len(plan_pruning([amd, listed, arm], {}, []).deleted) == 3


def test_instance_that_a_kept_list_names_stays() -> None:
    amd = StoredImage(digest("amd"), (), "build-1")
    first = built("build-1", instances=(amd.digest,))
    second = built("build-2", instances=(amd.digest,))
    plan = plan_pruning([first, second, amd], {second.digest: "Node worker-0"}, [])
    assert plan.deleted == (first,)


NAMES = st.integers(0, 12).map(str)


@given(
    st.lists(
        st.tuples(NAMES, st.lists(NAMES, max_size=3), st.booleans(), st.lists(NAMES, max_size=3)),
        max_size=12,
    ),
    st.lists(NAMES, max_size=4),
)
def test_no_referenced_image_and_no_part_of_one_is_deleted(
    drawn: list[tuple[str, list[str], bool, list[str]]], referenced: list[str]
) -> None:
    images = [
        StoredImage(
            digest(name), tuple(tags), name if is_own else "", tuple(map(digest, instances))
        )
        for name, tags, is_own, instances in {each[0]: each for each in drawn}.values()
    ]
    references = {digest(name): "Node" for name in referenced}
    plan = plan_pruning(images, references, [])
    gone = {image.digest for image in plan.deleted}
    assert not gone & references.keys()
    assert gone | plan.kept.keys() >= {image.digest for image in images}
    for image in images:
        if image.digest not in gone:
            assert not gone & set(image.instances)
        else:
            assert image.build
            assert not references.keys() & set(image.instances)
