"""The playground that `GET /` shows: its files, and the routes that serve them."""

from slipstream.serve.page.routes import page_routes

__all__ = ["page_routes"]
