"""Names of treenail's own objects in a cluster, and of a neighbour's."""

PART_OF_LABELS = {"app.kubernetes.io/part-of": "treenail"}
"""Labels of every object that treenail creates; ``uninstall`` finds them by it."""

HOSTED_ROLLOUTS = "treenail-rollouts"
"""ConfigMap in the namespace of a hosted control plane, with the records of its rollouts."""

CONTROLLER = "treenail-controller"
"""Deployment, Lease, ServiceAccount and source of Events of the controllers."""
NAMESPACE = "treenail"
"""Namespace of the controllers and of builds, unless the user names another."""
IGNITION_SERVER = "treenail-ignition"
"""DaemonSet, ServiceAccount, namespace and source of Events of the Ignition server."""
MCO_NAMESPACE = "openshift-machine-config-operator"
"""Namespace of the Machine Config Operator."""
MCO_CONTROLLER = "machine-config-controller"
"""Deployment of its controllers."""
