"""Why the images of a set are not pulled, and which images a node pins."""

import pytest

from treenail.api import object_meta
from treenail.api.machineconfigpool import PinnedImageSet
from treenail.observations import ImageInspection, ImageLayer, InspectionProblem
from treenail.update.pinned_images import Inspection, choose_pins, find_invalid, find_obstacle

A, B, C = (f"registry.example.com/app/{name}@sha256:{name * 64}" for name in "abc")


def make_set(name: str, *images: str) -> PinnedImageSet:
    return PinnedImageSet(object_meta.ObjectMeta(name=name, generation=1), images)


def make_inspection(**layers: int) -> ImageInspection:
    return ImageInspection(layers=tuple(ImageLayer(*layer) for layer in layers.items()))


IMAGE_TEXT = "spec.pinnedImages[1].name: expected an image that can be pulled, found"
MISSING = InspectionProblem("ImageNotFound", "manifest unknown")
ONE, TWO = make_set("one", A, B), make_set("two", B, C)
SHARED: dict[str, Inspection] = {
    A: make_inspection(base=60, a=10),
    B: make_inspection(base=60, b=10),
}
CASES: dict[str, tuple[dict[str, Inspection], int, str]] = {
    # 80 bytes, unpacked twice as many: a layer counts once.
    "fits": (SHARED, 160, ""),
    "too large": (SHARED, 159, "spec.pinnedImages: expected at most 159 bytes to pull, found 160 "),
    "full disk": (SHARED, -1, "spec.pinnedImages: expected at most 0 bytes to pull, found 160 "),
    "present ones need no space": ({B: SHARED[B]}, 140, ""),
    "unknown sizes": ({A: None, B: None}, 0, ""),
    "no image": (
        {A: None, B: MISSING},
        1000,
        f"{IMAGE_TEXT} {B}: ImageNotFound: manifest unknown; correct",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_obstacle_of_a_set_is_named(name: str) -> None:
    missing, usable_bytes, expected = CASES[name]
    obstacle = find_obstacle(ONE, missing, usable_bytes)
    assert obstacle.startswith(expected)
    assert bool(obstacle) == bool(expected)


def test_complete_sets_are_pinned_and_others_keep_their_pins() -> None:
    both, everything = [(ONE, ""), (TWO, "")], frozenset({A, B, C})
    assert choose_pins(both, everything, frozenset(), {}) == ([A, B, C], {})
    # What the other set still needs stays when a set goes, or loses an image.
    assert choose_pins([(TWO, "")], everything, everything, {}) == ([B, C], {})
    # A set with a problem pins nothing new, and keeps what it had.
    problem = {"one": "x"}
    assert choose_pins([(ONE, "x")], everything, frozenset({B, C}), {}) == ([B], problem)
    assert choose_pins([], everything, everything, {})[0] == []


def test_set_whose_pull_failed_has_the_cause() -> None:
    both, present = [(ONE, ""), (TWO, "")], frozenset({A, B})
    pins, problems = choose_pins(both, present, frozenset({A}), {C: "no space", A: ""})
    assert pins == [A, B]
    assert problems.keys() == {"two"}
    assert f"{IMAGE_TEXT} {C}: no space" in problems["two"]
    _, problems = choose_pins([(ONE, "")], frozenset({A}), frozenset(), {B: ""})
    assert "it was removed after its pull" in problems["one"]


@pytest.mark.parametrize(
    ("image", "words"),
    [
        (A, ""),
        (A.replace("app", "App"), "not made of lower-case path components"),
        (f"-{A}", "does not start with a registry host"),
        (A.replace("app", "--auth=x"), "not made of lower-case path components"),
        (A.replace("registry.example.com/app/", "docker.io/"), "expected docker.io/library/a@…"),
        (A.replace("registry.example.com/app/", "docker.io/library/"), ""),
    ],
)
def test_name_that_no_runtime_lists_is_a_problem_of_its_set(image: str, words: str) -> None:
    problem = find_invalid(make_set("bad", B, image))
    assert bool(problem) == bool(words)
    assert words in problem
    assert (problem or "spec.pinnedImages[1].name").startswith("spec.pinnedImages[1].name")
    assert find_invalid(TWO) == ""
