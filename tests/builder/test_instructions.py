"""Images and step lines of Containerfiles."""

import pytest

from treenail.builder.build_spec import find_images, find_step_lines


@pytest.mark.parametrize(
    ("text", "images"),
    [
        ("FROM a.io/b:1 AS x\nFROM x\nFROM 0\n", ("a.io/b:1",)),
        ("ARG TAG=1\nFROM a.io/b:${TAG}\nFROM a.io/c:${OTHER:-2}\n", ("a.io/b:1", "a.io/c:2")),
        ("FROM scratch AS X\nCOPY --from=X /a /b\nCOPY --from=a.io/d:1 /a /b\n", ("a.io/d:1",)),
        ("FROM scratch\nRUN --mount=type=bind,from=a.io/e:1,target=/e true\n", ("a.io/e:1",)),
        ("FROM --platform=linux/amd64 a.io/b:1\nRUN true --from=no\n", ("a.io/b:1",)),
        ("FROM later\nFROM scratch AS later\n", ("later",)),
    ],
)
def test_images_of_text_leave_out_stages(text: str, images: tuple[str, ...]) -> None:
    assert find_images(text, "amd64") == images


def test_step_lines_count_stages_and_instructions() -> None:
    text = "ARG A=1\n\nFROM scratch AS x\n# comment\nRUN a \\\n  && b\nFROM x\nCOPY a b\n"
    assert find_step_lines(text) == {(1, 1): 3, (1, 2): 5, (2, 1): 7, (2, 2): 8}
