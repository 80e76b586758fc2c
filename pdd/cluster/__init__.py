"""Place, start, supervise and stop the roles, and talk to them as a client."""

from pdd.cluster.cluster import Cluster
from pdd.cluster.handle import Handle

__all__ = ["Cluster", "Handle"]
