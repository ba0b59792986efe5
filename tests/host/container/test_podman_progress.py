"""How far a pull is, by podman's own words."""

from treenail.host.container.podman_progress import PodmanProgress
from treenail.host.ostree.deployments import TransactionProgress

IMAGE = "registry.example.com/os/node@sha256:" + "a" * 64
LAYERS = {f"sha256:{number:064x}": 100 for number in range(10)}
HEAD = f"Trying to pull {IMAGE}...\nGetting image source signatures\n"


def begun(count: int) -> str:
    return HEAD + "".join(f"Copying blob {digest}\n" for digest in list(LAYERS)[:count])


def test_layers_count_once_the_next_ones_have_begun() -> None:
    progress = PodmanProgress(LAYERS)
    seen = [progress.parse_output(text) for text in (HEAD, begun(6), begun(8), begun(10))]
    assert seen == [
        TransactionProgress("pulling the image", 0),
        TransactionProgress("pulling layer 6 of 10", 0),
        TransactionProgress("pulling layer 8 of 10", 20),
        TransactionProgress("pulling layer 10 of 10", 40),
    ]


def test_it_is_almost_there_when_everything_is_fetched() -> None:
    progress = PodmanProgress(LAYERS)
    told = begun(10) + "Copying config sha256:" + "b" * 64 + "\n"
    assert progress.parse_output(told).percent == 99


def test_a_podman_that_says_how_much_it_has_read_is_believed() -> None:
    sizes = dict.fromkeys(LAYERS, 100 * 2**20)
    progress = PodmanProgress(sizes)
    told = begun(6) + "Progress: 20.0MiB / 600.0MiB\nProgress: 0.5GiB / 0.6GiB\n"
    assert progress.parse_output(told).percent == 51
    assert progress.parse_output(begun(6)).percent == 51, "it fell"


def test_without_the_manifest_there_is_no_percentage() -> None:
    progress = PodmanProgress({})
    assert progress.parse_output(begun(3)) == TransactionProgress("pulling layer 3", None)


def test_a_layer_that_comes_twice_counts_once() -> None:
    progress = PodmanProgress(LAYERS)
    assert progress.parse_output(begun(8) + begun(8)).percent == 20
