"""Remedies for errors of rpm-ostree, bootc and podman, in the words of these programs."""

import pytest

from treenail.host.ostree.backend_settings import find_remedy


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("reading manifest sha256:0f in quay.io/os: authentication required", "pull secret"),
        ("Switching (ostree): Insufficient free space for quay.io/os (available: 1 MB)", "space"),
        ("Switching: Switching (ostree): Truncated history", "history of its layers"),
        ("FinishPipe: corrupted blob, expecting sha256:7c", "push the image again"),
        ("something else", "see the log"),
    ],
)
def test_known_error_has_its_remedy(text: str, named: str) -> None:
    assert named in find_remedy(text, "see the log")
