"""The WAN between datacenters: one interface, three backends (`proxy`, `netns`, `none`)."""

from pdd.net.wan.backend import LinkStats, WanBackend, open_wan

__all__ = ["LinkStats", "WanBackend", "open_wan"]
