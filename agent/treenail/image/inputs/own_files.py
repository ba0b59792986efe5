"""Names of treenail's own files in the context of a build."""

OWN_PREFIX = ".treenail-"
"""Names of our own files in the context begin with this."""
