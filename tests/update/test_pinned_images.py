"""Which images a node pulls and pins, and why a set is left alone."""

from dataclasses import dataclass, field

import pytest

from treenail.api import object_meta
from treenail.api.machineconfigpool import PinnedImageSet
from treenail.observations import ImageInspection, ImageLayer, InspectionProblem
from treenail.update.pinned_images import Inspection, choose_pins, find_invalid, plan_pulls

A, B, C = (f"registry.example.com/app/{name}@sha256:{name * 64}" for name in "abc")


def make_set(name: str, *images: str) -> PinnedImageSet:
    return PinnedImageSet(object_meta.ObjectMeta(name=name, generation=1), images)


def make_inspection(**layers: int) -> ImageInspection:
    return ImageInspection(layers=tuple(ImageLayer(*layer) for layer in layers.items()))


MISSING = InspectionProblem("ImageNotFound", "manifest unknown")
ONE, TWO = make_set("one", A, B), make_set("two", B, C)
SIZES: dict[str, Inspection] = {
    A: make_inspection(base=60, a=10),
    B: make_inspection(base=60, b=10),
    C: make_inspection(c=20),
}


@dataclass(frozen=True)
class Case:
    pulls: tuple[str, ...] = ()
    problems: dict[str, str] = field(default_factory=dict)
    present: frozenset[str] = frozenset()
    usable: int = 1_000_000
    inspected: dict[str, Inspection] = field(default_factory=lambda: dict(SIZES))
    sets: tuple[PinnedImageSet, ...] = (ONE, TWO)


CASES = {
    "all": Case((A, B, C)),
    "present ones need no pull": Case((C,), present=frozenset({A, B})),
    # 80 bytes of one and 20 more of two, twice.
    "a layer counts once": Case((A, B, C), usable=200),
    "what does not fit": Case((A, B), {"two": "at most 199 bytes, found 200 bytes"}, usable=199),
    "a later set that fits": Case(
        (B, C), {"one": "at most 199 bytes, found 340"}, usable=199,
        inspected={**SIZES, A: make_inspection(a=100)},
    ),
    "a full disk and nothing to pull": Case(present=frozenset({A, B, C}), usable=-1),
    "no image": Case(
        (B, C), {"one": f"spec.pinnedImages[0].name: expected an image that can be pulled, "
                 f"found {A}: ImageNotFound: manifest unknown; correct"},
        inspected={**SIZES, A: MISSING},
    ),
    "unknown sizes": Case((A, B, C), usable=0, inspected=dict.fromkeys((A, B, C))),
    "five hundred": Case(
        tuple(f"{A[:-64]}{n:064}" for n in range(500)),
        sets=(make_set("many", *(f"{A[:-64]}{n:064}" for n in range(500))),),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_pulls_are_planned_by_set(name: str) -> None:
    case = CASES[name]
    pulls, problems = plan_pulls(case.sets, case.present, case.usable, case.inspected)
    assert pulls == case.pulls
    assert problems.keys() == case.problems.keys()
    for name, words in case.problems.items():
        assert words in problems[name]


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
def test_set_with_a_name_that_no_runtime_lists_has_a_problem_alone(image: str, words: str) -> None:
    problems = find_invalid((make_set("bad", B, image), TWO))
    assert problems.keys() == ({"bad"} if words else set())
    assert words in problems.get("bad", "")
    assert problems.get("bad", "spec.pinnedImages[1].name").startswith("spec.pinnedImages[1].name")


def test_complete_sets_are_pinned_and_others_keep_their_pins() -> None:
    everything = frozenset({A, B, C})
    assert choose_pins((ONE, TWO), everything, frozenset(), {}, {}) == ((A, B, C), {})
    # What the other set still needs stays when a set goes, or loses an image.
    assert choose_pins((TWO,), everything, everything, {}, {}) == ((B, C), {})
    # A set with a problem pins nothing new, and keeps what it had.
    assert choose_pins((ONE,), everything, frozenset({B, C}), {"one": "x"}, {})[0] == (B,)
    assert choose_pins((), everything, everything, {}, {})[0] == ()


def test_set_whose_pull_failed_has_the_cause() -> None:
    pins, problems = choose_pins((ONE, TWO), frozenset({A, B}), frozenset({A}), {}, {C: "no space"})
    assert pins == (A, B)
    assert (
        f"spec.pinnedImages[1].name: expected an image that can be pulled, found {C}: no space"
        in (problems["two"])
    )
    _, problems = choose_pins((ONE,), frozenset({A}), frozenset(), {}, {B: ""})
    assert "it was removed after its pull" in problems["one"]
