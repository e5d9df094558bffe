"""The playground at `GET /`."""

from slipstream.serve.page.routes import page_routes

__all__ = ["page_routes"]
