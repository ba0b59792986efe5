"""The images that a Containerfile needs are known before the build; buildah answers the same."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.builder.sandboxing import needs_buildah
from tests.image import image_names
from treenail.builder.build_spec import find_images
from treenail.image.containerfile import find_containerfile_problems

BASE = "localhost/base"
REFUSED = re.compile(
    r"invalid reference format|must be lowercase|Missing ':' in substitution"
    r"|creating build container: [^/]*: image not known"
    r"|(?:COPY --from=|from=)(?P<name>\S*): no stage or image found"
)


@pytest.mark.parametrize(("text", "image"), image_names.CASES.values(), ids=image_names.CASES)
def test_images_are_known_before_the_build(text: str, image: str | None) -> None:
    problems = find_containerfile_problems(text)
    assert bool(problems) == (image is None), problems
    if image is not None:
        composed = f"FROM {BASE} AS configs\n{text}"
        expected = (image,) if image else ()
        # The arguments of FROM stand before the first one.
        heading = "".join(re.findall(r"^ARG .*\n", text.partition("FROM ")[0], re.MULTILINE))
        assert find_images(heading + composed, "amd64") == (BASE, *expected)


@pytest.mark.parametrize("architecture", ["arm64", "ppc64le", "s390x"])
def test_images_are_those_of_the_architecture(architecture: str) -> None:
    text, image = image_names.CASES["from-arch"]
    assert find_images(text, architecture) == (str(image).replace("amd64", architecture),)


@pytest.mark.process
@pytest.mark.long
@needs_buildah
@pytest.mark.parametrize(("text", "image"), image_names.CASES.values(), ids=image_names.CASES)
def test_buildah_needs_the_same_images(tmp_path: Path, text: str, image: str | None) -> None:
    """Nothing is pulled: the error of buildah names the image that it does not have."""
    if "amd64" in str(image) and os.uname().machine != "x86_64":
        pytest.skip("the images of this case are those of amd64")
    output = run_buildah(tmp_path, text)
    if image is None:
        refusal = REFUSED.search(output)
        assert refusal, output
        # buildah 1.28 looks names in COPY and RUN up before it parses them.
        name = refusal["name"]
        assert name is None or find_containerfile_problems(f"FROM {name or 'Empty'}\n")
    elif image:
        name = image if "@" not in image else re.sub(r":[^:@/]*@", "@", image)
        assert f"{name}: image not known" in output or f"{name}: no stage or image" in output
    else:
        assert "Error" not in output


def run_buildah(top: Path, text: str) -> str:
    """Build below a base from scratch; return what buildah prints."""
    (top / "context").mkdir()
    (top / "context/a").touch()
    (top / "registries.conf").write_text("unqualified-search-registries = []\n")
    heading = "".join(re.findall(r"^ARG .*\n", text.partition("FROM ")[0], re.MULTILINE))
    (top / "base").write_text("FROM scratch\nCOPY a /a\n")
    (top / "text").write_text(f"{heading}FROM {BASE} AS configs\n{text}")
    output = ""
    for file, image in (("base", BASE), ("text", "built")):
        ended = subprocess.run(
            ["buildah", "--storage-driver=vfs", f"--root={top}/root", f"--runroot={top}/run",
             "bud", "--isolation=chroot", "--pull=never", "--layers=false", f"--tag={image}",
             f"--file={top / file}", str(top / "context")],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=120,
            env={**os.environ, "CONTAINERS_REGISTRIES_CONF": f"{top}/registries.conf"},
        )  # fmt: skip
        output = ended.stdout
    return output
