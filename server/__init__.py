"""The server: HTTP, text and metrics; everything a client can see."""

__version__ = "0.1.0"
