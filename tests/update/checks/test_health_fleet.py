"""The boot trials of many nodes, simulated: healthy ones stay, and dead kubelets go back."""

from bench.health import create_nodes, run_fleet


def test_no_healthy_node_rolls_back_and_every_dead_kubelet_does() -> None:
    counts, rollbacks_s = run_fleet(create_nodes(100, seed=1))
    assert (counts["healthy"], counts["dead"]) == (80, 20)
    assert (counts["healthy rolled back"], counts["dead stayed"]) == (0, 0)
    assert max(rollbacks_s) <= 900.0
