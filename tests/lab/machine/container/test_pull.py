"""Pulls, and the search for the machine's credential."""

import base64
import json
from dataclasses import replace
from pathlib import Path

import pytest

from treenail_lab import images
from treenail_lab.images import Credential, Image, ImageCatalogue, make_image
from treenail_lab.machine.container.pull import (
    canonicalize_refspec,
    find_credential,
    open_image,
    pull_image,
    resolve_below,
)
from treenail_lab.machine.ostree.steps import OperationError, PauseWork
from treenail_lab.machine.ostree.sysroot import Sysroot
from treenail_lab.machine.settings import MachineSettings

SECRET = Credential("node", "s3cret")
OPEN = make_image("os/node", "41.1", 1000)
CLOSED = replace(make_image("os/closed", "41.1", 1000), credential=SECRET)
CATALOGUE = ImageCatalogue((OPEN, CLOSED))


def write_auth(path: Path, entries: dict[str, Credential]) -> None:
    encoded = {
        name: {"auth": base64.b64encode(f"{c.username}:{c.password}".encode()).decode()}
        for name, c in entries.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"auths": encoded}))


def test_open_image_needs_no_credential(tmp_path: Path) -> None:
    assert open_image(OPEN.pull_spec, CATALOGUE, tmp_path) == OPEN


def test_closed_image_is_refused_without_a_credential(tmp_path: Path) -> None:
    with pytest.raises(OperationError, match="unauthorized: authentication required"):
        open_image(CLOSED.pull_spec, CATALOGUE, tmp_path)


def test_closed_image_is_refused_with_a_wrong_credential(tmp_path: Path) -> None:
    write_auth(tmp_path / "run/ostree/auth.json", {CLOSED.registry: Credential("node", "old")})
    with pytest.raises(OperationError, match="invalid username/password: unauthorized"):
        open_image(CLOSED.pull_spec, CATALOGUE, tmp_path)


def test_closed_image_with_right_credential_is_opened(tmp_path: Path) -> None:
    write_auth(tmp_path / "etc/ostree/auth.json", {CLOSED.registry: SECRET})
    assert open_image(CLOSED.pull_spec, CATALOGUE, tmp_path) == CLOSED


def test_missing_image_is_manifest_unknown(tmp_path: Path) -> None:
    with pytest.raises(OperationError, match=r"reading manifest sha256:0 in .*: manifest unknown"):
        open_image(f"{OPEN.registry}/os/node@sha256:0", ImageCatalogue((OPEN,)), tmp_path)


def test_missing_image_without_credential_is_unauthorized(tmp_path: Path) -> None:
    with pytest.raises(OperationError, match="unauthorized"):
        open_image(f"{OPEN.registry}/os/other@sha256:0", CATALOGUE, tmp_path)


def test_first_credential_file_wins_and_nothing_is_merged(tmp_path: Path) -> None:
    write_auth(tmp_path / "run/ostree/auth.json", {"other.example": SECRET})
    write_auth(tmp_path / "etc/ostree/auth.json", {CLOSED.registry: SECRET})
    assert find_credential(f"{CLOSED.registry}/os/closed", tmp_path) is None


def test_dangling_link_counts_as_no_file(tmp_path: Path) -> None:
    link = tmp_path / "run/ostree/auth.json"
    link.parent.mkdir(parents=True)
    link.symlink_to("/var/lib/treenail/auth.json")
    write_auth(tmp_path / "etc/ostree/auth.json", {CLOSED.registry: SECRET})
    assert find_credential(CLOSED.registry, tmp_path) == SECRET


def test_absolute_link_is_followed_within_the_root(tmp_path: Path) -> None:
    link = tmp_path / "run/ostree/auth.json"
    link.parent.mkdir(parents=True)
    link.symlink_to("/var/lib/treenail/auth.json")
    write_auth(tmp_path / "var/lib/treenail/auth.json", {CLOSED.registry: SECRET})
    assert find_credential(CLOSED.registry, tmp_path) == SECRET


def test_link_is_never_followed_out_of_root(tmp_path: Path) -> None:
    (tmp_path / "up").symlink_to("../../../../etc")
    assert resolve_below(tmp_path, "up/passwd") == tmp_path / "etc/passwd"


def test_link_loop_counts_as_no_file(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    assert resolve_below(tmp_path, "a") is None


def test_entry_for_repository_precedes_entry_for_registry(tmp_path: Path) -> None:
    other = Credential("other", "x")
    entries = {"r.example": other, "r.example/os": SECRET}
    write_auth(tmp_path / "run/ostree/auth.json", entries)
    assert find_credential("r.example/os/closed", tmp_path) == SECRET
    assert find_credential("r.example/tools", tmp_path) == other


def test_auth_file_without_json_fails_pull(tmp_path: Path) -> None:
    path = tmp_path / "run/ostree/auth.json"
    path.parent.mkdir(parents=True)
    path.write_text("{")
    with pytest.raises(OperationError, match="unmarshaling JSON"):
        open_image(OPEN.pull_spec, CATALOGUE, tmp_path)


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("ostree-unverified-registry:r/a", "ostree-unverified-registry:r/a"),
        ("ostree-unverified-image:docker://r/a", "ostree-unverified-registry:r/a"),
        ("ostree-unverified-image:registry:r/a", "ostree-unverified-registry:r/a"),
        ("ostree-image-signed:docker://r/a", "ostree-image-signed:docker://r/a"),
    ],
)
def test_refspec_is_shown_in_its_short_form(given: str, shown: str) -> None:
    assert canonicalize_refspec(given) == shown


def test_refspec_of_a_remote_that_is_not_configured_is_refused() -> None:
    with pytest.raises(OperationError, match='Remote "fedora" not found'):
        canonicalize_refspec("fedora:fedora/x86_64/coreos/stable")


def seconds_of_pull(image: Image, root: Path) -> float:
    catalogue = root / "images.json"
    images.save_catalogue(ImageCatalogue((image,)), catalogue)
    steps = pull_image(
        f"ostree-unverified-registry:{image.pull_spec}",
        root=root,
        sysroot=Sysroot(root),
        catalogue=catalogue,
        settings=lambda: MachineSettings(pull_bytes_per_s=1e6),
    )
    return sum(step.seconds for step in steps if isinstance(step, PauseWork))


def test_ten_times_larger_image_takes_ten_times_longer(tmp_path: Path) -> None:
    small, large = (make_image("os/node", "41.1", size) for size in (2_000_000, 20_000_000))
    assert seconds_of_pull(small, tmp_path) == pytest.approx(2.0)
    assert seconds_of_pull(large, tmp_path) == pytest.approx(20.0)


def test_imported_layers_take_no_time(tmp_path: Path) -> None:
    image = make_image("os/node", "41.1", 2_000_000)
    Sysroot(tmp_path).import_layer(image.layers[0].digest)
    assert seconds_of_pull(image, tmp_path) == pytest.approx(1.5)
