"""The two versions: of the package (for people) and of the protocol (for peers)."""

PACKAGE_VERSION = "0.1.0"

# A peer of a newer minor version is understood; of another major version it is refused.
PROTOCOL_MAJOR = 2
PROTOCOL_MINOR = 0
